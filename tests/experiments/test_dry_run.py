"""Every batch script and environment of each placement, held against files that a person has read.

`python -m pytest tests/experiments/test_dry_run.py --update-golden` writes them anew.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from detrun.experiments.checks import PairOptions
from detrun.experiments.dry_run import dry_run_pair, dry_run_resume
from detrun.experiments.resume import ResumeOptions
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


CHECKPOINT = """\
checkpoint: {save_every: 5, save_args: [--save, "{save_every}"], resume_args: [--from, "{checkpoint}"]}
"""

RESUMES = {
    "resume-pinned": ("pinned", "", ResumeOptions()),
    "resume-allocation-controls": ("allocation", "", ResumeOptions(observer=True, self_test=True)),
    "resume-requeue-allocation": ("allocation", "interrupt: {kind: requeue, at_step: 7}\n", ResumeOptions()),
    "resume-timeout": (
        "pinned",
        "interrupt: [{kind: kill, at_step: 7, node: 1}, {kind: timeout, minutes: 2}]\n",
        ResumeOptions(),
    ),
    "resume-node-failure": (
        "pinned",
        'interrupt: {kind: node-failure, at_step: 7, command: [fail, "{node}", "{job}"]}\n',
        ResumeOptions(),
    ),
}


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(variable, raising=False)


def hold_against_golden(name: str, shown: str, folder: Path, update: bool) -> None:
    shown = shown.replace(str(folder), "/here").replace(str(Path(sys.executable).parent), "/venv/bin")
    shown = re.sub(r"/venv/bin/python[0-9.]*", "/venv/bin/python", shown)
    golden = GOLDEN / f"{name}.txt"
    if update:
        golden.write_text(shown)
    assert shown == golden.read_text()
    assert not (folder / "archive").exists()


@pytest.mark.parametrize("name", CASES)
def test_what_would_be_submitted(name: str, tmp_path: Path, plain_environment: None, update: bool) -> None:
    launcher, placement, more = CASES[name]
    path = tmp_path / "moe.yaml"
    path.write_text(RECIPE.format(launcher=launcher, placement=placement, more=more))
    shown = dry_run_pair(load_recipe(path), Archive(tmp_path / "archive"), PairOptions())
    hold_against_golden(name, shown, tmp_path, update)


@pytest.mark.parametrize("name", RESUMES)
def test_what_a_resume_check_would_submit(name: str, tmp_path: Path, plain_environment: None, update: bool) -> None:
    placement, interrupt, options = RESUMES[name]
    path = tmp_path / "moe.yaml"
    path.write_text(RECIPE.format(launcher="torchrun", placement=placement, more="") + CHECKPOINT + interrupt)
    shown = dry_run_resume(load_recipe(path), Archive(tmp_path / "archive"), options)
    hold_against_golden(name, shown, tmp_path, update)
