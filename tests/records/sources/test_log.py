"""Log lines by named patterns: colours, prefixes, glued and doubled lines, lines that were cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from detrun.errors import RecordError
from detrun.records.sources import Part, SourceSpec, Stream, load_pattern, read_attempt
from detrun.records.sources.patterns import Pattern
from tests.records.sources.megatron_log import TrainingLog, log_of, loss_of

METRICS = ("lm_loss", "load_balancing_loss", "grad_norm")


def read(
    tmp_path: Path, lines: list[str], pattern: str | Pattern = "megatron", begins: int = 1, end: str = "\n"
) -> Stream:
    path = tmp_path / "rank00001.log"
    path.write_text("\n".join(lines) + end)
    known = pattern if isinstance(pattern, Pattern) else load_pattern(pattern)
    return read_attempt(SourceSpec("log", None, "x"), known, [(Part(path), "log")], METRICS, begins)


def printed(stream: Stream, name: str = "lm loss") -> dict[int, str | None]:
    return {step: r.number.printed if r.number else None for step, r in stream.series[name].items()}


def test_fields_are_found_by_name(tmp_path: Path) -> None:
    stream = read(tmp_path, ["loading ...", *log_of(range(1, 5))])
    assert printed(stream)[1] == f"{loss_of(1):.6E}" and printed(stream)[3] == f"{loss_of(3):.6E}"
    held = {name for name, series in stream.series.items() if any(r.number for r in series.values())}
    assert held == {"lm loss", "load_balancing_loss", "grad norm"}
    assert not stream.problems


def test_the_second_line_of_a_process_is_a_mean_of_two_steps(tmp_path: Path) -> None:
    stream = read(tmp_path, log_of(range(1, 5)))
    assert {step: r.first for step, r in stream.series["lm loss"].items()} == {1: 1, 2: 1, 3: 3, 4: 4}
    assert {step: r.first for step, r in stream.series["grad norm"].items()} == {1: 1, 2: 2, 3: 3, 4: 4}


def test_older_lines_that_come_every_ten_steps_are_means_of_these(tmp_path: Path) -> None:
    lines = log_of(range(1, 21), interval=5, last=20)[1:]  # as if the first iteration printed nothing
    stream = read(tmp_path, lines)
    assert {step: r.first for step, r in stream.series["lm loss"].items()} == {5: 1, 10: 6, 15: 11, 20: 16}


def test_colours_rank_prefixes_and_line_ends_of_other_systems_do_not_matter(tmp_path: Path) -> None:
    plain = log_of(range(1, 4))
    dressed = [f"[default3]:\x1b[32m\x1b[1m{line}\x1b[0m\r" for line in plain]
    assert printed(read(tmp_path, dressed)) == printed(read(tmp_path, plain))


def test_a_line_that_is_printed_twice_says_one_thing(tmp_path: Path) -> None:
    plain = log_of(range(1, 4))
    twice = [text for line in plain for text in (f"[default3]:{line}", f"[default7]:{line}")]
    stream = read(tmp_path, twice)
    assert printed(stream) == printed(read(tmp_path, plain))
    assert not stream.problems
    assert stream.series["lm loss"][2].first == 1


def test_lines_glued_together_are_taken_apart(tmp_path: Path) -> None:
    plain = log_of(range(1, 5))
    glued = [plain[0] + plain[1], plain[2] + "WARNING: a warning of rank 2", "[rank1] hello" + plain[3]]
    stream = read(tmp_path, glued)
    assert printed(stream) == printed(read(tmp_path, plain))
    assert not stream.problems


def test_text_glued_beside_a_field_does_not_hide_it(tmp_path: Path) -> None:
    one, *rest = log_of(range(1, 3))
    glued = one.replace("grad norm:", "[rank1] warmup done grad norm:").replace("| loss scale", "oops | loss scale")
    stream = read(tmp_path, [glued, *rest])
    assert printed(stream, "grad norm") == printed(read(tmp_path, [one, *rest]), "grad norm")
    assert printed(stream) == printed(read(tmp_path, [one, *rest]))


def test_text_glued_into_a_number_is_a_problem_and_no_number(tmp_path: Path) -> None:
    lines = log_of(range(1, 4))
    lines[2] = lines[2].replace("E+0", "E[rank1]+0", 1).replace("lm loss: ", "lm loss: 9[rank1]")
    stream = read(tmp_path, lines)
    assert 3 not in stream.series["lm loss"]
    assert [(p.kind, p.step) for p in stream.problems] == [("invalid", 3)]


def test_a_line_broken_in_two_is_a_problem_and_its_half_number_none(tmp_path: Path) -> None:
    lines = log_of(range(1, 4))
    at = lines[2].index("grad norm: ") + len("grad norm: 3")
    stream = read(tmp_path, [*lines[:2], lines[2][:at], lines[2][at:]])
    assert 3 not in stream.series["grad norm"]
    assert any("cut short" in problem.what for problem in stream.problems)


def test_the_last_line_without_an_end_is_torn(tmp_path: Path) -> None:
    stream = read(tmp_path, log_of(range(1, 4)), end="")
    assert sorted(stream.series["lm loss"]) == [1, 2]
    assert [problem.kind for problem in stream.problems] == ["torn"]


def test_what_is_left_out_as_negative_or_nan_is_known_to_be(tmp_path: Path) -> None:
    log = TrainingLog()
    lines = [log.step(step, {"lm loss": float("nan") if step == 3 else 2.0}) for step in (1, 2, 3, 4)]
    stream = read(tmp_path, [line for line in lines if line])
    assert printed(stream)[3] is None and printed(stream)[4] == "2.000000E+00"
    assert not stream.problems


def test_means_with_skipped_iterations_are_of_steps_that_nobody_knows(tmp_path: Path) -> None:
    stream = read(tmp_path, log_of(range(1, 7), skips=[4]))
    assert [step for step, r in stream.series["load_balancing_loss"].items() if r.partial] == [4]
    assert not any(r.partial for r in stream.series["grad norm"].values())


def test_a_process_that_starts_anew_in_the_same_log_begins_its_means_anew(tmp_path: Path) -> None:
    stream = read(tmp_path, [*log_of(range(1, 4)), "successfully loaded checkpoint from x", *log_of(range(4, 7))])
    assert {step: r.first for step, r in stream.series["lm loss"].items()} == {1: 1, 2: 1, 3: 3, 4: 4, 5: 4, 6: 6}


TITAN = (
    "[rank0]:[titan] 2026-01-01 00:00:00,000 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: {loss:8.5f}  "
    "\x1b[38;2;180;60;0mgrad_norm: {norm:7.4f}  \x1b[36mmemory:  0.50GiB(1.00%)  \x1b[34mtps: 1,234  "
    "\x1b[36mtflops: 0.12  \x1b[35mmfu: 0.01%\x1b[39m"
)


def test_the_other_shipped_pattern(tmp_path: Path) -> None:
    lines = [TITAN.format(step=step, loss=loss_of(step), norm=1.5) for step in (1, 2, 3)]
    lines.insert(2, "validate step:  2  loss:  1.00000  memory: 1")
    path = tmp_path / "log"
    path.write_text("\n".join(lines) + "\n")
    spec, pattern = SourceSpec("log", None, "torchtitan"), load_pattern("torchtitan")
    stream = read_attempt(spec, pattern, [(Part(path), "log")], ("loss", "grad_norm"))
    assert printed(stream, "loss") == {step: f"{loss_of(step):.5f}" for step in (1, 2, 3)}
    assert printed(stream, "grad_norm") == dict.fromkeys((1, 2, 3), "1.5000")


def test_a_pattern_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(r"log: {line: 'epoch \d+ step (?P<step>\d+) loss=(?P<loss>\S+) gn=(?P<grad_norm>\S+)'}")
    stream = read(tmp_path, ["epoch 1 step 1 loss=0.5 gn=1", "epoch 1 step 2 loss=nan gn=2"], load_pattern(str(file)))
    assert printed(stream, "grad_norm") == {1: "1", 2: "2"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("log: {line: 'loss (?P<loss>.*)'}", "no group (?P<step>"),
        ("log: {head: '(?P<step>x', field: '{name}(?P<number>x)'}", "no regular expression"),
        ("log: {head: '(?P<step>x)', field: 'loss'}", "hold {name}"),
        ("log: {haed: x}", "haed"),
        ("- a", "a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_pattern_that_cannot_be_read_says_why(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(RecordError) as caught:
        load_pattern(str(file))
    assert said in str(caught.value)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(RecordError) as caught:
        load_pattern("megatorn")
    assert "megatron" in str(caught.value.hint)
