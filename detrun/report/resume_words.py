"""A resume check's verdict in words: its sentence, what is to be said below it, what to do."""

from __future__ import annotations

from typing import Any

from detrun.compare.folding import ranks_in_words
from detrun.records.jobs import ExperimentFile
from detrun.records.metrics_line import stem_of
from detrun.records.verdict import AttemptSummary, Finding, Verdict
from detrun.report import words
from detrun.report.state_table import blamed_attempt, family_of, finding_of
from detrun.report.timeline import mark_of

EXPERIMENT = "resume-check"
_TIMES = {1: "once", 2: "twice"}
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


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
    restores, attempt = len(_restores(verdict)), blamed_attempt(verdict)
    if restores < 2 or not 1 <= attempt <= len(_ORDINALS):
        return "after resume"
    return f"after the {_ORDINALS[attempt - 1]} of {restores} resumes"


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
    if "source" in evidence:
        span = f"steps {min(steps) + 1} to {experiment.steps}, " if steps else ""
        return f"{verdict.recipe}: {how}, resumed{times} from {where}: {span}{words.by_source(evidence)}"
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
    found = finding_of(verdict)
    if found is None:
        return f"{culprit['name']} was not restored"
    what = found.what
    name = str(found.evidence.get("name", ""))
    if whole := _whole_optimizer(verdict, found):
        what = f"{whole}{what.removeprefix(name)}" if name else what
    text, joint, _ = what.partition("): ")
    return f"{text})" if joint else text


def _whole_optimizer(verdict: Verdict, finding: Finding) -> str:
    """How the optimizer's state is called where all of it, and not that of some parameters, is meant."""
    if finding.where.get("component") != "optimizer":
        return ""
    ranks = finding.where.get("ranks", ())
    for table in verdict.of_kind("restore-table"):
        if table.where.get("attempt") != finding.where.get("attempt"):
            continue
        rows = [row for row in table.evidence["rows"] if row["ranks"] and family_of(row["component"]) == "optimizer"]
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
    return f"{mark_of(interruption, experiment)} after step {step}{more}"


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
        f"{mark_of(how, experiment)} at step {how.get('step')} left no newer checkpoint than step {step}"
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
    if verdict.culprit is None and verdict.of_kind("source"):
        return "why is not known: metrics.source: recorder holds the restored state against the saved one"
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
