"""The history as a value: what a night came to, since when, what changed then, how often, and whether it is flaky."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detrun.compare.chance import bound_of_clean_pairs, interval
from detrun.compare.history import Change, History, Lost, RecipeHistory, history, what_changed
from detrun.records.index import read_index
from tests.history_factory import PACKAGES, Nights, seven_nights


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def of(nights: Nights, lost: tuple[Lost, ...] = (), since: datetime | None = None) -> History:
    return history(read_index(nights.archive), lost, since)


def only(nights: Nights) -> RecipeHistory:
    (recipe,) = of(nights).recipes
    return recipe


def states(recipe: RecipeHistory) -> list[str]:
    return [cell.state for cell in recipe.cells.values()]


def test_seven_nights_of_three_recipes(tmp_path: Path) -> None:
    nights = seven_nights(tmp_path)
    moment = datetime(2026, 11, 25, 2, 30, tzinfo=timezone.utc)
    found = of(nights, (Lost("2026-11-25", "big-gpu", "sbatch refused it", moment),))
    assert found.nights == tuple(f"2026-11-{day}" for day in range(23, 30))
    gpu, broken, flaky = found.recipes
    assert (gpu.name, states(gpu), gpu.bad, gpu.rates) == ("big-gpu", ["not-started"], False, ())
    assert gpu.latest.what == "sbatch refused it"
    assert states(broken) == ["identical"] * 3 + ["diverged"] * 4
    (found_break,) = broken.breaks
    assert (found_break.first_bad, found_break.last_good, found_break.silent) == ("2026-11-26", "2026-11-25", 0)
    assert found_break.changes == (Change("numpy", "2.4.6", "2.5.0"),)
    assert found_break.culprit == "aten.index_put_"
    assert broken.bad
    assert broken.flaky is None
    assert [(rate.kind, rate.diverged, rate.n) for rate in broken.rates] == [("pair", 4, 7), ("resume-check", 0, 7)]
    assert (flaky.flaky, flaky.bad) == ("same-nodes", False)
    assert [each.first_bad for each in flaky.breaks] == ["2026-11-24", "2026-11-27"]
    assert [each.changes for each in flaky.breaks] == [(), ()]


def test_a_retry_that_passes_clears_nothing(nights: Nights) -> None:
    nights.add("2026-11-24", "hybrid-cpu", "identical")
    bad = nights.add("2026-11-25", "hybrid-cpu", "diverged", step=3)
    nights.add("2026-11-25", "hybrid-cpu", "identical")
    nights.add("2026-11-25", "hybrid-cpu", "identical", kind="localize")
    recipe = only(nights)
    assert states(recipe) == ["identical", "diverged"]
    assert recipe.bad
    assert recipe.cells["2026-11-25"].entries[0].id == bad
    assert recipe.cells["2026-11-25"].step == 3


def test_what_was_not_verified_is_neither_good_nor_bad(nights: Nights) -> None:
    nights.add("2026-11-24", "hybrid-cpu", "identical")
    nights.add("2026-11-25", "hybrid-cpu", "not-verified")
    nights.add("2026-11-26", "hybrid-cpu", "not-verified", exit_code=4, what="arm b did not finish")
    nights.add("2026-11-27", "hybrid-cpu", None)
    nights.add("2026-11-28", "hybrid-cpu", "diverged", step=1)
    nights.add("2026-11-29", "hybrid-cpu", "not-verified")
    recipe = only(nights)
    assert states(recipe) == ["identical", "not-verified", "infrastructure", "unfinished", "diverged", "not-verified"]
    (found,) = recipe.breaks
    assert (found.last_good, found.first_bad, found.silent) == ("2026-11-24", "2026-11-28", 3)
    assert recipe.bad  # a night that tells nothing is no recovery
    assert recipe.rates[0].n == 2


def test_the_worst_of_a_night_is_the_nights(nights: Nights) -> None:
    nights.add("2026-11-24", "hybrid-cpu", "identical")
    nights.add("2026-11-24", "hybrid-cpu", "not-verified", kind="resume-check")
    assert states(only(nights)) == ["not-verified"]
    nights.add("2026-11-24", "hybrid-cpu", "not-verified", exit_code=4, what="a job failed")
    assert states(only(nights)) == ["infrastructure"]
    lost = Lost("2026-11-24", "hybrid-cpu", "not accepted", datetime(2026, 11, 24, tzinfo=timezone.utc))
    assert states(of(nights, (lost,)).recipes[0]) == ["infrastructure"]
    nights.add("2026-11-24", "hybrid-cpu", "diverged")
    assert states(only(nights)) == ["diverged"]


def test_what_traces_or_diagnoses_makes_no_night_good(nights: Nights) -> None:
    nights.add("2026-11-24", "hybrid-cpu", "identical", kind="trace")
    nights.add("2026-11-24", "hybrid-cpu", "not-verified", kind="diagnose")
    assert of(nights).recipes == ()
    nights.add("2026-11-25", "hybrid-cpu", "diverged", kind="diagnose")
    assert states(only(nights)) == ["diverged"]


def test_a_silent_change_is_told_from_its_baseline(nights: Nights) -> None:
    baseline = nights.add("2026-11-22", "hybrid-cpu", "identical", python="3.10.1")
    nights.add("2026-11-23", "hybrid-cpu", "identical", python="3.11.7")
    about = {"reference": {"experiment": baseline, "arm": "a"}, "candidate": {"experiment": "x", "arm": "a"}}
    nights.add("2026-11-23", "hybrid-cpu", "diverged", kind="against", python="3.11.7", extra=about)
    recipe = only(nights)
    assert states(recipe) == ["identical", "diverged"]
    assert recipe.breaks[0].changes == (Change("Python", "3.10.1", "3.11.7"),)
    assert recipe.breaks[0].good is not None
    assert recipe.breaks[0].good.id == baseline
    assert recipe.flaky is None
    assert [(rate.kind, rate.n) for rate in recipe.rates] == [("pair", 2)]


def test_changes_are_listed_whatever_they_are() -> None:
    before = {
        "commit": "1" * 40,
        "dirty": False,
        "driver": "535.54",
        "nodes": ["node1", "node2"],
        "packages": {"torch": "2.13", "numpy": "2.4", "gone": "1"},
        "gpus": ["H100", "H100"],
        "recipe": "xxh3:aa",
        "container": "image:1",
        "unheard-of": {"a": 1},
        "cpu": None,
    }
    after = {
        **before,
        "commit": "2" * 40,
        "dirty": True,
        "driver": None,
        "nodes": ["node3", "node4"],
        "packages": {"torch": "2.14", "numpy": "2.4", "new": "3"},
        "gpus": ["H200", "H200"],
        "recipe": "xxh3:bb",
        "container": "image:2",
        "unheard-of": {"a": 2},
    }
    assert what_changed(before, before) == []
    assert what_changed(before, after) == [
        Change("commit", "1" * 12, "2" * 12),
        Change("uncommitted changes", "no", "yes"),
        Change("driver", "535.54", None),
        Change("gone", "1", None),
        Change("new", None, "3"),
        Change("torch", "2.13", "2.14"),
        Change("GPUs", "H100", "H200"),
        Change("container", "image:1", "image:2"),
        Change("unheard-of", "{'a': 1}", "{'a': 2}"),
        Change("the recipe", "aa", "bb"),
        Change("nodes", "node[1-2]", "node[3-4]"),
    ]
    assert what_changed({"packages": None}, {"packages": PACKAGES}) == [Change("packages", None, "2 recorded")]


def test_changes_are_unknown_where_a_night_recorded_no_environment(nights: Nights) -> None:
    nights.add("2026-11-24", "hybrid-cpu", "identical")
    id = nights.add("2026-11-25", "hybrid-cpu", "diverged")
    path = nights.root / id / "verdict.json"
    path.write_text(path.read_text().replace('"environment"', '"surroundings"'))
    assert only(nights).breaks[0].changes is None
    nights.add("2026-11-23", "other", "diverged")
    (_, other) = of(nights).recipes
    assert (other.breaks[0].last_good, other.breaks[0].changes) == (None, None)


def test_a_flaky_recipe_is_told_from_a_node(nights: Nights) -> None:
    nights.add("2026-11-24", "hybrid-cpu", "identical", nodes=["node1"])
    nights.add("2026-11-25", "hybrid-cpu", "diverged", nodes=["node7", "node1"])
    nights.add("2026-11-26", "hybrid-cpu", "identical", nodes=["node2"])
    recipe = only(nights)
    assert (recipe.flaky, recipe.flaky_nodes) == ("other-nodes", ("node7",))
    nights.add("2026-11-27", "hybrid-cpu", "diverged", nodes=["node2"])
    assert only(nights).flaky == "same-nodes"


def test_arms_of_one_experiment_can_be_flaky_alone(nights: Nights) -> None:
    nights.add("2026-11-24", "hybrid-cpu", "diverged", pairs=(10, 3))
    recipe = only(nights)
    assert recipe.flaky == "same-nodes"
    assert (recipe.rates[0].diverged, recipe.rates[0].n) == (3, 10)


def test_since_leaves_nights_out_but_not_what_they_tell(nights: Nights) -> None:
    nights.add("2026-11-20", "hybrid-cpu", "identical")
    nights.add("2026-11-21", "hybrid-cpu", "diverged", packages={"numpy": "2.5.0"})
    nights.add("2026-11-28", "hybrid-cpu", "diverged", packages={"numpy": "2.5.0"})
    nights.add("2026-11-20", "gone", "identical")
    found = of(nights, since=datetime(2026, 11, 25, tzinfo=timezone.utc))
    assert found.nights == ("2026-11-28",)
    assert found.experiments == 1
    (recipe,) = found.recipes
    assert list(recipe.cells) == ["2026-11-28"]
    assert recipe.breaks[0].first_bad == "2026-11-21"
    assert recipe.breaks[0].changes == (Change("numpy", "2.4.6", "2.5.0"),)
    assert recipe.rates[0].n == 1


def test_nights_stand_in_the_order_in_which_they_began(nights: Nights) -> None:
    for name, day in (("zulu", 23), ("alpha", 24), ("mike", 25)):
        at = datetime(2026, 11, day, 2, 30, tzinfo=timezone.utc)
        nights.add("2026-11-24", "hybrid-cpu", "identical", labels={"night": name}, at=at)
    assert of(nights).nights == ("zulu", "alpha", "mike")


@pytest.mark.parametrize(
    ("events", "n", "low", "high"),
    [
        (3, 7, 0.0990, 0.8159),  # tables of Clopper and Pearson's interval
        (1, 10, 0.0025, 0.4450),
        (50, 100, 0.3983, 0.6017),
        (0, 10, 0.0, 0.3085),
        (10, 10, 0.6915, 1.0),
    ],
)
def test_intervals_are_those_of_the_tables(events: int, n: int, low: float, high: float) -> None:
    assert interval(events, n) == pytest.approx((low, high), abs=6e-5)


@given(st.integers(1, 2000), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_an_interval_holds_the_share_and_mirrors(n: int, share: float) -> None:
    events = round(n * share)
    low, high = interval(events, n)
    assert 0 <= low <= events / n <= high <= 1
    assert interval(n - events, n) == pytest.approx((1 - high, 1 - low), abs=1e-9)
    assert events or high > bound_of_clean_pairs(n)  # two-sided: wider than the bound for one side alone
