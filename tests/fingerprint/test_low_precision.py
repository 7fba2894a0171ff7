"""Formats of several parts: one flipped bit of packed values or of a scale shows in its part, and only there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from detrun.fingerprint.device import ml128_text, segment_sums
from detrun.fingerprint.host import digest_tensors, memory_of
from detrun.fingerprint.tensors import Part, named_parts
from tests.fingerprint.test_host import Wrapper

pytest.importorskip("torchao")


def mx(dtype: torch.dtype) -> torch.Tensor:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(values(), dtype, 32)


def nvfp4(scale: float | None = None) -> torch.Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    return NVFP4Tensor.to_nvfp4(values(), per_tensor_scale=None if scale is None else torch.tensor(scale))


def float8_weight() -> torch.Tensor:
    from torchao.quantization.quantize_.workflows import Float8Tensor

    return Float8Tensor.from_hp(values())


def float8_training() -> torch.Tensor:
    from torchao.float8 import Float8TrainingTensor

    return Float8TrainingTensor(values().to(torch.float8_e4m3fn), torch.tensor(0.25), torch.float32, None)


def nested() -> torch.Tensor:
    return Wrapper(mx(torch.float8_e4m3fn), torch.tensor(2.0))


def values() -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


FORMATS: dict[str, tuple[Callable[[], torch.Tensor], dict[str, str]]] = {
    "MXFP8": (lambda: mx(torch.float8_e4m3fn), {"qdata": "float8_e4m3fn|32,64", "scale": "float8_e8m0fnu|32,2"}),
    "MXFP4": (lambda: mx(torch.float4_e2m1fn_x2), {"qdata": "uint8|32,32", "scale": "float8_e8m0fnu|32,2"}),
    "NVFP4": (nvfp4, {"qdata": "uint8|32,32", "scale": "float8_e4m3fn|32,4"}),
    "NVFP4 with a scale of the tensor": (
        lambda: nvfp4(0.01),
        {"qdata": "uint8|32,32", "scale": "float8_e4m3fn|32,4", "per_tensor_scale": "float32|"},
    ),
    "FP8 with scales of rows": (float8_weight, {"qdata": "float8_e4m3fn|32,64", "scale": "float32|32,1"}),
    "FP8 with its scale": (float8_training, {"_data": "float8_e4m3fn|32,64", "_scale": "float32|"}),
    "one wrapper in another": (
        nested,
        {"data_.qdata": "float8_e4m3fn|32,64", "data_.scale": "float8_e8m0fnu|32,2", "scale": "float32|"},
    ),
}


def host(part: Part) -> str:
    assert part.memory is not None
    return digest_tensors([part.memory])


def device(part: Part) -> str:
    assert part.memory is not None
    sums = segment_sums([part.memory])
    assert sums is not None
    return ml128_text(part.description, bytes(memory_of(sums)))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_taken_apart_into_values_and_scales(name: str) -> None:
    make, expected = FORMATS[name]
    found = {part.name: part.description.decode().removeprefix(f".{part.name}|")[:-1] for part in named_parts(make())}
    assert found == expected
    assert not any(part.copied for part in named_parts(make()))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_one_flipped_bit_shows_in_its_part_alone(name: str, data: Any) -> None:
    make, expected = FORMATS[name]
    tensor, other = make(), make()
    changed = data.draw(st.sampled_from(sorted(expected)))
    part = next(part for part in named_parts(other) if part.name == changed)
    assert part.memory is not None
    memory = memoryview(memory_of(part.memory)).cast("B")
    place = data.draw(st.integers(0, len(memory) - 1))
    memory[place] ^= 1 << data.draw(st.integers(0, 7))
    for digest in (host, device):
        before, after = ({part.name: digest(part) for part in named_parts(each)} for each in (tensor, other))
        assert {key for key in before if before[key] != after[key]} == {changed}
    assert digest_tensors([tensor]) != digest_tensors([other])
    assert digest_tensors([tensor]) == digest_tensors([make()])


def test_the_same_bytes_in_another_format_are_another_tensor() -> None:
    packed = torch.zeros(4, 4, dtype=torch.uint8)
    kinds = [
        packed,
        packed.view(torch.float8_e4m3fn),
        packed.view(torch.float8_e5m2),
        packed.view(torch.float8_e8m0fnu),
    ]
    assert len({digest_tensors([tensor]) for tensor in kinds}) == 4


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_distributed_tensor_is_its_local_shard_and_its_placement(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    sharded = distribute_tensor(values(), mesh, [Shard(0)])
    (part,) = named_parts(sharded)
    assert (part.name, part.description) == ("local", b".local|float32|32,64;")
    assert host(part) == digest_tensors([values()])
    replicated = distribute_tensor(values(), mesh, [Replicate()])
    along_columns = distribute_tensor(values(), mesh, [Shard(1)])
    texts = [digest_tensors([tensor]) for tensor in (sharded, replicated, along_columns)]
    assert len(set(texts)) == 3
    assert digest_tensors([distribute_tensor(values(), mesh, [Shard(0)])]) == texts[0]


def test_one_flipped_bit_of_a_local_shard(mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    one, other = (distribute_tensor(values(), mesh, [Shard(0)]) for _ in range(2))
    other.to_local().view(torch.int32)[3, 5] ^= 1
    assert host(named_parts(one)[0]) != host(named_parts(other)[0])
    assert digest_tensors([one]) != digest_tensors([other])
