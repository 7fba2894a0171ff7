"""Scripts that repeat one operation on kept inputs: written, run, and held against what each arm got."""

from __future__ import annotations

import ctypes
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from detrun.diagnose.kept_call import CallTensor, CannotReproduceError, KeptCall, expression
from detrun.diagnose.reproduction import Outcome, run_script, told, write_collective_script, write_operator_script
from detrun.recorder.trace.calls import describe_call


def kept(tensor: Tensor, storages: dict[int, int]) -> CallTensor:
    """A tensor as the recorder keeps it."""
    dense = tensor.detach().contiguous().clone()
    return CallTensor(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        storage=storages.setdefault(tensor.untyped_storage()._cdata, len(storages)),
        storage_offset=tensor.storage_offset(),
        device=str(tensor.device),
        raw=ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b"",
    )


def record(op: Any, *args: Any, outputs: Any = None, threads: int = 1, **kwargs: Any) -> KeptCall:
    """Calls an operator and keeps what a traced run would have kept of it."""
    name = f"{op.namespace}.{op._schema.name.partition('::')[2]}.{op._overloadname}"
    call, tensors = describe_call(name, args, kwargs)
    storages: dict[int, int] = {}
    inputs = tuple(kept(tensor, storages) for tensor in tensors)
    generator = None
    if torch.Tag.nondeterministic_seeded in op.tags:
        generator = ("cpu", bytes(torch.default_generator.get_state().tolist()))
    result = op(*args, **kwargs) if outputs is None else outputs
    found = [result] if isinstance(result, Tensor) else list(result)
    written = tuple(kept(tensor, {}) for tensor in found)
    return KeptCall(name, call, inputs, written, generator, threads=threads, title='in layers.1 "quoted" \\')


def repeated(calls: dict[str, KeptCall], folder: Path) -> dict[str, int]:
    """How many of two repetitions, made in this process, give what each arm got."""
    script = runpy.run_path(str(write_operator_script(calls, folder)))
    results = [list(script["once"](number)) for number in range(2)]
    return {arm: sum(result == digests for result in results) for arm, digests in script["KEPT"].items()}


def run(calls: dict[str, KeptCall], folder: Path, runs: int = 3, seconds: float = 0.0, **more: Any) -> Outcome:
    return run_script(write_operator_script(calls, folder, **more), sys.executable, runs, seconds=seconds)


ten = torch.ops.aten


def strange(dtype: torch.dtype) -> Tensor:
    raw = torch.arange(24, dtype=torch.uint8) if dtype != torch.bool else torch.arange(24, dtype=torch.uint8) % 2
    return raw.view(dtype)


CALLS = {
    "matrix product": lambda: (ten.mm.default, torch.randn(5, 7), torch.randn(7, 3)),
    "transposed": lambda: (ten.mm.default, torch.randn(7, 5).t(), torch.randn(3, 7).t()),
    "expanded": lambda: (ten.add.Tensor, torch.randn(4, 1).expand(4, 6), torch.randn(4, 6)),
    "sliced": lambda: (ten.mul.Tensor, torch.randn(9, 9)[3:7, 1::3], 2.5),
    "no dimension": lambda: (ten.add.Tensor, torch.tensor(1.5), torch.tensor(2.0)),
    "no elements": lambda: (ten.add.Tensor, torch.empty(0, 3), torch.empty(0, 3)),
    "bfloat16": lambda: (ten.add.Tensor, torch.randn(6).bfloat16(), torch.randn(6).bfloat16()),
    "float8": lambda: (ten.clone.default, strange(torch.float8_e4m3fn)),
    "bool": lambda: (ten.logical_not.default, strange(torch.bool)),
    "complex": lambda: (ten.mul.Tensor, torch.randn(4, dtype=torch.complex128), torch.randn(4, dtype=torch.complex64)),
    "int": lambda: (ten.bitwise_xor.Tensor, torch.arange(9), torch.arange(9).flip(0)),
    "list": lambda: (ten.cat.default, [torch.randn(2, 3), torch.randn(4, 3)]),
    "none and list": lambda: (ten.index.Tensor, torch.randn(4, 5), [None, torch.tensor([1, 1, 4])]),
    "not finite": lambda: (ten.clamp.default, torch.randn(5), float("-inf"), 0.5),
    "dtype": lambda: (ten.sum.dim_IntList, torch.randn(4, 4).half(), [1]),
    "in place": lambda: (ten.add_.Tensor, torch.randn(5), torch.ones(5)),
    "several results": lambda: (ten.topk.default, torch.randn(9), 3),
    "draws": lambda: (ten.bernoulli.p, torch.ones(50), 0.5),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_rebuilt_bit_for_bit(name: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    op, *args = CALLS[name]()
    assert repeated({"a": record(op, *args)}, tmp_path) == {"a": 2}


def test_named_arguments_and_kinds(tmp_path: Path) -> None:
    args = {"dtype": torch.float64, "layout": torch.strided, "device": torch.device("cpu"), "pin_memory": False}
    assert repeated({"a": record(ten.full.default, [2, 3], 1.5, **args)}, tmp_path) == {"a": 2}


def test_tensors_that_share_memory_share_it_again(tmp_path: Path) -> None:
    base = torch.randn(10)
    first, second = base[:5], base[5:]
    # The second sum reads what the first one wrote, through another view of the same memory.
    expected = [first + second, second + (first + second)]
    call = record(ten._foreach_add_.List, [first, second], [base[5:], base[:5]], outputs=expected)
    assert repeated({"a": call}, tmp_path) == {"a": 2}


def test_the_arm_that_it_agrees_with_is_named(tmp_path: Path) -> None:
    a = record(ten.add.Tensor, torch.ones(4), torch.ones(4))
    b = record(ten.add.Tensor, torch.ones(4), torch.ones(4), outputs=torch.full((4,), 2.0000002))
    outcome = run({"a": a, "b": b}, tmp_path)
    assert outcome.text == "does not reproduce alone: 1 result in 3 runs, equal to arm a's"
    assert outcome.equal == {"a": 3, "b": 0}


def test_threads_that_race_show_several_results(tmp_path: Path) -> None:
    index = torch.randint(0, 8, (40_000,))
    call = record(ten.index_put_.default, torch.zeros(8), [index], torch.randn(40_000), True, threads=2)
    outcome = run({"a": call}, tmp_path, runs=12, seconds=60.0)
    assert outcome.distinct > 1, outcome.text
    assert outcome.text == f"{outcome.distinct} distinct results in {outcome.runs} runs"


def test_memory_that_nobody_wrote_shows_several_results(tmp_path: Path) -> None:
    outcome = run({"a": record(ten.empty_like.default, torch.ones(64))}, tmp_path, runs=6)
    assert outcome.distinct > 1, outcome.text


def test_an_operator_of_the_programs_own_needs_its_module(tmp_path: Path) -> None:
    (tmp_path / "own_ops.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('detrun_test_lib::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x * 2\n"
    )
    kept_input = kept(torch.ones(3), {})
    call = KeptCall(
        "detrun_test_lib.twice.default",
        {"args": [{"tensor": 0}], "kwargs": {}},
        (kept_input,),
        (kept(torch.full((3,), 2.0), {}),),
    )
    with pytest.raises(CannotReproduceError, match="which the program itself registers"):
        write_operator_script({"a": call}, tmp_path / "repro")
    outcome = run({"a": call}, tmp_path / "repro", module="own_ops", search=[str(tmp_path)])
    assert outcome.equal == {"a": 3}, outcome.text


@pytest.mark.parametrize(
    "call",
    [
        KeptCall("module", None, (), ()),
        KeptCall("aten.add.Tensor", {"args": [{"repr": "<Thing>"}], "kwargs": {}}, (), ()),
        KeptCall("aten.add; import os", {"args": [1], "kwargs": {}}, (), ()),
        KeptCall("aten.add.Tensor", {"args": [{"dtype": "float32; import os"}], "kwargs": {}}, (), ()),
        KeptCall("aten.clone.default", {"args": [1], "kwargs": {}},
                 (CallTensor("float32", (2,), (1,), 0, 0, "cpu", b"\0" * 7),), ()),
        KeptCall("aten.clone.default", {"args": [1], "kwargs": {}},
                 (CallTensor("float32", (2,), (1 << 50,), 0, 0, "cpu", b"\0" * 8),), ()),
        KeptCall("aten.clone.default", {"args": [1], "kwargs": {}},
                 (CallTensor("float32", (2,), (1,), 0, 0, "cpu", b"\0" * 8, part="scale"),), ()),
    ],
)  # fmt: skip
def test_what_cannot_be_repeated_is_said_and_no_script_is_written(call: KeptCall, tmp_path: Path) -> None:
    with pytest.raises(CannotReproduceError):
        write_operator_script({"a": call}, tmp_path)
    assert not list(tmp_path.glob("*.py"))


def test_a_script_that_does_not_run_is_an_outcome(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise ValueError('no such thing')")
    outcome = run_script(path, sys.executable, 3)
    assert (outcome.distinct, outcome.text) == (0, "did not run: ValueError: no such thing")
    path.write_text("import time; time.sleep(60)")
    assert "did not end within" in run_script(path, sys.executable, 3, patience=1).text
    assert "could not be started" in run_script(path, "/no/such/python", 3).text


def test_what_an_outcome_says() -> None:
    assert told(12, 12, {"a": 1, "b": 0}) == "12 distinct results in 12 runs"
    assert told(1, 12, {"a": 12, "b": 12}).endswith("equal to arm a and arm b's")
    assert told(1, 12, {"a": 0, "b": 11}).endswith("equal to no arm's")


def test_text_is_never_code() -> None:
    assert expression("'); import os; ('") == repr("'); import os; ('")
    with pytest.raises(CannotReproduceError):
        expression({"float": "__import__('os')"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["allreduce_", "reduce_scatter_base", "allgather"])
def test_a_collective_is_repeated_with_a_process_a_member(kind: str, tmp_path: Path) -> None:
    tensors = [torch.arange(4.0) + 1, torch.arange(4.0) * 3]
    total = tensors[0] + tensors[1]
    op, outputs = {
        "allreduce_": ("c10d.allreduce_", [[total], [total]]),
        "reduce_scatter_base": ("c10d._reduce_scatter_base_", [[total[:2] / 2], [total[2:] / 2]]),
        "allgather": ("c10d.allgather_", [tensors, tensors]),
    }[kind]
    arms = {
        "a": {
            rank: KeptCall(op, None, (kept(tensors[rank], {}),), tuple(kept(each, {}) for each in outputs[rank]))
            for rank in range(2)
        }
    }
    outcome = run_script(write_collective_script(arms, tmp_path), sys.executable, 2)
    assert (outcome.distinct, outcome.equal) == (1, {"a": 2}), outcome.text


def test_a_collective_of_one_member_makes_no_program(tmp_path: Path) -> None:
    call = KeptCall("c10d.allreduce_", None, (kept(torch.ones(2), {}),), ())
    with pytest.raises(CannotReproduceError):
        write_collective_script({"a": {0: call}}, tmp_path)
