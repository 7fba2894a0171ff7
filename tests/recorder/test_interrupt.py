"""A planned interruption happens in the process, at its step and moment, on its ranks, and is written down before."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from detrun import recorder
from detrun.recorder.save_watch import SaveWatch
from tests.recorder.harness import _child

Program = Callable[[Path], None]


class Ended:
    """What a program that was to be interrupted left behind."""

    def __init__(self, attempt: Path, code: int | None) -> None:
        self.attempt = attempt
        self.code = code

    @property
    def steps(self) -> list[int]:
        lines = (self.attempt / "metrics" / "rank00000.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    @property
    def told(self) -> dict[str, Any] | None:
        path = self.attempt / "interrupt" / "rank00000.json"
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def position(self) -> tuple[int, int]:
        assert self.told is not None
        return self.told["step"], self.told["microbatch"]

    def went_on(self, name: str) -> bool:
        return (self.attempt / name).exists()


def interrupt(program: Program, attempt: Path, *, rank: int = 0, world: int = 1, **asked: Any) -> Ended:
    """Runs `program` in a child with this interruption planned."""
    attempt.mkdir(parents=True, exist_ok=True)
    asked = {"kind": "kill", "at_step": 2, "ranks": "all", "seed": 7, **asked}
    env = {"DETRUN_INTERRUPT": json.dumps(asked), "RANK": str(rank), "WORLD_SIZE": str(world)}
    child = multiprocessing.get_context("fork").Process(
        target=_child, args=(lambda: program(attempt), attempt, True, env)
    )
    child.start()
    child.join(60)
    assert not child.is_alive()
    return Ended(attempt, child.exitcode)


class Training:
    """One linear layer; `step` is an optimizer step of some micro-batches."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def microbatch(self) -> None:
        self.model(torch.ones(2, 4)).square().mean().backward()

    def step(self, microbatches: int = 1) -> None:
        self.optimizer.zero_grad()
        for _ in range(microbatches):
            self.microbatch()
        self.optimizer.step()


def four_steps(attempt: Path) -> None:
    training = Training()
    for step in range(1, 5):
        training.step()
        (attempt / f"after-{step}").touch()


def saving(attempt: Path) -> None:
    training = Training()
    for step in range(1, 5):
        training.step()
        torch.save({"step": step}, attempt / f"saved-{step}.pt")


def accumulating(attempt: Path) -> None:
    training = Training()
    for step in range(1, 5):
        training.step(microbatches=2)
        (attempt / f"after-{step}").touch()


def test_a_kill_comes_right_after_its_step_with_everything_recorded(tmp_path: Path) -> None:
    ended = interrupt(four_steps, tmp_path)
    assert ended.code == -signal.SIGKILL
    assert ended.steps == [1, 2]
    assert ended.went_on("after-1") and not ended.went_on("after-2")
    assert ended.told is not None and (ended.told["kind"], ended.told["moment"]) == ("kill", "end")
    assert ended.position == (2, 0)


def test_without_a_plan_nothing_happens(tmp_path: Path) -> None:
    ended = interrupt(four_steps, tmp_path, at_step=99)
    assert (ended.code, ended.steps, ended.told) == (0, [1, 2, 3, 4], None)


def test_a_rank_that_is_not_meant_runs_on(tmp_path: Path) -> None:
    ended = interrupt(four_steps, tmp_path, world=2, ranks=[1])
    assert (ended.code, ended.told) == (0, None)


def test_a_killed_rank_waits_for_those_that_are_to_go_with_it(tmp_path: Path) -> None:
    """The first to die would break the others' last collective."""
    (tmp_path / "interrupt").mkdir()
    threading.Timer(1.0, (tmp_path / "interrupt" / "rank00001.json").touch).start()
    began = time.monotonic()
    ended = interrupt(four_steps, tmp_path, world=2)
    assert ended.code == -signal.SIGKILL
    assert time.monotonic() - began >= 0.9


def test_the_last_step_can_be_interrupted(tmp_path: Path) -> None:
    ended = interrupt(four_steps, tmp_path, at_step=4)
    assert ended.position == (4, 0)
    assert not ended.went_on("after-4")


def test_before_a_save_and_after_it(tmp_path: Path) -> None:
    before = interrupt(saving, tmp_path / "before", moment="before-save")
    assert before.position == (2, 0)
    assert before.went_on("saved-1.pt") and not before.went_on("saved-2.pt")
    after = interrupt(saving, tmp_path / "after", moment="after-save")
    assert after.position == (2, 0)
    assert after.went_on("saved-2.pt") and not after.went_on("saved-3.pt")


def test_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    ended = interrupt(accumulating, tmp_path, moment="accumulation")
    assert ended.position == (2, 1)
    assert ended.went_on("after-2") and not ended.went_on("after-3")


def test_steps_counted_in_micro_batches(tmp_path: Path) -> None:
    """Three backward passes of two a step: the middle of the second step; four: its end."""
    assert interrupt(accumulating, tmp_path / "middle", at_microbatch=3).position == (1, 1)
    whole = interrupt(accumulating, tmp_path / "whole", at_microbatch=4)
    assert whole.position == (2, 0) and not whole.went_on("after-2")


def test_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    def epochs(attempt: Path) -> None:
        training = Training()
        loader = torch.utils.data.DataLoader(range(3))
        for _epoch in range(3):
            for _ in loader:
                training.step()

    ended = interrupt(epochs, tmp_path, at_step=4, moment="epoch")
    assert ended.position == (6, 0)


def test_a_stop_is_the_programs_own_exit_once_its_save_is_done(tmp_path: Path) -> None:
    def saves_and_cleans_up(attempt: Path) -> None:
        try:
            saving(attempt)
        finally:
            (attempt / "cleaned-up").touch()

    ended = interrupt(saves_and_cleans_up, tmp_path, kind="stop")
    assert ended.code == 0
    assert ended.position == (2, 0)
    assert ended.went_on("saved-2.pt") and not ended.went_on("saved-3.pt")
    assert ended.went_on("cleaned-up")


@pytest.mark.parametrize(("stops_after", "told"), [(2, {"left_by_itself": True}), (1, None)])
def test_a_program_with_a_stop_of_its_own_was_stopped_if_it_was_at_that_step(
    stops_after: int, told: dict[str, bool] | None, tmp_path: Path
) -> None:
    def stops_by_itself(_attempt: Path) -> None:
        training = Training()
        for _ in range(stops_after):
            training.step()
        interruption = recorder._session.interruption
        assert interruption is not None
        interruption.process_ends()  # a forked child does not come to the end of the interpreter

    ended = interrupt(stops_by_itself, tmp_path, kind="stop")
    assert (ended.told["detail"] if ended.told else None) == told
    if told:
        assert ended.position == (2, 0)


def test_a_signal_reaches_the_programs_handler_at_its_step(tmp_path: Path) -> None:
    def leaves_when_asked(attempt: Path) -> None:
        asked: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _frame: asked.append(number))
        training = Training()
        for step in range(1, 5):
            training.step()
            if asked:
                (attempt / f"left-after-{step}").touch()
                return

    ended = interrupt(leaves_when_asked, tmp_path, kind="signal", signal="USR1")
    assert ended.code == 0 and ended.went_on("left-after-2")
    assert ended.told is not None and ended.told["detail"] == {"signal": "SIGUSR1"}


def test_what_a_handler_raises_is_the_programs_to_catch(tmp_path: Path) -> None:
    def raises(attempt: Path) -> None:
        def refuse(_number: int, _frame: object) -> None:
            raise ValueError("time to go")

        signal.signal(signal.SIGTERM, refuse)
        try:
            four_steps(attempt)
        except ValueError:
            (attempt / "caught").touch()

    ended = interrupt(raises, tmp_path, kind="signal")
    assert ended.went_on("caught") and not ended.went_on("after-2")


def test_a_signal_that_nobody_handles_ends_the_program_with_its_records_written(tmp_path: Path) -> None:
    ended = interrupt(four_steps, tmp_path, kind="signal")
    assert ended.code == -signal.SIGTERM
    assert ended.steps == [1, 2]


def test_a_held_rank_goes_on_once_its_signal_came_and_the_program_was_told(tmp_path: Path) -> None:
    def leaves_when_asked(attempt: Path) -> None:
        asked: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        training = Training()
        for step in range(1, 5):
            training.step()
            if asked:
                (attempt / f"left-after-{step}").touch()
                break
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None)
        os.kill(os.getpid(), signal.SIGTERM)  # the program's own handler is back
        assert len(asked) == 2

    ended = interrupt(leaves_when_asked, tmp_path, kind="hold")
    assert ended.code == 0 and ended.went_on("left-after-2")
    assert ended.told is not None and ended.told["kind"] == "hold"


def test_a_held_rank_without_a_handler_ends_as_the_signal_has_it(tmp_path: Path) -> None:
    def signalled(attempt: Path) -> None:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        four_steps(attempt)

    assert interrupt(signalled, tmp_path, kind="hold").code == -signal.SIGTERM


def test_nobody_is_held_for_ever(tmp_path: Path) -> None:
    ended = interrupt(four_steps, tmp_path, kind="hold", hold=0.3)
    assert (ended.code, ended.steps) == (0, [1, 2, 3, 4])


def test_a_helper_that_trains_too_is_left_alone(tmp_path: Path) -> None:
    def with_helper(attempt: Path) -> None:
        training = Training()
        training.step()
        helper = os.fork()
        if not helper:
            for _ in range(4):
                training.step()
            (attempt / "helper-done").touch()
            os._exit(0)
        os.waitpid(helper, 0)
        training.step()
        (attempt / "rank-done").touch()

    ended = interrupt(with_helper, tmp_path)
    assert ended.went_on("helper-done") and not ended.went_on("rank-done")


def slow_save(folder: Path, seconds: float) -> None:
    """A writer of its own, which no hook knows: ten pieces under a temporary name, then a rename."""
    partial = folder.with_name(f".{folder.name}.tmp")
    partial.mkdir(parents=True)
    for piece in range(10):
        (partial / f"{piece}.bin").write_bytes(b"x" * 1000)
        time.sleep(seconds / 10)
    partial.rename(folder)


def test_a_save_is_cut_short_by_what_appears_in_the_directory(tmp_path: Path) -> None:
    def program(attempt: Path) -> None:
        training = Training()
        for step in range(1, 5):
            training.step()
            slow_save(attempt / "checkpoints" / f"step-{step}", 0.4)

    ended = interrupt(program, tmp_path, kind="kill-during-save", directory=str(tmp_path / "checkpoints"))
    assert ended.code == -signal.SIGKILL
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == [".step-2.tmp", "step-1"]
    assert ended.told is not None
    detail = ended.told["detail"]
    assert detail["entries"] == [".step-2.tmp"]
    assert 0 < detail["files"] <= 10 and detail["bytes"] == 1000 * detail["files"]
    # By the clock, or by what is there already, whichever came first.
    assert detail["delay_seconds"] <= detail["after_seconds"] or detail["bytes"] >= 1000


def test_a_save_that_is_much_faster_than_the_first_is_hit_by_what_it_has_written(tmp_path: Path) -> None:
    def program(attempt: Path) -> None:
        training = Training()
        for step in (1, 2):
            training.step()
            slow_save(attempt / "checkpoints" / f"step-{step}", {1: 4.0, 2: 0.3}[step])

    ended = interrupt(program, tmp_path, kind="kill-during-save", directory=str(tmp_path / "checkpoints"))
    assert ended.code == -signal.SIGKILL and ended.told is not None
    assert ended.told["detail"]["delay_seconds"] > 0.3
    assert not (tmp_path / "checkpoints" / "step-2").exists()


def test_a_save_that_was_faster_has_the_next_one_tried(tmp_path: Path) -> None:
    def program(attempt: Path) -> None:
        training = Training()
        for step in range(1, 6):
            training.step()
            slow_save(attempt / "checkpoints" / f"step-{step}", {1: 0.5, 2: 0.0, 3: 0.5}.get(step, 0.5))

    ended = interrupt(program, tmp_path, kind="kill-during-save", directory=str(tmp_path / "checkpoints"))
    assert ended.told is not None
    attempts = ended.told["detail"]["attempts"]
    # On a busy machine a look may fall into the fast one.
    assert (attempts, ended.position) in ((2, (3, 0)), (1, (2, 0)))
    warnings = json.loads((tmp_path / "recorder" / "rank00000.json").read_text())["warnings"]
    assert any("a save was over after" in text for text in warnings) == (attempts == 2)


def test_a_save_call_is_cut_short_inside_it(tmp_path: Path) -> None:
    def program(attempt: Path) -> None:
        training = Training()
        for step in range(1, 6):
            training.step()
            torch.save({"big": torch.zeros(8_000_000)}, attempt / "checkpoints" / f"step-{step}.pt")

    (tmp_path / "checkpoints").mkdir()
    ended = interrupt(program, tmp_path, kind="kill-during-save", directory=str(tmp_path / "checkpoints"))
    assert ended.code == -signal.SIGKILL
    step = ended.position[0]
    saves = [json.loads(line) for line in (tmp_path / "saves" / "rank00000.jsonl").read_text().splitlines()]
    assert (saves[-1]["event"], saves[-1]["step"]) == ("begin", step)


def test_the_seed_decides_the_delay_and_each_miss_halves_it() -> None:
    def watch(seed: int) -> SaveWatch:
        nowhere = Path("/nonexistent")
        return SaveWatch(
            directory=None, interrupted=nowhere, seed=seed, leads=True, kill=lambda _detail: None, warn=print
        )

    first, again, other = watch(1), watch(1), watch(2)
    assert first.delay() == again.delay() != other.delay()
    first.durations = [2.0, 4.0]
    assert 0.3 <= first.delay() <= 2.7
    before = first.delay()
    first.attempts = 1
    assert first.delay() == pytest.approx(before / 2)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "kill", "at_step": "soon"}'])
def test_a_plan_that_cannot_be_read_interrupts_nothing(tmp_path: Path, text: str) -> None:
    child = multiprocessing.get_context("fork").Process(
        target=_child, args=(lambda: four_steps(tmp_path), tmp_path, True, {"DETRUN_INTERRUPT": text})
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert Ended(tmp_path, 0).steps == [1, 2, 3, 4]
