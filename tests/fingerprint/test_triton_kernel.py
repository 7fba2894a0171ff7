"""The Triton kernel gives the sums of the plain operations: on a GPU where one is, else under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from detrun.fingerprint import device
from detrun.fingerprint.device import level_keys_on, multilinear
from detrun.fingerprint.keys import ROW

# In a process of its own: Triton decides when it is first imported whether it interprets.
CHECK = """
import numpy as np, torch
from detrun.fingerprint import device, triton_kernel
from detrun.fingerprint.keys import ROW

place = "cuda" if torch.cuda.is_available() else "cpu"
for size in (1, 3, 4096, 4097, ROW - 1, ROW, ROW + 1, 5 * ROW, 9 * ROW + 1234):
    raw = np.random.default_rng(size).integers(-(2**31), 2**31, size, np.int32)
    lanes = torch.from_numpy(raw).to(place)
    keys = device.level_keys_on(lanes.device, 0)
    found = triton_kernel.row_values(lanes, keys)
    assert found.dtype == torch.int64, found.dtype
    assert torch.equal(found, device._row_values(lanes, keys, 4)), size
    assert torch.equal(found, triton_kernel.row_values(lanes, keys)), size
    if place == "cuda":
        assert torch.equal(device.multilinear(lanes).cpu(), device.multilinear(lanes.cpu())), size
        assert not device._kernel_fails
print("equal")
"""


def test_the_kernel_gives_the_sums_of_the_plain_operations() -> None:
    env = {**os.environ, **({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})}
    done = subprocess.run([sys.executable, "-c", CHECK], env=env, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr


def test_without_triton_the_plain_operations_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "detrun.fingerprint.triton_kernel", None)
    monkeypatch.setattr(device, "_kernel_fails", False)
    lanes = torch.arange(ROW + 3, dtype=torch.int32)
    assert device._kernel_values(lanes, level_keys_on(lanes.device, 0)) is None
    assert device._kernel_fails
    assert device._kernel_values(lanes, level_keys_on(lanes.device, 0)) is None
    assert multilinear(lanes).shape == (2,)


def test_nothing_of_triton_is_imported_for_host_memory() -> None:
    code = (
        "import sys, torch\n"
        "from detrun.fingerprint.device import segment_sums\n"
        "segment_sums([torch.ones(40000)])\n"
        "print('detrun.fingerprint.triton_kernel' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
