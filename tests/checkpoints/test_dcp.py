"""Folders of torch.distributed.checkpoint: shards put together, objects, damage, names that lead elsewhere."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from detrun.checkpoints.dcp import Assembled, ShardData
from detrun.checkpoints.read import open_checkpoint
from detrun.errors import RecordError
from detrun.fingerprint.host import digest_tensors
from tests.checkpoints.making import cut, entries, save_dcp, training_state

TWO_RANKS = """
import sys, torch
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
rows = torch.arange(35, dtype=torch.float32).reshape(7, 5)
state = {
    "rows": distribute_tensor(rows, mesh, [Shard(0)]),
    "columns": distribute_tensor(rows, mesh, [Shard(1)]),
    "copies": distribute_tensor(rows, mesh, [Replicate()]),
    "groups": [{"lr": 0.5}],
    f"rank{dist.get_rank()}.rng": torch.Generator().manual_seed(dist.get_rank()).get_state(),
}
dcp.save(state, checkpoint_id=sys.argv[1])
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp")
    (folder / "save.py").write_text(TWO_RANKS)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*run, str(folder / "save.py"), str(folder / "saved")], check=True, capture_output=True, timeout=120)
    return folder / "saved"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows", "columns", "copies"])
def test_a_tensor_is_put_together_from_the_shards_of_ranks(name: str, two_ranks: Path) -> None:
    rows = torch.arange(35, dtype=torch.float32).reshape(7, 5)
    with open_checkpoint(two_ranks) as checkpoint:
        found = {entry.name: entry for entry in checkpoint.entries()}
    assert found[name].digest() == digest_tensors([rows])
    assert [chunk.offsets for chunk in found[name].chunks] == {
        "rows": [(0, 0), (4, 0)],
        "columns": [(0, 0), (0, 3)],
        "copies": [(0, 0)],
    }[name]
    assert found["groups.0.lr"].value == (0.5).hex()
    assert found["rank0.rng"].digest() != found["rank1.rng"].digest()


def test_names_values_and_digests(tmp_path: Path) -> None:
    state = {**training_state(), "strided": torch.arange(12.0).reshape(3, 4).t(), "odd": {"list": [1, 2.5, None]}}
    found = entries(save_dcp(state, tmp_path / "dcp"))
    assert found["model.weight"].digest() == digest_tensors([state["model"]["weight"]])
    assert found["strided"].digest() == digest_tensors([state["strided"]])
    assert found["optimizer.param_groups.0.lr"].value == (1e-3).hex()
    assert [found[f"odd.list.{index}"].value for index in range(3)] == ["1", (2.5).hex(), "None"]


def shard(folder: Path, tensor: torch.Tensor, offsets: tuple[int, ...]) -> ShardData:
    """A part of a tensor in a file of its own."""
    from detrun.checkpoints.sources import Files

    path = folder / f"{'_'.join(map(str, offsets))}.pt"
    torch.save(tensor, path)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ShardData(dtype, offsets, tuple(tensor.shape), Files().whole(path), False)


@pytest.mark.parametrize("block", [1, 64, 1 << 20])
def test_any_grid_of_shards_gives_the_tensor(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detrun.checkpoints.dcp.BLOCK", block)
    whole = torch.randn(5, 6, 3)
    cuts = [
        (slice(0, 2), slice(0, 6)),
        (slice(2, 5), slice(0, 1)),
        (slice(2, 4), slice(1, 6)),
        (slice(4, 5), slice(1, 6)),
    ]
    chunks = [shard(tmp_path, whole[a, b].clone(), (a.start, b.start, 0)) for a, b in cuts]
    chunks[1] = shard(tmp_path, whole[2:5, :1].permute(2, 1, 0).contiguous().permute(2, 1, 0), (2, 0, 0))  # strided
    put_together = Assembled("w", "float32", (5, 6, 3), tuple(chunks))
    assert b"".join(put_together.blocks()) == bytes(whole.numpy().tobytes())


def test_shards_that_overlap_and_leave_a_gap_are_refused(tmp_path: Path) -> None:
    parts = [shard(tmp_path, torch.ones(2, 2), (0, 0)), shard(tmp_path, torch.ones(2, 2), (1, 0))]
    with pytest.raises(RecordError, match="overlap or leave gaps"):
        list(Assembled("w", "float32", (4, 2), tuple(parts)).blocks())


def test_a_description_larger_than_its_shards_allocates_nothing(tmp_path: Path) -> None:
    parts = (shard(tmp_path, torch.ones(1, 2), (0, 0)),)
    with pytest.raises(RecordError, match="overlap or leave gaps"):
        list(Assembled("w", "float32", (1, 1 << 50), parts).blocks())


def test_a_missing_shard_file_is_the_problem_of_what_lies_in_it(tmp_path: Path) -> None:
    folder = save_dcp({"w": torch.ones(3), "n": 1}, tmp_path / "dcp")
    (folder / "__0_0.distcp").unlink()
    found = entries(folder)
    assert "__0_0.distcp: is missing" in (found["w"].problem or "")
    assert "__0_0.distcp: is missing" in (found["n"].problem or "")


def test_a_shard_file_that_was_cut_short_spoils_what_lies_behind(tmp_path: Path) -> None:
    folder = save_dcp({"a": torch.randn(9000), "b": torch.randn(9000)}, tmp_path / "dcp")
    cut(folder / "__0_0.distcp", 0.7)
    problems = [entry.problem or "" for entry in entries(folder).values()]
    assert sorted("ends too early" in problem for problem in problems) == [False, True]


def test_without_metadata_the_save_did_not_end(tmp_path: Path) -> None:
    folder = save_dcp({"w": torch.ones(3)}, tmp_path / "dcp")
    (folder / ".metadata").unlink()
    assert ["no .metadata" in (entry.problem or "") for entry in entries(folder).values()] == [True]


def test_a_shard_outside_the_folder_is_not_opened(tmp_path: Path) -> None:
    folder = save_dcp({"w": torch.ones(3)}, tmp_path / "dcp")
    torch.save(torch.ones(3), tmp_path / "secret.pt")
    metadata: Any = pickle.loads((folder / ".metadata").read_bytes())
    for name in ("../secret.pt", str(tmp_path / "secret.pt")):
        for info in metadata.storage_data.values():
            info.relative_path = name
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        assert "outside the checkpoint" in (entries(folder)["w"].problem or "")


def test_metadata_that_disagrees_with_a_shard_is_told(tmp_path: Path) -> None:
    folder = save_dcp({"w": torch.ones(4)}, tmp_path / "dcp")
    metadata: Any = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RecordError, match="another tensor"):
        entries(folder)["w"].digest()


def test_the_layout_with_a_tracker_file_is_read_as_one(tmp_path: Path) -> None:
    folder = save_dcp({"w": torch.ones(3)}, tmp_path / "iter_0000010")
    torch.save({"iteration": 10}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "iterations"
        assert [entry.name for entry in checkpoint.entries()] == ["w", "common.iteration", "metadata.sharded_backend"]
