"""What an experiment belongs to and ran on, put into its verdict: verdict.json alone has to tell nights apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from detrun.errors import RecordError
from detrun.fingerprint.byte_digest import digest_bytes
from detrun.records.environment_reader import read_environment
from detrun.records.files import one_line
from detrun.records.jobs import ExperimentFile, JobFile, Reference
from detrun.records.layout import ExperimentFolder
from detrun.records.verdict import Surroundings, Verdict

_NOT_COMPUTED = ("archive", "cluster", "watchdog", "limits")
"""Keys of a recipe that do not touch what is computed or asked."""

_LONGEST = 200
_MOST_PACKAGES = 5000


def stamped(place: ExperimentFolder, experiment: ExperimentFile, verdict: Verdict) -> Verdict:
    """The verdict with its experiment's time, labels and surroundings."""
    return verdict.model_copy(
        update={
            "created": experiment.created,
            "labels": dict(experiment.labels),
            "environment": surroundings(place, experiment),
        }
    )


def surroundings(place: ExperimentFolder, experiment: ExperimentFile) -> Surroundings:
    """What the experiment's first arm ran on, as its first rank saw it."""
    reference = _elsewhere(experiment)
    home = home_of(place, reference) if reference else place
    arm = reference.arm if reference else experiment.arms[0].id
    attempts = home.attempts(arm)
    document: dict[str, Any] = {}
    nodes: list[str] | None = None
    if attempts:
        try:
            document = read_environment(attempts[-1].environment(0), 0).document
        except RecordError:
            document = {}  # the comparison says what is wrong with it
        try:
            nodes = [one_line(node, _LONGEST) for node in JobFile.read(attempts[-1].job_file).nodes] or None
        except RecordError:
            nodes = None
    code = experiment.code
    slurm = experiment.recipe.get("slurm")
    container = slurm.get("container") if isinstance(slurm, dict) else None
    image = container.get("image") if isinstance(container, dict) else None
    asked = {key: value for key, value in experiment.recipe.items() if key not in _NOT_COMPUTED}
    return Surroundings(
        recipe=digest_bytes(json.dumps(asked, sort_keys=True, default=str).encode()),
        commit=code.commit,
        dirty=code.dirty,
        code=digest_bytes(json.dumps(code.program, sort_keys=True).encode()) if code.program else None,
        container=_text(image),
        driver=_text(document.get("driver")),
        gpus=_gpus(document.get("devices")),
        cpu=_text(_part(document, "cpu", "model")),
        python=_text(_part(document, "python", "version")),
        packages=_packages(document.get("packages")),
        nodes=nodes,
    )


def home_of(place: ExperimentFolder, told: Reference) -> ExperimentFolder:
    """The folder of an experiment: beside this one, where an archive was moved, else where it lay."""
    beside = ExperimentFolder(place.path.parent / Path(told.path).name)
    return beside if beside.experiment_file.is_file() else ExperimentFolder(Path(told.path))


def _elsewhere(experiment: ExperimentFile) -> Reference | None:
    """The arm in another folder that is meant: what is held against an earlier night, else what is used again."""
    if "candidate" in experiment.options:
        try:
            return Reference.model_validate(experiment.options["candidate"])
        except ValidationError:
            return None
    return experiment.reference


def _part(document: dict[str, Any], key: str, inner: str) -> Any:
    part = document.get(key)
    return part.get(inner) if isinstance(part, dict) else None


def _text(value: Any) -> str | None:
    return one_line(value, _LONGEST) if isinstance(value, str) and value else None


def _gpus(devices: Any) -> list[str] | None:
    if not isinstance(devices, list):
        return None
    return [one_line(str(each.get("name")), _LONGEST) for each in devices[:64] if isinstance(each, dict)] or None


def _packages(found: Any) -> dict[str, str] | None:
    if not isinstance(found, dict):
        return None
    return {
        one_line(name, _LONGEST): one_line(str(version), _LONGEST)
        for name, version in list(found.items())[:_MOST_PACKAGES]
    }
