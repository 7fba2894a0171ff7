"""What is known of a difference, as plain values that the catalog's signs ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from detrun.compare.trace_summary import Lead, TraceComparison
from detrun.diagnose.operations import base_name, is_custom, known_nondeterministic, traits_of
from detrun.records.environment_reader import RankEnvironment
from detrun.records.verdict import FirstDivergence

HashSeed = Literal["pinned", "random", "differs"]


@dataclass(frozen=True)
class Facts:
    """Everything that may be known of the first difference. None and "" stand for what is not known.

    role, kind, op, scope, phase, step, callsite: of the event that the verdict names; role "" where nothing was traced.
    after: the operation that last wrote what differs, and matched. flags: of its parts, without their positions.
    dtype, total, differing, max_ulp, rows, permutation, nan, one_bit: how the bytes differ. total: elements in all.
    ranks_affected, ranks_total: how many ranks show it, of how many that could.
    distinct, runs: results of the operation alone on its kept inputs, in so many runs.
    deterministic: whether torch's switch was on at the event. threads: of its rank.
    first_stream, metrics_first: what differs first without a trace. shifted_by: draws that two streams are apart.
    comes_back: whether the difference shows when the arms are run again.
    resume, component: after a resume, the piece of state that is blamed.
    """

    role: str = ""
    kind: str = ""
    op: str = ""
    scope: str = ""
    phase: str = ""
    step: int | None = None
    callsite: str = ""
    inputs_equal: bool | None = None
    after: str = ""
    flags: tuple[str, ...] = ()
    dtype: str = ""
    total: int | None = None
    differing: int | None = None
    max_ulp: int | None = None
    rows: int | None = None
    permutation: Literal["elements", "rows"] | None = None
    nan: int | None = None
    one_bit: bool | None = None
    ranks_affected: int | None = None
    ranks_total: int | None = None
    distinct: int | None = None
    runs: int | None = None
    device: str = ""
    threads: int | None = None
    deterministic: bool | None = None
    autotuned: bool | None = None
    compiled: bool | None = None
    configurations_differ: bool | None = None
    software_differs: bool | None = None
    differing_software: tuple[str, ...] = ()
    processors_differ: bool | None = None
    threads_differ: bool | None = None
    placement_differs: bool | None = None
    settings_changed: bool | None = None
    hash_seed: HashSeed | None = None
    seeded: bool | None = None
    shifted_by: int | None = None
    first_stream: str = ""
    metrics_first: tuple[str, ...] = ()
    replicas_agree: bool | None = None
    observer_differs: bool | None = None
    comes_back: bool | None = None
    clean_at_smaller_scale: bool | None = None
    resume: bool = False
    component: str = ""

    def known(self) -> dict[str, Any]:
        """Every fact by name, and what follows from them: `traits`, `custom`, `in_module`; `listed` (torch lists the
        operation as nondeterministic on this device), `nondeterministic` (and its switch was off, and there were
        threads and elements enough), `alert` (in words)."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        rule = known_nondeterministic(self.op, self.device)
        found.update(
            op=base_name(self.op),
            after=base_name(self.after),
            traits=tuple(sorted(traits_of(self.op))),
            custom=is_custom(self.op),
            in_module=bool(self.scope) and self.phase in ("forward", "backward", "recompute"),
            listed=rule is not None,
            nondeterministic=rule is not None and self.deterministic is not True,
            alert=rule.about if rule else "",
        )
        if rule is not None and self.device == "cpu":
            few_threads = self.threads is not None and self.threads < rule.threads
            few_elements = self.total is not None and self.total < rule.elements
            found["nondeterministic"] = found["nondeterministic"] and not few_threads and not few_elements
        return found


def facts_of_lead(lead: Lead, comparison: TraceComparison | None = None) -> dict[str, Any]:
    """What a comparison of traces says of the event that its verdict names. Keyword arguments of `Facts`."""
    event = lead.event
    after = lead.after.op if lead.after is not None else ""
    found: dict[str, Any] = {
        "role": lead.role,
        "kind": lead.kind,
        "op": event.op,
        "scope": event.scope,
        "phase": event.phase,
        "step": event.step,
        "callsite": event.site or "",
        "inputs_equal": not lead.inputs,
        "after": after,
        "flags": tuple(sorted({flag.partition(":")[2] or flag for flag in event.flags.split(",") if flag})),
        "compiled": True if "compiled" in event.op else None,
    }
    if comparison is not None:
        alike = [group for group in comparison.groups if (group.op, group.role) == (event.op, lead.role)]
        if alike:
            found["ranks_affected"] = max(len(group.ranks) for group in alike)
            found["ranks_total"] = max(group.ranks_compared for group in alike)
    return found


def facts_of_bytes(dtype: str, difference: Mapping[str, Any], a: bytes = b"", b: bytes = b"") -> dict[str, Any]:
    """What the kept bytes say. difference: a ByteDifference as a dictionary; a, b: the tensor's bytes in both arms,
    where they are at hand. Keyword arguments of `Facts`."""
    return {
        "dtype": dtype,
        "total": difference.get("elements"),
        "differing": difference.get("differing"),
        "max_ulp": difference.get("max_ulp"),
        "rows": difference.get("differing_rows"),
        "permutation": difference.get("permutation"),
        "nan": difference.get("nan"),
        "one_bit": one_bit(a, b) if difference.get("differing") == 1 and a and b else None,
    }


def one_bit(a: bytes, b: bytes) -> bool:
    """Whether exactly one bit differs."""
    if len(a) != len(b):
        return False
    whole = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    return whole != 0 and whole & (whole - 1) == 0


def facts_of_environments(a: RankEnvironment, b: RankEnvironment) -> dict[str, Any]:
    """What the surroundings of one rank in two arms say. Keyword arguments of `Facts`."""
    torch_a, torch_b = (_section(each, "torch") for each in (a, b))
    packages_a, packages_b = (_section(each, "packages") for each in (a, b))
    software = sorted(name for name in {*packages_a, *packages_b} if packages_a.get(name) != packages_b.get(name))
    seeds = [_hash_seed(each) for each in (a, b)]
    threads = torch_a.get("num_threads")
    devices = a.document.get("devices")
    switch = [bool(each.get("deterministic_algorithms")) for each in (torch_a, torch_b)]
    pythons = [_section(each, "python").get("version") for each in (a, b)]
    processors = [[_section(each, "cpu").get(key) for key in ("model", "capability")] for each in (a, b)]
    return {
        "device": "cuda" if devices else "cpu",
        "threads": threads if isinstance(threads, int) else None,
        "threads_differ": threads != torch_b.get("num_threads"),
        "deterministic": all(switch),
        "autotuned": bool(torch_a.get("cudnn.benchmark")) and bool(devices),
        "software_differs": bool(software) or pythons[0] != pythons[1],
        "differing_software": tuple(software[:5]),
        "processors_differ": processors[0] != processors[1] or devices != b.document.get("devices"),
        "placement_differs": a.host != b.host,
        "hash_seed": "random" if None in seeds else "pinned" if seeds[0] == seeds[1] else "differs",
    }


def facts_of_divergence(first: FirstDivergence) -> dict[str, Any]:
    """What the records of untraced arms say. Keyword arguments of `Facts`."""
    metrics = sorted(first.metrics.items(), key=lambda item: item[1].step)
    state = [each for each in first.state if each.component == first.stream]
    alone = state[0] if len(state) == 1 else None
    return {
        "first_stream": _stream(first),
        "step": first.step,
        "metrics_first": tuple(name for name, metric in metrics if metric.step == metrics[0][1].step),
        "differing": alone.differing_elements if alone else None,
        "max_ulp": alone.ulp if alone else None,
    }


def _stream(first: FirstDivergence) -> str:
    return "rng" if first.stream.lower().startswith("rng") else first.stream


def _section(environment: RankEnvironment, name: str) -> Mapping[str, Any]:
    found = environment.document.get(name)
    return found if isinstance(found, dict) else {}


def _hash_seed(environment: RankEnvironment) -> str | None:
    """PYTHONHASHSEED, None where every process has its own."""
    seeds = _section(environment, "seeds")
    value = seeds.get("PYTHONHASHSEED")
    return value if isinstance(value, str) and value not in ("", "random") else None


def merged(parts: Sequence[Mapping[str, Any]]) -> Facts:
    """Facts from several sources; of what two of them know, the last one's counts."""
    found: dict[str, Any] = {}
    for part in parts:
        found.update({name: value for name, value in part.items() if value not in (None, "", ())})
    return Facts(**found)
