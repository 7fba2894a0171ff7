"""`detrun --host HOST COMMAND …`: the command runs on another machine; what it prints and finds comes here."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from detrun.cli.common import say
from detrun.cli.ssh_options import WAYS
from detrun.errors import UsageError

if TYPE_CHECKING:
    from detrun.experiments.remote import Job
    from detrun.experiments.remote.connection import Login
    from detrun.launch.ssh.tree import Tree
    from detrun.records.archive import Archive

REMOTE = {
    "pair": "recipe",
    "resume-check": "recipe",
    "localize": "recipe or id",
    "diagnose": "recipe or id",
    "nightly": "recipes",
    "attach": "id",
    "report": "id",
    "status": "id",
    "logs": "id",
    "cancel": "id",
    "list": "",
    "history": "",
    "doctor": "recipe",
    "prune": "",
}
"""The commands that can run on another machine, and what their arguments are."""
_STAY = {"pair", "resume-check", "localize", "diagnose", "nightly", "prune", "cancel"}
_BRING = {"pair", "resume-check", "localize", "diagnose", "nightly", "attach", "report", "history"}


class Output:
    """Where the output of the other machine goes."""

    def out(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def err(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    def say(self, text: str) -> None:
        say(text)


def make_login(
    host: str | None, ssh: str | None = None, remote_python: str | None = None, ask_password: bool = False
) -> Login:
    """How to get to the machine that was named. UsageError where that makes no sense."""
    if host is None:
        raise UsageError("--ssh, --remote-python and --ask-password go with --host", hint="detrun --host HOST …")
    from detrun.experiments.remote.connection import Login
    from detrun.launch.ssh.address import parse_address

    if ssh not in (None, *WAYS):
        raise UsageError(f"--ssh: {ssh!r} is no way to connect", hint=" or ".join(WAYS))
    if ask_password and ssh == "openssh":
        raise UsageError("--ask-password: ssh asks by itself", hint="leave one of the two out")
    return Login(
        parse_address(host), ssh or "paramiko", remote_python or os.environ.get("DETRUN_REMOTE") or None, ask_password
    )


@dataclass(frozen=True)
class Words:
    """A command's words taken apart. positional: indices of its arguments; values: of its options, by their name."""

    all: tuple[str, ...]
    positional: tuple[int, ...]
    values: dict[str, tuple[str, ...]]

    def without(self, option: str, takes_value: bool) -> Words:
        """The same without an option; further words keep their order, not their index."""
        left: list[str] = []
        skip = False
        for word in self.all:
            if skip:
                skip = False
            elif word == option:
                skip = takes_value
            elif not word.startswith(f"{option}="):
                left.append(word)
        return Words(tuple(left), (), {})


def take_apart(command: Any, words: Sequence[str]) -> Words:
    """Which words are arguments and which belong to options, by the command's own parameters."""
    taking: dict[str, str] = {}
    for parameter in command.params:
        if parameter.param_type_name == "option" and not (parameter.is_flag or parameter.count):
            taking.update(dict.fromkeys(parameter.opts, parameter.opts[0]))
    positional: list[int] = []
    values: dict[str, list[str]] = {}
    index, only_arguments = 0, False
    while index < len(words):
        word = words[index]
        name, joined, value = word.partition("=")
        if only_arguments or not word.startswith("-") or word == "-":
            positional.append(index)
        elif word == "--":
            only_arguments = True
        elif name in taking and joined and name.startswith("--"):
            values.setdefault(taking[name], []).append(value)
        elif word in taking and index + 1 < len(words):
            index += 1
            values.setdefault(taking[word], []).append(words[index])
        index += 1
    return Words(tuple(words), tuple(positional), {key: tuple(found) for key, found in values.items()})


def run_remotely(login: Login, name: str, command: Any, words: Sequence[str], context: Any) -> int:
    """Runs `detrun NAME WORDS` there. The exit code is that of the command there; 4 where it cannot be had."""
    if name not in REMOTE:
        raise UsageError(
            f"detrun {name} runs on this machine only", hint=f"with --host: {', '.join([*REMOTE, 'fetch'])}"
        )
    command.make_context(name, list(words), parent=context)  # what is wrong with the words is said before connecting
    from detrun.experiments.remote import run_there
    from detrun.experiments.remote.connection import Remote
    from detrun.experiments.remote.files import Landing
    from detrun.records.archive import Archive

    taken = take_apart(command, words)
    opens = "--open" in taken.all
    junit = taken.values.get("--junit", ())
    if opens:
        taken = take_apart(command, taken.without("--open", takes_value=False).all)
    if junit:
        taken = take_apart(command, taken.without("--junit", takes_value=True).all)
    archive, screen = Archive.find(), Output()
    job = _job(login, name, taken, archive)
    landing = Landing(archive, str(login.address))
    try:
        with Remote(login, screen) as remote:
            code = run_there(remote, job, landing, screen)
    finally:
        if job.tree is not None:
            job.tree.forget()
    if junit and landing.junit is not None:
        shutil.copyfile(landing.junit, junit[-1])
    if opens and landing.pages:
        typer.launch(landing.pages[-1].as_uri())
    return code


def _job(login: Login, name: str, words: Words, archive: Archive) -> Job:
    """The command as the other machine gets it: with the code it needs, and with its own paths for it."""
    from detrun.experiments.remote import Job
    from detrun.experiments.remote.files import find_place

    takes = REMOTE[name]
    given = words.values.get("--archive", ())
    arguments = [words.all[index] for index in words.positional]
    recipes = {i: Path(words.all[i]) for i in words.positional if "recipe" in takes and Path(words.all[i]).exists()}
    ids = [argument for argument in arguments if not Path(argument).exists()] if "id" in takes else []
    sent = [name, *words.all]
    if takes == "recipe" and not arguments and name in ("pair", "resume-check") and Path("detrun.yaml").exists():
        sent.append("detrun.yaml")
        recipes[len(words.all)] = Path("detrun.yaml")
    if takes in ("recipe", "recipes") and arguments and len(recipes) < len(arguments):
        missing = next(argument for argument in arguments if not Path(argument).exists())
        raise UsageError(f"{missing} is not here", hint="recipes are read from this machine and uploaded")
    if name == "pair" and not recipes:
        raise UsageError("detrun.yaml is not here", hint=f"detrun --host {login.address} pair RECIPE")
    tree, at, paths, recipe_archive = None, ".", {}, None
    if recipes:
        tree, at, below = _code(list(recipes.values()), words)
        paths = {index + 1: path for index, path in zip(recipes, below, strict=True)}
        recipe_archive = _absolute_archive(list(recipes.values()), words)
    if ids and not given:
        place = find_place(archive, ids[0], str(login.address))
        if place is not None and place.archive:
            given = (place.archive,)
            sent += ["--archive", place.archive]
    about = ids if name in _BRING else []
    if takes == "id" and not ids and name in ("attach", "report"):
        about = ["@latest"]
    return Job(
        words=tuple(sent),
        tree=tree,
        at=at,
        paths=paths,
        about=tuple(about),
        archive_option=given[-1] if given else None,
        recipe_archive=recipe_archive,
        columns=shutil.get_terminal_size().columns,
        stays=name in _STAY,
        brings=name in _BRING and "--dry-run" not in words.all,
        nights=name == "nightly",
    )


def _recipe_files(recipes: Sequence[Path]) -> list[Path]:
    return [
        file
        for path in recipes
        for file in (sorted([*path.glob("*.yaml"), *path.glob("*.yml")]) if path.is_dir() else [path])
    ]


def _code(recipes: Sequence[Path], words: Words) -> tuple[Tree, str, list[str]]:
    """What is uploaded, the folder to run in, and where each recipe is in it."""
    from detrun.errors import RecipeError
    from detrun.launch.ssh.tree import snapshot
    from detrun.recipe import load_recipe

    folders, files = [], _recipe_files(recipes)
    for file in files:
        folders.append(file.resolve().parent)
        try:
            loaded = load_recipe(file, words.values.get("--set", ()), words.values.get("--arm", ()))
        except RecipeError:
            if len(files) == 1:
                raise
            continue  # a night of many says so itself, and goes on
        workdir = loaded.recipe.launch.workdir
        if loaded.workdir.is_dir() and not Path(str(workdir)).expanduser().is_absolute():
            folders.append(loaded.workdir)
    folders = folders or [path.resolve() for path in recipes]
    tree = snapshot(folders, Path.cwd(), [file.parent.resolve() / file.name for file in files])
    here = Path.cwd().resolve()
    at = here if here.is_relative_to(tree.base) else folders[0]
    below = [(path.parent.resolve() / path.name).relative_to(tree.base).as_posix() for path in map(_whole, recipes)]
    return tree, at.resolve().relative_to(tree.base).as_posix(), below


def _whole(path: Path) -> Path:
    return path.resolve() if path.is_dir() else path.absolute()


def _absolute_archive(recipes: Sequence[Path], words: Words) -> str | None:
    """The archive that a recipe names by an absolute path, which is one there. A relative one would lie in the code."""
    from detrun.errors import RecipeError
    from detrun.recipe import load_recipe

    for file in _recipe_files(recipes):
        try:
            given = load_recipe(file, words.values.get("--set", ())).recipe.archive
        except RecipeError:
            continue
        if given is not None and str(given).startswith(("/", "~")):
            return str(given)
    return None


def far(verb: str) -> int:
    """What `detrun --host` runs on the other machine; nothing for a person to call."""
    from detrun.launch.ssh.far import serve

    return serve(verb)
