"""`detrun nightly`: every recipe, every night, and one line in the morning."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from detrun.cli.common import ArchiveOption, open_archive, say
from detrun.errors import ExitCode, UsageError, worst_of


def nightly(
    recipes: Annotated[
        list[Path],
        typer.Argument(help="Recipes, and folders of recipes.", metavar="RECIPE…", show_default=False),
    ],
    archive: ArchiveOption = None,
    night: Annotated[
        str | None,
        typer.Option(
            "--night",
            metavar="NAME",
            help="The night's name. Without it: the date, or a night to take up.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="KINDS", help="Of pair,resume; both without it.", show_default=False),
    ] = None,
    localize_budget: Annotated[
        float,
        typer.Option("--localize-budget", min=0, metavar="NODE_HOURS", help="For localizing what diverged; 0 is none."),
    ] = 2.0,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="last-good|ID", help="Hold each pair against an earlier one's.", show_default=False
        ),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            "--at-once",
            min=1,
            metavar="N",
            help="Recipes at a time; without it 8 on Slurm, else 1.",
            show_default=False,
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing unless something changed.")] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Do not follow a night that another command runs: exit 5.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Submit even above limits.node_hours.")] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML there too.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The night as one JSON document on stdout.")] = False,
    print_crontab: Annotated[
        bool, typer.Option("--print-crontab", help="Print the entry for crontab -e; run nothing.")
    ] = False,
    print_scrontab: Annotated[
        bool, typer.Option("--print-scrontab", help="Print the entry for Slurm's scrontab -e; run nothing.")
    ] = False,
    at: Annotated[str, typer.Option("--at", metavar="HH:MM", help="When, for the printed entries.")] = "02:30",
) -> int:
    """Runs every recipe's pair and resume check, localizes what diverged, and says in one line what came of it.

    Called again, it follows a night that is being run, takes up one that was stopped, and repeats nothing.

    Exit code, the worst of all: 0 identical. 1: diverged. 2: a recipe or the command line is wrong. 3: not verified.
    4: a job could not be submitted, failed or was lost. 5: another night is being run. 70: a bug of detrun. 130:
    interrupted, the jobs go on.
    """
    from detrun.experiments.nightly.run import NightlyOptions
    from detrun.report.notify import Notifier

    options = NightlyOptions(
        only=_kinds(only), localize_budget=localize_budget, against=against, at_once=at_once, agreed=yes
    )
    store = open_archive(archive)
    if print_crontab or print_scrontab:
        from detrun.experiments.nightly.entry import cron_entry

        entry = cron_entry(recipes, store, options, at, slurm=print_scrontab)
        sys.stdout.write(entry.text)
        for warning in entry.warnings:
            say(f"note: {warning}")
        return ExitCode.OK
    from detrun.experiments.nightly import run_nightly
    from detrun.records.nights import junit_file

    try:
        result = run_nightly(
            recipes,
            store,
            options,
            ["detrun", *sys.argv[1:]],
            _warnings_only if quiet else say,
            notifier=Notifier.from_environment(),
            name=night,
            wait=not no_wait,
        )
    except KeyboardInterrupt:
        say("Jobs go on. The same command takes the night up.")
        return ExitCode.INTERRUPTED
    code = result.exit_code
    if junit is not None:
        try:
            shutil.copyfile(junit_file(store, result.night.night), junit)
        except OSError as error:  # the night's answer comes all the same
            say(f"error: --junit {junit}: {error.strerror or error}")
            code = worst_of([code, ExitCode.USER])
    if as_json:
        json.dump(result.document(), sys.stdout, indent=1)
        sys.stdout.write("\n")
    elif result.news or not quiet:
        sys.stdout.write(f"{result.summary}\n")
    return code


def _kinds(text: str | None) -> tuple[Any, ...]:
    if text is None:
        return ("pair", "resume-check")
    words = {"pair": "pair", "resume": "resume-check", "resume-check": "resume-check"}
    given = [word.strip() for word in text.split(",") if word.strip()]
    if not given or (wrong := [word for word in given if word not in words]):
        raise UsageError(f"--only: {(wrong if given else [text])[0]!r} is no kind of check", hint="--only pair,resume")
    found = {words[word] for word in given}
    return tuple(kind for kind in ("pair", "resume-check") if kind in found)


def _warnings_only(line: str) -> None:
    if line.startswith("warning: "):
        say(line)
