"""What arms that trace are asked for, and where they are ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from detrun.errors import RecipeError
from detrun.experiments.localize import LocalizeOptions
from detrun.experiments.plan import Plan
from detrun.experiments.trace import TraceOptions, plan_trace
from detrun.experiments.trace_plan import Request, Window
from detrun.recipe import load_recipe
from detrun.recorder.trace.window import TraceSettings
from detrun.records.archive import Archive
from tests.running import write_recipe


def planned(folder: Path, declared: tuple[str, ...] = (), **options: Any) -> Plan:
    loaded = load_recipe(write_recipe(folder, steps=6), (), declared)
    return plan_trace(loaded, Archive(folder).create("plain", "trace"), "local", TraceOptions(**options), {})


def settings_of(plan: Plan) -> list[TraceSettings]:
    """What each arm's ranks read from their environment."""
    found = []
    for request in plan.requests:
        for segment in request.spec.segments:
            settings = TraceSettings.from_environment(segment.env)
            assert settings is not None
            found.append(settings)
    return found


def test_the_recorder_reads_what_was_asked_for(tmp_path: Path) -> None:
    plan = planned(
        tmp_path, level=3, steps=(2, 4), ranks=(1,), scopes=("layers.*",), byte_budget=1 << 24, call_sites=True, arms=2
    )
    a, b = settings_of(plan)
    assert a == b
    assert (a.level, a.first, a.last, a.call_sites) == (3, 2, 4, True)
    assert (a.wants_rank(0), a.wants_rank(1)) == (False, True)
    assert a.wants_scope("layers.0")
    assert not a.wants_scope("head")
    assert (a.keep, a.against, a.kernels) == (None, None, False)
    assert a.byte_budget == 1 << 24  # one rank of two traces: it has the budget for itself


def test_the_budget_is_shared_by_the_ranks_that_trace(tmp_path: Path) -> None:
    (settings,) = settings_of(planned(tmp_path, byte_budget=1 << 24))
    assert settings.byte_budget == 1 << 23


def test_what_the_last_pass_asks_for_reaches_the_recorder() -> None:
    key = (2, 0, "forward", "layers.0", "aten.mm.default", 1)
    request = Request(Window((2, 2)), 4, 1 << 20, True, keep=[key], keep_bytes=99, against="/a", kernels=True)
    settings = TraceSettings.from_environment({"DETRUN_TRACE": json.dumps(request.as_variable())})
    assert settings is not None
    assert settings.keep is not None
    assert (settings.keep.events, settings.keep.bytes) == ((key,), 99)
    assert (settings.against, settings.kernels) == ("/a", True)


@pytest.mark.parametrize(("last", "ended"), [(4, True), (6, False)])
def test_an_arm_is_ended_with_its_window(tmp_path: Path, last: int, ended: bool) -> None:
    plan = planned(tmp_path, steps=(4, last))
    (segment,) = plan.requests[0].spec.segments
    assert (segment.interrupt is not None) is ended
    if segment.interrupt is not None:
        assert (segment.interrupt["kind"], segment.interrupt["at_step"]) == ("kill", 4)
    assert segment.steps == 6, "what a schedule depends on stays as it is"


def test_an_arm_keeps_what_the_recipe_declares_for_it(tmp_path: Path) -> None:
    plan = planned(tmp_path, ("b.args=--nudge-at 2",), arms=2)
    a, b = plan.requests[0].spec.segments
    assert "--nudge-at" in b.argv
    assert "--nudge-at" not in a.argv


@pytest.mark.parametrize(
    ("options", "said"), [({"steps": (5, 7)}, "the recipe takes 6"), ({"ranks": (0, 2)}, "there is no rank 2")]
)
def test_a_window_beyond_the_run_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as refused:
        planned(tmp_path, **options)
    assert said in refused.value.what


def test_ranks_of_a_window() -> None:
    assert Window((1, 1)).ranks_of(3) == [0, 1, 2]
    assert Window((1, 1), ranks=(2, 7)).ranks_of(3) == [2]


@pytest.mark.parametrize(
    "options",
    [
        LocalizeOptions(),
        LocalizeOptions((3, 4), 2, (0, 5), ("layers.*",), 1 << 20, repeat=7, keep=False, agreed=True),
    ],
)
def test_a_localization_is_taken_up_as_it_was_asked_for(options: LocalizeOptions) -> None:
    record = json.loads(json.dumps(vars(options)))
    assert LocalizeOptions.from_record(record) == options
    assert LocalizeOptions.from_record({**record, "of a later release": 1}) == options
