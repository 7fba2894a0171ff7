"""Rows of state held against each other: what is equal, what is not, and what a difference is told to be."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrun.compare.state import RankComparison, RowDifference, compare_rows, split_state, surviving
from detrun.fingerprint.byte_digest import digest_bytes
from detrun.records.state_row import StateRow


def tensor(component: Any, name: str, values: list[float], **fields: Any) -> tuple[StateRow, bytes]:
    raw = np.array(values, "<f4").tobytes()
    digest = digest_bytes(f"|float32|{len(values)};".encode() + raw)
    row = StateRow(component, name, dtype="float32", shape=(len(values),), elements=len(values), digest=digest)
    return replace(row, **fields), raw


def value(component: Any, name: str, text: str, **fields: Any) -> StateRow:
    return StateRow(component, name, value=text, **fields)


def compare(a: list[tuple[StateRow, bytes]], b: list[tuple[StateRow, bytes]]) -> RankComparison:
    kept_a, kept_b = {row.key: raw for row, raw in a}, {row.key: raw for row, raw in b}
    return compare_rows(
        0, [row for row, _ in a], [row for row, _ in b], lambda r: kept_a.get(r.key), lambda r: kept_b.get(r.key)
    )


def only(found: RankComparison) -> RowDifference:
    (difference,) = found.differences
    return difference


def test_equal_rows_are_counted_by_group_and_leave_no_difference() -> None:
    rows = [tensor("parameters", "w", [1, 2]), tensor("optimizer", "w.exp_avg", [0, 1]), tensor("rng", "numpy", [3])]
    found = compare(rows, rows)
    assert found.differences == []
    assert found.groups == {"parameters": 1, "exp_avg": 1, "RNG numpy": 1}


def test_one_ulp_in_one_element_is_counted() -> None:
    other = float(np.nextafter(np.float32(2), np.float32(3)))
    difference = only(compare([tensor("parameters", "w", [1, 2])], [tensor("parameters", "w", [1, other])]))
    assert (difference.kind, difference.differing, difference.ulp) == ("different", 1, 1)


def test_a_row_that_only_one_side_has_is_a_difference() -> None:
    here = [tensor("optimizer", "w.exp_avg", [1])]
    assert only(compare(here, [])).kind == "missing"
    assert only(compare([], here)).kind == "extra"


def test_digests_of_different_algorithms_are_incomparable_and_never_equal() -> None:
    row, raw = tensor("parameters", "w", [1])
    found = compare([(row, raw)], [(replace(row, digest="ml128:" + "0" * 32), raw)])
    assert only(found).kind == "incomparable"


@pytest.mark.parametrize(("a", "b"), [("10", "0x1.4000000000000p+3"), ("True", "True"), ("0x1.0p+0", "1")])
def test_a_number_is_the_same_number_in_another_type(a: str, b: str) -> None:
    assert compare_rows(0, [value("optimizer", "w.step", a)], [value("optimizer", "w.step", b)]).differences == []


@pytest.mark.parametrize(
    ("a", "b"), [("1", "True"), ("0x0.0p+0", "-0x0.0p+0"), ("10", "11"), ("None", "0"), ("nan", "1")]
)
def test_other_values_are_not(a: str, b: str) -> None:
    assert len(compare_rows(0, [value("scheduler", "s", a)], [value("scheduler", "s", b)]).differences) == 1


def test_a_cleared_gradient_equals_one_that_never_was() -> None:
    zeros, raw = tensor("gradients", "w", [0, 0], info={"zero": True})
    none = StateRow("gradients", "w")
    assert compare([(zeros, raw)], [(none, b"")]).differences == []
    held, kept = tensor("gradients", "w", [0, 1])
    assert only(compare([(held, kept)], [(none, b"")])).kind == "missing"


def test_a_stream_that_nobody_seeded_is_not_compared() -> None:
    ours, raw = tensor("rng", "python", [1], info={"unseeded": True})
    theirs = tensor("rng", "python", [2])
    found = compare([(ours, raw)], [theirs])
    assert found.differences == []
    assert found.unseeded == ["python"]
    assert len(compare([theirs], [(ours, raw)]).differences) == 1, "a stream that was seeded has to come back"


def test_a_stream_under_another_name_has_moved() -> None:
    stream, raw = tensor("rng", "loader.generator", [1], info={"generator": "numpy-PCG64"})
    moved = replace(stream, name="sampler.generator")
    assert compare([(stream, raw)], [(moved, raw)]).differences == []
    other = replace(tensor("rng", "sampler.generator", [2])[0], info={})
    assert {d.kind for d in compare([(stream, raw)], [(other, raw)]).differences} == {"missing", "extra"}


def python_stream(draws: int, seed: int = 7) -> tuple[StateRow, bytes]:
    stream = random.Random(seed)
    for _ in range(draws):
        stream.getrandbits(32)
    words = stream.getstate()[1]
    raw = np.array(words, "<u4").tobytes()
    row = StateRow("rng", "python", digest=digest_bytes(raw), info={"generator": "mt19937-python"})
    return row, raw


@given(st.integers(0, 2000), st.integers(1, 900))
def test_a_stream_that_is_draws_ahead_is_named_as_such(before: int, ahead: int) -> None:
    difference = only(compare([python_stream(before)], [python_stream(before + ahead)]))
    assert difference.ahead == ahead


def test_another_seed_is_no_number_of_draws_ahead() -> None:
    assert only(compare([python_stream(3)], [python_stream(3, seed=8)])).ahead is None


def difference(standing: Any, name: str = "m.history") -> RowDifference:
    a, _ = tensor("module-state", name, [1], standing=standing)
    b, _ = tensor("module-state", name, [2], standing=standing)
    return RowDifference(a.key, 0, "different", a, b)


def test_what_survives_a_step_counts_and_what_is_made_anew_does_not() -> None:
    lost, cached = difference("surviving", "m.history"), difference("surviving", "m.cache")
    later = RankComparison(0, differences=[difference("surviving", "m.history")])
    counted, explaining = surviving([lost, cached], {lost.key: True, cached.key: True}, later)
    assert (counted, explaining) == ([lost], [cached])


def test_what_already_differed_at_the_save_says_nothing() -> None:
    clock = difference("surviving", "m.clock")
    later = RankComparison(0, differences=[difference("surviving", "m.clock")])
    assert surviving([clock], {clock.key: False}, later) == ([], [])


def test_hard_state_counts_and_soft_state_never_does() -> None:
    hard, soft = difference("hard", "a"), difference("soft", "b")
    later = RankComparison(0, differences=[soft, hard])
    counted, explaining = surviving([hard, soft], {hard.key: True, soft.key: True}, later)
    assert (counted, explaining) == ([hard], [soft])


def test_a_kind_of_optimizer_state_that_only_the_resumed_run_has_for_any_parameter_was_not_lost() -> None:
    loaded, moment = (
        RowDifference(row.key, 0, "extra", None, row)
        for row, _ in (tensor("optimizer", name, [1], standing="hard") for name in ("w.state.m", "b.exp_avg"))
    )
    saved = {("optimizer", "w.exp_avg", ""): True}
    assert surviving([loaded, moment], saved, RankComparison(0)) == ([moment], [loaded])


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20), st.integers(0, 19), st.integers(0, 31))
def test_any_flipped_bit_is_a_difference_of_one_element(values: list[float], index: int, bit: int) -> None:
    index %= len(values)
    raw = np.array(values, "<f4")
    flipped = raw.copy()
    flipped.view("<u4")[index] ^= np.uint32(1 << bit)
    b = flipped.tobytes()
    a_row, a_raw = tensor("parameters", "w", raw.tolist())
    b_row = replace(a_row, digest=digest_bytes(f"|float32|{len(values)};".encode() + b))
    found = only(compare([(a_row, a_raw)], [(b_row, b)]))
    assert found.differing == 1


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("0.weight.exp_avg", ("0.weight", "exp_avg")),
        ("weight.old_dirs.3", ("weight", "old_dirs")),
        ("step", ("", "step")),
        ("w.0", ("w", "0")),
    ],
)
def test_items_of_a_list_of_an_optimizer_s_are_one_thing(name: str, parts: tuple[str, str]) -> None:
    assert split_state(name) == parts
