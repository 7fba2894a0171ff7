"""The trace as a whole: its window, its budget, its end, and that none of it touches the training."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import detrun.recorder.trace.tracer as tracer_module
from detrun.recorder.trace import fingerprints
from tests.recorder.harness import run
from tests.recorder.trace.traced import Net, events, files, find, index, trace, train


def test_the_window_holds_its_steps_and_says_how_it_ended(tmp_path: Path) -> None:
    made = trace(partial(train, steps=4), tmp_path, steps=(2, 3))
    lines = index(made)
    assert lines[0] == {"v": 1, "rank": 0, "level": 4, "steps": [2, 3], "digest": "xxh3-128", "scopes": None}
    assert [line["step"] for line in lines[1:-1]] == [2, 3]
    assert [line["batches"] for line in lines[1:-1]] == [[0, 0], [1, 1]]
    assert lines[-1]["end"] is True
    assert (lines[-1]["complete"], lines[-1]["reason"]) == (True, None)
    found = events(made)
    assert sum(line["events"] for line in lines[1:-1]) == len(found) == lines[-1]["coverage"]["events"]
    assert {e.step for e in found} == {2, 3}


def test_a_program_that_ends_inside_the_window_ends_its_trace(tmp_path: Path) -> None:
    lines = index(trace(partial(train, steps=2), tmp_path, steps=(1, 50)))
    assert [line["step"] for line in lines[1:-1]][:2] == [1, 2]
    assert lines[-1]["complete"] is True


def test_nothing_is_hooked_or_written_without_a_request(tmp_path: Path) -> None:
    made = run(train, tmp_path)
    assert not (tmp_path / "trace").exists()
    assert made.cost()["warnings"] == []


def test_a_rank_that_is_not_asked_for_writes_nothing(tmp_path: Path) -> None:
    assert not (trace(train, tmp_path, ranks=[3]).attempt / "trace").exists()


def test_a_request_that_cannot_be_understood_is_reported(tmp_path: Path) -> None:
    def program() -> str:
        import detrun.recorder as recorder

        recorder.report_failure  # noqa: B018
        return train()

    run(program, tmp_path, DETRUN_TRACE='{"level": 9, "steps": [1, 2]}')
    (report,) = (tmp_path / "recorder").glob("failed-*.txt")
    assert "level 9" in report.read_text()


def test_the_byte_budget_ends_the_trace_cleanly(tmp_path: Path) -> None:
    whole = trace(partial(train, steps=6), tmp_path / "whole", steps=(1, 6))
    size = sum(len(raw) for raw in files(whole))
    budget = size // 2 + 8000
    made = trace(partial(train, steps=6), tmp_path / "cut", steps=(1, 6), byte_budget=budget)
    end = index(made)[-1]
    assert (end["complete"], end["reason"]) == (False, "byte budget")
    assert sum(len(raw) for raw in files(made)) <= budget
    assert 0 < end["coverage"]["events"] == len(events(made)) < len(events(whole))
    assert made.result == whole.result


def test_a_failure_of_the_tracer_ends_the_trace_and_not_the_training(tmp_path: Path) -> None:
    def program() -> str:
        def broken(*_: object) -> bytes:
            raise ZeroDivisionError("a bug")

        fingerprints._memory = broken
        fingerprints._digest = broken
        return train()

    made = trace(program, tmp_path / "broken")
    assert made.result == trace(train, tmp_path / "whole").result
    end = index(made)[-1]
    assert end["complete"] is False
    assert end["reason"] == "tracer failed: ZeroDivisionError: a bug"
    assert any("ZeroDivisionError" in warning for warning in made.cost()["warnings"])


def test_a_full_disk_ends_the_trace_and_not_the_training(tmp_path: Path) -> None:
    def program() -> str:
        from detrun.records.trace_writer import TraceWriter

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        TraceWriter.write_batch = full
        return train()

    made = trace(program, tmp_path)
    assert made.result == train()
    assert index(made)[-1]["reason"].startswith("tracer failed: OSError")


def test_long_steps_are_written_in_batches_that_continue_their_tables(tmp_path: Path) -> None:
    def program() -> None:
        tracer_module.FLUSH_ROWS = 7
        train(steps=2)

    cut = trace(program, tmp_path / "cut")
    whole = trace(partial(train, steps=2), tmp_path / "whole")
    assert events(cut) == events(whole)
    assert [(line["digest"], line["scopes"]) for line in index(cut)[1:-1]] == [
        (line["digest"], line["scopes"]) for line in index(whole)[1:-1]
    ]
    first, last = index(cut)[1]["batches"]
    assert last > first + 3


def test_a_crash_loses_only_what_was_not_flushed(tmp_path: Path) -> None:
    def program() -> None:
        pid = os.fork()
        if pid == 0:
            import signal

            import detrun.recorder

            detrun.recorder._session = None
            detrun.recorder.install()
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(4):
                model(torch.ones(3, 4)).sum().backward()
                if step == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
        os.waitpid(pid, 0)

    made = trace(program, tmp_path, steps=(1, 4))
    assert {e.step for e in events(made)} == {1, 2}
    assert [line.get("step") for line in index(made)[1:]] == [1, 2]


class _Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_modes_of_the_program_are_left_as_it_pushed_them(tmp_path: Path) -> None:
    def program() -> list[list[str]]:
        stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack
        seen = []
        torch.manual_seed(0)
        model = Net()
        outer = _Doubling()
        with outer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # the window opens inside of it
            for _ in range(3):
                with _Doubling():
                    model(torch.ones(3, 4)).sum().backward()
                    optimizer.step()  # and closes inside of both
                seen.append([type(mode).__name__ for mode in stack()])
        seen.append([type(mode).__name__ for mode in stack()])
        return seen

    made = trace(program, tmp_path, steps=(1, 2))
    assert made.result == [["OperatorMode", "_Doubling"], ["_Doubling"], ["_Doubling"], []]
    assert {e.step for e in events(made)} == {1, 2}
    assert find(made, "aten.gelu_backward.default")


def test_a_window_that_closes_where_modes_are_set_aside_still_leaves_the_stack(tmp_path: Path) -> None:
    def program() -> list[int]:
        from torch.utils._python_dispatch import _disable_current_modes

        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        depths = []
        for step in range(4):
            model(torch.ones(3, 4)).sum().backward()
            if step == 1:
                with _disable_current_modes():
                    optimizer.step()
            else:
                optimizer.step()
            depths.append(torch._C._len_torch_dispatch_stack())
        return depths

    made = trace(program, tmp_path, steps=(1, 2))
    assert made.result[-1] == 0
    assert {e.step for e in events(made)} == {1, 2}


def test_an_operator_that_raises_raises_as_before(tmp_path: Path) -> None:
    def program() -> str:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
        with pytest.raises(RuntimeError, match="size"):
            torch.ones(3) + torch.ones(4)
        return train()

    made = trace(program, tmp_path)
    assert made.result == train()
    assert index(made)[-1]["complete"] is True


def test_other_threads_are_not_traced_and_do_no_harm(tmp_path: Path) -> None:
    def program() -> str:
        stop = threading.Event()

        def noise() -> None:
            while not stop.is_set():
                torch.ones(10).sin()

        thread = threading.Thread(target=noise)
        thread.start()
        result = train()
        stop.set()
        thread.join()
        return result

    a = trace(program, tmp_path / "a")
    assert files(a) == files(trace(train, tmp_path / "b"))


def test_loader_workers_and_other_children_write_nothing(tmp_path: Path) -> None:
    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, item: int) -> torch.Tensor:
            return torch.full((4,), float(item)).sin()

    def program() -> str:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1):
            model(batch).sum().backward()
            optimizer.step()
        if os.fork() == 0:
            train(steps=3)
            os._exit(0)
        os.wait()
        return "done"

    made = trace(program, tmp_path, steps=(1, 9))
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == ["rank00000.arrow", "rank00000.jsonl"]
    assert index(made)[-1]["complete"] is True
    assert {e.step for e in events(made)} <= {1, 2, 3}


class _Boxed(torch.Tensor):
    """A wrapper around a plain tensor that does its work on the inside."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Boxed:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def open_box(value: object) -> object:
            return value.inner if isinstance(value, _Boxed) else value

        result = func(*tree_map(open_box, args), **tree_map(open_box, kwargs or {}))
        return tree_map(lambda value: _Boxed(value) if isinstance(value, torch.Tensor) else value, result)


def test_a_subclass_is_read_by_its_parts_and_what_it_does_inside_comes_first(tmp_path: Path) -> None:
    def program() -> bool:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
        return isinstance(torch.sin(_Boxed(torch.ones(3))), _Boxed)

    made = trace(program, tmp_path, steps=(1, 1))
    assert made.result is True
    inside, outside = find(made, "aten.sin.default")
    assert (inside.signature, outside.signature) == (
        "float32[3] -> float32[3]",
        "inner:float32[3] -> inner:float32[3]",
    )
    assert (inside.inputs, inside.outputs) == (outside.inputs, outside.outputs)
    assert inside.seq < outside.seq


def test_transforms_of_functions_pass_unharmed(tmp_path: Path) -> None:
    def program() -> list[float]:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
        x = torch.arange(3.0)
        return torch.func.vmap(torch.func.grad(torch.sin))(x).tolist()

    made = trace(program, tmp_path, steps=(1, 1))
    assert made.result == torch.arange(3.0).cos().tolist()
    assert index(made)[-1]["complete"] is True
    assert find(made, "aten.cos.default")


def test_the_recorder_itself_is_not_traced(tmp_path: Path) -> None:
    def program(norm: bool) -> None:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        if norm:
            return

    made = run(partial(program, True), tmp_path, DETRUN_TRACE='{"level": 4, "steps": [1, 1]}', DETRUN_STATE_EVERY="1")
    quiet = trace(partial(program, True), tmp_path / "quiet", steps=(1, 1))
    assert [e.op for e in events(made)] == [e.op for e in events(quiet)]


def test_several_optimizers_share_a_step(tmp_path: Path) -> None:
    def program() -> None:
        torch.manual_seed(0)
        model = Net()
        optimizers = [
            torch.optim.SGD(model.first.parameters(), lr=0.1),
            torch.optim.SGD(model.last.parameters(), lr=0.1),
        ]
        for _ in range(4):
            model(torch.ones(3, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()

    made = trace(program, tmp_path, steps=(2, 3))
    forwards = find(made, "aten.gelu.default")
    assert [(e.step, e.microbatch) for e in forwards] == [(2, 0), (3, 0)]


def test_a_program_without_an_optimizer_is_traced_from_its_first_forward(tmp_path: Path) -> None:
    def program() -> None:
        torch.manual_seed(0)
        model = Net()
        for _ in range(3):
            loss = model(torch.ones(3, 4)).sum()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None

    made = trace(program, tmp_path, steps=(1, 2))
    assert [(e.step, e.microbatch) for e in find(made, "aten.gelu.default")] == [(1, 0), (2, 0)]
