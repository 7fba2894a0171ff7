"""The table of state around a restore: what was equal when the checkpoint was written, and what after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detrun.compare.folding import ranks_in_words
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Finding, Verdict

_SHOWN = {"different": "DIFFERENT", "missing": "MISSING", "unseeded": "never seeded", "late": "restored late"}
_CALLED = {
    "local": "variables",
    "module-state": "module attributes",
    "ema": "averaged weights",
    "hyperparameters": "hyper-parameters",
    "scaler": "gradient scaler",
    "scheduler": "scheduler",
    "loader": "data loader",
    "tracked": "detrun.track",
    "batch": "batch",
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
}
"""What a table calls a component. Any other label but a random number stream's is a state of the optimizer's."""

_ORDER = (
    *("parameters", "buffers", "gradients", "optimizer", "hyperparameters", "scheduler", "scaler", "module-state"),
    *("ema", "tracked", "local", "RNG", "loader", "batch"),
)
MAX_LABEL = 30


@dataclass(frozen=True)
class TableRow:
    """component, how many rows it has, and what is said of them at the save and after the restore. ranks: on which it
    is to be blamed, in words. note: what else is known of why."""

    component: str
    rows: str
    saved: str
    restored: str
    ranks: str = ""
    note: str = ""

    @property
    def differs(self) -> bool:
        return bool(self.ranks)


@dataclass(frozen=True)
class Table:
    """The state around one restore: that of this attempt."""

    saved: str
    restored: str
    rows: Sequence[TableRow]
    attempt: int = 1


def tables(verdict: Verdict, experiment: ExperimentFile) -> list[Table]:
    """A table a restore; for a diverged check, that of the restore which is to be blamed."""
    found = [
        finding
        for finding in verdict.of_kind("restore-table")
        if any(row["restored"] != "-" for row in finding.evidence["rows"])
    ]
    if verdict.verdict == "diverged" and verdict.culprit:
        found = [f for f in found if f.where.get("attempt") == blamed_attempt(verdict)] or found
    return [_table(finding, verdict, experiment) for finding in found]


def _table(finding: Finding, verdict: Verdict, experiment: ExperimentFile) -> Table:
    evidence = finding.evidence
    notes = _notes(verdict, finding)
    families: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for row in sorted(evidence["rows"], key=lambda row: _ORDER.index(family_of(str(row["component"])))):
        family = family_of(str(row["component"]))
        # What is equal is folded; each thing that differs has a line of its own.
        folded = family in ("optimizer", "RNG") and row["saved"] == "equal" and not row["ranks"]
        families.setdefault((family, row["restored"]) if folded else (family, row["component"], "own"), []).append(row)
    rows = [_table_row(alike, notes, experiment) for alike in families.values()]
    within = f".{evidence['microbatch']}" if evidence.get("microbatch") else ""
    step = evidence["step"]
    saved, restored = f"saved (end of {step}{within})", f"restored (begin of {step + 1}{within})"
    return Table(saved, restored, rows, int(finding.where.get("attempt", 1)))


def _table_row(alike: Sequence[dict[str, Any]], notes: Mapping[str, str], experiment: ExperimentFile) -> TableRow:
    row = alike[0]
    on = row["ranks"]
    who = ranks_in_words(on, experiment.ranks) if on else ""
    label = str(row["component"])
    saved, restored = (_SHOWN.get(row[key], row[key]) for key in ("saved", "restored"))
    count = f"{sum(int(each['rows']) for each in alike):,}"
    return TableRow(_label_of(alike), count, saved, restored, who, notes.get(label, "") if on else "")


def family_of(label: str) -> str:
    if label.startswith("RNG "):
        return "RNG"
    plain = label.partition(" (")[0]
    return plain if plain in _CALLED else "optimizer"


def _label_of(alike: Sequence[dict[str, Any]]) -> str:
    labels = [str(row["component"]) for row in alike]
    family = family_of(labels[0])
    if family not in ("optimizer", "RNG"):
        plain, _, part = labels[0].partition(" (")
        return f"{_CALLED[plain]} ({part}" if part else _CALLED[plain]
    names = ", ".join(label.removeprefix("RNG ") for label in labels)
    if len(labels) > 1 and len(names) + len(family) + 1 > MAX_LABEL:
        return f"{family}, {len(labels)} {'streams' if family == 'RNG' else 'kinds of state'}"
    return f"{family} {names}"


def _notes(verdict: Verdict, table: Finding) -> dict[str, str]:
    """By row of the table, what the finding on it says beyond that it was not restored; once a finding."""
    notes: dict[str, str] = {}
    differing = {row["component"] for row in table.evidence["rows"] if row["ranks"]}
    for finding in verdict.of_kind("restore"):
        if finding.where.get("attempt") != table.where.get("attempt"):
            continue
        detail = finding.what.partition("): ")[2]
        labels = list(dict.fromkeys(_label(difference) for difference in finding.evidence.get("differences", ())))
        blamed = [label for label in labels if label in differing]
        for label in blamed[:1]:
            notes.setdefault(label, detail)
    return notes


def _label(difference: dict[str, Any]) -> str:
    component, name = str(difference["component"]), str(difference["name"])
    part = name.rpartition(" (")[2].rstrip(")") if name.endswith(")") else ""
    if component == "rng":
        return f"RNG {name}"
    if component == "optimizer":
        return name.partition(" (")[0].rpartition(".")[2]
    return f"{component} ({part})" if part and part != "local" else component


def blamed_attempt(verdict: Verdict) -> int:
    """The attempt whose restore is to be blamed; 0 if none is."""
    found = finding_of(verdict) if verdict.culprit else None
    return int(found.where.get("attempt", 0)) if found else 0


def finding_of(verdict: Verdict) -> Finding | None:
    """The finding that the culprit was made of."""
    found = verdict.of_kind("restore")
    name = (verdict.culprit or {}).get("name")
    return next((f for f in found if f.evidence.get("name") == name), next(iter(found), None))
