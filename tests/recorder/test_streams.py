"""Rows of random number streams: what is kept of each, what counts, and that reading draws nothing."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from detrun.fingerprint.host import digest_tensors
from detrun.recorder.export import export_recorder
from detrun.recorder.rng import RngStreams
from detrun.recorder.streams import generator_row, global_rows

ALL = [
    (lambda s: random.Random(s), lambda g: g.random(), "mt19937-python"),
    (lambda s: np.random.RandomState(s), lambda g: g.rand(), "mt19937-numpy"),
    (lambda s: torch.Generator().manual_seed(s), lambda g: torch.rand(1, generator=g), "mt19937-torch"),
    (lambda s: np.random.default_rng(s), lambda g: g.random(), "numpy-PCG64"),
    (lambda s: np.random.Philox(s), lambda g: g.random_raw(), "numpy-Philox"),
    (lambda s: np.random.Generator(np.random.MT19937(s)), lambda g: g.random(), "numpy-MT19937"),
    (lambda s: np.random.SFC64(s), lambda g: g.random_raw(), "numpy-SFC64"),
    (lambda s: np.random.RandomState(np.random.PCG64(s)), lambda g: g.rand(), "numpy-PCG64"),
]


@pytest.mark.parametrize(("make", "draw", "kind"), ALL)
def test_a_generators_row_is_its_state(make: Any, draw: Any, kind: str) -> None:
    generator = make(3)
    row, raw = generator_row("g", generator) or pytest.fail("no row")
    assert (row.component, row.name, row.standing) == ("rng", "g", "hard")
    assert row.info == {"generator": kind, "unseeded": False}
    assert row.nbytes == row.elements == len(raw)
    assert row.digest == digest_tensors([torch.frombuffer(bytearray(raw), dtype=torch.uint8)])
    assert generator_row("g", generator) == (row, raw)
    assert generator_row("g", make(3)) == (row, raw)
    draw(generator)
    later = generator_row("g", generator)
    assert later is not None
    assert later[0].digest != row.digest


def test_what_is_kept_of_a_mersenne_twister() -> None:
    python = random.Random(5)
    python.gauss(0, 1)
    _, raw = generator_row("g", python) or pytest.fail("no row")
    _, words, gauss = python.getstate()
    assert raw == struct.pack("<625Id", *words, gauss)
    legacy = np.random.RandomState(5)
    assert len((generator_row("g", legacy) or pytest.fail("no row"))[1]) == 2500
    legacy.standard_normal()
    state: Any = legacy.get_state(legacy=False)
    expected = state["state"]["key"].astype("<u4").tobytes() + struct.pack("<Id", state["state"]["pos"], state["gauss"])
    assert (generator_row("g", legacy) or pytest.fail("no row"))[1] == expected
    generator = torch.Generator().manual_seed(5)
    assert (generator_row("g", generator) or pytest.fail("no row"))[1] == bytes(generator.get_state().tolist())


def test_what_is_kept_of_other_numpy_generators() -> None:
    _, raw = generator_row("g", np.random.default_rng(5)) or pytest.fail("no row")
    state = json.loads(raw)
    assert list(state) == sorted(state)
    assert state == np.random.default_rng(5).bit_generator.state


@pytest.mark.parametrize(
    ("make", "unseeded"),
    [
        (lambda: np.random.default_rng(), True),
        (lambda: np.random.RandomState(), True),
        (lambda: np.random.PCG64(), True),
        (lambda: np.random.default_rng([7, 2**63]), False),
        (lambda: np.random.default_rng(np.random.SeedSequence(7).spawn(2)[1]), False),
        (lambda: np.random.RandomState(2**32 - 1), False),
        (lambda: torch.Generator(), False),
    ],
)
def test_what_the_system_seeded_says_nothing(make: Any, unseeded: bool) -> None:
    row, _ = generator_row("g", make()) or pytest.fail("no row")
    assert row.info["unseeded"] is unseeded


@pytest.mark.parametrize("thing", [random.SystemRandom(), 5, "rng", torch.zeros(3), torch.zeros(17, dtype=torch.uint8)])
def test_what_is_no_generator_has_no_row(thing: object) -> None:
    assert generator_row("g", thing) is None


def test_a_trackers_saved_state_has_the_row_of_its_generator() -> None:
    generator = torch.Generator().manual_seed(9)
    row, raw = generator_row("g", generator) or pytest.fail("no row")
    assert generator_row("g", generator.get_state()) == (row, raw)


def test_the_process_wide_streams() -> None:
    np.random.seed(1)
    before = (random.getstate(), repr(np.random.get_state()), torch.get_rng_state())
    rows = {row.name: (row, raw) for row, raw in global_rows(RngStreams())}
    assert set(rows) == {"python", "numpy", "torch_cpu"} | {n for n in rows if n.startswith(("cuda:", "xpu:"))}
    kinds = {name: rows[name][0].info["generator"] for name in ("python", "numpy", "torch_cpu")}
    assert kinds == {"python": "mt19937-python", "numpy": "mt19937-numpy", "torch_cpu": "mt19937-torch"}
    assert random.getstate() == before[0]
    assert repr(np.random.get_state()) == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_process_wide_stream_that_nobody_seeded_is_told(tmp_path: Path) -> None:
    export_recorder(tmp_path)
    code = (
        "import random, torch, numpy.random, detrun.recorder as r\n"
        "from detrun.recorder.streams import global_rows\n"
        "numpy.random.seed(3)\n"
        "print({row.name: row.info['unseeded'] for row, _ in global_rows(r._session.streams)})"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "DETRUN_ATTEMPT_DIR": str(tmp_path / "attempt")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str({"python": True, "numpy": False, "torch_cpu": True})
