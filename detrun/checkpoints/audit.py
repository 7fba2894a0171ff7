"""Faults that the checkpoints of a run show by themselves: torn ones, stale ones, streams that ranks share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from detrun.checkpoints.entry import Entry
from detrun.checkpoints.find import Found, find_checkpoints
from detrun.checkpoints.layouts import Alike, alike_by_design
from detrun.checkpoints.pointers import Pointer, pointers
from detrun.checkpoints.random_states import RandomState, random_states
from detrun.checkpoints.read import open_checkpoint
from detrun.errors import RecordError
from detrun.fingerprint.byte_digest import ByteHasher

Kind = Literal["partial", "unreadable", "stale", "pointer", "shared-streams", "not-for-resuming"]


@dataclass(frozen=True)
class Fault:
    """Something that is wrong, or looks wrong, in a directory of checkpoints.

    kind: `partial` (torn, or a save under way), `unreadable` (whole, but a part of it cannot be read), `stale`
    (parameters and optimizer are those of an earlier checkpoint, byte for byte), `pointer` (says something that is not
    on disk), `shared-streams` (ranks have equal random streams where they must differ), `not-for-resuming` (whole, and
    holds less than a training goes on from). certain: False for what may be meant so.
    """

    kind: Kind
    path: Path
    what: str
    certain: bool = True
    evidence: dict[str, Any] = field(default_factory=dict)


def audit(directory: Path, pattern: str | None = None) -> list[Fault]:
    """The faults of a directory's checkpoints, oldest first. Reads every complete one once, a block at a time.

    Raises UsageError for a pattern that tells no step, as `find_checkpoints` does.
    """
    found = find_checkpoints(directory, pattern)
    faults = [Fault("partial", each.path, each.why) for each in found if not each.complete]
    seen: dict[str, Path] = {}
    once_differed: set[tuple[str, str]] = set()
    for each in found:
        if not each.complete:
            continue
        if each.no_resume:
            faults.append(Fault("not-for-resuming", each.path, each.no_resume, certain=False))
        look = _look(each.path)
        faults += [Fault("unreadable", each.path, problem) for problem in look.problems]
        if look.tensors and look.rolled in seen:
            what = f"all {look.tensors:,} floating-point tensors are those of {seen[look.rolled].name}, byte for byte"
            faults.append(Fault("stale", each.path, what, evidence={"earlier": str(seen[look.rolled])}))
        elif look.tensors:
            seen[look.rolled] = each.path
        states = _joined(look.states, alike_by_design(each.layout))
        faults += _shared_streams(each.path, states, once_differed)
    return faults + [fault for pointer in pointers(directory) for fault in _pointer(directory, pointer, found)]


@dataclass
class _Look:
    """What one pass over a checkpoint gave; rolled: one digest of all tensors that training changes."""

    tensors: int = 0
    rolled: str = ""
    problems: list[str] = field(default_factory=list)
    states: list[RandomState] = field(default_factory=list)


def _look(path: Path) -> _Look:
    look = _Look()
    digests: list[tuple[str, str]] = []
    with open_checkpoint(path) as checkpoint:
        look.states = list(random_states(_digested(checkpoint.entries(), digests, look.problems)))
    hasher = ByteHasher()
    for name, digest in sorted(digests):
        hasher.feed_text(name)
        hasher.feed_text(digest)
    look.tensors, look.rolled = len(digests), hasher.text()
    return look


def _digested(entries: Iterable[Entry], digests: list[tuple[str, str]], problems: list[str]) -> Iterator[Entry]:
    for entry in entries:
        try:
            if entry.problem is not None:
                problems.append(f"{entry.name}: {entry.problem}")
            elif _trained(entry):
                digests.append((entry.name, entry.digest() or ""))
        except RecordError as error:
            problems.append(f"{entry.name}: {error}")
        yield entry


def _trained(entry: Entry) -> bool:
    """Whether training changes it and does more than count: counters and positions go on where buffers are stale."""
    return "float" in entry.dtype and entry.data is not None and entry.nbytes > 8 and len(entry.shape) > 0


def _joined(states: Iterable[RandomState], designs: Sequence[Alike]) -> list[RandomState]:
    """The states, those that ranks have alike by design as one: that of the ranks without the coordinate in which they
    differ. Where ranks that may be alike are not, all are kept."""
    kept: list[RandomState] = []
    groups: dict[tuple[str, str, str], list[RandomState]] = defaultdict(list)
    for state in states:
        design = next((each for each in designs if each.entry.fullmatch(state.name)), None)
        place = state.rank.split(".") if state.rank is not None else []
        if design is None or design.along >= len(place):
            kept.append(state)
            continue
        del place[design.along]
        groups[state.template, state.generator, ".".join(place)].append(state)
    for (_, _, rank), members in groups.items():
        alike = len({state.raw for state in members}) == 1
        kept += [replace(members[0], rank=rank or None)] if alike else members
    return kept


def _shared_streams(path: Path, states: Iterable[RandomState], once_differed: set[tuple[str, str]]) -> Iterator[Fault]:
    """Streams that several ranks have alike: certain if an earlier checkpoint had them apart, or other ranks do."""
    groups: dict[tuple[str, str], dict[str, list[RandomState]]] = defaultdict(dict)
    for state in states:
        if state.rank is not None:
            groups[state.template, state.generator].setdefault(state.rank, []).append(state)
    apart = {key for key, ranks in groups.items() if len(ranks) > 1 and not _alike(ranks)}
    for key, ranks in groups.items():
        alike = _alike(ranks) if len(ranks) > 1 else []
        if not alike:
            continue
        names = ", ".join(alike[0])
        if key in once_differed:
            why, certain = "an earlier checkpoint has them apart", True
        elif sum(map(len, alike)) < len(ranks) or len(alike) > 1:
            why, certain = "those of other ranks differ", True
        elif apart:
            why, certain = "other streams differ from rank to rank", False
        else:
            continue
        template, generator = key
        what = f"{template}: ranks {names} have one {generator} stream, and {why}"
        yield Fault("shared-streams", path, what, certain, {"ranks": alike, "generator": generator})
    once_differed |= apart


def _alike(ranks: dict[str, list[RandomState]]) -> list[list[str]]:
    """Groups of ranks whose states are equal."""
    same: dict[tuple[bytes, ...], list[str]] = defaultdict(list)
    for rank, states in ranks.items():
        same[tuple(state.raw for state in states)].append(rank)
    return [members for members in same.values() if len(members) > 1]


def _pointer(directory: Path, pointer: Pointer, found: list[Found]) -> Iterator[Fault]:
    path = directory / pointer.name
    named = [each for each in found if each.path.name == Path(pointer.target).name]
    if not named and pointer.step is not None:
        named = [each for each in found if each.step == pointer.step]
    if not named and pointer.target and _there(directory, pointer.target):
        return
    last = max((each.step for each in found if each.complete and each.step is not None), default=None)
    on_disk = "no complete checkpoint is on disk" if last is None else f"the newest complete one is of step {last}"
    if not named:
        yield Fault("pointer", path, f"points to {pointer.target}, which is not on disk; {on_disk}")
    elif not any(each.complete for each in named):
        yield Fault("pointer", path, f"points to {named[0].path.name}, which is partial: {named[0].why}; {on_disk}")


def _there(directory: Path, target: str) -> bool:
    try:
        return (directory / target).exists()
    except (OSError, ValueError):
        return False
