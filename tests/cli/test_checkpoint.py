"""`detrun checkpoint`: what it prints, as tables and as JSON, and its exit codes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from detrun.cli import main
from tests.checkpoints.making import cut, training_state

HOSTILE = "w\x1b[31m\nweight\u202e"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints that differ in one element, one value and one entry."""
    state: dict[str, Any] = {**training_state(), HOSTILE: torch.ones(1)}
    torch.save(state, tmp_path / "a.pt")
    weight = state["model"]["weight"]
    weight[0, 1] = torch.nextafter(weight[0, 1], torch.tensor(9.0))
    torch.save({**state, "step": 11, "more": torch.ones(2)}, tmp_path / "b.pt")
    return tmp_path / "a.pt", tmp_path / "b.pt"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["checkpoint", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_show_lists_every_entry_with_its_digest(capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]) -> None:
    code, out, _ = run(capsys, "show", str(pair[0]))
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["model.weight", "float32", "[3,", "4]", "48"] in [line[:5] for line in lines]
    assert ["optimizer.param_groups.0.lr", "float", "0.001"] in lines
    assert lines[-1][:2] == [f"{pair[0]}:", "torch.save,"]
    assert all(not line or line[-1] for line in lines)


def test_show_as_json(capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]) -> None:
    code, out, _ = run(capsys, "show", str(pair[0]), "--json")
    document = json.loads(out)
    assert (code, document["schema_version"], document["format"]) == (0, 1, "torch.save")
    entries = {entry["name"]: entry for entry in document["entries"]}
    assert entries[HOSTILE]["digest"].startswith("xxh3:")
    assert entries["step"] == {
        "name": "step",
        "dtype": "int",
        "shape": [],
        "nbytes": 0,
        "digest": None,
        "value": "10",
        "problem": None,
    }


def test_foreign_names_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]) -> None:
    for words in (("show", str(pair[0])), ("diff", str(pair[0]), str(pair[1]))):
        _, out, err = run(capsys, *words)
        assert "\x1b" not in out + err and "\u202e" not in out + err
    assert "w\\x1b[31m\\nweight\\u202e" in run(capsys, "show", str(pair[0]))[1]


def test_diff_says_what_differs_and_sums_up(capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]) -> None:
    code, out, _ = run(capsys, "diff", *map(str, pair))
    assert code == 1
    lines = out.splitlines()
    assert lines[0].split(maxsplit=2) == [
        "differs",
        "model.weight",
        "float32[3, 4]: 1 of 12 elements, up to 1 ULP, the first at 1",
    ]
    assert [line.split()[:4] for line in lines[1:3]] == [["value", "step", "10", "/"], ["only", "in", "B", "more"]]
    assert lines[-1].startswith("different: 3 entries (1 in their bits, 1 value, 1 only in B, up to 1 ULP)")


def test_diff_of_equal_states(capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]) -> None:
    other = pair[0].with_name("same.ckpt")
    torch.save(torch.load(pair[0]), other)
    code, out, _ = run(capsys, "diff", str(pair[0]), str(other))
    assert code == 0
    assert out.startswith("equal: ") and len(out.splitlines()) == 1
    assert json.loads(run(capsys, "diff", str(pair[0]), str(other), "--json")[1])["equal"] is True


def test_diff_as_json(capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]) -> None:
    code, out, _ = run(capsys, "diff", *map(str, pair), "--json")
    document = json.loads(out)
    assert (code, document["equal"], document["unreadable"]) == (1, False, [])
    assert document["differences"][0] == {
        "name": "model.weight",
        "what": "bytes",
        "a": "float32[3, 4]",
        "b": "float32[3, 4]",
        "dtype": "float32",
        "elements": 12,
        "differing_elements": 1,
        "ulp": 1,
        "first": 1,
        "nan": 0,
    }
    assert [each["what"] for each in document["differences"]] == ["bytes", "value", "only-in-b"]


def test_what_cannot_be_read_is_not_verified(capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]) -> None:
    cut(pair[1])
    code, out, _ = run(capsys, "diff", *map(str, pair))
    assert code == 3
    assert "cut short" in out and out.splitlines()[-1].startswith("not verified")
    assert run(capsys, "show", str(pair[1]))[0] == 3
    assert json.loads(run(capsys, "diff", *map(str, pair), "--json")[1])["equal"] is None


@pytest.mark.parametrize("words", [("show",), ("diff", "a.pt"), ("audit",)])
def test_a_wrong_path_is_a_users_error(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]
) -> None:
    paths = [str(pair[0].parent / word) for word in words[1:]]
    code, out, err = run(capsys, words[0], *paths, str(pair[0].parent / "nowhere"))
    assert (code, out) == (2, "")
    assert "nowhere" in err and "hint:" in err


def test_audit_tells_faults_and_their_number(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for step, seed in ((10, 0), (20, 1), (30, 1)):
        (tmp_path / f"step-{step}").mkdir()
        torch.save({**training_state(seed), "step": step}, tmp_path / f"step-{step}" / "rank0.pt")
    (tmp_path / "latest").write_text("step-40")
    code, out, _ = run(capsys, "audit", str(tmp_path))
    assert code == 1
    assert [line.split()[:2] for line in out.splitlines()[:2]] == [["stale", "step-30"], ["pointer", "latest"]]
    assert out.splitlines()[-1] == "3 checkpoints, 3 complete: 2 faults"
    document = json.loads(run(capsys, "audit", str(tmp_path), "--json", "--pattern", "step-{step}")[1])
    assert [fault["kind"] for fault in document["faults"]] == ["stale", "pointer"]
    assert [each["step"] for each in document["checkpoints"]] == [10, 20, 30]


def test_audit_of_good_checkpoints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torch.save(training_state(), tmp_path / "step-1.pt")
    assert run(capsys, "audit", str(tmp_path))[:2] == (0, "1 checkpoint, 1 complete: 0 faults\n")


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("color", [True, False])
def test_on_a_terminal_lines_fit_and_color_can_be_turned_off(
    columns: int, color: bool, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    long = tmp_path / "long.pt"
    torch.save({f"model.{'layers.' * 20}weight": torch.ones(3), "b": 1}, long)
    main_end, other_end = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", **({} if color else {"NO_COLOR": "1"})}
    done = subprocess.Popen(
        [sys.executable, "-m", "detrun", "checkpoint", "diff", str(long), str(pair[0])], stdout=other_end, env=env
    )
    os.close(other_end)
    written = b""
    while True:
        try:
            piece = os.read(main_end, 65536)
        except OSError:
            break
        if not piece:
            break
        written += piece
    assert done.wait() == 1
    text = written.decode()
    assert ("\x1b[31m" in text) is color
    first = text.splitlines()[0].replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert ("…" in first) is (columns == 80)
    assert first.startswith("only in A") and first.rstrip().endswith("float32[3]") and len(first) <= columns


def test_through_a_pipe_nothing_is_cut(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    name = f"model.{'layers.' * 40}weight"
    torch.save({name: torch.ones(3)}, tmp_path / "a.pt")
    assert name in run(capsys, "show", str(tmp_path / "a.pt"))[1]


def test_the_command_imports_no_torch(pair: tuple[Path, Path]) -> None:
    code = (
        "import sys; from detrun.cli import main\n"
        f"main(['checkpoint', 'diff', {str(pair[0])!r}, {str(pair[1])!r}])\n"
        "print({'torch', 'pandas', 'pyarrow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
