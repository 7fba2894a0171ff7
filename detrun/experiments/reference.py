"""Whether an earlier experiment's undisturbed arm can stand in for the reference of a resume check.

It can where everything that is known before a run is the same: recipe, code, program files, interpreter, packages,
variables, machine, recorder. Whatever is not known, or differs, has the reference run anew; that costs a run and never
a wrong verdict.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import detrun
from detrun.errors import RecordError
from detrun.experiments.plan import state_at
from detrun.launch.preflight import trainer_path
from detrun.launch.program import program_digest
from detrun.launch.snapshot import snapshot_code
from detrun.launch.spec import Segment
from detrun.recipe import LoadedRecipe
from detrun.recorder.environment import packages, redacted
from detrun.recorder.export import exported_files
from detrun.records.archive import Archive
from detrun.records.files import read_object, read_plain
from detrun.records.jobs import ExperimentFile, JobFile, Reference
from detrun.records.layout import AttemptFolder, ExperimentFolder
from detrun.records.pruned import read_pruned
from detrun.records.verdict import Verdict

KINDS = ("pair", "resume-check")

_FREE = ("arms", "interrupt", "placement", "archive", "cluster", "watchdog", "limits")
"""Keys of a recipe that do not touch what an undisturbed arm without declarations computes."""

_OF_THE_RUN = (
    *("DETRUN_", "SLURM_", "SUBMITIT_", "TORCHELASTIC_", "MASTER_", "CUDA_VISIBLE_DEVICES"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)
"""Variables that a launcher or detrun sets anew for every run. CUDA_VISIBLE_DEVICES is what submitit blanks; where the
user has set it, it is a part of the plan."""

PATIENCE = 60.0


@dataclass(frozen=True)
class ReferenceArm:
    """An undisturbed arm of an earlier experiment, whose records stand in for this one's reference."""

    folder: ExperimentFolder
    arm: str

    @property
    def document(self) -> Reference:
        return Reference(experiment=self.folder.id, path=str(self.folder.path), arm=self.arm)


class _Differs(Exception):  # noqa: N818 - an answer of this module
    """Why an arm cannot stand in."""


def find_reference(archive: Archive, loaded: LoadedRecipe, cluster: str, segment: Segment) -> ReferenceArm | str:
    """The arm of the newest fitting experiment, or in one line why there is none.

    segment: the reference as it would be run now.
    """
    if "a" in loaded.recipe.arms:
        return "arm a has something beside the rest (arms.a)"
    why = "the archive holds no identical pair of this recipe"
    first = True
    for folder in reversed(archive.list()):
        try:
            experiment = ExperimentFile.read(folder.experiment_file)
            if experiment.experiment not in KINDS or experiment.recipe_name != loaded.recipe.name:
                continue
            verdict = Verdict.read(folder.verdict_file).verdict
            attempt = folder.attempt("a", 0)
            if verdict != "identical" or not attempt.path.is_dir() or read_pruned(folder) is not None:
                continue
            _hold_against(experiment, attempt, folder, loaded, cluster, segment)
        except (RecordError, _Differs) as differs:
            # The newest says what has changed since; that older ones differ too is no news.
            if first and isinstance(differs, _Differs):
                why, first = f"since {folder.id}, {differs}", False
            continue
        return ReferenceArm(folder, "a")
    return why


def _hold_against(
    experiment: ExperimentFile,
    attempt: AttemptFolder,
    folder: ExperimentFolder,
    loaded: LoadedRecipe,
    cluster: str,
    segment: Segment,
) -> None:
    """Raises _Differs for the first thing that is not the same."""
    if experiment.cluster != cluster:
        raise _Differs(f"it ran on {experiment.cluster}, and this is to run on {cluster}")
    if experiment.arms[0].declared or JobFile.read(attempt.job_file).state != "done":
        raise _Differs("its first arm is no plain one")
    if key := _differing_key(experiment.recipe, loaded.recipe.model_dump(mode="json")):
        raise _Differs(f"{key} of the recipe has changed")
    needed, had = state_at(loaded.recipe) or "", str(_launch_env(attempt).get("DETRUN_STATE_AT", ""))
    if not set(filter(None, needed.split(","))) <= set(filter(None, had.split(","))):
        raise _Differs("its state was not captured at every step that is needed")
    _same_recorder(experiment, folder)
    _same_code(experiment, folder, loaded, segment)
    _same_environment(attempt, loaded, cluster, segment)


def _differing_key(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    for key in sorted({*earlier, *now} - set(_FREE)):
        a, b = earlier.get(key), now.get(key)
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            inner = next((name for name in sorted({*a, *b}) if a.get(name) != b.get(name)), None)
            return f"{key}.{inner}" if inner else key
        return key
    return None


def _same_recorder(experiment: ExperimentFile, folder: ExperimentFolder) -> None:
    if experiment.versions.get("detrun") != detrun.__version__:
        raise _Differs(f"detrun was {experiment.versions.get('detrun')} and is {detrun.__version__}")
    for source, name in exported_files():
        try:
            if read_plain(folder.recorder_dir / name) != source.read_bytes():
                raise _Differs("detrun's recorder has changed")
        except RecordError:
            raise _Differs("detrun's recorder has changed") from None


def _same_code(experiment: ExperimentFile, folder: ExperimentFolder, loaded: LoadedRecipe, segment: Segment) -> None:
    with tempfile.TemporaryDirectory(prefix="detrun-code-") as name:
        place = Path(name)
        now = snapshot_code(loaded.workdir, place)
        then = experiment.code
        if (then.commit, then.dirty) != (now.commit, now.dirty):
            raise _Differs("the commit or the state of the working tree has changed")
        if now.diff is not None or then.diff is not None:
            if now.diff is None or then.diff is None:
                raise _Differs("what is not committed has changed")
            if read_plain(folder.path / "code" / "diff.patch") != (place / "diff.patch").read_bytes():
                raise _Differs("what is not committed has changed")
        elif now.dirty and not then.program:
            raise _Differs("there are files that no commit holds")
    program = program_digest(segment.argv, Path(segment.workdir))
    if now.commit is None and not program:
        raise _Differs("nothing tells whether the program is the same: it lies in no repository")
    for path in sorted({*program, *then.program}):
        if program.get(path) != then.program.get(path):
            raise _Differs(f"{path} has changed")


def _same_environment(attempt: AttemptFolder, loaded: LoadedRecipe, cluster: str, segment: Segment) -> None:
    document = read_object(attempt.environment(0))
    launched = _launch_env(attempt)
    of_the_run = tuple(name for name in _OF_THE_RUN if name != "CUDA_VISIBLE_DEVICES")
    planned = {name: value for name, value in segment.env.items() if not name.startswith(of_the_run)}
    earlier = {name: value for name, value in launched.items() if not name.startswith(of_the_run)}
    for name in sorted({*planned, *earlier}):
        if planned.get(name) != earlier.get(name) and not (segment.threads and name == "OMP_NUM_THREADS"):
            raise _Differs(f"{name} was {earlier.get(name, 'not set')} and is {planned.get(name, 'not set')}")
    if cluster == "slurm" and (loaded.recipe.slurm.setup or loaded.recipe.slurm.container):
        return  # what the nodes have is known there alone, and compared after the run
    if cluster == "local":
        if document.get("host") != socket.gethostname():
            raise _Differs(f"it ran on {document.get('host')}, and this is {socket.gethostname()}")
        _same_variables(read_object(attempt.path / "launch.json"))
    python = next((text for text in segment.argv[:1] if Path(text).name.startswith("python")), None)
    if python is None:
        return
    version, installed = _interpreter(python, segment)
    told = document.get("python")
    if not isinstance(told, dict) or told.get("version") != version:
        raise _Differs("the Python has changed")
    recorded = document.get("packages")
    recorded = recorded if isinstance(recorded, dict) else {}
    for name in sorted({*recorded, *installed}):
        if recorded.get(name) != installed.get(name):
            was, now = recorded.get(name, "not installed"), installed.get(name, "not installed")
            raise _Differs(f"{name} was {was} and is {now}")


def _same_variables(launched: Mapping[str, Any]) -> None:
    """What a job on this machine inherits; what the command itself sets is held against the plan."""
    inherited, set_by_us = launched.get("inherited"), launched.get("env")
    if not isinstance(inherited, dict) or not isinstance(set_by_us, dict):
        raise _Differs("nothing tells which variables it inherited")
    now = redacted(os.environ)["clear"]
    for name in sorted({*inherited, *now}):
        if name in set_by_us or name.startswith(_OF_THE_RUN):
            continue
        if inherited.get(name) != now.get(name):
            raise _Differs(f"{name} was {inherited.get(name, 'not set')} and is {now.get(name, 'not set')}")


def _interpreter(python: str, segment: Segment) -> tuple[str | None, dict[str, str]]:
    """Version and packages of the Python that the command begins with."""
    path = trainer_path({**os.environ, **segment.env}, segment.prepend.get("PATH"))
    program = python if os.sep in python else shutil.which(python, path=path)
    source = f"import json, os, platform, sys\ndel sys.path[0]\n{inspect.getsource(packages)}"
    source += "print(json.dumps([platform.python_version(), packages()]))"
    try:
        done = subprocess.run(
            [program or python, "-c", source],
            cwd=segment.workdir,
            env={name: value for name, value in {**os.environ, **segment.env}.items() if name != "DETRUN_ATTEMPT_DIR"},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
        )
        version, installed = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None, {}
    return str(version), dict(installed)


def _launch_env(attempt: AttemptFolder) -> dict[str, Any]:
    env = read_object(attempt.path / "launch.json").get("env")
    return env if isinstance(env, dict) else {}
