"""By how many draws two states of one random number stream are apart. Pure: bytes in, a number out.

A stream that is a few words ahead was drawn from once too often; that number often says by whom.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

_WORDS = 624
_AT_ONCE = 64
"""Refills of a Mersenne Twister computed together: 40,000 words."""

# A torch generator's state on the host: seed uint64, left int32, seeded int32, next uint64, 624 words as uint64, and
# halves of normal pairs (aten/src/ATen/CPUGeneratorImpl.cpp).
_LEFT_AT = 8
_WORDS_AT = 24
_TORCH_BYTES = _WORDS_AT + 8 * _WORDS

_MASK128 = (1 << 128) - 1
_PCG_MULTIPLIERS = {"PCG64": 0x2360ED051FC65DA44385DF649FCCF645, "PCG64DXSM": 0xDA942042E4DD58B5}


def draws_between(generator: str, before: bytes, after: bytes, most: int = 200_000) -> int | None:
    """By how many draws `after` is ahead of `before`; negative: behind.

    generator, before, after: as in the `rng` rows of a state file. A draw is a 32-bit word of a Mersenne Twister, one
    step of any other generator, and on a device the offset. What was drawn and is only half used (the second of a pair
    of gaussians) counts as drawn: 0 may stand for states that differ in that alone.

    None where it cannot be told: another seed, more than `most` draws apart, a generator that is not known, bytes that
    are no state of it.
    """
    try:
        distance = _distance(generator, before, after, most)
    except (ValueError, KeyError, TypeError, IndexError, struct.error):
        return None
    return distance if distance is not None and abs(distance) <= most else None


def _distance(generator: str, before: bytes, after: bytes, most: int) -> int | None:
    if generator in ("mt19937-python", "mt19937-numpy"):
        return _twisters(_plain_twister(before), _plain_twister(after), most)
    if generator == "mt19937-torch":
        return _twisters(_torch_twister(before), _torch_twister(after), most)
    if generator.startswith("philox-"):
        (seed, offset), (other, later) = struct.unpack("<Qq", before), struct.unpack("<Qq", after)
        return int(later - offset) if seed == other else None
    if not generator.startswith("numpy-"):
        return None
    kind = generator.removeprefix("numpy-")
    first, second = json.loads(before), json.loads(after)
    if kind == "MT19937":
        return _twisters(_numpy_twister(first), _numpy_twister(second), most)
    if kind in _PCG_MULTIPLIERS:
        return _pcg(_PCG_MULTIPLIERS[kind], first["state"], second["state"])
    if kind == "Philox":
        return _counted(first, second)
    if kind == "SFC64":
        return _sfc(first, second, most)
    return None


_Twister = tuple[npt.NDArray[np.uint32], int]
"""The 624 words, and how many of them have been drawn."""


def _plain_twister(raw: bytes) -> _Twister:
    return _checked(np.frombuffer(raw, "<u4", _WORDS), int(np.frombuffer(raw, "<u4", 1, 4 * _WORDS)[0]))


def _numpy_twister(state: Any) -> _Twister:
    return _checked(np.array(state["state"]["key"], dtype=np.uint32), int(state["state"]["pos"]))


def _torch_twister(raw: bytes) -> _Twister:
    if len(raw) < _TORCH_BYTES:
        raise ValueError("too short")
    (left,) = struct.unpack_from("<i", raw, _LEFT_AT)
    words = np.frombuffer(raw, "<u8", _WORDS, _WORDS_AT).astype(np.uint32)
    # torch refills when one is left; a fresh generator says 1, too, and has all of its first words behind it.
    return _checked(words, _WORDS + 1 - left)


def _checked(words: npt.NDArray[np.uint32], drawn: int) -> _Twister:
    if not 0 <= drawn <= _WORDS:
        raise ValueError("no Mersenne Twister stands there")
    return words, drawn


def _twisters(before: _Twister, after: _Twister, most: int) -> int | None:
    ahead = _refills(before[0], after[0], most)
    if ahead is not None:
        return ahead * _WORDS + after[1] - before[1]
    behind = _refills(after[0], before[0], most)
    return None if behind is None else after[1] - behind * _WORDS - before[1]


def _refills(first: npt.NDArray[np.uint32], words: npt.NDArray[np.uint32], most: int) -> int | None:
    """After how many refills the words `first` become `words`."""
    if (first == words).all():
        return 0
    stream = np.random.MT19937()
    stream.state = {"bit_generator": "MT19937", "state": {"key": first, "pos": _WORDS}}
    # What is drawn is a state's words, tempered, so that nothing but drawing is needed to see all states.
    sought = _tempered(words)
    for start in range(0, most // _WORDS + 2, _AT_ONCE):
        drawn = stream.random_raw(_AT_ONCE * _WORDS).reshape(_AT_ONCE, _WORDS)
        for index in np.flatnonzero(drawn[:, 0] == sought[0]):
            if (drawn[index] == sought).all():
                return start + int(index) + 1
    return None


def _tempered(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    x = words.astype(np.uint64)
    x ^= x >> np.uint64(11)
    x ^= (x << np.uint64(7)) & np.uint64(0x9D2C5680)
    x ^= (x << np.uint64(15)) & np.uint64(0xEFC60000)
    x ^= x >> np.uint64(18)
    return x


def _pcg(multiplier: int, before: dict[str, int], after: dict[str, int]) -> int | None:
    """The distance of two states of a linear congruential generator mod 2^128, a bit at a time from the lowest
    (O'Neill, "PCG: A family of simple fast space-efficient statistically good algorithms", 2014, section 4.3.1)."""
    if before["inc"] != after["inc"]:
        return None
    state, target, plus = before["state"], after["state"], before["inc"]
    distance, bit = 0, 1
    while state != target and bit <= _MASK128:
        if (state ^ target) & bit:
            state = (state * multiplier + plus) & _MASK128
            distance |= bit
        plus = (multiplier + 1) * plus & _MASK128
        multiplier = multiplier * multiplier & _MASK128
        bit <<= 1
    return distance - (1 << 128) if distance >> 127 else distance


def _counted(before: dict[str, Any], after: dict[str, Any]) -> int | None:
    """Philox makes four outputs a count and hands them out one by one."""
    if before["state"]["key"] != after["state"]["key"]:
        return None

    def drawn(state: dict[str, Any]) -> int:
        count = sum(int(word) << 64 * place for place, word in enumerate(state["state"]["counter"]))
        return 4 * count + int(state["buffer_pos"])

    return drawn(after) - drawn(before)


def _sfc(before: dict[str, Any], after: dict[str, Any], most: int) -> int | None:
    """One word of the state counts the steps; the others have to agree after so many."""
    steps = int(after["state"]["state"][3]) - int(before["state"]["state"][3])
    if abs(steps) > most:
        return None
    first, last = (before, after) if steps >= 0 else (after, before)
    stream = np.random.SFC64()
    start: Any = {**first, "state": {"state": np.array(first["state"]["state"], dtype=np.uint64)}}
    stream.state = start
    stream.random_raw(abs(steps), output=False)
    reached: Any = stream.state
    return steps if reached["state"]["state"].tolist() == last["state"]["state"] else None
