"""A verdict as a person reads it on stdout: the first line answers, the last says what to do next.

Meaning is never carried by color alone. On a terminal lines are wrapped at words; in a pipe they are left whole.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from detrun.records.files import one_line, printable
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Verdict
from detrun.report import (
    against_words,
    diagnose_screen,
    localize_screen,
    localize_words,
    resume_words,
    state_table,
    timeline,
    words,
)
from detrun.report.answer import head, sentence
from detrun.report.wrapping import wrapped

COMMANDS = frozenset({"report", "logs", "pair", "localize", "compare", "diagnose"})
"""Commands that hints may name, unless the caller knows better."""

MAX_REASONS = 20
MAX_LOG_LINES = 12
MAX_ROWS = 16
MAX_TABLES = 3
MIN_LABEL, MAX_LABEL = 20, 44
_STYLES = {"identical": "bold green", "diverged": "bold red", "not-verified": "bold yellow"}


def render(
    verdict: Verdict,
    experiment: ExperimentFile,
    console: Console,
    commands: Collection[str] = COMMANDS,
    options: str = "",
) -> None:
    """Prints the report.

    commands: those of `detrun` that exist, so that no hint names one that does not. options: what a command has to
    be given besides the id to find this experiment from here.
    """
    for line in lines(verdict, experiment, console.width, commands, options):
        for piece in wrapped(line, console.width if console.is_terminal else None):
            console.print(piece, soft_wrap=True, highlight=False, markup=False, emoji=False)


def lines(
    verdict: Verdict,
    experiment: ExperimentFile,
    width: int = 80,
    commands: Collection[str] = COMMANDS,
    options: str = "",
) -> Iterator[Text]:
    """The report's lines. Tables take the widest form that `width` columns hold."""
    first = head(verdict)
    joint = " " if first == "DIVERGED" else "  "
    yield Text.assemble((first, _STYLES[verdict.verdict]), joint, _clean(sentence(verdict, experiment)))
    if verdict.experiment in localize_words.EXPERIMENTS:
        yield from _localize(verdict, experiment)
        yield from _next(verdict, experiment, commands, options)
        return
    if verdict.experiment == diagnose_screen.EXPERIMENT:
        yield from diagnose_screen.body(verdict, experiment)
        yield from diagnose_screen.next_lines(verdict, experiment, options)
        return
    resume = verdict.experiment == resume_words.EXPERIMENT
    if resume and verdict.verdict == "not-verified":
        yield from _reasons(verdict)
    if resume:
        yield from _resume(verdict, experiment, width)
    elif verdict.verdict == "diverged":
        yield Text()
        yield from _table(verdict, experiment, width)
        for text in words.after_the_first(verdict, experiment):
            yield Text(_clean(text))
    if not resume or verdict.verdict != "not-verified":
        yield from _reasons(verdict)
    if verdict.verdict != "diverged" and verdict.of_kind("job"):
        yield from _compared(verdict)
    yield from _facts(verdict, experiment)
    yield from _next(verdict, experiment, commands, options)


def _localize(verdict: Verdict, experiment: ExperimentFile) -> Iterator[Text]:
    """The place, the way down, what was found; then what is known of the runs."""
    unproved = verdict.verdict == "not-verified"
    if unproved:
        yield from _reasons(verdict)
    yield from localize_screen.body(verdict, experiment)
    if not unproved:
        yield from _reasons(verdict)
    yield Text()
    yield from _facts(verdict, experiment)


def _resume(verdict: Verdict, experiment: ExperimentFile, width: int) -> Iterator[Text]:
    """The timeline of attempts and the table of state."""
    attempts = len(timeline.timeline(verdict, experiment)) > 1
    if attempts:
        yield Text()
        for row in timeline.picture(verdict, experiment, min(width, timeline.LABEL + timeline.WIDTH + 2)):
            yield Text(printable(row))
    # Where nothing can be blamed on the restore, its table says nothing.
    tables = state_table.tables(verdict, experiment) if verdict.verdict != "identical" else []
    if verdict.verdict == "not-verified":
        tables = [table for table in tables if any(row.differs for row in table.rows)]
    for table in tables[:MAX_TABLES]:
        yield Text()
        yield from _state_table(table, width)
    if len(tables) > MAX_TABLES:
        yield Text(f"and the state around {len(tables) - MAX_TABLES:,} more restores, all in report.html")
    if verdict.verdict == "diverged" or attempts:
        yield Text()
    for table in tables[:MAX_TABLES]:
        for table_row in table.rows if not _beside(table, width) else ():
            if table_row.note:
                yield Text(f"{_clean(table_row.component, MAX_LABEL)}: {_clean(table_row.note)}")
    for text in resume_words.below(verdict, experiment):
        yield Text(_clean(text))


def _beside(table: state_table.Table, width: int) -> bool:
    """Whether every row has room for what is known of why."""
    notes = [len(row.ranks) + 2 + len(row.note) for row in table.rows if row.note]
    widest = max(len(_clean(row.component, MAX_LABEL)) for row in table.rows)
    return not notes or widest + len(table.saved) + len(table.restored) + 20 + max(notes) <= width


def _state_table(table: state_table.Table, width: int) -> Iterator[Text]:
    """What is known of why stands in the row where all rows have room for it, else below the table."""
    shown = sorted(table.rows, key=lambda row: not row.differs)
    kept = {id(row) for row in shown[:MAX_ROWS]}
    rows = [row for row in table.rows if id(row) in kept]
    fixed = len(table.saved) + max(len(table.restored), *(11 + len(row.ranks) for row in rows))
    room = min(MAX_LABEL, max(MIN_LABEL, width - fixed - 12))
    cells = [("component", "pieces", table.saved, table.restored, "", "")]
    cells += [
        (_clean(row.component, room), row.rows, row.saved, row.restored, row.ranks, _clean(row.note)) for row in rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    # The heading may be wider than all below it; where room is short it may stick out over the ranks.
    widths[3] = max(len(row[3]) for row in cells[1:]) if sum(widths) + 8 + 10 > width else widths[3]
    who = max(len(row[4]) for row in cells)
    beside = _beside(table, width)
    for number, row in enumerate(cells):
        parts = [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].ljust(widths[2]), row[3].ljust(widths[3])]
        parts += [row[4].ljust(who), row[5]] if beside and row[5] else [row[4]]
        yield Text("  ".join(parts).rstrip(), style="bold" if number == 0 or row[4] else "")
    if len(table.rows) > len(rows):
        rest = table.rows if not rows else [row for row in table.rows if id(row) not in kept]
        equal = "" if any(row.differs for row in rest) else ", none of them to blame"
        yield Text(f"and {len(rest):,} more{equal}, all in report.html")


def _reasons(verdict: Verdict) -> Iterator[Text]:
    """Failed jobs with the end of their logs, then whatever else is missing."""
    failed = verdict.of_severity("infrastructure")
    dead = {finding.where.get("arm") for finding in failed}
    elsewhere = bool(verdict.of_kind("resumed-elsewhere"))
    resume = verdict.experiment == resume_words.EXPERIMENT
    follow = ("short", "missing", "environment-file", "state") if resume else ("short",)
    missing = [
        # That a dead arm's metrics end early is said with its death, and that a run which came back elsewhere has no
        # state where it was looked for follows from that.
        finding
        for finding in verdict.of_severity("not-verified")
        if not (finding.kind in follow and finding.where.get("arm") in dead)
        and not (finding.kind == "state" and elsewhere)
    ]
    if verdict.verdict == "diverged" and (failed or missing):
        yield Text("besides, not verified:", style="yellow")
    for finding in failed:
        yield Text(f"  {_clean(finding.what)}")
        for line in finding.evidence.get("log_tail", [])[-MAX_LOG_LINES:]:
            yield Text(f"    | {_clean(str(line), 400)}", style="dim")
        if finding.where.get("path"):
            yield Text(f"    log: {_clean(str(finding.where['path']))}")
    said = list(dict.fromkeys(_clean(finding.what) for finding in missing))  # of two attempts the same
    for text in said[:MAX_REASONS]:
        yield Text(f"  {text}")
    if len(said) > MAX_REASONS:
        yield Text(f"  and {len(said) - MAX_REASONS:,} more, all in verdict.json")


def _compared(verdict: Verdict) -> Iterator[Text]:
    figure = verdict.figures.get("rank_steps_compared")
    if figure and figure.value:
        yield Text("Nothing differs in the steps that both arms recorded.")


def _facts(verdict: Verdict, experiment: ExperimentFile) -> Iterator[Text]:
    for finding in verdict.of_severity("warning"):
        yield Text.assemble(("warning: ", "yellow"), _clean(finding.what))
    for finding in verdict.of_kind("late-exit"):
        yield Text(f"remark: {_clean(finding.what)}")
    declared = words.declared(verdict) or resume_words.declared(experiment)
    if declared:
        yield Text(_clean(declared))
    if verdict.experiment in localize_words.EXPERIMENTS:
        facts = localize_words.context(verdict, experiment)
    else:
        facts = [*words.context(verdict, experiment), *resume_words.context(verdict, experiment)]
    yield Text("     ".join(_clean(fact) for fact in facts))
    for text in (words.cost(verdict), resume_words.capture_cost(verdict), words.chance(verdict)):
        if text:
            yield Text(text)


def _next(verdict: Verdict, experiment: ExperimentFile, commands: Collection[str], options: str) -> Iterator[Text]:
    id = f"{_clean(words.short_id(verdict.id), 100)}{f' {options}' if options else ''}"
    if verdict.experiment in localize_words.EXPERIMENTS:
        if mend := localize_words.fix(verdict):
            yield Text(_clean(mend))
        yield Text(_clean(localize_words.next_step(verdict, experiment, id)))
        return
    if verdict.experiment == against_words.EXPERIMENT:
        yield Text(_clean(against_words.next_step(verdict, id)))
        return
    if verdict.verdict == "identical":
        yield Text(f"detrun report {id}")
        return
    if verdict.experiment == resume_words.EXPERIMENT:
        yield from _next_of_resume(verdict, experiment, commands, id, options)
        return
    if verdict.first_divergence is not None and verdict.first_divergence.boundary == "begin":
        yield Text(
            "hint: the seed does not reach what is set up before training: {seed} in launch.command, DETRUN_SEED"
        )
        return
    if verdict.verdict == "diverged" and "localize" in commands:
        yield Text(f"hint: {words.to_localize(verdict, id)}")
        return
    if verdict.verdict == "not-verified" and "logs" in commands:
        place = next((f.where for f in verdict.of_severity("infrastructure", "not-verified") if "arm" in f.where), {})
        arm = f" --arm {place['arm']}" if place else ""
        rank = f" --rank {place['rank']}" if "rank" in place else ""
        yield Text(f"hint: detrun logs {id}{arm}{rank}")
        return
    yield Text(f"hint: detrun report {id}")


def _next_of_resume(
    verdict: Verdict, experiment: ExperimentFile, commands: Collection[str], id: str, options: str
) -> Iterator[Text]:
    recipe = _clean(shlex.quote(_from_here(experiment.recipe_path))) if experiment.recipe_path else "RECIPE"
    if mend := resume_words.fix(verdict):
        yield Text(_clean(mend))
    if verdict.verdict == "diverged" and verdict.culprit is not None:
        further = f"detrun localize {id} names the first operation it reaches; " if "localize" in commands else ""
        yield Text(f"hint: {further}after the fix, detrun resume-check {recipe}")
        return
    if verdict.verdict == "diverged" and "localize" in commands:
        yield Text(f"hint: {words.to_localize(verdict, id)}")
        return
    if verdict.of_kind("saving-changes") and not verdict.of_kind("not-repeatable"):
        yield Text(f"hint: find what a save draws or changes; then detrun resume-check {recipe} --observer")
        return
    if (verdict.verdict == "diverged" or verdict.of_kind("not-repeatable")) and "pair" in commands:
        yield Text(f"hint: detrun pair {recipe}")
        return
    place = next((f.where for f in verdict.of_severity("infrastructure", "not-verified") if "arm" in f.where), {})
    if not place or "logs" not in commands:
        yield Text(f"hint: detrun report {id}")
        return
    arm, attempt = str(place["arm"]), place.get("attempt")
    if experiment.reference is not None and arm == experiment.arms[0].id:
        arm = experiment.reference.arm
        id = " ".join(part for part in (_clean(words.short_id(experiment.reference.experiment), 100), options) if part)
    if verdict.of_kind("not-interrupted", "not-resumed") and arm == "b":
        attempt = 0  # what was not started has printed nothing
    number = f" --attempt {attempt}" if attempt is not None else ""
    rank = f" --rank {place['rank']}" if "rank" in place else ""
    why = ""
    if verdict.of_kind("resumed-elsewhere"):
        checkpoint = experiment.recipe.get("checkpoint")
        told = checkpoint.get("resume_args") if isinstance(checkpoint, dict) else None
        if told == []:
            yield Text("checkpoint.resume_args is empty: the program has to look for its newest checkpoint by itself")
        why = " shows which checkpoint the program took"
    yield Text(f"hint: detrun logs {id} --arm {arm}{number}{rank}{why}")


def _from_here(path: str) -> str:
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def _table(verdict: Verdict, experiment: ExperimentFile, width: int) -> Iterator[Text]:
    every = words.first_rows(verdict, experiment)
    rows = words.plain_first(every)[:MAX_ROWS]
    first = verdict.first_divergence
    if not rows or first is None:
        return
    names = [f"arm {arm}" for arm in first.arms]
    starts = [("start" if row.step == 0 else str(row.step), _clean(row.stream, 40), row.ranks) for row in rows]
    full = [("  ".join(filter(None, row.a)), "  ".join(filter(None, row.b)), row.apart) for row in rows]
    exact = [(row.a[0], row.b[0], row.apart) for row in rows]
    for cells in (full, exact):
        table = [("step", "stream", "rank", *names, "apart")]
        table += [(*start, *cell) for start, cell in zip(starts, cells, strict=True)]
        widths = [max(len(row[column]) for row in table) for column in range(6)]
        widths[0] = max(widths[0], 4)
        if sum(widths) + 10 <= width:
            yield from _aligned(table, widths)
            break
    else:
        yield from _stacked(starts, full, first.arms)
    if len(every) > len(rows):
        yield Text(f"and {len(every) - len(rows):,} more streams, all in report.html")
    yield Text()


def _aligned(table: list[tuple[str, ...]], widths: list[int]) -> Iterator[Text]:
    for number, row in enumerate(table):
        cells = [row[0].rjust(widths[0])]
        cells += [cell.ljust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield Text("  ".join(cells).rstrip(), style="bold" if number == 0 else "")


def _stacked(starts: list[tuple[str, str, str]], cells: list[tuple[str, str, str]], arms: list[str]) -> Iterator[Text]:
    """A row over three lines, where names or values are too long to stand beside each other."""
    for (step, stream, ranks), (a, b, apart) in zip(starts, cells, strict=True):
        who = "every rank" if ranks == "all" else f"rank {ranks}"
        when = "before the first step" if step == "start" else f"step {step}"
        yield Text(f"{when}  {stream}  {who}  {apart}".rstrip(), style="bold")
        yield Text(f"  {arms[0]}  {a}")
        yield Text(f"  {arms[1]}  {b}")


def _clean(text: str, limit: int = 2000) -> str:
    """Text of foreign origin: printable, on one line, so that no record can move the cursor."""
    return one_line(text, limit)
