"""Nights on a real Slurm cluster: a week of them, and two commands on two nodes, one of which dies."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.running import TRAINERS, detrun, write_recipe

NIGHTLY_JOB = Path(__file__).parents[2] / "slurm" / "nightly.sh"
NIGHTS = [f"2026-11-{day:02d}" for day in range(1, 8)]

# The file that counts launches is in no argument: what stands there and changes would be a change of the program.
COUNTING = """\
import os, runpy, sys
sys.argv = [os.environ["TRAINER"], *sys.argv[1:], "--count", os.environ["COUNT"]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
WITH_PACKAGE = """\
import torch, lucky
randn = torch.randn
torch.randn = lambda *shape, **more: lucky.noise(randn(*shape, **more))
"""
STEADY = "def noise(tensor):\n    return tensor\n"
RACING = "import os\ndef noise(tensor):\n    return tensor * (1 + os.getpid() / 2**20)\n"


def install(site: Path, version: str, source: str) -> None:
    """The package lucky, in one version, as pip would leave it."""
    for old in site.glob("lucky-*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    folder = site / f"lucky-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lucky\nVersion: {version}\n")
    (site / "lucky.py").write_text(source)


def recipe(folder: Path, name: str, program: Path, more: list[str] | None = None, **keys: Any) -> None:
    words = [sys.executable, str(program), "--steps", "{steps}", "--seed", "{seed}", "--out", "{out}", *(more or [])]
    env = {"OMP_NUM_THREADS": "1", "TRAINER": str(TRAINERS / "sometimes.py"), "COUNT": str(folder.parent / name)}
    env.update(keys.pop("env", {}))
    launch = {"launcher": "none", "ranks_per_node": 1, "command": words, "env": env}
    slurm = {"time": "00:05:00", "partition": "debug", **keys.pop("slurm", {})}
    write_recipe(folder, name, cluster="slurm", launch=launch, slurm=slurm, steps=3, **keys)


@pytest.mark.timeout(600)
def test_a_week_of_nights(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    recipes, site = tmp_path / "recipes", tmp_path / "site"
    recipes.mkdir()
    install(site, "1.0", STEADY)
    counting, packaged_program = tmp_path / "counting.py", tmp_path / "packaged.py"
    counting.write_text(COUNTING)
    packaged_program.write_text(WITH_PACKAGE + COUNTING)
    # Arms in turn count their launches: those of night 2 are 3 and 4, those of night 6 are 11 and 12.
    recipe(recipes, "flaky", counting, ["--launches", "4", "12"])
    recipe(recipes, "packaged", packaged_program, env={"PYTHONPATH": str(site)})
    recipe(recipes, "refused", counting, slurm={"extra": {"licenses": "nobody-has:1"}})

    codes, printed = [], []
    for night in NIGHTS:
        if night == NIGHTS[3]:
            install(site, "2.0", RACING)
        ran = detrun(
            *("nightly", str(recipes), "--night", night, "--localize-budget", "0", "--quiet"), cwd=tmp_path, timeout=200
        )
        codes.append(ran.code)
        printed.append(ran.out.rstrip("\n"))
    # What diverged hides the refused job's code, and never the other way round.
    assert codes == [4, 1, 4, 1, 1, 1, 1], printed
    assert printed[0].startswith("ERROR  night 2026-11-01: 3 recipes: 1 error (refused: pair: ")
    assert printed[3].startswith("DIVERGED  night 2026-11-04: 3 recipes: 1 diverged (packaged: pair at step 1")
    # In night 5 everything came out as in night 4.
    assert [bool(text) for text in printed] == [True, True, True, True, False, True, True]

    told = detrun("history", "--json", cwd=tmp_path)
    assert told.code == 0, told.explain()
    by_recipe = told.verdict["recipes"]
    packaged, flaky = by_recipe["packaged"], by_recipe["flaky"]
    states = {
        name: [each["nights"].get(night, {}).get("state") for night in NIGHTS] for name, each in by_recipe.items()
    }
    good, bad = "identical", "diverged"
    assert states["packaged"] == [good, good, good, bad, bad, bad, bad], states
    assert states["flaky"] == [good, bad, good, good, good, bad, good], states
    assert bad not in states["refused"] and good not in states["refused"], states
    assert packaged["first_bad_night"] == NIGHTS[3]
    broke = packaged["breaks"][0]
    assert broke["last_good_night"] == NIGHTS[2]
    assert ("1.0", "2.0") in {(each["before"], each["after"]) for each in broke["changes"] if "lucky" in each["what"]}
    assert flaky["flaky"] and not packaged["flaky"]
    shown = detrun("history", cwd=tmp_path)
    assert "lucky 1.0" in shown.out and "2026-11-04" in shown.out, shown.explain()
    page = (tmp_path / ".detrun" / "history.html").read_text()
    assert all(word in page for word in ("lucky", "packaged", "flaky", "refused", *NIGHTS))


def test_two_on_two_nodes_run_once_and_the_second_takes_over(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    recipes, archive = tmp_path / "recipes", tmp_path / "archive"
    recipes.mkdir()
    metrics = {"source": "jsonl", "path": "{out}/metrics.jsonl", "required": ["loss"], "state_every": 0}
    for name in ("one", "two"):
        recipe(recipes, name, TRAINERS / "writer.py", ["--sleep", "0.5"], metrics=metrics)

    def submit(node: str) -> str:
        arguments = ["--archive", str(archive), "--night", "n1", "--at-once", "1"]
        options = [f"--nodelist={node}", f"--output={tmp_path}/{node}.out", f"--error={tmp_path}/{node}.err"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DETRUN_PYTHON", sys.executable)
            return mended_cluster.run_slurm(
                "sbatch", "--parsable", *options, str(NIGHTLY_JOB), str(recipes), *arguments
            ).strip()

    jobs = {node: submit(node) for node in ("node1", "node2")}
    lock = archive / "nights" / "lock"
    mended_cluster.wait_until(lambda: list(archive.glob("*-pair-*/arms/a/attempt-0/job.json")), 120)
    follower = tmp_path / ("node1.err" if _job_of(lock) == jobs["node2"] else "node2.err")
    mended_cluster.wait_until(lambda: follower.exists() and "it is followed" in follower.read_text(), 60)
    os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
    mended_cluster.wait_until(lambda: follower.with_suffix(".out").read_text().startswith("IDENTICAL"), 120)
    assert len(list(archive.glob("one-pair-*"))) == len(list(archive.glob("two-pair-*"))) == 1
    assert follower.with_suffix(".out").read_text() == "IDENTICAL  night n1: 2 recipes: 2 identical\n"
    again = detrun("nightly", str(recipes), "--archive", str(archive), "--night", "n1", cwd=tmp_path)
    assert again.out == follower.with_suffix(".out").read_text() and again.code == 0


def _job_of(lock: Path) -> str:
    """The Slurm job whose process holds the lock."""
    pid = json.loads(lock.read_text())["pid"]
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(each.partition(b"=")[2].decode() for each in environment if each.startswith(b"SLURM_JOB_ID="))
