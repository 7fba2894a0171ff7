"""Which runs a report shows, where their records lie, and what is known of each beside its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from detrun.compare.attempts import Position
from detrun.compare.folding import hosts
from detrun.errors import RecordError
from detrun.experiments.surroundings import home_of
from detrun.launch.resumption import read_saves
from detrun.records.environment_reader import read_environment
from detrun.records.files import one_line, read_moment
from detrun.records.jobs import ArmPlan, ExperimentFile, JobFile, Reference
from detrun.records.layout import AttemptFolder, ExperimentFolder, path_of
from detrun.records.verdict import Verdict
from detrun.report.series import Run

MAX_RUNS = 9
"""Runs on a page; of more, those that differ first."""

MAX_SAVES = 500
_LONGEST = 160


@dataclass(frozen=True)
class RunFolder:
    """A run and where its records lie. told: the position that it was told to go on from; shift: is added to its steps;
    cut_short: it was ended from outside."""

    run: Run
    folder: AttemptFolder
    home: ExperimentFolder
    told: Position
    shift: int
    cut_short: bool


def runs_of(place: ExperimentFolder, experiment: ExperimentFile, verdict: Verdict) -> tuple[list[RunFolder], int]:
    """The runs to show, the reference first, and how many are left out. Control arms are broken on purpose."""
    plans = [plan for plan in experiment.arms if plan.role != "control"] or list(experiment.arms)
    found = [each for plan in plans for each in _of_arm(place, experiment, verdict, plan)]
    apart = {arm for finding in verdict.of_severity("divergence") for arm in finding.where.get("arms", ())}
    kept = sorted(range(1, len(found)), key=lambda at: (found[at].run.arm not in apart, at))[: MAX_RUNS - 1]
    return [found[at] for at in sorted([0, *kept])] if found else [], max(0, len(found) - MAX_RUNS)


def _of_arm(
    place: ExperimentFolder, experiment: ExperimentFile, verdict: Verdict, plan: ArmPlan
) -> Iterator[RunFolder]:
    home, arm = _home(place, experiment, plan)
    attempts = home.attempts(arm)
    resumed = experiment.experiment == "resume-check"
    # Of an arm that is not interrupted by plan the last attempt is the one that counts.
    chosen = attempts if resumed and plan.role != "reference" else attempts[:1] if resumed else attempts[-1:]
    for folder in chosen:
        job = _job(folder)
        told = Position(job.resumed_from.step, job.resumed_from.microbatch) if job and job.resumed_from else Position(0)
        began = _came_from(verdict, plan.id, folder.number, told.step)
        run = Run(
            plan.id,
            folder.number,
            plan.role,
            f"{plan.id}, attempt {folder.number}" if len(chosen) > 1 else plan.id,
            began + 1,
            _saves(folder, began - told.step),
            _facts(folder, job),
            _seconds(job),
        )
        cut_short = job is not None and job.state != "done"
        yield RunFolder(run, folder, home, told, began - told.step, cut_short)


def _home(place: ExperimentFolder, experiment: ExperimentFile, plan: ArmPlan) -> tuple[ExperimentFolder, str]:
    """Where an arm's records lie, and its name there: a reference may be an earlier experiment's arm, and one that is
    held against an earlier night's is another experiment's too."""
    told = experiment.reference if plan.role == "reference" else _candidate(experiment)
    return (home_of(place, told), told.arm) if told else (place, plan.id)


def _candidate(experiment: ExperimentFile) -> Reference | None:
    told = experiment.options.get("candidate")
    try:
        return Reference.model_validate(told) if isinstance(told, dict) else None
    except ValidationError:
        return None


def _came_from(verdict: Verdict, arm: str, attempt: int, told: int) -> int:
    """The step that an attempt really went on from, where the comparison found another than it was told."""
    for finding in verdict.of_kind("resumed-elsewhere"):
        came = finding.evidence.get("came_from")
        if (finding.where.get("arm"), finding.where.get("attempt")) == (arm, attempt) and isinstance(came, int):
            return came
    return told


def _job(folder: AttemptFolder) -> JobFile | None:
    try:
        return JobFile.read(folder.job_file)
    except RecordError:
        return None


def _saves(folder: AttemptFolder, shift: int) -> tuple[int, ...]:
    ended = {save.step + shift for save in read_saves(folder) if save.ended is not None}
    return tuple(sorted(step for step in ended if step > 0)[:MAX_SAVES])


def _seconds(job: JobFile | None) -> float | None:
    begin, end = (read_moment(job.started), read_moment(job.ended)) if job else (None, None)
    return max(0.0, (end - begin).total_seconds()) if begin and end else None


def _facts(folder: AttemptFolder, job: JobFile | None) -> dict[str, str]:
    """What a run saw of its surroundings, as its first rank wrote it down, by name."""
    facts = {"nodes": hosts([one_line(node, 100) for node in job.nodes])} if job and job.nodes else {}
    facts |= {"started": one_line(job.started, 40)} if job and job.started else {}
    try:
        document = read_environment(folder.environment(0), 0).document
    except RecordError:
        return facts
    told: dict[str, Any] = {
        "Python": _at(document, "python", "version"),
        "CPU": _at(document, "cpu", "model"),
        "GPUs": _devices(document.get("devices")),
        "driver": document.get("driver"),
        "torch": _at(document, "packages", "torch"),
        "packages": _count(document.get("packages")),
        "threads": _at(document, "torch", "num_threads"),
        "deterministic algorithms": _at(document, "torch", "deterministic_algorithms"),
    }
    shown = {name: one_line(str(value), _LONGEST) for name, value in told.items() if _is_plain(value)}
    words = {"True": "on", "False": "off"}
    return facts | {name: words.get(value, value) for name, value in shown.items()}


def _at(document: dict[str, Any], key: str, inner: str) -> Any:
    part = document.get(key)
    return part.get(inner) if isinstance(part, dict) else None


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and value != ""


def _devices(devices: Any) -> str | None:
    """`8 × NVIDIA H200`."""
    if not isinstance(devices, list):
        return None
    names = [str(each.get("name")) for each in devices[:64] if isinstance(each, dict)]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or None


def _count(packages: Any) -> str | None:
    return f"{len(packages):,}" if isinstance(packages, dict) and packages else None


def records_of(
    place: ExperimentFolder, experiment: ExperimentFile, verdict: Verdict
) -> tuple[ExperimentFolder, ExperimentFile] | None:
    """The experiment whose records show what this one is about: its own, or those of the experiment that it looks into.
    None where there are none to be found."""
    if any(place.attempts(plan.id) for plan in experiment.arms) or _candidate(experiment):
        return place, experiment
    # A localization that began from another experiment names that one; else its first pass was the pair.
    ids = [str(each.evidence["pass"]) for each in verdict.of_kind("descent")[:1] if each.evidence.get("pass")]
    candidates = [place.path.parent / path_of(id) for id in ids if ".." not in id]
    candidates += [home_of(place, experiment.reference).path] if experiment.reference else []
    candidates += [folder.path for folder in place.passes().values()]
    for path in candidates:
        folder = ExperimentFolder(path)
        try:
            found = ExperimentFile.read(folder.experiment_file)
        except RecordError:
            continue
        if any(folder.attempts(plan.id) for plan in found.arms):
            return folder, found
    return None
