"""What a person reads when a recipe is wrong, to the letter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from detrun.errors import RecipeError
from detrun.recipe import load_recipe
from detrun.recipe.document import MAX_BYTES
from tests.recipe.conftest import SMALL, Refused

INIT = "`detrun init` writes a commented recipe."


def test_unknown_key_shows_its_line_and_the_nearest_key(refused: Refused) -> None:
    assert refused("steps: 3\nlaunch:\n  command: [x]\n  ranks_per_nod: 8\n") == (
        "error: recipe.yaml, line 4: launch.ranks_per_nod is not a known key\n"
        "\n"
        "  4 |   ranks_per_nod: 8\n"
        "        ^^^^^^^^^^^^^\n"
        f"hint: did you mean ranks_per_node? {INIT}"
    )


# The line that is wrong (line 4), what is said of it, and the hint.
WRONG = [
    ("nodes: 2", "nodes is not a known key", f"did you mean launch.nodes? {INIT}"),
    ("time: 3", "time is not a known key", f"did you mean slurm.time? {INIT}"),
    ("Cluster: auto", "Cluster is not a known key", f"did you mean cluster? {INIT}"),
    ("metrics: {state-every: 2}", "metrics.state-every is not a known key", f"did you mean state_every? {INIT}"),
    ("limits: {zzz: 2}", "limits.zzz is not a known key", "known keys here: node_hours"),
    ("tolerance: 1e-6", "tolerance is not a known key", None),
    ("cluster: slrum", "cluster: 'slrum' is not one of auto, slurm, local", "did you mean slurm?"),
    ("placement: same", "placement: 'same' is not one of pinned, allocation, parallel, disjoint", None),
    ("pin: 3", "pin: found the number 3, wanted one of default, none", None),
    (
        "seed: '12'",
        "seed: found text '12', wanted a whole number of at least 0 and at most 9,223,372,036,854,775,807",
        "write it without quotes.",
    ),
    (
        "seed: -1",
        "seed: found the number -1, wanted a whole number of at least 0 and at most 9,223,372,036,854,775,807",
        None,
    ),
    ("seed: true", "seed: found true, wanted a whole number of at least 0 and at most 9,223,372,036,854,775,807", None),
    ("watchdog: {multiple: .inf}", "watchdog.multiple: found the number inf, wanted a number above 0", None),
    ("limits: {node_hours: 0}", "limits.node_hours: found the number 0, wanted a number above 0", None),
    ("metrics: 3", "metrics: found the number 3, wanted a mapping of keys", None),
    ("metrics:", "metrics: found nothing, wanted a mapping of keys", None),
    (
        "metrics: {required: loss}",
        "metrics.required: found text 'loss', wanted a list of texts",
        "write a list: [loss]",
    ),
    ("metrics: {required: 3}", "metrics.required: found the number 3, wanted a list of texts", "write a list: [3]"),
    ("metrics: {required: [loss, loss]}", "metrics.required: loss is listed twice", None),
    (
        "metrics: {absent: [loss]}",
        "metrics: loss is listed in both required and absent",
        "a metric belongs to one of required, optional, absent and ignore.",
    ),
    (
        "name: my recipe",
        "name: found text 'my recipe', wanted letters, digits, dots, _ and -, beginning with a letter or digit, 64 "
        "at most",
        "for example my-recipe",
    ),
    (
        "slurm: {time: 20:00}",
        "slurm.time: found text '20:00', wanted HH:MM:SS, D-HH:MM:SS, or minutes",
        '"20:00:00" if hours and minutes are meant, "00:20:00" if minutes and seconds are',
    ),
    (
        "slurm: {time: soon}",
        "slurm.time: found text 'soon', wanted HH:MM:SS, D-HH:MM:SS, or minutes",
        'for example "00:20:00", "1-12:00:00", or 20 (minutes)',
    ),
    (
        "slurm: {time: 0}",
        "slurm.time: found the number 0, which is no time at all",
        "a job with a limit of 0 waits for ever.",
    ),
    (
        "slurm: {gpus_per_node: all}",
        "slurm.gpus_per_node: found text 'all', wanted a whole number of at least 0, or type:number",
        "for example 8, or h100:8",
    ),
    (
        "slurm: {extra: {partition: x}}",
        "slurm.extra.partition: partition has a key of its own",
        "write slurm.partition.",
    ),
    ("slurm: {extra: {job-name: x}}", "slurm.extra.job-name: job-name is set by detrun itself", "leave it out."),
    (
        "slurm: {extra: {p: x}}",
        "slurm.extra.p: 'p' is a short option",
        "write the long one, such as mem in place of m.",
    ),
    (
        "slurm: {extra: {'a b': x}}",
        "slurm.extra.a b: 'a b' is not the name of an option",
        "a long option without its dashes, such as mem-per-cpu.",
    ),
    ('slurm: {extra: {comment: "a\\nb"}}', "slurm.extra.comment: found text 'a\\nb', wanted one line of text", None),
    (
        "slurm: {extra: {mem: {a: 1}}}",
        "slurm.extra.mem: found a mapping, wanted text, a number, a list, true, false or null",
        None,
    ),
    (
        "slurm: {setup: module load x}",
        "slurm.setup: found text 'module load x', wanted a list of texts",
        "write a list: [module load x]",
    ),
    (
        "interrupt: {kind: kil}",
        "interrupt.kind: 'kil' is not one of stop, signal, kill, kill-during-save, requeue, node-failure, timeout",
        "did you mean kill?",
    ),
    ("interrupt: {at_step: 3}", "interrupt.kind is missing", None),
    ("interrupt: {kind: kill}", "interrupt: kind kill needs at_step", "add at_step: the step at whose end it happens."),
    (
        "interrupt: [{kind: kill, at_step: 0}]",
        "interrupt.0.at_step: found the number 0, wanted a whole number of at least 1",
        None,
    ),
    (
        "interrupt: {kind: stop, at_step: 1, ranks: al}",
        "interrupt.ranks: found text 'al', wanted all or a whole number of at least 0 or a list of whole numbers "
        "of at least 0",
        "did you mean all?",
    ),
    (
        "interrupt: {kind: kill, at_step: 2, signal: USR1}",
        "interrupt: signal is for kind signal, and this is kind kill",
        "leave signal out, or write kind: signal.",
    ),
    (
        "interrupt: {kind: kill, at_step: 2, command: [x]}",
        "interrupt: command is for kind node-failure, and this is kind kill",
        "leave command out, or write kind: node-failure.",
    ),
    (
        "interrupt: {kind: kill, at_step: 2, minutes: 3}",
        "interrupt: minutes is for kind timeout, and this is kind kill",
        "leave minutes out, or write kind: timeout.",
    ),
    (
        "interrupt: {kind: kill-during-save, at_step: 2, moment: after-save}",
        "interrupt: kind kill-during-save has a moment of its own, and moment is after-save",
        "leave moment out, or write kind: kill.",
    ),
    (
        "interrupt: {kind: kill, at_step: 2, ranks: 1, node: 0}",
        "interrupt: node and ranks are both given",
        "node: all ranks of one node; ranks: these. Keep one.",
    ),
    (
        "interrupt: {kind: kill, at_step: 2, moment: later}",
        "interrupt.moment: 'later' is not one of end, before-save, after-save, accumulation, epoch",
        None,
    ),
    (
        'interrupt: {kind: node-failure, at_step: 2, command: ["{out}"]}',
        "interrupt.command.0: {out} has no value here",
        None,
    ),
    ("interrupt: kill", "interrupt: found text 'kill', wanted a mapping of keys or a list of mappings", None),
    (
        "arms: {B: {}}",
        "arms.B: 'B' is not an arm",
        "arms are called a, b, c, …: a is the reference, b the first repeat.",
    ),
    ("arms: {b: {argz: []}}", "arms.b.argz is not a known key", f"did you mean args? {INIT}"),
    (
        "arms: {b: {env: {1X: 1}}}",
        "arms.b.env.1X: '1X' is not the name of an environment variable",
        "letters, digits and _ only.",
    ),
    (
        "arms: {b: {env: {DETRUN_SEED: 1}}}",
        "arms.b.env.DETRUN_SEED: DETRUN_SEED is set by detrun itself",
        "leave it out.",
    ),
    ("arms: {b: {args: ['{sed}']}}", "arms.b.args.0: {sed} is not a placeholder", "did you mean {seed}?"),
    ("arms: {b: {args: ['{seed']}}", "arms.b.args.0: a { stands alone", "write {{ for a brace."),
    (
        "arms: {b: {args: [{seed}]}}",
        "arms.b.args.0: found a mapping, wanted text",
        'quote it: "{seed}". Without quotes YAML reads a mapping.',
    ),
    (
        "arms: {b: {args: [~]}}",
        "arms.b.args.0: found nothing, wanted text",
        'write "" for empty text, or leave the key out.',
    ),
    (
        "arms: {b: {env: {X: '{checkpoint}'}}}",
        "arms.b.env.X: {checkpoint} has no value here",
        "{checkpoint} is the checkpoint to resume from; only in checkpoint.resume_args.",
    ),
    (
        "checkpoint: {resume_args: ['{save_every}']}",
        "checkpoint.resume_args.0: {save_every} has no value here",
        "{save_every} is checkpoint.save_every.",
    ),
    (
        "checkpoint: {pattern: step}",
        "checkpoint.pattern: 'step' holds {step} 0 times, wanted once",
        "for example step-{step}",
    ),
    ("checkpoint: {pattern: '{steps}'}", "checkpoint.pattern: {steps} has no value here", None),
]


@pytest.mark.parametrize(("line", "said", "hint"), WRONG, ids=[line for line, _, _ in WRONG])
def test_one_wrong_line(refused: Refused, line: str, said: str, hint: str | None) -> None:
    rendered = refused(SMALL + line + "\n").split("\n")
    assert rendered[0] == f"error: recipe.yaml, line 4: {said}"
    assert rendered[2] == f"  4 | {line}"
    assert "^" in rendered[3]
    if hint is not None:
        assert rendered[-1] == f"hint: {hint}"


def test_a_command_in_one_text_is_given_as_a_list(refused: Refused) -> None:
    assert refused("launch: {command: python train.py --name 'a b' -- -}\nsteps: 3").split("\n")[-1] == (
        'hint: write a list: [python, train.py, --name, "a b", "--", "-"]'
    )


def test_all_errors_are_listed_in_the_order_of_the_file(refused: Refused) -> None:
    text = "cluster: slrum\nlaunch:\n  nodes: two\n  command: [x, '{sed}']\nmetrics: {state_every: -1}\n"
    assert refused(text, ["seed=x"]) == (
        "error: recipe.yaml, line 1: cluster: 'slrum' is not one of auto, slurm, local\n"
        "\n"
        "  1 | cluster: slrum\n"
        "      ^^^^^^^\n"
        "\n"
        "  and 5 more:\n"
        "    line 3: launch.nodes: found text 'two', wanted a whole number of at least 1\n"
        "    line 4: launch.command.1: {sed} is not a placeholder (did you mean {seed}?)\n"
        "    line 5: metrics.state_every: found the number -1, wanted a whole number of at least 0\n"
        "    steps is missing\n"
        "    --set seed=x: seed: found text 'x', wanted a whole number of at least 0 and at most "
        "9,223,372,036,854,775,807\n"
        "hint: did you mean slurm?"
    )


def test_missing_keys(refused: Refused) -> None:
    assert refused("launch: {command: [x]}") == (
        "error: recipe.yaml: steps is missing\n"
        "hint: add steps. Optimizer steps of every arm; an interruption never changes it."
    )
    assert refused("launch: {}\nsteps: 3").split("\n")[0] == "error: recipe.yaml, line 1: launch.command is missing"


YAML = [
    (
        "a: 1\nb: 2\na: 3\n",
        "error: recipe.yaml, line 3: a is given twice, first in line 1\n\n  3 | a: 3\n      ^\nhint: keep one of them.",
    ),
    (
        "a: !!python/object/apply:os.system [echo]\n",
        "error: recipe.yaml, line 1: the tag !!python/object/apply:os.system is not read: "
        "a recipe is plain data and never runs code\n"
        "\n"
        "  1 | a: !!python/object/apply:os.system [echo]\n"
        "         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        "hint: remove the tag.",
    ),
    (
        "<<: {a: 1}\n",
        "error: recipe.yaml, line 1: merge keys (<<) are not read\n\n  1 | <<: {a: 1}\n      ^^\n"
        "hint: write the keys out, or use an alias for a whole value.",
    ),
    (
        "a: &x [*x]\n",
        "error: recipe.yaml, line 1: an alias that holds itself\n\n  1 | a: &x [*x]\n         ^^^^^^^\n"
        "hint: write it without the alias.",
    ),
    (
        "a:\n\t- b\n",
        "error: recipe.yaml, line 2: not readable as YAML: while scanning for the next token, "
        "found character '\\t' that cannot start any token\n\n  2 |  - b\n      ^\n"
        "hint: YAML is indented with spaces; this line has a tab.",
    ),
    (
        "a: {out}/x\n",
        "error: recipe.yaml, line 1: not readable as YAML: while parsing a block mapping, "
        "expected <block end>, but found '<scalar>'\n\n  1 | a: {out}/x\n              ^\n"
        'hint: a text that begins with a placeholder wants quotes: "{out}/…"',
    ),
    (
        'a: 1\nb: "x\nc: 2\n',
        "error: recipe.yaml, line 2: not readable as YAML: while scanning a quoted scalar, "
        'found unexpected end of stream\n\n  2 | b: "x\n         ^\nhint: close the quote.',
    ),
    (
        "a: 1\n--- \nb: 1\n",
        "error: recipe.yaml, line 2: not readable as YAML: expected a single document in the stream, "
        "but found another document\n\n  2 | ---\n      ^\nhint: one recipe a file: remove what follows the line "
        "---.",
    ),
    ("a: \x07\n", "error: recipe.yaml, line 1: character U+0007 may not stand in YAML\nhint: remove it."),
    (
        "{a: 1}: 2\n",
        "error: recipe.yaml, line 1: a key has to be plain text\n\n  1 | {a: 1}: 2\n      ^^^^^^\n"
        "hint: a text that begins with { or [ wants quotes.",
    ),
    ("- 1\n", f"error: recipe.yaml: the recipe is a list, wanted a mapping of keys\nhint: {INIT}"),
    ("", f"error: recipe.yaml is empty\nhint: {INIT}"),
    ("# nothing\n", f"error: recipe.yaml is empty\nhint: {INIT}"),
    ("[" * 3000, "error: recipe.yaml: nested more than 60 deep"),
]


@pytest.mark.parametrize(("text", "said"), YAML, ids=range(len(YAML)))
def test_what_is_no_yaml_of_ours(refused: Refused, text: str, said: str) -> None:
    assert refused(text) == said


def test_aliases_cannot_blow_up(refused: Refused) -> None:
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 9)]
    assert refused("\n".join(lines)).split("\n")[0] == (
        "error: recipe.yaml, line 1: holds more than 50,000 values once its aliases are written out"
    )


def test_a_long_line_is_cut_around_the_place(refused: Refused) -> None:
    shown = refused(SMALL + "arms: {b: {args: [" + "x, " * 200 + "'{sed}']}}\n").split("\n")
    assert shown[2].startswith("  4 | …")
    assert len(shown[2]) < 110
    assert shown[2][shown[3].index("^") :].startswith("'{sed}'")


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("folder/detrun.yaml").write_text(SMALL, encoding="utf-8")
    Path("big.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    Path("binary.yaml").write_bytes(b"a: \0\0")
    Path("latin.yaml").write_bytes(b"a: 1\nb: caf\xe9\n")
    said = {
        "gone.txt": f"error: gone.txt does not exist\nhint: {INIT}",
        "bog.yaml": "error: bog.yaml does not exist\nhint: did you mean big.yaml?",
        "folder": "error: folder is a folder, not a recipe\nhint: did you mean folder/detrun.yaml?",
        "big.yaml": "error: big.yaml is larger than 1 MiB, too large for a recipe\nhint: is it the right file?",
        "binary.yaml": "error: binary.yaml is a binary file, not YAML\nhint: is it the right file?",
        "latin.yaml": "error: latin.yaml, line 2: byte 0xe9 is not UTF-8\nhint: save the file as UTF-8.",
        "a\0b": "error: a\0b cannot be read: embedded null byte",
        "big.yaml/x": "error: big.yaml/x cannot be read: Not a directory",
    }
    for path, text in said.items():
        with pytest.raises(RecipeError) as caught:
            load_recipe(Path(path))
        assert caught.value.render() == text


def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "secret.yaml"
    path.write_text(SMALL, encoding="utf-8")
    path.chmod(0)
    path.parent.chmod(0o755)
    root = os.geteuid() == 0
    if root:  # root may read every file: somebody else has a look
        os.seteuid(65534)
    try:
        with pytest.raises(RecipeError, match="may not be read by this user"):
            load_recipe(path)
    finally:
        if root:
            os.seteuid(0)


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    os.mkfifo(path)
    with pytest.raises(RecipeError, match="is a pipe"):
        load_recipe(path)


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text('launch: {command: [python, "a\\ud800b"]}\nsteps: 1\n')
    with pytest.raises(RecipeError, match="half a character"):
        load_recipe(path)


@pytest.mark.parametrize("key", ["archive", "workdir"])
def test_the_home_of_nobody_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("launch: {command: [python], workdir: ~nobody-of-that-name}\nsteps: 1\narchive: ~nobody-here\n")
    with pytest.raises(RecipeError, match="is no folder"):
        getattr(load_recipe(path), key)
