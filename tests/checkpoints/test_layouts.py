"""Layouts that are known by their files: whole or not, of which step, and fit to go on from. A kill at any moment of a
save must leave the one before it as the newest that counts."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from detrun.checkpoints.audit import audit
from detrun.checkpoints.find import Found, find_checkpoints
from detrun.checkpoints.layouts import RULES, layouts
from detrun.launch.resumption import NoCheckpoint, find_start
from tests.checkpoints.making import cut, entries, save_dcp

Tensors = dict[str, Any]
RANKS = 2


def weights(step: int) -> Tensors:
    return {"layer.weight": torch.full((3, 3), float(step))}


def iteration(directory: Path, step: int) -> Path:
    """As Megatron Core saves: shards, metadata.json, and then the tracker."""
    folder = save_dcp({**weights(step), "optimizer.exp_avg": torch.ones(3)}, directory / f"iter_{step:07}")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (directory / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def legacy_iteration(directory: Path, step: int) -> Path:
    folder = directory / f"iter_{step:07}"
    for rank in range(RANKS):
        (folder / f"mp_rank_{rank:02}").mkdir(parents=True)
        torch.save({"model": weights(step), "iteration": step}, folder / f"mp_rank_{rank:02}" / "model_optim_rng.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def titan(directory: Path, step: int, *, model_only: bool = False) -> Path:
    more = {} if model_only else {"train_state": {"step": step}, "optimizer.state.layer.weight.exp_avg": torch.ones(3)}
    return save_dcp({**weights(step), **more}, directory / f"step-{step}")


def trainer(directory: Path, step: int) -> Path:
    """As transformers saves: the model, its arguments, optimizer, each rank's RNG, the trainer's state."""
    import safetensors.torch

    folder = directory / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    safetensors.torch.save_file(weights(step), folder / "model.safetensors")
    torch.save({"seed": 1}, folder / "training_args.bin")
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}}, folder / "optimizer.pt")
    torch.save({"last_epoch": step}, folder / "scheduler.pt")
    for rank in range(RANKS):
        torch.save({"cpu": torch.get_rng_state()}, folder / f"rng_state_{rank}.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 0.1}))
    return folder


def deepspeed(directory: Path, step: int, tag: str | None = None) -> Path:
    """As DeepSpeed saves: the model by rank 0, its part of the optimizer by each rank, and `latest`."""
    folder = directory / (tag or f"global_step{step}")
    folder.mkdir(parents=True)
    states = {"module": weights(step), "optimizer": None, "global_steps": step, "dp_world_size": RANKS}
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    for rank in range(RANKS):
        state = {"optimizer_state_dict": {"exp_avg": torch.ones(3)}}
        torch.save(state, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (directory / "latest").write_text(folder.name)
    return folder


def lightning(path: Path, step: int, **changed: Any) -> Path:
    state = {
        "pytorch-lightning_version": "2.6.6",
        "global_step": step,
        "state_dict": weights(step),
        "loops": {"fit_loop": {"state_dict": {}}},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(float(step))}}}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({key: value for key, value in {**state, **changed}.items() if value is not None}, path)
    return path


MAKERS: dict[str, Callable[[Path, int], Path]] = {
    "iteration": iteration,
    "legacy": legacy_iteration,
    "titan": titan,
    "trainer": trainer,
    "deepspeed": deepspeed,
    "lightning": lambda directory, step: lightning(directory / f"epoch=0-step={step}.ckpt", step),
}
# The files in the order in which they are written: the state of a directory at each moment of a save.
ORDER: dict[str, list[str]] = {
    "iteration": [
        "iter_0000006/__0_0.distcp", "iter_0000006/.metadata", "iter_0000006/metadata.json",
        "latest_checkpointed_iteration.txt",
    ],
    "legacy": [
        "iter_0000006/mp_rank_00/model_optim_rng.pt", "iter_0000006/mp_rank_01/model_optim_rng.pt",
        "latest_checkpointed_iteration.txt",
    ],
    "titan": ["step-6/__0_0.distcp", "step-6/.metadata"],
    "trainer": [
        "checkpoint-6/config.json", "checkpoint-6/model.safetensors", "checkpoint-6/training_args.bin",
        "checkpoint-6/rng_state_1.pth", "checkpoint-6/optimizer.pt", "checkpoint-6/scheduler.pt",
        "checkpoint-6/rng_state_0.pth", "checkpoint-6/trainer_state.json",
    ],
    "deepspeed": [
        "global_step6/mp_rank_00_model_states.pt", "global_step6/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "global_step6/zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ],
    "lightning": ["epoch=0-step=6.ckpt"],
}  # fmt: skip


def newest(directory: Path) -> Found | None:
    found = [each for each in find_checkpoints(directory, ranks=RANKS) if each.complete and not each.no_resume]
    return found[-1] if found else None


@pytest.mark.parametrize("kind", MAKERS)
def test_whole_ones_count_by_their_steps(kind: str, tmp_path: Path) -> None:
    for step in (3, 6):
        MAKERS[kind](tmp_path, step)
    found = find_checkpoints(tmp_path, ranks=RANKS)
    assert [(each.step, each.complete, each.no_resume) for each in found] == [(3, True, ""), (6, True, "")]
    assert all(each.layout for each in found)
    assert find_start(tmp_path, None, [], given=True, ranks=RANKS).step == 6


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("first", [True, False], ids=["alone", "after another"])
def test_a_kill_at_any_moment_of_a_save_leaves_the_one_before(kind: str, first: bool, tmp_path: Path) -> None:
    """Each file in turn is the last that was written: not there yet, empty, cut short."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for index, last in enumerate(ORDER[kind]):
        for state in ("absent", "empty", "cut"):
            for directory in (whole, killed):
                if directory.exists():
                    import shutil

                    shutil.rmtree(directory)
            if not first:
                MAKERS[kind](killed, 3)
            MAKERS[kind](whole, 6)
            for name in ORDER[kind][:index] + ([] if state == "absent" else [last]):
                target = killed / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((whole / name).read_bytes())
                if name == last and state == "empty":
                    target.write_bytes(b"")
                elif name == last and len((whole / name).read_bytes()) > 2:
                    cut(target)
                elif name == last:
                    target.write_bytes(b"")  # one digit: it is there or it is not
            found = newest(killed) if killed.exists() else None
            # A tracker that was being written again leads nowhere: the program itself could not start from it.
            tracker = last == "latest_checkpointed_iteration.txt" and state != "absent"
            wanted = None if first or tracker else 3
            assert (found.step if found else None) == wanted, (last, state, find_checkpoints(killed, ranks=RANKS))


def test_the_last_step_that_is_the_model_alone_is_never_gone_on_from(tmp_path: Path) -> None:
    titan(tmp_path, 3)
    titan(tmp_path, 6, model_only=True)
    start = find_start(tmp_path, "step-{step}", [], given=True)
    assert start.step == 3
    assert "the model alone" in start.rejected[0].why
    (fault,) = audit(tmp_path)
    assert (fault.kind, fault.path.name, fault.certain) == ("not-for-resuming", "step-6", False)


def test_a_plain_model_that_never_saves_an_optimizer_is_what_the_program_wants(tmp_path: Path) -> None:
    for step in (3, 6):
        save_dcp(weights(step), tmp_path / f"step-{step}")
    assert [each.no_resume for each in find_checkpoints(tmp_path)] == ["", ""]


@pytest.mark.parametrize("state", [{"optimizer_states": None}, {"loops": None}])
def test_weights_alone_are_never_gone_on_from(state: dict[str, None], tmp_path: Path) -> None:
    lightning(tmp_path / "epoch=0-step=3.ckpt", 3, **state)
    with pytest.raises(NoCheckpoint, match="weights alone"):
        find_start(tmp_path, None, [], given=True)


def test_a_step_is_told_by_what_a_file_holds_and_not_by_the_last_number_in_its_name(tmp_path: Path) -> None:
    lightning(tmp_path / "hpc_ckpt_1.ckpt", 12)
    lightning(tmp_path / "epoch=1-step=6-v1.ckpt", 6)
    lightning(tmp_path / "last.ckpt", 9)
    found = [(each.path.name, each.step) for each in find_checkpoints(tmp_path)]
    assert found == [("epoch=1-step=6-v1.ckpt", 6), ("last.ckpt", 9), ("hpc_ckpt_1.ckpt", 12)]


def test_a_file_without_a_number_is_one_if_its_loop_counts_in_it(tmp_path: Path) -> None:
    torch.save({"model": weights(1), "step": 7}, tmp_path / "c.ckpt")
    torch.save({"model": weights(1)}, tmp_path / "export.pt")
    assert [(each.path.name, each.step) for each in find_checkpoints(tmp_path)] == [("c.ckpt", 7)]


def test_a_tag_of_any_name_is_found_by_the_pointer_and_tells_its_step(tmp_path: Path) -> None:
    deepspeed(tmp_path, 3, "early")
    deepspeed(tmp_path, 6, "late")
    assert [(each.path.name, each.step, each.why) for each in find_checkpoints(tmp_path)] == [
        ("early", 3, ""),
        ("late", 6, ""),
    ]
    (tmp_path / "latest").write_text("early")
    assert find_checkpoints(tmp_path)[1].why == "latest says early: this save had not ended"


def test_a_rank_of_the_job_that_wrote_nothing_yet_is_missed(tmp_path: Path) -> None:
    folder = trainer(tmp_path, 3)
    (folder / "rng_state_1.pth").unlink()
    assert find_checkpoints(tmp_path, ranks=2)[0].why == "rng_state_1.pth is missing, and the job has 2 ranks"


def test_a_mark_that_is_there_while_a_save_goes_on_says_so(tmp_path: Path) -> None:
    mark = trainer(tmp_path, 3) / "checkpoint-is-incomplete.txt"
    mark.write_text("in progress")
    assert find_checkpoints(tmp_path)[0].why == "checkpoint-is-incomplete.txt says that its save did not end"
    mark.unlink()
    assert find_checkpoints(tmp_path)[0].complete


def test_an_iteration_without_the_tracker_is_none_that_the_program_would_find(tmp_path: Path) -> None:
    iteration(tmp_path, 3)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert "latest_checkpointed_iteration.txt" in find_checkpoints(tmp_path)[0].why
    torch.save({"step": torch.tensor(3, dtype=torch.int32)}, tmp_path / "latest_train_state.pt")
    assert find_checkpoints(tmp_path)[0].why == ""


def test_a_pickled_state_of_a_loader_is_read_value_by_value(tmp_path: Path) -> None:
    state = {"samples_yielded": 3, "generator": torch.arange(20, dtype=torch.uint8), "nested": pickle.dumps({"at": 5})}
    save_dcp({"dataloader": {"dp_rank_0": pickle.dumps(state)}, "w": torch.ones(1)}, tmp_path / "step-3")
    found = entries(tmp_path / "step-3")
    assert found["dataloader.dp_rank_0.samples_yielded"].value == "3"
    assert found["dataloader.dp_rank_0.generator"].read() == bytes(range(20))
    assert found["dataloader.dp_rank_0.nested.at"].value == "5"


def test_documents_are_values_and_vocabularies_are_bytes(tmp_path: Path) -> None:
    folder = trainer(tmp_path, 3)
    (folder / "vocab.json").write_text(json.dumps({f"t{number}": number for number in range(30_000)}))
    found = entries(folder)
    assert found["trainer_state.global_step"].value == "3"
    assert found["vocab.json"].dtype == "bytes"


def test_the_rules_can_be_read_and_each_says_when_it_is_whole() -> None:
    assert RULES.is_file()
    assert len({rule.name for rule in layouts()}) == len(layouts()) > 8
    assert all(rule.whole or rule.file or rule.resume_files for rule in layouts())
