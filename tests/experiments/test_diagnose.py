"""Which changes are tried, what they make of a recipe, and what their outcome points to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from detrun.diagnose.facts import Facts
from detrun.experiments.changes import CHANGES, repeating, with_args
from detrun.experiments.diagnose import DiagnoseOptions
from detrun.experiments.diagnose_verdict import Known, Tried, choose, weigh
from detrun.recipe import Recipe, load_recipe
from detrun.records.verdict import FirstDivergence
from tests.running import detrun, write_recipe

FIRST = FirstDivergence(step=1, boundary="end", stream="gradients", ranks=[0], arms=["a", "b"])
RACING = {"role": "origin", "kind": "op", "op": "aten.index_put_.default", "device": "cpu", "threads": 2}


def recipe(tmp_path: Path, **keys: Any) -> Recipe:
    return load_recipe(write_recipe(tmp_path, **{"determinism": "observe", "pin": "none", **keys})).recipe


def known(**facts: Any) -> Known:
    return Known(FIRST, None, Facts(**facts), [])


def changed(name: str, of: Recipe, arms: tuple[str, ...] = ("a", "b", "c")) -> Recipe:
    return CHANGES[name].apply(of, arms)


# Which are tried


def test_a_culprit_chooses_what_tells_its_cause_from_others(tmp_path: Path) -> None:
    chosen, _ = choose(known(**RACING, hash_seed="pinned"), recipe(tmp_path))
    assert chosen[:3] == ["unchanged", "deterministic-algorithms", "one-thread"]


def test_without_a_culprit_the_general_ones_are_tried(tmp_path: Path) -> None:
    chosen, left_out = choose(known(device="cpu", threads=2, hash_seed="random"), recipe(tmp_path))
    assert chosen == ["unchanged", "deterministic-algorithms", "one-thread", "hash-seed", "filled-memory"]
    assert set(left_out) == {"pinned-configuration"}


def test_what_was_so_already_is_not_tried_and_said(tmp_path: Path) -> None:
    facts = known(device="cuda", threads=1, hash_seed="pinned", deterministic=True)
    chosen, left_out = choose(facts, recipe(tmp_path))
    assert chosen == ["unchanged", "pinned-configuration"]
    assert left_out["one-thread"] == "each rank had one thread"
    assert left_out["hash-seed"] == "the hash seed was pinned"
    assert left_out["deterministic-algorithms"] == "deterministic algorithms were on"


def test_what_is_asked_for_is_tried_whatever_fits(tmp_path: Path) -> None:
    chosen, _ = choose(known(threads=1), recipe(tmp_path), ("one-thread",))
    assert chosen == ["unchanged", "one-thread"]


# What they change


def test_each_change_reaches_every_arm(tmp_path: Path) -> None:
    of = recipe(tmp_path, arms={"b": {"env": {"OMP_NUM_THREADS": "4", "X": "1"}}})
    one = changed("one-thread", of)
    assert one.launch.env["OMP_NUM_THREADS"] == one.launch.env["OMP_THREAD_LIMIT"] == "1"
    assert one.arms["b"].env == {"X": "1"}
    assert changed("deterministic-algorithms", of).determinism == "strict"
    assert changed("unfilled-memory", of).launch.env["DETRUN_FILL"] == "0"
    assert changed("hash-seed", of).launch.env["PYTHONHASHSEED"] == "0"
    assert changed("filled-memory", of).launch.env["MALLOC_PERTURB_"] == "90"
    assert changed("unchanged", of) == of


def test_fills_differ_between_the_first_arm_and_every_other(tmp_path: Path) -> None:
    arms = changed("different-fills", recipe(tmp_path), tuple("abcdefgh")).arms
    fills = {name: arm.env["MALLOC_PERTURB_"] for name, arm in arms.items()}
    assert len(fills) == 8
    assert all(fills[name] != fills["a"] for name in "bcdefgh")


def test_what_one_arm_has_alone_every_repeat_has(tmp_path: Path) -> None:
    of = recipe(tmp_path, arms={"a": {"args": ["--one"]}, "c": {"args": ["--two"]}})
    arms = repeating(of, "c", 3).arms
    assert {name: arm.args for name, arm in arms.items()} == {
        "a": ("--one",),
        "b": ("--two",),
        "c": ("--two",),
        "d": ("--two",),
    }
    assert repeating(of, "b", 2).arms.keys() == {"a"}


def test_a_toggle_adds_its_arguments(tmp_path: Path) -> None:
    of = recipe(tmp_path, args=["--x"])
    assert with_args(of, ["--no-fusion"]).launch.args == ("--x", "--no-fusion")


def test_options_come_back_from_the_record() -> None:
    options = DiagnoseOptions(2, 7, ("one-thread",), {"fusion": ("--off",)}, True)
    record = {"repeat": 2, "steps": 7, "only": ["one-thread"], "toggles": {"fusion": ["--off"]}}
    assert DiagnoseOptions.from_record(record) == options


# What it points to


def tried(**outcomes: tuple[int, int]) -> list[Tried]:
    """identical and diverged by change."""
    return [Tried(name.replace("_", "-"), *counts, 0) for name, counts in outcomes.items()]


def first(facts: Known, outcomes: list[Tried]) -> str | None:
    found = weigh(facts, outcomes)
    return found[0].entry.id if found else None


@pytest.mark.parametrize(
    ("entry", "outcomes"),
    [
        ("accumulate-order", {"unchanged": (0, 3), "deterministic_algorithms": (3, 0), "one_thread": (3, 0)}),
        ("hash-seed", {"unchanged": (0, 3), "deterministic_algorithms": (0, 3), "hash_seed": (3, 0)}),
        ("uninitialized-memory", {"unchanged": (0, 3), "filled_memory": (3, 0), "different_fills": (0, 3)}),
        ("autotuned-kernels", {"unchanged": (0, 3), "pinned_configuration": (3, 0), "one_thread": (0, 3)}),
        ("copy-read-early", {"unchanged": (0, 3), "blocking_launches": (3, 0)}),
    ],
)
def test_what_makes_the_arms_agree_points_to_a_cause(entry: str, outcomes: dict[str, tuple[int, int]]) -> None:
    found = weigh(known(), tried(**outcomes))
    assert entry in [each.entry.id for each in found if each.strength == found[0].strength]


def test_nothing_that_helps_points_to_nothing() -> None:
    assert weigh(known(), tried(unchanged=(0, 3), one_thread=(0, 3), hash_seed=(0, 3))) == []


def test_what_the_trace_said_is_refuted_by_a_change_that_does_not_help() -> None:
    facts = known(**RACING, deterministic=False)
    before = {each.entry.id: each.strength for each in weigh(facts, [])}
    after = {
        each.entry.id: each.strength
        for each in weigh(facts, tried(unchanged=(0, 3), deterministic_algorithms=(0, 3), one_thread=(0, 3)))
    }
    assert after.get("accumulate-order", 0) < before["accumulate-order"]


def test_a_change_proves_little_where_the_fault_does_not_come_back() -> None:
    strong = weigh(known(**RACING), tried(unchanged=(0, 3), one_thread=(3, 0)))
    weak = weigh(known(**RACING), tried(unchanged=(3, 0), one_thread=(3, 0)))
    assert strong[0].strength > weak[0].strength


def test_a_fault_that_comes_back_is_no_flipped_bit() -> None:
    facts = known(role="origin", one_bit=True, differing=1, ranks_affected=1, ranks_total=4)
    assert first(facts, []) == "hardware"
    assert first(facts, tried(unchanged=(0, 3))) != "hardware"


def test_an_arm_of_which_something_is_missing_is_not_called_identical() -> None:
    outcome = Tried("one-thread", 0, 0, 3, None, "RuntimeError: no deterministic implementation")
    assert not outcome.clean
    assert outcome.finding().kind == "not-tried"
    assert "no deterministic implementation" in outcome.finding().what


# End to end

RACE = """
import argparse, torch
parser = argparse.ArgumentParser()
for name in ("steps", "seed"):
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--out")
parser.add_argument("--without-hidden-memory", action="store_true")
args = parser.parse_args()
torch.manual_seed(args.seed)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
import detrun
for step in range(1, args.steps + 1):
    x = torch.randn(8, 64)
    mask = torch.ones(64) if args.without_hidden_memory else (torch.empty(64, dtype=torch.uint8) % 7).float()
    loss = (model(x) * mask).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    detrun.record(step, loss=loss, grad_norm=norm)
"""


@pytest.mark.slow
def test_memory_that_nobody_wrote_is_found_by_filling_it(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(RACE)
    path = write_recipe(tmp_path, steps=3, determinism="observe", launch={"launcher": "none", "ranks_per_node": 1})
    text = path.read_text().replace(str(Path(__file__).parents[1] / "trainers" / "plain.py"), str(program))
    path.write_text(text)
    # What is found in memory is the same in runs that do the same; another environment moves it.
    path.write_text(text + "arms: {b: {env: {MALLOC_PERTURB_: '77'}}}\n")
    assert detrun("pair", str(path), cwd=tmp_path).code == 1
    changes = [word for name in ("filled-memory", "different-fills", "one-thread") for word in ("--change", name)]
    ran = detrun(
        "diagnose", "@latest", "--repeat", "1", *changes, "--toggle", "memory=--without-hidden-memory", "--json",
        cwd=tmp_path, timeout=500,
    )  # fmt: skip
    assert ran.code == 0, ran.explain()
    found = {each["evidence"]["change"]: each["evidence"]["identical"] for each in ran.verdict["findings"]
             if each["kind"] in ("unchanged", "confirmed")}  # fmt: skip
    assert found == {"unchanged": 0, "filled-memory": 1, "different-fills": 0, "one-thread": 0, "toggle-memory": 1}
    assert ran.verdict["culprit"]["catalog"] == "uninitialized-memory"
    again = detrun("report", "@latest", cwd=tmp_path)
    assert again.code == 0, again.explain()
    assert again.out.startswith("DIAGNOSED  plain: with memory filled and memory the arms agree, 1 of 1 each")
    folder = next((tmp_path / ".detrun").glob("*-diagnose-*"))
    assert {place.name for place in (folder / "passes").iterdir()} >= {"1-unchanged", "2-filled-memory"}
    taken_up = detrun("diagnose", folder.name, "--json", cwd=tmp_path)
    assert taken_up.code == 0
    assert taken_up.verdict["culprit"] == ran.verdict["culprit"]
