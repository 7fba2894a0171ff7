"""init, validate and schema, as they are called."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from detrun.cli import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my project"
    folder.mkdir()
    monkeypatch.chdir(folder)


def test_init_writes_a_recipe_that_validates(capsys: Captured) -> None:
    assert main(["init"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "wrote detrun.yaml\n"
    assert captured.err == "detrun pair detrun.yaml --dry-run shows what it would launch.\n"
    assert main(["validate"]) == 0
    assert capsys.readouterr().out == (
        "ok  detrun.yaml: my-project, 2 ranks × 30 steps, started by torchrun, 2 required metrics\n"
    )


def test_what_init_writes_passes_a_dry_run(capsys: Captured) -> None:
    main(["init", "--name", "first"])
    capsys.readouterr()
    assert main(["pair", "--dry-run", "--set", "cluster=local"]) == 0
    assert "--steps 30 --seed 1234 --out " in capsys.readouterr().out


def test_init_never_overwrites_unasked(capsys: Captured) -> None:
    Path("detrun.yaml").write_text("mine", encoding="utf-8")
    assert main(["init"]) == 2
    assert capsys.readouterr().err == "error: detrun.yaml is there already\nhint: --force overwrites it.\n"
    assert Path("detrun.yaml").read_text(encoding="utf-8") == "mine"
    assert main(["init", "--force", "--name", "other"]) == 0
    assert "\nname: other " in Path("detrun.yaml").read_text(encoding="utf-8")


def test_init_into_a_folder_or_a_file(capsys: Captured) -> None:
    Path("sub").mkdir()
    assert main(["init", "sub"]) == 0
    assert main(["init", "sub/x.yaml"]) == 0
    assert main(["validate", "sub/detrun.yaml"]) == 0
    assert main(["init", "gone/x.yaml"]) == 2
    assert capsys.readouterr().err.endswith("error: the folder gone does not exist\nhint: mkdir -p gone\n")


def test_init_refuses_a_name_that_is_none(capsys: Captured) -> None:
    assert main(["init", "--name", "a b/c"]) == 2
    assert capsys.readouterr().err == (
        "error: --name 'a b/c' is not letters, digits, dots, _ and -, beginning with a letter or digit\n"
        "hint: for example --name a-b-c\n"
    )
    assert not Path("detrun.yaml").exists()


def test_validate_shows_the_wrong_line(capsys: Captured) -> None:
    main(["init"])
    text = Path("detrun.yaml").read_text(encoding="utf-8")
    Path("detrun.yaml").write_text(text.replace("ranks_per_node:", "ranks_per_nod:"), encoding="utf-8")
    capsys.readouterr()
    assert main(["validate", "detrun.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.split("\n")
    assert lines[0] == "error: detrun.yaml, line 23: launch.ranks_per_nod is not a known key"
    assert lines[2].startswith("  23 |   ranks_per_nod: 2")
    assert lines[3] == "         ^^^^^^^^^^^^^"
    assert lines[4] == "hint: did you mean ranks_per_node? `detrun init` writes a commented recipe."


def test_validate_takes_overrides_and_arms(capsys: Captured) -> None:
    main(["init", "--name", "x"])
    capsys.readouterr()
    words = ["--set", "launch.nodes=2", "--set", "steps=1", "--arm", "b.args=--x", "--arm", "c.env.A=1"]
    assert main(["validate", "detrun.yaml", *words]) == 0
    assert capsys.readouterr().out == (
        "ok  detrun.yaml: x, 4 ranks on 2 nodes × 1 step, started by torchrun, 2 required metrics, "
        "arms with settings of their own: b, c\n"
    )


def test_validate_print_can_be_read_again(capsys: Captured) -> None:
    main(["init"])
    capsys.readouterr()
    assert main(["validate", "--print", "--arm", "b.args=--x {seed}", "--set", "seed=5"]) == 0
    printed = capsys.readouterr().out
    Path("detrun.yaml").write_text(printed, encoding="utf-8")
    assert main(["validate", "--print"]) == 0
    assert capsys.readouterr().out == printed
    assert "seed: 5\n" in printed


def test_validate_notes_a_folder_that_is_not_here(capsys: Captured) -> None:
    main(["init"])
    capsys.readouterr()
    assert main(["validate", "--set", "launch.workdir=/cluster/only"]) == 0
    assert capsys.readouterr().err == "note: launch.workdir: /cluster/only is not a folder on this machine\n"


def test_validate_checks_interruptions(capsys: Captured) -> None:
    main(["init"])
    capsys.readouterr()
    assert main(["validate", "--set", "interrupt={kind: kill, at_step: 99}"]) == 2
    assert capsys.readouterr().err == (
        "error: --set interrupt={kind: kill, at_step: 99}: interrupt.at_step: 99 is after the last step "
        "(steps is 30)\nhint: it would never happen: choose an earlier step.\n"
    )


def test_validate_without_a_recipe(capsys: Captured) -> None:
    assert main(["validate"]) == 2
    assert capsys.readouterr().err == (
        "error: detrun.yaml does not exist\nhint: `detrun init` writes a commented recipe.\n"
    )


@pytest.mark.parametrize("document", ["recipe", "verdict"])
def test_schema(document: str, capsys: Captured) -> None:
    assert main(["schema", document]) == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(capsys.readouterr().out))
