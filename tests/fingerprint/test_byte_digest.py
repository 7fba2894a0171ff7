"""The digest of bytes from a file equals that of the same tensor in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detrun.fingerprint.byte_digest import digest_dense
from detrun.fingerprint.elements import LAYOUTS
from detrun.fingerprint.host import digest_tensors, memory_of

# Quantized tensors are taken apart by their scheme, and torch makes no tensors of the rest.
DTYPES = [name for name in LAYOUTS if not name.startswith(("q", "bits"))]


def has_memory(dtype: str) -> bool:
    try:
        torch.zeros(4, dtype=torch.uint8).view(getattr(torch, dtype))
    except (RuntimeError, NotImplementedError):
        return dtype in ("complex64", "complex128", "float64", "int64", "uint64")
    return True


@pytest.mark.parametrize("dtype", [name for name in DTYPES if has_memory(name)])
@given(shape=st.lists(st.integers(0, 4), max_size=3), seed=st.integers(0, 99), cut=st.integers(1, 64))
def test_bytes_in_pieces_have_the_digest_of_the_tensor(dtype: str, shape: list[int], seed: int, cut: int) -> None:
    count = int(torch.Size(shape).numel()) * LAYOUTS[dtype].element_bytes
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    tensor: Any = torch.empty(shape, dtype=getattr(torch, dtype))
    if count:
        memory_of(tensor)[:] = bytes(raw.tolist())
    stored = bytes(raw.tolist())
    pieces = [stored[begin : begin + cut] for begin in range(0, count, cut)]
    assert digest_dense(dtype, shape, pieces) == digest_tensors([tensor])
    assert digest_dense(dtype, [*shape, 1], pieces) != digest_tensors([tensor])
