"""What a restore did and did not bring back: findings, a table, one culprit. From an attempt's evidence alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from detrun.compare.culprit import Suspect, suspects
from detrun.compare.folding import ranks_in_words
from detrun.compare.resume_evidence import AttemptEvidence
from detrun.compare.state import GroupTally, RowDifference, split_state
from detrun.compare.streams import BATCH
from detrun.records.files import one_line
from detrun.records.state_row import StateRow
from detrun.records.verdict import Finding

MAX_NAMES = 3
MAX_EVIDENCE = 40

_DIGESTED = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "hyperparameters": "optimizer",
}
"""Components of which every step's record has a digest too, and under which name. That of the gradients is taken as the
optimizer uses them."""


def state_findings(attempt: AttemptEvidence, ranks: int) -> list[Finding]:
    """One finding a component that was not restored, likeliest culprit first; then what may have to do with it."""
    restored = attempt.restored
    if restored is None:
        return []
    differences, late, explaining = divided(attempt)
    found = suspects_of(attempt)
    findings = [_of_suspect(suspect, attempt, ranks) for suspect in found]
    if late:
        names = _names(late)
        what = f"{names}: not yet restored when the first step began, and equal by its end ({_who(late, ranks)})"
        where: dict[str, Any] = {"arm": attempt.arm.id, "step": restored.position.step}
        findings.append(Finding(kind="restored-late", severity="info", where=where, what=what))
    incomparable = [d for d in restored.differences if d.kind == "incomparable"]
    if incomparable:
        what = (
            f"{_names(incomparable)}: digests of different algorithms cannot be compared ({_who(incomparable, ranks)})"
        )
        findings.append(Finding(kind="state", severity="not-verified", what=what))
    rest = [d for d in explaining if not any(d in suspect.differences for suspect in found)]
    if rest and (differences or attempt.pair.streams.streams):
        findings.append(_explaining(rest, attempt, ranks))
    lost = [d for d in restored.differences if d.component == "local" and d.kind != "incomparable"]
    lost += [d for d in restored.explaining if _is_idle_stream(d)]
    if lost and not differences and not attempt.pair.streams.streams:
        findings.append(_idle(lost, attempt, ranks))
    return findings


def _is_idle_stream(difference: RowDifference) -> bool:
    """A named stream from which neither run had drawn."""
    rows = [row for row in (difference.a, difference.b) if row is not None]
    return difference.component == "rng" and all(row.info.get("idle") is True for row in rows)


def suspects_of(attempt: AttemptEvidence) -> list[Suspect]:
    """All that the restore is to be blamed for, likeliest first."""
    differences, _, explaining = divided(attempt)
    explaining = explaining if _parted(attempt) else []
    return suspects(differences, attempt.batch_offsets, explaining, data_first=bool(given_other_data(attempt)))


def given_other_data(attempt: AttemptEvidence) -> list[int]:
    """The ranks that, in the first step that differs at all, were given other data."""
    streams = attempt.pair.streams.streams.values()
    first = min((tally.first_step for tally in streams), default=None)
    return sorted({r for t in streams if t.stream.kind == BATCH and t.first_step == first for r in t.ranks})


def _parted(attempt: AttemptEvidence) -> bool:
    return bool(attempt.pair.streams.streams)


def _idle(differences: Sequence[RowDifference], attempt: AttemptEvidence, ranks: int) -> Finding:
    what = (
        f"{_names(differences)} came back different ({_who(differences, ranks)}), and nothing recorded depended on it"
    )
    where: dict[str, Any] = {"arm": attempt.arm.id, "attempt": attempt.number}
    details = {"differences": [_evidence(d) for d in differences[:MAX_EVIDENCE]]}
    return Finding(kind="lost-variable", severity="warning", where=where, what=what, evidence=details)


def divided(attempt: AttemptEvidence) -> tuple[list[RowDifference], list[RowDifference], list[RowDifference]]:
    """Differences that count; those that the run made up for before they could have an effect (every later digest of
    the same component, and everything else, is the reference's); and those that may only explain others.

    What a step makes anew is told from what was lost by its being equal one step later. Where the run has parted for
    another reason it no longer is, and tells nothing; a generator that is seeded anew still does. A variable that was
    lost, and on which nothing that was recorded depended, is no divergence of the training.
    """
    restored = attempt.restored
    assert restored is not None
    found = [difference for difference in restored.differences if difference.kind != "incomparable"]
    explaining = list(restored.explaining)
    firm = [difference for difference in found if difference.standing == "hard" or difference.component == "rng"]
    idle = not attempt.pair.streams.streams and all(difference.component == "local" for difference in found)
    if firm or idle:
        explaining += [difference for difference in found if difference not in firm]
        found = firm
    first = restored.position.step + 1
    if attempt.pair.streams.streams or first not in attempt.pair.streams.compared:
        return found, [], explaining
    digested = {name for survey in attempt.arm.surveys for name in survey.components}
    late = [d for d in found if _DIGESTED.get(d.component) in digested and d.component != "buffers"]
    return [difference for difference in found if difference not in late], late, explaining


def _of_suspect(suspect: Suspect, attempt: AttemptEvidence, ranks: int) -> Finding:
    restored = attempt.restored
    assert restored is not None
    differences = suspect.differences
    on = suspect.ranks
    verb = "was not restored" if suspect.component != "batch" else "differs"
    name = called(suspect)
    if suspect.component not in ("batch", "loader") and len({d.name for d in differences}) > 1:
        verb = verb.replace("was", "were")
    if not suspect.firm:
        verb = "came back different, and nothing else did"
    details = [text for text in (_extent(suspect), *_clues(suspect, attempt, ranks)) if text]
    what = f"{name} {verb} ({ranks_in_words(on, ranks)})"
    if details:
        what += f": {'; '.join(details)}"
    missing_only = all(d.kind == "missing" for d in differences)
    found_by_walk = suspect.component in ("rng", "ema", "local")
    quiet = not attempt.pair.streams.streams
    severity = "not-verified" if missing_only and found_by_walk and quiet else "divergence"
    return Finding(
        kind="restore",
        severity=severity,  # type: ignore[arg-type]
        where={
            "arm": attempt.arm.id,
            "arms": attempt.pair.arms,
            "attempt": attempt.number,
            "ranks": on,
            "step": restored.position.step,
            "boundary": restored.position.begin,
            "component": suspect.component,
        },
        what=what,
        evidence={
            "name": name,
            "kind": suspect.blame.kind,
            "fix": fix_of(suspect),
            "differences": [_evidence(d) for d in differences[:MAX_EVIDENCE]],
            "count": len(differences),
        },
    )


def fix_of(suspect: Suspect) -> str:
    """What to do; where the checkpoint holds what was lost, it is the loading that goes wrong."""
    saved = bool(suspect.differences) and all(difference.saved for difference in suspect.differences)
    return f"the checkpoint holds it, so look at how it is loaded: {suspect.blame.fix}" if saved else suspect.blame.fix


_ONE = {
    "parameters": "parameter",
    "buffers": "buffer",
    "gradients": "gradient",
    "hyperparameters": "hyperparameter",
    "module-state": "attribute",
    "local": "variable",
    "loader": "",
    "ema": "average",
    "rng": "RNG stream",
}


def called(suspect: Suspect) -> str:
    """How a suspect is named: `exp_avg_sq of layers.2.weight`, `numpy's RNG stream`, `layers.0.amax_history`."""
    names = list(dict.fromkeys(d.name for d in suspect.differences))
    if suspect.component == "rng":
        return f"the RNG {'stream' if len(names) == 1 else 'streams'} {_listed(names)}"
    if suspect.component == "optimizer":
        keys = list(dict.fromkeys(split_state(name)[1] for name in names))
        owners = list(dict.fromkeys(split_state(name)[0] for name in names))
        return f"the optimizer's {_listed(keys, 6)} of {_listed(owners)}"
    if suspect.component == "precision":
        return _low_precision(suspect)
    if suspect.component == "batch":
        names = [name for name in names if name != "batch"]
        return f"the input data ({_listed(names)})" if names else "the input data"
    if suspect.component == "loader":
        streams = list(dict.fromkeys(d.name for d in suspect.differences if d.component == "rng"))
        return f"the data loader's position ({_listed(streams)} too)" if streams else "the data loader's position"
    word = {
        "parameters": "parameter",
        "buffers": "buffer",
        "gradients": "gradient",
        "hyperparameters": "hyperparameter",
        "ema": "the averaged weights",
        "module-state": "module state",
        "local": "variable",
    }.get(suspect.component, suspect.component)
    if word.endswith(("r", "t")) and len(names) > 1 and suspect.component != "ema":
        word += "s"
    return f"{word} {_listed(names)}"


def _low_precision(suspect: Suspect) -> str:
    """`low-precision weights layers.0.weight and layers.1.weight (qdata, scale)`."""
    names = list(dict.fromkeys(d.key[1] for d in suspect.differences if "scale" not in d.key[1].rpartition(".")[2]))
    parts = list(dict.fromkeys(d.key[2] or d.key[1].rpartition(".")[2] for d in suspect.differences))
    word = "low-precision weight" if len(names) == 1 else "low-precision weights"
    return f"{word} {_listed(names)} ({', '.join(parts[:6])})"


def _listed(names: Sequence[str], most: int = MAX_NAMES) -> str:
    shown = [one_line(name, 80) for name in names[:most]]
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _extent(suspect: Suspect) -> str:
    counted = [d for d in suspect.differences if d.differing is not None]
    if not counted or suspect.component in ("batch", "loader"):
        return ""
    elements = sum(d.differing or 0 for d in counted)
    total = sum(d.row.elements for d in counted)
    ulps = [d.ulp for d in counted if d.ulp is not None]
    apart = f", up to {max(ulps):,} ULP" if ulps else ""
    return f"{elements:,} of {total:,} elements differ{apart}"


def _clues(suspect: Suspect, attempt: AttemptEvidence, ranks: int) -> list[str]:
    """What is known of why, as short sentences."""
    differences = suspect.differences
    clues: list[str] = []
    if suspect.component == "precision":
        clues.append("the full-precision weights are equal, so they were rebuilt along another conversion path")
    if all(d.kind == "missing" for d in differences):
        clues.append("nothing is there after the restore")
    elif all(d.kind == "extra" for d in differences):
        clues.append("it is there after the restore alone")
    values = [d for d in differences if d.a and d.b and d.a.value is not None and d.b.value is not None]
    if values and (len(differences) <= MAX_NAMES or suspect.component == "loader"):
        clues += [
            f"{one_line(d.name, 60)} is {one_line(_value(d.b), 40)} instead of {one_line(_value(d.a), 40)}"
            for d in values[:2]
        ]
    if all(d.at_start for d in differences):
        clues.append("at its state of the very first step: nothing loaded it")
    # A stream that is some draws behind may happen to stand where another rank's does.
    wrong = sorted({d.from_rank for d in differences if d.from_rank is not None and d.ahead is None})
    if wrong:
        clues.append(f"it is the state of {ranks_in_words(wrong)}")
    draws = sorted({d.ahead for d in differences if d.ahead})
    if draws and suspect.component == "rng" and not all(d.at_start for d in differences) and not wrong:
        shown = draws[0] if len(draws) == 1 else draws[-1]
        clues.append(f"{abs(shown):,} draw{'s' if abs(shown) > 1 else ''} {'ahead' if shown > 0 else 'behind'}")
    if suspect.component in ("batch", "loader"):
        clues += _offset(attempt, ranks)
    saved = {d.saved for d in differences}
    if saved == {False}:
        clues.append("it is not in the checkpoint")
    elif saved == {True}:
        clues.append("the checkpoint holds it")
    return clues


def _offset(attempt: AttemptEvidence, ranks: int) -> list[str]:
    restored = attempt.restored
    if not attempt.batch_offsets or restored is None:
        return ["its first batch is none of the reference's"]
    by_offset: dict[int, list[int]] = {}
    for rank, offset in attempt.batch_offsets.items():
        by_offset.setdefault(offset, []).append(rank)
    clues = []
    begin = restored.position.step + 1
    for offset, on in sorted(by_offset.items()):
        which = f"step {begin + offset}"
        if begin + offset == 1:
            text = f"the loader starts again: its first batch is that of step 1, {-offset} steps behind"
        else:
            steps = f"{abs(offset)} step{'s' if abs(offset) > 1 else ''}"
            text = f"its first batch is that of {which}, {steps} {'ahead' if offset > 0 else 'behind'}"
        clues.append(text if len(by_offset) == 1 else f"{text} ({ranks_in_words(on, ranks)})")
    return clues


def _value(row: StateRow | None) -> str:
    if row is None or row.value is None:
        return "nothing"
    try:
        return repr(float.fromhex(row.value)) if "0x" in row.value else row.value
    except ValueError:
        return row.value


def _evidence(difference: RowDifference) -> dict[str, Any]:
    a, b = difference.a, difference.b
    return {
        "component": difference.component,
        "name": difference.name,
        "rank": difference.rank,
        "kind": difference.kind,
        "a": (a.digest or a.value) if a else None,
        "b": (b.digest or b.value) if b else None,
        "dtype": difference.row.dtype,
        "elements": difference.row.elements,
        "differing_elements": difference.differing,
        "ulp": difference.ulp,
        "draws_ahead": difference.ahead,
        "from_rank": difference.from_rank,
        "at_start": difference.at_start,
        "in_checkpoint": difference.saved,
    }


def _names(differences: Sequence[RowDifference]) -> str:
    return _listed(list(dict.fromkeys(f"{_ONE.get(d.component, d.component)} {d.name}".strip() for d in differences)))


def _who(differences: Sequence[RowDifference], ranks: int) -> str:
    return ranks_in_words({d.rank for d in differences}, ranks)


def _explaining(differences: Sequence[RowDifference], attempt: AttemptEvidence, ranks: int) -> Finding:
    what = f"may have to do with it: {_names(differences)} also differ ({_who(differences, ranks)})"
    where: dict[str, Any] = {"arm": attempt.arm.id, "attempt": attempt.number}
    details = {"differences": [_evidence(d) for d in differences[:MAX_EVIDENCE]]}
    return Finding(kind="explaining", severity="info", where=where, what=what, evidence=details)


def table_finding(attempt: AttemptEvidence) -> Finding:
    """The table of components: what was equal when the checkpoint was written, and what after the restore."""
    restored, saved = attempt.restored, attempt.saved
    rows: list[dict[str, Any]] = []
    assert restored is not None
    counted, made_up_for, _ = divided(attempt)
    late, blamed = {d.label for d in made_up_for}, {d.label for d in counted}
    labels = {**restored.groups, **(saved.groups if saved else {})}
    for label in sorted(labels, key=_table_order):
        after, before = restored.groups.get(label), saved.groups.get(label) if saved else None
        rows.append(
            {
                "component": label,
                "rows": max(after.rows if after else 0, before.rows if before else 0),
                "saved": _status(before),
                "restored": "late"
                if label in late
                else _status(after)
                if label in blamed or not _apart(after)
                else "-",
                "ranks": after.on if after and label in blamed else [],
            }
        )
    rows += [{"component": f"RNG {name}", "rows": 1, "saved": "unseeded", "restored": "unseeded", "ranks": []}
             for name in restored.unseeded]  # fmt: skip
    what = f"state after the restore at {restored.position.words}: {len(rows)} components"
    where: dict[str, Any] = {"arm": attempt.arm.id, "attempt": attempt.number, "step": restored.position.step}
    evidence = {
        "rows": rows,
        "step": restored.position.step,
        "microbatch": restored.position.microbatch,
        "end": restored.position.end,
        "begin": restored.position.begin,
        "ranks": restored.ranks,
    }
    return Finding(kind="restore-table", severity="info", where=where, what=what, evidence=evidence)


_LABELS = ("parameters", "buffers", "gradients")


def _table_order(label: str) -> tuple[int, str]:
    if label in _LABELS:
        return (_LABELS.index(label), "")
    if label.startswith("parameters ("):
        return (0, label)
    late = ("RNG ", "batch", "loader", "local", "ema", "module-state", "tracked")
    return (10 + next((i for i, start in enumerate(late) if label.startswith(start)), -1), label)


def _apart(tally: GroupTally | None) -> bool:
    return tally is not None and bool(tally.differences)


def _status(tally: GroupTally | None) -> str:
    if tally is None:
        return "-"
    kinds = {difference.kind for difference in tally.differences}
    if not kinds:
        return "equal" if tally.rows else "-"
    return "missing" if kinds == {"missing"} else "different"
