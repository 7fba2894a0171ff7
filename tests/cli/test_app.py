"""The command line as a whole: fast, lazy, and one exit code for each way a command can end."""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from detrun.cli import main
from detrun.cli.app import COMMANDS
from detrun.cli.errors import guarded, use_crash_folder
from detrun.errors import DetrunError, InternalError, JobError, RecipeError, SkippedError

HEAVY = ["torch", "pandas", "numpy", "pydantic", "pyarrow", "submitit", "plotly", "jinja2", "paramiko", "rich", "yaml"]


RUN = "import sys; from detrun.cli import main; sys.exit(main())"


def detrun(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", RUN, *words]
    return subprocess.run(command, capture_output=True, cwd=cwd, env={**os.environ, **env}, timeout=60)


@pytest.fixture(autouse=True)
def _no_crash_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detrun.cli.errors._crash_folder", [])


def test_help_imports_nothing_heavy() -> None:
    code = f"import sys; from detrun.cli import main; print(main(['--help']), set(sys.modules) & {{*{HEAVY}}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0 set()"


def test_help_lists_every_command_and_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, entry in COMMANDS.items():
        assert any(line.split() == [name, *entry.help.split()] for line in out.splitlines())
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_of_the_table_is_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, attribute = COMMANDS[name].target.partition(":")
    assert hasattr(importlib.import_module(module), attribute)
    assert main([name, "--help"]) == 0
    assert f"detrun {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    name, number = capsys.readouterr().out.split()
    assert (name, number[0].isdigit()) == ("detrun", True)


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["vaildate"], "vaildate is not a command", "did you mean detrun validate?"),
        (["zzz"], "zzz is not a command", "detrun --help lists the commands."),
        (["validate", "--sett", "x"], "no such option: --sett", "detrun validate --help"),
        (["validate", "a", "b"], "got unexpected extra argument", "detrun validate --help"),
        (["schema"], "missing argument 'DOCUMENT'", "detrun schema --help"),
        (
            ["schema", "x"],
            "invalid value for 'DOCUMENT': 'x' is not one of 'recipe', 'verdict'",
            "detrun schema --help",
        ),
        (["recorder"], "detrun recorder wants a command", "detrun recorder --help"),
    ],
)
def test_a_wrong_command_line(words: list[str], said: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {said}")  # what follows is typer's, and differs between its versions
    assert captured.err.endswith(f"\nhint: {hint}\n")


def test_no_words_is_a_wrong_command_line_and_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Commands:" in captured.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecipeError("wrong", where="r.yaml, line 3", hint="right"), 2),
        (JobError("gone"), 4),
        (SkippedError("locked"), 5),
    ],
)
def test_an_error_is_rendered_on_stderr(error: DetrunError, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise error

    assert guarded(fails) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", error.render() + "\n")


def test_a_bug_is_one_line_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise ValueError("boom\nand more")

    use_crash_folder(tmp_path)
    assert guarded(fails, ["pair", "r.yaml"]) == 70
    (crash,) = tmp_path.iterdir()
    captured = capsys.readouterr()
    assert captured.err == (
        f"error: a bug of detrun: ValueError: boom\nhint: its details are in {crash}; send them with a report.\n"
    )
    text = crash.read_text(encoding="utf-8")
    assert "command line: detrun pair r.yaml" in text
    assert "Traceback" in text and "and more" in text
    assert crash.stat().st_mode & 0o077 == 0


def test_a_crash_file_goes_elsewhere_if_the_archive_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> int:
        raise InternalError("broken")

    (tmp_path / "archive").mkdir()
    use_crash_folder(tmp_path / "not there")
    monkeypatch.setenv("DETRUN_ARCHIVE", str(tmp_path / "archive"))
    assert guarded(fails) == 70
    assert len(list((tmp_path / "archive").iterdir())) == 1
    assert capsys.readouterr().err.startswith("error: broken\nhint: its details are in ")


def test_a_pipe_of_the_commands_own_is_a_bug_and_no_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    use_crash_folder(tmp_path)
    monkeypatch.setattr("detrun.cli.validate.validate", fails)
    assert main(["validate"]) == 70
    assert "a bug of detrun: BrokenPipeError" in capsys.readouterr().err


def test_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise KeyboardInterrupt

    assert guarded(fails) == 130
    assert capsys.readouterr() == ("", "")


def test_leaving_by_sys_exit(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: sys.exit(3)) == 3
    assert guarded(lambda: sys.exit()) == 0
    assert guarded(lambda: sys.exit("why")) == 2
    assert capsys.readouterr().err == "error: why\n"


def test_ctrl_c_in_a_real_process() -> None:
    code = (
        "import sys, time\nfrom detrun.cli.errors import guarded\n"
        "def run():\n  print('up', flush=True)\n  time.sleep(30)\n"
        "sys.exit(guarded(run))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stderr.read() == b""


def test_a_closed_pipe_leaves_the_exit_code_alone() -> None:
    code = (
        "import sys\nfrom detrun.cli.errors import guarded\n"
        "def run():\n  [print('line', n) for n in range(100_000)]\n  return 1\n"
        "sys.exit(guarded(run))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 1
        assert process.stderr.read() == b""


def test_a_terminal_that_lacks_a_character_is_no_crash(tmp_path: Path) -> None:
    assert detrun("init", cwd=tmp_path).returncode == 0
    done = detrun("validate", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert b"2 ranks ? 30 steps" in done.stdout


def test_streams_are_given_back() -> None:
    before = sys.stdout, sys.stderr
    assert guarded(lambda: 0) == 0
    assert (sys.stdout, sys.stderr) == before


def test_results_are_on_stdout_alone(tmp_path: Path) -> None:
    done = detrun("schema", "recipe", cwd=tmp_path)
    assert done.stderr == b""
    assert json.loads(done.stdout)["title"] == "detrun recipe"


def test_an_error_never_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise RecipeError("\x1b[31mred\u202e is not a known key", where="r.yaml", excerpt=["ü: 1", "^"])

    assert guarded(fails) == 2
    assert capsys.readouterr().err == "error: r.yaml: \\x1b[31mred\\u202e is not a known key\n\n  ü: 1\n  ^\n"
