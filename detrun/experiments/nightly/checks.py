"""A recipe's part of a night: its pair, then its resume check, then the night held against a good one.

Each is a generator that comes back while its jobs run, so that one thread follows many recipes. What goes wrong with
one of them stays with it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from detrun.errors import DetrunError, ExitCode, RecipeError
from detrun.experiments.checks import PairOptions
from detrun.experiments.clusters import choose_cluster, cluster_of
from detrun.experiments.follow import FINAL, Follower, Pace
from detrun.experiments.judge import judge
from detrun.experiments.nightly.run import LockLost, NightlyOptions, NightRun, never_submitted, no_job_written
from detrun.experiments.pair import start_pair
from detrun.experiments.resume import ResumeOptions, check_resumable, start_resume
from detrun.recipe import LoadedRecipe, load_recipe
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import ExperimentFolder
from detrun.records.nights import OPEN, Item
from detrun.records.verdict import Verdict

Steps = Generator[float, None, None]
"""Yields after how many seconds to look again."""


def load_for_night(path: str) -> LoadedRecipe:
    """The recipe, its arms as steps of one job unless it says otherwise: one wait in the queue, the same nodes."""
    loaded = load_recipe(Path(path))
    return loaded if "placement" in loaded.lines else load_recipe(Path(path), ["placement=allocation"])


def plan_items(path: str, options: NightlyOptions, baseline: str | None = None) -> list[Item]:
    """What is to be asked of a recipe. One that cannot be read is one item, which will say so. baseline: the recipe of
    the one experiment that the night is held against; those of other recipes are not."""
    kinds = options.kinds
    try:
        loaded = load_for_night(path)
        name = loaded.recipe.name
        if "resume-check" in kinds and "pair" in kinds and not _can_resume(loaded):
            kinds.remove("resume-check")
        if "against" in kinds and baseline not in (None, name):
            kinds.remove("against")
    except DetrunError:
        name, kinds = Path(path).stem, kinds[:1]
    held = options.against
    return [Item(recipe=name, path=path, kind=kind, baseline=held if kind == "against" else None) for kind in kinds]


def _can_resume(loaded: LoadedRecipe) -> bool:
    """Whether the recipe says how to resume. One that says it wrong is asked, and the answer is an error."""
    if loaded.recipe.checkpoint is None:
        return False
    try:
        check_resumable(loaded)
    except RecipeError:
        return bool(loaded.recipe.interrupt)
    return True


def follow_recipe(run: NightRun, path: str) -> Steps:
    """All checks of one recipe, one after the other."""
    items = {item.kind: item for item in run.night.of([path])}
    if not any(item.state in OPEN for item in items.values()):
        return
    try:
        loaded = load_for_night(path)
    except DetrunError as error:
        for item in items.values():
            if item.state in OPEN and item.kind != "localize":
                run.fail(item, error)
        return
    pair = items.get("pair")
    if pair is not None:
        yield from _check(run, pair, lambda: _start_pair(run, loaded))
    if (resume := items.get("resume-check")) is not None and resume.state in OPEN:
        if pair is not None and pair.verdict != "identical":
            run.leave_out(resume, "not checked: it can only be where the pair is identical", ExitCode.NOT_VERIFIED)
        else:
            yield from _check(run, resume, lambda: _start_resume(run, loaded))
    if (against := items.get("against")) is not None and against.state in OPEN:
        hold(run, against, pair)


def _start_pair(run: NightRun, loaded: LoadedRecipe) -> ExperimentFolder:
    options = PairOptions(agreed=run.options.agreed, labels=run.labels)
    cluster = choose_cluster(loaded.recipe.cluster)
    return start_pair(loaded, run.archive, cluster, options, run.command_line, run.say)


def _start_resume(run: NightRun, loaded: LoadedRecipe) -> ExperimentFolder:
    options = ResumeOptions(agreed=run.options.agreed, labels=run.labels)
    cluster = choose_cluster(loaded.recipe.cluster)
    return start_resume(loaded, run.archive, cluster, options, run.command_line, run.say)


def _check(run: NightRun, item: Item, start: Callable[[], ExperimentFolder]) -> Steps:
    """One experiment to its verdict: found where it was begun, else started."""
    if item.state not in OPEN:
        return
    run.begun[id(item)] = time.monotonic()
    try:
        for last in (False, True):
            folder = run.folder_of(item)
            if folder is not None and not folder.verdict_file.exists() and no_job_written(folder):
                run.check()
                _discard(item, folder)
                folder = None
            if folder is None:
                run.check()
                folder = start()
                run.say(f"{item.recipe} {item.kind}: {folder.id}")
            else:
                run.say(f"{item.recipe} {item.kind}: {folder.id} is taken up")
            item.experiment, item.state = folder.id, "running"
            run.save()
            if folder.verdict_file.exists():
                verdict = Verdict.read(folder.verdict_file)
            else:
                yield from _wait(folder)
                run.check()
                if not last and never_submitted(folder):
                    _discard(item, folder)
                    continue
                verdict = judge(folder.path)
            run.settle(item, folder, verdict)
            return
    except LockLost:
        raise
    except DetrunError as error:
        run.fail(item, error)
    except Exception as error:  # noqa: BLE001  the night goes on with the other recipes
        run.fail(item, run.bug(error))


def _wait(folder: ExperimentFolder) -> Iterator[float]:
    experiment = ExperimentFile.read(folder.experiment_file)
    pace = Pace.of(experiment.cluster)
    follower = Follower(cluster_of(experiment), folder, pace)
    while not all(view.state in FINAL for view in follower.look()):
        yield pace.look


def _discard(item: Item, folder: ExperimentFolder) -> None:
    """Removes an experiment none of whose jobs ever ran."""
    item.experiment = None
    shutil.rmtree(folder.path, ignore_errors=True)


def hold(run: NightRun, item: Item, pair: Item | None) -> None:
    """The pair's first arm against that of a good night."""
    from detrun.experiments.against import hold_against

    baseline = item.baseline or run.options.against
    if pair is None or pair.experiment is None or pair.verdict is None:
        run.leave_out(item, "not held against anything: the pair left no verdict", ExitCode.NOT_VERIFIED)
        return
    if baseline is None:
        run.leave_out(item, "not held against anything: nothing says against what", ExitCode.NOT_VERIFIED)
        return
    try:
        run.check()
        item.of = pair.experiment
        place = run.folder_of(item)
        if place is not None and place.verdict_file.exists():
            verdict = Verdict.read(place.verdict_file)
        else:
            verdict = hold_against(run.archive, ExperimentFolder(run.archive.root / pair.experiment), baseline)
        item.experiment = verdict.id
        run.settle(item, ExperimentFolder(run.archive.root / verdict.id), verdict)
    except LockLost:
        raise
    except DetrunError as error:
        run.fail(item, error)
    except Exception as error:  # noqa: BLE001
        run.fail(item, run.bug(error))
