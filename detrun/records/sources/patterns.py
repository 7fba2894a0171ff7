"""Named patterns: what a program calls its metrics and how the lines of its log are read. Data, shipped or a user's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from detrun.errors import RecordError
from detrun.records.files import one_line, read_plain

SHIPPED = Path(__file__).with_name("patterns.yaml")
MAX_BYTES = 1 << 20


def _compiles(text: str) -> str:
    try:
        re.compile(text.replace("{name}", "x"))
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text


Regex = Annotated[str, AfterValidator(_compiles)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LogPattern(_Part):
    """How a line is read; see patterns.yaml for each key."""

    head: Regex | None = None
    field: Regex | None = None
    glued: Regex | None = None
    line: Regex | None = None
    fields: tuple[Regex, ...] = ()
    averaged: tuple[Regex, ...] = ()
    keeps_first: bool = False
    skipped: str | None = None
    whole: str | None = None
    omits: str | None = None
    starts: tuple[Regex, ...] = ()

    @model_validator(mode="after")
    def _readable(self) -> LogPattern:
        if self.line is not None:
            if self.head is not None or self.field is not None:
                raise ValueError("has line, and beside it head or field: either is enough")
            if "step" not in re.compile(self.line).groupindex:
                raise ValueError("line has no group (?P<step>…)")
            return self
        if self.head is None or self.field is None:
            raise ValueError("has neither line nor head and field")
        if "step" not in re.compile(self.head).groupindex:
            raise ValueError("head has no group (?P<step>…)")
        for text in (self.field, self.glued):
            if text is not None and ("{name}" not in text or "(?P<number>" not in text):
                raise ValueError("field and glued hold {name} and a group (?P<number>…)")
        return self


class Pattern(_Part):
    """One program's entry."""

    names: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    recorded: Mapping[str, str] = Field(default_factory=dict)
    derived: tuple[Regex, ...] = ()
    log: LogPattern | None = None

    def is_derived(self, theirs: str) -> bool:
        """Whether a metric, by its name in the source, is bookkeeping that may restart on resume."""
        return matches(theirs, self.derived)


def is_file(name: str) -> bool:
    """Whether a pattern is given by a file's path and not by a shipped one's name."""
    return "/" in name or name.endswith((".yaml", ".yml"))


def matches(text: str, expressions: Iterable[str]) -> bool:
    return any(re.fullmatch(expression, text) for expression in expressions)


def load_pattern(name: str | None) -> Pattern:
    """A shipped pattern by its name, or the one in a YAML file by its path; without a name, none.

    A file holds one pattern, or shipped-like entries of which one is called as the file is. Raises RecordError.
    """
    if name is None:
        return Pattern()
    if not is_file(name):
        shipped = _shipped()
        if name not in shipped:
            known = ", ".join(sorted(shipped))
            raise RecordError(
                f"no pattern is called {one_line(name, 60)}", hint=f"shipped are {known}; or give a YAML file's path"
            )
        return shipped[name]
    raw = read_plain(Path(name), MAX_BYTES)
    return _pattern(_yaml(raw, name), name)


@lru_cache(maxsize=1)
def _shipped() -> dict[str, Pattern]:
    data = _yaml(SHIPPED.read_bytes(), str(SHIPPED))
    return {name: _pattern(entry, f"{SHIPPED}: {name}") for name, entry in data.items()}


def _yaml(raw: bytes, where: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecordError(f"is not valid YAML ({one_line(str(error), 120)})", where=where) from None
    if not isinstance(data, dict):
        raise RecordError("holds no pattern: a mapping with names, derived and log is wanted", where=where)
    return data


def _pattern(data: Any, where: str) -> Pattern:
    try:
        return Pattern.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise RecordError(f"is no pattern: {one_line(f'{key}: {said}' if key else said)}", where=where) from None
