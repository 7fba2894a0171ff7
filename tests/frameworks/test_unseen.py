"""Trainers that no adapter knows: what the recorder finds by itself has to do, without an edit or a flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import environment
from tests.frameworks.harness import HERE, detrun, origin_of, pair_and_resume, recipe

FOLDER = HERE / "unseen"


def unseen(folder: Path, name: str, *args: str, **more: Any) -> Path:
    command = [str(FOLDER / f"{name}.py"), "--out", "{out}", "--steps", "{steps}", "--seed", "{seed}", *args]
    if "nudge" not in more:
        more["checkpoint"] = {
            "directory": "{out}/ckpt",
            "save_every": 3,
            "save_args": ["--save-every", "{save_every}"],
            "resume_args": ["--resume", "{checkpoint}"],
        }
    return recipe(folder, name.replace("_", "-"), command, path=[environment.UNSEEN_HOME], **{"ranks": 1, **more})


@pytest.mark.parametrize(
    ("name", "args", "ranks"),
    [
        ("poutyne_fit", ["--keep-rng"], 1),
        pytest.param("gpytorch_exact", [], 1, marks=pytest.mark.full),
        pytest.param("steps_in_backward", [], 1, marks=pytest.mark.full),
        pytest.param("two_models", [], 2, marks=pytest.mark.full),
        pytest.param("pipeline", [], 2, marks=pytest.mark.full),
    ],
)
def test_what_saves_everything_is_identical_twice_and_after_a_resume(
    name: str, args: list[str], ranks: int, tmp_path: Path
) -> None:
    ran = pair_and_resume(unseen(tmp_path, name, *args, ranks=ranks))
    assert ran.code == 0, ran.explain()
    assert ran.verdict["verdict"] == "identical"


def test_optimizers_made_in_another_order_in_each_run_are_no_difference(tmp_path: Path) -> None:
    ran = detrun("pair", str(unseen(tmp_path, "pyro_svi", nudge="")), "--json", cwd=tmp_path)
    assert ran.code == 0, ran.explain()
    assert ran.verdict["verdict"] == "identical"


@pytest.mark.full
def test_random_numbers_that_are_not_saved_are_blamed_for_the_order_drawn_from_them(tmp_path: Path) -> None:
    ran = pair_and_resume(unseen(tmp_path, "poutyne_fit"))
    assert ran.code == 1, ran.explain()
    assert ran.verdict["culprit"]["kind"] == "rng"
    assert "torch_cpu" in ran.verdict["culprit"]["name"]


@pytest.mark.full
def test_a_loader_that_starts_again_is_blamed_with_its_random_numbers(tmp_path: Path) -> None:
    ran = pair_and_resume(unseen(tmp_path, "ignite_engine"))
    assert ran.code == 1, ran.explain()
    assert ran.verdict["culprit"]["kind"] == "data"
    assert any("torch_cpu" in other for other in ran.verdict["culprit"]["others"])


@pytest.mark.parametrize(
    ("name", "nudge", "step", "module", "ranks"),
    [
        pytest.param("ignite_engine", "3@call=4", 4, "3", 1, marks=pytest.mark.full),
        pytest.param("pipeline", "outer@call=13,rank=1", 4, "outer", 2, marks=pytest.mark.full),
    ],
)
def test_a_bit_that_flips_is_found_at_its_step_and_in_its_module(
    name: str, nudge: str, step: int, module: str, ranks: int, tmp_path: Path
) -> None:
    file = unseen(tmp_path, name, ranks=ranks, nudge=nudge)
    ran = detrun("pair", str(file), "--json", cwd=tmp_path)
    assert ran.code == 1, ran.explain()
    assert ran.verdict["first_divergence"]["step"] == step
    culprit = origin_of(file)
    assert culprit["step"] == step
    assert str(culprit["scope"]).endswith(module)
