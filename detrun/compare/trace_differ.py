"""What differs between events that were aligned, in columns: a whole step at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy

from detrun.records.trace_table import Integers, Mask, Parts, StepTable, Words

OBSERVED = ("batch", "parameter")
"""Kinds of events that compute nothing: whatever of them differs, differed before."""

_flag = re.compile(r"([io])([0-9]{1,9}):[a-z-]+").fullmatch


@dataclass(frozen=True)
class Differences:
    """Masks over pairs of aligned events.

    inputs: something that went in and can be trusted differs: a tensor part, their number, dtypes or shapes, a scalar,
    the generator, the ranks of a group. outputs: a trusted output differs. tensors, scalars, rng: what of the inputs.
    doubtful_inputs: a part that is flagged differs. flagged: any part is flagged. blind: a part that came out is.
    part_pair, part_at: (pair, number of the part within its event) of every trusted part that differs, in order.
    """

    inputs: Mask
    outputs: Mask
    tensors: Mask
    scalars: Mask
    rng: Mask
    doubtful_inputs: Mask
    flagged: Mask
    blind: Mask
    part_pair: Integers
    part_at: Integers

    @property
    def any(self) -> Mask:
        return self.inputs | self.outputs


def differences(a: StepTable, b: StepTable) -> Differences:
    """Holds row i of `a` against row i of `b`, for tables of one length."""
    count = len(a)
    same_counts = (numpy.diff(a.parts.offsets) == numpy.diff(b.parts.offsets)) & (a.parts.inputs == b.parts.inputs)
    if same_counts.all():
        held, parts_a, parts_b = numpy.arange(count), a.parts, b.parts
        doubt_a, doubt_b = doubtful_parts(a), doubtful_parts(b)
    else:
        held = numpy.flatnonzero(same_counts)
        left, right = a.take(held), b.take(held)
        parts_a, parts_b = left.parts, right.parts
        doubt_a, doubt_b = doubtful_parts(left), doubtful_parts(right)

    unequal = (parts_a.lo != parts_b.lo) | (parts_a.hi != parts_b.hi)
    doubt = doubt_a | doubt_b
    tensors, outputs = numpy.zeros(count, bool), numpy.zeros(count, bool)
    doubtful_inputs, flagged, blind = numpy.zeros(count, bool), numpy.zeros(count, bool), numpy.zeros(count, bool)

    at = numpy.flatnonzero(unequal & ~doubt)
    owner, number, enters = _owners(parts_a, at)
    tensors[held[owner[enters]]] = True
    outputs[held[owner[~enters]]] = True
    doubtful = numpy.flatnonzero(doubt)
    if len(doubtful):
        doubt_owner, _, doubt_enters = _owners(parts_a, doubtful)
        flagged[held[doubt_owner]] = True
        blind[held[doubt_owner[~doubt_enters]]] = True
        apart = unequal[doubtful] & doubt_enters
        doubtful_inputs[held[doubt_owner[apart]]] = True

    other_inputs, other_outputs = _signatures(a, b)
    scalars = ~equal_words(a.texts["scalars"], b.texts["scalars"])
    rng = (a.has_rng != b.has_rng) | (a.rng_lo != b.rng_lo) | (a.rng_hi != b.rng_hi)
    place = a.numbers["peer"] != b.numbers["peer"]
    for name in ("kind", "group"):
        place |= ~equal_words(a.texts[name], b.texts[name])
    inputs = tensors | ~same_counts | other_inputs | scalars | rng | place
    outputs |= other_outputs
    observed = _is_observed(a.texts["kind"])
    inputs |= observed & outputs
    return Differences(
        inputs,
        outputs & ~observed,
        tensors,
        scalars,
        rng,
        doubtful_inputs,
        flagged,
        blind,
        held[owner],
        number,
    )


def doubtful_parts(table: StepTable) -> Mask:
    """Which parts cannot be trusted: flagged when they were recorded, or without content."""
    parts = table.parts
    doubt: Mask = (parts.lo == 0) & (parts.hi == 0)
    flags = table.texts["flags"]
    for code, text in enumerate(flags.values):
        if not text:
            continue
        rows = numpy.flatnonzero(flags.codes == code)
        begin, end, cut = parts.offsets[rows], parts.offsets[rows + 1], parts.inputs[rows]
        for entry in text.split(","):
            match = _flag(entry)
            if match is None:
                continue
            enters, index = match[1] == "i", int(match[2])
            at = begin + index if enters else begin + cut + index
            doubt[at[at < (begin + cut if enters else end)]] = True
    return doubt


def equal_words(a: Words, b: Words) -> Mask:
    """Where two columns of text hold the same."""
    return a.codes == in_terms_of(a, b)[b.codes] if len(b.codes) else numpy.zeros(0, bool)


def in_terms_of(a: Words, b: Words) -> Integers:
    """For each value of `b` its code in `a`; those that `a` lacks get numbers behind a's."""
    if a.values == b.values:
        return numpy.arange(len(b.values))
    known = {value: code for code, value in enumerate(a.values)}
    return numpy.fromiter((known.setdefault(value, len(known)) for value in b.values), numpy.int64, len(b.values))


def _owners(parts: Parts, at: Integers) -> tuple[Integers, Integers, Mask]:
    """(event, number within it, whether it went in) of the parts at these places."""
    if len(at) * 16 > len(parts.lo):  # many: the owners of all parts are written down sooner than these are searched
        owner = numpy.repeat(numpy.arange(len(parts.inputs)), numpy.diff(parts.offsets))[at]
    else:
        owner = numpy.searchsorted(parts.offsets, at, side="right") - 1
    number = at - parts.offsets[owner]
    return owner, number, number < parts.inputs[owner]


def _signatures(a: StepTable, b: StepTable) -> tuple[Mask, Mask]:
    """(the inputs' dtypes and shapes differ, the outputs' do)."""
    left, right = a.texts["signature"], b.texts["signature"]
    inputs, outputs = numpy.zeros(len(a), bool), numpy.zeros(len(a), bool)
    apart = numpy.flatnonzero(~equal_words(left, right))
    if not len(apart):
        return inputs, outputs
    pairs, which = numpy.unique(
        left.codes[apart].astype(numpy.int64) * max(1, len(right.values)) + right.codes[apart], return_inverse=True
    )
    for number, pair in enumerate(pairs):
        a_code, b_code = divmod(int(pair), max(1, len(right.values)))
        a_in, a_out = _sides(left.values[a_code])
        b_in, b_out = _sides(right.values[b_code])
        rows = apart[which == number]
        inputs[rows] = a_in != b_in
        outputs[rows] = a_out != b_out
    return inputs, outputs


def _sides(signature: str) -> tuple[str, str]:
    inputs, _, outputs = signature.partition("->")
    return inputs.strip(), outputs.strip()


def _is_observed(kinds: Words) -> Mask:
    codes = [code for code, value in enumerate(kinds.values) if value in OBSERVED]
    return numpy.isin(kinds.codes, codes)
