"""Which source a run's numbers come from and how they are found in it: a recipe's `metrics` as a reader needs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from detrun.errors import RecordError


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """source: tensorboard, jsonl, csv, wandb or log. path: a file, a folder or a glob, already expanded; None: the
    arm's own logs. pattern: a shipped pattern's name or a file's path. step: the key or column that holds the step.
    names: ours: theirs. every: steps from one reading to the next. first_step: the number that the program gives to its
    first step."""

    source: str
    path: str | None = None
    pattern: str | None = None
    step: str = "step"
    names: Mapping[str, str] = field(default_factory=dict)
    every: int = 1
    first_step: int = 1

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "names": dict(self.names)}

    @staticmethod
    def read(data: Any) -> SourceSpec:
        """The inverse of `as_dict`. Raises RecordError for what nobody of us has written."""
        try:
            spec = SourceSpec(**data)
        except TypeError:
            raise RecordError("holds no source of metrics as detrun writes it") from None
        texts = (spec.source, spec.step, *spec.names, *spec.names.values())
        optional = (spec.path, spec.pattern)
        whole = all(type(n) is int and n >= 0 for n in (spec.every, spec.first_step)) and spec.every >= 1
        if (
            not whole
            or not all(isinstance(t, str) for t in texts)
            or not all(isinstance(t, str | None) for t in optional)
        ):
            raise RecordError("holds no source of metrics as detrun writes it")
        return spec


def sources_of(metrics: Mapping[str, Any]) -> list[SourceSpec]:
    """The sources that a recipe's `metrics` names beside the recorder, the main one first."""
    found = []
    names = metrics.get("names") or {}
    if metrics.get("source", "recorder") != "recorder":
        found.append(_spec(metrics, names))
    found += [_spec(entry, {**names, **(entry.get("names") or {})}) for entry in metrics.get("also") or ()]
    return found


def _spec(entry: Mapping[str, Any], names: Mapping[str, str]) -> SourceSpec:
    return SourceSpec(
        source=str(entry["source"]),
        path=entry.get("path"),
        pattern=entry.get("pattern"),
        step=entry.get("step") or "step",
        names=dict(names),
        every=entry.get("every") or 1,
        first_step=1 if entry.get("first_step") is None else int(entry["first_step"]),
    )


def candidates(spec: SourceSpec, ours: str, known: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """What a metric may be called in the source, the likeliest first. known: by the pattern's word."""
    if ours in spec.names:
        return (spec.names[ours],)
    return tuple(dict.fromkeys((*known.get(ours, ()), ours)))
