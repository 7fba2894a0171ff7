"""Every batch script and environment of each placement, held against files that a person has read.

`python -m pytest tests/experiments/test_dry_run.py --update-golden` writes them anew.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from detrun.experiments.checks import PairOptions
from detrun.experiments.dry_run import dry_run_pair
from detrun.recipe import load_recipe
from detrun.records.archive import Archive

GOLDEN = Path(__file__).parent / "golden"

RECIPE = """\
name: moe
cluster: slurm
launch:
  launcher: {launcher}
  command: [/bin/sh, train.sh, --seed, "{{seed}}", --out, "{{out}}"]
  nodes: 2
  ranks_per_node: 4
  env: {{NCCL_DEBUG: INFO}}
steps: 20
seed: 7
placement: {placement}
arms: {{b: {{args: [--lr, "0.1 0.2"], env: {{OMP_NUM_THREADS: "3"}}}}}}
slurm: {{partition: gpu, account: team, time: "00:30:00", gpus_per_node: 4, extra: {{exclusive: true, mem: 0}}, {more}}}
"""
CONTAINER = 'container: {image: "nvcr.io#nvidia/pytorch:25.08-py3", mounts: "/data:/data"}'
SETUP = 'setup: ["module load cuda/12.8", "source /venv/bin/activate"]'

CASES = {
    "pinned": ("torchrun", "pinned", SETUP),
    "allocation": ("srun", "allocation", ""),
    "parallel": ("torchrun", "parallel", ""),
    "disjoint-container": ("torchrun", "disjoint", CONTAINER),
}


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.mark.parametrize("name", CASES)
def test_what_would_be_submitted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: bool) -> None:
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(variable, raising=False)
    launcher, placement, more = CASES[name]
    path = tmp_path / "moe.yaml"
    path.write_text(RECIPE.format(launcher=launcher, placement=placement, more=more))
    shown = dry_run_pair(load_recipe(path), Archive(tmp_path / "archive"), PairOptions())
    shown = shown.replace(str(tmp_path), "/here").replace(str(Path(sys.executable).parent), "/venv/bin")
    shown = re.sub(r"/venv/bin/python[0-9.]*", "/venv/bin/python", shown)
    golden = GOLDEN / f"{name}.txt"
    if update:
        golden.write_text(shown)
    assert shown == golden.read_text()
    assert not (tmp_path / "archive").exists()
