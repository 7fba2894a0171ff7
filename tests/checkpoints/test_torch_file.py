"""Files of torch.save: every dtype, views, strides, subclasses, byte order, damage."""

from __future__ import annotations

import contextlib
import io
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from detrun.checkpoints.read import open_checkpoint
from detrun.fingerprint.elements import LAYOUTS
from detrun.fingerprint.host import digest_tensors
from tests.checkpoints.making import cut, entries, training_state
from tests.fingerprint.test_host import Wrapper

BASE = torch.arange(48, dtype=torch.float32).reshape(6, 8)
VIEWS: dict[str, torch.Tensor] = {
    "plain": BASE,
    "transposed": BASE.t(),
    "slice": BASE[1:3, 2:5],
    "step": BASE[::2, 1::3],
    "tail": BASE[5],
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "expanded": torch.zeros(1).expand(7, 2),
    "one row": BASE[2:3].t(),
    "parameter": torch.nn.Parameter(BASE[:2].clone()),
    "conjugated": torch.view_as_complex(BASE.reshape(-1, 2).contiguous()).conj(),
    "negated": torch.view_as_complex(BASE.reshape(-1, 2).contiguous()).conj().imag,
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_tensor_has_the_digest_it_had_in_memory(name: str, zipped: bool, tmp_path: Path) -> None:
    torch.save({"x": VIEWS[name]}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    found = entries(tmp_path / "a.pt")["x"]
    tensor = VIEWS[name].detach()
    assert (found.dtype, found.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    assert found.digest() == digest_tensors([tensor])


def saved_dtypes() -> list[str]:
    """The dtypes that this torch can save; some have a name and no storage yet."""
    found = []
    for name in LAYOUTS:
        if hasattr(torch, name) and not name.startswith("q"):
            with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError, KeyError):
                torch.save(torch.arange(64, dtype=torch.uint8).view(getattr(torch, name)), io.BytesIO())
                found.append(name)
    return found


def test_the_usual_dtypes_are_among_those_that_can_be_saved() -> None:
    assert {"float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "bool"} <= set(saved_dtypes())


@pytest.mark.parametrize("dtype", saved_dtypes())
def test_every_dtype(dtype: str, tmp_path: Path) -> None:
    tensor = torch.arange(64, dtype=torch.uint8).view(getattr(torch, dtype))
    torch.save({"x": tensor}, tmp_path / "a.pt")
    found = entries(tmp_path / "a.pt")["x"]
    assert found.problem is None
    assert (found.dtype, found.read(), found.digest()) == (dtype, bytes(range(64)), digest_tensors([tensor]))


def test_a_strided_tensor_larger_than_a_block(tmp_path: Path) -> None:
    tensor = torch.arange(3 << 20, dtype=torch.float32).reshape(3, 1 << 10, 1 << 10).permute(2, 0, 1)
    torch.save(tensor, tmp_path / "a.pt")
    assert entries(tmp_path / "a.pt")[""].digest() == digest_tensors([tensor.contiguous()])


def test_the_other_byte_order_gives_the_same_digest(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5, 3), "b": torch.arange(4), "c": torch.randn(3, dtype=torch.complex64)}
    torch.save(tensors, tmp_path / "little.pt")
    with zipfile.ZipFile(tmp_path / "little.pt") as little, zipfile.ZipFile(tmp_path / "big.pt", "w") as big:
        sizes = {"little/data/0": 4, "little/data/1": 8, "little/data/2": 4}
        for name in little.namelist():
            raw = little.read(name)
            if name in sizes:
                raw = np.frombuffer(raw, f"<u{sizes[name]}").astype(f">u{sizes[name]}").tobytes()
            big.writestr(name, b"big" if name.endswith("byteorder") else raw)
    found = entries(tmp_path / "big.pt")
    for name, tensor in tensors.items():
        assert found[name].digest() == digest_tensors([tensor])


def test_names_are_the_path_of_keys(tmp_path: Path) -> None:
    torch.save(training_state(), tmp_path / "a.pt")
    found = entries(tmp_path / "a.pt")
    assert {"model.weight", "optimizer.state.0.exp_avg", "optimizer.param_groups.0.betas.1", "step"} < set(found)
    assert found["optimizer.param_groups.0.lr"].value == (1e-3).hex()
    assert (found["step"].value, found["step"].dtype) == ("10", "int")


def test_names_that_would_be_the_same_are_told_apart(tmp_path: Path) -> None:
    torch.save({"a.b": 1, "a": {"b": 2}, 0: 3, "0": 4}, tmp_path / "a.pt")
    values = {name: entry.value for name, entry in entries(tmp_path / "a.pt").items()}
    assert values == {"a.b": "1", "a.b#2": "2", "0": "3", "0#2": "4"}


def test_random_states_and_arrays_are_arrays(tmp_path: Path) -> None:
    state = {
        "python": random.Random(3).getstate(),
        "numpy": np.random.RandomState(3).get_state(),
        "order": [*range(99)],
    }
    torch.save(state, tmp_path / "a.pt")
    found = entries(tmp_path / "a.pt")
    assert (found["python.1"].dtype, found["python.1"].shape) == ("int64", (625,))
    assert np.frombuffer(found["python.1"].read(), "<i8").tolist() == list(state["python"][1])
    assert found["numpy.1"].read() == state["numpy"][1].tobytes()
    assert np.frombuffer(found["order"].read(), "<i8").tolist() == state["order"]


@pytest.mark.parametrize("order", ["C", "F", ">"])
def test_numpy_arrays_are_dense_and_little_endian(order: str, tmp_path: Path) -> None:
    array = np.arange(6, dtype=">f4" if order == ">" else "<f4").reshape(2, 3)
    torch.save({"x": np.asfortranarray(array) if order == "F" else array, "y": array[0, 1]}, tmp_path / "a.pt")
    found = entries(tmp_path / "a.pt")
    assert (found["x"].dtype, found["x"].shape, found["x"].read()) == ("float32", (2, 3), array.astype("<f4").tobytes())
    assert (found["y"].shape, found["y"].read()) == ((), np.float32(1).tobytes())


def test_an_object_of_an_unknown_class_shows_its_name_and_content(tmp_path: Path) -> None:
    torch.save({"x": random.Random(1), "y": np.random.default_rng(2)}, tmp_path / "a.pt")
    found = entries(tmp_path / "a.pt")
    assert (found["x"].dtype, found["x"].value) == ("object", "random.Random")
    assert found["x.state.1"].shape == (625,)
    assert any(name.startswith("y.") and name.endswith(".state.inc") for name in found)


def test_the_inner_tensors_of_a_wrapper_have_names_of_their_own(tmp_path: Path) -> None:
    data, scale = torch.randn(4, 2), torch.randn(4, 1)
    torch.save({"w": Wrapper(data, scale)}, tmp_path / "a.pt")
    found = entries(tmp_path / "a.pt")
    assert found["w"].value is not None and "Wrapper float32[4, 2]" in found["w"].value
    assert found["w.data_"].digest() == digest_tensors([data])
    assert found["w.scale"].digest() == digest_tensors([scale])


def test_block_scaled_tensors_show_packed_values_and_scales(tmp_path: Path) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    weight = mx.MXTensor.to_mx(torch.randn(32, 64, dtype=torch.bfloat16), torch.float8_e4m3fn, 32)
    torch.save({"w": weight}, tmp_path / "a.pt")
    found = entries(tmp_path / "a.pt")
    assert found["w.qdata"].digest() == digest_tensors([weight.qdata])
    assert found["w.scale"].digest() == digest_tensors([weight.scale])


def test_attributes_of_a_parameter_are_entries(tmp_path: Path) -> None:
    parameter: Any = torch.nn.Parameter(torch.ones(2))
    parameter.tag = "kept"
    torch.save({"w": parameter}, tmp_path / "a.pt")
    found = entries(tmp_path / "a.pt")
    assert found["w"].digest() == digest_tensors([torch.ones(2)])
    assert found["w.tag"].value == "'kept'"


def test_files_of_a_folder_are_told_apart_by_stem(tmp_path: Path) -> None:
    for rank in (0, 1):
        torch.save({"x": torch.full((2,), float(rank))}, tmp_path / f"rank{rank}.pt")
    found = entries(tmp_path)
    assert list(found) == ["rank0.x", "rank1.x"]
    assert found["rank1.x"].digest() == digest_tensors([torch.ones(2)])


@pytest.mark.parametrize("keep", [0.999, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_file_that_was_cut_short_is_named(keep: float, zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"x": torch.randn(100, 100)}, path, _use_new_zipfile_serialization=zipped)
    problems = [entry.problem for entry in entries(cut(path, keep)).values() if entry.problem]
    assert problems and "a.pt" in problems[0]


def test_a_missing_storage_is_the_problem_of_its_tensor_alone(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "holed.pt", "w") as holed:
        for name in whole.namelist():
            if name != "whole/data/1":
                holed.writestr(name, whole.read(name))
    found = entries(tmp_path / "holed.pt")
    assert found["a"].digest() == digest_tensors([torch.ones(2)])
    assert "data/1, is missing" in (found["b"].problem or "")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + b"N0" * 10_000 + b"N.")
    assert "compressed" in (entries(tmp_path / "a.pt")["a.pt"].problem or "")


def test_the_room_imports_no_torch(tmp_path: Path) -> None:
    torch.save(training_state(), tmp_path / "a.pt")
    code = (
        "import sys; from pathlib import Path\n"
        "from detrun.checkpoints import audit, diff, find, index\n"
        f"assert index.index(Path({str(tmp_path / 'a.pt')!r})).names\n"
        "print({'torch', 'pickle'} & set(sys.modules) - {'pickle'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_two_opens_of_many_files_keep_few_descriptors(tmp_path: Path) -> None:
    for rank in range(150):
        torch.save({"x": torch.ones(1)}, tmp_path / f"rank{rank}.pt")
    with open_checkpoint(tmp_path) as checkpoint:
        found = list(checkpoint.entries())
        assert all(entry.digest() == found[0].digest() for entry in found)
        assert len(checkpoint._files._open) <= 64
