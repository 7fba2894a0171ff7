"""The verdict on a run that is held against an earlier night's. Works from the records alone, again at any time."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from pydantic import ValidationError

from detrun.compare.decision import decide
from detrun.compare.history import Change, what_changed
from detrun.compare.streams import Gap
from detrun.errors import ExitCode, RecordError
from detrun.experiments.arm_files import pinned_on_the_node
from detrun.experiments.surroundings import home_of, surroundings
from detrun.records.files import one_line
from detrun.records.jobs import ExperimentFile, Reference
from detrun.records.layout import ExperimentFolder
from detrun.records.verdict import Finding, Verdict

AGAINST = "against"

MAY_CHANGE = (
    *("packages.*", "cpu.*", "devices.*", "driver", "python.version", "python.executable", "recorder.version"),
    *(
        "torch.version*",
        "env.clear.CUDA_VERSION",
        "env.clear.NVIDIA_REQUIRE_*",
        "env.clear.NVIDIA_DRIVER_*",
        "env.clear.LD_LIBRARY_PATH",
    ),
)
"""Paths of an environment file that a night may change: what the training runs on, not how it was asked to run."""

_FREE = ("arms", "interrupt", "placement", "archive", "cluster", "watchdog", "limits")
"""Keys of a recipe that do not touch what an undisturbed arm without declarations computes."""

_ASKED_OF_SLURM = ("setup", "gpus_per_node")
"""Of `slurm:` the rest says where and on what it runs."""

MAX_CHANGES = 200


def judge_against(place: ExperimentFolder, experiment: ExperimentFile) -> Verdict:
    """The verdict. Whatever is wrong with either's records is in it."""
    try:
        candidate = Reference.model_validate(experiment.options.get("candidate"))
    except ValidationError:
        raise RecordError("does not say what it holds against its baseline", where=str(place.experiment_file)) from None
    if experiment.reference is None:
        why = experiment.options.get("no_baseline")
        return _unasked(experiment, [one_line(str(why or "there is no baseline"), 300)], "baseline", candidate)
    homes = {"a": home_of(place, experiment.reference), "b": home_of(place, candidate)}
    told = {"a": experiment.reference, "b": candidate}
    asked: dict[str, ExperimentFile] = {}
    wrong: list[str] = []
    for arm, home in homes.items():
        try:
            asked[arm] = ExperimentFile.read(home.experiment_file)
        except RecordError as error:
            wrong.append(f"{told[arm].experiment}, arm {arm} of this, cannot be read: its experiment.json {error.what}")
            continue
        if asked[arm].id != told[arm].experiment:
            wrong.append(f"arm {arm} is that of {one_line(asked[arm].id, 80)}, not of {told[arm].experiment}")
    if wrong:
        return _unasked(experiment, wrong, "reference", candidate)
    if differ := settings_that_differ(homes, asked):
        return _unasked(experiment, differ, "settings", candidate)
    return _compared(place, experiment, homes, told, asked)


def settings_that_differ(homes: Mapping[str, ExperimentFolder], asked: Mapping[str, ExperimentFile]) -> list[str]:
    """How the two were not asked the same, a line each."""
    a, b = (_settings(homes[arm], asked[arm]) for arm in ("a", "b"))
    return [
        f"{key} is not as it was for the baseline: {_shown(a.get(key))} then, {_shown(b.get(key))} now"
        for key in dict.fromkeys([*a, *b])
        if a.get(key) != b.get(key)
    ]


def _settings(home: ExperimentFolder, experiment: ExperimentFile) -> dict[str, Any]:
    recipe = {key: value for key, value in experiment.recipe.items() if key not in _FREE}
    slurm = recipe.get("slurm")
    if isinstance(slurm, dict):
        recipe["slurm"] = {key: value for key, value in slurm.items() if key in _ASKED_OF_SLURM}
    launch = recipe.get("launch")
    if isinstance(launch, dict):  # where the code was checked out
        recipe["launch"] = {key: value for key, value in launch.items() if key != "workdir"}
    pinned = {**experiment.pinned, **pinned_on_the_node(home, experiment)}
    found: dict[str, Any] = {"steps": experiment.steps, "ranks": experiment.ranks, "seed": experiment.seed}
    found |= {"determinism": experiment.determinism}
    for key, value in recipe.items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            found.setdefault(key, value)
    found |= {f"pinned {name}": value for name, value in pinned.items()}
    if experiment.reference is None and experiment.arms[0].declared:
        found["what arm a has beside the rest"] = experiment.arms[0].declared.model_dump(mode="json")
    return found


def _shown(value: Any) -> str:
    return "(not set)" if value is None else one_line(str(value), 120)


def _compared(
    place: ExperimentFolder,
    experiment: ExperimentFile,
    homes: Mapping[str, ExperimentFolder],
    told: Mapping[str, Reference],
    asked: Mapping[str, ExperimentFile],
) -> Verdict:
    from detrun.experiments.judge import gather

    source = experiment.recipe.get("metrics")
    source = source.get("source", "recorder") if isinstance(source, dict) else "recorder"
    if source != "recorder":
        why = f"its metrics come from {one_line(str(source), 40)}: nights are held against each other by the recorder's"
        return _unasked(experiment, [why], "source", told["b"])
    experiment.pinned.update(pinned_on_the_node(homes["b"], asked["b"]))
    evidence = gather(place, experiment, homes={arm: (homes[arm], told[arm].arm) for arm in homes})
    for arm in evidence.arms:
        if arm.job is not None and arm.job.state in ("running", "pending"):
            arm.gaps.append(Gap("running", "its job has not ended", -1, arm.id))
    for pair in evidence.pairs:
        pair.environment.differences = {
            key: difference
            for key, difference in pair.environment.differences.items()
            if not any(fnmatchcase(difference.path, pattern) for pattern in MAY_CHANGE)
        }
    changed = _changes(homes, asked)
    evidence.notes += [
        Finding(
            kind="changed",
            severity="info",
            where={"arms": ["a", "b"], "setting": change.what},
            what=f"{change.what}: {change.before or '(none)'} then, {change.after or '(none)'} now",
            evidence={"a": change.before, "b": change.after},
        )
        for change in changed[:MAX_CHANGES]
    ]
    verdict = decide(experiment, evidence)
    # One more run of an earlier question is no sample of how often a pair diverges.
    figures = {name: figure for name, figure in verdict.figures.items() if name != "divergence_chance_bound"}
    return _named(verdict.model_copy(update={"figures": figures}), experiment, told["b"])


def _changes(homes: Mapping[str, ExperimentFolder], asked: Mapping[str, ExperimentFile]) -> list[Change]:
    before, after = (surroundings(homes[arm], asked[arm]).model_dump(mode="json") for arm in ("a", "b"))
    versions = {arm: asked[arm].versions.get("detrun") for arm in asked}
    changes = [change for change in what_changed(before, after) if change.what != "the recipe"]
    if versions["a"] != versions["b"]:
        changes.append(Change("detrun", versions["a"], versions["b"]))
    return changes


def _unasked(experiment: ExperimentFile, reasons: list[str], kind: str, candidate: Reference) -> Verdict:
    """The verdict where there was nothing that could be held against each other."""
    findings = [Finding(kind=kind, severity="not-verified", what=reason) for reason in reasons]
    verdict = Verdict(
        id=experiment.id,
        experiment=experiment.experiment,
        recipe=experiment.recipe_name,
        verdict="not-verified",
        exit_code=int(ExitCode.NOT_VERIFIED),
        findings=findings,
        not_verified=reasons,
    )
    return _named(verdict, experiment, candidate)


def _named(verdict: Verdict, experiment: ExperimentFile, candidate: Reference) -> Verdict:
    """The verdict, saying which two it is about."""
    reference = experiment.reference
    about = {
        "reference": None if reference is None else {"experiment": reference.experiment, "arm": reference.arm},
        "candidate": {"experiment": candidate.experiment, "arm": candidate.arm},
    }
    return verdict.model_copy(update=about)
