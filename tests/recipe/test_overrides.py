"""--set and --arm: what they change, and how they are told when they are wrong."""

from __future__ import annotations

import pytest

from tests.recipe.conftest import SMALL, Load, Refused


def test_set_changes_and_adds(load: Load) -> None:
    recipe = load(
        SMALL,
        [
            "steps=5",
            "launch.env.A=007",
            "launch.env.B={out}/a: b",
            "launch.env.C=",
            "launch.command.0=python3",
            "metrics.required=[loss]",
            "slurm.account=12",
            "slurm.account=null",
            "interrupt={kind: kill, at_step: 2}",
            "interrupt.at_step=3",
        ],
    ).recipe
    assert recipe.steps == 5
    assert recipe.launch.env == {"A": "007", "B": "{out}/a: b", "C": ""}
    assert recipe.launch.command == ("python3", "train.py")
    assert recipe.metrics.required == ("loss",)
    assert recipe.slurm.account is None
    assert recipe.interrupt[0].at_step == 3


def test_arm_adds_to_what_the_file_has(load: Load) -> None:
    recipe = load(
        SMALL + "arms: {b: {args: [--x], env: {A: 1}}}",
        arms=["b.args=--y 'a b'", "b.args=--z", "b.env.B=c=d [e", "c.env.A=2"],
    ).recipe
    assert recipe.arms["b"].args == ("--x", "--y", "a b", "--z")
    assert recipe.arms["b"].env == {"A": "1", "B": "c=d [e"}
    assert recipe.arms["c"].env == {"A": "2"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps=x", "steps: found text 'x', wanted a whole number of at least 1"),
        (
            "launch.nods=2",
            "launch.nods is not a known key\nhint: did you mean nodes? `detrun init` writes a commented recipe.",
        ),
        ("steps", "'steps' is not a key, an equals sign and a value\nhint: for example --set launch.nodes=2"),
        ("=3", "'=3' is not a key, an equals sign and a value\nhint: for example --set launch.nodes=2"),
        ("a..b=3", "'a..b' has an empty part between its dots\nhint: for example --set launch.nodes=2"),
        ("steps.x=3", "steps is a single value and has no key x"),
        (
            "launch.command.7=3",
            "launch.command is a list of 2; 7 is none of its items\nhint: items are counted from 0.",
        ),
        ("launch.args=--x 3", "launch.args: found text '--x 3', wanted a list of texts\nhint: write a list: [--x, 3]"),
        (
            "launch.args=[",
            "not readable as YAML: while parsing a flow node, expected the node content, but found '<stream end>'\n"
            "hint: the value is read as YAML: a list is [a, b], and a text with : # { } [ ] , in it wants quotes.",
        ),
        (
            "interrupt.kind=kill",
            "interrupt: kind kill needs at_step\nhint: add at_step: the step at whose end it happens.",
        ),
    ],
)
def test_a_wrong_override_is_told_by_its_option(refused: Refused, override: str, said: str) -> None:
    assert refused(SMALL, [override]) == f"error: --set {override}: {said}"


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        ("B.env.X=1", "'B' is not an arm\nhint: arms are called a, b, c, …: a is the reference, b the first repeat."),
        ("b.en.X=1", "b.en.X: an arm takes env.KEY or args\nhint: write b.env.KEY=VALUE"),
        ("b.env=1", "b.env: an arm takes env.KEY or args\nhint: write b.env.KEY=VALUE"),
        ("b=1", "b: an arm takes env.KEY or args\nhint: write b.env.KEY=VALUE or b.args='…'"),
        ("b.args='x", "arguments cannot be split: no closing quotation\nhint: close the quote."),
        ("b.args={sed}", "arms.b.args.0: {sed} is not a placeholder\nhint: did you mean {seed}?"),
        (
            "b.env.1=x",
            "arms.b.env.1: '1' is not the name of an environment variable\nhint: letters, digits and _ only.",
        ),
        ("b", "'b' is not a key, an equals sign and a value\nhint: for example --arm b.env.KEY=VALUE"),
    ],
)
def test_a_wrong_arm_is_told_by_its_option(refused: Refused, arm: str, said: str) -> None:
    assert refused(SMALL, arms=[arm]) == f"error: --arm {arm}: {said}"


def test_a_section_that_is_wrong_in_the_file_is_said(refused: Refused) -> None:
    assert refused(SMALL + "arms: 3", arms=["b.args=x"]) == (
        "error: --arm b.args=x: arms in the recipe is not a mapping of keys"
    )
    assert "arms.b.args: found text 'x', wanted a list of texts" in refused(
        SMALL + "arms: {b: {args: x}}", arms=["b.args=y"]
    )
