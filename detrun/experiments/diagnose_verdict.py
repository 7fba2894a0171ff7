"""What is known before a diagnosis, which changes fit that, and what their passes say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from detrun.compare.decision import in_order
from detrun.diagnose.catalog import Entry, Experiment, catalog
from detrun.diagnose.facts import Facts, facts_of_bytes, facts_of_divergence, facts_of_environments, merged
from detrun.diagnose.match import ENOUGH, Match, match
from detrun.errors import ExitCode, RecordError
from detrun.experiments.changes import CHANGES, GENERAL
from detrun.experiments.write_verdict import write_verdict
from detrun.recipe import Recipe
from detrun.records.environment_reader import RankEnvironment, read_environment
from detrun.records.files import read_plain
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import ExperimentFolder
from detrun.records.verdict import Finding, FirstDivergence, Verdict

NOT_RUN = "not-run"
"""Folder of an experiment with a text for each change that could not be asked for."""

MOST_CAUSES = 3
TOGGLE = "toggle-"
_SUPPORTS, _REFUTES = 4, -3
"""What a pass adds to the strength of an entry that names its change."""

_REVERSED = ("different-fills", "unfilled-memory")
"""Changes that speak for an entry where the arms still differ."""


@dataclass(frozen=True)
class Known:
    """What an experiment that diverged says: its verdict's first difference, culprit, and facts for the catalog."""

    first: FirstDivergence
    culprit: dict[str, Any] | None
    facts: Facts
    arms: list[Any]


@dataclass(frozen=True)
class Tried:
    """One change, and how many of its arms came out like the first one. failed: those that cannot be told, `why` then
    says why."""

    name: str
    identical: int
    diverged: int
    failed: int
    first_step: int | None = None
    why: str = ""

    @property
    def of(self) -> int:
        """Arms that can be told."""
        return self.identical + self.diverged

    @property
    def clean(self) -> bool:
        return self.identical > 0 and not self.diverged and not self.failed

    @property
    def experiment(self) -> Experiment:
        return catalog().experiments[_id_of(self.name)]

    @property
    def title(self) -> str:
        return self.name.removeprefix(TOGGLE) if self.name.startswith(TOGGLE) else self.experiment.name

    def finding(self) -> Finding:
        told = f"identical, {self.identical} of {self.of}" if self.of else f"cannot be told: {self.why}"
        where = f"; first at step {self.first_step}" if self.first_step else ""
        reading = self.experiment.identical if self.clean else self.experiment.diverged if self.diverged else ""
        kind = "unchanged" if self.name == "unchanged" else "confirmed" if self.of else "not-tried"
        evidence = {
            "experiment": self.title,
            "change": self.name,
            "what": self.experiment.what,
            "identical": self.identical,
            "of": self.of,
            "failed": self.failed,
            "first_step": self.first_step,
            "why": self.why,
            "reading": reading,
        }
        return Finding(kind=kind, severity="info", what=f"{self.title}: {told}{where}", evidence=evidence)


def known_of(target: ExperimentFolder) -> Known:
    """What the experiment in a folder says of its difference. Its verdict must have one. Raises RecordError."""
    verdict = Verdict.read(target.verdict_file)
    first = verdict.first_divergence
    if first is None:
        raise RecordError("has no difference", where=str(target.verdict_file))
    parts: list[Mapping[str, Any]] = [facts_of_divergence(first)]
    environments = _environments(target)
    if environments is not None:
        parts.append(facts_of_environments(*environments))
    culprit = verdict.culprit
    if culprit:
        names = {field.name for field in fields(Facts)}
        told = {"op": culprit.get("name"), "callsite": culprit.get("call_site"), **culprit}
        plain = {key: told[key] for key in ("role", "kind", "op", "scope", "phase", "step", "callsite")}
        parts.append({key: value for key, value in plain.items() if key in names and isinstance(value, str | int)})
        after = culprit.get("after")
        parts.append({"after": after.get("op") if isinstance(after, dict) else after})
    tensors = [finding.evidence for finding in verdict.of_kind("bytes")]
    parts += [facts_of_bytes(str(tensor.get("dtype") or ""), tensor) for tensor in tensors[:1]]
    alone = [finding.evidence for finding in verdict.of_kind("reproduction")]
    parts += [{key: script.get(key) or None for key in ("distinct", "runs")} for script in alone[:1]]
    return Known(first, culprit, merged(parts), verdict.arms)


def choose(known: Known, recipe: Recipe, only: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """The changes to run, in order, and those that are left out with the reason. `unchanged` comes first, always."""
    if only:
        return list(dict.fromkeys(("unchanged", *only))), {}
    found = match(known.facts)[:MOST_CAUSES]
    named = _catalogued(known)
    entries = [*([named] if named else []), *(each.entry for each in found)]
    wanted = [name for entry in entries for name in entry.experiments if name in CHANGES]
    if not known.facts.role:
        wanted += GENERAL  # nothing was traced: what fits is a guess from the first stream that differs
    chosen, left_out = ["unchanged"], {}
    for name in dict.fromkeys(wanted):
        why = CHANGES[name].refuses(recipe, known.facts)
        if why:
            left_out[name] = why
        elif name not in chosen:
            chosen.append(name)
    return chosen, left_out


def conclude(folder: ExperimentFolder, *, write: bool = True) -> Verdict:
    """The verdict on a diagnosis, from its passes; written last, by rename, with its report. Raises RecordError."""
    experiment = ExperimentFile.read(folder.experiment_file)
    if experiment.reference is None:
        raise RecordError("does not say what it diagnoses", where=str(folder.experiment_file))
    known = known_of(ExperimentFolder(Path(experiment.reference.path)))
    tried = [_read(name, place) for name, place in folder.passes().items() if place.verdict_file.exists()]
    tried += [Tried(path.stem, 0, 0, 1, None, _text(path)) for path in sorted((folder.path / NOT_RUN).glob("*.txt"))]
    verdict = _verdict(experiment, known, tried)
    return write_verdict(folder, experiment, verdict) if write else verdict


def weigh(known: Known, tried: Sequence[Tried]) -> list[Match]:
    """The catalog's entries by what was known and what was tried, the likeliest first."""
    by_facts = {each.entry.id: each for each in match(known.facts)}
    comes_back = any(each.name == "unchanged" and each.diverged for each in tried)
    found = []
    for entry in catalog().entries:
        before = by_facts.get(entry.id)
        strength, why = (before.strength, list(before.why)) if before else (0, [])
        told = []
        for each in tried:
            weight = _weight(entry, each, comes_back, known=before is not None)
            strength += weight
            if weight > 0:
                told.append(f"{each.title}: identical, {each.identical} of {each.of}")
        if strength >= ENOUGH:
            found.append(Match(entry, (*told, *why), strength))
    return sorted(found, key=lambda each: -each.strength)


def _weight(entry: Entry, tried: Tried, comes_back: bool, *, known: bool) -> int:
    change = _id_of(tried.name)
    if not tried.of:
        return 0
    if change in entry.excluded_by:
        against = tried.diverged > 0 if change == "unchanged" else tried.clean and comes_back
        return 2 * _REFUTES if against else 1 if change in entry.experiments and tried.diverged else 0
    if change not in entry.experiments or change == "unchanged":
        return 0
    if change == "toggle":  # what was turned off is the user's to know; it only strengthens what fits already
        return _SUPPORTS if known and tried.clean and comes_back else 0
    if change in _REVERSED:
        return 1 if tried.diverged else _REFUTES
    if tried.clean:
        return _SUPPORTS if comes_back else 1
    # Of several changes that may help, one that does not says less than one that does.
    return _REFUTES if entry.experiments[0] == change else _REFUTES + 2


def _verdict(experiment: ExperimentFile, known: Known, tried: Sequence[Tried]) -> Verdict:
    causes = weigh(known, tried)[:MOST_CAUSES]
    findings = [each.finding() for each in causes]
    findings += [each.finding() for each in tried]
    _, left_out = choose(known, Recipe.model_validate(experiment.recipe))
    findings += [
        Finding(
            kind="left-out",
            severity="info",
            what=f"{catalog().experiments[name].name}: {why}",
            evidence={"change": name},
        )
        for name, why in left_out.items()
        if all(each.name != name for each in tried)
    ]
    failed = [each for each in tried if not each.of]
    broken = not tried or any(each.name == "unchanged" for each in failed)
    for each in failed if broken else ():
        findings.append(Finding(kind="job", severity="infrastructure", what=f"{each.title}: {each.why}"))
    culprit = dict(known.culprit or {"kind": "unknown", "name": None, "role": None, "step": known.first.step})
    if causes:
        culprit["catalog"], culprit["fix"] = causes[0].entry.id, causes[0].entry.fix
    return Verdict(
        id=experiment.id,
        experiment=experiment.experiment,
        recipe=experiment.recipe_name,
        verdict="not-verified" if broken else "diverged",
        exit_code=int(ExitCode.INFRASTRUCTURE if broken else ExitCode.OK),
        first_divergence=known.first,
        culprit=culprit if causes or known.culprit else None,
        findings=in_order(findings),
        not_verified=[finding.what for finding in findings if finding.severity == "infrastructure"],
        arms=known.arms,
        figures={},
    )


def _read(name: str, place: ExperimentFolder) -> Tried:
    verdict = Verdict.read(place.verdict_file)
    others = [arm.id for arm in verdict.arms[1:]]
    apart = {
        arm
        for finding in verdict.of_severity("divergence")
        for arm in finding.where.get("arms", ())
        if arm != verdict.arms[0].id
    }
    first = verdict.first_divergence.step if verdict.first_divergence else None
    broken = verdict.of_severity("infrastructure", "not-verified")
    if not broken:
        return Tried(name, len(others) - len(apart), len(apart), 0, first)
    # An arm of which something is missing may differ; it can only not be called identical.
    return Tried(name, 0, len(apart), len(others) - len(apart), first, _reason(broken))


def _reason(broken: Sequence[Finding]) -> str:
    """Why a pass cannot be told: the program's last word, where it has one."""
    for finding in broken:
        tail = [str(line).strip() for line in finding.evidence.get("log_tail", ()) if str(line).strip()]
        raised = [line for line in tail if "Error" in line.partition(":")[0]]
        if raised:
            return raised[-1][:300]
    return broken[0].what


def _environments(target: ExperimentFolder) -> tuple[RankEnvironment, RankEnvironment] | None:
    """What rank 0 of two arms saw: of the experiment itself, else of its last pass that has it."""
    for place in (target, *reversed(target.passes().values())):
        try:
            a, b = ((place.attempts(arm) or [place.attempt(arm, 0)])[-1] for arm in "ab")
            return read_environment(a.environment(0), 0), read_environment(b.environment(0), 0)
        except RecordError:
            continue
    return None


def _catalogued(known: Known) -> Entry | None:
    named = (known.culprit or {}).get("catalog")
    return catalog().entry(str(named)) if named else None


def _id_of(name: str) -> str:
    """The catalog's id of a pass's change."""
    return "toggle" if name.startswith(TOGGLE) else name


def _text(path: Path) -> str:
    try:
        return " ".join(read_plain(path, limit=10_000).decode("utf-8", "replace").split())
    except RecordError as error:
        return error.what
