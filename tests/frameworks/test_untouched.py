"""What a recorded run leaves is what it leaves by itself: the same last checkpoint, after as many collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.harness import STEPS, recorded_and_bare
from tests.frameworks.test_deepspeed import engine
from tests.frameworks.test_lightning import fabric
from tests.frameworks.test_lightning import trainer as lightning
from tests.frameworks.test_megatron import EXPERTS, LAYERS, megatron
from tests.frameworks.test_torchtitan import LLAMA, assets  # noqa: F401 - a fixture
from tests.frameworks.test_torchtitan import trainer as torchtitan
from tests.frameworks.test_transformers import trainer as transformers


@pytest.mark.full
def test_megatron(tmp_path: Path) -> None:
    file = megatron(tmp_path, "watched", *LAYERS, *EXPERTS)
    differing, recorded, bare = recorded_and_bare(file, f"checkpoints/iter_{STEPS:07d}")
    assert recorded == bare
    # Its arguments hold the folder that it writes to.
    assert not [name for name in differing if not name.startswith("common")], differing


def test_transformers(tmp_path: Path) -> None:
    differing, recorded, bare = recorded_and_bare(transformers(tmp_path, "watched"), f"checkpoints/checkpoint-{STEPS}")
    assert recorded == bare
    assert not [name for name in differing if not name.startswith(("training_args", "trainer_state"))], differing


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed(stage: int, tmp_path: Path) -> None:
    file = engine(tmp_path, "watched", "--zero", str(stage))
    differing, recorded, bare = recorded_and_bare(file, f"checkpoints/step-{STEPS}")
    assert recorded == bare
    assert not differing


@pytest.mark.full
def test_lightning(tmp_path: Path) -> None:
    file = lightning(tmp_path, "watched", "--keep-rng", "--stateful")
    differing, recorded, bare = recorded_and_bare(file, f"checkpoints/step={STEPS}.ckpt")
    assert recorded == bare
    assert not [name for name in differing if not name.startswith("callbacks")], differing


@pytest.mark.full
def test_fabric(tmp_path: Path) -> None:
    differing, recorded, bare = recorded_and_bare(
        fabric(tmp_path, "watched", "--keep-rng"), f"checkpoints/step-{STEPS}.ckpt"
    )
    assert recorded == bare
    assert not differing


@pytest.mark.full
def test_torchtitan(tmp_path: Path, assets: Path) -> None:  # noqa: F811
    file = torchtitan(tmp_path, assets, "watched", *LLAMA)
    differing, recorded, bare = recorded_and_bare(file, f"checkpoint/step-{STEPS}")
    assert recorded == bare
    assert not differing
