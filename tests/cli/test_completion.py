"""Completion of a line, asked by the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from detrun.cli.completers import completer_of, equip, experiment_ids, recipes
from detrun.records.layout import MARKER

IDS = [f"moe-pair-20261129T10{minute:02d}00-{minute:04x}" for minute in range(12)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with recipes and an archive, and `detrun` on PATH."""
    work = tmp_path / "work"
    (work / "nested").mkdir(parents=True)
    for name in ("a.yaml", "b.yml", "notes.txt", "nested/c.yaml", "x$(touch pwned).yaml"):
        (work / name).touch()
    for name in IDS:
        (work / ".detrun" / name).mkdir(parents=True)
        (work / ".detrun" / name / MARKER).touch()
    command = tmp_path / "bin" / "detrun"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m detrun "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("DETRUN_ARCHIVE", raising=False)
    monkeypatch.chdir(work)
    return work


def ask(shell: str, script: str) -> list[str]:
    """What a shell printed, told to start as it does for its user but for his own files."""
    argv = {"bash": ["bash", "--norc", "-c"], "zsh": ["zsh", "-f", "-c"], "fish": ["fish", "--no-config", "-c"]}[shell]
    if shutil.which(argv[0]) is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([*argv, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()


BASH = """
eval "$(detrun completion bash)"
complete -p detrun
try() { COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=(); _detrun_completion detrun; echo "${COMPREPLY[*]}"; }
try detrun pa
try detrun pair --re
try detrun pair ""
try detrun pair nested/
try detrun report moe-pair-20261129T1011
try detrun report 0003
try detrun report --archive nested ""
try detrun no-such-command --x
try detrun checkpoint ""
"""


@pytest.mark.slow
def test_bash_completes_commands_options_recipes_and_ids(folder: Path) -> None:
    how, *answers = ask("bash", BASH)
    assert "-o nosort" in how
    assert answers == [
        "pair",
        "--repeat --resume",
        "a.yaml b.yml nested",
        "nested/c.yaml",
        IDS[11],
        IDS[3],
        "@latest",
        "",
        "show diff audit",
    ]
    assert not (folder / "pwned").exists()


@pytest.mark.full  # shells that not every machine has
@pytest.mark.slow
def test_zsh_completes(folder: Path) -> None:
    script = """
    autoload -U compinit; compinit -u -D
    eval "$(detrun completion zsh)"
    _arguments() { print -r -- "$@" }
    words=(detrun pai); CURRENT=2; _detrun_completion
    words=(detrun pair ""); CURRENT=3; _detrun_completion
    words=(detrun report 0003); CURRENT=3; _detrun_completion
    """
    commands, files, ids = ask("zsh", script)
    assert '"pair":"Launch the same training twice' in commands
    assert '"a.yaml" "b.yml" "nested/"' in files.replace("\n", " ") or "a.yaml" in files
    assert IDS[3] in ids


@pytest.mark.full  # shells that not every machine has
@pytest.mark.slow
def test_fish_completes_with_newest_experiments_first(folder: Path) -> None:
    script = 'detrun completion fish | source; complete -C "detrun pair "; complete -C "detrun report "'
    lines = [line for line in ask("fish", script) if line]
    assert lines[:3] == ["a.yaml", "b.yml", "nested/"]
    assert lines[3:] == ["@latest", *reversed(IDS)]


def test_the_module_of_a_command_is_not_imported_for_the_list_of_commands(folder: Path) -> None:
    code = (
        "import sys; from detrun.cli import main; main([]); print([m for m in sys.modules if m == 'detrun.cli.pair'])"
    )
    env = {**os.environ, "_DETRUN_COMPLETE": "complete_bash", "COMP_WORDS": "detrun p", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["pair", "prune", "[]"] or done.stdout.splitlines() == ["pair", "[]"]


class _Parameter:
    def __init__(self, metavar: str | None, name: str) -> None:
        self.metavar, self.name = metavar, name
        self.shell_complete: Any = None


class _Context:
    def __init__(self, **params: object) -> None:
        self.params = params


def test_a_parameter_is_known_by_its_name_in_the_help(folder: Path) -> None:
    def offered(metavar: str | None, name: str, incomplete: str = "") -> list[str]:
        completer = completer_of(_Parameter(metavar, name))
        return list(completer(_Context(), incomplete)) if completer else []

    assert offered("RECIPES_OR_FOLDERS…", "recipes", "a") == ["a.yaml"]
    assert offered("RECIPE_OR_ID", "what", "moe-pair-20261129T1005") == [IDS[5]]
    assert offered("last-good|ID", "against", "@") == ["@latest"]
    assert offered(None, "recipe", "a") == ["a.yaml"]
    assert offered("DIR", "archive") == []


def test_a_folder_that_cannot_be_read_offers_nothing() -> None:
    context = _Context(archive="/proc/no/such")
    for completer, incomplete in ((experiment_ids, "x"), (recipes, "/proc/no/such/")):
        with pytest.raises(OSError):
            list(completer(context, incomplete))
        parameter = _Parameter("ID" if completer is experiment_ids else "RECIPE", "it")
        equip(SimpleNamespace(params=[parameter]), str)
        assert parameter.shell_complete(context, incomplete) == []


def test_a_folder_that_is_no_experiment_is_not_offered(folder: Path) -> None:
    (folder / ".detrun" / "moe-pair-20261129T235900-ffff").mkdir()
    assert next(experiment_ids(_Context(), "moe")) == IDS[-1]


def test_an_unknown_shell_is_refused() -> None:
    done = subprocess.run([sys.executable, "-m", "detrun", "completion", "tcsh"], capture_output=True, text=True)
    assert done.returncode == 2 and "'bash', 'zsh', 'fish'" in done.stderr
