"""Tensors of single events, byte for byte: those asked for, and the first that differ from another run's trace."""

from __future__ import annotations

import ctypes
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.recorder.harness import Run
from tests.recorder.trace.traced import Net, find, index, trace, train


def kept(made: Run) -> list[dict[str, Any]]:
    path = made.attempt / "kept" / "rank00000.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tensors(made: Run, line: dict[str, Any], side: str) -> list[torch.Tensor]:
    """With the strides that they had: another layout can give other bits."""
    raw = (made.attempt / "kept" / "rank00000.bytes").read_bytes()
    found = []
    for entry in line["tensors"]:
        if entry["side"] == side:
            content = bytearray(raw[entry["offset"] : entry["offset"] + entry["nbytes"]])
            dense = torch.frombuffer(content, dtype=getattr(torch, entry["dtype"])).view(entry["shape"])
            found.append(torch.empty_strided(entry["shape"], entry["strides"], dtype=dense.dtype).copy_(dense))
    return found


def test_an_event_asked_for_is_kept_as_it_was_called(tmp_path: Path) -> None:
    key = [2, 1, "forward", "first.0", "aten.addmm.default", 0]
    made = trace(partial(train, microbatches=2), tmp_path, keep={"events": [key]})
    (line,) = kept(made)
    assert line["key"] == key and not line["live"] and line["threads"] == 1 and line["grad_enabled"]
    assert line["call"] == {
        "op": "aten.addmm.default",
        "args": [{"tensor": 0}, {"tensor": 1}, {"tensor": 2}],
        "kwargs": {},
    }
    inputs, outputs = tensors(made, line, "input"), tensors(made, line, "output")
    assert torch.equal(torch.addmm(*inputs), outputs[0])
    assert line["tensors"][2]["strides"] == [1, 4]  # the transposed weight, as the program had it
    assert line["kernels"] is None


def test_what_an_operation_overwrites_is_kept_as_it_was_before(tmp_path: Path) -> None:
    key = [1, 0, "optimizer", "last.bias", "aten.mul_.Tensor", 0]
    made = trace(partial(train, lr=0.5), tmp_path, keep={"events": [key]}, steps=(1, 1))
    (line,) = kept(made)
    (before, *_), (after,) = tensors(made, line, "input"), tensors(made, line, "output")
    factor = next(arg for arg in line["call"]["args"] if isinstance(arg, float))
    assert torch.equal(before * factor, after) and not torch.equal(before, after)


def test_an_operation_that_draws_is_kept_with_its_generator(tmp_path: Path) -> None:
    key = [1, 0, "forward", "drop", "aten.bernoulli_.float", 0]
    made = trace(partial(train, net=partial(Net, 0.5)), tmp_path, keep={"events": [key]})
    (line,) = kept(made)
    place = line["generator"]
    raw = (made.attempt / "kept" / "rank00000.bytes").read_bytes()
    generator = torch.Generator()
    generator.set_state(torch.tensor(list(raw[place["offset"] : place["offset"] + place["nbytes"]]), dtype=torch.uint8))
    (target,), (drawn,) = tensors(made, line, "input"), tensors(made, line, "output")
    assert torch.equal(target.bernoulli_(*line["call"]["args"][1:], generator=generator), drawn)
    assert line["rng"] == find(made, "aten.bernoulli_.float", step=1)[0].rng.hex()  # type: ignore[union-attr]


def test_no_more_than_the_budget_is_kept(tmp_path: Path) -> None:
    keys = [[step, 0, "forward", "first.0", "aten.addmm.default", 0] for step in (1, 2)]
    made = trace(train, tmp_path, keep={"events": keys, "bytes": 400})
    assert len(kept(made)) == 1
    assert "over the budget" in index(made)[-1]["coverage"]["not_captured"][0]


def test_the_kernels_of_a_kept_event_are_listed_in_order(tmp_path: Path) -> None:
    key = [1, 0, "forward", "first.0", "aten.addmm.default", 0]
    made = trace(train, tmp_path, keep={"events": [key]}, kernels=True)
    (line,) = kept(made)
    launched = [entry["name"] for entry in line["kernels"] if entry["kind"] == "op"]
    assert launched[0] == "aten::addmm" and len(launched) > 1
    assert {"kind": "setting", "name": "threads", "value": "1"} in line["kernels"]


class _Faulty(torch.autograd.Function):
    """An operation with a fault that operators cannot see, once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wrong: bool) -> torch.Tensor:
        y = x.clone()
        if wrong:
            ctypes.memset(y.data_ptr(), 1, 1)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Breaks(Net):
    def __init__(self, wrong_at: int) -> None:
        super().__init__()
        self.wrong_at, self.calls = wrong_at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(_Faulty.apply(self.first(x), self.calls == self.wrong_at))


def test_beside_another_run_only_the_first_event_that_differs_is_kept(tmp_path: Path) -> None:
    reference = trace(partial(train, steps=3, net=partial(Breaks, 0)), tmp_path / "a", steps=(1, 3))
    made = trace(
        partial(train, steps=3, net=partial(Breaks, 2)), tmp_path / "b", steps=(1, 3), against=str(reference.attempt)
    )
    (line,) = kept(made)
    assert line["live"] and line["key"] == [2, 0, "forward", "", "function._Faulty", 0]
    (before,), (after,) = tensors(made, line, "input"), tensors(made, line, "output")
    assert (before != after).sum() == 1


def test_beside_an_equal_run_nothing_is_kept(tmp_path: Path) -> None:
    reference = trace(train, tmp_path / "a")
    assert kept(trace(train, tmp_path / "b", against=str(reference.attempt))) == []


def test_the_receiver_is_kept_and_then_the_origin_behind_it(tmp_path: Path) -> None:
    """A write that no event made is first seen by whoever reads; an operation that goes wrong later is kept as well."""

    class Written(Breaks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.wrong_at and self.calls == 1:
                ctypes.memset(self.first[0].bias.data_ptr(), 1, 1)
            return super().forward(x)

    reference = trace(partial(train, steps=3, net=partial(Written, 0)), tmp_path / "a", steps=(1, 3))
    made = trace(
        partial(train, steps=3, net=partial(Written, 99)), tmp_path / "b", steps=(1, 3), against=str(reference.attempt)
    )
    lines = kept(made)
    assert lines[0]["key"] == [2, 0, "forward", "first.0", "aten.addmm.default", 0]
    assert len(lines) == 1


def test_another_run_that_cannot_be_read_is_named_and_the_trace_goes_on(tmp_path: Path) -> None:
    made = trace(train, tmp_path / "b", against=str(tmp_path / "missing"))
    end = index(made)[-1]
    assert end["complete"] and "comparison with the other arm" in end["coverage"]["not_captured"][0]
    assert find(made, "aten.addmm.default")


def test_the_tensors_of_a_module_call_can_be_kept(tmp_path: Path) -> None:
    key = [1, 0, "backward", "last", "module", 0]
    made = trace(train, tmp_path, level=3, keep={"events": [key]})
    (line,) = kept(made)
    assert line["call"] is None
    assert [t["shape"] for t in line["tensors"]] == [[3, 2], [3, 8]]
