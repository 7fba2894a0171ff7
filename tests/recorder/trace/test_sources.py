"""What is recorded without a dispatch mode on one rank: batches, optimizers, modules, recomputation, regions that
cannot be looked into."""

from __future__ import annotations

import ctypes
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from detrun.recorder.trace.scopes import Scopes
from tests.recorder.harness import run
from tests.recorder.trace.traced import Net, events, find, index, trace, train


def test_level_2_holds_the_batch_and_an_event_for_each_parameter(tmp_path: Path) -> None:
    made = trace(train, tmp_path, level=2)
    found = [event for event in events(made) if event.step == 2]
    assert [event.kind for event in found] == ["batch", *["optimizer"] * 4]
    assert found[0].signature == "float32[3,4] ->"
    weight = next(event for event in found if event.scope == "first.0.weight")
    assert (weight.op, weight.phase) == ("AdamW", "optimizer")
    assert weight.signature == ("float32[8,4] float32[8,4] -> float32[8,4] float32[] float32[8,4] float32[8,4]")
    before = find(made, "AdamW", step=1, scope="first.0.weight")[0]
    assert weight.inputs[1] == before.outputs[0]  # nobody wrote it in between
    assert weight.outputs[0] != weight.inputs[1]


def test_a_write_into_a_parameter_shows_in_the_step_in_which_it_happened(tmp_path: Path) -> None:
    def program(written: bool) -> None:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            net(torch.ones(3, 4)).square().mean().backward()
            optimizer.zero_grad(set_to_none=False)
            if written and step == 1:
                ctypes.memset(net.last.weight.data_ptr(), 1, 1)
            optimizer.step()

    for level, op in ((2, "SGD"), (4, "parameters")):
        a = trace(partial(program, False), tmp_path / f"{level}a", level=level, steps=(1, 3))
        b = trace(partial(program, True), tmp_path / f"{level}b", level=level, steps=(1, 3))
        differing = [x for x, y in zip(find(a, op), find(b, op), strict=True) if x.inputs != y.inputs]
        assert (differing[0].step, differing[0].scope) == (2, "last.weight")


def test_an_optimizer_with_a_closure_is_given_the_gradients_of_the_closure(tmp_path: Path) -> None:
    def program() -> None:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(torch.ones(3, 4)).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    made = trace(program, tmp_path, level=2)
    assert [event.signature for event in find(made, "SGD", step=2, scope="last.bias")] == ["float32[2] -> float32[2]"]
    assert [event.step for event in find(made, "batch")] == [1, 2]


def test_what_was_computed_is_no_batch_of_the_module_that_goes_on_from_it(tmp_path: Path) -> None:
    def program() -> None:
        first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        second(first(torch.ones(2, 4)) * 2).sum().backward()
        optimizer.step()

    batches = find(trace(program, tmp_path, level=2, steps=(1, 1)), "batch")
    assert [event.signature for event in batches] == ["float32[2,4] ->", "->"]


def test_keyword_and_nested_inputs_of_the_model_are_its_batch(tmp_path: Path) -> None:
    class Takes(Net):
        def forward(self, batch: dict[str, Any], *, scale: float, mask: torch.Tensor) -> torch.Tensor:  # type: ignore
            return super().forward(batch["x"]) * mask * scale

    def program(scale: float) -> None:
        net = Takes()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net({"x": torch.ones(3, 4), "name": "a"}, scale=scale, mask=torch.ones(2)).sum().backward()
        optimizer.step()

    found = [find(trace(partial(program, s), tmp_path / str(s), level=2), "batch")[0] for s in (0.5, 0.25)]
    assert found[0].signature == "float32[3,4] float32[2] ->"
    assert "0x1.0000000000000p-1" in found[0].scalars and "'a'" in found[0].scalars
    assert found[0].scalars != found[1].scalars and found[0].inputs == found[1].inputs


def test_modules_have_their_inputs_and_outputs_and_gradients(tmp_path: Path) -> None:
    made = trace(train, tmp_path, level=3, steps=(1, 1))
    forward = {event.scope: event for event in find(made, "module", phase="forward")}
    assert set(forward) == {"", "first", "first.0", "first.1", "drop", "last"}
    assert forward["first.1"].inputs == forward["first.0"].outputs
    backward = find(made, "module", phase="backward")
    # The data needs no gradient: nothing leaves the model, nor its first block.
    assert [event.scope for event in backward if event.outputs] == ["last", "drop", "first.1"]
    assert {event.scope for event in backward if not event.outputs} == {"", "first", "first.0"}
    by_scope = {event.scope: event for event in backward}
    assert by_scope["last"].outputs == by_scope["drop"].inputs
    assert by_scope["first.1"].outputs == by_scope["first.0"].inputs


def test_a_fault_in_the_backward_pass_of_a_module_lies_between_its_gradients(tmp_path: Path) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, wrong: bool) -> torch.Tensor:
            ctx.wrong = wrong
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient * (1.5 if ctx.wrong else 1.0), None

    class Inner(nn.Module):
        def __init__(self, wrong: bool) -> None:
            super().__init__()
            self.wrong = wrong
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Doubled.apply(self.inner(x), self.wrong)

    class Residual(nn.Module):
        def __init__(self, wrong: bool) -> None:
            super().__init__()
            self.before, self.side, self.after = nn.Linear(4, 4), Inner(wrong), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.before(x)
            return self.after(x + self.side(x))

    made = [
        trace(partial(train, steps=1, net=partial(Residual, wrong)), tmp_path / str(wrong), level=3, steps=(1, 1))
        for wrong in (False, True)
    ]
    pairs = list(zip(*(find(each, "module", phase="backward") for each in made), strict=True))
    origins = [a.scope for a, b in pairs if a.inputs == b.inputs and a.outputs != b.outputs]
    assert origins[0] == "side"
    assert [a.scope for a, b in pairs if a.inputs != b.inputs] == ["side.inner", "before"]


@pytest.mark.parametrize("level", [2, 3, 4])
def test_nothing_of_it_changes_what_the_program_ends_with(level: int, tmp_path: Path) -> None:
    program = partial(train, microbatches=2, net=partial(Net, 0.5))
    plain = run(program, tmp_path / "plain", recorded=False).result
    assert trace(program, tmp_path / "traced", level=level).result == plain


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(4, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=self.reentrant) + x


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("level", [2, 3, 4])
def test_a_recomputation_stands_beside_its_forward_pass(reentrant: bool, level: int, tmp_path: Path) -> None:
    program = partial(train, microbatches=2, net=partial(Checkpointed, reentrant))
    plain = run(program, tmp_path / "plain", recorded=False).result
    made = trace(program, tmp_path / "traced", level=level, steps=(2, 2))
    assert made.result == plain
    found = events(made)
    again = [event for event in found if event.phase == "recompute"]
    first = {(e.microbatch, e.scope, e.op, e.occurrence): e for e in found if e.phase == "forward"}
    assert {event.microbatch for event in again} == {0, 1}
    for event in again:
        original = first[event.microbatch, event.scope, event.op, event.occurrence]
        assert (event.signature, event.inputs, event.outputs) == (
            original.signature,
            original.inputs,
            original.outputs,
        )
        assert event.outputs
    if level == 2:
        assert [(event.kind, event.op) for event in again] == [("recompute", "checkpoint")] * 2


def test_a_recomputation_that_differs_from_its_forward_pass_shows(tmp_path: Path) -> None:
    class Counting(Checkpointed):
        def __init__(self) -> None:
            super().__init__(False)
            self.calls = 0
            self.block.register_forward_pre_hook(self.count)

        def count(self, _module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            self.calls += 1
            return (args[0] * (1.0 + self.calls % 2),)

    made = trace(partial(train, steps=1, net=Counting), tmp_path, level=2, steps=(1, 1))
    forward, again = find(made, "checkpoint")
    assert (forward.phase, again.phase) == ("forward", "recompute")
    assert forward.inputs == again.inputs and forward.outputs != again.outputs


@pytest.mark.slow
def test_a_compiled_region_is_one_event_with_what_goes_in_and_out(tmp_path: Path) -> None:
    def program() -> Any:
        torch.manual_seed(0)
        net = Net()
        compiled = torch.compile(net, backend="inductor")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            compiled(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return graphs, [float(p.detach().sum()).hex() for p in net.parameters()]

    plain = run(program, tmp_path / "plain", recorded=False).result
    made = trace(program, tmp_path / "traced", steps=(2, 2))
    assert made.result == plain
    regions = find(made, "compiled")
    assert [(event.kind, event.phase) for event in regions] == [("opaque", "forward"), ("opaque", "backward")]
    assert all(event.inputs and event.outputs for event in regions)
    assert index(made)[-1]["coverage"]["opaque"] == {"compiled region": 2}


def test_a_function_of_the_programs_own_is_seen_at_its_boundary(tmp_path: Path) -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x)
            ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)  # no operator
            return y

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    class Uses(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Own.apply(super().forward(x))

    made = trace(partial(train, steps=1, net=Uses), tmp_path, steps=(1, 1))
    own = [event for event in events(made) if event.op.startswith("function.")]
    assert [event.phase for event in own] == ["forward", "backward"]
    assert own[0].inputs == own[0].outputs and own[1].inputs != own[1].outputs


def test_a_window_begins_with_what_is_there(tmp_path: Path) -> None:
    found = events(trace(lambda: train(3), tmp_path / "a", steps=(2, 3)))
    held = [event for event in found if event.op == "state"]
    assert [event.scope for event in held] == [
        "first.0.weight", "first.0.bias", "last.weight", "last.bias"
    ]  # fmt: skip
    assert {event.step for event in held} == {2}
    assert {len(event.outputs) for event in held} == {4}  # the parameter, its moments and their step
    first = next(event for event in found if event.op == "aten.addmm.default")
    assert all(first.seq - back < len(held) for back in first.producers if back and back != 2)


def test_parts_of_a_forward_pass_on_other_threads_have_the_same_events_in_whatever_order(tmp_path: Path) -> None:
    def program(late: int) -> None:
        pool = ThreadPoolExecutor(2)

        class Branches(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                def part(number: int, module: nn.Module) -> torch.Tensor:
                    time.sleep(0.02 if number == late else 0.0)
                    return module(x).tanh()

                parts = [pool.submit(part, number, module) for number, module in enumerate(self.parts)]
                return torch.stack([each.result() for each in parts]).sum(0)

        torch.manual_seed(0)
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            pool.submit(torch.ones(3).sin).result()  # a thread's own business

    def keys(name: str, late: int) -> list[tuple[object, ...]]:
        found = events(trace(lambda: program(late), tmp_path / name))
        return sorted((e.step, e.microbatch, e.phase, e.scope, e.op, e.inputs, e.outputs) for e in found)

    seen = keys("a", 0)
    assert seen == keys("b", 2)
    places = {
        (phase, scope) for _, _, phase, scope, op, _, _ in seen if op in ("aten.addmm.default", "aten.mm.default")
    }
    assert places == {(phase, f"parts.{n}") for phase in ("forward", "backward") for n in range(3)}
    assert sum(op == "aten.tanh.default" for _, _, _, _, op, _, _ in seen) == 6
    assert not [op for _, _, _, _, op, _, _ in seen if op == "aten.sin.default"]


def test_what_a_transform_wrapped_is_read_as_what_it_is(tmp_path: Path) -> None:
    def program() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parameters = {name: value.detach() for name, value in model.named_parameters()}

        def loss(values: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, values, (x[None],)).square().sum()

        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.ones(3, 4))
        for name, value in model.named_parameters():
            value.grad = gradients[name].mean(0)
        optimizer.step()

    made = trace(program, tmp_path, steps=(1, 1))
    assert index(made)[-1]["complete"]
    assert events(made)


def test_a_tensor_at_the_address_of_a_gradient_that_is_gone_is_not_taken_for_it() -> None:
    weight, stranger = nn.Parameter(torch.ones(2)), torch.ones(2)
    optimizer = torch.optim.SGD([weight])
    scopes = Scopes()
    scopes._owners[id(weight)] = (weakref.ref(weight), "layer", "layer.weight")
    scopes.optimizer_begins(optimizer)
    scopes._local.optimizers[-1][1][id(stranger)] = (weakref.ref(weight), "layer.weight")
    assert scopes.place([stranger], []) == ("optimizer", "", 0)
    assert scopes.place([weight], []) == ("optimizer", "layer.weight", 0)
