"""Which words of a command are arguments, and what becomes of them on another machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from detrun.cli.app import COMMANDS, _load
from detrun.cli.remote import REMOTE, _job, make_login, take_apart
from detrun.errors import RecipeError, UsageError
from detrun.experiments.remote import Job
from detrun.experiments.remote.files import Landing
from detrun.records.archive import Archive
from tests.running import write_recipe

ID = "plain-pair-20261129T101502-3f9a"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DETRUN_ARCHIVE", raising=False)
    return tmp_path


def job(name: str, *words: str, host: str = "cluster") -> Job:
    taken = take_apart(_load(name, COMMANDS[name]), words)
    made = _job(make_login(host), name, taken, Archive.find())
    if made.tree is not None:
        made.tree.forget()
    return made


@pytest.mark.parametrize(
    ("words", "positional"),
    [
        (["a.yaml"], [0]),
        (["--set", "steps=3", "a.yaml", "--json"], [2]),
        (["--set=steps=3", "--repeat", "2", "a.yaml"], [3]),
        (["--archive", "a.yaml", "b.yaml"], [2]),
        (["--json", "--", "--odd.yaml"], [2]),
        (["a.yaml", "--arm", "b.args=-x --set y"], [0]),
    ],
)
def test_arguments_and_values(words: list[str], positional: list[int]) -> None:
    assert list(take_apart(_load("pair", COMMANDS["pair"]), words).positional) == positional


def test_every_command_that_can_run_there_is_a_command() -> None:
    assert set(REMOTE) <= set(COMMANDS)


def test_a_recipe_gets_its_path_there(here: Path) -> None:
    (here / "recipes").mkdir()
    (here / "code").mkdir()
    (here / "code" / "train.py").write_text("")
    path = write_recipe(here / "recipes", launch={"workdir": "../code"}, archive="/scratch/archive")
    made = job("pair", "--set", "steps=3", str(path), "--detach")
    assert made.words == ("pair", "--set", "steps=3", str(path), "--detach")
    assert made.paths == {3: "recipes/plain.yaml"} and made.stays and made.brings
    assert made.recipe_archive == "/scratch/archive" and made.archive_option is None
    assert made.tree is not None
    assert [item.path for item in made.tree.items] == ["code/train.py", "recipes/plain.yaml"]
    assert made.at == "."


def test_a_relative_archive_is_not_there(here: Path) -> None:
    made = job("pair", str(write_recipe(here, archive="results")), "--dry-run")
    assert made.recipe_archive is None and not made.brings


def test_without_an_argument_it_is_the_recipe_here(here: Path) -> None:
    write_recipe(here, "detrun")
    assert job("pair").paths == {1: "detrun.yaml"}
    assert job("resume-check", "--json").paths == {2: "detrun.yaml"}


def test_a_folder_of_recipes_goes_as_a_whole(here: Path) -> None:
    (here / "recipes").mkdir()
    for name in ("one", "two"):
        write_recipe(here / "recipes", name)
    (here / "recipes" / "broken.yaml").write_text("{")
    made = job("nightly", "recipes")
    assert made.paths == {1: "."} and made.nights
    assert made.tree is not None
    names = [item.path for item in made.tree.items]
    assert names == ["broken.yaml", "one.yaml", "two.yaml"]
    with pytest.raises(RecipeError):
        job("pair", "recipes/broken.yaml")


def test_an_id_goes_to_the_archive_it_is_remembered_in(here: Path) -> None:
    Landing(Archive.find(), "cluster").remember(ID, "cluster", "paramiko", None, "/scratch/a")
    made = job("attach", "3f9a")
    assert made.words == ("attach", "3f9a", "--archive", "/scratch/a")
    assert made.about == ("3f9a",) and made.brings and not made.stays and made.tree is None
    assert job("attach", "3f9a", "--archive", "/b").words == ("attach", "3f9a", "--archive", "/b")
    assert job("status", "3f9a", host="other").words == ("status", "3f9a")
    assert job("report").about == ("@latest",)
    assert job("localize", ID).tree is None


@pytest.mark.parametrize("name", ["pair", "resume-check", "nightly"])
def test_a_recipe_that_is_not_here(name: str) -> None:
    with pytest.raises(UsageError, match="is not here"):
        job(name, "no-such.yaml")
