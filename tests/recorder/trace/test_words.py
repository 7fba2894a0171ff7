"""The text of the arguments that are no tensors differs where they do, and only there."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from detrun.recorder.trace.words import LONGEST, scalars_text

DIFFERENT: list[Any] = [
    0, 1, -1, True, False, None, 0.0, -0.0, 1.0, math.nextafter(1.0, 2.0), math.inf, "1", "True", [0, 1], [1, 0],
    [[0], 1],
    torch.float32, torch.float16, torch.strided, torch.device("cpu"), torch.device("cuda", 1), torch.channels_last,
]  # fmt: skip


def test_different_arguments_have_different_texts() -> None:
    texts = [scalars_text([value], {}) for value in DIFFERENT]
    for (a, one), (b, other) in itertools.combinations(zip(DIFFERENT, texts, strict=True), 2):
        assert one != other, (a, b)


@pytest.mark.parametrize("value", [*DIFFERENT, (0, 1), torch.Size([2, 3]), 1 << 70])
def test_equal_arguments_have_equal_texts(value: Any) -> None:
    assert scalars_text([value, 2], {"alpha": value}) == scalars_text([value, 2], {"alpha": value})


def test_floats_are_exact_and_keywords_are_named() -> None:
    assert (
        scalars_text([[0, 1], True, 0.1], {"alpha": 1.0})
        == "[0, 1], True, 0x1.999999999999ap-4, alpha=0x1.0000000000000p+0"
    )
    assert scalars_text([], {"dim": 1}) != scalars_text([1], {})


def test_what_has_an_address_in_its_text_is_named_by_its_kind() -> None:
    assert scalars_text([object(), torch.Generator(), torch.ones(1)], {}) == "object, generator, tensor"


@pytest.mark.parametrize("named", [{}, {"alpha": 1}])
def test_a_long_text_is_cut_and_still_tells_what_differs_at_its_end(named: dict[str, Any]) -> None:
    whole = list(range(500))
    one, other = scalars_text([whole], named), scalars_text([[*whole[:-1], 7]], named)
    assert len(one) <= LONGEST
    assert one.startswith("[0, 1, 2")
    assert one != other
    assert scalars_text(["x" * 298], {}) == repr("x" * 298)
    assert len(scalars_text(["ä" * 299], {})) <= LONGEST
