"""Faults that checkpoints show by themselves, and what an index answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from detrun.checkpoints.audit import Fault, audit
from detrun.checkpoints.index import index
from detrun.checkpoints.random_states import rank_of
from detrun.fingerprint.host import digest_tensors
from tests.checkpoints.making import save_dcp, training_state


def streams(seed: int) -> dict[str, Any]:
    return {
        "cpu": torch.Generator().manual_seed(seed).get_state(),
        "python": random.Random(seed).getstate(),
        "numpy": np.random.RandomState(seed).get_state(),
    }


def save(path: Path, seeds: list[int], weights: int, step: int, **more: Any) -> Path:
    """A checkpoint of a file a rank: one set of weights, a seed of streams for each rank."""
    path.mkdir(parents=True)
    for rank, seed in enumerate(seeds):
        state = {**training_state(weights), "step": step, "rng": streams(seed), **more}
        torch.save(state, path / f"rank{rank}.pt")
    return path


def kinds(faults: list[Fault]) -> list[tuple[str, str, bool]]:
    return [(fault.kind, fault.path.name, fault.certain) for fault in faults]


def test_good_checkpoints_have_no_faults(tmp_path: Path) -> None:
    save(tmp_path / "step-10", [1, 2], 0, 10)
    save(tmp_path / "step-20", [3, 4], 1, 20)
    (tmp_path / "latest").write_text("step-20\n")
    assert audit(tmp_path) == []


def test_a_partial_one_is_told(tmp_path: Path) -> None:
    save(tmp_path / "step-10", [1, 2], 0, 10)
    save(tmp_path / ".saving-20", [1, 2], 1, 20)
    assert kinds(audit(tmp_path)) == [("partial", ".saving-20", True)]


def test_weights_of_an_earlier_checkpoint_are_stale_whatever_the_counters_say(tmp_path: Path) -> None:
    save(tmp_path / "step-10", [1, 2], 0, 10)
    save(tmp_path / "step-20", [3, 4], 1, 20)
    save(tmp_path / "step-30", [5, 6], 0, 30)
    (fault,) = audit(tmp_path)
    assert (fault.kind, fault.path.name) == ("stale", "step-30")
    assert "step-10" in fault.what
    assert fault.evidence == {"earlier": str(tmp_path / "step-10")}


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("latest", "step-20", None),
        ("latest", "step-30", "points to step-30, which is not on disk; the newest complete one is of step 20"),
        ("latest", "/elsewhere/step-20", None),
        ("latest.json", '{"path": "step-30", "time": 5}', "not on disk"),
        ("latest.json", '{"step": 20}', None),
        ("latest_checkpointed_iteration.txt", "40", "points to 40, which is not on disk"),
        ("latest", "step-25", "points to step-25, which is partial"),
    ],
)
def test_a_pointer_is_held_against_the_disk(name: str, content: str, kind: str | None, tmp_path: Path) -> None:
    save(tmp_path / "step-10", [1], 0, 10)
    save(tmp_path / "step-20", [1], 1, 20)
    (tmp_path / "step-25").mkdir()
    (tmp_path / "step-25" / "rank0.pt").write_bytes(b"")
    (tmp_path / name).write_text(content)
    found = [fault.what for fault in audit(tmp_path) if fault.kind == "pointer"]
    assert found == [] if kind is None else kind in found[0]


def test_a_link_to_nowhere_is_a_pointer_past_the_disk(tmp_path: Path) -> None:
    save(tmp_path / "step-10", [1], 0, 10)
    (tmp_path / "latest").symlink_to("step-20")
    assert kinds(audit(tmp_path)) == [("pointer", "latest", True)]


def test_ranks_that_share_a_stream_while_others_do_not(tmp_path: Path) -> None:
    save(tmp_path / "step-10", [1, 2, 1], 0, 10)
    faults = audit(tmp_path)
    assert {fault.evidence["generator"] for fault in faults} == {"mt19937-torch", "mt19937"}
    assert all(fault.certain and fault.evidence["ranks"] == [["0", "2"]] for fault in faults)
    assert len(faults) == 3


def test_streams_that_an_earlier_checkpoint_had_apart(tmp_path: Path) -> None:
    save(tmp_path / "step-10", [1, 2], 0, 10)
    save(tmp_path / "step-20", [5, 5], 1, 20)
    faults = audit(tmp_path)
    assert len(faults) == 3
    assert all(fault.certain and "earlier checkpoint has them apart" in fault.what for fault in faults)


def test_one_seed_for_all_ranks_is_no_fault_by_itself(tmp_path: Path) -> None:
    save(tmp_path / "step-10", [1, 1], 0, 10)
    assert audit(tmp_path) == []


def test_one_stream_alike_where_the_rest_differs_may_be_meant(tmp_path: Path) -> None:
    folder = tmp_path / "step-10"
    folder.mkdir()
    for rank in (0, 1):
        torch.save({**streams(rank), "numpy": streams(7)["numpy"]}, folder / f"rank{rank}.pt")
    assert kinds(audit(tmp_path)) == [("shared-streams", "step-10", False)]


def test_ranks_in_the_names_of_entries(tmp_path: Path) -> None:
    state = {f"rank{rank:05d}.rng.torch": streams(seed)["cpu"] for rank, seed in enumerate([1, 2, 1])}
    save_dcp(state, tmp_path / "step-10")
    (fault,) = audit(tmp_path)
    assert fault.evidence["ranks"] == [["0", "2"]]


@pytest.mark.parametrize(
    ("name", "template", "rank"),
    [
        ("rank00003.rng.torch", "rank#.rng.torch", "3"),
        ("zero_pp_rank_1_mp_rank_02_optim.rng", "zero_pp_rank_#_mp_rank_#_optim.rng", "1.2"),
        ("rng_state_4.cpu", "rng_state_#.cpu", "4"),
        ("random_states_5.torch_manual_seed", "random_states_#.torch_manual_seed", "5"),
        ("rng_state/shard_0.1_2.4.0.cpu", "rng_state/shard_#.0.cpu", "0.1"),
        ("model.weight", "model.weight", None),
    ],
)
def test_the_rank_in_a_name(name: str, template: str, rank: str | None) -> None:
    assert rank_of(name) == (template, rank)


def test_an_index_finds_what_was_live(tmp_path: Path) -> None:
    folder = save(tmp_path / "step-10", [1, 2], 0, 10)
    live = training_state(0)
    found = index(folder)
    assert found.find(digest_tensors([live["model"]["weight"]])) == ["rank0.model.weight", "rank1.model.weight"]
    assert found.find(digest_tensors([torch.full((3, 4), 9.0)])) == []
    assert found.has_name("model.weight") == ["rank0.model.weight", "rank1.model.weight"]
    assert found.has_name("odel.weight") == []
    assert found.values["rank1.step"] == "10"
    assert found.problems == {}


def test_an_index_finds_random_states_as_a_record_keeps_them(tmp_path: Path) -> None:
    found = index(save(tmp_path / "step-10", [1, 2], 0, 10))
    python = np.array(random.Random(2).getstate()[1], dtype="<u4").tobytes()
    numpy = np.random.RandomState(2).get_state()
    words = numpy[1].astype("<u4").tobytes() + int(numpy[2]).to_bytes(4, "little")
    assert found.find_random(python) == ["rank1.rng.python.1"]
    assert found.find_random(words) == ["rank1.rng.numpy.1"]
    assert found.find_random(words + b"\0" * 8) == ["rank1.rng.numpy.1"]
    assert found.find_random(bytes(streams(1)["cpu"].tolist())) == ["rank0.rng.cpu"]
    assert found.find_random(bytes(streams(3)["cpu"].tolist())) == []


def test_encoded_states_are_known_by_their_words(tmp_path: Path) -> None:
    version, words, _ = random.Random(5).getstate()
    torch.save({"rng": torch.tensor([version, *words, 0, 0]), "order": torch.arange(628)}, tmp_path / "a.pt")
    found = index(tmp_path / "a.pt")
    assert found.find_random(np.array(words, dtype="<u4").tobytes()) == ["rng"]
    assert len(found.random_states) == 1


def test_numpy_generators_are_known(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    state = generator.bit_generator.state["state"]
    torch.save({"a": generator, "b": generator.bit_generator.state}, tmp_path / "a.pt")
    raw = state["state"].to_bytes(16, "little") + state["inc"].to_bytes(16, "little")
    assert len(index(tmp_path / "a.pt").find_random(raw)) == 2


def save_grid(path: Path, seeds: dict[str, int]) -> list[Fault]:
    """A checkpoint whose ranks stand in a grid of 2 pipeline stages × 2 tensor-parallel ranks, as one layout has it."""
    state = {
        f"rng_state/shard_{place}_2.2": {
            "torch_rng_state": streams(seed)["cpu"],
            "rng_tracker_states": {"model-parallel-rng": streams(100 + number)["cpu"]},
        }
        for number, (place, seed) in enumerate(seeds.items())
    }
    folder = save_dcp(state, path / "iter_0000003")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (path / "latest_checkpointed_iteration.txt").write_text("3")
    return audit(path)


def test_streams_that_a_layout_has_alike_along_one_coordinate_are_no_fault(tmp_path: Path) -> None:
    assert save_grid(tmp_path, {"0.0": 1, "0.1": 1, "1.0": 2, "1.1": 2}) == []


def test_streams_alike_along_the_other_coordinate_are_one(tmp_path: Path) -> None:
    (fault,) = save_grid(tmp_path, {"0.0": 1, "0.1": 1, "1.0": 1, "1.1": 1})
    assert (fault.kind, fault.certain) == ("shared-streams", False)
    assert fault.evidence["ranks"] == [["0", "1"]]


def test_streams_that_should_be_alike_and_are_not_are_all_looked_at(tmp_path: Path) -> None:
    (fault,) = save_grid(tmp_path, {"0.0": 1, "0.1": 2, "1.0": 1, "1.1": 3})
    assert fault.certain
    assert fault.evidence["ranks"] == [["0.0", "1.0"]]
