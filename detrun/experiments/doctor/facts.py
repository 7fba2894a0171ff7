"""What doctor makes of the signals that its job got: held against what detrun's interruptions rest on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from detrun.experiments.doctor.here import leading_number, seconds
from detrun.launch.probe_signals import Fact
from detrun.report.doctor_screen import Check


@dataclass(frozen=True)
class Expected:
    """Signals that each is to get at least and at most, and what does not work as described where it is otherwise."""

    batch: frozenset[str]
    step: frozenset[str]
    remedy: str
    may: frozenset[str] = frozenset({"CONT"})


_FAQ = "kinds of interruption that detrun does itself (kill, signal, stop) do not need it"
EXPECTED: Mapping[str, Expected] = {
    "scancel -s USR1 JOB": Expected(
        frozenset(), frozenset({"USR1"}), f"a program that saves on a signal of Slurm's may not get it here; {_FAQ}"
    ),
    "scancel -b -s USR2 JOB": Expected(
        frozenset({"USR2"}), frozenset(), f"slurm's --signal=B: reaches more than the batch shell here; {_FAQ}"
    ),
    "scancel -s TERM JOB.STEP": Expected(
        frozenset(), frozenset({"TERM"}), f"one step cannot be told apart from its job here; {_FAQ}"
    ),
    "scancel -s KILL JOB.STEP": Expected(
        frozenset(), frozenset({"KILL"}), "placement: pinned, which has a job an arm, in place of allocation"
    ),
    "scontrol requeue JOB": Expected(
        frozenset({"TERM"}), frozenset({"TERM"}), "interrupt with kind: kill or signal in place of requeue"
    ),
    "scancel JOB": Expected(
        frozenset({"TERM"}),
        frozenset({"TERM"}),
        "a cancelled program is not told to save; interrupt with kind: signal",
    ),
}


def check_facts(facts: Sequence[Fact], settings: Mapping[str, str]) -> list[Check]:
    """A check a fact, in the order they were tried."""
    wait = leading_number(settings.get("KillWait"))
    return [_delay(fact) if fact.command == "requeue delay" else _signals(fact, wait) for fact in facts]


def _signals(fact: Fact, kill_wait: float | None) -> Check:
    if fact.batch is None or fact.step is None:
        return Check(fact.command, "warn" if fact.refused else "unknown", fact.why, _remedy_of(fact))
    expected = EXPECTED[fact.command]
    parts = [f"batch shell: {_words(fact.batch)}", f"ranks: {_words(fact.step)}"]
    figures = {}
    if fact.command in ("scontrol requeue JOB", "scancel JOB") and fact.seconds is not None:
        limit = f" (KillWait {kill_wait:g} s)" if kill_wait is not None else ""
        parts.append(f"killed {seconds(fact.seconds)} after TERM{limit}")
        figures = {"kill_seconds": fact.seconds}
    elif fact.seconds is not None:
        parts.append(f"the next step ran {seconds(fact.seconds)} later")
        figures = {"next_step_seconds": fact.seconds}
    if fact.extra:
        parts.append(fact.extra)
    as_told = all(
        least <= set(heard) <= least | expected.may
        for least, heard in ((expected.batch, fact.batch), (expected.step, fact.step))
    )
    if as_told and "did not start" not in fact.extra:
        return Check(fact.command, "ok", "; ".join(parts), figures=figures)
    return Check(fact.command, "warn", "; ".join(parts), _remedy_of(fact), figures)


def _delay(fact: Fact) -> Check:
    figures = {} if fact.seconds is None else {"seconds": fact.seconds}
    waits = "" if fact.seconds is None else f"a requeued job is held for {fact.seconds:.0f} s; "
    if fact.why:
        remedy = "interrupt with kind: kill or signal in place of requeue"
        return Check(fact.command, "warn" if fact.refused else "unknown", f"{waits}{fact.why}", remedy, figures)
    return Check(fact.command, "ok", f"{waits}{fact.extra}", figures=figures)


def _remedy_of(fact: Fact) -> str:
    expected = EXPECTED.get(fact.command)
    return expected.remedy if expected else _FAQ


def _words(signals: Sequence[str]) -> str:
    return ", ".join(signals) if signals else "nothing"
