"""What `detrun diagnose` takes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from detrun.cli.diagnose import parse_toggles
from detrun.errors import UsageError
from detrun.records.archive import Archive
from detrun.records.jobs import ArmPlan, ExperimentFile
from detrun.records.verdict import Verdict
from tests.running import detrun, write_recipe


def archive_with(tmp_path: Path, kind: str, verdict: str | None) -> str:
    """An archive with one experiment that came out like this; its id."""
    from detrun.recipe import load_recipe

    path = write_recipe(tmp_path)
    folder = Archive(tmp_path / ".detrun").create("plain", kind)
    (folder.path / "recipe.yaml").write_text(path.read_text())
    arms = [ArmPlan(id="a", role="reference"), ArmPlan(id="b", role="repeat")]
    ExperimentFile(
        id=folder.id, experiment=kind, created="2026-01-01T00:00:00Z", cluster="local", arms=arms, ranks=2, steps=6,
        recipe=load_recipe(path).recipe.model_dump(mode="json"), recipe_path=str(path),
    ).write(folder.experiment_file)  # fmt: skip
    if verdict is not None:
        code = {"identical": 0, "diverged": 1, "not-verified": 3}[verdict]
        document = Verdict(id=folder.id, experiment=kind, recipe="plain", verdict=verdict, exit_code=code)
        folder.verdict_file.write_text(json.dumps(document.model_dump(mode="json")))
    return folder.id


@pytest.mark.parametrize(
    ("kind", "verdict", "says"),
    [
        ("pair", "identical", "did not diverge"),
        ("pair", None, "has no verdict yet"),
        ("resume-check", "diverged", "names what was not restored"),
        ("trace", "identical", "a pair or a localization can be diagnosed"),
    ],
)
def test_what_has_nothing_to_diagnose_is_refused(tmp_path: Path, kind: str, verdict: str | None, says: str) -> None:
    id = archive_with(tmp_path, kind, verdict)
    ran = detrun("diagnose", id, cwd=tmp_path)
    assert ran.code == 2, ran.explain()
    assert says in ran.err
    assert len(list((tmp_path / ".detrun").glob("plain-*"))) == 1


def test_toggles_are_split_as_a_shell_would() -> None:
    toggles = parse_toggles(["fusion=--no-fuse 'a b'", "other=--x=1"])
    assert toggles == {"fusion": ("--no-fuse", "a b"), "other": ("--x=1",)}


@pytest.mark.parametrize("text", ["fusion", "Fusion=--x", "fusion=", "fusion='--x", "a/b=--x"])
def test_a_toggle_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_toggles([text])


def test_two_toggles_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError):
        parse_toggles(["x=--a", "x=--b"])
