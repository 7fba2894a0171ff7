"""The program repeats itself, resumes exactly and refuses nonsense, in one process; faults have their own file."""

from __future__ import annotations

import os
import shutil
import signal
import struct
from pathlib import Path

import pytest
import torch

from detrun.workloads.hybrid import __main__ as program
from detrun.workloads.hybrid.checkpoint import Checkpointer
from detrun.workloads.hybrid.ema import WeightAverage
from detrun.workloads.hybrid.process_faults import Slow
from detrun.workloads.hybrid.train import Trainer, learning_rate_factor

from .conftest import STEPS, TINY, Run
from .observed import differing, first_difference


def test_two_runs_are_identical_and_another_seed_is_not(run: Run) -> None:
    reference = run()
    assert sorted(reference) == list(range(1, STEPS + 1))
    assert run() == reference
    assert first_difference(reference, run("--seed", "2")) == 1


@pytest.mark.slow
def test_runs_are_identical_on_two_threads_and_under_deterministic_algorithms(run: Run) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert run("--threads", "2", steps=2) == run("--threads", "2", steps=2)
    finally:
        torch.use_deterministic_algorithms(False)


def test_saving_changes_nothing(run: Run) -> None:
    assert run("--save-every", "2") == run()


def test_resume_continues_bit_for_bit(run: Run, tmp_path: Path) -> None:
    reference = run("--save-every", "2", out=tmp_path / "reference")
    interrupted = run("--save-every", "2", "--fault", "crash@step=4", out=tmp_path / "run")
    assert sorted(interrupted) == [1, 2, 3]
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step-2")
    resumed = run("--save-every", "2", "--resume", checkpoint, out=tmp_path / "run")
    assert resumed == {step: reference[step] for step in range(3, STEPS + 1)}
    # Once more, from a checkpoint that the resumed run saved.
    again = run("--resume", str(tmp_path / "run" / "checkpoints" / "step-4"), out=tmp_path / "run")
    assert again == {step: reference[step] for step in range(5, STEPS + 1)}


def test_a_resumed_run_that_is_done_does_nothing(run: Run, tmp_path: Path) -> None:
    run("--save-every", "2", steps=2, out=tmp_path)
    assert run("--resume", str(tmp_path / "checkpoints" / "step-2"), steps=2, out=tmp_path) == {}


def test_a_save_that_fails_leaves_no_checkpoint(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.startswith(".saving"):
            raise RuntimeError("killed before the rename")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    run("--save-every", "2", out=tmp_path)
    left = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert left == [".saving-2"]
    monkeypatch.undo()
    run("--save-every", "2", steps=2, out=tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]


def test_a_checkpoint_is_replaced_by_a_later_one_of_the_same_step(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        run("--save-every", "2", steps=2, out=tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]


def test_a_signal_saves_and_ends_the_run_once_however_often_it_comes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves: list[int] = []
    save = Checkpointer.save

    def send(trainer: Trainer) -> None:
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)

    def save_under_fire(self: Checkpointer, step: int) -> Path:
        os.kill(os.getpid(), signal.SIGUSR1)
        saves.append(step)
        path = save(self, step)
        os.kill(os.getpid(), signal.SIGUSR1)
        return path

    monkeypatch.setattr(Slow, "begin_step", lambda self: send(self.trainer))
    monkeypatch.setattr(Checkpointer, "save", save_under_fire)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        trace = run("--save-on-signal", "USR1", "--save-every", "3", "--fault", "slow", out=tmp_path)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sorted(trace) == [1, 2, 3]
    assert saves == [3]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3"]
    assert (tmp_path / "checkpoints" / "step-3" / ".metadata").is_file()


def test_a_run_ends_by_itself_at_a_step_and_goes_on_from_there(run: Run, tmp_path: Path) -> None:
    reference = run()
    first = run("--exit-at", "3", "--save-every", "2", out=tmp_path)
    assert first == {step: reference[step] for step in (1, 2, 3)}
    saved = tmp_path / "checkpoints" / "step-3"
    # With the same command line and the checkpoint, as a launcher starts the next attempt.
    assert run("--exit-at", "3", "--resume", str(saved), out=tmp_path) == {s: reference[s] for s in (4, 5)}


def test_an_average_of_the_weights_is_kept_and_never_read(run: Run) -> None:
    with_average, without = run(), run("--ema", "0")
    assert all(differing(with_average, without, step) == {"ema"} for step in with_average)
    model = torch.nn.Linear(2, 1)
    average = WeightAverage(model, 0.75)
    before = model.weight.detach().clone()
    model.weight.data += 4.0
    average.update(model)
    torch.testing.assert_close(average.weights["weight"], before + 1.0)


def test_loss_scaling_grows_and_changes_no_other_bit(run: Run) -> None:
    exact, scaled = run(), run("--loss-scaling")
    scales = [bytes.fromhex(scaled[step].pop("metric:loss_scale")) for step in sorted(scaled)]
    assert [struct.unpack("<f", scale)[0] for scale in scales] == [1024.0, 1024.0, 1024.0, 2048.0, 2048.0]
    assert all(differing(exact, scaled, step) == {"scaler"} for step in exact)


def test_expert_biases_change_the_routing_and_nothing_before_they_move(run: Run) -> None:
    plain, biased = run(), run("--expert-bias", "0.05")
    assert differing(plain, biased, 1) == {"buffers", "quantized"}  # there are such buffers, no more
    assert "metric:load_balancing_loss" in differing(plain, biased, 2)


def test_reading_ahead_changes_no_batch(run: Run) -> None:
    plain, ahead = run(), run("--prefetch", "2")
    for step in plain:
        ahead_only = {name for name in ahead[step] if name.startswith(("rng:", "loader:"))}
        assert {n: v for n, v in ahead[step].items() if n not in ahead_only} == {
            n: v for n, v in plain[step].items() if n not in ahead_only
        }
        # Its position counts what was used, and not what was read.
        assert ahead[step]["loader:position"] == plain[step]["loader:position"]
        assert ahead[step]["loader:python"] == plain[step]["rng:python"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pattern", "MXE"], "use M (Mamba-2), * (attention) and E"),
        (["--fault", "nonsense"], "no such fault; there are nudge, "),
        (["--fault", "nudge@stp=7"], "'stp=7' is no option; nudge takes step, module, rank"),
        (["--fault", "nudge@step=x"], "step='x' is no valid number"),
        (["--fault", "nudge@step=0"], "step='0' is no valid number"),
        (["--fault", "nudge@rank=3"], "rank=3, but there are 1 ranks"),
        (["--fault", "nudge@module=head"], "use one of blocks.0.mixer.norm"),
        (["--fault", "nudge", "--pattern", "*"], "the pattern has no block of the kind it changes"),
        (["--fault", "replica-drift@rank=0"], "needs two ranks or more"),
        (["--fault", "reorder-reduction", "--micro-batches", "1"], "a sum of two does not depend on order"),
        (["--resume", "/nowhere"], "no complete checkpoint there"),
        (["--data", "/nowhere"], "No such file"),
        (["--batch-size", "4", "--micro-batches", "3"], "must be a multiple of --micro-batches"),
        (["--sequence-length", "30"], "must be a multiple of 16"),
        (["--low-precision", "fp4"], "invalid choice"),
        (["--expert-bias", "-1"], "must not be negative"),
        (["--ema", "1"], "must lie in [0, 1)"),
        (["--prefetch", "-1"], "must not be negative"),
        (["--exit-at", "0"], "must be at least 1"),
        (["--save-on-signal", "NOPE"], "there is no such signal here"),
        (["--steps", "x"], "invalid int value"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        program.main(["--steps", "2", "--seed", "1", "--out", str(tmp_path), *TINY, *arguments])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_damaged_or_foreign_checkpoint_is_one_line_and_exit_2(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--save-every", "1", steps=1, out=tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-1"
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    next(damaged.glob("*.distcp")).unlink()
    foreign = ["--resume", str(checkpoint), "--width", "64"]
    for arguments in (foreign, ["--resume", str(damaged)]):
        capsys.readouterr()
        assert run(*arguments, out=tmp_path) == {}
        error = capsys.readouterr().err
        assert "does not fit this model or is damaged" in error
        assert error.count("\n") == 1


def test_the_schedule_warms_up_and_falls_to_a_tenth() -> None:
    factors = [learning_rate_factor(done, warmup=5, total=30) for done in range(31)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5] == 1.0
    assert factors[30] == pytest.approx(0.1)
    assert factors[5:] == sorted(factors[5:], reverse=True)
