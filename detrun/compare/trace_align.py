"""Which event of one arm is which of the other: by key, and within a key's group by content.

The key of an event is (step, micro-batch, phase, scope, operation, occurrence), so that events of different threads may
interleave in any way. Events of one group, which differ in their occurrence alone, may come in another order as well:
those with the same content belong together, and what is left in order of occurrence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing
import pyarrow
import pyarrow.compute

from detrun.compare.trace_differ import Differences, differences, doubtful_parts, in_terms_of
from detrun.errors import RecordError
from detrun.records.trace_table import Digests, Integers, Mask, StepTable

_GROUP = ("phase", "scope", "op")
_MULTIPLIER = numpy.uint64(0x9E3779B97F4A7C15)
_ODD = numpy.uint64(0xBF58476D1CE4E5B9)
_SHIFT = numpy.uint64(29)
_MOST = 1 << 60


@dataclass(frozen=True)
class Alignment:
    """Pairs in a's order of execution.

    rows_a, rows_b: rows of the pairs. only_a, only_b: rows without a partner. uneven: of pairs, whether one arm has
    more events of their group. moved: pairs whose occurrence is another one in b. differences: of the pairs.
    """

    rows_a: Integers
    rows_b: Integers
    only_a: Integers
    only_b: Integers
    uneven: Mask
    moved: int
    differences: Differences


def align(a: StepTable, b: StepTable, *, by_content: bool = True) -> Alignment:
    """Aligns two tables of one step. RecordError where a trace names one event twice.

    by_content: whether events of one group that came in another order are looked for where the keys alone fit.
    """
    none: Integers = numpy.zeros(0, numpy.int64)
    if _same_keys(a, b):
        rows = numpy.arange(len(a))
        found = differences(a, b)
        if not by_content or not found.any.any():
            return Alignment(rows, rows, none, none, numpy.zeros(len(a), bool), 0, found)
        groups_a = groups_b = _groups(a, a)[0]
        rows_a = rows_b = rows
        only_a = only_b = none
    else:
        groups_a, groups_b = _groups(a, b)
        rows_a, rows_b, only_a, only_b = _by_key(a, b, groups_a, groups_b)
        found = differences(_taken(a, rows_a), b.take(rows_b))
    rows_a, rows_b, only_a, only_b, changed = _by_content(
        a, b, groups_a, groups_b, rows_a, rows_b, only_a, only_b, found.any
    )
    if changed:
        found = differences(_taken(a, rows_a), b.take(rows_b))
    moved = int((a.numbers["occurrence"][rows_a] != b.numbers["occurrence"][rows_b]).sum())
    lonely = numpy.concatenate([groups_a[only_a], groups_b[only_b]])
    uneven = numpy.isin(groups_a[rows_a], lonely) if len(lonely) else numpy.zeros(len(rows_a), bool)
    return Alignment(rows_a, rows_b, only_a, only_b, uneven, moved, found)


def occurrences(codes: Integers) -> Integers:
    """For each entry, how many equal ones come before it."""
    order = numpy.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = numpy.flatnonzero(numpy.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(codes) else ordered
    sizes = numpy.diff(numpy.append(starts, len(codes)))
    counted = numpy.empty(len(codes), numpy.int64)
    counted[order] = numpy.arange(len(codes)) - numpy.repeat(starts, sizes)
    return counted


def _taken(table: StepTable, rows: Integers) -> StepTable:
    whole = len(rows) == len(table) and bool((rows == numpy.arange(len(table))).all())
    return table if whole else table.take(rows)


def _same_keys(a: StepTable, b: StepTable) -> bool:
    if len(a) != len(b):
        return False
    for name in ("microbatch", "occurrence"):
        if not numpy.array_equal(a.numbers[name], b.numbers[name]):
            return False
    for name in _GROUP:
        left, right = a.texts[name], b.texts[name]
        codes = right.codes if left.values == right.values else in_terms_of(left, right)[right.codes]
        if not numpy.array_equal(left.codes, codes):
            return False
    return True


def _groups(a: StepTable, b: StepTable) -> tuple[Integers, Integers]:
    """A number for each group, the same in both tables, from 0 on without a gap."""
    microbatches = numpy.concatenate([a.numbers["microbatch"], b.numbers["microbatch"]])
    numbers = _dense(microbatches)
    for name in _GROUP:
        left, right = a.texts[name], b.texts[name]
        codes = numpy.concatenate([left.codes, in_terms_of(left, right)[right.codes] if len(b) else right.codes])
        span = int(codes.max(initial=0)) + 1
        if int(numbers.max(initial=0)) * span > _MOST:
            numbers = _dense(numbers)
        numbers = numbers * span + codes
    numbers = _dense(numbers)
    return numbers[: len(a)], numbers[len(a) :]


def _dense(values: numpy.typing.NDArray[Any]) -> Integers:
    """The same numbers for the same values, from 0 on without a gap."""
    indices = pyarrow.array(values).dictionary_encode().indices.to_numpy(zero_copy_only=False)
    dense: Integers = indices.astype(numpy.int64)
    return dense


def _by_key(
    a: StepTable, b: StepTable, groups_a: Integers, groups_b: Integers
) -> tuple[Integers, Integers, Integers, Integers]:
    span = 1 + int(max(a.numbers["occurrence"].max(initial=0), b.numbers["occurrence"].max(initial=0)))
    keys_a = groups_a * span + a.numbers["occurrence"]
    keys_b = groups_b * span + b.numbers["occurrence"]
    return _matched(keys_a, keys_b, a.step)


def _matched(keys_a: Integers, keys_b: Integers, step: int) -> tuple[Integers, Integers, Integers, Integers]:
    order_a, order_b = numpy.argsort(keys_a, kind="stable"), numpy.argsort(keys_b, kind="stable")
    sorted_a, sorted_b = keys_a[order_a], keys_b[order_b]
    for ordered in (sorted_a, sorted_b):
        if len(ordered) > 1 and (ordered[1:] == ordered[:-1]).any():
            raise RecordError(f"names an event of step {step} twice")
    at = numpy.searchsorted(sorted_b, sorted_a)
    found = at < len(sorted_b)
    found[found] = sorted_b[at[found]] == sorted_a[found]
    rows_a, rows_b = order_a[found], order_b[at[found]]
    execution = numpy.argsort(rows_a, kind="stable")
    only_b = numpy.ones(len(keys_b), bool)
    only_b[rows_b] = False
    return rows_a[execution], rows_b[execution], numpy.sort(order_a[~found]), numpy.flatnonzero(only_b)


def _by_content(
    a: StepTable,
    b: StepTable,
    groups_a: Integers,
    groups_b: Integers,
    rows_a: Integers,
    rows_b: Integers,
    only_a: Integers,
    only_b: Integers,
    differing: Mask,
) -> tuple[Integers, Integers, Integers, Integers, bool]:
    """Pairs anew what differs within its group: first what is equal, then what has equal inputs, then in order."""
    open_a = numpy.concatenate([rows_a[differing], only_a])
    open_b = numpy.concatenate([rows_b[differing], only_b])
    if not len(open_a) or not len(open_b):
        return rows_a, rows_b, only_a, only_b, False
    hashes_a, hashes_b = content_hashes(a, a, open_a), content_hashes(a, b, open_b)
    # Most of what follows from a difference has nothing in common with the other arm: there is no choice then.
    common = _is_in(_keyed(groups_a[open_a], hashes_a["inputs"]), _keyed(groups_b[open_b], hashes_b["inputs"]))
    choice = numpy.zeros(int(max(groups_a.max(), groups_b.max())) + 1, bool)
    choice[groups_a[open_a[common]]] = True
    in_a, in_b = choice[groups_a[open_a]], choice[groups_b[open_b]]
    if not in_a.any() or not in_b.any() or (in_a.sum() == in_b.sum() == len(numpy.unique(groups_a[open_a[in_a]]))):
        return rows_a, rows_b, only_a, only_b, False
    order_a, order_b = numpy.argsort(open_a[in_a], kind="stable"), numpy.argsort(open_b[in_b], kind="stable")
    left, right = open_a[in_a][order_a], open_b[in_b][order_b]
    hashes_a = {name: hashes[in_a][order_a] for name, hashes in hashes_a.items()}
    hashes_b = {name: hashes[in_b][order_b] for name, hashes in hashes_b.items()}
    pairs_a: list[Integers] = []
    pairs_b: list[Integers] = []
    for stage in ("everything", "inputs", "nothing"):
        found_a, found_b = _paired(groups_a[left], groups_b[right], hashes_a.get(stage), hashes_b.get(stage))
        pairs_a.append(left[found_a])
        pairs_b.append(right[found_b])
        keep_a, keep_b = numpy.ones(len(left), bool), numpy.ones(len(right), bool)
        keep_a[found_a] = False
        keep_b[found_b] = False
        left, right = left[keep_a], right[keep_b]
        hashes_a = {name: hashes[keep_a] for name, hashes in hashes_a.items()}
        hashes_b = {name: hashes[keep_b] for name, hashes in hashes_b.items()}
    new_a, new_b = numpy.concatenate(pairs_a), numpy.concatenate(pairs_b)
    settled = ~numpy.isin(rows_a, new_a) & ~numpy.isin(rows_a, left)
    all_a = numpy.concatenate([rows_a[settled], new_a])
    all_b = numpy.concatenate([rows_b[settled], new_b])
    order = numpy.argsort(all_a, kind="stable")
    all_a, all_b = all_a[order], all_b[order]
    alone_a, alone_b = numpy.ones(len(a), bool), numpy.ones(len(b), bool)
    alone_a[all_a] = False
    alone_b[all_b] = False
    changed = len(all_a) != len(rows_a) or not (numpy.array_equal(all_a, rows_a) and numpy.array_equal(all_b, rows_b))
    return all_a, all_b, numpy.flatnonzero(alone_a), numpy.flatnonzero(alone_b), changed


def _paired(
    groups_a: Integers, groups_b: Integers, hashes_a: Digests | None, hashes_b: Digests | None
) -> tuple[Integers, Integers]:
    """Positions of what has the same group and hash, the first with the first and so on."""
    if hashes_a is None or hashes_b is None:
        combined = numpy.concatenate([groups_a, groups_b])
    else:
        combined = numpy.concatenate([_keyed(groups_a, hashes_a), _keyed(groups_b, hashes_b)])
    combined = _dense(combined)
    left, right = combined[: len(groups_a)], combined[len(groups_a) :]
    span = max(len(left), len(right)) + 1
    found_a, found_b, _, _ = _matched(left * span + occurrences(left), right * span + occurrences(right), 0)
    return found_a, found_b


def content_hashes(reference: StepTable, table: StepTable, rows: Integers, *, rng: bool = True) -> dict[str, Digests]:
    """Of some rows, 64 bits for what they are compared by ("everything"), and for what of it goes in ("inputs"); texts
    in reference's terms. rng: whether a generator's state counts."""
    whole = 2 * len(rows) > len(table)
    picked = table if whole else table.take(rows)
    parts = picked.parts
    counts = numpy.diff(parts.offsets)
    number = numpy.arange(len(parts.lo)) - numpy.repeat(parts.offsets[:-1], counts)
    enters = number < numpy.repeat(parts.inputs, counts)
    mixed = _mix((parts.lo ^ (parts.hi * _ODD)) + number.astype(numpy.uint64) * _MULTIPLIER)
    mixed[doubtful_parts(picked)] = 0
    head = numpy.zeros(len(picked), numpy.uint64)
    for name in ("scalars", "signature"):
        words = in_terms_of(reference.texts[name], picked.texts[name])
        head = _mix(head + words.astype(numpy.uint64)[picked.texts[name].codes] + _ODD)
    if rng and picked.has_rng.any():
        head = _mix(head + _mix(picked.rng_lo) + picked.rng_hi)
    hashes = {
        "everything": head + _sums(parts.offsets, mixed),
        "inputs": head + _sums(parts.offsets, mixed * enters),
    }
    return {name: values[rows] for name, values in hashes.items()} if whole else hashes


def _keyed(groups: Integers, hashes: Digests) -> Digests:
    """Group and content in one number."""
    keyed: Digests = hashes + groups.astype(numpy.uint64) * _MULTIPLIER
    return keyed


def _is_in(values: Digests, among: Digests) -> Mask:
    found: Mask = pyarrow.compute.is_in(pyarrow.array(values), pyarrow.array(among)).to_numpy(zero_copy_only=False)
    return found


def _mix(values: Digests) -> Digests:
    values = (values ^ (values >> _SHIFT)) * _MULTIPLIER
    mixed: Digests = (values ^ (values >> _SHIFT)) * _ODD
    return mixed


def _sums(offsets: Integers, values: Digests) -> Digests:
    running = numpy.zeros(len(values) + 1, numpy.uint64)
    numpy.cumsum(values, out=running[1:])
    sums: Digests = running[offsets[1:]] - running[offsets[:-1]]
    return sums
