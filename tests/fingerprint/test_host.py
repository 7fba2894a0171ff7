"""Digests of tensors in host memory: all kinds of tensors, and nothing done to them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from detrun.fingerprint.byte_digest import ByteHasher, digest_bytes
from detrun.fingerprint.host import HostHasher, digest_tensors


class Wrapper(torch.Tensor):
    """A wrapper subclass as quantization libraries write them: its content is in two inner tensors."""

    data_: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = pytree.tree_map_only(Wrapper, lambda w: w.data_ * w.scale, args)
        return func(*inner, **(kwargs or {}))


def sparse(values: list[float]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor(values), (4,))


def csr(values: list[float]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.tensor([[values[0], 0.0], [0.0, values[1]]]).to_sparse_csr()


class Named(torch.Tensor):
    """A subclass that only adds a name: its memory is its own."""


KINDS: dict[str, Callable[[float], torch.Tensor]] = {
    "plain": lambda v: torch.tensor([1.0, v]),
    "parameter": lambda v: nn.Parameter(torch.tensor([1.0, v])),
    "strided": lambda v: torch.tensor([[1.0, v], [2.0, 3.0]]).t()[:, :1],
    "channels last": lambda v: (
        torch.tensor([1.0, v, 2.0, 3.0] * 4).view(1, 4, 2, 2).to(memory_format=torch.channels_last)
    ),
    "expanded": lambda v: torch.tensor([[v]]).expand(3, 4),
    "scalar": lambda v: torch.tensor(v),
    "bf16": lambda v: torch.tensor([1.0, v]).bfloat16(),
    "fp8": lambda v: torch.tensor([1.0, v]).to(torch.float8_e4m3fn),
    "complex": lambda v: torch.tensor([1 + 2j, complex(v, 1)]),
    "conjugate": lambda v: torch.tensor([1 + 2j, complex(v, 1)]).conj(),
    "negative": lambda v: torch.tensor([1 + 2j, complex(1, v)]).conj().imag,
    "bool": lambda v: torch.tensor([True, v > 1]),
    "sparse": lambda v: sparse([1.0, v]),
    "csr": lambda v: csr([1.0, v]),
    "named": lambda v: torch.tensor([1.0, v]).as_subclass(Named),
    "subclass": lambda v: Wrapper(torch.tensor([1.0, v]), torch.tensor(2.0)),
    "quantized": lambda v: torch.quantize_per_tensor(torch.tensor([1.0, v]), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_tensor_is_repeatable_and_told_apart(kind: str) -> None:
    make = KINDS[kind]
    assert digest_tensors([make(1.0)]) == digest_tensors([make(1.0)])
    assert digest_tensors([make(1.0)]) != digest_tensors([make(4.0)])


def test_what_has_no_memory_counts_by_its_description() -> None:
    meta = torch.empty(3, device="meta")
    assert digest_tensors([meta]) == digest_tensors([torch.empty(3, device="meta")])
    assert digest_tensors([meta]) != digest_tensors([torch.empty(4, device="meta")])
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    digest_tensors([fake])
    inside: list[str] = []

    def under_vmap(x: torch.Tensor) -> torch.Tensor:
        inside.append(digest_tensors([x]))
        return x

    torch.vmap(under_vmap)(torch.ones(2, 3))
    assert len(inside) == 1


def test_dtype_shape_place_and_absence_count() -> None:
    one = torch.zeros(4)
    texts = [
        digest_tensors([one]),
        digest_tensors([one.view(2, 2)]),
        digest_tensors([one.view(torch.int32)]),
        digest_tensors([one, None]),
        digest_tensors([None, one]),
        digest_tensors([]),
        digest_tensors([torch.empty(0)]),
        digest_tensors([torch.empty(0, 3)]),
        digest_tensors([-one]),
        digest_tensors([one.view(4, 1)]),
    ]
    assert len(set(texts)) == len(texts)


def test_strides_do_not_count() -> None:
    square = torch.arange(6.0).view(2, 3)
    assert digest_tensors([square]) == digest_tensors([square.t().contiguous().t()])


def test_the_digest_is_xxh3_128_of_description_and_bytes() -> None:
    tensor = torch.arange(5, dtype=torch.int16)
    expected = xxhash.xxh3_128(b"|int16|5;" + tensor.numpy().tobytes()).hexdigest()
    assert digest_tensors([tensor]) == f"xxh3:{expected}"


@given(st.lists(st.binary(max_size=20), max_size=6), st.lists(st.binary(max_size=20), max_size=6))
def test_framing_tells_pieces_apart(first: list[bytes], second: list[bytes]) -> None:
    def fed(pieces: list[bytes]) -> str:
        hasher = ByteHasher()
        for piece in pieces:
            hasher.feed_bytes(piece)
        return hasher.text()

    assert (fed(first) == fed(second)) == (first == second)


def test_a_storage_can_be_resized_afterwards() -> None:
    tensor = torch.arange(1000.0)
    digest_tensors([tensor])
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().size() == 0


def test_reading_changes_nothing_about_a_tensor() -> None:
    parameter = nn.Parameter(torch.arange(4.0))
    parameter.grad = torch.ones(4)
    version, before = parameter._version, parameter.detach().clone()
    digest_tensors([parameter, parameter.grad, parameter.detach().t()])
    assert parameter._version == version
    assert parameter.grad_fn is None
    assert torch.equal(parameter, before)


def test_a_tracer_of_the_user_sees_none_of_it() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Tracer(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    tensors = [torch.randn(3, 4).t(), torch.randn(3), torch.tensor([1 + 1j])]
    with Tracer():
        HostHasher().feed_tensors(tensors)
    assert seen == []


def test_without_xxhash_the_digest_names_its_algorithm() -> None:
    code = (
        "import sys; sys.modules['xxhash'] = None\n"
        "from detrun.fingerprint.byte_digest import digest_bytes\n"
        "print(digest_bytes(b'abc'))"
    )
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert text.startswith("blake2b:")
    assert len(text) == len("blake2b:") + 32
    assert digest_bytes(b"abc").startswith("xxh3:")


@pytest.mark.parametrize("shape", ["plain", "transposed"])
def test_memory_that_was_given_back_is_not_read(shape: str) -> None:
    tensor = torch.ones(64, 64) if shape == "plain" else torch.ones(64, 64).t()[:32]
    held = digest_tensors([tensor])
    tensor.untyped_storage().resize_(0)
    assert digest_tensors([tensor]) == digest_tensors([tensor]) != held
