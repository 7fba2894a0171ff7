"""What everything that a night does shares: its file, its lock, its experiments in the archive."""

from __future__ import annotations

import secrets
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from detrun.errors import DetrunError, InternalError, RecordError, SkippedError
from detrun.launch.submitted import read_submitted
from detrun.records.archive import Archive
from detrun.records.files import one_line, read_moment
from detrun.records.jobs import ExperimentFile, JobFile
from detrun.records.layout import ExperimentFolder
from detrun.records.lock import Lock
from detrun.records.nights import LABEL, Item, Kind, Night, junit_file, night_dir, night_file
from detrun.records.verdict import Verdict
from detrun.report.answer import head, sentence

CONCURRENT = 8
"""Recipes at a time where a scheduler queues them; on one machine they would disturb each other."""

LONGEST = 500
CLOCKS_APART = timedelta(hours=1)
"""By which the clocks of two login nodes may differ."""


@dataclass(frozen=True)
class NightlyOptions:
    """only: which checks are wanted. localize_budget: node-hours for all localizations together. against: `last-good`
    or the id of an experiment to hold the night against. at_once: recipes at a time, None for what suits the cluster.
    agreed: --yes was given."""

    only: tuple[Kind, ...] = ("pair", "resume-check")
    localize_budget: float = 2.0
    against: str | None = None
    at_once: int | None = None
    agreed: bool = False

    @property
    def kinds(self) -> list[Kind]:
        against: list[Kind] = ["against"] if self.against else []
        return [*self.only, *against]


class LockLost(SkippedError):  # noqa: N818  the errors' own names end so; this one is an answer
    """Somebody took this night over, so that nothing more may be started or written here."""


@dataclass
class NightRun:
    """One command at work on a night. say: told what happens, a line each."""

    archive: Archive
    night: Night
    lock: Lock
    options: NightlyOptions
    command_line: Sequence[str]
    say: Callable[[str], None]
    taken_up: bool
    begun: dict[int, float] = field(default_factory=dict)

    @property
    def labels(self) -> Mapping[str, str]:
        return {LABEL: self.night.night}

    def check(self) -> None:
        """Raises LockLost if the night is no longer ours."""
        if not self.lock.held():
            raise LockLost(
                f"night {self.night.night} was taken over by another command while this one did not move",
                where=str(self.lock.path),
                hint="give the command again: it follows the other one",
            )

    def save(self) -> None:
        """Writes the night as it stands, and its JUnit file."""
        from detrun.records.files import write_atomically
        from detrun.report.junit import night_xml

        self.check()
        self.night.write(night_file(self.archive, self.night.night))
        write_atomically(junit_file(self.archive, self.night.night), night_xml(self.night))

    def settle(self, item: Item, folder: ExperimentFolder, verdict: Verdict) -> None:
        """Notes an experiment's verdict."""
        experiment = ExperimentFile.read(folder.experiment_file)
        item.verdict, item.exit_code = verdict.verdict, int(verdict.exit_code)
        first = verdict.first_divergence
        item.step = first.step if first else None
        name = (verdict.culprit or {}).get("name")
        item.culprit = one_line(str(name), LONGEST) if name else None
        item.what = one_line(answer_of(verdict, experiment), LONGEST)
        item.node_hours = node_hours(folder)
        item.seconds = round(time.monotonic() - self.begun.pop(id(item), time.monotonic()), 1) or None
        item.state = "done"
        self.save()
        self.say(f"{item.recipe}: {item.what}")

    def fail(self, item: Item, error: DetrunError) -> None:
        """Notes why an item has no verdict; the night goes on."""
        item.state, item.exit_code = "error", int(error.exit_code)
        item.what = one_line(str(error), LONGEST)
        self.save()
        self.say(f"{item.recipe} {item.kind}: {item.what}")

    def bug(self, error: Exception) -> InternalError:
        """A bug of detrun as an error; its traceback is kept beside the night."""
        from detrun.records.files import write_atomically
        from detrun.report.notify import without_secrets

        text = without_secrets("".join(traceback.format_exception(error)))
        path = night_dir(self.archive, self.night.night) / f"bug-{secrets.token_hex(4)}.txt"
        write_atomically(path, text.encode("utf-8", "backslashreplace"))
        what = without_secrets(f"a bug of detrun: {type(error).__name__}: {error}")
        return InternalError(f"{what} (details: {path})")

    def leave_out(self, item: Item, why: str, code: int | None = None) -> None:
        """Notes that an item is not run. code: what that means for the night, where the item was a check."""
        item.state, item.exit_code, item.what = "left-out", code, one_line(why, LONGEST)
        self.save()
        self.say(f"{item.recipe} {item.kind}: {item.what}")

    def folder_of(self, item: Item) -> ExperimentFolder | None:
        """The experiment that answers an item, if it was begun: as noted, or, where a command died before it noted
        that, by its label."""
        if item.experiment is not None:
            folder = ExperimentFolder(self.archive.root / item.experiment)
            return folder if folder.experiment_file.exists() else None
        if not self.taken_up:
            return None
        try:
            begun = datetime.fromisoformat(self.night.created) - CLOCKS_APART
            since = f"{begun.astimezone(timezone.utc):%Y%m%dT%H%M%S}"
        except ValueError:
            since = ""
        for folder in reversed(self.archive.list()):
            # By the time in its id: an archive may hold years, and this night began today.
            if folder.id.split("-")[-2:][0] < since:
                break
            try:
                experiment = ExperimentFile.read(folder.experiment_file)
            except RecordError:
                continue
            if self._answers(experiment, item):
                return folder
        return None

    def _answers(self, experiment: ExperimentFile, item: Item) -> bool:
        if experiment.labels.get(LABEL) != self.night.night or experiment.experiment != item.kind:
            return False
        taken = {each.experiment for each in self.night.items}
        if experiment.id in taken:
            return False
        if item.kind == "localize":
            return experiment.reference is not None and experiment.reference.experiment == item.of
        if item.kind == "against":
            candidate = experiment.options.get("candidate")
            return isinstance(candidate, dict) and candidate.get("experiment") == item.of
        return experiment.recipe_path == item.path


def answer_of(verdict: Verdict, experiment: ExperimentFile) -> str:
    """The verdict in one line; where nothing is proved, the first reason."""
    if verdict.verdict == "not-verified" and verdict.not_verified:
        jobs = verdict.of_severity("infrastructure")
        return f"{head(verdict)}  {experiment.recipe_name}: {jobs[0].what if jobs else verdict.not_verified[0]}"
    return f"{head(verdict)}  {sentence(verdict, experiment)}"


def node_hours(folder: ExperimentFolder) -> float:
    """What an experiment's arms took, its passes' too: the time of each attempt times its nodes."""
    total = sum(node_hours(place) for place in folder.passes().values())
    for path in sorted((folder.path / "arms").glob("*/attempt-*/job.json")):
        try:
            job = JobFile.read(path)
        except RecordError:
            continue
        begin, end = read_moment(job.started), read_moment(job.ended)
        if begin and end and end > begin:
            total += (end - begin).total_seconds() / 3600 * max(1, len(job.nodes))
    return round(total, 6)


def never_submitted(folder: ExperimentFolder) -> bool:
    """Whether none of its jobs ever reached the scheduler: whoever would have submitted them died before."""
    return not any(read_submitted(path) for path in folder.jobs_dir.glob("*"))


def no_job_written(folder: ExperimentFolder) -> bool:
    """Whether the command that made the folder died before it came to submitting."""
    return not any(folder.jobs_dir.glob("*/spec.json"))


def recipe_files(given: Sequence[Path]) -> list[str]:
    """The recipes' files, absolute, each once: those named, and those right in the folders that are named."""
    from detrun.errors import UsageError

    found: list[Path] = []
    for path in given:
        if path.is_dir():
            try:
                listed = sorted(path.iterdir())
            except OSError as error:
                raise UsageError(f"{path} cannot be read: {error.strerror}") from None
            inside = [p for p in listed if p.suffix in (".yaml", ".yml") and not p.name.startswith(".")]
            if not inside:
                raise UsageError(f"{path} holds no recipe", hint="a recipe's name ends in .yaml or .yml")
            found += inside
        else:
            found.append(path)
    return list(dict.fromkeys(str(path.absolute()) for path in found))
