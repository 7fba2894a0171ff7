"""Two checkpoints against each other: what differs is said as what it is, and equal states are equal."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from detrun.checkpoints.diff import Difference, diff
from detrun.errors import UsageError
from tests.checkpoints.making import cut, save_dcp, training_state


def compared(tmp_path: Path, a: Any, b: Any) -> dict[str, Difference]:
    torch.save(a, tmp_path / "a.pt")
    torch.save(b, tmp_path / "b.pt")
    return {each.name: each for each in diff(tmp_path / "a.pt", tmp_path / "b.pt")}


def test_two_saves_of_one_state_are_equal_under_any_name_and_form(tmp_path: Path) -> None:
    state = training_state()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "a.pt", tmp_path / "other.ckpt", tmp_path / "folder" / "model.pt"):
        torch.save(state, path)
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_dcp(state, tmp_path / "dcp1")
    save_dcp(state, tmp_path / "dcp2")
    for other in ("other.ckpt", "folder", "old.pt"):
        assert list(diff(tmp_path / "a.pt", tmp_path / other)) == []
    assert list(diff(tmp_path / "dcp1", tmp_path / "dcp2")) == []
    assert list(diff(tmp_path / "a.pt", tmp_path / "dcp1")) == []


def test_memory_layout_is_no_difference(tmp_path: Path) -> None:
    tensor = torch.randn(300, 500)
    assert compared(tmp_path, {"x": tensor.t()}, {"x": tensor.t().contiguous()}) == {}


def test_the_place_of_a_difference_is_told_in_the_order_of_the_tensor(tmp_path: Path) -> None:
    base = torch.randn(5, 6, 7)
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        a = base.permute(*order)
        b = base.clone().permute(*order)
        b[1, 2, 3] += 1
        b[4 if a.shape[0] > 4 else 2, 0, 0] += 1
        for other in (b, b.contiguous()):
            each = compared(tmp_path, {"x": a}, {"x": other})["x"]
            assert each.differing_elements == 2
            places = (a != b).flatten().nonzero().flatten().tolist()
            assert each.first in places and (other is b or each.first == places[0])


def test_tensors_saved_transposed_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(*_: Any) -> Any:
        raise AssertionError("all of a tensor is in memory")

    a, b = torch.randn(40, 50).t(), torch.randn(40, 50).t()
    monkeypatch.setattr("detrun.checkpoints.tensors.StoredTensor._view", held)
    assert compared(tmp_path, {"x": a}, {"x": b})["x"].differing_elements == 2000


def test_elements_and_distance(tmp_path: Path) -> None:
    a = training_state()
    b = copy.deepcopy(a)
    weight = b["model"]["weight"]
    weight[1, 2] = torch.nextafter(weight[1, 2], torch.tensor(9.0))
    weight[2, 3] = float("nan")
    found = compared(tmp_path, a, b)
    assert list(found) == ["model.weight"]
    each = found["model.weight"]
    assert (each.what, each.dtype, each.elements, each.differing_elements) == ("bytes", "float32", 12, 2)
    assert (each.max_ulp, each.first, each.nan) == (1, 6, 1)


@pytest.mark.parametrize(
    ("a", "b", "what"),
    [
        (torch.ones(2), torch.ones(2).double(), "dtype"),
        (torch.ones(2), torch.ones(2, 1), "shape"),
        (torch.ones(2), 1, "dtype"),
        (0.1, 0.2, "value"),
        (1, 1.0, "dtype"),
        (True, 1, "dtype"),
        ("a", "b", "value"),
        (None, 0, "dtype"),
        (0.0, -0.0, "value"),
        (torch.zeros(1), -torch.zeros(1), "bytes"),
        (b"ab", b"ac", "bytes"),
        ("a" * 300, "a" * 299 + "b", "bytes"),
        ("a" * 300, "a" * 301, "shape"),
    ],
)
def test_each_kind_of_difference_is_its_own(a: Any, b: Any, what: str, tmp_path: Path) -> None:
    found = compared(tmp_path, {"x": a, "same": 1}, {"x": b, "same": 1})
    assert {name: each.what for name, each in found.items()} == {"x": what}


def test_nan_equals_the_same_nan(tmp_path: Path) -> None:
    a = {"x": torch.tensor([float("nan")]), "y": float("nan")}
    assert compared(tmp_path, a, copy.deepcopy(a)) == {}


def test_what_only_one_has(tmp_path: Path) -> None:
    found = compared(tmp_path, {"a": 1, "both": 1}, {"both": 1, "b": torch.ones(2)})
    assert [(each.name, each.what, each.a, each.b) for each in found.values()] == [
        ("a", "only-in-a", "1", None),
        ("b", "only-in-b", None, "float32[2]"),
    ]


def test_what_could_not_be_read_is_neither_equal_nor_missing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        for rank in (0, 1):
            torch.save(training_state(rank), folder / f"rank{rank}.pt")
    cut(tmp_path / "b" / "rank1.pt")
    for first, second in (("a", "b"), ("b", "a")):
        assert [each.what for each in diff(tmp_path / first, tmp_path / second)] == ["unreadable"]


def test_damage_inside_a_shard_is_told(tmp_path: Path) -> None:
    state = {"w": torch.randn(1000)}
    save_dcp(state, tmp_path / "a")
    save_dcp(state, tmp_path / "b")
    path = tmp_path / "b" / "__0_0.distcp"
    raw = bytearray(path.read_bytes())
    raw[-30:] = b"\0" * 30  # the archive's end
    path.write_bytes(raw)
    assert [each.what for each in diff(tmp_path / "a", tmp_path / "b")] == ["unreadable"]


def test_folders_of_unknown_files_are_compared_byte_by_byte(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "two")):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "x.bin").write_text(text)
        (tmp_path / name / "same.txt").write_text("same")
    found = list(diff(tmp_path / "a", tmp_path / "b"))
    assert [(each.name, each.what, each.differing_elements, each.max_ulp) for each in found] == [
        ("sub/x.bin", "bytes", 3, None)
    ]


def test_a_path_that_is_not_there_is_a_users_error(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="is not there"):
        list(diff(tmp_path / "a.pt", tmp_path / "b.pt"))
