"""The log of saves: outermost ones to a file, whatever name they are called by, with where the training was."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import detrun.recorder
from tests.recorder.harness import Run, run
from tests.recorder.programs import batch


def saves(one: Run) -> list[dict[str, Any]]:
    lines = (one.attempt / "saves" / "rank00000.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def told(one: Run) -> list[tuple[Any, ...]]:
    return [(s["event"], s["writer"], s["path"] and Path(s["path"]).name, s["step"]) for s in saves(one)]


def training(save: Callable[[dict[str, Any], int], Any], steps: int = 2) -> None:
    net = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        net(batch(step)).mean().backward()
        optimizer.step()
        save(net.state_dict(), step)


def pair(writer: str, name: str, step: int) -> list[tuple[Any, ...]]:
    return [("begin", writer, name, step), ("end", writer, name, step)]


def test_each_save_is_logged_with_its_place_and_position(tmp_path: Path) -> None:
    target = tmp_path / "net.pt"
    whole = run(lambda: training(lambda state, _: torch.save(state, target)), tmp_path / "a")
    assert told(whole) == [*pair("torch.save", "net.pt", 1), *pair("torch.save", "net.pt", 2)]
    first, second, *_ = saves(whole)
    assert first.keys() == {"v", "event", "path", "writer", "step", "microbatch", "time"}
    assert (first["v"], first["path"], first["microbatch"]) == (1, str(target), 0)
    assert 1e9 < first["time"] <= second["time"]
    assert torch.load(target)["weight"].shape == (1, 6)


def all_targets(folder: Path) -> None:
    def save(state: dict[str, Any], step: int) -> None:
        torch.save(state, io.BytesIO())
        torch.save(state, str(folder / "text.pt"))
        with (folder / "opened.pt").open("wb") as file:
            torch.save(state, file)
        torch.save(obj=state, f=folder / "named.pt")
        with zipfile.ZipFile(folder / "archive.zip", "w") as archive, archive.open("net.pth", "w") as record:
            torch.save(state, record)
        with zipfile.ZipFile(io.BytesIO(), "w") as archive, archive.open("net.pth", "w") as record:
            torch.save(state, record)

    training(save, steps=1)


def test_files_count_by_name_or_opened_and_memory_does_not(tmp_path: Path) -> None:
    whole = run(lambda: all_targets(tmp_path), tmp_path / "a")
    names = [name for event, _, name, _ in told(whole) if event == "begin"]
    assert names == ["text.pt", "opened.pt", "named.pt", "archive.zip"]
    assert sorted(path.name for path in (whole.attempt / "state").iterdir()) == ["end-00000001"]


def before_training(folder: Path) -> None:
    torch.save({}, folder / "vocabulary.pt")
    training(lambda state, _: torch.save(state, folder / "net.pt"), steps=1)


def test_what_is_saved_before_training_is_no_checkpoint(tmp_path: Path) -> None:
    assert told(run(lambda: before_training(tmp_path), tmp_path / "a")) == pair("torch.save", "net.pt", 1)


def failing(folder: Path) -> str:
    def save(state: dict[str, Any], step: int) -> None:
        torch.save(state, folder / "nowhere" / "net.pt")

    try:
        training(save)
    except RuntimeError as error:
        torch.save({}, folder / "after.pt")
        return str(error)
    return ""


def test_a_save_that_fails_has_no_end_and_raises_as_it_would(tmp_path: Path) -> None:
    plain = run(lambda: failing(tmp_path), tmp_path / "plain", recorded=False)
    whole = run(lambda: failing(tmp_path), tmp_path / "a")
    assert whole.result == plain.result != ""
    assert told(whole) == [("begin", "torch.save", "net.pt", 1), *pair("torch.save", "after.pt", 1)]


def under_another_name_first(folder: Path) -> None:
    def save(state: dict[str, Any], step: int) -> None:
        torch.save(state, folder / "latest.tmp")
        (folder / "latest.tmp").replace(folder / "latest.pt")
        draft = folder / f".step-{step}"
        draft.mkdir()
        torch.save(state, draft / "net.pt")
        torch.save(state, draft / "more.pt")
        shutil.move(draft, folder / f"step-{step}")
        (folder / f"step-{step}" / "more.pt").rename(folder / f"step-{step}" / "rest.pt")
        (folder / "notes").write_text("x")
        os.rename(folder / "notes", folder / "notes.txt")  # noqa: PTH104 - the other way to say it

    training(save, steps=1)


def test_what_is_renamed_after_its_save_was_saved_under_its_last_name(tmp_path: Path) -> None:
    whole = run(lambda: under_another_name_first(tmp_path), tmp_path / "a")
    log = [(line["event"], str(Path(line["path"]).relative_to(tmp_path)), line["step"]) for line in saves(whole)]
    expected = [
        "latest.tmp", "latest.pt", ".step-1/net.pt", ".step-1/more.pt", "step-1/net.pt", "step-1/more.pt",
        "step-1/rest.pt",
    ]  # fmt: skip
    assert log == [(event, path, 1) for path in expected for event in ("begin", "end")]
    assert whole.cost()["warnings"] == []


class _Writing:
    """Saves something of its own while it is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        torch.save({}, self.folder / "inner.pt")
        return (dict, ())


def test_a_save_inside_a_save_is_a_part_of_it(tmp_path: Path) -> None:
    program = lambda: training(lambda *_: torch.save(_Writing(tmp_path), tmp_path / "outer.pt"), steps=1)  # noqa: E731
    assert told(run(program, tmp_path / "a")) == pair("torch.save", "outer.pt", 1)
    assert (tmp_path / "inner.pt").exists()


def from_a_thread(folder: Path) -> None:
    def save(state: dict[str, Any], step: int) -> None:
        thread = threading.Thread(target=torch.save, args=(state, folder / "net.pt"))
        thread.start()
        thread.join()

    training(save)


def test_another_thread_does_not_know_where_training_is(tmp_path: Path) -> None:
    whole = run(lambda: from_a_thread(tmp_path), tmp_path / "a")
    assert (tmp_path / "net.pt").exists()
    assert not (whole.attempt / "saves").exists() and not (whole.attempt / "state").exists()


def with_safetensors(folder: Path) -> None:
    import safetensors.numpy
    from safetensors.torch import save_file as write
    from safetensors.torch import save_model

    def save(state: dict[str, Any], step: int) -> None:
        write(state, folder / "torch.safetensors")
        save_model(nn.Linear(2, 2), str(folder / "model.safetensors"))
        safetensors.numpy.save_file({"w": state["weight"].numpy()}, folder / "numpy.safetensors")

    training(save, steps=1)


def test_safetensors_is_seen_though_it_comes_later_and_under_another_name(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    assert told(run(lambda: with_safetensors(tmp_path), tmp_path / "a")) == [
        *pair("safetensors", "torch.safetensors", 1),
        *pair("safetensors", "model.safetensors", 1),
        *pair("safetensors", "numpy.safetensors", 1),
    ]


DISTRIBUTED = """
import os, sys, torch
from torch import nn
from pathlib import Path
folder = Path(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
net = nn.Linear(6, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(2, 6)).mean().backward()
optimizer.step()
state = {"net": net.state_dict()}
dcp_save(state, checkpoint_id=folder / "one")
dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "two"))
dcp.async_save(state, checkpoint_id=str(folder / "three")).result()
loaded = {"net": {name: torch.zeros_like(t) for name, t in net.state_dict().items()}}
for name in ("one", "two", "three"):
    dcp.load(loaded, checkpoint_id=folder / name)
    assert torch.equal(loaded["net"]["weight"], net.weight)
torch.distributed.destroy_process_group()
"""


def test_distributed_checkpoints_are_one_save_each(tmp_path: Path) -> None:
    """In a process of its own: the recorder comes in before the module that saves is imported."""
    inject = Path(detrun.recorder.__file__).parent / "inject"
    root = Path(detrun.__file__).parents[1]
    env = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{inject}:{root}",
        "DETRUN_ATTEMPT_DIR": str(tmp_path / "a"),
        "OMP_NUM_THREADS": "1",
        "HOME": str(tmp_path),
    }
    (tmp_path / "a").mkdir()
    command = [sys.executable, "-c", DISTRIBUTED, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    whole = Run(tmp_path / "a", None)
    log = told(whole)
    assert log[:4] == [*pair("dcp.save", "one", 1), *pair("dcp.save", "two", 1)]
    assert log[4:] == pair("dcp.async_save", "three", 1)
    assert whole.cost()["warnings"] == []


def many_files(folder: Path) -> None:
    def save(state: dict[str, Any], step: int) -> None:
        for part in ("model", "optimizer", "rng"):
            torch.save(state, folder / f"{part}.pt")

    training(save)


def test_the_files_of_one_checkpoint_are_one_boundary(tmp_path: Path) -> None:
    whole = run(lambda: many_files(tmp_path), tmp_path / "a")
    assert [entry[2:] for entry in told(whole) if entry[0] == "begin"] == [
        (f"{part}.pt", step) for step in (1, 2) for part in ("model", "optimizer", "rng")
    ]
    names = sorted(path.name for path in (whole.attempt / "state").iterdir())
    assert names == ["begin-00000002", "end-00000001", "end-00000002"]


def events(folder: Path) -> list[tuple[Any, ...]]:
    """What a planned interruption would be told."""
    seen: list[tuple[Any, ...]] = []

    class Spy:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args: seen.append((name, *args))

    session = detrun.recorder._session
    if session is not None:
        session.interruption = Spy()
    training(lambda state, _: torch.save(state, folder / "net.pt"), steps=2)
    return seen


def test_an_interruption_is_told_what_happens_in_order(tmp_path: Path) -> None:
    path = str(tmp_path / "net.pt")
    whole = run(lambda: events(tmp_path), tmp_path / "a")
    assert whole.result == [
        ("forward_begins", 0, 0), ("backward_ends", 1), ("step_closed", 1), ("save_begins", path), ("save_ends", path),
        ("forward_begins", 1, 0), ("backward_ends", 2), ("step_closed", 2), ("save_begins", path), ("save_ends", path),
    ]  # fmt: skip
