"""A pass: an experiment that another one runs on its way, in a folder inside that one's.

A pass leaves what any experiment leaves, so that it can be judged again from its folder alone. It is done once its
verdict.json is there: a command that was stopped goes on with the first pass that has none.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from detrun.errors import ArchiveError, RecordError
from detrun.experiments.follow import Follower, Pace
from detrun.experiments.judge import judge
from detrun.experiments.plan import Plan
from detrun.experiments.start import Question, start_in
from detrun.launch.cluster import Cluster
from detrun.recipe import LoadedRecipe
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import MARKER, ExperimentFolder
from detrun.records.verdict import Verdict

_LOCK = ".lock"


def run_pass(
    loaded: LoadedRecipe,
    folder: ExperimentFolder,
    name: str,
    cluster: Cluster,
    question: Question,
    plan_in: Callable[[ExperimentFolder], Plan],
    command_line: Sequence[str],
    say: Callable[[str], None],
    *,
    pace: Pace | None = None,
) -> tuple[ExperimentFolder, Verdict]:
    """Runs one pass of the experiment in `folder` to its verdict, and returns the pass's folder and that.

    name: lower-case words joined by `-`; it stands for what the pass asks, and a pass of that name is run once. say:
    told in one line when it starts and how it ended. A Ctrl-C leaves its jobs running; called again, it waits for
    them. Of two commands at one experiment the second waits for the first. Raises what submitting raises, ArchiveError
    where the folder cannot be written.
    """
    _check(name)
    with _alone(folder, name, say):
        place = folder.passes().get(name)
        if place is not None:
            if place.verdict_file.exists():
                return place, Verdict.read(place.verdict_file)
            if not _was_written(place):
                shutil.rmtree(place.path, ignore_errors=True)
                place = None
        if place is None:
            place = _create(folder, name)
            say(f"pass {place.path.name} …")
            start_in(place, loaded, cluster, question, plan_in, command_line)
        else:
            say(f"pass {place.path.name}: taken up where it was left")
        return place, _wait(place, cluster, pace, say)


@contextmanager
def _alone(folder: ExperimentFolder, name: str, say: Callable[[str], None]) -> Iterator[None]:
    """While held, no other command runs a pass of this experiment; one that does is waited for.

    The lock goes with the process that holds it, however that ends. Where the folder cannot be locked (a file system
    without locks, one that is read-only) nothing is held.
    """
    try:
        folder.passes_dir.mkdir(exist_ok=True)
        handle = os.open(folder.passes_dir / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"pass {name}: another command is at {folder.id}, which is waited for")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


def _wait(place: ExperimentFolder, cluster: Cluster, pace: Pace | None, say: Callable[[str], None]) -> Verdict:
    Follower(cluster, place, pace or Pace.of(cluster.name)).follow(lambda _: None)
    verdict = judge(place.path, report=False)
    where = f" at step {verdict.first_divergence.step}" if verdict.first_divergence else ""
    say(f"pass {place.path.name}: {verdict.verdict.replace('-', ' ')}{where}")
    return verdict


def _create(folder: ExperimentFolder, name: str) -> ExperimentFolder:
    """A new folder after the last pass."""
    number = len(folder.passes()) + 1
    try:
        folder.passes_dir.mkdir(exist_ok=True)
        while True:
            place = folder.pass_folder(number, name)
            if not any(folder.passes_dir.glob(f"{number}-*")):
                place.path.mkdir()
                (place.path / MARKER).touch()
                return place
            number += 1
    except OSError as error:
        raise ArchiveError(f"a pass cannot be created here: {error.strerror}", where=str(folder.passes_dir)) from None


def _was_written(place: ExperimentFolder) -> bool:
    """Whether the command that made the folder came as far as submitting."""
    try:
        ExperimentFile.read(place.experiment_file)
    except RecordError:
        return False
    return any(place.jobs_dir.glob("*/spec.json"))


def _check(name: str) -> None:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,60}", name):
        raise ValueError(f"a pass cannot be called {name!r}")
