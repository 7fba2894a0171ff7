"""The verdict document: verdict.json, and what `--json` prints. One schema, published by `verdict_schema`.

Everything a report shows is in here and in experiment.json, so that a report can be made again from the
archive alone, at any time, without the arms' records.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from detrun.records.files import write_atomically
from detrun.records.jobs import Document, Role

_HIDDEN = re.compile(r"[^\x20-\x7e\n]")

Word = Literal["identical", "diverged", "not-verified"]
Severity = Literal["divergence", "infrastructure", "not-verified", "warning", "info"]


class Part(BaseModel):
    """A part of the document; keys of a newer writer are kept."""

    model_config = ConfigDict(extra="allow")


class Value(Part):
    """A number as it was recorded: IEEE bits in hexadecimal, torch's name of its dtype, and for the eye a value."""

    bits: str
    dtype: str
    value: float | int | str | None = None


class MetricDifference(Part):
    """A metric at its own first differing step, on the lowest rank that differs there.

    ulp: units in the last place. relative: |a - b| / max(|a|, |b|). equal_to_decimals: the largest n up to 6 for which
    both print alike with n decimals. None where a measure does not apply. ranks: all that differ at that step.
    """

    step: int
    ranks: list[int]
    a: Value
    b: Value
    ulp: int | None = None
    relative: float | None = None
    equal_to_decimals: int | None = None


class StateDifference(Part):
    """A digest that differs: a component of the state, the RNG streams or the batch."""

    component: str
    name: str | None = None
    rank: int
    a: str
    b: str
    differing_elements: int | None = None
    ulp: int | None = None


class FirstDivergence(Part):
    """The first step in which anything differs, at its end or (before the first batch) at its beginning.

    stream: what comes first within the step in causal order. ranks: those on which that stream differs there.
    metrics: by name, each at its own first step. state: what differs in this step, on the lowest rank. counted_as: the
    step by the recipe's count, where that counts micro-batches.
    """

    step: int
    counted_as: int | None = None
    boundary: Literal["begin", "end"]
    stream: str
    ranks: list[int]
    arms: list[str]
    metrics: dict[str, MetricDifference] = Field(default_factory=dict)
    state: list[StateDifference] = Field(default_factory=list)


class Finding(Part):
    """What a comparison found, as data. where: arm, arms, rank, ranks, step, metric, stream, path, line."""

    kind: str
    severity: Severity
    where: dict[str, Any] = Field(default_factory=dict)
    what: str
    evidence: dict[str, Any] = Field(default_factory=dict)


class AttemptSummary(Part):
    """One start of an arm, in short. interruption: why it ended by plan. resumed_from: the checkpoint it was given."""

    n: int
    jobs: list[str] = Field(default_factory=list)
    nodes: list[str] = Field(default_factory=list)
    first_step: int | None = None
    last_step: int | None = None
    ended: str | None = None
    exit_code: int | None = None
    remark: str | None = None
    interruption: dict[str, Any] | None = None
    resumed_from: dict[str, Any] | None = None


class ArmSummary(Part):
    """One arm, in short."""

    id: str
    role: Role
    attempts: list[AttemptSummary] = Field(default_factory=list)


class Figure(Part):
    """A measured number, with how many samples it rests on and, where there is one, its 95 % interval."""

    value: float | int
    unit: str
    n: int
    interval: tuple[float, float] | None = None


class Surroundings(Part):
    """What the first arm ran on, in short, so that nights can be told apart by their verdicts alone. Each is None where
    nothing tells. code: a digest of the program's files; recipe: one of the recipe as it was resolved."""

    recipe: str | None = None
    commit: str | None = None
    dirty: bool | None = None
    code: str | None = None
    container: str | None = None
    driver: str | None = None
    gpus: list[str] | None = None
    cpu: str | None = None
    python: str | None = None
    packages: dict[str, str] | None = None
    nodes: list[str] | None = None


class Verdict(Document):
    """The whole answer to one experiment. created and labels: of its experiment.json."""

    called: ClassVar[str] = "verdict"

    id: str
    experiment: str
    recipe: str
    verdict: Word
    exit_code: int
    first_divergence: FirstDivergence | None = None
    culprit: dict[str, Any] | None = None
    findings: list[Finding] = Field(default_factory=list)
    not_verified: list[str] = Field(default_factory=list)
    arms: list[ArmSummary] = Field(default_factory=list)
    figures: dict[str, Figure] = Field(default_factory=dict)
    created: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    environment: Surroundings | None = None

    def to_json(self) -> str:
        """The document as `--json` prints it, with a last newline."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False)
        # All that is not plain text stands inside JSON's strings, where JSON's own escape means the same.
        return _HIDDEN.sub(
            lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], f"{text}\n"
        )

    def write(self, path: Any) -> None:
        """Writes verdict.json by rename; ArchiveError where that fails."""
        write_atomically(Path(path), self.to_json().encode())

    def of_severity(self, *severities: Severity) -> list[Finding]:
        """The findings of these severities, in order."""
        return [finding for finding in self.findings if finding.severity in severities]

    def of_kind(self, *kinds: str) -> list[Finding]:
        """The findings of these kinds, in order."""
        return [finding for finding in self.findings if finding.kind in kinds]


def verdict_schema() -> dict[str, Any]:
    """The JSON Schema of the verdict document."""
    schema = Verdict.model_json_schema(mode="serialization")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "detrun verdict"
    return schema
