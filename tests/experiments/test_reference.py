"""When an earlier pair's arm may stand in for the reference: only where everything that can be known is the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from detrun.experiments.checks import PairOptions
from detrun.experiments.pair import start_pair
from detrun.experiments.reference import ReferenceArm, find_reference
from detrun.experiments.resume import ResumeOptions, plan_resume, start_resume
from detrun.recipe import load_recipe
from detrun.recorder.environment import redacted
from detrun.records.archive import Archive
from detrun.records.jobs import ExperimentFile, JobFile
from detrun.records.layout import ExperimentFolder
from detrun.records.verdict import Verdict
from tests.experiments.resuming import plain_recipe
from tests.fakes import Clock, ScriptedCluster
from tests.running import TRAINERS


class Bench:
    """A program of its own, and an archive with one identical pair of it that never really ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "program" / "train.py"
        self.program.parent.mkdir()
        shutil.copy(TRAINERS / "plain.py", self.program)
        (self.program.parent / "model.py").write_text("width = 8\n")
        self.archive = Archive(folder / "archive")
        self.path = plain_recipe(
            folder,
            launch={
                "launcher": "none",
                "ranks_per_node": 1,
                "command": [sys.executable, str(self.program), "--steps", "{steps}", "--out", "{out}"],
                "env": {"LR": "0.1"},
            },
        )
        self.cluster = ScriptedCluster(Clock(), name="local")
        self.pair = self.run_pair()

    def run_pair(self, verdict: str = "identical", *overrides: str) -> ExperimentFolder:
        loaded = load_recipe(self.path, overrides)
        folder = start_pair(loaded, self.archive, self.cluster, PairOptions(), ["detrun"], lambda _: None)
        (request,) = self.cluster.requests[-1:]
        for segment in request.spec.segments:
            attempt = folder.attempt(segment.arm, 0)
            JobFile(arm=segment.arm, state="done", exit_code=0).write(attempt.job_file)
            launched = {"env": segment.env, "inherited": redacted(os.environ)["clear"]}
            (attempt.path / "launch.json").write_text(json.dumps(launched))
            program = (
                "import json; from detrun.recorder.environment import describe_process as d; print(json.dumps(d(0)))"
            )
            seen = subprocess.run(
                [sys.executable, "-c", f"import sys; del sys.path[0]; {program}"],
                env={**os.environ, **segment.env},
                cwd=self.folder,
                check=True,
                capture_output=True,
            )
            attempt.environment_dir.mkdir()
            attempt.environment(0).write_bytes(seen.stdout)
        answer = Verdict(id=folder.id, experiment="pair", recipe="plain", verdict=verdict, exit_code=0)
        answer.write(folder.verdict_file)
        return folder

    def find(self, *overrides: str, cluster: str = "local") -> ReferenceArm | str:
        loaded = load_recipe(self.path, overrides)
        planned = plan_resume(loaded, ExperimentFolder(self.folder / "x"), cluster, ResumeOptions(), dict(os.environ))
        return find_reference(self.archive, loaded, cluster, planned.requests[0].spec.segments[0])


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_clean_pairs_arm_stands_in_and_is_not_run_again(bench: Bench) -> None:
    found = bench.find()
    assert isinstance(found, ReferenceArm), found
    assert (found.folder.id, found.arm) == (bench.pair.id, "a")
    said: list[str] = []
    loaded = load_recipe(bench.path)
    folder = start_resume(loaded, bench.archive, bench.cluster, ResumeOptions(), ["detrun"], said.append)
    assert {segment.arm for segment in bench.cluster.requests[-1].spec.segments} == {"b"}
    asked = ExperimentFile.read(folder.experiment_file)
    assert asked.reference is not None
    assert (asked.reference.experiment, asked.reference.path) == (bench.pair.id, str(bench.pair.path))
    assert not folder.arm_dir("a").exists()
    assert said == [f"the reference is arm a of {bench.pair.id}; --fresh runs it anew"]
    assert bench.cluster.requests[-1].spec.reference == str(bench.pair.attempt("a", 0).path)


def test_fresh_runs_it_anew(bench: Bench) -> None:
    start_resume(
        load_recipe(bench.path), bench.archive, bench.cluster, ResumeOptions(fresh=True), ["detrun"], lambda _: None
    )
    assert [segment.arm for segment in bench.cluster.requests[-1].spec.segments] == ["a", "b", "b"]


@pytest.mark.parametrize("override", ["interrupt={kind: kill, at_step: 5}", "placement=allocation", "watchdog.start=7"])
def test_what_does_not_touch_an_undisturbed_arm_may_differ(bench: Bench, override: str) -> None:
    assert isinstance(bench.find(override), ReferenceArm)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("steps=11", "steps of the recipe has changed"),
        ("seed=5", "seed of the recipe has changed"),
        ("launch.env.LR=0.2", "launch.env of the recipe has changed"),
        ("checkpoint.save_every=2", "checkpoint.save_every of the recipe has changed"),
        ("arms.a.args=[x]", "arm a has something beside the rest (arms.a)"),
        ("interrupt={kind: signal, at_step: 5}", "its state was not captured at every step that is needed"),
    ],
)
def test_another_recipe(bench: Bench, override: str, why: str) -> None:
    assert str(bench.find(override)).endswith(why)


def edit_program(bench: Bench, _patch: pytest.MonkeyPatch) -> None:
    bench.program.write_text(bench.program.read_text() + "\n# another\n")


def edit_what_it_imports(bench: Bench, _patch: pytest.MonkeyPatch) -> None:
    (bench.program.parent / "model.py").write_text("width = 9\n")


def add_a_module(bench: Bench, _patch: pytest.MonkeyPatch) -> None:
    (bench.program.parent / "random.py").write_text("")


def set_a_variable(_bench: Bench, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("MKL_CBWR", "COMPATIBLE")


def change_a_package(bench: Bench, _patch: pytest.MonkeyPatch) -> None:
    path = bench.pair.attempt("a", 0).environment(0)
    document = json.loads(path.read_text())
    document["packages"]["torch"] = "1.0"
    path.write_text(json.dumps(document))


def move_to_another_machine(bench: Bench, _patch: pytest.MonkeyPatch) -> None:
    path = bench.pair.attempt("a", 0).environment(0)
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere"}))


def change_the_recorder(bench: Bench, _patch: pytest.MonkeyPatch) -> None:
    path = bench.pair.recorder_dir / "detrun" / "recorder" / "session.py"
    path.write_text(path.read_text() + "\n")


def lose_the_records(bench: Bench, _patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(bench.pair.attempt("a", 0).environment_dir)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (edit_program, "train.py has changed"),
        (edit_what_it_imports, "model.py has changed"),
        (add_a_module, "random.py has changed"),
        (set_a_variable, "MKL_CBWR was not set and is COMPATIBLE"),
        (change_a_package, "torch was 1.0 and is "),
        (move_to_another_machine, "it ran on elsewhere, and this is "),
        (change_the_recorder, "detrun's recorder has changed"),
        (lose_the_records, "the archive holds no identical pair of this recipe"),
    ],
)
def test_another_program_or_surroundings(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, change: Callable[[Bench, pytest.MonkeyPatch], None], why: str
) -> None:
    change(bench, monkeypatch)
    found = bench.find()
    assert isinstance(found, str) and why in found, found


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_another_commit_and_what_is_not_committed(bench: Bench) -> None:
    git(bench.folder, "init")
    (bench.folder / ".gitignore").write_text("/archive\n/plain.yaml\n")
    (bench.folder / "settings.json").write_text("{}")
    git(bench.folder, "add", ".")
    git(bench.folder, "commit", "-m", "x")
    assert "the commit or the state of the working tree has changed" in str(bench.find())
    bench.run_pair()
    assert isinstance(bench.find(), ReferenceArm)
    (bench.folder / "settings.json").write_text('{"x": 1}')
    assert "the commit or the state of the working tree has changed" in str(bench.find())
    bench.run_pair()
    assert isinstance(bench.find(), ReferenceArm)
    (bench.folder / "settings.json").write_text('{"x": 2}')
    assert "what is not committed has changed" in str(bench.find())


@pytest.mark.parametrize("verdict", ["diverged", "not-verified"])
def test_only_an_identical_pair_will_do(bench: Bench, verdict: str) -> None:
    answer = Verdict.read(bench.pair.verdict_file)
    answer.model_copy(update={"verdict": verdict}).write(bench.pair.verdict_file)
    assert bench.find() == "the archive holds no identical pair of this recipe"


def test_an_older_fitting_one_is_found_behind_a_newer_that_differs(bench: Bench) -> None:
    bench.run_pair("identical", "seed=5")
    found = bench.find()
    assert isinstance(found, ReferenceArm) and found.folder.id == bench.pair.id


def test_another_cluster(bench: Bench) -> None:
    assert "it ran on local, and this is to run on slurm" in str(bench.find(cluster="slurm"))
