"""Where a walk over a program's objects starts, and how it came to each of them."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Literal

from detrun.recorder import live_words
from detrun.recorder.hidden import hidden_iterators
from detrun.recorder.liveness import live_variables
from detrun.recorder.owned import is_program_file, program_modules

Origin = Literal["program", "module", "feed"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object is. name: dotted, as the program has it. owner: what the name is told apart by if it is taken.
    origin: what holds it: a module, what feeds the training with data, or something else of the program. proven:
    reached through live variables alone. quiet: it never counts alone, as it is inside a library's own code, or a copy
    that was made to be saved."""

    name: str
    owner: str
    origin: Origin = "program"
    proven: bool = False
    quiet: bool = False

    def child(self, suffix: str, *, proven: bool = False, quiet: bool = False) -> Place:
        """What it holds under `suffix`: `.weight`, `[3]`, or "" for the same thing behind a wrapper."""
        origin: Origin = "feed" if live_words.says_feed(suffix) else self.origin
        return Place(self._name(suffix), self.owner, origin, proven, quiet or self.quiet)

    def of_module(self, suffix: str) -> Place:
        """An attribute of a module, or a module in it, whatever its name says."""
        return Place(self._name(suffix), self.owner, "module", False, self.quiet)

    def _name(self, suffix: str) -> str:
        return self.name + suffix if self.name else suffix.lstrip(".")


Entry = tuple[Place, Any]


def program_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames that run the program's own code, innermost first."""
    while frame is not None:
        if is_program_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def variables(frame: FrameType | None) -> list[Entry]:
    """The live variables of the program's frames. What `self` holds has no `self` in its name."""
    found = []
    for own in program_frames(frame):
        owner = own.f_code.co_name.strip("<>")
        for name, value in live_variables(own).items():
            if not _is_passed_over(name, value, own.f_globals):
                shown = "" if name in ("self", "cls") else name.strip(".")
                found.append((Place(shown, owner if shown else type(value).__name__, _origin(name), True), value))
    return found


def module_globals(frame: FrameType | None) -> list[Entry]:
    """The globals of the program's modules, except for a module that is being run: its globals are variables."""
    running = {id(own.f_globals) for own in program_frames(frame) if own.f_code.co_name == "<module>"}
    found = []
    for module_name, module in program_modules():
        if id(module.__dict__) not in running:
            prefix = "" if module_name == "__main__" else f"{module_name}."
            found += [
                (Place(prefix + name, module_name, _origin(name)), value)
                for name, value in list(module.__dict__.items())
                if not _is_passed_over(name, value, module.__dict__)
                and type(value) not in (FunctionType, ModuleType, type)
            ]
    return found


def loops() -> list[Entry]:
    """Iterators of loops, which no variable holds."""
    return [(Place(name, "loop", "feed", True), item) for name, item in hidden_iterators()]


def _origin(name: str) -> Origin:
    return "feed" if live_words.says_feed(name) else "program"


def _is_passed_over(name: str, value: object, namespace: Mapping[str, Any]) -> bool:
    """Python's own names, and constants: numbers in capitals that no function assigns."""
    if name.startswith("__") or not name.isupper() or type(value) not in (bool, int, float, tuple):
        return name.startswith("__")
    functions = [each for each in list(namespace.values()) if type(each) is FunctionType]
    return not any(name in _assigned_globals(each.__code__) for each in functions if each.__globals__ is namespace)


@lru_cache(maxsize=1024)
def _assigned_globals(code: CodeType) -> frozenset[str]:
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return frozenset()
    return frozenset(each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL")
