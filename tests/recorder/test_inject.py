"""How the recorder comes into a process, and which processes it stays out of."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from detrun.recorder.export import export_recorder
from tests.recorder import programs
from tests.recorder.harness import run

TRAIN = """
import os, sys
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_  # by name
net = nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    net(torch.ones(2, 3)).mean().backward()
    clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    export_recorder(folder)
    return folder


def python(code: str, exported: Path, *paths: Path, attempt: Path | None = None, **env: str) -> str:
    """Run code in a fresh process whose PYTHONPATH begins with the exported recorder. Raises if it fails."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DETRUN_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (exported, *paths)))
    if attempt is not None:
        environment["DETRUN_ATTEMPT_DIR"] = str(attempt)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **env}, cwd=exported, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_export_holds_what_the_recorder_imports_and_no_more(exported: Path) -> None:
    files = {str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file()}
    assert {"sitecustomize.py", "detrun/__init__.py", "detrun/recorder/hooks.py", "detrun/fingerprint/host.py"} <= files
    assert all(name.endswith(".py") for name in files)
    assert not [name for name in files if "launch" in name or "report" in name]
    assert {name for name in files if "/records/" in name} == {
        "detrun/records/__init__.py",
        "detrun/records/kept_writer.py",
        "detrun/records/metrics_writer.py",
        "detrun/records/state_row.py",
        "detrun/records/state_writer.py",
        "detrun/records/trace_row.py",
        "detrun/records/trace_writer.py",
    }
    code = f"""
import importlib, pkgutil, sys
import detrun
assert detrun.__file__.startswith({str(exported)!r})
detrun.__path__ = [entry for entry in detrun.__path__ if entry.startswith({str(exported)!r})]
for module in pkgutil.walk_packages(detrun.__path__, "detrun."):
    if "inject" not in module.name:
        importlib.import_module(module.name)
heavy = set(sys.modules) & {{"pandas", "pydantic", "rich", "pyarrow", "typer", "yaml"}}
assert not heavy, heavy
"""
    python(code, exported)


def test_an_unchanged_script_is_recorded(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    code = "import runpy; runpy.run_path('train.py', run_name='__main__')"
    env = {"DETRUN_DETERMINISM": "strict", "RANK": "3"}
    python(f"import os; os.chdir({str(tmp_path)!r}); " + code, exported, attempt=tmp_path / "x", **env)
    lines = (tmp_path / "x" / "metrics" / "rank00003.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert json.loads(lines[0])["metrics"]["grad_norm"]["source"] == "clip_grad_norm_"
    environment = json.loads((tmp_path / "x" / "environment" / "rank00003.json").read_text())
    assert environment["torch"]["deterministic_algorithms"] is True
    assert environment["initial"]["rng"]["torch_cpu"] == "unseeded"
    assert environment["seeds"]["torch_initial_seed"] is None


def test_it_stays_out_where_detrun_did_not_start_the_process(exported: Path) -> None:
    code = (
        "import sys, torch, detrun; detrun.record(1, loss=2.0)\n"
        "assert 'detrun.recorder' not in sys.modules\n"
        "assert torch.nn.Module.__call__.__module__ == 'torch.nn.modules.module'"
    )
    python(code, exported)


def test_record_without_a_recorder_imports_nothing(exported: Path) -> None:
    code = "import sys, detrun; detrun.record(1, loss=2.0); assert not {'torch', 'numpy', 'pandas'} & set(sys.modules)"
    python(code, exported)


def test_a_program_without_torch_is_recorded_from_its_own_calls(exported: Path, tmp_path: Path) -> None:
    code = "import sys, detrun\nfor k in range(3): detrun.record(k, loss=0.5)\nassert 'torch' not in sys.modules"
    python(code, exported, attempt=tmp_path)
    lines = (tmp_path / "metrics" / "rank00000.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_the_sitecustomize_it_hides_is_run(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['HIDDEN_ONE'] = 'ran'\n")
    assert python("import os; print(os.environ['HIDDEN_ONE'])", exported, tmp_path).strip() == "ran"
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('its own trouble')\n")
    assert "its own trouble" in python("import sys", exported, tmp_path, PYTHONVERBOSE="", attempt=tmp_path)


def test_a_broken_recorder_leaves_a_note_and_the_program_runs(tmp_path: Path) -> None:
    export_recorder(tmp_path / "broken")
    (tmp_path / "broken" / "detrun" / "recorder" / "observer.py").write_text("raise RuntimeError('broken')\n")
    assert "trained" in python(TRAIN + "print('trained')", tmp_path / "broken", attempt=tmp_path / "x")
    (note,) = (tmp_path / "x" / "recorder").glob("failed-*.txt")
    assert "RuntimeError: broken" in note.read_text()
    assert not (tmp_path / "x" / "metrics").exists()


def with_loader_workers() -> dict[str, bytes]:
    from torch.utils.data import DataLoader, TensorDataset

    programs.seed()
    net = programs.Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(12, 6))
    for (x,) in DataLoader(data, batch_size=4, shuffle=True, num_workers=2, multiprocessing_context="fork"):
        optimizer.zero_grad()
        net(x).mean().backward()
        optimizer.step()
    return programs.ending([net], [optimizer])


def test_forked_loader_workers_write_nothing(tmp_path: Path) -> None:
    plain = run(with_loader_workers, tmp_path / "plain", recorded=False)
    done = run(with_loader_workers, tmp_path / "a")
    assert done.result == plain.result
    assert [line["step"] for line in done.lines()] == [1, 2, 3]
    assert [path.name for path in (done.attempt / "metrics").iterdir()] == ["rank00000.jsonl"]
    assert done.cost()["warnings"] == []


def forks(*, before: bool) -> None:
    if before:
        _forked_training()
    programs.plain(2)
    if not before:
        _forked_training()
    programs.plain(1)


def _forked_training() -> None:
    child = os.fork()
    if child == 0:
        programs.clipped(5)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("before", [True, False])
def test_a_forked_helper_that_trains_is_not_this_rank(before: bool, tmp_path: Path) -> None:
    done = run(lambda: forks(before=before), tmp_path)
    assert [line["step"] for line in done.lines()] == [1, 2, 3]
    assert len(list((tmp_path / "metrics").iterdir())) == 1


def trains_in_a_child(*, parent_too: bool) -> None:
    child = multiprocessing.get_context("fork").Process(target=programs.clipped)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    if parent_too:
        programs.plain()


@pytest.mark.parametrize("parent_too", [True, False])
def test_a_program_may_train_in_a_process_that_it_forks(parent_too: bool, tmp_path: Path) -> None:
    done = run(lambda: trains_in_a_child(parent_too=parent_too), tmp_path)
    assert [line["step"] for line in done.lines()] == [1, 2, 3]
    assert done.environment()["rank"] == 0
    conflicts = list((tmp_path / "metrics").glob("rank00000.conflict-*"))
    assert len(conflicts) == int(parent_too)  # nobody can know which of them was meant


def trains_unseeded_in_a_child() -> None:
    def train() -> None:
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(2, 3)).mean().backward()
        optimizer.step()

    random.seed(1)
    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join(60)


def test_python_seeds_its_stream_anew_in_a_forked_process(tmp_path: Path) -> None:
    assert run(trains_unseeded_in_a_child, tmp_path).environment()["initial"]["rng"]["python"] == "unseeded"


def test_a_second_process_of_the_same_rank_is_noted(tmp_path: Path) -> None:
    run(programs.plain, tmp_path)
    before = (tmp_path / "metrics" / "rank00000.jsonl").read_bytes()
    run(programs.clipped, tmp_path)
    assert (tmp_path / "metrics" / "rank00000.jsonl").read_bytes() == before
    assert len(list((tmp_path / "metrics").glob("rank00000.conflict-*"))) == 1


def full_disk() -> list[int]:
    from detrun.records.metrics_writer import MetricsWriter

    write = MetricsWriter.write
    calls = []

    def failing(self: MetricsWriter, line: bytes) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        write(self, line)

    MetricsWriter.write = failing  # type: ignore[method-assign]
    programs.plain(5)
    return calls


def test_a_full_disk_ends_the_records_and_not_the_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = run(full_disk, tmp_path)
    assert len(done.lines()) == 1
    assert len(done.result) == 2
    said = capfd.readouterr().err
    assert said.count("No space left on device") == 1
    assert "not verified" in said


def test_a_folder_that_cannot_be_written_does_not_stop_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = "import detrun.recorder\n" + TRAIN + "print('trained')"
    export_recorder(tmp_path / "recorder")
    assert "trained" in python(code, tmp_path / "recorder", attempt=tmp_path / "file")


def helper_that_trains() -> None:
    programs.plain()
    export = os.environ["EXPORTED"]
    subprocess.run([sys.executable, "-c", TRAIN], env={**os.environ, "PYTHONPATH": export}, check=True)


def test_a_process_that_the_rank_starts_and_that_trains_is_no_rival(exported: Path, tmp_path: Path) -> None:
    done = run(helper_that_trains, tmp_path, EXPORTED=str(exported))
    assert len(done.lines()) == 3
    assert [path.name for path in (tmp_path / "metrics").iterdir()] == ["rank00000.jsonl"]
    assert len(list((tmp_path / "recorder").glob("rank00000.helper-*"))) == 1


def leaves_at_once() -> None:
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    never_used = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    for _ in range(3):
        net(torch.ones(2, 3)).mean().backward()
        optimizer.step()
    (Path(os.environ["DETRUN_ATTEMPT_DIR"]) / "result").write_bytes(pickle.dumps(bool(never_used)))
    os._exit(0)


def test_a_program_that_leaves_by_os_exit_loses_no_step(tmp_path: Path) -> None:
    assert [line["step"] for line in run(leaves_at_once, tmp_path).lines()] == [1, 2, 3]


def adds_to_its_arguments() -> None:
    sys.argv.append("--run-name=17:03:59")
    programs.plain()


def test_the_arguments_are_those_that_the_program_was_given(tmp_path: Path) -> None:
    assert "--run-name=17:03:59" not in run(adds_to_its_arguments, tmp_path).environment()["python"]["argv"]


def trains_in_a_deleted_folder() -> None:
    folder = Path(os.environ["DETRUN_ATTEMPT_DIR"]) / "gone"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    programs.plain()


def test_a_program_whose_working_folder_is_gone_is_recorded(tmp_path: Path) -> None:
    done = run(trains_in_a_deleted_folder, tmp_path)
    assert done.environment()["python"]["cwd"] == "(deleted)"
    assert all("gradients" in line["state"] for line in done.lines())


def closes_what_it_does_not_know() -> list[str]:
    """And then opens files of its own, which get the numbers of those it closed."""
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    folder = Path(os.environ["DETRUN_ATTEMPT_DIR"])
    own = []
    for step in range(4):
        net(torch.ones(2, 3)).mean().backward()
        optimizer.step()
        if step == 1:
            os.closerange(3, 64)
            own = [os.open(folder / f"own{index}", os.O_RDWR | os.O_CREAT) for index in range(61)]
    return [os.pread(file, 100, 0).decode() for file in own]


def test_a_program_that_closes_all_descriptors_is_recorded_and_its_files_are_its_own(tmp_path: Path) -> None:
    done = run(closes_what_it_does_not_know, tmp_path)
    assert [line["step"] for line in done.lines()] == [1, 2, 3, 4]
    assert set(done.result) == {""}
