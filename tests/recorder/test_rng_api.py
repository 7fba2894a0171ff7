"""`detrun.rng_state` and `detrun.set_rng_state`: every stream goes on bit for bit, or nothing is restored."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import detrun

DRAWS: dict[str, Callable[[], Any]] = {
    "python": lambda: [random.random(), random.gauss(0, 1), random.getrandbits(70)],
    "numpy": lambda: [*np.random.rand(3), np.random.standard_normal(), np.random.randint(9)],
    "torch": lambda: [torch.rand(3).tolist(), torch.randn(17).tolist(), torch.randn(1).tolist()],
}
OWN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (lambda: torch.Generator().manual_seed(4), lambda g: torch.randn(5, generator=g).tolist()),
    "random": (lambda: random.Random(4), lambda g: [g.gauss(0, 1), g.random()]),
    "legacy": (lambda: np.random.RandomState(4), lambda g: [g.standard_normal(), g.randint(9)]),
    **{
        kind: (
            lambda kind=kind: np.random.Generator(getattr(np.random, kind)(4)),
            lambda g: [*g.random(3), g.standard_normal(), g.integers(0, 9, dtype=np.int32)],
        )
        for kind in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
    },
    "bits": (lambda: np.random.PCG64(4), lambda g: [g.random_raw()]),
}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    yield


@settings(max_examples=40, deadline=None)
@given(earlier=st.integers(0, 2000), later=st.integers(1, 700), odd=st.booleans())
def test_every_process_wide_stream_goes_on_where_it_was(earlier: int, later: int, odd: bool) -> None:
    random.seed(earlier)
    np.random.seed(earlier)
    torch.manual_seed(earlier)
    _ = [random.random() for _ in range(earlier)], np.random.rand(earlier), torch.rand(earlier)
    if odd:  # half a pair of gaussians is used
        _ = random.gauss(0, 1), np.random.standard_normal(), torch.randn(1)
    state = detrun.rng_state()
    drawn = [[draw() for draw in DRAWS.values()] for _ in range(3)]
    _ = [random.random() for _ in range(later)], np.random.rand(later), torch.rand(later)
    detrun.set_rng_state(state)
    assert [[draw() for draw in DRAWS.values()] for _ in range(3)] == drawn


@pytest.mark.parametrize("kind", OWN)
def test_the_programs_own_generators_go_on_where_they_were(kind: str) -> None:
    make, draw = OWN[kind]
    for warm in range(5):
        generator = make()
        for _ in range(warm):
            draw(generator)
        state = detrun.rng_state(own=generator)
        drawn = [draw(generator) for _ in range(300)]
        other = make()
        detrun.set_rng_state(state, own=other)
        assert [draw(other) for _ in range(300)] == drawn


@pytest.mark.parametrize("kind", OWN)
def test_states_have_fixed_shapes_and_share_no_memory(kind: str) -> None:
    make, draw = OWN[kind]
    generator = make()
    first = detrun.rng_state(own=generator)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    for _ in range(700):
        draw(generator)
    second = detrun.rng_state(own=generator)
    assert {n: (t.shape, t.dtype) for n, t in first.items()} == {n: (t.shape, t.dtype) for n, t in second.items()}
    assert not torch.equal(first["own"], second["own"])
    assert all(torch.equal(first[name], tensor) for name, tensor in kept.items())
    shapes = {name: (list(t.shape), t.dtype) for name, t in first.items() if name != "own"}
    assert shapes == {
        "python": ([628], torch.int64),
        "numpy": ([627], torch.int64),
        "torch_cpu": ([5056], torch.uint8),
    }


def test_a_state_goes_through_torch_save_and_dcp(tmp_path: Path) -> None:
    generator = np.random.default_rng(7)
    state = detrun.rng_state(order=generator)
    drawn = [DRAWS["numpy"](), *generator.random(3)]
    torch.save(state, tmp_path / "rng.pt")
    dcp.save({"rng": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    detrun.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True), order=generator)
    assert [DRAWS["numpy"](), *generator.random(3)] == drawn
    template = detrun.rng_state(order=generator)
    dcp.load({"rng": template}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    detrun.set_rng_state(template, order=generator)
    assert [DRAWS["numpy"](), *generator.random(3)] == drawn


def test_a_state_goes_through_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = detrun.rng_state(noise=torch.Generator())
    safetensors.save_file(state, tmp_path / "rng.safetensors")
    loaded = safetensors.load_file(tmp_path / "rng.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_only_what_is_included_is_saved_and_restored() -> None:
    state = detrun.rng_state(include=["numpy"])
    assert list(state) == ["numpy"]
    drawn = DRAWS["numpy"]()
    after = random.getstate()
    detrun.set_rng_state(state, include=["numpy"])
    assert DRAWS["numpy"]() == drawn
    assert random.getstate() == after


Change = Callable[[dict[str, Tensor]], dict[str, Any]]


def without(name: str) -> Change:
    return lambda state: {key: value for key, value in state.items() if key != name}


def with_(name: str, change: Callable[[Tensor], Any]) -> Change:
    return lambda state: {**state, name: change(state[name])}


def far(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[5] = 2**40
    return changed


def other_kind(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[0] += 1
    return changed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("numpy"), "has no numpy"),
        (without("noise"), "has no noise"),
        (lambda s: {**s, "extra": s["noise"]}, "has extra, which nobody asked for"),
        (with_("torch_cpu", lambda t: t[:-1]), r"uint8 \[5055\] and should be torch.uint8 \[5056\]"),
        (with_("torch_cpu", lambda t: torch.zeros_like(t)), "'torch_cpu' does not fit"),
        (with_("noise", lambda t: t.long()), "'noise' does not fit: it is torch.int64"),
        (with_("python", far), "no state of a Mersenne Twister"),
        (with_("python", other_kind), "of version 4"),
        (with_("numpy", lambda t: t.float()), "'numpy' does not fit"),
        (with_("order", other_kind), "another bit generator than PCG64"),
        (with_("order", lambda t: t.tolist()), "it is a list and no tensor"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_restored(change: Change, says: str) -> None:
    noise, order = torch.Generator().manual_seed(5), np.random.default_rng(5)
    state = detrun.rng_state(noise=noise, order=order)
    _ = [draw() for draw in DRAWS.values()], torch.rand(1, generator=noise), order.random()
    now = detrun.rng_state(noise=noise, order=order)
    with pytest.raises(ValueError, match=says) as raised:
        detrun.set_rng_state(change(state), noise=noise, order=order)
    assert "nothing was restored" in str(raised.value)
    after = detrun.rng_state(noise=noise, order=order)
    assert all(torch.equal(now[name], tensor) for name, tensor in after.items())


def test_another_machines_device_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device here")
    state = {**detrun.rng_state(), "cuda:0": torch.zeros(16, dtype=torch.uint8)}
    with pytest.raises(ValueError, match="does not see"):
        detrun.set_rng_state(state)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: detrun.rng_state(include=["cuda"]), "known are python, numpy, torch_cpu, devices"),
        (lambda: detrun.rng_state(include="numpy"), "known are"),
        (lambda: detrun.rng_state(python=random.Random(1)), "process-wide stream"),
        (lambda: detrun.rng_state(order=5), "'order' is a int"),
        (lambda: detrun.rng_state(order=random.SystemRandom()), "SystemRandom"),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_it_works_where_detrun_does_not_run_and_costs_nothing_before() -> None:
    code = (
        "import sys, detrun\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "detrun.track('x', 5)\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "state = detrun.rng_state()\n"
        "import random; a = random.random(); detrun.set_rng_state(state); assert random.random() == a\n"
        "assert not [name for name in sys.modules if name.startswith('detrun.recorder')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
