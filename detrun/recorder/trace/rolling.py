"""The digest of a step and of each scope in it: equal if all events are, in whatever order events came."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from detrun.fingerprint.byte_digest import ByteHasher
from detrun.fingerprint.keys import splitmix64
from detrun.recorder.trace.fingerprints import digest_of_bytes

if TYPE_CHECKING:
    from detrun.records.trace_writer import TraceBatch

Words = npt.NDArray[np.uint64]

_TEXTS = ("phase", "op", "signature", "scalars", "flags", "group", "kind")
_PLACES = 64
"""Parts of an event that have keys of their own; beyond it keys come again, with the number of the round in them."""
_KEYS = splitmix64(1 << 40, 3 * _PLACES) | np.uint64(1)
_ONE = splitmix64(1 << 41, 16) | np.uint64(1)


class Rolling:
    """Sums of events by scope, mod 2^64. An event counts by what two runs are compared by: its key, its signature, its
    scalars, its random state, its flags and the digests of its unflagged parts; not by where it lies.

    An event's own number is a multilinear sum of the hashes of its fields and digests with fixed keys, mixed once more:
    all arithmetic is on whole columns.
    """

    def __init__(self) -> None:
        self._sums: Words = np.zeros(0, np.uint64)
        self._scopes: Sequence[str] = ()
        self._hashes: dict[str, Words] = {name: np.zeros(0, np.uint64) for name in _TEXTS}
        self._words: Words = np.zeros((0, 2), np.uint64)

    def add(self, batch: TraceBatch, flagged: Sequence[int]) -> None:
        """Add the rows of a batch. flagged: places in `parts` that do not count. The tables of the batches only ever
        grow at their end until `finish`."""
        rows = len(batch.seq)
        if not rows:
            return
        with np.errstate(over="ignore"):
            own: Words = np.zeros(rows, np.uint64)
            for key, column in zip(_ONE, (batch.microbatch, batch.occurrence, batch.n_inputs), strict=False):
                own += np.asarray(column).astype(np.uint64) * key
            for key, name in zip(_ONE[3:], _TEXTS, strict=False):
                hashes = self._of_texts(name, batch.texts[name]) * key
                own += hashes if len(hashes) == 1 else hashes[batch.numbers[name]]
            for row, state in enumerate(batch.rng):
                if state is not None:
                    own[row] += np.uint64(int.from_bytes(state[:8], "little")) * _ONE[12]
            own += self._of_parts(batch, flagged)
            own = _mixed(own)
            self._scopes = batch.texts["scope"]
            new = np.zeros(len(self._scopes) - len(self._sums), np.uint64)
            self._sums = np.concatenate((self._sums, new))
            np.add.at(self._sums, batch.numbers["scope"], own)

    def finish(self) -> tuple[str, dict[str, str]]:
        """(32 hex digits for the step, 16 for each scope)."""
        whole = ByteHasher()
        scopes = {}
        for scope, value in sorted(zip(self._scopes, self._sums.tolist(), strict=True)):
            text = f"{value:016x}"
            whole.feed_text(scope)
            whole.feed_text(text)
            scopes[scope] = text
        return whole.raw().hex(), scopes

    def _of_texts(self, name: str, table: Sequence[str]) -> Words:
        known = self._hashes[name]
        if len(known) < len(table):
            new = np.array([_hash(text) for text in table[len(known) :]], np.uint64)
            known = self._hashes[name] = np.concatenate((known, new))
        return known

    def _of_parts(self, batch: TraceBatch, flagged: Sequence[int]) -> Words:
        digests = batch.digests
        if len(self._words) < len(digests):
            new = np.frombuffer(b"".join(digests[len(self._words) :]), "<u8").reshape(-1, 2).astype(np.uint64)
            self._words = np.concatenate((self._words, new))
        sizes = np.asarray(batch.part_counts).astype(np.int64)
        ends = sizes.cumsum()
        if not len(batch.parts):
            return np.zeros(len(sizes), np.uint64)
        place = np.arange(len(batch.parts)) - np.repeat(ends - sizes, sizes)
        words = self._words[batch.parts]
        if flagged:
            words[flagged] = 0
        turn, slot = np.divmod(place, _PLACES)
        # Words are mixed before they are weighted: a digest of zeros in another place must count, too.
        weighted = words[:, 0] * _KEYS[slot] + words[:, 1] * _KEYS[slot + _PLACES] + _KEYS[slot + 2 * _PLACES]
        values = _mixed(weighted + turn.astype(np.uint64) * _ONE[13])
        totals = np.concatenate((np.zeros(1, np.uint64), values.cumsum(dtype=np.uint64)))
        sums: Words = totals[ends] - totals[ends - sizes]
        return sums


@lru_cache(maxsize=65_536)
def _hash(text: str) -> int:
    return int.from_bytes(digest_of_bytes(text.encode("utf-8", "backslashreplace"))[:8], "little")


def _mixed(words: Any) -> Words:
    words = words ^ (words >> np.uint64(30))
    words = words * np.uint64(0xBF58_476D_1CE4_E5B9)
    words = words ^ (words >> np.uint64(27))
    words = words * np.uint64(0x94D0_49BB_1331_11EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed
