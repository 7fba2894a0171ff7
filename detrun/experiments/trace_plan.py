"""Arms that trace: what each is asked to record, and the jobs that run them up to the end of the window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from detrun.experiments.plan import Plan, Run, Site, plan_whole_runs
from detrun.recipe import Recipe
from detrun.records.jobs import ArmPlan

BYTE_BUDGET = 4 << 30
"""Bytes of trace files that the ranks of one arm may write together."""


@dataclass(frozen=True)
class Window:
    """What of a run is traced: steps from the first to the last, some ranks (None: all), some scopes (None: all)."""

    steps: tuple[int, int]
    ranks: tuple[int, ...] | None = None
    scopes: tuple[str, ...] | None = None

    def ranks_of(self, total: int) -> list[int]:
        """The ranks that trace, of so many."""
        return [rank for rank in range(total) if self.ranks is None or rank in self.ranks]


@dataclass(frozen=True)
class Request:
    """What one arm's ranks are asked for.

    byte_budget: of file bytes, a rank. keep: keys of events whose tensors are kept. against: the attempt folder of
    another arm whose digests this one holds while it runs. kernels: what the kept operations launched is listed.
    """

    window: Window
    level: int
    byte_budget: int
    call_sites: bool = False
    keep: Sequence[Sequence[object]] | None = None
    keep_bytes: int = 256 << 20
    against: str | None = None
    kernels: bool = False

    def as_variable(self) -> dict[str, Any]:
        """DETRUN_TRACE."""
        window = asdict(self.window)
        keep = None if self.keep is None else {"events": [list(key) for key in self.keep], "bytes": self.keep_bytes}
        return {
            "level": self.level,
            "steps": list(self.window.steps),
            "ranks": None if window["ranks"] is None else list(window["ranks"]),
            "scopes": None if window["scopes"] is None else list(window["scopes"]),
            "byte_budget": self.byte_budget,
            "call_sites": self.call_sites,
            "rows": False,
            "keep": keep,
            "against": self.against,
            "kernels": self.kernels,
        }


def plan_traced(site: Site, arms: Sequence[ArmPlan], requests: Mapping[str, Request], last: int) -> Plan:
    """Jobs of arms that trace and are ended when step `last` is complete: nothing after it is wanted."""
    cut = ended_after(site.recipe, last)
    runs = [Run(arm, interrupt=cut, captures=False, trace=requests[arm.id].as_variable()) for arm in arms]
    return plan_whole_runs(site, runs)


def ended_after(recipe: Recipe, last: int) -> dict[str, Any] | None:
    """What ends an attempt when step `last` is complete; None where that is its last step anyway."""
    if last >= recipe.steps:
        return None
    return {
        "kind": "kill",
        "at_step": last,
        "moment": "end",
        "ranks": "all",
        "node": None,
        "signal": None,
        "seed": recipe.seed,
    }
