"""How far two states of a stream are apart, for every kind of generator, by real draws."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detrun.compare.streams_ahead import draws_between
from detrun.recorder.streams import generator_row

counts = st.one_of(st.integers(0, 3000), st.integers(100_000, 150_000))


def state(generator: object) -> tuple[str, bytes]:
    row = generator_row("g", generator)
    assert row is not None
    return row[0].info["generator"], row[1]


def python(seed: int) -> tuple[object, Callable[[int], Any]]:
    made = random.Random(seed)
    return made, lambda n: [made.getrandbits(32) for _ in range(n)]


def legacy(seed: int) -> tuple[object, Callable[[int], Any]]:
    made = np.random.RandomState(seed)
    return made, lambda n: made.randint(0, 2**32, n, dtype=np.uint32)


def host(seed: int) -> tuple[object, Callable[[int], Any]]:
    made = torch.Generator().manual_seed(seed)
    return made, lambda n: torch.rand(n, generator=made)


def bit_generator(kind: Any) -> Callable[[int], tuple[object, Callable[[int], Any]]]:
    def make(seed: int) -> tuple[object, Callable[[int], Any]]:
        made = np.random.Generator(kind(seed))
        return made, lambda n: made.bit_generator.random_raw(n)

    return make


KINDS = {
    "python": python,
    "legacy": legacy,
    "torch": host,
    **{k: bit_generator(getattr(np.random, k)) for k in ("PCG64", "PCG64DXSM", "Philox", "SFC64", "MT19937")},
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), earlier=st.integers(0, 2000), between=counts)
def test_the_draws_between_two_states_are_counted_both_ways(kind: str, seed: int, earlier: int, between: int) -> None:
    generator, draw = KINDS[kind](seed)
    draw(earlier)
    name, before = state(generator)
    draw(between)
    _, after = state(generator)
    assert draws_between(name, before, after) == between
    assert draws_between(name, after, before) == -between


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_cannot_be_told(kind: str) -> None:
    (one, _), (other, _) = KINDS[kind](1), KINDS[kind](2)
    name, before = state(one)
    assert draws_between(name, before, state(other)[1]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_asked_for_cannot_be_told(kind: str) -> None:
    generator, draw = KINDS[kind](5)
    name, before = state(generator)
    draw(3000)
    assert draws_between(name, before, state(generator)[1], most=2999) is None
    assert draws_between(name, before, state(generator)[1], most=3000) == 3000


@pytest.mark.parametrize(
    ("generator", "draw", "words"),
    [
        (random.Random(3), lambda g: g.random(), 2),
        (np.random.RandomState(3), lambda g: g.rand(5), 10),
        (torch.Generator().manual_seed(3), lambda g: torch.rand(7, generator=g), 7),
        (torch.Generator().manual_seed(3), lambda g: torch.empty((), dtype=torch.int64).random_(generator=g), 2),
        (np.random.default_rng(3), lambda g: g.random(9), 9),
        (np.random.default_rng(3), lambda g: g.integers(0, 2**31, 8, dtype=np.int32), 4),
    ],
)
def test_what_programs_draw(generator: Any, draw: Callable[[Any], Any], words: int) -> None:
    name, before = state(generator)
    draw(generator)
    assert draws_between(name, before, state(generator)[1]) == words


def test_the_second_gaussian_of_a_pair_costs_nothing() -> None:
    generator = np.random.RandomState(4)
    generator.standard_normal()
    name, before = state(generator)
    generator.standard_normal()
    assert state(generator)[1] != before
    assert draws_between(name, before, state(generator)[1]) == 0


def test_a_devices_offset() -> None:
    before, after = struct.pack("<Qq", 1234, 8), struct.pack("<Qq", 1234, 24)
    assert draws_between("philox-cuda", before, after) == 16
    assert draws_between("philox-cuda", after, before) == -16
    assert draws_between("philox-cuda", before, struct.pack("<Qq", 1235, 24)) is None


@pytest.mark.parametrize("name", ["mt19937-python", "mt19937-torch", "philox-cuda", "numpy-PCG64", "numpy-XYZ", "?"])
@pytest.mark.parametrize("raw", [b"", b"short", b"{}", b"[1]", b"x" * 6000])
def test_what_is_no_state_is_no_error(name: str, raw: bytes) -> None:
    assert draws_between(name, raw, b"y" + raw) is None


@pytest.mark.parametrize("kind", ["python", "legacy", "torch"])
def test_the_longest_search_is_fast(kind: str) -> None:
    (one, _), (other, _) = KINDS[kind](1), KINDS[kind](2)
    name, before = state(one)
    _, after = state(other)
    best = 1.0
    for _ in range(5):
        started = time.process_time()
        assert draws_between(name, before, after) is None
        best = min(best, time.process_time() - started)
    assert best < 0.05
