"""State files: the moments at which they are taken, and what is in them."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import detrun.recorder
from detrun.fingerprint.host import digest_tensors
from detrun.records.layout import AttemptFolder
from detrun.records.state_reader import StateTable, boundaries, read_state
from tests.recorder import state_programs
from tests.recorder.harness import Run, run
from tests.recorder.programs import Net, batch, ending, seed


def named(step: int, microbatch: int) -> list[str]:
    suffix = f".{microbatch}" if microbatch else ""
    return [f"end-{step:08d}{suffix}", f"begin-{step + 1:08d}{suffix}", f"begin-{step + 2:08d}"]


def attempt(one: Run) -> AttemptFolder:
    return AttemptFolder(one.attempt, "a", 0)


def names(one: Run) -> list[str]:
    return [boundary.name for boundary in boundaries(attempt(one))]


def table(one: Run, boundary: str, rank: int = 0) -> StateTable:
    return read_state(attempt(one), boundary, rank)


def values(found: StateTable, component: str, standing: str | None = None) -> dict[str, tuple[Any, ...]]:
    return {
        f"{row.name}|{row.part}": (row.digest, row.value, row.shape, row.dtype)
        for row in found.rows
        if row.component == component and standing in (None, row.standing)
    }


def hard(found: StateTable) -> dict[tuple[str, str, str], tuple[Any, ...]]:
    """What counts, with a gradient of zeros for one that is None."""
    return {
        row.key: ("nothing",) if row.info.get("zero") or (row.component == "gradients" and row.digest is None)
        else (row.digest, row.value, row.shape, row.dtype)
        for row in found.rows
        if row.standing != "soft"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("program", "save", "position"), state_programs.ALL, ids=lambda p: getattr(p, "__name__", None)
)
def test_a_faithful_resume_begins_with_the_state_of_an_uninterrupted_run(
    program: state_programs.Program, save: int, position: tuple[int, int], tmp_path: Path
) -> None:
    end, begin, light = named(*position)
    plain = run(lambda: program(tmp_path, {save}, None), tmp_path / "plain", recorded=False)
    whole = run(lambda: program(tmp_path, {save}, None), tmp_path / "a")
    resumed = run(
        lambda: program(tmp_path, set(), tmp_path / f"{save}.pt"),
        tmp_path / "b",
        DETRUN_ATTEMPT="1",
        DETRUN_STEPS_DONE=str(position[0]),
        DETRUN_MICROBATCHES_DONE=str(position[1]),
    )
    assert whole.result == plain.result == resumed.result
    assert whole.cost()["warnings"] == resumed.cost()["warnings"] == []
    assert names(whole) == [end, begin, light]
    assert names(resumed) == [begin, light]
    for boundary in (begin, light):
        a, b = table(whole, boundary), table(resumed, boundary)
        assert a.scope == b.scope == ("full" if boundary == begin else "light")
        assert a.missing == b.missing == ()
        assert hard(a) == hard(b)
    assert any(row.component == "hyperparameters" for row in table(whole, begin).rows)
    assert any(row.component == "gradients" for row in table(whole, begin).rows)
    assert {row.component for row in table(whole, light).rows} <= {"module-state", "ema", "local", "tracked"}


def test_every_kind_of_state_has_its_rows(tmp_path: Path) -> None:
    whole = run(lambda: state_programs.scheduled(tmp_path, {3}, None), tmp_path / "a")
    saved = torch.load(tmp_path / "3.pt", weights_only=False)
    found = table(whole, "end-00000003")
    net = saved["net"]
    parameters = values(found, "parameters")
    assert set(parameters) == {
        "l0.weight|", "l0.bias|", "norm.weight|", "norm.bias|", "l1.weight|", "l1.bias|", "l2.weight|",
    }  # fmt: skip
    for name, (digest, *_) in parameters.items():
        assert digest == digest_tensors([net[name[:-1]]])
    assert set(values(found, "buffers")) == {
        "norm.running_mean|", "norm.running_var|", "norm.num_batches_tracked|", "position|",
    }  # fmt: skip
    count = found.by_key["buffers", "norm.num_batches_tracked", ""]
    assert (count.value, count.dtype, count.shape, count.elements) == ("3", "int64", (), 1)
    optimizer = values(found, "optimizer")
    assert "l0.bias.exp_avg|" not in optimizer
    assert {"l0.weight.exp_avg|", "l0.weight.exp_avg_sq|", "l0.weight.step|"} < set(optimizer)
    assert optimizer["l0.weight.exp_avg|"][0] == digest_tensors([saved["optimizer"]["state"][0]["exp_avg"]])
    gradients = {row.name: row for row in found.rows if row.component == "gradients"}
    assert set(gradients) == {name[:-1] for name in parameters} - {"l0.bias"}
    hyper = values(found, "hyperparameters")
    assert hyper["group0.lr|"][1] == float.hex(saved["optimizer"]["param_groups"][0]["lr"])
    assert hyper["group0.betas|"][1] == f"[{float.hex(0.9)}, {float.hex(0.999)}]"
    assert values(found, "scheduler")["scheduler0.last_epoch|"][1] == "3"
    assert set(values(found, "ema")) == {f"ema.{name}" for name in parameters}
    assert {"python|", "numpy|", "torch_cpu|"} <= set(values(found, "rng"))
    assert "batch" not in {row.component for row in found.rows}
    begin = table(whole, "begin-00000004")
    assert begin.by_key["batch", "batch", ""].digest is not None
    assert (found.step, found.microbatch, begin.step) == (3, 0, 4)
    assert 0 < found.cpu_seconds < 60
    assert whole.cost()["cpu_seconds"]["capture"] > 0


def test_kept_bytes_are_those_of_the_tensor_and_stay_below_the_limit(tmp_path: Path) -> None:
    program = lambda: state_programs.scheduled(tmp_path, {3}, None)  # noqa: E731
    whole = run(program, tmp_path / "a")
    found = table(whole, "end-00000003")
    saved = torch.load(tmp_path / "3.pt", weights_only=False)["net"]["l0.weight"]
    assert found.bytes_of(found.by_key["parameters", "l0.weight", ""]) == saved.numpy().tobytes()
    assert all(found.bytes_of(row) is not None for row in found.rows if row.nbytes)

    little = table(run(program, tmp_path / "little", DETRUN_STATE_BYTES="100"), "end-00000003")
    sizes = {row.offset: row.nbytes for row in little.rows if row.offset >= 0 and row.component != "rng"}
    assert 0 < sum(sizes.values()) <= 100
    assert little.bytes_of(little.by_key["parameters", "l0.weight", ""]) is None
    assert little.bytes_of(little.by_key["parameters", "l1.bias", ""]) is not None  # smaller, behind one that is not
    assert all(little.bytes_of(row) for row in little.rows if row.component == "rng")


def training(*, clear: str, resume: bool = False) -> dict[str, bytes]:
    """Clears gradients after the forward pass, right before backward. Resumed, there never were any."""
    seed()
    net = nn.Linear(6, 1)
    net.unused = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for step in range(2, 4) if resume else range(1, 4):
        loss = net(batch(step)).square().mean()
        if clear != "never":
            optimizer.zero_grad(set_to_none=clear == "none")
        loss.backward()
        optimizer.step()
    return ending([net], [optimizer])


@pytest.mark.parametrize("clear", ["none", "zeros"])
def test_gradients_that_are_cleared_before_backward_count_as_cleared(clear: str, tmp_path: Path) -> None:
    whole = run(lambda: training(clear=clear), tmp_path / "a", DETRUN_STATE_AT="1")
    resumed = run(lambda: training(clear=clear, resume=True), tmp_path / "b", DETRUN_ATTEMPT="1", DETRUN_STEPS_DONE="1")
    a, b = table(whole, "begin-00000002"), table(resumed, "begin-00000002")
    assert {row.digest for row in b.rows if row.component == "gradients"} == {None}
    row = a.by_key["gradients", "weight", ""]
    assert row.info == {} if clear == "none" else row.info == {"zero": True}
    assert (row.digest is None) == (clear == "none")
    assert hard(a) == hard(b)


def test_a_trial_before_the_weights_are_loaded_is_no_batch(tmp_path: Path) -> None:
    def program(trial: bool) -> None:
        seed()
        net = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 1))
        if trial:
            net.weight.sum()
            net(torch.ones(2, 6))
            net.load_state_dict(net.state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(1, 3):
            optimizer.zero_grad()
            net(batch(step)).square().mean().backward()
            optimizer.step()

    env = {"DETRUN_ATTEMPT": "1", "DETRUN_STEPS_DONE": "4"}
    plain, tried = (run(lambda t=t: program(t), tmp_path / str(t), **env).lines() for t in (False, True))
    assert [line["batch"] for line in plain] == [line["batch"] for line in tried]


def at_full_precision() -> None:
    """Whose gradients take the place of those of the step before."""
    seed()
    net = nn.Linear(6, 1).bfloat16()
    masters = [parameter.detach().float() for parameter in net.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.1)
    for step in range(1, 4):
        net.zero_grad()
        net(batch(step).bfloat16()).float().square().mean().backward()
        with torch.no_grad():
            for master, parameter in zip(masters, net.parameters(), strict=True):
                master.grad = parameter.grad.float()  # type: ignore[union-attr]
            optimizer.step()
            for master, parameter in zip(masters, net.parameters(), strict=True):
                parameter.copy_(master)


def test_gradients_that_others_take_the_place_of_count_as_cleared(tmp_path: Path) -> None:
    found = table(run(at_full_precision, tmp_path / "a", DETRUN_STATE_AT="2"), "begin-00000003")
    of_masters = {row.name: row for row in found.rows if row.component == "gradients" and "masters" in row.name}
    assert set(of_masters) == {"masters.0", "masters.1"}
    assert all(row.digest is None for row in of_masters.values())


def accumulating() -> None:
    """Two backward passes a step; what they added up to is rounded, into another tensor, before it is used."""
    seed()
    net = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(1, 7):
        net(batch(step)).square().mean().backward()
        if step == 3:
            torch.save(net.state_dict(), os.environ["DETRUN_ATTEMPT_DIR"] + "/saved.pt")
        if step % 2 == 0:
            for parameter in net.parameters():
                parameter.grad = parameter.grad.half().float()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_that_a_backward_pass_adds_to_are_state_whatever_becomes_of_them(tmp_path: Path) -> None:
    found = table(run(accumulating, tmp_path / "a"), "begin-00000002.1")
    rows = [row for row in found.rows if row.component == "gradients"]
    assert len(rows) == 2
    assert all(row.digest is not None for row in rows)


def test_gradients_that_nobody_clears_are_state(tmp_path: Path) -> None:
    whole = run(lambda: training(clear="never"), tmp_path / "a", DETRUN_STATE_AT="1")
    row = table(whole, "begin-00000002").by_key["gradients", "weight", ""]
    assert row.digest is not None and row.info == {}


def setting_rates() -> None:
    """Sets the rate right before the optimizer steps."""
    seed()
    net = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for step in range(1, 4):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = step / 10
        optimizer.step()


def test_hyper_parameters_are_those_that_the_next_step_uses(tmp_path: Path) -> None:
    whole = run(setting_rates, tmp_path / "a", DETRUN_STATE_AT="2")
    assert names(whole) == ["begin-00000003"]
    found = table(whole, "begin-00000003")
    assert found.by_key["hyperparameters", "group0.lr", ""].value == float.hex(0.3)
    assert found.by_key["batch", "batch", ""].digest == whole.steps()[3]["batch"]


def test_where_nothing_is_asked_for_and_nothing_saved_there_are_no_files(tmp_path: Path) -> None:
    assert names(run(setting_rates, tmp_path / "a")) == []
    program = lambda: state_programs.scheduled(tmp_path, {3}, None)  # noqa: E731
    quiet = run(program, tmp_path / "b", DETRUN_STATE_AT="none", DETRUN_ATTEMPT="1", DETRUN_STEPS_DONE="0")
    assert names(quiet) == []
    assert (quiet.attempt / "saves" / "rank00000.jsonl").exists()


def watched(folder: Path) -> list[str]:
    """Which of the program's objects outlived their last use, though nothing here runs the garbage collector."""
    gc.disable()
    seed()
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    alive: list[tuple[str, Any]] = []
    for step in range(1, 5):
        x = batch(step)
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        payload = {"net": {name: p.detach().clone() for name, p in net.named_parameters()}}
        torch.save(payload, folder / "w.pt")
        alive += [(f"{name} of step {step}", weakref.ref(made)) for name, made in (("x", x), ("loss", loss))]
        alive.append((f"payload of step {step}", weakref.ref(payload["net"]["l0.weight"])))
        del x, loss, payload
    optimizer.zero_grad()
    alive += [(name, weakref.ref(p)) for name, p in net.named_parameters()]
    del net, optimizer
    return [name for name, reference in alive if reference() is not None]


def test_nothing_of_the_program_is_kept_alive(tmp_path: Path) -> None:
    plain = run(lambda: watched(tmp_path), tmp_path / "plain", recorded=False)
    whole = run(lambda: watched(tmp_path), tmp_path / "a")
    assert [name for name in whole.result if name not in plain.result] == []
    assert len(names(whole)) == 7


def killed() -> None:
    seed()
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(2, 5):
        loss = net(batch(step)).square().mean()
        if step == 3:
            detrun.recorder._session.drain()  # type: ignore[union-attr]
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_what_a_killed_process_had_captured_is_there(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="-9"):
        run(killed, tmp_path / "b", DETRUN_STATE_AT="1,2", DETRUN_ATTEMPT="1", DETRUN_STEPS_DONE="1")
    found = Run(tmp_path / "b", None)
    assert names(found) == ["begin-00000002", "begin-00000003"]
    assert table(found, "begin-00000002").missing == ()
    last = table(found, "begin-00000003")
    assert last.missing == ("gradients", "hyperparameters")
    assert values(last, "parameters") and not values(last, "gradients")


def peeked() -> list[int]:
    """Whether looking at an optimizer's state has changed it."""
    net = nn.Linear(6, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    net(batch(1)).mean().backward()
    before = len(optimizer.state)
    optimizer.step()
    return [before, len(optimizer.state)]


def test_no_optimizer_state_is_made_by_looking(tmp_path: Path) -> None:
    assert run(peeked, tmp_path / "a", DETRUN_ATTEMPT="1", DETRUN_STEPS_DONE="3").result == [0, 2]


def unpyarrowed(folder: Path) -> dict[str, bytes]:
    import sys

    sys.modules["pyarrow"] = None  # type: ignore[assignment]
    return state_programs.scheduled(folder, {2, 3}, None)


def test_without_pyarrow_the_training_is_recorded_and_one_warning_says_so(tmp_path: Path) -> None:
    plain = run(lambda: state_programs.scheduled(tmp_path, {2, 3}, None), tmp_path / "plain", recorded=False)
    whole = run(lambda: unpyarrowed(tmp_path), tmp_path / "a")
    assert whole.result == plain.result
    assert whole.cost()["warnings"] == ["state capture needs pyarrow in the training's environment"]
    assert not (whole.attempt / "state").exists()
    assert len(whole.steps()) == state_programs.STEPS


def scalers() -> None:
    net = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    used = torch.amp.GradScaler("cpu", init_scale=512.0)
    fresh = torch.amp.GradScaler("cpu", init_scale=512.0)
    off = torch.amp.GradScaler("cpu", enabled=False)
    for step in (1, 2):
        used.scale(net(batch(step)).mean()).backward()
        used.step(optimizer)
        used.update()
    assert fresh is not off


def test_a_scale_that_was_not_used_yet_is_the_one_it_will_begin_with(tmp_path: Path) -> None:
    found = table(run(scalers, tmp_path / "a", DETRUN_ATTEMPT="1", DETRUN_STEPS_DONE="0"), "begin-00000001")
    scales = [found.by_key["scaler", f"scaler{n}.scale", ""] for n in (0, 1)]
    assert (scales[0].value, scales[0].digest) == (scales[1].value, scales[1].digest)
    assert scales[0].dtype == scales[1].dtype == "float32"
    assert scales[0].value == float.hex(512.0)
    assert found.by_key["scaler", "scaler1.growth_tracker", ""].value == "0"
    assert ("scaler", "scaler2.scale", "") not in found.by_key
    assert found.by_key["scaler", "scaler2.enabled", ""].value == "False"


def schedulers() -> None:
    net = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    kinds = torch.optim.lr_scheduler
    warm = kinds.LinearLR(optimizer, total_iters=3)
    main = kinds.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    kept = [kinds.SequentialLR(optimizer, [warm, main], [2]), kinds.ReduceLROnPlateau(optimizer, patience=3)]
    kinds.StepLR(optimizer, 3)  # dropped at once
    gc.collect()
    for step in (1, 2):
        net(batch(step)).mean().backward()
        optimizer.step()
        kept[0].step()
        kept[1].step(1.0)


def test_schedulers_of_every_kind_are_seen_while_they_live(tmp_path: Path) -> None:
    whole = run(schedulers, tmp_path / "a", DETRUN_STATE_AT="1")
    rows = values(table(whole, "begin-00000002"), "scheduler")
    assert rows["scheduler0.last_epoch|"][1] == "1"  # LinearLR
    assert rows["scheduler2._milestones|"][1] == "[2]"  # SequentialLR, whose constructor does not call its base's
    assert rows["scheduler3.best|"][1] == float.hex(1.0)  # ReduceLROnPlateau
    assert rows["scheduler3.num_bad_epochs|"][1] == "0"
    assert not any(name.startswith("scheduler4") for name in rows)
    assert not any("_step_count" in name or "optimizer" in name or "_last_lr" in name for name in rows)


def block_scaled() -> None:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    seed()
    net = nn.Linear(64, 1)
    net.register_buffer("eight", MXTensor.to_mx(torch.randn(32, 64), torch.float8_e4m3fn, 32))
    net.register_buffer("four", NVFP4Tensor.to_nvfp4(torch.randn(32, 64), per_tensor_scale=torch.tensor(0.5)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 64)).mean().backward()
    optimizer.step()


def test_packed_values_and_their_scales_have_rows_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    found = table(run(block_scaled, tmp_path / "a", DETRUN_ATTEMPT="1", DETRUN_STEPS_DONE="0"), "begin-00000001")
    rows = {(row.name, row.part): (row.dtype, row.shape) for row in found.rows if row.component == "buffers"}
    assert rows == {
        ("eight", "qdata"): ("float8_e4m3fn", (32, 64)),
        ("eight", "scale"): ("float8_e8m0fnu", (32, 2)),
        ("four", "qdata"): ("uint8", (32, 32)),
        ("four", "scale"): ("float8_e4m3fn", (32, 4)),
        ("four", "per_tensor_scale"): ("float32", ()),
    }


def unreachable() -> None:
    """Parameters that no module has, and an optimizer that keeps what all share under a name."""

    class Shared(torch.optim.SGD):
        pass

    seed()
    net = nn.Linear(6, 1)
    loose = torch.ones(1, requires_grad=True)
    optimizer = Shared([{"params": net.parameters()}, {"params": [loose, torch.ones(1)]}], lr=0.1)
    optimizer.state["global"] = {"count": 3}  # type: ignore[index]
    (net(batch(1)).mean() * loose).sum().backward()
    optimizer.step()


def test_a_parameter_of_no_module_has_its_variable_s_name_or_one_by_its_optimizer(tmp_path: Path) -> None:
    found = table(run(unreachable, tmp_path / "a", DETRUN_ATTEMPT="1", DETRUN_STEPS_DONE="0"), "begin-00000001")
    assert set(values(found, "parameters")) == {"weight|", "bias|", "loose|", "optimizer0.group1.param1|"}
    assert values(found, "optimizer")["global.count|"][1] == "3"
    assert found.by_key["hyperparameters", "group1.lr", ""].value == float.hex(0.1)


def test_a_part_of_a_step_has_its_own_losses_and_no_mean(tmp_path: Path) -> None:
    whole = run(lambda: state_programs.accumulating(tmp_path, {7}, None), tmp_path / "a")
    resumed = run(
        lambda: state_programs.accumulating(tmp_path, set(), tmp_path / "7.pt"),
        tmp_path / "b",
        DETRUN_ATTEMPT="1",
        DETRUN_STEPS_DONE="2",
        DETRUN_MICROBATCHES_DONE="1",
    )
    a, b = whole.steps(), resumed.steps()
    assert sorted(b) == [3, 4, 5, 6]
    assert b[3]["first_microbatch"] == 1 and "first_microbatch" not in b[4]
    assert set(b[3]["metrics"]) == {"loss[1]", "loss[2]", "grad_norm"}
    assert "batch" not in b[3]
    assert all(a[3]["metrics"][name] == value for name, value in b[3]["metrics"].items())
    assert b[4] == a[4]
