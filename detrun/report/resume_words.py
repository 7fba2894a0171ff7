"""A resume check's verdict in words: its sentence, the timeline of attempts, the table of state, what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detrun.compare.folding import ranks_in_words
from detrun.records.jobs import ExperimentFile
from detrun.records.metrics_line import stem_of
from detrun.records.verdict import ArmSummary, AttemptSummary, Finding, Verdict
from detrun.report import words

EXPERIMENT = "resume-check"
WIDTH = 60
"""Columns of the timeline's scale."""

GAP = 10
"""Columns that a named step needs to itself."""

_KINDS = {
    "kill": "SIGKILL",
    "kill-during-save": "SIGKILL during a save",
    "stop": "stopped",
    "requeue": "requeued",
    "node-failure": "a node failed",
    "timeout": "time limit",
}
_SHOWN = {"different": "DIFFERENT", "missing": "MISSING", "unseeded": "never seeded", "late": "restored late"}


def sentence(verdict: Verdict, experiment: ExperimentFile) -> str:
    """The answer without its leading word."""
    if verdict.verdict == "diverged":
        return f"after resume: {_culprit(verdict, experiment)}"
    if verdict.verdict == "identical":
        return _identical(verdict, experiment)
    for kind in ("not-repeatable", "not-interrupted", "resumed-elsewhere", "saving-changes", "self-test"):
        found = [finding for finding in verdict.of_kind(kind) if finding.severity == "not-verified"]
        if found:
            return _WHY[kind]
    if verdict.of_kind("job"):
        arms = words.listed([f"arm {finding.where.get('arm')}" for finding in verdict.of_kind("job")])
        return f"{arms} did not finish, so nothing is proved:"
    if verdict.of_kind("not-resumed"):
        return "no run was resumed, so nothing is known of resuming:"
    return "nothing differs in what was recorded, but it does not prove an exact resume:"


_WHY = {
    "not-repeatable": "the program does not repeat itself, so a resume proves nothing:",
    "not-interrupted": "the run was never interrupted:",
    "resumed-elsewhere": "the run did not come back where it was told to:",
    "saving-changes": "the uninterrupted runs differ:",
    "self-test": "the check does not see what was broken on purpose:",
}


def _identical(verdict: Verdict, experiment: ExperimentFile) -> str:
    coverage = next(iter(verdict.of_kind("coverage")), None)
    evidence = coverage.evidence if coverage else {}
    metrics = [name for name in evidence.get("metrics", ()) if stem_of(str(name)) == name]
    parts = [words.plural(len(metrics), "metric")]
    if evidence.get("batch"):
        parts.append("batches")
    tables = verdict.of_kind("restore-table")
    components = {row["component"] for table in tables for row in table.evidence["rows"]}
    restores = _restores(verdict)
    ranks = words.plural(experiment.ranks, "rank")
    times = f"{len(restores)} times " if len(restores) > 1 else ""
    how = words.listed(list(dict.fromkeys(_how(interruption) for interruption, _ in restores)))
    where = words.listed([str(step) for _, step in restores])
    return (
        f"{verdict.recipe}: {how}, resumed {times}after step {where}: {ranks}, every bit of {words.listed(parts)} "
        f"and of {words.plural(len(components), 'component')} of the state"
    )


def _culprit(verdict: Verdict, experiment: ExperimentFile) -> str:
    culprit = verdict.culprit
    if culprit is None:
        first = verdict.first_divergence
        if first is None:
            return "the resumed run differs"
        who = ranks_in_words(first.ranks, experiment.ranks)
        captured = any(table.evidence["rows"] for table in verdict.of_kind("restore-table"))
        known = (
            "though all that was captured had been restored" if captured else "and no state was captured to tell why"
        )
        return f"at step {first.step}, {who}, in {first.stream}, {known}"
    found = next(iter(verdict.of_kind("restore")), None)
    text = found.what if found else f"{culprit['name']} was not restored"
    return text.partition("): ")[0] + (")" if "): " in text else "")


def _restores(verdict: Verdict) -> list[tuple[dict[str, Any], int]]:
    """Each interruption that a resume followed, with the step of the checkpoint."""
    found = []
    for arm in verdict.arms:
        if arm.role != "interrupted":
            continue
        before: AttemptSummary | None = None
        for attempt in arm.attempts:
            if before is not None and before.interruption and attempt.resumed_from:
                found.append((before.interruption, int(attempt.resumed_from["step"])))
            before = attempt
    return found


def _how(interruption: dict[str, Any]) -> str:
    kind = str(interruption.get("kind"))
    if kind == "signal":
        detail = interruption.get("detail")
        signal = detail.get("signal") if isinstance(detail, dict) else None
        word = f"SIG{signal}" if signal else "a signal"
        return f"ended by {word} after step {interruption.get('step')}"
    return f"{_KINDS.get(kind, kind)} after step {interruption.get('step')}"


@dataclass(frozen=True)
class Line:
    """One line of the timeline: a label, and where on the scale of WIDTH columns it begins and ends."""

    label: str
    first: int
    last: int
    mark: str = ""
    saved: int | None = None


def timeline(verdict: Verdict, experiment: ExperimentFile) -> list[Line]:
    """The reference, then every attempt of the interrupted arm."""
    lines: list[Line] = []
    for arm in verdict.arms:
        if arm.role == "reference":
            last = max((a.last_step or 0 for a in arm.attempts), default=0) or experiment.steps
            lines.append(Line("uninterrupted", 1, last))
        elif arm.role == "interrupted":
            lines += _attempts(arm)
    return lines


def _attempts(arm: ArmSummary) -> list[Line]:
    lines = []
    for place, attempt in enumerate(arm.attempts):
        following = arm.attempts[place + 1] if place + 1 < len(arm.attempts) else None
        saved = int(following.resumed_from["step"]) if following and following.resumed_from else None
        interruption = attempt.interruption or {}
        last = interruption.get("step") or attempt.last_step
        if last is None:
            continue
        first = int(attempt.resumed_from["step"]) + 1 if attempt.resumed_from else 1
        mark = f"✕ {_KINDS.get(str(interruption.get('kind')), str(interruption.get('kind')))}" if interruption else ""
        if interruption.get("kind") == "signal":
            mark = "✕ signal"
        lines.append(Line("  resumed" if place else "interrupted", first, int(last), mark, saved))
    return lines


def columns(lines: Sequence[Line], steps: int, width: int = WIDTH) -> dict[int, int]:
    """Where on the scale each step that is named stands: in proportion, but never so close that labels collide."""
    named = sorted({step for line in lines for step in (line.first, line.last, line.saved or 1)} | {1, steps})
    begun = {line.first for line in lines if line.first > 1}
    named = [step for step in named if step not in begun or step - 1 not in named]  # a resume stands by its save
    places = [round((step - 1) / max(1, steps - 1) * (width - 1)) for step in named]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + GAP)
    places[-1] = min(places[-1], width - 1)
    for index in range(len(places) - 2, -1, -1):
        places[index] = max(0, min(places[index], places[index + 1] - GAP))
    found = dict(zip(named, places, strict=True))
    return {**{step: found[step - 1] + 2 for step in begun if step not in found}, **found}


def drawn(line: Line, at: Mapping[int, int]) -> str:
    """A line of the timeline as text. at: `columns` of all lines."""
    start, end = at[line.first], at[line.last]
    canvas = [" "] * (end + 2)
    canvas[start : end + 1] = "─" * (end + 1 - start)
    if line.label.startswith(" ") and start >= 3:
        canvas[start - 3 : start] = "└─ "
    head, tail = str(line.first), str(line.last)
    _write(canvas, start, f"{head} ")
    if line.saved is not None and line.first < line.saved < line.last and line.saved in at:
        _write(canvas, at[line.saved] - 1, f" {line.saved} save ")
    if line.last > line.first:
        _write(canvas, end - len(tail), f" {tail}")
    return f"{''.join(canvas).rstrip()} {line.mark}".rstrip()


def _write(canvas: list[str], at: int, text: str) -> None:
    for place, character in enumerate(text):
        if 0 <= at + place < len(canvas):
            canvas[at + place] = character


@dataclass(frozen=True)
class TableRow:
    """component, how many rows it has, and what is said of them at the save and after the restore."""

    component: str
    rows: str
    saved: str
    restored: str
    note: str


@dataclass(frozen=True)
class Table:
    """The state around one restore."""

    saved: str
    restored: str
    rows: Sequence[TableRow]


def tables(verdict: Verdict, experiment: ExperimentFile) -> list[Table]:
    """A table a restore; for a diverged check, that of the restore which is to be blamed."""
    found = verdict.of_kind("restore-table")
    if verdict.verdict == "diverged" and verdict.culprit:
        found = [f for f in found if f.where.get("step") == verdict.culprit.get("step")] or found
    return [_table(finding, verdict, experiment) for finding in found]


def _table(finding: Finding, verdict: Verdict, experiment: ExperimentFile) -> Table:
    evidence = finding.evidence
    notes = _notes(verdict, finding)
    rows = []
    for row in evidence["rows"]:
        on = row["ranks"]
        who = f"{ranks_in_words(on, experiment.ranks)}" if on and experiment.ranks > 1 else ""
        note = "; ".join(part for part in (who, notes.get(row["component"], "")) if part)
        count = f"{row['rows']:,}" if row["rows"] > 1 else ""
        saved, restored = (_SHOWN.get(row[key], row[key]) for key in ("saved", "restored"))
        rows.append(TableRow(str(row["component"]), count, saved, restored, note if on else ""))
    within = f".{evidence['microbatch']}" if evidence.get("microbatch") else ""
    step = evidence["step"]
    return Table(f"saved (end of {step}{within})", f"restored (begin of {step + 1}{within})", rows)


def _notes(verdict: Verdict, table: Finding) -> dict[str, str]:
    """By row of the table, what the finding on it says beyond that it was not restored."""
    notes: dict[str, str] = {}
    for finding in verdict.of_kind("restore"):
        if finding.where.get("step") != table.where.get("step"):
            continue
        detail = finding.what.partition("): ")[2]
        for difference in finding.evidence.get("differences", ()):
            label = _label(difference)
            notes.setdefault(label, detail)
    return notes


def _label(difference: dict[str, Any]) -> str:
    component, name = str(difference["component"]), str(difference["name"])
    part = name.rpartition(" (")[2].rstrip(")") if name.endswith(")") else ""
    if component == "rng":
        return f"RNG {name}"
    if component == "optimizer":
        return name.partition(" (")[0].rpartition(".")[2]
    return f"{component} ({part})" if part and part != "local" else component


def below(verdict: Verdict) -> list[str]:
    """What is to be said under the table."""
    lines = []
    first = verdict.first_divergence
    if verdict.verdict == "diverged" and first is not None:
        lines.append(_first_metric(verdict))
        others = (verdict.culprit or {}).get("others", ())
        lines += [f"also different: {'; '.join(others)}"] if others else []
        lines += [finding.what for finding in verdict.of_kind("explaining")]
        if verdict.culprit and verdict.culprit.get("fix"):
            lines.append(f"fix: {verdict.culprit['fix']}")
        elif verdict.culprit is None:
            lines.append(
                "either a piece of state that was not captured, or the program does not repeat itself: "
                "detrun pair tells, detrun.track(name, object) adds what only you know"
            )
    lines += [finding.what for finding in verdict.of_kind("overlap", "saving-harmless", "restored-late")]
    lines += [finding.what for finding in verdict.of_kind("self-test") if finding.severity == "info"]
    return lines


def _first_metric(verdict: Verdict) -> str:
    first = verdict.first_divergence
    assert first is not None
    ordered = sorted(first.metrics.items(), key=lambda item: item[1].step)
    if not ordered:
        return "no metric differs in any later step"
    name, metric = ordered[0]
    apart = f", {metric.ulp:,} ULP" if metric.ulp is not None else ""
    return f"first different metric: {name}, step {metric.step}{apart}"


def capture_cost(verdict: Verdict) -> str | None:
    """What capturing state cost."""
    figure = verdict.figures.get("state_capture_seconds")
    if figure is None:
        return None
    return f"capturing state took {1000 * float(figure.value):.0f} ms of CPU time each time ({figure.n} captures)"
