"""The root-cause catalog (catalog.yaml) as values: symptom, cause, how to confirm it, its fix, sources, signs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from detrun.compare.culprit import BLAMES, PRECISION

Wanted = bool | int | str | None | list[bool | int | str | None] | dict[str, int]
"""What a sign wants of a fact: a value, any of several, or `min` and `max`."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Sign(_Part):
    """A condition over facts that speaks for an entry (or, of negative weight, against it)."""

    wanted: Mapping[str, Wanted] = Field(alias="if", min_length=1)
    weight: int
    why: str


class Experiment(_Part):
    """One thing that can be changed for all arms. identical, diverged: what it means if they then agree, or do not."""

    name: str
    what: str
    identical: str
    diverged: str


class Entry(_Part):
    """One root cause. experiments: ids of those that tell it from others, the most telling first. excluded_by: those of
    which a clean result (of `unchanged`: a difference) speaks against it."""

    id: str = Field(pattern=r"^[a-z][a-z0-9-]{1,40}$")
    symptom: str
    cause: str
    confirm: str
    experiments: tuple[str, ...] = Field(min_length=1)
    excluded_by: tuple[str, ...] = ()
    fix: str
    sources: tuple[str, ...] = Field(min_length=1)
    signs: tuple[Sign, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Catalog:
    """All entries in their order, and the experiments that they name, by id."""

    entries: tuple[Entry, ...]
    experiments: Mapping[str, Experiment]

    def entry(self, id: str) -> Entry | None:
        """The entry of that id; None where there is none."""
        return next((entry for entry in self.entries if entry.id == id), None)


@cache
def catalog() -> Catalog:
    """The catalog that comes with detrun."""
    text = resources.files("detrun.diagnose").joinpath("catalog.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    # What a failed resume is told to do stands where it is told; here it is only repeated.
    fixes = {blame.catalog: blame.fix for blame in (*BLAMES.values(), PRECISION)}
    return Catalog(
        tuple(Entry.model_validate({"fix": fixes.get(raw["id"]), **raw}) for raw in document["entries"]),
        {id: Experiment.model_validate(raw) for id, raw in document["experiments"].items()},
    )
