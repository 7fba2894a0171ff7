"""An adapter without a run behind it: what it was told, and what it lacks. For frameworks that are made up here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from detrun.recorder.adapters.adapter import Adapter


class Bench:
    """told: every metric as (name, value, source). saved: every save's path. done: what was said of steps done."""

    def __init__(self, name: str = "standin") -> None:
        self.told: list[tuple[str, Any, str]] = []
        self.saved: list[str | None] = []
        self.clipped: list[Any] = []
        cost = SimpleNamespace(adapters=[])
        draft = SimpleNamespace(clip_norms=[])
        numbering = SimpleNamespace(done=0, shift=None, first=lambda: 1)
        self.session: Any = SimpleNamespace(
            cost=cost, draft=draft, numbering=numbering, held=None, closed=0, in_step=False, told=0
        )
        self.session.run = lambda event, *args: event(*args)
        self.session.tell = lambda name, value, source, step=None: self.told.append((name, value, source))
        self.session.when_claimed = lambda action: None
        self.session.write_cost = lambda: None
        self.observer: Any = SimpleNamespace(
            session=self.session,
            when_forward_ended=[],
            batch_of=[],
            restoring=0,
            during_save=self._during_save,
            clip_begins=lambda parameters: None,
            clip_ends=self.clipped.append,
        )
        self.adapter = Adapter(name, (), self.session, self.observer)

    @property
    def lacks(self) -> list[str]:
        facts: list[str] = self.session.cost.adapters[0].lacks
        return facts

    @contextmanager
    def _during_save(self, path: str | None, _writer: str) -> Iterator[None]:
        self.saved.append(path)
        yield


def module(name: str, **content: Any) -> ModuleType:
    """A module with these in it, which say that they are from there."""
    made = ModuleType(name)
    for key, value in content.items():
        if isinstance(value, type):
            value.__module__ = name
            value.__qualname__ = key
        setattr(made, key, value)
    return made


def kind(**content: Any) -> type:
    """A class with these in it."""
    return type("Made", (), content)


def nothing(*_names: str) -> Callable[..., None]:
    """A function that does nothing."""
    return lambda *args, **kwargs: None
