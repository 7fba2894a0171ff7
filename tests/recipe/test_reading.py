"""What a recipe says after it was read: values, defaults, lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from detrun.errors import RecipeError
from detrun.recipe import Recipe, check_interrupts, check_launchable, check_recorded, dump_yaml, load_recipe
from tests.recipe.conftest import SMALL, Load

FULL = """\
name: hybrid-cpu
cluster: local
launch:
  launcher: torchrun
  command: [python, -m, training, --steps, "{steps}", --seed, "{seed}", --out, "{out}"]
  args: [--lr, 1e-3, --depth, 010]
  nodes: 2
  ranks_per_node: 4
  env: {OMP_NUM_THREADS: 1, LR: 1e-3, FLAG: True, ANSWER: no, EMPTY: "", BRACES: "{{}}"}
  workdir: .
steps: 30
seed: 7
metrics:
  source: recorder
  required: [loss, lm_loss]
  names: {load_balancing_loss: lb_loss}
  state_every: 0
checkpoint:
  pattern: "step-{step}"
  save_every: 10
  save_args: [--save-every, "{save_every}"]
  resume_args: [--resume, "{checkpoint}"]
interrupt: {kind: kill, at_step: 14, ranks: [0, 3]}
arms: {b: {args: [--noise, 1], env: {X: 1}}}
slurm:
  account: 0012
  time: 00:20:00
  gpus_per_node: h100:8
  extra: {mem_per_cpu: 2G, exclusive: true, comment: null, nice: 010, exclude: [n1, n2]}
  container: {image: /i.sqsh, mounts: [/a:/a, /b]}
"""


def test_defaults(load: Load) -> None:
    recipe = load(SMALL).recipe
    assert recipe.model_dump(mode="json") == {
        "name": "recipe",
        "cluster": "auto",
        "launch": {
            "launcher": "none",
            "command": ["python", "train.py"],
            "args": [],
            "nodes": 1,
            "ranks_per_node": 1,
            "env": {},
            "workdir": ".",
        },
        "steps": 30,
        "seed": 1234,
        "metrics": {
            "source": "recorder",
            "path": None,
            "pattern": None,
            "step": "step",
            "every": 1,
            "first_step": 1,
            "also": [],
            "required": ["loss", "grad_norm"],
            "optional": [],
            "absent": [],
            "ignore": [],
            "names": {},
            "state_every": 1,
        },
        "checkpoint": None,
        "interrupt": [],
        "determinism": "strict",
        "pin": "default",
        "placement": "pinned",
        "arms": {},
        "slurm": {
            "partition": None,
            "account": None,
            "qos": None,
            "time": "01:00:00",
            "gpus_per_node": None,
            "constraint": None,
            "extra": {},
            "setup": [],
            "container": {},
        },
        "watchdog": {"multiple": 30.0, "at_least": 120.0, "start": 1800.0},
        "limits": {"node_hours": 50.0},
        "archive": None,
    }


def test_every_section_can_be_given(load: Load) -> None:
    recipe = load(FULL).recipe
    assert recipe.total_ranks == 8
    assert recipe.interrupt[0].ranks == (0, 3)
    assert recipe.arms["b"].args == ("--noise", "1")
    assert recipe.slurm.time_seconds == 1200
    assert recipe.slurm.gpus_per_node == "h100:8"


def test_text_keeps_the_characters_it_was_written_with(load: Load) -> None:
    recipe = load(FULL).recipe
    assert recipe.launch.args == ("--lr", "1e-3", "--depth", "010")
    assert recipe.launch.env == {
        "OMP_NUM_THREADS": "1",
        "LR": "1e-3",
        "FLAG": "True",
        "ANSWER": "no",
        "EMPTY": "",
        "BRACES": "{{}}",
    }
    assert recipe.slurm.account == "0012"


def test_raw_options_keep_their_switches(load: Load) -> None:
    slurm = load(FULL).recipe.slurm
    assert slurm.extra == {
        "mem-per-cpu": "2G",
        "exclusive": True,
        "comment": None,
        "nice": "010",
        "exclude": "n1,n2",
    }
    assert slurm.container == {"image": "/i.sqsh", "mounts": "/a:/a,/b"}


@pytest.mark.parametrize("text", [SMALL, FULL])
def test_what_is_stored_gives_the_same_recipe_back(load: Load, text: str) -> None:
    recipe = load(text).recipe
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


@pytest.mark.parametrize("text", [SMALL, FULL])
def test_what_is_printed_reads_as_the_same_recipe(load: Load, text: str) -> None:
    recipe = load(text).recipe
    assert load(dump_yaml(recipe)).recipe == recipe


def test_a_recipe_cannot_be_changed(load: Load) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(SMALL).recipe.steps = 3


def test_lines_of_keys(load: Load) -> None:
    loaded = load(FULL, ["seed=1"])
    assert loaded.lines["launch"] == 3
    assert loaded.lines["metrics.required"] == 15
    assert loaded.lines["metrics.required.1"] == 15
    assert loaded.lines["arms.b.env.X"] == 24
    assert "seed" not in loaded.lines, "its value comes from the command line"


def test_name_is_the_files_if_none_is_given(tmp_path: Path) -> None:
    path = tmp_path / "my first recipe!.yaml"
    path.write_text(SMALL, encoding="utf-8")
    assert load_recipe(path).recipe.name == "my-first-recipe"


@pytest.mark.parametrize(("ranks", "launcher"), [(1, "none"), (2, "torchrun")])
def test_launcher_follows_the_ranks(load: Load, ranks: int, launcher: str) -> None:
    assert load(SMALL, [f"launch.ranks_per_node={ranks}"]).recipe.launch.launcher == launcher


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("20", 1200), ('"20"', 1200), ("1:02:03", 3723), ("2-00:00:00", 172800), ("100-00:00:01", 8640001)],
)
def test_time_limits(load: Load, time: str, seconds: int) -> None:
    assert load(f"{SMALL}slurm: {{time: {time}}}").recipe.slurm.time_seconds == seconds


def test_the_workdir_is_relative_to_the_recipe_and_the_archive_to_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "r.yaml"
    path.write_text(SMALL + "archive: kept\n", encoding="utf-8")
    loaded = load_recipe(path)
    assert loaded.recipe_dir == tmp_path / "sub"
    assert loaded.workdir == tmp_path / "sub"
    assert loaded.archive == tmp_path / "kept"


def test_aliases_are_read(load: Load) -> None:
    recipe = load(f"{SMALL}arms: {{b: &same {{args: [--x]}}, c: *same}}", arms=["c.args=--y"]).recipe
    assert recipe.arms["b"].args == ("--x",)
    assert recipe.arms["c"].args == ("--x", "--y")


def test_dos_line_ends_and_a_byte_order_mark_are_read(load: Load) -> None:
    assert load("\ufeff" + SMALL.replace("\n", "\r\n")).recipe.steps == 30


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ("{source: csv}", "source csv needs path"),
        ("{source: log}", "source log needs pattern"),
        ("{also: {source: wandb}}", "source wandb needs path"),
        ("{also: [{source: recorder}]}", "metrics.also.0.source"),
        ("{source: csv, path: '{oot}/x'}", "{oot} is not a placeholder"),
        ("{also: [{source: csv, path: '{oot}/x'}]}", "{oot} is not a placeholder"),
    ],
)
def test_a_source_that_cannot_be_found_is_refused(load: Load, metrics: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(f"{SMALL}metrics: {metrics}\n")
    assert said in caught.value.render()


def test_one_second_source_needs_no_list(load: Load) -> None:
    recipe = load(f"{SMALL}metrics: {{also: {{source: log, pattern: p.yaml}}}}\n").recipe
    assert [(source.source, source.pattern) for source in recipe.metrics.also] == [("log", "p.yaml")]


@pytest.mark.parametrize(
    ("interrupt", "said"),
    [
        ("{kind: stop, at_step: 3}", "stop needs the recorder in the process"),
        ("{kind: kill, at_step: 3, moment: before-save}", "moment: only the recorder"),
        ("{kind: kill, at_step: 3, ranks: 0}", "ranks: only the recorder"),
    ],
)
def test_what_only_a_recorder_can_interrupt_is_refused_without_one(load: Load, interrupt: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_launchable(load(f"{SMALL}metrics: {{source: csv, path: x}}\ninterrupt: {interrupt}\n"))
    assert said in caught.value.render()


def test_a_command_that_looks_into_the_process_needs_the_recorder(load: Load) -> None:
    with pytest.raises(RecipeError) as caught:
        check_recorded(load(f"{SMALL}metrics:\n  source: csv\n  path: x\n"), "localize")
    assert caught.value.render().splitlines()[0] == (
        "error: recipe.yaml, line 5: metrics.source: localize looks into the process, and source csv leaves the "
        "recorder out"
    )


def test_a_missing_workdir_is_refused_at_launch(load: Load, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        check_launchable(load(SMALL, ["launch.workdir=gone"]))
    assert caught.value.render().splitlines()[0] == (
        f"error: --set launch.workdir=gone: launch.workdir: {tmp_path / 'gone'} is not a folder"
    )


@pytest.mark.parametrize(
    ("interrupt", "said"),
    [
        (
            "{kind: kill, at_step: 31}",
            "error: recipe.yaml, line 4: interrupt.at_step: 31 is after the last step (steps is 30)",
        ),
        (
            "{kind: kill, at_step: 30, moment: after-save}",
            "error: recipe.yaml, line 4: interrupt.at_step: 30 is the last step, moment after-save is in the next one",
        ),
        (
            "{kind: kill, at_step: 3, node: 1}",
            "error: recipe.yaml, line 4: interrupt.node: there is no node 1 (nodes are 0 to 0)",
        ),
        (
            "[{kind: timeout}, {kind: stop, at_step: 3, ranks: [0, 2]}]",
            "error: recipe.yaml, line 4: interrupt.1.ranks: there is no rank 2 (ranks are 0 to 1)",
        ),
    ],
)
def test_interruptions_must_fit_steps_and_ranks(load: Load, interrupt: str, said: str) -> None:
    loaded = load(f"{SMALL}interrupt: {interrupt}", ["launch.ranks_per_node=2"])
    with pytest.raises(RecipeError) as caught:
        check_interrupts(loaded)
    assert caught.value.render().splitlines()[0] == said
