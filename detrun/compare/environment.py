"""Holds the environments of two arms against each other, rank by rank, before any verdict.

Values that differ only because they name the arm's own folder, job or host are made equal first. What is left
is judged by the rules in `environment_rules`, and by what the recipe declares for an arm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from detrun.compare.environment_rules import Effect, effect_of
from detrun.records.environment_reader import RankEnvironment

NOT_SET = "(not set)"
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_OWN_PLACEHOLDERS = {"arm", "attempt", "out"}


@dataclass(frozen=True)
class ArmContext:
    """What belongs to one arm alone, so that it can be taken out of its values.

    declared_args, declared_env: what the recipe gives this arm beside the rest. templates: arguments of the
    recipe's command that name the arm, such as `--run-name={arm}`.
    """

    arm: str
    experiment: str = ""
    attempt: int = 0
    jobs: tuple[str, ...] = ()
    declared_args: tuple[str, ...] = ()
    declared_env: Mapping[str, str] = field(default_factory=dict)
    templates: tuple[str, ...] = ()


@dataclass(slots=True)
class EnvironmentDifference:
    """One setting that differs, with the ranks on which these two values were seen."""

    path: str
    effect: Effect
    a: str
    b: str
    ranks: list[int]


@dataclass(slots=True)
class EnvironmentTally:
    """Differences of two arms' environments over any number of ranks, grouped by setting and values."""

    a: str
    b: str
    differences: dict[tuple[str, str, str], EnvironmentDifference] = field(default_factory=dict)

    def merge(self, other: EnvironmentTally) -> None:
        """Adds what was found on other ranks."""
        for key, difference in other.differences.items():
            if key in self.differences:
                self.differences[key].ranks.extend(difference.ranks)
            else:
                self.differences[key] = difference


def compare_environments(
    tally: EnvironmentTally,
    rank: int,
    a: RankEnvironment,
    b: RankEnvironment,
    context_a: ArmContext,
    context_b: ArmContext,
) -> None:
    """Adds to `tally` the settings of a rank that differ between two arms."""
    if a.document == b.document:
        return
    declared_env = {*context_a.declared_env, *context_b.declared_env}
    left, right = _flat(a, context_a), _flat(b, context_b)
    own_a, own_b = _Own(a, context_a), _Own(b, context_b)
    for path in {**left, **right}:
        x, y = left.get(path, NOT_SET), right.get(path, NOT_SET)
        if x == y:
            continue
        effect = effect_of(path)
        if effect == "ignore" or (path.startswith("env.") and path.split(".", 2)[-1] in declared_env):
            continue
        x, y = own_a.taken_out(x), own_b.taken_out(y)
        if x == y:
            continue
        key = (path, x, y)
        if key in tally.differences:
            tally.differences[key].ranks.append(rank)
        else:
            tally.differences[key] = EnvironmentDifference(path, effect, x, y, [rank])


def _flat(environment: RankEnvironment, context: ArmContext) -> dict[str, str]:
    document = environment.document
    python = document.get("python")
    if isinstance(python, dict) and isinstance(python.get("argv"), list):
        argv = _without_declared(python["argv"], context)
        document = {**document, "python": {**python, "argv": " ".join(argv)}}
    flat: dict[str, str] = {}
    _flatten("", document, flat)
    return flat


def _flatten(prefix: str, value: Any, into: dict[str, str], depth: int = 0) -> None:
    if isinstance(value, dict) and depth < 8:
        for key, item in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), item, into, depth + 1)
    elif isinstance(value, list) and depth < 8 and any(isinstance(item, (dict, list)) for item in value):
        for index, item in enumerate(value):
            _flatten(f"{prefix}.{index}", item, into, depth + 1)
    elif isinstance(value, str):
        into[prefix] = value
    else:
        into[prefix] = repr(value)


class _Own:
    """Takes out of a value what names this arm's folder, jobs and host."""

    def __init__(self, environment: RankEnvironment, context: ArmContext) -> None:
        self.patterns: list[tuple[re.Pattern[str], str]] = []
        if context.experiment:
            arm = re.escape(f"{context.experiment}/arms/{context.arm}")
            self._add(rf"\S*?{arm}/attempt-[0-9]+(?![0-9])", "{attempt_dir}")
            self._add(rf"\S*?{arm}(?![A-Za-z0-9_-])", "{arm_dir}")
            self._add(rf"{re.escape(context.experiment)}/jobs/[^/\s:]+", "{job_dir}")
            self._add(rf"[^\s:]*/{re.escape(context.experiment)}(?=[/\s:]|$)", "{experiment}")
        for job in context.jobs:
            # A bare number is a setting's value, not the name of a job.
            self._add(rf"(?!\A{re.escape(job)}\Z)(?<![A-Za-z0-9.]){re.escape(job)}(?![A-Za-z0-9]|\.[0-9])", "{job}")
        if environment.host:
            host = re.escape(environment.host)
            self._add(rf"(?<![A-Za-z0-9-]){host}(?![A-Za-z0-9-])", "{host}")

    def _add(self, pattern: str, placeholder: str) -> None:
        self.patterns.append((re.compile(pattern), placeholder))

    def taken_out(self, text: str) -> str:
        """The value with placeholders; a value too long for patterns stays as it is."""
        if len(text) > 100_000:
            return text
        for pattern, placeholder in self.patterns:
            text = pattern.sub(placeholder, text)
        return text


def _without_declared(argv: Sequence[Any], context: ArmContext) -> list[str]:
    """An arm's arguments without those declared for it; those that name the arm become their template."""
    words = [str(word) for word in argv]
    declared = [_pattern(word, context) for word in context.declared_args]
    for start in range(len(words) - len(declared), -1, -1) if declared else ():
        here = words[start : start + len(declared)]
        if all(pattern.fullmatch(word) for pattern, word in zip(declared, here, strict=True)):
            words = words[:start] + words[start + len(declared) :]
            break
    patterns = [(template, _pattern(template, context)) for template in context.templates]
    return [next((template for template, pattern in patterns if pattern.fullmatch(word)), word) for word in words]


def _pattern(template: str, context: ArmContext) -> re.Pattern[str]:
    parts: list[str] = []
    position = 0
    for match in _PLACEHOLDER.finditer(template):
        parts.append(re.escape(template[position : match.start()]))
        known = {"arm": context.arm, "attempt": str(context.attempt)}.get(match[1])
        if match[1] == "out" and context.experiment:
            # Not just anything: an argument that is the placeholder alone would stand for every other word too.
            parts.append(f".*{re.escape(f'{context.experiment}/arms/{context.arm}')}/work")
        else:
            parts.append(re.escape(known) if known is not None else ".*")
        position = match.end()
    parts.append(re.escape(template[position:]))
    return re.compile("".join(parts), re.DOTALL)


def templates_of(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments of a recipe's command that differ between arms by design."""
    launch = recipe.get("launch")
    if not isinstance(launch, dict):
        return ()
    words = [*_strings(launch.get("command")), *_strings(launch.get("args"))]
    return tuple(word for word in words if _OWN_PLACEHOLDERS & set(_PLACEHOLDER.findall(word)))


def _strings(value: Any) -> Iterable[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


@dataclass(slots=True)
class InitialDifference:
    """A component of the state before the first step that differs between two arms."""

    component: str
    a: str
    b: str
    ranks: list[int]
    comparable: bool


def compare_initial(found: dict[str, InitialDifference], rank: int, a: RankEnvironment, b: RankEnvironment) -> None:
    """Adds to `found` the components of a rank's initial state that differ or that one arm lacks."""
    for component in {**a.initial, **b.initial}:
        x, y = a.initial.get(component, NOT_SET), b.initial.get(component, NOT_SET)
        if x == y:
            continue
        if component in found:
            found[component].ranks.append(rank)
        else:
            same = x.partition(":")[0] == y.partition(":")[0] and NOT_SET not in (x, y)
            found[component] = InitialDifference(component, x, y, [rank], same)
