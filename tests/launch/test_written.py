"""Each attempt's part of what a program writes, and how far a run without a recorder is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from detrun.launch.outcome import last_steps
from detrun.launch.spec import Segment
from detrun.launch.written import Watch, Written, claim_interrupted, files_of, note_sources
from detrun.records.layout import AttemptFolder, ExperimentFolder
from detrun.records.sources import SourceSpec


def segment(folder: Path, **spec: Any) -> Segment:
    source = SourceSpec(**{"source": "jsonl", "path": f"{folder}/*.jsonl", **spec})
    return Segment(
        "b",
        0,
        ["x"],
        {},
        [],
        str(folder),
        "none",
        1,
        2,
        10,
        recorder=False,
        sources=[source.as_dict()],
        metrics=["loss"],
    )


def attempt(tmp_path: Path, number: int = 0) -> AttemptFolder:
    made = ExperimentFolder(tmp_path / "x").attempt("b", number)
    made.log_dir.mkdir(parents=True)
    return made


def test_how_far_a_run_is_can_be_seen_in_what_it_writes(tmp_path: Path) -> None:
    run, made, file = segment(tmp_path), attempt(tmp_path), tmp_path / "m.jsonl"
    note_sources(made, run)
    watch = Watch(made, run)
    assert watch.look() == 0 and last_steps(made, run) == {0: 0}
    file.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    assert watch.look() == 2
    file.write_text(file.read_text() + 'ss": 3.0}\n')
    assert watch.look() == 3 and last_steps(made, run) == {0: 3}


def test_what_lay_there_before_is_not_this_attempts(tmp_path: Path) -> None:
    run, file = segment(tmp_path), tmp_path / "m.jsonl"
    file.write_text('{"step": 7, "loss": 1.0}\n')
    made = attempt(tmp_path, 1)
    note_sources(made, run)
    watch = Watch(made, run)
    assert watch.look() == 0
    file.write_text(file.read_text() + '{"step": 4, "loss": 1.0}\n')
    assert watch.look() == 4
    assert Written.read(made).there[str(file)][0] == 25


def test_only_the_end_of_a_large_file_is_looked_at(tmp_path: Path) -> None:
    run, made, file = segment(tmp_path), attempt(tmp_path), tmp_path / "m.jsonl"
    note_sources(made, run)
    file.write_text("".join(f'{{"step": {step}, "loss": 1.0, "pad": "{"x" * 99}"}}\n' for step in range(1, 5001)))
    assert Watch(made, run).look() == 5000


def test_a_folder_stands_for_its_files_and_names_with_brackets_for_themselves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.jsonl").touch()
    (folder / "b.txt").touch()
    assert files_of(SourceSpec("jsonl", str(folder)), attempt(tmp_path)) == [(0, folder / "deep" / "a.jsonl")]


def test_without_a_path_the_ranks_logs_are_read_each_by_itself(tmp_path: Path) -> None:
    made = attempt(tmp_path)
    for name in ("task00000.log", "launch.log"):
        (made.log_dir / name).touch()
    assert files_of(SourceSpec("log", None, "x"), made) == [(0, made.log_dir / "task00000.log")]
    for name in ("rank00000.log", "rank00001.log"):
        (made.log_dir / name).touch()
    assert [rank for rank, _ in files_of(SourceSpec("log", None, "x"), made)] == [0, 1]


def test_an_interruption_from_outside_is_written_down_as_one_from_within(tmp_path: Path) -> None:
    from detrun.launch.interruption import interruption_of

    made = attempt(tmp_path)
    run = segment(tmp_path)
    run = Segment(**{**run.__dict__, "interrupt": {"kind": "kill", "at_step": 4, "ranks": "all"}})
    assert interruption_of(made, run) is None
    claim_interrupted(made, [0, 1], "kill", 5)
    found = interruption_of(made, run)
    assert found is not None and (found.step, found.ranks, found.kind) == (5, [0, 1], "kill")
