"""experiment.json, job.json and markers: written whole, read with suspicion."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from detrun.errors import ArchiveError, ExitCode, RecordError
from detrun.records.files import one_line, read_object, write_atomically
from detrun.records.jobs import ExperimentFile, JobFile, TaskMarker
from detrun.records.verdict import Verdict, verdict_schema
from tests.records_factory import Made, experiment_file


def test_a_document_comes_back_as_it_was_written(tmp_path: Path) -> None:
    file = experiment_file("x-pair-1", Made(declared={"b": {"args": ["--fault"], "env": {"A": "1"}}}))
    file.write(tmp_path / "new" / "experiment.json")
    again = ExperimentFile.read(tmp_path / "new" / "experiment.json")
    assert again == file
    assert again.metric_rules.required[0] == "loss"
    assert bool(again.arms[1].declared) and not bool(again.arms[0].declared)


def test_what_a_newer_writer_added_survives(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"schema_version": 1, "arm": "a", "later": {"x": 1}}))
    JobFile.read(path).write(path)
    assert json.loads(path.read_text())["later"] == {"x": 1}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"schema_version": 2, "arm": "a"}', "schema version 2"),
        (b'{"schema_version": true, "arm": "a"}', "schema version True"),
        (b'{"arm": "a"}', "schema version None"),
        (b'{"schema_version": 1}', "arm"),
        (b'{"schema_version": 1, "arm": "a", "exit_code": "\\u0000\\u001b[2J"}', "exit_code"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"schema_version": 1, "arm": ' + b'{"a":' * 50_000, "not valid JSON"),
    ],
)
def test_a_bad_document_is_a_record_error_with_its_path(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(content)
    with pytest.raises(RecordError) as caught:
        JobFile.read(path)
    assert says in caught.value.what
    assert caught.value.where == str(path)
    assert caught.value.exit_code == ExitCode.NOT_VERIFIED
    assert "\x1b" not in caught.value.render()


def test_what_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, says in [("link", "symbolic link"), ("folder", "folder"), ("pipe", "not a plain file")]:
        with pytest.raises(RecordError, match=says):
            read_object(tmp_path / name)
    with pytest.raises(RecordError, match="is missing"):
        read_object(tmp_path / "none")
    with pytest.raises(RecordError):
        read_object(Path(f"{tmp_path}/nul\0byte"))


def test_bytes_that_are_not_utf8_in_a_variable_are_shown_as_escapes(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": "b\\udcff", "\\ud800": [1]}')
    assert read_object(path) == {"a": "b\\udcff", "\\ud800": [1]}


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_atomically(path, b"old")
    (tmp_path / "file").touch()
    with pytest.raises(ArchiveError):
        write_atomically(tmp_path / "file" / "x", b"new")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").touch()
    with pytest.raises(ArchiveError):
        write_atomically(tmp_path / "folder", b"new")
    assert path.read_bytes() == b"old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder", "x"]


def test_a_marker_takes_signals_by_number_or_name(tmp_path: Path) -> None:
    TaskMarker(task=3, signal=9).write(tmp_path / "m")
    assert TaskMarker.read(tmp_path / "m").signal == 9
    TaskMarker(task=3, signal="SIGKILL", exit_code=137).write(tmp_path / "m")
    assert TaskMarker.read(tmp_path / "m").signal == "SIGKILL"


def test_foreign_text_becomes_one_printable_line() -> None:
    assert one_line("a\x1b[31m\nb\0") == "a\\x1b[31m\\nb\\x00"
    assert one_line("x" * 500, 10) == "x" * 9 + "…"


def test_the_schema_of_the_verdict_is_published() -> None:
    schema = verdict_schema()
    assert set(schema["required"]) >= {"id", "experiment", "recipe", "verdict", "exit_code"}
    assert set(schema["properties"]) >= {
        "schema_version", "first_divergence", "culprit", "findings", "not_verified", "arms", "figures",
    }  # fmt: skip
    assert Verdict.model_fields.keys() == schema["properties"].keys()
