"""Night after night: what each recipe came to, since when it diverges, what changed then, and how often it does.

Pure: entries of the index in, a history out. A night is bad for a recipe if any experiment of it diverged: what
passes afterwards says that it may also pass, and takes nothing back. What could not be verified, or did not run, is
neither good nor bad.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from detrun.compare.chance import interval
from detrun.compare.folding import hosts
from detrun.records.index import Entry

CellState = Literal["diverged", "infrastructure", "not-started", "not-verified", "unfinished", "identical"]

WORST: tuple[CellState, ...] = (
    *("diverged", "infrastructure", "not-started", "not-verified", "unfinished", "identical"),
)
"""The first of these that any experiment of a night came to is the night's."""

_BESIDE = ("trace", "diagnose")
"""Kinds that answer another question: that they went well says nothing of the night."""

_COUNTED = ("pair", "resume-check")
"""Kinds whose every run is a trial of the same question. What is run because of a divergence is not."""

_NAMES = {
    "recipe": "the recipe",
    "code": "the program's files",
    "dirty": "uncommitted changes",
    "gpus": "GPUs",
    "cpu": "CPU",
    "python": "Python",
    "nodes": "nodes",
    "host_os": "the nodes' system",
}
_DIGESTS = ("recipe", "code")


@dataclass(frozen=True, slots=True)
class Lost:
    """What a night was to run and could not even start, so that no experiment tells of it."""

    night: str
    recipe: str
    what: str
    created: datetime


@dataclass(frozen=True, slots=True)
class Cell:
    """One recipe in one night. entries: its experiments, the worst first. what: the worst one's headline."""

    state: CellState
    entries: tuple[Entry, ...]
    what: str = ""

    @property
    def step(self) -> int | None:
        """The first step that differs, in the worst experiment."""
        return self.entries[0].step if self.entries and self.state == "diverged" else None


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not as it was. before, after: None where nothing is recorded, or it was not there."""

    what: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class Break:
    """A good night, if there was one, and the next known one, which is bad. silent: nights between, which tell neither.

    changes: None where either's environment is not recorded. culprit: what an experiment of the bad night named.
    """

    first_bad: str
    bad: Entry
    last_good: str | None = None
    good: Entry | None = None
    silent: int = 0
    changes: tuple[Change, ...] | None = None
    culprit: str | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """How many of n trials diverged, and the 95 % interval (Clopper and Pearson) of the chance that one does."""

    kind: str
    diverged: int
    n: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class RecipeHistory:
    """One recipe over the nights. breaks: oldest first. bad: whether the last night that tells is bad; then
    `breaks[-1]` is when that began. flaky: whether one environment saw it both identical and diverged, on the same
    nodes or only on different ones; flaky_nodes: nodes on which nothing but divergences were seen."""

    name: str
    cells: Mapping[str, Cell]
    breaks: tuple[Break, ...]
    bad: bool
    rates: tuple[Rate, ...]
    flaky: Literal["same-nodes", "other-nodes"] | None = None
    flaky_nodes: tuple[str, ...] = ()

    @property
    def latest(self) -> Cell:
        """The newest night's."""
        return list(self.cells.values())[-1]


@dataclass(frozen=True, slots=True)
class History:
    """Nights, oldest first, and recipes by name."""

    nights: tuple[str, ...]
    recipes: tuple[RecipeHistory, ...]
    experiments: int


def history(entries: Iterable[Entry], lost: Iterable[Lost] = (), since: datetime | None = None) -> History:
    """The history of these experiments, oldest first. since: nights that ended before are left out of what is shown
    and counted, and still tell when something broke."""
    entries = list(entries)
    lost = list(lost)
    began: dict[str, datetime] = {}
    newest: dict[str, datetime] = {}
    everything: list[Entry | Lost] = [*entries, *lost]
    for each in everything:
        began[each.night] = min(began.get(each.night, each.created), each.created)
        newest[each.night] = max(newest.get(each.night, each.created), each.created)
    nights = sorted(began, key=lambda night: (began[night], night))
    shown = [night for night in nights if since is None or newest[night] >= since]
    by_recipe: dict[str, dict[str, list[Entry]]] = {}
    missing: dict[str, dict[str, list[Lost]]] = {}
    for entry in entries:
        by_recipe.setdefault(entry.recipe, {}).setdefault(entry.night, []).append(entry)
    for item in lost:
        by_recipe.setdefault(item.recipe, {}).setdefault(item.night, [])
        missing.setdefault(item.recipe, {}).setdefault(item.night, []).append(item)
    by_id = {entry.id: entry for entry in entries}
    recipes = [
        _recipe(name, nights, set(shown), by_night, missing.get(name, {}), by_id)
        for name, by_night in sorted(by_recipe.items())
    ]
    within = set(shown)
    counted = sum(entry.night in within for entry in entries)
    return History(tuple(shown), tuple(each for each in recipes if each.cells), counted)


def _recipe(
    name: str,
    nights: Sequence[str],
    shown: set[str],
    by_night: Mapping[str, list[Entry]],
    lost: Mapping[str, list[Lost]],
    by_id: Mapping[str, Entry],
) -> RecipeHistory:
    cells = {
        night: cell
        for night in nights
        if night in by_night and (cell := _cell(by_night[night], lost.get(night, []))) is not None
    }
    breaks, bad = _breaks(cells, by_id)
    visible = {night: cell for night, cell in cells.items() if night in shown}
    inside = [entry for night in visible for entry in cells[night].entries]
    told = tuple(each for each in breaks if each.first_bad in shown or (bad and each is breaks[-1]))
    flaky, nodes = _flaky(inside)
    return RecipeHistory(name, visible, told, bad, _rates(inside), flaky, nodes)


def state_of(entry: Entry) -> CellState | None:
    """What an experiment says of its night; None for one that answers another question."""
    if entry.verdict == "diverged":
        return "diverged"
    if entry.experiment in _BESIDE:
        return None
    if entry.verdict == "identical":
        return "identical"
    if entry.state == "unfinished":
        return "unfinished"
    return "infrastructure" if entry.exit_code == 4 else "not-verified"


def _cell(entries: Sequence[Entry], lost: Sequence[Lost]) -> Cell | None:
    stated = [(state, entry) for entry in entries if (state := state_of(entry)) is not None]
    # Of what is equally bad, what was asked first comes first: what is run because of it only says more.
    stated.sort(key=lambda each: (WORST.index(each[0]), each[1].experiment not in _COUNTED))
    states: list[CellState] = [state for state, _ in stated]
    if lost:
        states.append("not-started")
    if not states:
        return None
    worst = min(states, key=WORST.index)
    what = lost[0].what if worst == "not-started" else stated[0][1].what
    return Cell(worst, tuple(entry for _, entry in stated), what)


def _breaks(cells: Mapping[str, Cell], by_id: Mapping[str, Entry]) -> tuple[list[Break], bool]:
    breaks: list[Break] = []
    good: tuple[str, Cell] | None = None
    bad = False
    silent = 0
    for night, cell in cells.items():
        if cell.state == "diverged":
            if not bad:
                breaks.append(_break(night, cell, good, silent, by_id))
            bad, silent = True, 0
        elif cell.state == "identical":
            bad, good, silent = False, (night, cell), 0
        else:
            silent += 1
    return breaks, bad


def _break(night: str, cell: Cell, good: tuple[str, Cell] | None, silent: int, by_id: Mapping[str, Entry]) -> Break:
    worst = cell.entries[0]
    baseline = by_id.get(worst.baseline or "") if worst.experiment == "against" else None
    before = baseline or (_fellow(worst, good[1]) if good else None)
    named = next((each.culprit["name"] for each in cell.entries if each.culprit and each.culprit.get("name")), None)
    culprit = None if named is None else str(named).partition(" of ")[0].removesuffix(".default")
    if before is None:
        return Break(night, worst, silent=silent, culprit=culprit)
    changes = None
    if worst.environment is not None and before.environment is not None:
        changes = tuple(what_changed(before.environment, worst.environment))
    return Break(
        night, worst, before.night if baseline else good[0] if good else None, before, silent, changes, culprit
    )


def _fellow(entry: Entry, cell: Cell) -> Entry:
    """Of a good night's experiments the newest that tells its environment, best of the same kind."""
    return max(
        cell.entries,
        key=lambda each: (each.environment is not None, each.experiment == entry.experiment, each.created),
    )


def what_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """What differs between two environments as verdicts have them; what neither records is left out."""
    found: list[Change] = []
    for key in dict.fromkeys([*before, *after]):
        a, b = before.get(key), after.get(key)
        if a == b:
            continue
        if key == "packages":
            found += _packages(a, b)
        else:
            found.append(Change(_NAMES.get(key, key), _in_words(key, a), _in_words(key, b)))
    # What is named by a version says more than a digest, and nodes change every night.
    return sorted(found, key=lambda change: (change.what in ("nodes",), change.what == _NAMES["recipe"]))


def _packages(a: Any, b: Any) -> list[Change]:
    if not isinstance(a, dict) or not isinstance(b, dict):
        seen = [None if each is None else f"{len(each)} recorded" for each in (a, b)]
        return [Change("packages", *seen)]
    return [
        Change(name, _text(a.get(name)), _text(b.get(name))) for name in sorted({*a, *b}) if a.get(name) != b.get(name)
    ]


def _in_words(key: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        names = [str(each) for each in value]
        return hosts(names) if key == "nodes" else ", ".join(dict.fromkeys(names))
    if key in _DIGESTS:
        return str(value).partition(":")[2][:12] or str(value)[:12]
    return str(value)[:12] if key == "commit" else _text(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _rates(entries: Sequence[Entry]) -> tuple[Rate, ...]:
    rates = []
    for kind in _COUNTED:
        trials = [_trials(entry) for entry in entries if entry.experiment == kind and entry.verdict is not None]
        n, diverged = sum(each[0] for each in trials), sum(each[1] for each in trials)
        if n:
            rates.append(Rate(kind, diverged, n, *interval(diverged, n)))
    return tuple(rates)


def _trials(entry: Entry) -> tuple[int, int]:
    """How often an experiment asked, and how often the answer was that it diverged."""
    if entry.verdict == "not-verified":
        return 0, 0
    if (
        entry.experiment == "pair"
        and entry.pairs is not None
        and 0 <= entry.pairs[1] <= entry.pairs[0]
        and entry.pairs[0]
    ):
        return entry.pairs
    return 1, int(entry.verdict == "diverged")


def _flaky(entries: Sequence[Entry]) -> tuple[Literal["same-nodes", "other-nodes"] | None, tuple[str, ...]]:
    """Whether an environment saw both; where only the nodes tell them apart, those on which all diverged."""
    seen: dict[Any, list[tuple[tuple[str, ...], int, int]]] = {}
    for entry in entries:
        if entry.experiment not in _COUNTED or entry.environment is None:
            continue
        n, diverged = _trials(entry)
        if n:
            key = (entry.experiment, _key(entry.environment))
            nodes = entry.environment.get("nodes")
            names = tuple(str(each) for each in nodes) if isinstance(nodes, list) else ()
            seen.setdefault(key, []).append((names, n, diverged))
    other: tuple[str, ...] | None = None
    for trials in seen.values():
        n, diverged = sum(each[1] for each in trials), sum(each[2] for each in trials)
        if not 0 < diverged < n:
            continue
        by_nodes: dict[tuple[str, ...], list[int]] = {}
        for nodes, count, bad in trials:
            tally = by_nodes.setdefault(nodes, [0, 0])
            tally[0] += count
            tally[1] += bad
        if any(0 < bad < count for count, bad in by_nodes.values()):
            return "same-nodes", ()
        clean = {node for nodes, (_, bad) in by_nodes.items() if not bad for node in nodes}
        other = tuple(sorted({node for nodes, (_, bad) in by_nodes.items() if bad for node in nodes} - clean))
    return ("other-nodes", other) if other is not None else (None, ())


def _key(environment: Mapping[str, Any]) -> Any:
    packages = environment.get("packages")
    rest = json.dumps({k: v for k, v in environment.items() if k not in ("packages", "nodes")}, sort_keys=True)
    try:
        return rest, frozenset(packages.items()) if isinstance(packages, dict) else None
    except TypeError:
        return rest, json.dumps(packages, sort_keys=True)
