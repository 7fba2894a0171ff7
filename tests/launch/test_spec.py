"""What a job was asked to run and what it became, read back with suspicion."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from detrun.errors import RecordError
from detrun.launch.cluster import SubmittedJob
from detrun.launch.spec import JobSpec, Segment, WatchdogLimits
from detrun.launch.submitted import read_submitted, write_submitted


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    segment = Segment("a", 0, ["true"], {}, [], "/", "none", 1, 1, 5)
    return JobSpec("x-a", str(tmp_path), "local", "pinned", [segment], WatchdogLimits())


def test_a_specification_comes_back_as_it_was_written(spec: JobSpec) -> None:
    assert JobSpec.read(spec.write()) == spec


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"segments": [1]},
        {"segments": [{"arm": "a"}]},
        {"watchdog": None},
        {"more": 1},
    ],
)
def test_a_specification_that_is_none_says_so(spec: JobSpec, change: dict[str, Any]) -> None:
    path = spec.write()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RecordError):
        JobSpec.read(path)


@pytest.mark.parametrize(
    "change",
    [
        {"arm": "../../x"},
        {"ranks_per_node": "many"},
        {"nodes": None},
        {"continues": "../b"},
        {"interrupt": "kill"},
        {"checkpoints": ["/x"]},
    ],
)
def test_a_segment_cannot_lead_out_of_its_folder(spec: JobSpec, change: dict[str, Any]) -> None:
    path = spec.write()
    document = json.loads(path.read_text())
    document["segments"][0].update(change)
    path.write_text(json.dumps(document))
    with pytest.raises(RecordError, match="not a valid job specification"):
        JobSpec.read(path)


def test_a_torn_specification_or_a_pipe_in_its_place_is_a_record_error(spec: JobSpec) -> None:
    path = spec.write()
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(RecordError):
        JobSpec.read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RecordError, match="not a plain file"):
        JobSpec.read(path)


@pytest.mark.parametrize("change", [{"id": "--user=root"}, {"id": 7}, {"submitted": "soon"}, {"detail": 3}, {"x": 1}])
def test_an_id_that_is_none_never_reaches_a_command_line(tmp_path: Path, change: dict[str, Any]) -> None:
    write_submitted(tmp_path, SubmittedJob("x", "12", 1.0, {}))
    assert read_submitted(tmp_path) == SubmittedJob("x", "12", 1.0, {})
    path = tmp_path / "submitted.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert read_submitted(tmp_path) is None
