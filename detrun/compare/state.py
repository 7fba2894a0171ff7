"""Holds what one rank had at a boundary in two runs against each other, row by row. Pure: rows in, differences out.

`a` is the uninterrupted reference, `b` the run that was restored. Nothing is equal by omission: a row that only one
side has is a difference of its own kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from detrun.compare.streams_ahead import draws_between
from detrun.fingerprint.elements import compare_bytes
from detrun.records.state_row import Standing, StateRow

Key = tuple[str, str, str]
Kind = Literal["different", "missing", "extra", "incomparable"]
Bytes = Callable[[StateRow], bytes | None]

MAX_LISTED = 200
"""Differences of a group that are listed one by one; more are counted."""


@dataclass(slots=True)
class RowDifference:
    """One piece of state that is not the same on one rank.

    kind: `missing` in the restored run, `extra` there, `incomparable` (digests of different algorithms). differing,
    ulp: elements that differ and the largest distance, where the bytes of both were kept. ahead: draws by which a
    random number stream is ahead of the reference's (negative: behind). from_rank: the rank whose state of the
    reference it holds instead. at_start: a stream that is where it was before the first step. saved: whether the
    checkpoint holds what the reference had (None: not known); saved_as: what the reference had when it was written, a
    digest or a generator's bytes, by which it can be found there.
    """

    key: Key
    rank: int
    kind: Kind
    a: StateRow | None
    b: StateRow | None
    differing: int | None = None
    ulp: int | None = None
    ahead: int | None = None
    from_rank: int | None = None
    at_start: bool = False
    saved: bool | None = None
    saved_as: str | bytes | None = None

    @property
    def row(self) -> StateRow:
        row = self.a if self.a is not None else self.b
        assert row is not None
        return row

    @property
    def component(self) -> str:
        return self.key[0]

    @property
    def standing(self) -> Standing:
        """The strictest of both sides'."""
        sides = {row.standing for row in (self.a, self.b) if row is not None}
        return next(standing for standing in ("hard", "surviving", "soft") if standing in sides)

    @property
    def name(self) -> str:
        """With the part of a tensor subclass: `layers.0.weight (scale)`."""
        _, name, part = self.key
        return f"{name} ({part})" if part else name

    @property
    def label(self) -> str:
        """The group that a table shows in one line: all first moments, one random number stream."""
        return label_of(self.key)


def label_of(key: Key) -> str:
    """`exp_avg`, `RNG numpy`, `parameters (scale)`."""
    component, name, part = key
    if component == "optimizer":
        return split_state(name)[1]
    if component == "rng":
        return f"RNG {name}"
    return f"{component} ({part})" if part and part != "local" else component


def split_state(name: str) -> tuple[str, str]:
    """A parameter and what the optimizer keeps for it: `weight` and `exp_avg`; items of a list are one."""
    words = name.split(".")
    while len(words) > 2 and words[-1].isdigit():
        words.pop()
    return ".".join(words[:-1]), words[-1]


@dataclass(slots=True)
class RankComparison:
    """What a comparison of one rank's rows found: how many rows each group has, and those that are not the same."""

    rank: int
    groups: dict[str, int] = field(default_factory=dict)
    differences: list[RowDifference] = field(default_factory=list)
    unseeded: list[str] = field(default_factory=list)


def compare_rows(
    rank: int,
    a: Iterable[StateRow],
    b: Iterable[StateRow],
    bytes_a: Bytes | None = None,
    bytes_b: Bytes | None = None,
    unseen: Collection[str] = (),
) -> RankComparison:
    """Every row of both sides. bytes_a, bytes_b: what was kept of a row, for counting elements and draws. unseen:
    components that one of the runs did not live to capture."""
    left = {row.key: row for row in a if row.component not in unseen}
    right = {row.key: row for row in b if row.component not in unseen}
    found = RankComparison(rank)
    for key, x in left.items():
        y = right.get(key)
        if x.component == "rng" and x.info.get("unseeded"):
            found.unseeded.append(x.name)  # its state is the operating system's choice
            continue
        label = label_of(key)
        found.groups[label] = found.groups.get(label, 0) + 1
        if y is None:
            if not _absent(x):
                found.differences.append(RowDifference(key, rank, "missing", x, None))
        elif not _equal(x, y):
            found.differences.append(_measured(rank, x, y, bytes_a, bytes_b))
    extra = [row for key, row in right.items() if key not in left and not _absent(row)]
    found.differences += [RowDifference(row.key, rank, "extra", None, row) for row in extra]
    _forgive_moved(found)
    return found


def _absent(row: StateRow) -> bool:
    """Nothing is there, or nothing but zeros where none would do as well (a gradient)."""
    return (row.digest is None and row.value is None) or bool(row.info.get("zero"))


def _equal(x: StateRow, y: StateRow) -> bool:
    if x.digest is not None and x.digest == y.digest:
        return True
    if x.digest is None and y.digest is None and x.value is None and y.value is None:
        return True
    if x.component == "gradients" and _absent(x) and _absent(y):
        return True
    # Loading turns a tensor of one element into a number and back, which changes nothing that is computed from it.
    return x.value is not None and y.value is not None and _number(x.value) == _number(y.value)


def _number(text: str) -> object:
    """A value's text as a number where it is one, so that 10 is 10.0; -0.0 is not 0.0."""
    if text in ("True", "False", "None"):
        return text
    try:
        number = float.fromhex(text) if "0x" in text else float(text)
    except (ValueError, OverflowError):
        return text
    if number != number:
        return text
    return (number, str(number)[0] == "-")


def _measured(rank: int, x: StateRow, y: StateRow, bytes_a: Bytes | None, bytes_b: Bytes | None) -> RowDifference:
    if x.digest is not None and y.digest is not None:
        algorithms = x.digest.partition(":")[0], y.digest.partition(":")[0]
        if algorithms[0] != algorithms[1]:
            return RowDifference(x.key, rank, "incomparable", x, y)
    absent = y.digest is None and y.value is None
    difference = RowDifference(x.key, rank, "missing" if absent else "different", x, y)
    p, q = bytes_a(x) if bytes_a else None, bytes_b(y) if bytes_b else None
    if p is None or q is None:
        return difference
    if x.component == "rng":
        generator = str(x.info.get("generator", ""))
        if generator == y.info.get("generator"):
            difference.ahead = draws_between(generator, p, q)
    elif x.dtype == y.dtype and x.shape == y.shape and len(p) == len(q):
        elements = compare_bytes(p, q, x.dtype)
        difference.differing, difference.ulp = elements.differing, elements.max_ulp
    return difference


def _forgive_moved(found: RankComparison) -> None:
    """A random number stream that is held under another name after a restore is still that stream."""
    extras = {d.b.digest: d for d in found.differences if d.kind == "extra" and d.component == "rng" and d.b}
    for difference in [d for d in found.differences if d.kind == "missing" and d.component == "rng"]:
        digest = difference.a.digest if difference.a else None
        twin = extras.pop(digest, None) if digest else None
        if twin is not None:
            found.differences.remove(twin)
            found.differences.remove(difference)


def surviving(
    at_begin: Sequence[RowDifference],
    at_save: Mapping[Key, bool],
    later: RankComparison | None,
) -> tuple[list[RowDifference], list[RowDifference]]:
    """Divides a begin's differences into those that count and those that may only explain others.

    at_save: by row, whether the two runs agreed on it when the checkpoint was written; a row that already differed
    there (a clock, a path) says nothing. later: the rows one step later; what a step makes anew has become equal by
    then, what was lost has not.
    """
    still = {d.key for d in later.differences} if later is not None else set()
    if later is None:  # no step follows: a stream that differs is taken for lost
        still = {d.key for d in at_begin if d.component == "rng"}
    kept = {split_state(name)[1] for component, name, _ in at_save if component == "optimizer"}
    counted, explaining = [], []
    for difference in at_begin:
        standing = difference.standing
        # An object that only a resumed run has, such as a fresh sampler, is no state that was lost; nor is what looks
        # like an optimizer's and is of a kind that none has for any parameter, such as the weights that were loaded.
        new = difference.kind == "extra" and difference.component in ("rng", "ema")
        if difference.kind == "extra" and difference.component == "optimizer" and kept:
            new = split_state(difference.key[1])[1] not in kept
        lost = standing == "surviving" and difference.key in still and at_save.get(difference.key, False)
        if not new and (standing == "hard" or lost):
            counted.append(difference)
        elif at_save.get(difference.key, True):
            explaining.append(difference)
    return counted, explaining


@dataclass(slots=True)
class GroupTally:
    """A group of rows over all ranks: the largest number of rows on a rank, and the differences."""

    label: str
    rows: int = 0
    ranks: int = 0
    differences: list[RowDifference] = field(default_factory=list)
    more: int = 0

    def add(self, rows: int, differences: Sequence[RowDifference]) -> None:
        """Adds one rank."""
        self.rows = max(self.rows, rows)
        self.ranks += 1
        room = MAX_LISTED - len(self.differences)
        self.differences += differences[:room]
        self.more += max(0, len(differences) - room)

    def merge(self, other: GroupTally) -> None:
        """Adds other ranks."""
        self.rows = max(self.rows, other.rows)
        self.ranks += other.ranks
        room = max(0, MAX_LISTED - len(self.differences))
        self.differences += other.differences[:room]
        self.more += other.more + max(0, len(other.differences) - room)

    @property
    def on(self) -> list[int]:
        """The ranks on which something differs."""
        return sorted({difference.rank for difference in self.differences})


def tally_groups(groups: dict[str, GroupTally], counts: Mapping[str, int], found: Sequence[RowDifference]) -> None:
    """Adds one rank's rows to the groups. counts: rows by group that were compared."""
    by_label: dict[str, list[RowDifference]] = {}
    for difference in found:
        by_label.setdefault(difference.label, []).append(difference)
    for label in {**counts, **by_label}:
        tally = groups.setdefault(label, GroupTally(label))
        tally.add(counts.get(label, 0), by_label.get(label, []))
