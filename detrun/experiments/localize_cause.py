"""Why the culprit differs: the operation alone on its kept inputs, and the catalog's entries that fit what is known."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from detrun.compare.trace_shared import members
from detrun.compare.trace_summary import Lead
from detrun.diagnose.facts import (
    Facts,
    facts_of_bytes,
    facts_of_divergence,
    facts_of_environments,
    facts_of_lead,
    merged,
)
from detrun.diagnose.kept_call import CannotReproduceError, KeptCall, call_of
from detrun.diagnose.match import match
from detrun.diagnose.reproduction import Outcome, run_script, write_collective_script, write_script
from detrun.errors import DetrunError, RecordError
from detrun.experiments.localize_bytes import EventReading, TensorReading
from detrun.records.environment_reader import read_environment
from detrun.records.kept_reader import read_kept
from detrun.records.layout import AttemptFolder, ExperimentFolder
from detrun.records.verdict import Finding

if TYPE_CHECKING:
    from detrun.experiments.localize_verdict import Descent, Traced

RUNS = 12
"""How often a reproduction repeats its operation."""

MOST_CAUSES = 3


@dataclass(frozen=True)
class Reproduction:
    """The stand-alone script of an event, and what came of running it. outcome: None where there is no script."""

    script: str | None
    outcome: Outcome | None
    why_not: str = ""

    def finding(self) -> Finding:
        if self.outcome is None:
            return Finding(kind="reproduction", severity="info", what=self.why_not, evidence={"text": self.why_not})
        found = self.outcome
        evidence = {"script": self.script, "distinct": found.distinct, "runs": found.runs, "text": found.text}
        return Finding(kind="reproduction", severity="info", what=found.text, evidence=evidence)


def reproduce(
    folder: ExperimentFolder, reading: EventReading, attempts: Sequence[AttemptFolder], group: str
) -> Reproduction:
    """Writes the script of a settled event into `repro/`, and runs it here: nothing is offered that was not tried.

    attempts: of arm a and b, where a collective's other members kept their tensors. group: its members' ranks.
    """
    assert reading.a is not None
    place = folder.path / "repro"
    try:
        ranks = members(group)
        if ranks:
            path = write_collective_script(_calls(reading, attempts, ranks), place)
        else:
            path = write_script(reading.a, place, other=reading.b)
    except CannotReproduceError as error:
        return Reproduction(None, None, f"no script: it {error}")
    except DetrunError as error:
        return Reproduction(None, None, f"no script: {error}")
    return Reproduction(path.relative_to(folder.path).as_posix(), run_script(path, sys.executable, RUNS))


def _calls(
    reading: EventReading, attempts: Sequence[AttemptFolder], ranks: Sequence[int]
) -> dict[str, dict[int, KeptCall]]:
    """The calls of all members of a collective, by arm. Raises CannotReproduceError where one kept nothing."""
    calls: dict[str, dict[int, KeptCall]] = {}
    for arm, attempt in zip(("a", "b"), attempts, strict=True):
        for rank in ranks:
            event = next((each for each in read_kept(attempt, rank) if each.key == reading.key), None)
            if event is None:
                raise CannotReproduceError(f"is a collective of which rank {rank} kept nothing in arm {arm}")
            calls.setdefault(arm, {})[rank] = call_of(event)
    return calls


def facts_of(descent: Descent, decisive: Traced, lead: Lead, reading: EventReading | None) -> Facts:
    """Everything that the passes have shown, for the catalog."""
    parts: list[Mapping[str, Any]] = []
    if descent.first is not None:
        parts.append(facts_of_divergence(descent.first))
    a, b = decisive.attempts
    environments = [_environment(attempt, lead.rank) for attempt in (a, b)]
    if environments[0] is not None and environments[1] is not None:
        parts.append(facts_of_environments(environments[0], environments[1]))
    parts.append(facts_of_lead(lead, decisive.comparison))
    repeats = [traced.verdict.first_divergence is not None for traced in descent.traced]
    parts.append({"comes_back": all(repeats) if repeats else None})
    if reading is not None and reading.missing is None:
        parts.append(_of_bytes(lead, reading))
    if descent.baseline is not None and descent.baseline.resumed:
        component = (descent.baseline.verdict.culprit or {}).get("component")
        parts.append({"resume": True, "component": component})
    return merged(parts)


def causes_of(facts: Facts) -> list[Finding]:
    """The catalog's entries that fit, the likeliest first."""
    return [found.finding() for found in match(facts)[:MOST_CAUSES]]


def _of_bytes(lead: Lead, reading: EventReading) -> dict[str, Any]:
    side = "output" if lead.role == "origin" else "input"
    tensor = next((each for each in reading.differing(side) if each.difference is not None), None)
    found: dict[str, Any] = {}
    if reading.a is not None and reading.b is not None:
        if reading.a.threads != reading.b.threads:
            # Which kernels are launched then follows from that.
            found["threads_differ"] = True
        elif reading.a.settings is not None:
            chosen = [(event.kernels, event.settings) for event in (reading.a, reading.b)]
            found["configurations_differ"] = chosen[0] != chosen[1]
        found["threads"] = reading.a.threads
        found["deterministic"] = reading.a.deterministic
    if tensor is not None and tensor.difference is not None:
        found.update(facts_of_bytes(tensor.dtype, asdict(tensor.difference), *_raw(reading, tensor)))
    return found


def _raw(reading: EventReading, tensor: TensorReading) -> tuple[bytes, bytes]:
    """The bytes of one part in both arms."""
    found = []
    for event in (reading.a, reading.b):
        assert event is not None
        same = (each for each in event.tensors if (each.side, each.index, each.part) == tensor.place)
        found.append(event.bytes_of(next(same)))
    return found[0], found[1]


def _environment(attempt: AttemptFolder, rank: int) -> Any:
    try:
        return read_environment(attempt.environment(rank), rank)
    except RecordError:
        return None
