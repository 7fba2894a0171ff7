"""Kept tensors of two arms, held against each other: what settles a localization and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from detrun.compare.trace_summary import Lead
from detrun.experiments.localize_bytes import EventReading, read_event
from detrun.experiments.localize_findings import byte_findings
from detrun.records.kept_writer import KeptPart, KeptWriter
from detrun.records.layout import AttemptFolder
from detrun.records.trace_row import EventKey
from tests.trace_factory import Arm, Value, attempt_in

KEY = EventKey(3, 0, "forward", "layers.0", "aten.mul.Tensor", 0)
VALUES = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)


def keep(
    attempt: AttemptFolder,
    output: numpy.ndarray[Any, Any] = VALUES,
    given: numpy.ndarray[Any, Any] = VALUES,
    key: EventKey = KEY,
    **line: Any,
) -> None:
    """Writes one event with an input and an output, as the recorder does."""
    parts = [
        KeptPart(side, 0, "", "float32", value.shape, (4, 1), 0, 0, "cpu", value.tobytes())
        for side, value in (("input", given), ("output", output))
    ]
    writer = KeptWriter(attempt.path, 0, 1 << 20)
    document = {"key": list(key), "live": False, "call": {"op": key[4], "args": [], "kwargs": {}}, "rng": None}
    writer.write({**document, "threads": 1, "deterministic": False, "kernels": None, "site": "", **line}, parts, None)
    writer.close()


def nudged() -> numpy.ndarray[Any, Any]:
    changed = VALUES.copy()
    changed[1, 2] = numpy.nextafter(changed[1, 2], numpy.float32(numpy.inf))
    return changed


@pytest.fixture
def arms(tmp_path: Path) -> tuple[AttemptFolder, AttemptFolder]:
    return attempt_in(tmp_path, "a"), attempt_in(tmp_path, "b")


Arms = tuple[AttemptFolder, AttemptFolder]


def test_equal_inputs_and_another_output_are_an_origin(arms: Arms) -> None:
    keep(arms[0])
    keep(arms[1], nudged())
    reading = read_event(*arms, 0, KEY)
    assert reading.missing is None
    assert reading.is_origin
    (tensor,) = reading.differing("output")
    assert tensor.difference is not None
    assert (tensor.difference.differing, tensor.difference.max_ulp) == (1, 1)
    assert tensor.difference.first == (1, 2)


@pytest.mark.parametrize(
    "b",
    [
        {"output": nudged(), "given": nudged()},
        {"output": nudged(), "rng": "00" * 16},
        {"output": nudged(), "call": {"op": KEY[4], "args": [2.0], "kwargs": {}}},
        {},
    ],
    ids=["inputs differ", "generator differs", "arguments differ", "nothing differs"],
)
def test_anything_else_is_none(arms: Arms, b: dict[str, Any]) -> None:
    keep(arms[0])
    keep(arms[1], **b)
    assert not read_event(*arms, 0, KEY).is_origin


def test_tensors_of_another_shape_differ_and_are_not_compared(arms: Arms) -> None:
    keep(arms[0])
    keep(arms[1], VALUES.reshape(2, 6))
    (tensor,) = read_event(*arms, 0, KEY).differing("output")
    assert tensor.difference is None


def test_an_event_that_one_arm_did_not_keep_settles_nothing(arms: Arms) -> None:
    keep(arms[0])
    keep(arms[1], key=(*KEY[:5], 1))
    reading = read_event(*arms, 0, KEY)
    assert reading.missing is not None
    assert "arm b kept nothing of it" in reading.missing
    assert not reading.is_origin


def test_files_that_are_missing_or_cut_are_named_and_raise_nothing(arms: Arms) -> None:
    keep(arms[0])
    assert "arm b kept" in str(read_event(*arms, 0, KEY).missing)
    keep(arms[1])
    content = arms[1].kept_bytes(0)
    content.write_bytes(content.read_bytes()[:20])
    assert read_event(*arms, 0, KEY).missing


def origin() -> Lead:
    arm = Arm(step=3)
    arm.op("aten.mul.Tensor", [Value("x")], scope="layers.0")
    return Lead("origin", "op", 0, arm.events[0], arm.events[0], outputs=(0,))


def test_bytes_that_differ_are_counted_in_the_finding(arms: Arms) -> None:
    keep(arms[0])
    keep(arms[1], nudged())
    reading = read_event(*arms, 0, KEY)
    (finding,) = byte_findings(origin(), [reading], reading, 1)
    assert (finding.kind, finding.severity) == ("bytes", "divergence")
    assert finding.what == "output 0: 1 of 12 elements differ"
    assert finding.evidence["max_ulp"] == finding.evidence["min_ulp"] == 1
    assert finding.evidence["rows"] == [1]
    assert finding.where == {"rank": 0, "step": 3, "tensor": "output 0"}


def test_bytes_that_agree_where_digests_did_not_are_told(arms: Arms) -> None:
    keep(arms[0])
    keep(arms[1])
    (finding,) = byte_findings(origin(), [read_event(*arms, 0, KEY)], None, 3)
    assert (finding.kind, finding.severity) == ("bytes", "warning")
    assert "the bytes do not settle it (3 passes)" in finding.what
    assert "where the digests differed, the bytes that were kept do not" in finding.what


def test_why_nothing_was_kept_is_told() -> None:
    (finding,) = byte_findings(origin(), [EventReading(KEY, 0, missing="arm b kept nothing of it")], None, 1)
    assert "arm b kept nothing of it" in finding.what


def test_without_a_pass_that_keeps_there_is_no_word_of_bytes() -> None:
    assert byte_findings(origin(), [], None, 0) == []


def test_other_kernels_in_the_arms_are_told_with_what_chose_them(arms: Arms) -> None:
    def kernels(name: str, picked: str) -> list[dict[str, str]]:
        return [{"kind": "kernel", "name": name}, {"kind": "setting", "name": "autotune", "value": picked}]

    keep(arms[0], kernels=kernels("sum_a", "BLOCK 64"))
    keep(arms[1], nudged(), kernels=kernels("sum_b", "BLOCK 128"))
    reading = read_event(*arms, 0, KEY)
    _, finding = byte_findings(origin(), [reading], reading, 1)
    assert finding.kind == "kernels"
    assert finding.evidence["settings"] == {"autotune": ["BLOCK 64", "BLOCK 128"]}
