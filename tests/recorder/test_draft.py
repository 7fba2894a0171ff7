"""What a step's line is made of."""

from __future__ import annotations

import pytest

from detrun.recorder.draft import Draft
from detrun.recorder.pending import Scalar

NEGATIVE_NAN = 0xFFF8000000000000
POSITIVE_NAN = 0x7FF8000000000000


@pytest.mark.parametrize("norms", [[NEGATIVE_NAN], [POSITIVE_NAN], [NEGATIVE_NAN, POSITIVE_NAN]])
def test_a_norm_that_the_recorder_computed_has_one_nan(norms: list[int]) -> None:
    draft = Draft(own_norms=[Scalar("float64", bits) for bits in norms])
    (metric,) = draft.metrics()
    assert metric.bits == POSITIVE_NAN


def test_a_nan_of_the_program_keeps_its_bits() -> None:
    draft = Draft(losses=[Scalar("float64", NEGATIVE_NAN)])
    (metric,) = draft.metrics()
    assert metric.bits == NEGATIVE_NAN


def test_the_mean_of_losses_that_are_nan_has_one_nan_and_they_keep_theirs() -> None:
    draft = Draft(losses=[Scalar("float64", NEGATIVE_NAN), Scalar("float64", POSITIVE_NAN)])
    assert [metric.bits for metric in draft.metrics()] == [POSITIVE_NAN, NEGATIVE_NAN, POSITIVE_NAN]
