"""Files of safetensors, as the library writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from detrun.checkpoints.completeness import check
from detrun.fingerprint.host import digest_tensors
from tests.checkpoints.making import cut, entries

save_file = pytest.importorskip("safetensors.torch").save_file

DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str, tmp_path: Path) -> None:
    tensor = torch.arange(64, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(2, -1)
    save_file({"a.b": tensor, "scalar": tensor[0, 0].clone()}, tmp_path / "a.safetensors")
    found = entries(tmp_path / "a.safetensors")
    assert found["a.b"].digest() == digest_tensors([tensor])
    assert found["scalar"].digest() == digest_tensors([tensor[0, 0]])


def test_packed_four_bit_numbers_have_torchs_shape(tmp_path: Path) -> None:
    tensor = torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)
    save_file({"x": tensor}, tmp_path / "a.safetensors")
    found = entries(tmp_path / "a.safetensors")["x"]
    assert (found.shape, found.digest()) == ((2, 4), digest_tensors([tensor]))


def test_texts_beside_the_tensors_are_values(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors", {"format": "pt"})
    assert entries(tmp_path / "a.safetensors")["__metadata__.format"].value == "'pt'"


def test_shards_that_an_index_joins_share_a_prefix(tmp_path: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for number, name in enumerate(names):
        save_file({f"w{number}": torch.ones(1)}, tmp_path / name)
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(entries(tmp_path)) == ["model.w0", "model.w1"]
    assert check(tmp_path).why == ""
    (tmp_path / names[1]).unlink()
    assert names[1] in check(tmp_path).why


@pytest.mark.parametrize("keep", [0.99, 0.5, 0.001])
def test_a_file_that_was_cut_short_is_named(keep: float, tmp_path: Path) -> None:
    save_file({"x": torch.randn(1000)}, tmp_path / "a.safetensors")
    cut(tmp_path / "a.safetensors", keep)
    (problem,) = [entry.problem for entry in entries(tmp_path / "a.safetensors").values()]
    assert problem and "a.safetensors" in problem
    assert check(tmp_path / "a.safetensors").why


@pytest.mark.parametrize(
    "header",
    [
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"x": {"dtype": "F32", "shape": [1]}},
        {"x": 3},
        [],
    ],
)
def test_a_header_that_makes_no_sense_is_a_problem(header: Any, tmp_path: Path) -> None:
    raw = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0" * 4)
    assert all(entry.problem for entry in entries(tmp_path / "a.safetensors").values())
