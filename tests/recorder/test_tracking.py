"""What a program tells of itself by `detrun.track`."""

from __future__ import annotations

import collections
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import detrun
from detrun.recorder import tracking


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("DETRUN_ATTEMPT_DIR", str(tmp_path))
    yield
    tracking._tracked.clear()


def tracked() -> dict[str, Any]:
    said: list[str] = []
    found = {f.name: (f.component, f.standing, f.value) for f in tracking.tracked(said.append)}
    assert not said
    return found


class Counter:
    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "bank": [torch.zeros(2), torch.ones(2)], "history": [1.0, 2.5]}


def test_what_is_tracked_is_taken_apart() -> None:
    bank, counter, module = torch.arange(3), Counter(), nn.Linear(2, 1)
    plain = {"lr": 0.1, "names": ["a", "b"], 3: np.ones(2)}
    detrun.track("bank", bank)
    detrun.track("counter", counter)
    detrun.track("head", module)
    detrun.track("plain", plain)
    detrun.track("seen", lambda: counter.seen)
    detrun.track("recent", collections.deque([1, 2]))
    counter.seen = 5
    found = tracked()
    assert {kind for kind, _, _ in found.values()} == {"tracked"}
    assert {standing for _, standing, _ in found.values()} == {"hard"}
    assert found["bank"][2] is bank
    assert found["counter.seen"][2] == found["seen"][2] == 5
    assert found["counter.history"][2] == (1.0, 2.5)
    assert {"counter.bank[1]", "head.weight", "head.bias", "plain.lr", "plain.names[0]", "plain.3"} <= set(found)
    assert found["recent"][2] == (1, 2)


def test_a_generator_is_a_random_number_stream() -> None:
    generators = [torch.Generator(), np.random.default_rng(1)]
    detrun.track("noise", generators[0])
    detrun.track("orders", {"train": generators[1]})
    assert {name: entry[:2] for name, entry in tracked().items()} == {
        "noise": ("rng", "hard"),
        "orders.train": ("rng", "hard"),
    }


def test_a_later_call_takes_the_place_of_the_first() -> None:
    detrun.track("x", 1)
    detrun.track("x", 2)
    assert tracked()["x"][2] == 2


def test_modules_tensors_and_objects_are_not_kept_alive() -> None:
    counter = Counter()
    detrun.track("counter", counter)
    detrun.track("module", nn.Linear(1, 1))
    detrun.track("tensor", torch.zeros(1))
    gc.collect()
    assert {name.split(".")[0] for name in tracked()} == {"counter"}
    del counter
    gc.collect()
    assert not tracked()


def test_what_raises_is_said_and_costs_nothing_else() -> None:
    def broken() -> float:
        raise RuntimeError("not now")

    detrun.track("broken", broken)
    detrun.track("file", lambda: open)
    detrun.track("fine", 5)
    said: list[str] = []
    assert [f.name for f in tracking.tracked(said.append)] == ["fine"]
    assert any("'broken'" in text and "not now" in text for text in said)


def test_it_does_nothing_where_detrun_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DETRUN_ATTEMPT_DIR")
    detrun.track("x", 1)
    assert not tracking._tracked
