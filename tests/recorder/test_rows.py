"""Rows of single pieces: canonical texts, parts, kept bytes, and memory that lies on a device."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from detrun.fingerprint.device import ml128_text, segment_sums
from detrun.fingerprint.host import digest_tensors
from detrun.recorder import hashing
from detrun.recorder import rows as rows_module
from detrun.recorder.rows import Rows
from detrun.recorder.values import canonical
from detrun.records.state_row import NOT_KEPT


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (True, "True"),
        (None, "None"),
        ("a'b", '"a\'b"'),
        (0.1, "0x1.999999999999ap-4"),
        (float("nan"), "nan"),
        (-0.0, "-0x0.0p+0"),
        (np.float32(0.5), "0x1.0000000000000p-1"),
        (np.float64(0.1), "0x1.999999999999ap-4"),
        (np.int64(7), "7"),
        (np.bool_(True), "True"),
        ((0.9, 0.999), "[0x1.ccccccccccccdp-1, 0x1.ff7ced916872bp-1]"),
        ([1, (2, "x")], "[1, [2, 'x']]"),
        (deque([1, 2]), "[1, 2]"),
        ({"b": 1, "a": [2]}, "{'a': [2], 'b': 1}"),
        (OrderedDict(a=1), "{'a': 1}"),
        ({3, 1}, "{1, 3}"),
        (1 + 2j, "(0x1.0000000000000p+0, 0x1.0000000000000p+1)"),
        (torch.float16, "torch.float16"),
        (torch.tensor(0.5), "0x1.0000000000000p-1"),
        (torch.tensor([7]), "7"),
        (object(), "<object>"),
    ],
)
def test_a_plain_value_has_one_text(value: object, text: str) -> None:
    assert canonical(value) == text


def test_endless_values_have_a_text() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert "<too deep>" in canonical(endless)


def test_texts_tell_values_apart() -> None:
    values: list[Any] = [0, 0.0, -0.0, False, None, "0", [0], [], {}, "", torch.ones(3), torch.zeros(3), np.zeros(3)]
    assert len({canonical(value) for value in values}) == len(values)


def one(rows: Rows) -> Any:
    (row,) = rows.finished()
    return row


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4),
        torch.arange(12.0).view(3, 4).t(),
        torch.tensor(3.5),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(0, 4),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(5).to(torch.float8_e4m3fn),
        torch.tensor([1, 2, 3], dtype=torch.uint16),
        nn.Parameter(torch.ones(2)),
    ],
    ids=str,
)
def test_a_tensors_digest_is_the_one_that_it_has_everywhere(tensor: torch.Tensor) -> None:
    rows = Rows()
    rows.tensor("parameters", "w", tensor)
    row = one(rows)
    assert row.digest == digest_tensors([tensor.contiguous()])
    assert (row.shape, row.elements, row.nbytes) == (tuple(tensor.shape), tensor.numel(), tensor.nbytes)
    assert row.dtype == str(tensor.dtype).removeprefix("torch.")


def test_memory_that_is_not_there_is_said_to_be_missing() -> None:
    rows = Rows()
    rows.tensor("parameters", "freed", torch.ones(4))
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    rows.tensor("parameters", "w", freed)
    rows.tensor("parameters", "m", torch.ones(4, device="meta"))
    first, second, third = rows.finished()
    assert first.digest is not None and first.info == {}
    assert second.digest is third.digest is None
    assert second.info == third.info == {"memory": False}


def test_a_sparse_tensor_has_a_row_a_part() -> None:
    rows = Rows()
    rows.tensor("gradients", "w", torch.eye(3).to_sparse())
    assert [(row.part, row.shape) for row in rows.finished()] == [("indices", (2, 3)), ("values", (3,))]


def test_a_name_that_comes_twice_gets_a_number() -> None:
    rows = Rows()
    for value in (1, 2, 3):
        rows.value("local", "x", value)
    assert [(row.name, row.value) for row in rows.finished()] == [("x", "1"), ("x#2", "2"), ("x#3", "3")]


def test_long_values_have_a_digest_instead() -> None:
    rows = Rows()
    rows.value("local", "x", list(range(1000)))
    rows.value("local", "y", list(range(999)))
    x, y = rows.finished()
    assert x.value is y.value is None
    assert x.digest != y.digest


class Kept(bytearray):
    def keep(self, raw: Any) -> int:
        self.extend(memoryview(raw).cast("B"))
        return len(self) - memoryview(raw).nbytes


def test_bytes_are_kept_while_there_is_room_and_one_memory_once() -> None:
    kept = Kept()
    rows = Rows(kept.keep, room=100)
    weight = torch.arange(4.0)
    rows.tensor("parameters", "w", weight)
    rows.tensor("parameters", "large", torch.arange(40.0))
    rows.tensor("buffers", "tied", weight.view(2, 2))
    rows.value("local", "array", np.arange(4, dtype=np.float32))
    rows.value("local", "objects", np.array([object()]))
    found = {row.name: row for row in rows.finished()}
    assert (found["w"].offset, found["large"].offset, found["tied"].offset) == (0, NOT_KEPT, 0)
    assert found["array"].digest == found["w"].digest and found["array"].offset == 16
    assert bytes(kept) == 2 * np.arange(4, dtype=np.float32).tobytes()
    assert found["objects"].digest is None and found["objects"].value == "<array of objects>"


def test_copies_of_strided_tensors_are_not_taken_for_each_other() -> None:
    kept = Kept()
    rows = Rows(kept.keep, room=1000)
    for fill in (1.0, 2.0):  # the second copy is likely to lie where the first one did
        rows.tensor("parameters", str(fill), torch.full((4, 4), fill)[:, ::2])
    assert [row.offset for row in rows.finished()] == [0, 32]
    assert bytes(kept) == np.repeat(np.float32([1, 2]), 8).tobytes()


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_large_tensors_have_the_same_digests_from_other_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "MOST_THREADS", threads)
    before = set(threading.enumerate())
    rows = Rows()
    tensors = [torch.randn(1 << 19) for _ in range(5)]
    for index, tensor in enumerate(tensors):
        rows.tensor("parameters", str(index), tensor)
    seconds = rows.rest()
    assert [row.digest for row in rows.finished()] == [digest_tensors([tensor]) for tensor in tensors]
    assert set(threading.enumerate()) == before
    assert (seconds > 0) == (threads > 0)


@pytest.fixture
def everything_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_on_host", lambda memory: False)


def expected(tensor: torch.Tensor) -> str:
    sums = segment_sums([tensor])
    raw = b"" if sums is None else sums.numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ml128_text(f"|{dtype}|{','.join(map(str, tensor.shape))};".encode(), raw)


@pytest.mark.usefixtures("everything_on_a_device")
def test_digests_of_device_memory_come_later_and_each_to_its_row() -> None:
    rows = Rows(lambda raw: pytest.fail("device memory is not kept"), room=1 << 30)
    tensors = [torch.randn(5), torch.randn(1 << 21), torch.zeros(0), torch.zeros(7), torch.randn(3, 3)]
    for index, tensor in enumerate(tensors[:3]):
        rows.tensor("parameters", str(index), tensor)
    rows.rest()
    for index, tensor in enumerate(tensors[3:], 3):
        rows.tensor("gradients", str(index), tensor, zero=True)
    assert not rows.is_zero("gradients", "3")  # not known yet
    rows.rest()
    assert rows.waits_for()
    found = rows.finished()
    assert [row.digest for row in found] == [expected(tensor) for tensor in tensors]
    assert [row.info for row in found] == [{}, {}, {}, {"zero": True}, {}]
    assert {row.offset for row in found} == {NOT_KEPT} and {row.value for row in found} == {None}


@pytest.mark.usefixtures("everything_on_a_device")
def test_a_gradient_on_a_device_that_is_cleared_later_counts_as_cleared() -> None:
    rows = Rows()
    zeroed, kept, removed = torch.randn(4), torch.randn(4), torch.randn(4)
    before = expected(kept)
    for name, tensor in (("zeroed", zeroed), ("kept", kept), ("removed", removed)):
        rows.tensor("gradients", name, tensor, zero=True)
    rows.rest()
    zeroed.zero_()
    kept.add_(1)
    assert not rows.cleared("gradients", "zeroed", zeroed)  # that is not known yet
    assert not rows.cleared("gradients", "kept", kept)
    assert rows.cleared("gradients", "removed", None)
    rows.rest()
    rows_found = {row.name: row for row in rows.finished()}
    assert rows_found["zeroed"].info == {"zero": True}
    assert (rows_found["kept"].digest, rows_found["kept"].info) == (before, {})
    assert rows_found["removed"].digest is None


def test_a_gradient_on_the_host_that_is_cleared_later_counts_as_cleared() -> None:
    rows = Rows()
    gradient = torch.randn(4)
    rows.tensor("gradients", "w", gradient, zero=True)
    before = one(rows).digest
    assert not rows.cleared("gradients", "w", gradient.add_(1))
    assert one(rows).digest == before
    assert rows.cleared("gradients", "w", gradient.zero_())
    assert (one(rows).digest, one(rows).info) == (digest_tensors([torch.zeros(4)]), {"zero": True})


def test_what_will_lie_on_a_device_has_the_digest_that_it_will_have_there() -> None:
    rows = Rows()
    rows.as_on_device("scaler", "scale", torch.tensor(512.0))
    assert one(rows).digest == expected(torch.tensor(512.0))
