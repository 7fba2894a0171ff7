"""State files: what is written is read back, and what is torn or made up by somebody is refused by name."""

from __future__ import annotations

import builtins
import dataclasses
import tempfile
from pathlib import Path
from typing import Any, get_args

import pyarrow
import pyarrow.ipc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detrun.errors import RecordError
from detrun.fingerprint.byte_digest import digest_parts
from detrun.records.layout import AttemptFolder
from detrun.records.state_reader import Boundary, StateTable, boundaries, parse_boundary, read_state
from detrun.records.state_row import NOT_KEPT, Component, Standing, StateRow
from detrun.records.state_writer import StateWriter

END = "end-00000010"


def folder(path: Path) -> AttemptFolder:
    return AttemptFolder(path, "a", 0)


def write(path: Path, rows: list[StateRow], boundary: str = END, rank: int = 0, **options: Any) -> AttemptFolder:
    writer = StateWriter(path, boundary, rank)
    writer.write(rows, **{"step": 10, "microbatch": 0, "scope": "full", "cpu_seconds": 0.5, **options})
    return folder(path)


def kept(path: Path, raw: bytes, name: str = "w") -> AttemptFolder:
    """A file with one uint8 tensor whose bytes are kept, behind three other bytes."""
    writer = StateWriter(path, END, 0)
    writer.keep(b"abc")
    writer.rest()
    digest = digest_parts(f"|uint8|{len(raw)};".encode(), raw)
    row = StateRow("parameters", name, "", "hard", "uint8", (len(raw),), len(raw), digest, None, writer.keep(raw))
    row = dataclasses.replace(row, nbytes=len(raw))
    writer.write([row], step=10, microbatch=0, scope="full", cpu_seconds=0.0)
    return folder(path)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ROWS = st.builds(
    StateRow,
    component=st.sampled_from(get_args(Component)),
    name=TEXT,
    part=TEXT,
    standing=st.sampled_from(get_args(Standing)),
    dtype=TEXT,
    shape=st.lists(st.integers(0, 2**62), max_size=4).map(tuple),
    elements=st.integers(0, 2**62),
    digest=st.none() | st.from_regex(r"xxh3:[0-9a-f]{32}", fullmatch=True),
    value=st.none() | TEXT,
    offset=st.integers(NOT_KEPT, 2**62),
    nbytes=st.integers(0, 2**62),
    info=st.dictionaries(TEXT, st.booleans() | st.integers(-(2**31), 2**31) | TEXT, max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, max_size=8, unique_by=lambda row: row.key), st.integers(0, 3))
def test_rows_come_back_as_they_were_written(rows: list[StateRow], microbatch: int) -> None:
    with tempfile.TemporaryDirectory() as path:
        boundary = f"{END}.{microbatch}" if microbatch else END
        attempt = write(Path(path), rows, boundary, microbatch=microbatch, scope="light", missing=["gradients"])
        table = read_state(attempt, boundary, 0)
    assert list(table.rows) == rows
    assert (table.step, table.microbatch, table.scope, table.cpu_seconds) == (10, microbatch, "light", 0.5)
    assert table.missing == ("gradients",)
    assert table.by_key == {row.key: row for row in rows}


@pytest.mark.parametrize("other", [{"step": 9}, {"microbatch": 1}])
def test_a_file_that_speaks_of_another_position_is_refused(tmp_path: Path, other: dict[str, int]) -> None:
    attempt = write(tmp_path, [], **other)
    with pytest.raises(RecordError, match="speaks of step"):
        read_state(attempt, END, 0)


def test_kept_bytes_are_found_at_their_place(tmp_path: Path) -> None:
    table = read_state(kept(tmp_path, b"\x01\x02\x03"), END, 0)
    assert table.bytes_of(table.rows[0]) == b"\x01\x02\x03"
    assert table.bytes_of(dataclasses.replace(table.rows[0], offset=NOT_KEPT)) is None


@pytest.mark.parametrize("offset", [2, 4, 100, 2**62])
def test_an_offset_that_points_elsewhere_is_refused(tmp_path: Path, offset: int) -> None:
    table = read_state(kept(tmp_path, b"\x01\x02\x03"), END, 0)
    with pytest.raises(RecordError, match=r"cut off|other bytes"):
        table.bytes_of(dataclasses.replace(table.rows[0], offset=offset))


@pytest.mark.parametrize("how", ["missing", "shorter", "changed", "link", "folder"])
def test_bytes_that_are_not_what_was_kept_are_refused(tmp_path: Path, how: str) -> None:
    attempt = kept(tmp_path, b"\x01\x02\x03")
    path = attempt.state_bytes(END, 0)
    table = read_state(attempt, END, 0)
    raw = path.read_bytes()
    path.unlink()
    if how == "shorter":
        path.write_bytes(raw[:-1])
    elif how == "changed":
        path.write_bytes(raw[:-1] + b"\xff")
    elif how == "link":
        (tmp_path / "real").write_bytes(raw)
        path.symlink_to(tmp_path / "real")
    elif how == "folder":
        path.mkdir()
    with pytest.raises(RecordError) as refused:
        table.bytes_of(table.rows[0])
    assert str(path) in str(refused.value)


def test_every_torn_file_is_refused(tmp_path: Path) -> None:
    rows = [StateRow("parameters", f"w{i}", value="1") for i in range(3)]
    attempt = write(tmp_path, rows)
    path = attempt.state(END, 0)
    raw = path.read_bytes()
    for size in range(0, len(raw), 7):
        path.write_bytes(raw[:size])
        with pytest.raises(RecordError):
            read_state(attempt, END, 0)
    path.unlink()
    with pytest.raises(RecordError, match="is missing"):
        read_state(attempt, END, 0)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_file_with_flipped_bits_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        attempt = kept(Path(name), b"\x01\x02\x03")
        path = attempt.state(END, 0)
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(bytes(raw))
        try:
            table = read_state(attempt, END, 0)
            for row in table.rows:
                assert isinstance(row.name, str)
                table.bytes_of(row)
        except RecordError:
            pass


def hostile(path: Path, change: dict[str, Any], metadata: dict[str, str] | None = None) -> AttemptFolder:
    """A well-formed stream with one row of which some columns hold something else."""
    attempt = write(path, [StateRow("parameters", "w", shape=(2,), elements=2, nbytes=8)])
    file = attempt.state(END, 0)
    table = pyarrow.ipc.open_stream(file.read_bytes()).read_all()
    for column, value in change.items():
        place = table.schema.get_field_index(column)
        field = table.schema.field(place)
        table = table.set_column(place, field, pyarrow.array([value], field.type))
    told = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    table = table.replace_schema_metadata({**told, **(metadata or {})})
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return attempt


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"component": "wishes"}, "row 1 is of no known component"),
        ({"standing": "lying"}, "standing"),
        ({"name": None}, "not complete"),
        ({"shape": [None]}, "not complete"),
        ({"shape": [-1]}, "negative"),
        ({"elements": -1}, "negative"),
        ({"offset": -2}, "negative"),
        ({"nbytes": -8}, "negative"),
        ({"digest": "../../etc"}, "no digest"),
        ({"info": "[]"}, "no object"),
        ({"info": "{"}, "row 1"),
        ({"info": "[" * 100_000}, "row 1"),
    ],
)
def test_a_row_that_makes_no_sense_is_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(RecordError, match=says):
        read_state(hostile(tmp_path, change), END, 0)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"detrun.schema_version": "2"}, "has schema version 2, this detrun reads 1"),
        ({"detrun.rank": "1"}, "speaks of end-00000010, rank 1"),
        ({"detrun.boundary": "end-00000011"}, "speaks of end-00000011"),
        ({"detrun.step": "-1"}, "does not tell its step"),
    ],
)
def test_a_file_that_speaks_of_something_else_is_refused(tmp_path: Path, metadata: dict[str, str], says: str) -> None:
    with pytest.raises(RecordError, match=says):
        read_state(hostile(tmp_path, {}, metadata), END, 0)


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    rows = [StateRow("parameters", "w", value="1"), StateRow("parameters", "w", value="2")]
    with pytest.raises(RecordError, match="twice"):
        read_state(write(tmp_path, rows), END, 0)


def test_boundaries_come_in_the_order_of_the_run(tmp_path: Path) -> None:
    names = [
        "begin-00000011.2", "end-00000010.2", "begin-00000011", "end-00000010", "end-00000009", "begin-00000010",
        "begin-1", "end-00000010.0", "end-00000010.2x", "notes",
    ]  # fmt: skip
    for name in names:
        (tmp_path / "state" / name).mkdir(parents=True)
    found = [boundary.name for boundary in boundaries(folder(tmp_path))]
    assert found == [
        "end-00000009", "begin-00000010", "end-00000010", "begin-00000011", "end-00000010.2", "begin-00000011.2",
    ]  # fmt: skip
    assert boundaries(folder(tmp_path / "nowhere")) == []
    assert parse_boundary("begin-00000011.2") == Boundary("begin", 11, 2, "begin-00000011.2")


def test_a_second_file_of_a_boundary_replaces_the_first(tmp_path: Path) -> None:
    kept(tmp_path, b"\x01\x02\x03")
    attempt = write(tmp_path, [StateRow("buffers", "other", value="1")])
    assert [row.name for row in read_state(attempt, END, 0).rows] == ["other"]
    assert [path.name for path in (attempt.state_dir / END).iterdir()] == ["rank00000.arrow"]


def test_what_was_discarded_leaves_nothing(tmp_path: Path) -> None:
    writer = StateWriter(tmp_path, END, 0)
    writer.keep(b"abc")
    writer.discard()
    assert writer.keep(b"xy") == 0
    writer.write([], step=10, microbatch=0, scope="full", cpu_seconds=0.0)
    assert folder(tmp_path).state_bytes(END, 0).read_bytes() == b"xy"


def test_a_program_without_pyarrow_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pyarrow":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError):
        StateWriter(tmp_path, END, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_table_stands_for_itself_without_its_folder() -> None:
    table = StateTable((StateRow("rng", "python", offset=0, nbytes=4),), 1, 0, "full", 0.0)
    assert table.bytes_of(table.rows[0]) is None
