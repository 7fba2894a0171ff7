"""States of random number generators among a checkpoint's entries, known by their shape, and the ranks they are of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from detrun.checkpoints.entry import Entry
from detrun.errors import RecordError

_TORCH_CPU_BYTES = 5056
_TORCH_DEVICE_BYTES = 16
_WORDS = 624
_DEVICE_NAME = re.compile(r"rng|rand|seed|generator|cuda|device|philox", re.IGNORECASE)
_N = r"\d+"
_RANK = re.compile(
    # A number behind `random_rng_state.` or `np_rng_state.` is a place in a generator's own tuple.
    rf"((?:rank|(?<!random_)(?<!np_)rng_state|random_states)[_\-.=]?)({_N})"
    # A sharded object tells its place in a grid and the grid's shape, of as many dimensions.
    rf"|(/shard_)(?:({_N}\.{_N}\.{_N})_{_N}\.{_N}\.{_N}|({_N}\.{_N})_{_N}\.{_N}|({_N})_{_N})"
)


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of one generator.

    generator: "mt19937-torch" (the bytes of `torch.get_rng_state`), "philox" (seed and offset of a device's, 16 bytes),
    "mt19937" (Python's and numpy's: 624 words of uint32 and, where it is known, the position as one more) or "pcg64"
    (state and increment, 16 bytes each). All little-endian. template: its name with the rank left out. rank: what the
    name says, None if it names none; several coordinates are joined by dots.
    """

    name: str
    generator: str
    raw: bytes
    template: str
    rank: str | None


def random_states(entries: Iterable[Entry]) -> Iterator[RandomState]:
    """The generators' states among entries, in their order. Entries that cannot be read are passed over."""
    bare: RandomState | None = None
    pcg: Entry | None = None
    for entry in entries:
        if bare is not None:
            # numpy keeps the position beside the words: the next value of the same tuple or dictionary.
            if _parent(entry.name) == _parent(bare.name) and entry.dtype == "int" and entry.value is not None:
                bare = replace(bare, raw=bare.raw + int(entry.value).to_bytes(4, "little"))
            yield bare
            bare = None
        found = _by_shape(entry)
        if found is not None and found.generator == "mt19937" and len(found.raw) == 4 * _WORDS:
            bare = found
        elif found is not None:
            yield found
        if entry.dtype != "int":
            continue
        if entry.name.endswith(".state"):
            pcg = entry
        elif entry.name.endswith(".inc") and pcg is not None and _parent(pcg.name) == _parent(entry.name):
            words = [int(each.value or "0", 0).to_bytes(32, "little", signed=True)[:16] for each in (pcg, entry)]
            yield _named(_parent(entry.name), "pcg64", b"".join(words))
            pcg = None
    if bare is not None:
        yield bare


def rank_of(name: str) -> tuple[str, str | None]:
    """A name without the rank in it, and the rank."""
    ranks: list[str] = []

    def taken(found: re.Match[str]) -> str:
        place = next(each for each in (found[2], found[4], found[5], found[6]) if each)
        ranks.extend(str(int(number)) for number in place.split("."))
        return f"{found[1] or found[3]}#"

    return _RANK.sub(taken, name), ".".join(ranks) if ranks else None


def _by_shape(entry: Entry) -> RandomState | None:
    if entry.problem is not None or len(entry.shape) != 1 or entry.data is None:
        return None
    (size,) = entry.shape
    try:
        if entry.dtype == "uint8" and size == _TORCH_CPU_BYTES:
            return _named(entry.name, "mt19937-torch", entry.read())
        if entry.dtype == "uint8" and size == _TORCH_DEVICE_BYTES and _DEVICE_NAME.search(entry.name):
            return _named(entry.name, "philox", entry.read())
        if entry.dtype in ("int64", "uint32", "uint64", "int32") and _WORDS <= size <= _WORDS + 8:
            words = _words(np.frombuffer(entry.read(), f"<{entry.dtype[0]}{int(entry.dtype.lstrip('uint')) // 8}"))
            return None if words is None else _named(entry.name, "mt19937", words)
    except RecordError:
        return None
    return None


def _words(numbers: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> bytes | None:
    """The 624 words and the position within an array that may hold a version and more, or None if it is no state."""
    wide = numbers.astype(np.int64)
    if numbers.dtype == np.int32:
        wide &= 0xFFFF_FFFF
    for begin in range(len(wide) - _WORDS + 1):
        key, rest = wide[begin : begin + _WORDS], wide[begin + _WORDS :]
        # Words of a generator fill 32 bits; a list of indices or counts does not.
        if key.min() < 0 or key.max() >= 1 << 32 or np.median(key) < 1 << 24 or len(np.unique(key)) < _WORDS // 2:
            continue
        if len(rest) == 0 or 0 <= rest[0] <= _WORDS:
            return key.astype("<u4").tobytes() + rest[:1].astype("<u4").tobytes()
    return None


def _named(name: str, generator: str, raw: bytes) -> RandomState:
    template, rank = rank_of(name)
    return RandomState(name, generator, raw, template, rank)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
