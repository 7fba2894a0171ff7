"""Values that come late: order, lateness, and what counts as a number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from detrun.recorder.pending import DeviceBytes, HostBytes, Outbox, Scalar, scalar_from


class Event:
    """Stands in for a device's event."""

    def __init__(self) -> None:
        self.happened = False
        self.waited = 0

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.waited += 1
        self.happened = True


def line(text: str) -> bytes:
    return text.encode()


def test_lines_wait_for_their_values_and_keep_their_order() -> None:
    written: list[bytes] = []
    outbox = Outbox(written.append)
    events = [Event(), Event()]
    late = [Scalar("float32", None, DeviceBytes(torch.zeros(()), event)) for event in events]
    outbox.put(1, [late[0]], lambda: line("1"))
    outbox.put(2, [late[1]], lambda: line("2"))
    events[1].happened = True
    outbox.flush(2)
    assert written == []
    events[0].happened = True
    outbox.flush(2)
    assert written == [b"1", b"2"]
    assert [event.waited for event in events] == [0, 0]


def test_a_line_is_at_most_two_steps_late() -> None:
    written: list[bytes] = []
    outbox = Outbox(written.append)
    events = [Event() for _ in range(4)]
    for step, event in enumerate(events, 1):
        value = Scalar("float32", None, DeviceBytes(torch.zeros(()), event))
        outbox.put(step, [value], lambda step=step: line(str(step)))
    assert written == [b"1"]
    outbox.drain()
    assert written == [b"1", b"2", b"3", b"4"]
    assert [event.waited for event in events] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("value", "dtype", "bits"),
    [
        (1.5, "float64", 0x3FF8000000000000),
        (-1, "int64", 0xFFFFFFFFFFFFFFFF),
        (2**70, "float64", 0x4450000000000000),
        (True, "bool", 1),
        (np.float32(1.5), "float32", 0x3FC00000),
        (np.float64(1.5), "float64", 0x3FF8000000000000),
        (np.int32(7), "int32", 7),
        (np.array([1.5], np.float16), "float16", 0x3E00),
        (torch.tensor(1.5), "float32", 0x3FC00000),
        (torch.tensor([[1.5]], dtype=torch.bfloat16, requires_grad=True), "bfloat16", 0x3FC0),
        (torch.tensor(3), "int64", 3),
        (torch.tensor(1.5).to(torch.float8_e4m3fn), "float32", 0x3FC00000),
        (torch.arange(10.0)[3:4], "float32", 0x40400000),
        (torch.tensor(-math.nan), "float32", None),
    ],
)
def test_numbers_of_every_kind_keep_their_bits(value: object, dtype: str, bits: int | None) -> None:
    scalar = scalar_from(value)
    assert scalar is not None
    assert scalar.ready()
    assert scalar.dtype == dtype
    if bits is None:
        assert isinstance(value, torch.Tensor)
        bits = int(value.view(torch.int32).item()) & 0xFFFFFFFF
    assert scalar.bits() == bits


@pytest.mark.parametrize("value", ["1", None, torch.zeros(2), np.zeros(2), [1.0], torch.tensor(1j)])
def test_what_is_no_number_is_none(value: object) -> None:
    assert scalar_from(value) is None


def test_the_value_read_is_that_of_the_moment() -> None:
    tensor = torch.tensor(1.0)
    scalar = scalar_from(tensor)
    tensor.fill_(2.0)
    assert scalar is not None
    assert scalar.value() == 1.0
    assert HostBytes(b"x").raw() == b"x"


def test_a_number_whose_memory_was_given_back_is_none() -> None:
    value = torch.ones(1)
    value.untyped_storage().resize_(0)
    assert scalar_from(value) is None
