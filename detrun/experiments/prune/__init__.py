"""`detrun prune`: what of an archive is no longer needed, by rules that cannot cost a verdict or a baseline.

Fingerprints stay for ever: experiment.json, verdict.json, metrics, environments, digests of the state, reports. Logs
stay for some days; traces, kept bytes and what the arms wrote themselves stay with failures and the newest experiments
of each recipe.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from detrun.errors import ArchiveError, RecordError
from detrun.experiments.against import last_good
from detrun.experiments.judge_against import AGAINST
from detrun.experiments.prune.remove import Folder, Size, open_experiment
from detrun.records.archive import Archive
from detrun.records.index import Entry, read_index
from detrun.records.jobs import FINAL_STATES, ExperimentFile, JobFile
from detrun.records.layout import ExperimentFolder
from detrun.records.pruned import NAME, Pruned, Removed, read_pruned

KEEP_LABEL = "keep"
LOGS, TRACES, BYTES, WORK = "logs", "traces", "kept bytes", "checkpoints and outputs"


@dataclass(frozen=True)
class PruneRules:
    """logs: days that logs stay. keep: how many of the newest experiments of a recipe keep everything but old logs."""

    logs: int = 30
    keep: int = 20


@dataclass(frozen=True)
class Candidate:
    """One file or folder that may go: its path within the experiment, and what it is."""

    path: str
    kind: str
    size: Size


@dataclass
class ExperimentPlan:
    """What may go of one experiment. failed: what could not be removed, and why."""

    id: str
    candidates: list[Candidate] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(each.size.bytes for each in self.candidates)


@dataclass
class PrunePlan:
    """What may go of an archive. kept: of how many experiments everything stays, by reason. left: what is left alone
    because it is not as detrun makes it."""

    archive: Path
    experiments: list[ExperimentPlan] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    done: bool = False

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.experiments)

    @property
    def failed(self) -> list[str]:
        return [f"{each.id}/{text}" for each in self.experiments for text in each.failed]


def plan_prune(archive: Archive, rules: PruneRules, now: datetime | None = None) -> PrunePlan:
    """What may go by these rules; nothing is removed. Raises ArchiveError where the archive cannot be read."""
    now = now or datetime.now(timezone.utc)
    plan = PrunePlan(archive.root)
    entries = read_index(archive)
    baselines = _baselines(archive, entries)
    newest = _newest(entries, rules.keep)
    for entry in entries:
        if why := _untouchable(archive, entry, baselines.whole):
            plan.kept[why] = plan.kept.get(why, 0) + 1
            continue
        kinds = [LOGS] if now - entry.created > timedelta(days=rules.logs) else []
        if entry.verdict != "identical":
            plan.kept["not identical"] = plan.kept.get("not identical", 0) + 1
        elif entry.id in newest:
            plan.kept["newest"] = plan.kept.get("newest", 0) + 1
        else:
            kinds += [TRACES, BYTES, WORK]
        if not kinds:
            continue
        found = ExperimentPlan(entry.id)
        with open_experiment(archive.root, entry.id) as folder:
            if folder is None:
                plan.left.append(f"{entry.id}: is not a folder of ours")
                continue
            _look(
                folder, "", kinds, baselines.arms.get(entry.id, frozenset()), _by_program(archive, entry), found, plan
            )
        if found.candidates:
            plan.experiments.append(found)
    return plan


def apply_prune(archive: Archive, plan: PrunePlan, now: datetime | None = None) -> PrunePlan:
    """Removes what the plan names, experiment by experiment, each noted in its pruned.json before it goes.

    What cannot be removed is in `failed`; the rest goes on. An experiment that came to life or became a baseline since
    the plan was made is left alone.
    """
    when = (now or datetime.now(timezone.utc)).isoformat(timespec="seconds")
    entries = read_index(archive)
    by_id = {entry.id: entry for entry in entries}
    baselines = _baselines(archive, entries)
    for each in plan.experiments:
        entry = by_id.get(each.id)
        if entry is None or _untouchable(archive, entry, baselines.whole):
            each.candidates.clear()
            continue
        arms = baselines.arms.get(each.id, frozenset())
        each.candidates = [item for item in each.candidates if not _is_of(item.path, arms)]
        folder = ExperimentFolder(archive.root / each.id)
        with open_experiment(archive.root, each.id) as place:
            if place is None or not each.candidates:
                each.candidates.clear()
                continue
            try:
                _note(folder, each.candidates, when)
            except ArchiveError as error:
                each.failed.append(f"{NAME}: {error.what}")
                each.candidates.clear()
                continue
            gone = []
            for item in each.candidates:
                if why := place.remove(item.path):
                    each.failed.append(f"{item.path}: {why}")
                else:
                    gone.append(item)
            each.candidates = gone
    plan.done = True
    return plan


def _note(folder: ExperimentFolder, candidates: Sequence[Candidate], when: str) -> None:
    note = read_pruned(folder) or Pruned()
    note.removed = [
        *note.removed,
        *(
            Removed(path=each.path, kind=each.kind, bytes=each.size.bytes, files=each.size.files, when=when)
            for each in candidates
        ),
    ]
    note.write(folder.path / NAME)


@dataclass(frozen=True)
class _Baselines:
    """whole: experiments that are kept as they are. arms: those of which single arms are, because another experiment
    holds its own against them."""

    whole: frozenset[str]
    arms: dict[str, frozenset[str]]


def _baselines(archive: Archive, entries: Sequence[Entry]) -> _Baselines:
    whole: set[str] = set()
    arms: dict[str, set[str]] = {}
    for recipe in {entry.recipe for entry in entries}:
        whole |= {entry.id for entry in last_good(list(entries), None, recipe)[:1]}
    for entry in entries:
        if entry.labels.get(KEEP_LABEL):
            whole.add(entry.id)
        if entry.experiment == "pair":
            continue  # runs all its arms itself
        try:
            asked = ExperimentFile.read(archive.root / entry.id / "experiment.json")
        except RecordError:
            continue
        if asked.reference is not None:
            arms.setdefault(asked.reference.experiment, set()).add(asked.reference.arm)
        told = asked.options.get("candidate") if entry.experiment == AGAINST else None
        if isinstance(told, dict):
            arms.setdefault(str(told.get("experiment")), set()).add(str(told.get("arm")))
    return _Baselines(frozenset(whole), {id: frozenset(names) for id, names in arms.items()})


def _newest(entries: Sequence[Entry], keep: int) -> set[str]:
    count: dict[str, int] = {}
    newest = set()
    for entry in reversed(entries):
        count[entry.recipe] = count.get(entry.recipe, 0) + 1
        if count[entry.recipe] <= keep:
            newest.add(entry.id)
    return newest


def _untouchable(archive: Archive, entry: Entry, whole: frozenset[str]) -> str | None:
    """Why nothing of an experiment may go, not even old logs."""
    if entry.verdict is None:
        return "without a verdict"
    if entry.id in whole:
        return "baseline"
    return "running" if _is_alive(ExperimentFolder(archive.root / entry.id)) else None


def _is_alive(folder: ExperimentFolder) -> bool:
    """Whether an attempt, its own or a pass's, has not come to its end as far as its job.json knows."""
    for place in (folder, *folder.passes().values()):
        try:
            arms = sorted(os.listdir(place.path / "arms"))  # noqa: PTH208
        except OSError:
            continue
        for arm in arms:
            for attempt in place.attempts(arm):
                try:
                    if JobFile.read(attempt.job_file).state not in FINAL_STATES:
                        return True
                except RecordError:
                    continue
    return False


def _by_program(archive: Archive, entry: Entry) -> bool:
    """Whether the metrics are files of the program's own: then its logs and outputs are the fingerprints."""
    try:
        rules = ExperimentFile.read(archive.root / entry.id / "experiment.json").recipe.get("metrics")
    except RecordError:
        return True
    return isinstance(rules, dict) and rules.get("source", "recorder") != "recorder"


def _look(
    folder: Folder,
    within: str,
    kinds: Sequence[str],
    arms: frozenset[str],
    by_program: bool,
    found: ExperimentPlan,
    plan: PrunePlan,
) -> None:
    """Adds what may go of one experiment's folder, or of a pass in it."""
    for name in folder.folders(f"{within}arms"):
        arm = f"{within}arms/{name}"
        if not within and name in arms:
            continue
        paths: list[tuple[str, str]] = []
        if WORK in kinds and not by_program:
            paths.append((f"{arm}/work", WORK))
        for attempt in folder.folders(arm):
            if not attempt.startswith("attempt-"):
                continue
            here = f"{arm}/{attempt}"
            if LOGS in kinds and not by_program:
                paths.append((f"{here}/log", LOGS))
            if TRACES in kinds:
                paths.append((f"{here}/trace", TRACES))
            if BYTES in kinds:
                paths.append((f"{here}/kept", BYTES))
                paths += [
                    (f"{here}/state/{boundary}/{file}", BYTES)
                    for boundary in folder.folders(f"{here}/state")
                    for file in folder.files(f"{here}/state/{boundary}")
                    if file.endswith(".bytes")
                ]
        for path, kind in paths:
            size = folder.size(path)
            if isinstance(size, str):
                plan.left.append(f"{found.id}/{path}: {size}")
            elif size is not None and (size.files or size.bytes):
                found.candidates.append(Candidate(path, kind, size))
    if not within:
        for name in folder.folders("passes"):
            _look(folder, f"passes/{name}/", kinds, frozenset(), by_program, found, plan)


def _is_of(path: str, arms: frozenset[str]) -> bool:
    parts = path.split("/")
    return parts[0] == "arms" and parts[1] in arms
