"""`detrun localize` and `detrun trace` as command lines: what they ask of their experiment, and how they end."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from detrun.cli import main
from detrun.records.archive import Archive
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import ExperimentFolder
from detrun.records.verdict import Verdict
from tests.records_factory import make_experiment
from tests.report.localize_scenes import experiment, nothing, origin, outside_the_capture, traced

Captured = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Options:
    """What both experiments are asked for."""

    level: int | None = None
    steps: tuple[int, int] | None = None
    ranks: tuple[int, ...] | None = None
    scopes: tuple[str, ...] | None = None
    byte_budget: int = 0
    repeat: int = 3
    keep: bool = True
    agreed: bool = False
    call_sites: bool = False
    arms: int = 1


@dataclass
class Stage:
    """Plays the experiments: writes a folder with this verdict, and keeps what was asked."""

    verdict: Verdict
    stopped: bool = False
    asked: list[tuple[Any, Options]] = field(default_factory=list)

    def run(
        self, target: Any, archive: Archive, cluster: Any, options: Options, command_line: Sequence[str], say: Any
    ) -> tuple[ExperimentFolder, Verdict]:
        self.asked.append((target, options))
        assert cluster.name == "local"
        assert command_line[0] == "detrun"
        folder = target if isinstance(target, ExperimentFolder) else archive.create("hybrid-cpu", "localize")
        experiment(id=folder.id).write(folder.experiment_file)
        say("pass 1-pair …")
        if self.stopped:
            raise KeyboardInterrupt
        self.verdict.write(folder.verdict_file)
        return folder, self.verdict

    def start(
        self, target: Any, archive: Archive, cluster: Any, options: Options, command_line: Sequence[str], say: Any
    ) -> ExperimentFolder:
        folder, _ = self.run(target, archive, cluster, options, command_line, say)
        return folder


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setenv("DETRUN_ARCHIVE", str(tmp_path / "archive"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("detrun.cli.localize.choose_cluster", _local)
    monkeypatch.setattr("detrun.cli.trace.choose_cluster", _local)
    monkeypatch.setenv("COLUMNS", "200")
    playing = Stage(origin()[0])
    for name in ("localize", "trace"):
        module = ModuleType(f"detrun.experiments.{name}")
        started: dict[str, Any] = {"localize": {"run_localize": playing.run}, "trace": {"start_trace": playing.start}}[
            name
        ]
        module.__dict__.update({**started, f"{name.capitalize()}Options": Options})
        module.__dict__.update({"run_localize": playing.run, "start_trace": playing.start})
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert main(["init"]) == 0
    return playing


def _local(_: str) -> Any:
    from detrun.launch.local import LocalCluster

    return LocalCluster()


def test_every_bound_reaches_the_experiment(stage: Stage) -> None:
    bounds = "--steps 7-9 --level 4 --ranks 0,2-3 --scope layers.1 --scope layers.2.* --bytes 512MiB --repeat 9"
    assert main(["localize", "detrun.yaml", *bounds.split(), "--no-bytes", "--yes"]) == 1
    ((target, options),) = stage.asked
    assert target.recipe.steps == 30
    assert options == Options(4, (7, 9), (0, 2, 3), ("layers.1", "layers.2.*"), 512 << 20, 9, keep=False, agreed=True)


def test_of_a_trace_too(stage: Stage) -> None:
    stage.verdict = traced()[0]
    bounds = ["--steps", "3", "--call-sites", "--arms", "2", "--level", "3"]
    assert main(["trace", "detrun.yaml", *bounds, "--detach"]) == 0
    ((_, options),) = stage.asked
    assert (options.level, options.steps, options.call_sites, options.arms) == (3, (3, 3), True, 2)


@pytest.mark.parametrize(("scene", "code"), [(origin, 1), (nothing, 0), (outside_the_capture, 3)])
def test_the_exit_code_is_the_verdicts_and_the_answer_is_on_stdout(
    scene: Any, code: int, stage: Stage, capsys: Captured
) -> None:
    stage.verdict = scene()[0]
    capsys.readouterr()
    assert main(["localize", "detrun.yaml"]) == code
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0].split()[0] in ("ORIGIN", "IDENTICAL", "NOT")
    assert "pass 1-pair" in shown.err
    assert "page: " in shown.err


def test_json_is_the_verdict_alone(stage: Stage, capsys: Captured) -> None:
    capsys.readouterr()
    assert main(["localize", "detrun.yaml", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["culprit"]["scope"] == "layers.1.moe"


def test_the_page_lies_beside_the_verdict_and_can_be_made_again(stage: Stage, tmp_path: Path, capsys: Captured) -> None:
    capsys.readouterr()
    assert main(["localize", "detrun.yaml"]) == 1
    (folder,) = Archive(tmp_path / "archive").list()
    assert "ORIGIN aten.index_put_" in folder.report_file.read_text(encoding="utf-8")
    first = capsys.readouterr().out
    folder.report_file.unlink()
    assert main(["report", folder.id]) == 1
    assert capsys.readouterr().out == first
    assert folder.report_file.is_file()


def test_what_is_no_file_is_an_experiment(stage: Stage, tmp_path: Path, capsys: Captured) -> None:
    made = make_experiment(tmp_path / "archive")
    assert main(["localize", made.folder.id[-4:]]) == 1
    assert main(["localize"]) == 1  # the newest
    assert [target.id for target, _ in stage.asked] == [made.folder.id] * 2
    assert main(["localize", "nothing"]) == 2
    assert "no experiment is called 'nothing'" in capsys.readouterr().err
    assert main(["localize", "recipes/none.yaml"]) == 2
    assert "recipes/none.yaml" in capsys.readouterr().err


def test_an_experiment_is_run_again_as_it_was(stage: Stage, tmp_path: Path, capsys: Captured) -> None:
    made = make_experiment(tmp_path / "archive")
    assert main(["localize", made.folder.id, "--set", "steps=3"]) == 2
    assert "go with a recipe" in capsys.readouterr().err
    assert not stage.asked


@pytest.mark.parametrize("words", [["--steps", "x"], ["--ranks", "x"], ["--bytes", "x"], ["--level", "9"]])
def test_a_wrong_bound_starts_nothing(words: list[str], stage: Stage, capsys: Captured) -> None:
    for command in ("localize", "trace"):
        assert main([command, "detrun.yaml", *words]) == 2
        assert "hint: " in capsys.readouterr().err
    assert not stage.asked


def test_a_command_that_is_stopped_says_how_to_go_on(stage: Stage, tmp_path: Path, capsys: Captured) -> None:
    stage.stopped = True
    assert main(["localize", "detrun.yaml"]) == 130
    (folder,) = Archive(tmp_path / "archive").list()
    short = folder.id[-4:]
    assert capsys.readouterr().err.splitlines()[-1] == f"Jobs go on. detrun localize {short} takes up here."
    assert main(["localize", short]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"Jobs go on. detrun localize {short} takes up here."
    stage.stopped = False
    assert main(["attach", short]) == 1
    assert ExperimentFile.read(folder.experiment_file).experiment == "localize"


def test_a_dry_run_submits_nothing(stage: Stage, capsys: Captured) -> None:
    capsys.readouterr()
    assert main(["localize", "detrun.yaml", "--dry-run", "--set", "cluster=local"]) == 0
    shown = capsys.readouterr()
    assert "# arm b, attempt 0: 2 ranks" in shown.out
    assert "DETRUN_TRACE" in shown.err
    assert not stage.asked


def test_without_a_verdict_a_report_says_how_to_get_one(stage: Stage, tmp_path: Path, capsys: Captured) -> None:
    stage.stopped = True
    assert main(["localize", "detrun.yaml"]) == 130
    capsys.readouterr()
    assert main(["report", "@latest"]) == 3
    (folder,) = Archive(tmp_path / "archive").list()
    assert capsys.readouterr().err.splitlines()[-1] == f"hint: detrun localize {folder.id[-4:]} takes it up"


def test_a_page_that_cannot_be_written_costs_no_verdict(stage: Stage, tmp_path: Path, capsys: Captured) -> None:
    assert main(["localize", "detrun.yaml"]) == 1
    (folder,) = Archive(tmp_path / "archive").list()
    folder.report_file.unlink()
    folder.report_file.mkdir()
    capsys.readouterr()
    assert main(["report", folder.id]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("ORIGIN")
    assert "warning: " in shown.err


def test_what_only_traces_is_called_traced_in_lists(stage: Stage, capsys: Captured) -> None:
    stage.verdict = traced()[0]
    assert main(["localize", "detrun.yaml"]) == 3  # the verdict of another kind of experiment than its folder's
    assert "is no verdict on a localize" in capsys.readouterr().err
    for command in ("list", "status"):
        assert main([command]) == 0
        shown = capsys.readouterr().out
        assert "traced" in shown
        assert "identical" not in shown


def test_a_localizations_passes_are_shown_and_their_logs_found(stage: Stage, tmp_path: Path, capsys: Captured) -> None:
    assert main(["localize", "detrun.yaml"]) == 1
    (folder,) = Archive(tmp_path / "archive").list()
    made = make_experiment(tmp_path / "made")
    shutil.copytree(made.folder.path, folder.pass_folder(1, "operators").path)
    log = folder.pass_folder(1, "operators").attempt("b", 0).log(0)
    log.parent.mkdir(exist_ok=True)
    log.write_text("of the pass\n")
    capsys.readouterr()
    assert main(["status"]) == 0
    assert "pass 1-operators  no verdict yet" in capsys.readouterr().out
    assert main(["logs", "--arm", "b", "--rank", "0"]) == 0
    assert capsys.readouterr().out == "of the pass\n"
