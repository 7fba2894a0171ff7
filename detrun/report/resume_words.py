"""A resume check's verdict in words: its sentence, the timeline of attempts, the table of state, what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from detrun.compare.folding import ranks_in_words
from detrun.records.jobs import ExperimentFile
from detrun.records.metrics_line import stem_of
from detrun.records.verdict import ArmSummary, AttemptSummary, Finding, Verdict
from detrun.report import words

EXPERIMENT = "resume-check"
WIDTH = 60
"""Columns of the timeline's scale."""

LABEL = 17
"""Columns of the timeline's labels."""

_KINDS = {
    "kill": "SIGKILL",
    "kill-during-save": "SIGKILL during a save",
    "stop": "stopped",
    "signal": "signal",
    "requeue": "requeued",
    "node-failure": "a node failed",
    "timeout": "time limit",
}
_SHOWN = {"different": "DIFFERENT", "missing": "MISSING", "unseeded": "never seeded", "late": "restored late"}
_CALLED = {
    "local": "variables",
    "module-state": "module attributes",
    "ema": "averaged weights",
    "hyperparameters": "hyper-parameters",
    "scaler": "gradient scaler",
    "scheduler": "scheduler",
    "loader": "data loader",
    "tracked": "detrun.track",
    "batch": "batch",
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
}
"""What a table calls a component. Any other label but a random number stream's is a state of the optimizer's."""

_ORDER = (
    *("parameters", "buffers", "gradients", "optimizer", "hyperparameters", "scheduler", "scaler", "module-state"),
    *("ema", "tracked", "local", "RNG", "loader", "batch"),
)
_TIMES = {1: "once", 2: "twice"}
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
MAX_LABEL = 30


def sentence(verdict: Verdict, experiment: ExperimentFile) -> str:
    """The answer without its leading word."""
    if verdict.verdict == "diverged":
        return f"{_after_which(verdict)}: {_culprit(verdict, experiment)}"
    if verdict.verdict == "identical":
        return _identical(verdict, experiment)
    for kind, why in _WHY.items():
        if any(finding.severity == "not-verified" for finding in verdict.of_kind(kind)):
            return why
    if verdict.of_kind("job"):
        arms = words.listed(list(dict.fromkeys(_which(finding) for finding in verdict.of_kind("job"))))
        return f"{arms} did not finish, so nothing is proved:"
    if verdict.of_kind("not-resumed"):
        return "no run was resumed, so nothing is known of resuming:"
    if any(finding.severity == "not-verified" for finding in verdict.of_kind("restore")):
        return "state was lost on which nothing that was recorded depended:"
    return "nothing differs in what was recorded, but it does not prove an exact resume:"


def _which(finding: Finding) -> str:
    attempt = finding.where.get("attempt")
    return f"arm {finding.where.get('arm')}{f' (attempt {attempt}, resumed)' if attempt else ''}"


_WHY = {
    "not-repeatable": "the program does not repeat itself, so a resume proves nothing:",
    "not-interrupted": "the run was never interrupted:",
    "resumed-elsewhere": "the run did not come back where it was told to:",
    "saving-changes": "the run that saves and the one that never does differ:",
    "self-test": "the check does not see what was broken on purpose:",
}


def _after_which(verdict: Verdict) -> str:
    """`after resume`; of several, after which."""
    restores, attempt = len(_restores(verdict)), _blamed_attempt(verdict)
    if restores < 2 or not 1 <= attempt <= len(_ORDINALS):
        return "after resume"
    return f"after the {_ORDINALS[attempt - 1]} of {restores} resumes"


def _blamed_attempt(verdict: Verdict) -> int:
    """The attempt whose restore is to be blamed; 0 if none is."""
    found = _finding_of(verdict) if verdict.culprit else None
    return int(found.where.get("attempt", 0)) if found else 0


def _identical(verdict: Verdict, experiment: ExperimentFile) -> str:
    coverage = next(iter(verdict.of_kind("coverage")), None)
    evidence = coverage.evidence if coverage else {}
    metrics = [name for name in evidence.get("metrics", ()) if stem_of(str(name)) == name]
    parts = [words.plural(len(metrics), "metric")]
    if evidence.get("batch"):
        parts.append("batches")
    rows = [row for table in verdict.of_kind("restore-table") for row in table.evidence["rows"]]
    pieces = {row["component"]: int(row["rows"]) for row in rows if row["restored"] in ("equal", "late")}
    parts.append(f"{words.plural(sum(pieces.values()), 'piece')} of state")
    restores = _restores(verdict)
    ranks = words.plural(experiment.ranks, "rank")
    how = words.listed(list(dict.fromkeys(_how(interruption, experiment) for interruption, _ in restores)))
    times = f" {_TIMES.get(len(restores), f'{len(restores)} times')}" if len(restores) > 1 else ""
    steps = [step for _, step in restores]
    where = f"step{'s' if len(set(steps)) > 1 else ''} {words.listed([str(step) for step in dict.fromkeys(steps)])}"
    since = f"{ranks} × steps {min(steps) + 1} to {experiment.steps}" if steps else ranks
    if verdict.of_kind("micro-batches"):
        since = ranks  # steps are counted in micro-batches there
    return f"{verdict.recipe}: {how}, resumed{times} from {where}: {since}, every bit of {words.listed(parts)}"


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
    found = _finding_of(verdict)
    if found is None:
        return f"{culprit['name']} was not restored"
    what = found.what
    name = str(found.evidence.get("name", ""))
    if whole := _whole_optimizer(verdict, found):
        what = f"{whole}{what.removeprefix(name)}" if name else what
    text, joint, _ = what.partition("): ")
    return f"{text})" if joint else text


def _finding_of(verdict: Verdict) -> Finding | None:
    """The finding that the culprit was made of."""
    found = verdict.of_kind("restore")
    name = (verdict.culprit or {}).get("name")
    return next((f for f in found if f.evidence.get("name") == name), next(iter(found), None))


def _whole_optimizer(verdict: Verdict, finding: Finding) -> str:
    """How the optimizer's state is called where all of it, and not that of some parameters, is meant."""
    if finding.where.get("component") != "optimizer":
        return ""
    ranks = finding.where.get("ranks", ())
    for table in verdict.of_kind("restore-table"):
        if table.where.get("attempt") != finding.where.get("attempt"):
            continue
        rows = [row for row in table.evidence["rows"] if row["ranks"] and _family(row["component"]) == "optimizer"]
        if rows and finding.evidence.get("count") == sum(int(row["rows"]) for row in rows) * len(ranks):
            count = words.plural(max(int(row["rows"]) for row in rows), "parameter")
            return f"the optimizer's {words.listed([str(row['component']) for row in rows])} of all {count}"
    return ""


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


def _how(interruption: dict[str, Any], experiment: ExperimentFile) -> str:
    within = interruption.get("microbatch")
    more = f" and {words.plural(int(within), 'micro-batch', 'micro-batches')}" if within else ""
    step = interruption.get("step")
    if interruption.get("kind") == "kill-during-save":
        return f"SIGKILL during the save of step {step}{more}"
    return f"{_mark(interruption, experiment)} after step {step}{more}"


def _mark(interruption: dict[str, Any], experiment: ExperimentFile) -> str:
    """`SIGKILL`, `SIGTERM on rank 1`."""
    kind = str(interruption.get("kind"))
    text = _KINDS.get(kind, kind)
    if kind == "signal":
        asked = [each.get("signal") for each in experiment.interrupts if each.get("kind") == "signal"]
        text = f"SIG{asked[0]}" if asked and asked[0] else "signal"
    on = interruption.get("ranks") or []
    if kind in ("kill", "signal", "stop", "kill-during-save") and 0 < len(on) < experiment.ranks:
        text += f" on {ranks_in_words(on, experiment.ranks)}"
    return text


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
            lines.append(Line(f"{arm.id} uninterrupted", 1, last))
        elif arm.role == "interrupted":
            lines += _attempts(arm, verdict, experiment)
    return lines


def _attempts(arm: ArmSummary, verdict: Verdict, experiment: ExperimentFile) -> list[Line]:
    lines = []
    elsewhere = {
        finding.where.get("attempt"): finding.evidence["came_from"]
        for finding in verdict.of_kind("resumed-elsewhere")
        if "came_from" in finding.evidence
    }
    for place, attempt in enumerate(arm.attempts):
        following = arm.attempts[place + 1] if place + 1 < len(arm.attempts) else None
        saved = int(following.resumed_from["step"]) if following and following.resumed_from else None
        interruption = attempt.interruption or {}
        last = interruption.get("step") or attempt.last_step
        failed = not interruption and bool(attempt.exit_code)
        if last is None and not failed:
            continue
        told = int(attempt.resumed_from["step"]) if attempt.resumed_from else 0
        first = int(elsewhere.get(attempt.n, told)) + 1
        mark = f"✕ {_mark(interruption, experiment)}" if interruption and not _ran_on(attempt, experiment) else ""
        mark = f"✕ exit code {attempt.exit_code}" if failed else mark
        label = "    came back" if attempt.n in elsewhere else "    resumed"
        # An attempt that was interrupted at once has taken no step of its own.
        last = max(int(last or 0), first)
        lines.append(Line(label if place else f"{arm.id} interrupted", first, last, mark, saved))
    return lines


def _ran_on(attempt: AttemptSummary, experiment: ExperimentFile) -> bool:
    """Whether an attempt took all steps in spite of its interruption."""
    at = (attempt.interruption or {}).get("step") or 0
    return attempt.exit_code == 0 and (attempt.last_step or 0) >= experiment.steps > at


def picture(verdict: Verdict, experiment: ExperimentFile, width: int) -> list[str]:
    """The timeline as lines of text of at most `width` columns; where its steps have no room there, to no scale."""
    lines = timeline(verdict, experiment)
    for scale in range(width - LABEL - 1, 0, -1):
        at = columns(lines, experiment.steps, scale)
        if at is None:
            break
        rows = [f"{line.label:<{LABEL}}{drawn(line, at)}" for line in lines]
        if max(map(len, rows), default=0) <= width:
            return rows
    return [f"{line.label:<{LABEL}}{_unscaled(line)}" for line in lines]


def _unscaled(line: Line) -> str:
    saved = f"{line.saved} save ─ " if line.saved is not None and line.first <= line.saved < line.last else ""
    steps = f"{line.first} ─ {saved}{line.last}" if line.last > line.first else str(line.first)
    return f"{'└─ ' if line.first > 1 else ''}{steps} {line.mark}".rstrip()


def columns(lines: Sequence[Line], steps: int, width: int = WIDTH) -> dict[int, int] | None:
    """Where on the scale each step that is named stands: in proportion, but never so close that labels collide. None if
    they have no room. A step after one that has a place has none of its own as a resume's first: it stands by its save.
    """
    placed = {
        1,
        steps,
        *(line.last for line in lines if line.last > line.first),
        *(line.saved for line in lines if line.saved is not None),
    }
    placed |= {line.first for line in lines if line.first - 1 not in placed}
    named = sorted(placed)
    gaps = [_right_of(s, lines) + _left_of(t, lines) for s, t in pairwise(named)]
    if sum(gaps) >= width:
        return None
    places = [round((step - 1) / max(1, named[-1] - 1) * (width - 1)) for step in named]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + gaps[index - 1])
    places[-1] = min(places[-1], width - 1)
    for index in range(len(places) - 2, -1, -1):
        places[index] = min(places[index], places[index + 1] - gaps[index])
    return dict(zip(named, places, strict=True))


def _right_of(step: int, lines: Sequence[Line]) -> int:
    """Columns from a step's place on that what is written there takes: `10 save `, or the number of a first step."""
    saves = any(line.saved == step for line in lines)
    begins = any(step in (line.first, line.first - 1) for line in lines)
    return max(1, saves * len(f"{step} save "), begins * len(f"   {step + 1} "))


def _left_of(step: int, lines: Sequence[Line]) -> int:
    """Columns before a step's place that what is written there takes: a last step's number ends at its place."""
    return len(f" {step} ") if any(line.last == step for line in lines) else len("└─ ")


def drawn(line: Line, at: Mapping[int, int]) -> str:
    """A line of the timeline as text. at: `columns` of all lines."""
    resumed = line.first > 1
    start = at[line.first - 1] + 3 if resumed and line.first - 1 in at else at[line.first]
    end = start if line.first == line.last else at[line.last]
    canvas = [" "] * (end + 2)
    canvas[start : end + 1] = "─" * (end + 1 - start)
    head, tail = str(line.first), str(line.last)
    if resumed and start >= 3:
        canvas[start - 3 : start] = "└─ "
    if line.first == line.last:
        text = f"{''.join(canvas[:start])}{head}"
        return f"{text}{' save' if line.saved == line.last else ''} {line.mark}".rstrip()
    _write(canvas, start, f"{head} save " if line.saved == line.first else f"{head} ")
    if line.saved is not None and line.first < line.saved < line.last and line.saved in at:
        _write(canvas, at[line.saved] - 1, f" {line.saved} save ")
    _write(canvas, end - len(tail), f" {tail}")
    saved_last = " save" if line.saved == line.last else ""
    return f"{''.join(canvas).rstrip()}{saved_last} {line.mark}".rstrip()


def _write(canvas: list[str], at: int, text: str) -> None:
    for place, character in enumerate(text):
        if 0 <= at + place < len(canvas):
            canvas[at + place] = character


@dataclass(frozen=True)
class TableRow:
    """component, how many rows it has, and what is said of them at the save and after the restore. ranks: on which it
    is to be blamed, in words. note: what else is known of why."""

    component: str
    rows: str
    saved: str
    restored: str
    ranks: str = ""
    note: str = ""

    @property
    def differs(self) -> bool:
        return bool(self.ranks)


@dataclass(frozen=True)
class Table:
    """The state around one restore: that of this attempt."""

    saved: str
    restored: str
    rows: Sequence[TableRow]
    attempt: int = 1


def tables(verdict: Verdict, experiment: ExperimentFile) -> list[Table]:
    """A table a restore; for a diverged check, that of the restore which is to be blamed."""
    found = [
        finding
        for finding in verdict.of_kind("restore-table")
        if any(row["restored"] != "-" for row in finding.evidence["rows"])
    ]
    if verdict.verdict == "diverged" and verdict.culprit:
        found = [f for f in found if f.where.get("attempt") == _blamed_attempt(verdict)] or found
    return [_table(finding, verdict, experiment) for finding in found]


def _table(finding: Finding, verdict: Verdict, experiment: ExperimentFile) -> Table:
    evidence = finding.evidence
    notes = _notes(verdict, finding)
    families: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for row in sorted(evidence["rows"], key=lambda row: _ORDER.index(_family(str(row["component"])))):
        family = _family(str(row["component"]))
        # What is equal is folded; each thing that differs has a line of its own.
        folded = family in ("optimizer", "RNG") and row["saved"] == "equal" and not row["ranks"]
        families.setdefault((family, row["restored"]) if folded else (family, row["component"], "own"), []).append(row)
    rows = [_table_row(alike, notes, experiment) for alike in families.values()]
    within = f".{evidence['microbatch']}" if evidence.get("microbatch") else ""
    step = evidence["step"]
    saved, restored = f"saved (end of {step}{within})", f"restored (begin of {step + 1}{within})"
    return Table(saved, restored, rows, int(finding.where.get("attempt", 1)))


def _table_row(alike: Sequence[dict[str, Any]], notes: Mapping[str, str], experiment: ExperimentFile) -> TableRow:
    row = alike[0]
    on = row["ranks"]
    who = ranks_in_words(on, experiment.ranks) if on else ""
    label = str(row["component"])
    saved, restored = (_SHOWN.get(row[key], row[key]) for key in ("saved", "restored"))
    count = f"{sum(int(each['rows']) for each in alike):,}"
    return TableRow(_label_of(alike), count, saved, restored, who, notes.get(label, "") if on else "")


def _family(label: str) -> str:
    if label.startswith("RNG "):
        return "RNG"
    plain = label.partition(" (")[0]
    return plain if plain in _CALLED else "optimizer"


def _label_of(alike: Sequence[dict[str, Any]]) -> str:
    labels = [str(row["component"]) for row in alike]
    family = _family(labels[0])
    if family not in ("optimizer", "RNG"):
        plain, _, part = labels[0].partition(" (")
        return f"{_CALLED[plain]} ({part}" if part else _CALLED[plain]
    names = ", ".join(label.removeprefix("RNG ") for label in labels)
    if len(labels) > 1 and len(names) + len(family) + 1 > MAX_LABEL:
        return f"{family}, {len(labels)} {'streams' if family == 'RNG' else 'kinds of state'}"
    return f"{family} {names}"


def _notes(verdict: Verdict, table: Finding) -> dict[str, str]:
    """By row of the table, what the finding on it says beyond that it was not restored; once a finding."""
    notes: dict[str, str] = {}
    differing = {row["component"] for row in table.evidence["rows"] if row["ranks"]}
    for finding in verdict.of_kind("restore"):
        if finding.where.get("attempt") != table.where.get("attempt"):
            continue
        detail = finding.what.partition("): ")[2]
        labels = list(dict.fromkeys(_label(difference) for difference in finding.evidence.get("differences", ())))
        blamed = [label for label in labels if label in differing]
        for label in blamed[:1]:
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


def below(verdict: Verdict, experiment: ExperimentFile) -> list[str]:
    """What is to be said under the table."""
    lines = []
    diverged = verdict.verdict == "diverged"
    if diverged and verdict.first_divergence is not None:
        lines.append(_first_metric(verdict, experiment))
        if others := (verdict.culprit or {}).get("others", ()):
            lines.append(f"also different when it resumed, perhaps because of it: {'; '.join(others)}")
        lines += [finding.what for finding in verdict.of_kind("explaining")]
    lines += [finding.what for finding in verdict.of_kind("overlap")]
    lines += _unanswered(verdict, experiment)
    lines += _rejected(verdict)
    lines += [finding.what for finding in verdict.of_kind("saving-harmless", "restored-late")]
    tests = [finding.what for finding in verdict.of_kind("self-test") if finding.severity == "info"]
    # What starts from a resume that differs anyway shows nothing.
    lines += ["self-test: it shows nothing while the resume itself diverges"] if tests and diverged else tests
    return lines


def _unanswered(verdict: Verdict, experiment: ExperimentFile) -> list[str]:
    """Signals after which nothing newer was there to go on from: the program did not save, or not to its end."""
    return [
        f"{_mark(how, experiment)} at step {how.get('step')} left no newer checkpoint than step {step}"
        for how, step in _restores(verdict)
        if how.get("kind") == "signal" and step < int(how.get("step") or 0)
    ]


def _rejected(verdict: Verdict) -> list[str]:
    """Checkpoints that lay there and were not resumed from, and how far a killed save had got."""
    lines = []
    for arm in verdict.arms:
        if arm.role != "interrupted":
            continue
        for attempt in arm.attempts:
            if attempt.interruption and attempt.interruption.get("kind") == "kill-during-save":
                lines += _killed_save(attempt.interruption)
            for each in (attempt.resumed_from or {}).get("rejected", ()):
                name = str(each.get("path", "")).rpartition("/")[2]
                lines.append(f"attempt {attempt.n} was not given checkpoint {name}: {each.get('why')}")
    return lines


def _killed_save(interruption: dict[str, Any]) -> list[str]:
    detail = interruption.get("detail") or {}
    kinds = (("files", "file"), ("bytes", "byte"))
    found = [words.plural(int(detail[key]), word) for key, word in kinds if key in detail]
    tries = f", at try {detail['tries']}" if int(detail.get("tries") or 1) > 1 else ""
    if not found:
        return []
    written = f"{words.listed(found)} of it had been written{tries}"
    return [f"when the save of step {interruption.get('step')} was killed, {written}"]


def fix(verdict: Verdict) -> str | None:
    """What mends it."""
    if verdict.verdict != "diverged" or verdict.first_divergence is None:
        return None
    if verdict.culprit is None:
        return (
            "why is not known: either a piece of state was not captured (detrun.track(name, object) adds what only you "
            "know), or the program does not repeat itself (detrun pair tells)"
        )
    mends = verdict.culprit.get("fix")
    return f"fix: {mends}" if mends else None


def _first_metric(verdict: Verdict, experiment: ExperimentFile) -> str:
    first = verdict.first_divergence
    assert first is not None
    ordered = sorted(first.metrics.items(), key=lambda item: (item[1].step, stem_of(item[0]) != item[0]))
    if not ordered:
        return "no metric differs in any later step"
    name, metric = ordered[0]
    apart = f", {metric.ulp:,} ULP" if metric.ulp is not None else ""
    who = ranks_in_words(metric.ranks, experiment.ranks)
    return f"first different metric: {name}, step {metric.step}, {who}{apart}"


def context(verdict: Verdict, experiment: ExperimentFile) -> list[str]:
    """What a reader has to know of the runs beside what a pair's reader has to."""
    if verdict.experiment != EXPERIMENT:
        return []
    reference = experiment.reference
    return [f"reference: arm {reference.arm} of {reference.experiment}"] if reference else []


def declared(experiment: ExperimentFile) -> str | None:
    """What the recipe has one arm do beside the rest."""
    shown = []
    for arm in experiment.arms:
        if arm.role == "control" or not arm.declared:
            continue
        if arm.declared.args:
            shown.append(f"{arm.id}.args = {' '.join(arm.declared.args)}")
        shown += [f"{arm.id}.env.{name} = {value}" for name, value in arm.declared.env.items()]
    many = "difference" if len(shown) == 1 else "differences"
    return f"declared {many} between the arms: {'; '.join(shown)}" if shown else None


def capture_cost(verdict: Verdict) -> str | None:
    """What capturing state cost."""
    figure = verdict.figures.get("state_capture_seconds")
    if figure is None:
        return None
    share = f" (mean of {figure.n})" if figure.n > 1 else ""
    return f"a capture of the state took a rank {1000 * float(figure.value):.0f} ms of CPU time{share}"
