"""Reads a recipe: text to data, overrides, checks, and one error that names file, line and remedy.

read_text ──► parse ──► overrides ──► numbers that stand for text ──► models, placeholders ──► LoadedRecipe
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from detrun.errors import RecipeError
from detrun.recipe import outline, problems
from detrun.recipe import overrides as command_line
from detrun.recipe.document import Document, Key, dotted, parse, read_text
from detrun.recipe.placeholders import PLACEHOLDERS, check
from detrun.recipe.problems import Problem
from detrun.recipe.schema import Recipe
from detrun.recipe.values import plain_name

# Where placeholders are read; * is any key or item.
_EXPANDED: tuple[tuple[str, ...], ...] = (
    ("launch", "command", "*"),
    ("launch", "args", "*"),
    ("launch", "env", "*"),
    ("metrics", "path"),
    ("metrics", "also", "path"),
    ("metrics", "also", "*", "path"),
    ("checkpoint", "directory"),
    ("checkpoint", "save_args", "*"),
    ("checkpoint", "resume_args", "*"),
    ("arms", "*", "args", "*"),
    ("arms", "*", "env", "*"),
    ("interrupt", "command", "*"),
    ("interrupt", "*", "command", "*"),
)
_PATTERN = ("checkpoint", "pattern")
_FROM_OUTSIDE = ("kill", "signal")
"""Interruptions that need nobody in the process."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and where it came from. lines: dotted key -> line in the file, for keys the file gave."""

    recipe: Recipe
    path: Path
    lines: dict[str, int]
    text: str
    options: Mapping[Key, str]
    document: Document

    @property
    def recipe_dir(self) -> Path:
        """The folder that holds the recipe, absolute: `{recipe_dir}`."""
        return self.path.parent.absolute()

    @property
    def workdir(self) -> Path:
        """Where the command runs, absolute."""
        return self._folder("launch.workdir", self.recipe_dir, self.recipe.launch.workdir)

    @property
    def archive(self) -> Path | None:
        """The recipe's archive, absolute; None if it names none.

        A relative one starts where the command runs, so that `detrun report` finds there what `detrun pair` wrote.
        """
        given = self.recipe.archive
        return None if given is None else self._folder("archive", Path.cwd(), given)

    def interrupt_key(self, index: int) -> str:
        """The dotted key of an interruption, as the file has it: one of its own, or an item of a list."""
        data = self.document.data
        single = isinstance(data, dict) and isinstance(data.get("interrupt"), dict)
        return "interrupt" if single else f"interrupt.{index}"

    def _folder(self, key: str, start: Path, text: str) -> Path:
        try:
            return (start / Path(text).expanduser()).resolve()
        except RuntimeError as error:  # pathlib's word for a home that is nobody's, and for links that go in circles
            raise self.error(key, f"{key}: {text!r} is no folder: {error}") from None

    def error(self, key: str, what: str, hint: str | None = None) -> RecipeError:
        """A RecipeError that shows the line of the dotted `key`, or names its option: for checks made later."""
        try:
            problems.raise_for([Problem(_parsed(key), what, hint or "")], self.document, self.options)
        except RecipeError as error:
            return error
        raise AssertionError("one problem always raises")


def load_recipe(path: Path, overrides: Sequence[str] = (), arms: Sequence[str] = ()) -> LoadedRecipe:
    """Read and check the recipe at `path`.

    overrides: `key.path=value`, as after --set. arms: `b.env.KEY=VALUE` or `b.args=…`, as after --arm. Raises
    RecipeError, with the file and line or the option, the key, what was wanted, and the nearest match. Nothing in a
    recipe runs while it is read.
    """
    path = Path(path)
    where = str(path)
    document = parse(read_text(path, where), where)
    data = document.data
    sources = dict(document.sources)
    options = command_line.apply(data, overrides, arms, sources)
    data = _keep_text(data, (), sources)
    if isinstance(data, dict):
        data.setdefault("name", plain_name(path.stem))
    wrong = list(_placeholder_problems(data))
    recipe = None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        wrong = problems.from_pydantic(error.errors(include_url=False), data) + wrong
    problems.raise_for(wrong, document, options)
    if recipe is None:
        raise AssertionError("a recipe that does not validate has problems")
    lines = {dotted(key): mark.line for key, mark in document.marks.items() if problems.option_of(options, key) is None}
    return LoadedRecipe(recipe, path, lines, document.text, options, document)


def check_launchable(loaded: LoadedRecipe) -> None:
    """Refuse what a recipe may say and cannot be launched from here. Raises RecipeError."""
    check_supported(loaded)
    if not loaded.workdir.is_dir():
        raise loaded.error(
            "launch.workdir",
            f"launch.workdir: {loaded.workdir} is not a folder",
            "a relative path starts at the recipe's folder.",
        )


def check_supported(loaded: LoadedRecipe) -> None:
    """Refuse what the schema knows and no run can do. Raises RecipeError."""
    source = loaded.recipe.metrics.source
    for index, interrupt in enumerate(loaded.recipe.interrupt if source != "recorder" else ()):
        key = loaded.interrupt_key(index)
        if interrupt.kind not in _FROM_OUTSIDE:
            raise loaded.error(
                f"{key}.kind",
                f"{key}.kind: {interrupt.kind} needs the recorder in the process, and metrics.source is {source}",
                "kill and signal are done from outside, once the step can be seen in what the program writes.",
            )
        if interrupt.moment != "end" or interrupt.ranks != "all" or interrupt.node is not None:
            what = "moment" if interrupt.moment != "end" else "node" if interrupt.node is not None else "ranks"
            raise loaded.error(
                f"{key}.{what}",
                f"{key}.{what}: only the recorder in the process can do that, and metrics.source is {source}",
                "from outside all ranks are hit, after a step.",
            )


def check_recorded(loaded: LoadedRecipe, command: str) -> None:
    """Refuse a recipe without the recorder for a command that looks into the process. Raises RecipeError."""
    source = loaded.recipe.metrics.source
    if source != "recorder":
        raise loaded.error(
            "metrics.source",
            f"metrics.source: {command} looks into the process, and source {source} leaves the recorder out",
            "write source: recorder, or --set metrics.source=recorder.",
        )


def check_interrupts(loaded: LoadedRecipe) -> None:
    """Hold `interrupt` against steps and ranks, which --set may have changed. Raises RecipeError."""
    recipe = loaded.recipe
    for index, interrupt in enumerate(recipe.interrupt):
        key = loaded.interrupt_key(index)
        if interrupt.at_step is not None and interrupt.at_step > recipe.steps:
            raise loaded.error(
                f"{key}.at_step",
                f"{key}.at_step: {interrupt.at_step} is after the last step (steps is {recipe.steps})",
                "it would never happen: choose an earlier step.",
            )
        if interrupt.at_step == recipe.steps and interrupt.moment in ("after-save", "accumulation"):
            raise loaded.error(
                f"{key}.at_step",
                f"{key}.at_step: {interrupt.at_step} is the last step, moment {interrupt.moment} is in the next one",
                "choose an earlier step, or moment: end.",
            )
        ranks = () if interrupt.ranks == "all" else interrupt.ranks
        for rank in (ranks,) if isinstance(ranks, int) else ranks:
            if rank >= recipe.total_ranks:
                raise loaded.error(
                    f"{key}.ranks",
                    f"{key}.ranks: there is no rank {rank} (ranks are 0 to {recipe.total_ranks - 1})",
                    "launch.nodes × launch.ranks_per_node is the number of ranks.",
                )
        if interrupt.node is not None and interrupt.node >= recipe.launch.nodes:
            raise loaded.error(
                f"{key}.node",
                f"{key}.node: there is no node {interrupt.node} (nodes are 0 to {recipe.launch.nodes - 1})",
                "launch.nodes is the number of nodes.",
            )


def _parsed(key: str) -> Key:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def _keep_text(value: Any, key: Key, sources: Mapping[Key, str]) -> Any:
    """`value` with every number that stands for text as it was written: `1e-3` stays `1e-3`."""
    if isinstance(value, dict):
        return {name: _keep_text(below, (*key, name), sources) for name, below in value.items()}
    if isinstance(value, list):
        return [_keep_text(below, (*key, index), sources) for index, below in enumerate(value)]
    if key in sources and outline.is_text(key) and not (isinstance(value, bool) and outline.is_switch(key)):
        return sources[key]
    return value


def _placeholder_problems(data: Any) -> Iterator[Problem]:
    checkpoint = data.get("checkpoint") if isinstance(data, dict) else None
    saves = isinstance(checkpoint, dict) and checkpoint.get("save_every") is not None
    for pattern in _EXPANDED:
        allowed = dict(PLACEHOLDERS)
        if pattern[:2] != ("checkpoint", "resume_args"):
            del allowed["checkpoint"]
        if not saves:
            del allowed["save_every"]
        if pattern[0] == "interrupt":
            allowed = {name: about for name, about in allowed.items() if name in ("seed", "steps", "nodes", "ranks")}
            allowed.update(node="the name of the node that is to fail", job="the job's id")
        for key, text in _texts(data, pattern, ()):
            fault = check(text, allowed)
            if fault:
                yield Problem(key, f"{dotted(key)}: {fault.what}", fault.hint)
    for key, text in _texts(data, _PATTERN, ()):
        fault = check(text, {"step": "the checkpoint's step"})
        if fault:
            yield Problem(key, f"{dotted(key)}: {fault.what}", fault.hint)
        elif text.count("{step}") != 1:
            yield Problem(
                key,
                f"{dotted(key)}: {text!r} holds {{step}} {text.count('{step}')} times, wanted once",
                "for example step-{step}",
            )
        elif text.startswith("/") or ".." in text.split("/"):
            yield Problem(
                key,
                f"{dotted(key)}: {text!r} leads out of checkpoint.directory",
                "for example step-{step}, a path below that folder",
            )


def _texts(value: Any, pattern: tuple[str, ...], key: Key) -> Iterator[tuple[Key, str]]:
    """Every text in `value` whose key path fits `pattern`."""
    if not pattern:
        if isinstance(value, str):
            yield key, value
        return
    part, rest = pattern[0], pattern[1:]
    if isinstance(value, dict):
        names = value if part == "*" else [part] if part in value else []
        for name in names:
            yield from _texts(value[name], rest, (*key, name))
    elif isinstance(value, list) and part == "*":
        for index, below in enumerate(value):
            yield from _texts(below, rest, (*key, index))
