"""What is recorded of a training program: the right bits, under the right step."""

from __future__ import annotations

import gc
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import detrun
from detrun.fingerprint.host import digest_tensors
from tests.recorder import programs
from tests.recorder.harness import run


def bits32(value: float) -> str:
    return f"0x{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"


def clipping_program() -> dict[str, Any]:
    programs.seed()
    net = programs.Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    seen: dict[str, Any] = {"loss": [], "norm": [], "gradients": [], "parameters": [], "buffers": []}
    seen["initial"] = digest_tensors(list(net.parameters()))
    for step in range(1, 4):
        optimizer.zero_grad()
        loss = net(programs.batch(step)).square().mean()
        loss.backward()
        seen["gradients"].append(digest_tensors([p.grad for p in net.parameters()]))
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
        seen["loss"].append(bits32(loss.item()))
        seen["norm"].append(bits32(norm.item()))
        seen["parameters"].append(digest_tensors(list(net.parameters())))
        seen["buffers"].append(digest_tensors(list(net.buffers())))
    return seen


def test_metrics_and_state_of_each_step_are_those_of_the_program(tmp_path: Path) -> None:
    done = run(clipping_program, tmp_path)
    seen, steps = done.result, done.steps()
    assert list(steps) == [1, 2, 3]
    assert done.environment()["initial"]["parameters"] == seen["initial"]
    for index, line in enumerate(steps.values()):
        assert line["v"] == 1
        assert line["microbatches"] == 1
        assert line["metrics"]["loss"]["bits"] == seen["loss"][index]
        assert line["metrics"]["loss"]["source"] == "backward"
        assert line["metrics"]["grad_norm"]["bits"] == seen["norm"][index]
        assert line["metrics"]["grad_norm"]["source"] == "clip_grad_norm_"
        assert set(line["metrics"]) == {"loss", "grad_norm"}
        assert line["state"]["gradients"] == seen["gradients"][index]
        assert line["state"]["parameters"] == seen["parameters"][index]
        assert line["state"]["buffers"] == seen["buffers"][index]
    batches = [line["batch"] for line in steps.values()]
    assert len(set(batches)) == 3
    assert len({line["rng"] for line in steps.values()}) == 3
    assert (tmp_path / "progress" / "rank00000").read_bytes() == b"3 end".ljust(31) + b"\n"
    cost = done.cost()
    assert cost["steps"] == 3
    assert cost["warnings"] == []
    assert 0 < sum(cost["cpu_seconds"].values()) < cost["process_cpu_seconds"]


def test_norm_of_a_program_that_never_clips_is_computed_by_the_recorder(tmp_path: Path) -> None:
    steps = run(programs.plain, tmp_path).steps()
    assert [line["metrics"]["grad_norm"]["source"] for line in steps.values()] == ["recorder"] * 3
    assert all(line["metrics"]["grad_norm"]["dtype"] == "float64" for line in steps.values())
    assert all(line["metrics"]["grad_norm"]["value"] > 0 for line in steps.values())


def test_each_micro_batch_is_kept_and_their_mean_is_the_loss(tmp_path: Path) -> None:
    for line in run(programs.accumulating, tmp_path).steps().values():
        metrics = line["metrics"]
        assert line["microbatches"] == 3
        parts = [metrics[f"loss[{i}]"] for i in range(3)]
        assert {part["dtype"] for part in parts} == {"float32"}
        exact = [struct.unpack("<f", struct.pack("<I", int(p["bits"], 16)))[0] for p in parts]
        assert metrics["loss"]["dtype"] == "float64"
        assert metrics["loss"]["value"] == (exact[0] + exact[1] + exact[2]) / 3


@pytest.mark.parametrize(
    ("program", "count", "losses"),
    [
        (programs.adversarial, 4, [2, 2, 2, 2]),
        (programs.nested, 3, [1, 1, 1]),
        (programs.with_closure, 2, None),
        (programs.checkpointed, 2, [1, 1]),
        (programs.sparse, 3, [1, 1, 1]),
    ],
)
def test_steps_close_with_the_last_optimizer(program: Any, count: int, losses: Any, tmp_path: Path) -> None:
    done = run(program, tmp_path)
    assert [line["step"] for line in done.lines()] == list(range(1, count + 1))
    if losses:
        assert [line["microbatches"] for line in done.lines()] == losses
    for line in done.lines():
        assert set(line["state"]) >= {"parameters", "gradients", "optimizer"}
        assert "grad_norm" in line["metrics"]


def test_the_maker_is_part_of_its_judges_last_step(tmp_path: Path) -> None:
    lines = run(programs.critics, tmp_path).lines()
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert [line["microbatches"] for line in lines] == [1, 1, 2] * 3


def late_start(*, first: bool) -> None:
    """A second optimizer that shares the backward pass joins at the third step, before or behind the other."""
    early, late = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    one, two = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (early, late))
    for step in range(5):
        late(early(torch.ones(2, 3))).mean().backward()
        for optimizer in (two, one) if first else (one, two):
            if optimizer is one or step >= 2:
                optimizer.step()


@pytest.mark.parametrize("first", [True, False])
def test_an_optimizer_that_joins_later_shares_the_step_of_its_backward_pass(first: bool, tmp_path: Path) -> None:
    lines = run(lambda: late_start(first=first), tmp_path).lines()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all("loss" in line["metrics"] and "batch" in line and line["microbatches"] == 1 for line in lines)


class Grows(torch.nn.Module):
    """Has parameters from its first call on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._parameters:
            self.a, self.b = (torch.nn.Parameter(torch.full((1,), start)) for start in (2.0, 3.0))
        return self.a * x + self.b


def an_optimizer_a_parameter(order: tuple[int, ...]) -> None:
    """Each is made when its parameter is first met, in an order that is another one in each run."""
    programs.seed()
    net, scale, optimizers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)), Grows(), {}
    for step in range(3):
        scale(net(torch.full((2, 3), float(step + 1)))).mean().backward()
        parameters = [*net.parameters(), *scale.parameters()]
        for at in order:
            if at not in optimizers:
                optimizers[at] = torch.optim.Adam([parameters[at]], lr=0.1 + at)
            optimizers[at].step()
            optimizers[at].zero_grad()


def test_optimizers_that_are_made_in_the_first_step_are_of_one_step_in_any_order(tmp_path: Path) -> None:
    one, other = (
        run(lambda order=order: an_optimizer_a_parameter(order), tmp_path / str(order[0])).lines()
        for order in ((0, 1, 2, 3, 4, 5), (2, 0, 5, 3, 4, 1))
    )
    assert [line["step"] for line in one] == [1, 2, 3]
    assert all("loss" in line["metrics"] and line["microbatches"] == 1 for line in one)
    assert one == other


class CallsForward:
    """A library's own idea of a call, which never comes to torch's."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)  # type: ignore[attr-defined]


def a_call_of_its_own() -> None:
    class Shifts(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.shift

    class Own(torch.nn.Module):
        __call__ = CallsForward.__call__
        forward = Shifts.forward

    class Derived(Own):
        pass

    class Mixed(CallsForward, Shifts):
        pass

    class Usual(Shifts):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * 2

    for kind in (Own, Derived, Mixed, Usual):
        net = kind()
        net.inner = torch.nn.Linear(3, 1)
        net.register_buffer("shift", torch.ones(1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(2):
            net(torch.full((2, 3), float(step))).mean().backward()
            optimizer.step()
        del net, optimizer


def test_a_module_with_a_call_of_its_own_has_batches_and_buffers(tmp_path: Path) -> None:
    lines = run(a_call_of_its_own, tmp_path).lines()
    assert [line["microbatches"] for line in lines] == [1] * 8
    assert len({line["batch"] for line in lines}) == 2
    assert all("buffers" in line["state"] for line in lines)


def a_stage_of_two() -> None:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    net = torch.nn.Linear(3, 1)
    PipelineStage(net, 0, 2, torch.device("cpu"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(2, 3)).mean().backward()
    optimizer.step()
    dist.destroy_process_group()


def test_a_stage_of_a_pipeline_is_known(tmp_path: Path) -> None:
    assert run(a_stage_of_two, tmp_path).environment()["coordinates"] == {"pp": 0}


def fine_tuned() -> None:
    """In evaluation mode from the first step to the last."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(), torch.nn.Linear(3, 1)).eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        net(torch.full((2, 3), float(step))).mean().backward()
        optimizer.step()


def test_a_model_trained_in_evaluation_mode_has_batches(tmp_path: Path) -> None:
    lines = run(fine_tuned, tmp_path).lines()
    assert len({line["batch"] for line in lines}) == 3


def test_what_a_model_is_evaluated_on_is_no_batch_of_the_training(tmp_path: Path) -> None:
    def program(*, evaluated: bool) -> None:
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if evaluated:
            net.eval()(torch.ones(1, 3))
        net.train()(torch.zeros(2, 3)).mean().backward()
        optimizer.step()

    batches = [run(lambda e=e: program(evaluated=e), tmp_path / str(e)).lines()[0]["batch"] for e in (True, False)]
    assert batches[0] == batches[1]


class RunningMean(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.mean(0), 0.5)
        return x


def test_running_statistics_of_a_module_without_parameters_are_state(tmp_path: Path) -> None:
    def program() -> None:
        norm, net = RunningMean(), torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        for _ in range(2):
            net(norm(torch.ones(2, 3))).mean().backward()
            optimizer.step()

    lines = run(program, tmp_path).lines()
    assert lines[0]["state"]["buffers"] != lines[1]["state"]["buffers"]


def test_a_loss_may_come_from_autograd_grad(tmp_path: Path) -> None:
    def program() -> None:
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            loss = net(torch.ones(2, 3)).mean()
            gradients = torch.autograd.grad(loss, list(net.parameters()), create_graph=step == 2)
            if step == 2:  # a penalty on gradients: the loss is what backward starts from
                (loss + gradients[0].square().sum()).backward()
            else:
                for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                    parameter.grad = gradient
            optimizer.step()

    lines = run(program, tmp_path).lines()
    assert [line["microbatches"] for line in lines] == [1, 1, 1]
    assert all("loss" in line["metrics"] for line in lines)


def test_a_program_without_an_optimizer_has_rng_streams(tmp_path: Path) -> None:
    def program() -> None:
        for step in range(3):
            detrun.record(step, loss=torch.rand(()))

    assert all("rng" in line for line in run(program, tmp_path).lines())


def test_paths_of_the_arms_own_folder_in_a_batch_are_the_same_in_every_arm(tmp_path: Path) -> None:
    class Net(torch.nn.Linear):
        def forward(self, batch: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
            return super().forward(batch["x"])

    def program(sample: str) -> None:
        net = Net(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        path = Path(os.environ["DETRUN_ATTEMPT_DIR"]).parent / "work" / sample
        net({"x": torch.ones(2, 3), "path": [str(path)]}).mean().backward()
        optimizer.step()

    def batch(arm: str, sample: str) -> str:
        return run(lambda: program(sample), tmp_path / arm / "attempt-0").lines()[0]["batch"]

    assert batch("a", "1.pt") == batch("b", "1.pt") != batch("c", "2.pt")


def test_a_skipped_step_counts_and_the_loss_is_the_unscaled_one(tmp_path: Path) -> None:
    lines = run(programs.scaled, tmp_path).lines()
    assert [line.get("skipped", False) for line in lines] == [False, True, False]
    assert lines[0]["metrics"]["loss"]["value"] < 100
    assert lines[1]["metrics"]["loss"]["value"] == "inf"
    assert lines[0]["state"]["parameters"] == lines[1]["state"]["parameters"] != lines[2]["state"]["parameters"]


def test_progress_that_cannot_be_written_costs_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "progress").write_text("in the way")
    bare, whole = run(programs.plain, tmp_path / "bare"), run(programs.plain, tmp_path / "whole")
    assert bare.lines() == whole.lines()
    assert "progress cannot be shown" in bare.cost()["warnings"][0]


def test_state_digests_only_on_the_steps_asked_for(tmp_path: Path) -> None:
    lines = run(programs.clipped, tmp_path / "a", DETRUN_STATE_EVERY="2").lines()
    assert [("state" in line, "rng" in line) for line in lines] == [(False, False), (True, True), (False, False)]
    every = run(programs.clipped, tmp_path / "b").lines()
    assert lines[1] == every[1]
    none = run(programs.clipped, tmp_path / "c", DETRUN_STATE_EVERY="0").lines()
    assert not any("state" in line for line in none)


def failing_step() -> int:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if failing[0]:
                raise RuntimeError("out of luck")
            return super().step(closure)

    programs.seed()
    net = programs.Net()
    optimizer = Fails(net.parameters(), lr=0.1)
    failing = [False]
    for failing[0] in (False, True, False, False):
        net(programs.batch(1)).mean().backward()
        try:
            optimizer.step()
        except RuntimeError:
            continue
    return 0


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_that_only_makes_optimizer_state_exist_is_none(kind: Any, tmp_path: Path) -> None:
    def program() -> None:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        net = programs.Net()
        optimizer = kind(net.parameters(), lr=1e-2)
        for step in range(1, 4):
            get_optimizer_state_dict(net, optimizer)  # steps by itself while there is no state
            net(programs.batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    lines = run(program, tmp_path).lines()
    assert [(line["step"], line["microbatches"]) for line in lines] == [(1, 1), (2, 1), (3, 1)]


def test_a_first_step_of_a_program_s_own_that_moves_nothing_is_none(tmp_path: Path) -> None:
    def program() -> None:
        net = programs.Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for step in range(1, 3):
            optimizer.zero_grad()
            net(programs.batch(step)).square().mean().backward()
            optimizer.step()

    assert [line["step"] for line in run(program, tmp_path).lines()] == [1, 2]


def test_gradients_that_no_backward_pass_made_are_steps_all_the_same(tmp_path: Path) -> None:
    def program() -> None:
        net = programs.Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for _ in range(3):
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    assert [line["step"] for line in run(program, tmp_path).lines()] == [1, 2, 3]


def test_an_optimizer_that_raises_does_not_stop_the_count(tmp_path: Path) -> None:
    lines = run(failing_step, tmp_path).lines()
    assert [line["step"] for line in lines] == [1, 2, 3]


def model_and_optimizer_that_go_away() -> tuple[int, int]:
    import weakref

    programs.seed()
    net = programs.Net()
    optimizer = torch.optim.Adam(net.parameters())
    net(programs.batch(1)).mean().backward()
    optimizer.step()
    graph = net(programs.batch(2)).mean()
    graph.backward()
    references = [weakref.ref(net), weakref.ref(optimizer), weakref.ref(net.l0.weight), weakref.ref(graph)]
    del net, optimizer, graph
    gc.collect()
    alive = sum(reference() is not None for reference in references)
    programs.plain(2)
    return alive, len(references)


def test_nothing_of_the_program_is_kept_alive(tmp_path: Path) -> None:
    done = run(model_and_optimizer_that_go_away, tmp_path)
    assert done.result == (0, 4)
    assert [line["step"] for line in done.lines()] == [1, 2, 3]


def models_as_they_were() -> list[bool]:
    import copy
    import pickle

    net = programs.Net()
    before = set(vars(net))
    optimizer = torch.optim.Adam(net.parameters())
    net(programs.batch(1)).mean().backward()
    optimizer.step()
    clean = vars(net).keys() == before and not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    same = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    return [clean, "detrun" not in repr(vars(optimizer)), torch.equal(same.l0.weight, net.l0.weight)]


def test_models_carry_no_hooks_and_can_be_copied_and_pickled(tmp_path: Path) -> None:
    assert run(models_as_they_were, tmp_path).result == [True, True, True]


def clip_by_other_ways() -> list[str]:
    from torch.nn.utils import clip_grad as module

    programs.seed()
    net = programs.Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    norms = []
    for way in range(4):
        optimizer.zero_grad()
        net(programs.batch(way)).square().mean().backward()
        if way == 0:
            norm = module.clip_grad_norm_(net.parameters(), 1.0)
        elif way == 1:
            norm = nn.utils.clip_grad_norm_((p for p in net.parameters()), 1.0)
        elif way == 2:
            norm = nn.utils.get_total_norm([p.grad for p in net.parameters()])
            nn.utils.clip_grads_with_norm_(net.parameters(), 1.0, norm)
        else:
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0, norm_type=2.0)
        norms.append(bits32(norm.item()))
        optimizer.step()
    return norms


def test_every_way_of_clipping_is_seen(tmp_path: Path) -> None:
    done = run(clip_by_other_ways, tmp_path)
    assert [line["metrics"]["grad_norm"]["bits"] for line in done.lines()] == done.result
    assert {line["metrics"]["grad_norm"]["source"] for line in done.lines()} == {"clip_grad_norm_"}


def recording(first: int, *, before: bool) -> None:
    programs.seed()
    net = programs.Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(first, first + 3):
        optimizer.zero_grad()
        loss = net(programs.batch(step)).square().mean()
        loss.backward()
        if before:
            detrun.record(step, loss=loss, lm_loss=1.5, tokens=7)
        optimizer.step()
        if not before:
            detrun.record(step, lm_loss=1.5)


@pytest.mark.parametrize("first", [0, 1])
def test_record_before_the_step_closes_joins_it(first: int, tmp_path: Path) -> None:
    lines = run(lambda: recording(first, before=True), tmp_path).lines()
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        metrics = line["metrics"]
        assert metrics["loss"]["source"] == "record"
        assert metrics["loss (backward)"]["bits"] == metrics["loss"]["bits"]
        assert metrics["lm_loss"] == {
            "bits": "0x3ff8000000000000",
            "dtype": "float64",
            "value": 1.5,
            "source": "record",
        }
        assert metrics["tokens"]["dtype"] == "int64"


@pytest.mark.parametrize("first", [0, 1])
def test_record_after_the_step_closed_is_a_supplement(first: int, tmp_path: Path) -> None:
    lines = run(lambda: recording(first, before=False), tmp_path).lines()
    assert [line["step"] for line in lines] == [1, 1, 2, 2, 3, 3]
    assert all(set(line) == {"v", "step", "metrics"} for line in lines[1::2])


def without_optimizer() -> None:
    for step in range(3):
        detrun.record(step, loss=torch.tensor(0.5), name="no number")
        detrun.record(step, grad_norm=1)


def test_record_alone_makes_lines(tmp_path: Path) -> None:
    done = run(without_optimizer, tmp_path)
    assert [line["step"] for line in done.lines()] == [1, 1, 2, 2, 3, 3]
    assert any("no number" in text or "not a number" in text for text in done.cost()["warnings"])


def test_a_resumed_attempt_goes_on_counting(tmp_path: Path) -> None:
    lines = run(programs.plain, tmp_path / "a", DETRUN_ATTEMPT="1", DETRUN_STEPS_DONE="10").lines()
    assert [line["step"] for line in lines] == [11, 12, 13]
    lines = run(lambda: recording(8, before=True), tmp_path / "b", DETRUN_ATTEMPT="1").lines()
    assert [line["step"] for line in lines] == [8, 9, 10]
