"""A run held against an earlier night's: the same training, asked in the same way, on what may since have changed.

A clean pair says that a night agrees with itself. Only an earlier night's fingerprints show that all its numbers have
moved together, because a package, a driver or the code has changed. So settings have to be equal, and what may change
is listed: settings that differ make no divergence, but a question that was not asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from detrun.errors import DetrunError, RecordError, UsageError
from detrun.experiments.judge_against import AGAINST, judge_against, settings_that_differ
from detrun.experiments.write_verdict import write_verdict
from detrun.records.archive import Archive
from detrun.records.index import Entry, read_index
from detrun.records.jobs import ArmPlan, ExperimentFile, Reference
from detrun.records.layout import ExperimentFolder
from detrun.records.verdict import Verdict

LAST_GOOD = "last-good"
MAX_LOOKED_AT = 100
"""Earlier nights whose settings are looked at for equal ones."""

KINDS = ("pair", "resume-check")
"""Experiments whose first arm runs undisturbed."""


def hold_against(
    archive: Archive,
    folder: ExperimentFolder,
    baseline: str = LAST_GOOD,
    *,
    labels: Mapping[str, str] | None = None,
    standalone: bool = False,
) -> Verdict:
    """Holds the first arm of `folder` against that of an earlier experiment, as an experiment of its own, and returns
    its verdict; the verdict's id names it. Nothing is run.

    baseline: an id, or `last-good`: the newest identical pair of the recipe from a night in which nothing of it
    diverged, one that was asked in the same way if there is one. labels: of the new experiment; without them those of
    `folder`. A baseline that is missing or was asked otherwise is a reason in the verdict, `not-verified`. Raises
    UsageError where `baseline` names no experiment or one that cannot serve, RecordError where `folder` has no
    experiment.json, ArchiveError where nothing can be written.
    """
    candidate = ExperimentFile.read(folder.experiment_file)
    if candidate.experiment not in KINDS:
        raise UsageError(f"{folder.id} is a {candidate.experiment}, of which no arm runs undisturbed", hint=_HINT)
    mine = _arm_of(folder, candidate)
    reference, why = _baseline(archive, folder, candidate, baseline)
    place = archive.create(candidate.recipe_name, AGAINST)
    experiment = candidate.model_copy(
        update={
            "id": place.id,
            "experiment": AGAINST,
            "created": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "arms": [ArmPlan(id="a", role="reference"), ArmPlan(id="b", role="repeat")],
            "reference": reference,
            "interrupts": [],
            "options": {"candidate": mine.model_dump(mode="json"), "baseline": baseline, "no_baseline": why},
            "labels": {"night": candidate.created[:10], **(candidate.labels if labels is None else labels)},
        }
    )
    experiment.write(place.experiment_file)
    return write_verdict(place, experiment, judge_against(place, experiment), standalone=standalone)


def check_baseline(archive: Archive, baseline: str) -> None:
    """UsageError where `baseline` names no experiment that a pair can be held against: to be said before it is run."""
    if baseline != LAST_GOOD:
        _chosen(archive, baseline)


def _chosen(archive: Archive, id: str) -> tuple[ExperimentFolder, ExperimentFile]:
    folder = archive.resolve(id)
    experiment = ExperimentFile.read(folder.experiment_file)
    if experiment.experiment not in KINDS:
        raise UsageError(f"{folder.id} is a {experiment.experiment}", hint=_HINT)
    return folder, experiment


_HINT = "an identical pair or resume check can be a baseline; detrun list shows them"


def _baseline(
    archive: Archive, folder: ExperimentFolder, candidate: ExperimentFile, wanted: str
) -> tuple[Reference | None, str | None]:
    """The arm to hold it against, or why there is none."""
    if wanted != LAST_GOOD:
        chosen, experiment = _chosen(archive, wanted)
        if chosen.id == folder.id:
            raise UsageError(f"{chosen.id} cannot be held against itself", hint=_HINT)
        return _arm_of(chosen, experiment), None
    first: Reference | None = None
    for entry in last_good(read_index(archive), folder.id, candidate.recipe_name)[:MAX_LOOKED_AT]:
        chosen = ExperimentFolder(archive.root / entry.id)
        try:
            experiment = ExperimentFile.read(chosen.experiment_file)
            found = _arm_of(chosen, experiment)
        except DetrunError:
            continue
        # A run with other settings in between, to try something out, is no reason to compare nothing.
        if not settings_that_differ({"a": chosen, "b": folder}, {"a": experiment, "b": candidate}):
            return found, None
        first = first or found
    if first is not None:
        return first, None
    return None, f"there is no earlier night of {candidate.recipe_name} that is known to be good"


def last_good(entries: list[Entry], id: str | None, recipe: str) -> list[Entry]:
    """The pairs of a recipe that an experiment of that id can be held against, the newest first; id None: the next one.

    An identical pair of a night in which anything of the recipe diverged is none: the night's numbers are in doubt. In
    the experiment's own night only the pair itself must have held, so that a change can be tried on one day.
    """
    mine = [entry for entry in entries if entry.recipe == recipe]
    own = next((entry for entry in mine if entry.id == id), None)
    earlier = mine if own is None else mine[: mine.index(own)]
    if own is None and id is not None:
        earlier = [entry for entry in mine if entry.id != id]
    bad = {entry.night for entry in mine if entry.verdict == "diverged"}
    moved = {entry.candidate for entry in mine if entry.experiment == AGAINST and entry.verdict == "diverged"}
    flaky = {entry.night for entry in mine if entry.experiment != AGAINST and entry.verdict == "diverged"}
    # Behind a change that nobody accepted, a pair counts only if it was held against something and found the same:
    # that it repeats itself says nothing of the change.
    held = {entry.candidate for entry in mine if entry.experiment == AGAINST and entry.verdict == "identical"}
    unseen = {entry.id for entry in mine if any(each.id in moved for each in mine[: mine.index(entry)])} - held
    return [
        entry
        for entry in reversed(earlier)
        if entry.experiment == "pair"
        and entry.verdict == "identical"
        and entry.id not in moved
        and entry.id not in unseen
        and entry.night not in (flaky if own is not None and entry.night == own.night else bad)
    ]


def _arm_of(folder: ExperimentFolder, experiment: ExperimentFile) -> Reference:
    """Where the records of its first arm lie: in its own folder, or in the one whose arm it used again."""
    told = experiment.reference or Reference(experiment=folder.id, path=str(folder.path), arm=experiment.arms[0].id)
    if not ExperimentFolder(Path(told.path)).attempts(told.arm):
        raise RecordError(f"holds no records of arm {told.arm}", where=told.path)
    return told
