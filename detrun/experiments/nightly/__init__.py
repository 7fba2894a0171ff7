"""`detrun nightly`: every recipe's pair and resume check, what diverged localized, one summary, once a night.

A night is kept in the archive (records/nights.py) and run by whoever holds its lock (records/lock.py). Whoever comes
second follows the first, and takes over where that one dies; what is done is never done again. The jobs go on whatever
happens to the command.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from detrun.errors import DetrunError, SkippedError, worst_of
from detrun.experiments.against import LAST_GOOD
from detrun.experiments.nightly.checks import Steps, follow_recipe, plan_items
from detrun.experiments.nightly.localize import localize_all, plan_localizations
from detrun.experiments.nightly.run import CONCURRENT, NightlyOptions, NightRun, recipe_files
from detrun.launch.slurm import slurm_answers
from detrun.records.archive import Archive
from detrun.records.jobs import ExperimentFile
from detrun.records.lock import Holder, Lock
from detrun.records.nights import CHECKS, OPEN, Item, Night, check_name, nights_dir, now, read_night, read_nights
from detrun.report import night_words
from detrun.report.notify import Notifier

TAKEN_UP_WITHIN = timedelta(hours=20)
"""A night that was left unfinished is the same night for so long."""

LOOK = 2.0
"""Seconds between looks at a night that another command runs."""


@dataclass(frozen=True)
class NightResult:
    """What came of a night for the recipes of this call. news: something is not as it was the night before."""

    night: Night
    items: list[Item]
    summary: str
    news: bool

    @property
    def exit_code(self) -> int:
        """The worst of the checks; a localization says more about one of them and nothing of its own."""
        return worst_of(item.exit_code or 0 for item in self.items if item.kind in CHECKS)

    def document(self) -> dict[str, Any]:
        """The night as `--json` prints it, for the recipes of this call."""
        whole = self.night.model_dump(mode="json")
        own = [item.model_dump(mode="json") for item in self.items]
        return {**whole, "items": own, "summary": self.summary, "news": self.news, "exit_code": self.exit_code}


def run_nightly(
    given: Sequence[Path],
    archive: Archive,
    options: NightlyOptions,
    command_line: Sequence[str],
    say: Callable[[str], None],
    *,
    notifier: Notifier | None = None,
    name: str | None = None,
    wait: bool = True,
    look: float = LOOK,
) -> NightResult:
    """Runs a night, follows one that is being run, or says again what came of one that is finished.

    given: recipes, and folders of recipes. name: the night's; default: an unfinished one of the same recipes, else the
    local date. wait: whether a night that another command runs is followed. Raises SkippedError where another command
    runs another night (or, without wait, this one), UsageError for what is no recipe and no name, ArchiveError. What is
    wrong with one recipe is in its item.
    """
    paths = recipe_files(given)
    night = check_name(name) if name else _name(archive, paths)
    if options.against not in (None, LAST_GOOD):
        archive.resolve(options.against)  # what names no experiment is said now
    lock = Lock(nights_dir(archive) / "lock", {"night": night})
    told = False
    while not (found := _finished(archive, night, paths, options)):
        holder = lock.acquire()
        if holder is None:
            with lock, _stopped_by_signals():
                _run(archive, night, paths, options, lock, command_line, say, notifier)
            continue
        _check_holder(holder, night, wait)
        if not told:
            told = True
            say(f"night {night} is run by {holder.words}; it is followed, and taken over if that one dies")
        time.sleep(look)
    items = found.of(paths)
    before = _before(archive, found, paths)
    news = night_words.has_news(items, before)
    return NightResult(found, items, night_words.summary(night, items), news)


def _name(archive: Archive, paths: Sequence[str]) -> str:
    for night in reversed(read_nights(archive)):
        unfinished = night.finished is None or any(item.state in OPEN for item in night.items)
        if unfinished and night.age < TAKEN_UP_WITHIN and set(night.wanted) == set(paths):
            return night.night
    return f"{datetime.now(timezone.utc).astimezone():%Y-%m-%d}"  # by the clock of whoever reads it in the morning


def _finished(archive: Archive, name: str, paths: Sequence[str], options: NightlyOptions) -> Night | None:
    """The night, if nothing is left to be done in it for these recipes."""
    night = read_night(archive, name)
    if night is None or not all(night.is_done(path, options.kinds) for path in paths):
        return None
    return night if set(paths) <= set(night.told) else None


def _check_holder(holder: Holder, night: str, wait: bool) -> None:
    """Raises SkippedError unless the holder's night is the one to be followed."""
    theirs = holder.note.get("night", "?")
    if theirs != night:
        raise SkippedError(
            f"night {theirs} is being run by {holder.words}",
            hint=f"when it is done, this runs night {night}; one night at a time runs in an archive",
        )
    if not wait:
        raise SkippedError(
            f"night {night} is being run already, by {holder.words}", hint="without --no-wait: follow it"
        )


def _run(
    archive: Archive,
    name: str,
    paths: list[str],
    options: NightlyOptions,
    lock: Lock,
    command_line: Sequence[str],
    say: Callable[[str], None],
    notifier: Notifier | None,
) -> None:
    night = read_night(archive, name)
    taken_up = night is not None
    run = NightRun(
        archive, night or Night(night=name, created=now()), lock, options, command_line, say, taken_up=taken_up
    )
    _plan(run, paths)
    _follow(run, paths)
    localize_all(run, plan_localizations(run, paths))
    if not any(item.state in OPEN for item in run.night.items):
        run.night.finished = now()
    run.save()
    _update_pages(run)
    _tell(run, paths, notifier)


def _plan(run: NightRun, paths: Sequence[str]) -> None:
    """Puts what these recipes are to be asked into the night, beside what is there."""
    night = run.night
    against = run.options.against
    baseline = None
    if against not in (None, LAST_GOOD):
        baseline = ExperimentFile.read(run.archive.resolve(against).experiment_file).recipe_name
    for path in paths:
        if night.is_done(path, run.options.kinds):
            continue
        for item in plan_items(path, run.options, baseline):
            asked = night.wanted.get(path, [])
            if item.kind not in asked and night.item(path, item.kind) is None:
                night.items.append(item)
                night.finished = None
                night.told = [each for each in night.told if each != path]  # whom it concerns has not heard of this
        night.wanted[path] = list(dict.fromkeys([*night.wanted.get(path, []), *run.options.kinds]))
    run.save()


def _follow(run: NightRun, paths: Sequence[str]) -> None:
    """All recipes to their verdicts, so many at a time."""
    at_once = run.options.at_once or (CONCURRENT if slurm_answers() else 1)
    waiting = [follow_recipe(run, path) for path in paths]
    active: list[Steps] = []
    while waiting or active:
        while waiting and len(active) < at_once:
            active.append(waiting.pop(0))
        pause = 0.0
        for steps in list(active):
            try:
                pause = max(pause, next(steps))
            except StopIteration:
                active.remove(steps)
        if active and pause:
            time.sleep(pause)


def _update_pages(run: NightRun) -> None:
    """The archive's pages. One that cannot be written costs a night nothing."""
    from detrun.experiments.history import history_of, write_pages

    try:
        write_pages(run.archive, *history_of(run.archive))
    except (DetrunError, OSError) as error:
        run.say(f"warning: the history's page was not written: {error}")


def _tell(run: NightRun, paths: Sequence[str], notifier: Notifier | None) -> None:
    """Notifies whom it concerns, once: of recipes that were not told of before in this night."""
    new = [path for path in paths if path not in run.night.told]
    items = run.night.of(new)
    before = _before(run.archive, run.night, new)
    message = night_words.message(run.night.night, items, before)
    if notifier is not None and new:
        for warning in notifier.tell(nights_dir(run.archive) / "last-notified.json", message):
            run.say(f"warning: {warning}")
    run.night.told = [*run.night.told, *new]
    run.save()


def _before(archive: Archive, night: Night, paths: Sequence[str]) -> dict[str, list[Item]]:
    """What came of each recipe in the last night before this one that had it."""
    earlier = [each for each in read_nights(archive) if (each.created, each.night) < (night.created, night.night)]
    found: dict[str, list[Item]] = {}
    for path in paths:
        for each in reversed(earlier):
            if items := [item for item in each.of([path]) if item.state not in OPEN]:
                found[path] = items
                break
    return found


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """A scheduler's or a shell's way to end the command is a Ctrl-C: the lock is given back, the jobs go on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup
                signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
