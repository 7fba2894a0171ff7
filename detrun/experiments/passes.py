"""A pass: an experiment that another one runs on its way, in a folder inside that one's.

A pass leaves what any experiment leaves, so that it can be judged again from its folder alone. It is done once its
verdict.json is there: a command that was stopped goes on with the first pass that has none.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence

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
    them. Raises what submitting raises, ArchiveError where the folder cannot be written.
    """
    _check(name)
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
