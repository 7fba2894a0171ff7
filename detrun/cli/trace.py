"""`detrun trace`: records what the ranks compute, at a level and in a window of the user's choice."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from detrun.cli.common import (
    ArchiveOption,
    ArmOption,
    JsonOption,
    SetOption,
    StandaloneOption,
    choose_cluster,
    follow_to_verdict,
    open_archive,
    say,
    say_submitted,
)
from detrun.cli.windows import (
    BytesOption,
    RanksOption,
    ScopesOption,
    parse_bytes,
    parse_ranks,
    parse_steps,
)


def trace(
    recipe: Annotated[Path, typer.Argument(help="The recipe.", metavar="RECIPE")] = Path("detrun.yaml"),
    overrides: SetOption = None,
    arms: ArmOption = None,
    archive: ArchiveOption = None,
    level: Annotated[
        int, typer.Option("--level", min=2, max=4, help="2 collectives and optimizer, 3 modules, 4 operators.")
    ] = 4,
    steps: Annotated[str, typer.Option("--steps", help="Steps to trace: 7 or 7-9.", metavar="A-B")] = "1",
    ranks: RanksOption = None,
    scopes: ScopesOption = None,
    byte_budget: BytesOption = "4GiB",
    call_sites: Annotated[
        bool, typer.Option("--call-sites", help="Record the file and line of every call; it costs time.")
    ] = False,
    count: Annotated[int, typer.Option("--arms", min=1, max=2, help="How many arms are traced.", metavar="N")] = 1,
    detach: Annotated[bool, typer.Option("--detach", help="Submit, print the experiment's id, and return.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Submit even above limits.node_hours.")] = False,
    standalone: StandaloneOption = False,
    as_json: JsonOption = False,
) -> int:
    """Runs a recipe with tracing and keeps the traces; detrun compare holds two of them against each other.

    Exit code 0: traced. 2: the recipe or the command line is wrong. 3: a trace is incomplete. 4: a job could not be
    submitted, failed, stalled or was lost. 70: a bug of detrun. 130: interrupted, the jobs go on.
    """
    from detrun.experiments.trace import TraceOptions, start_trace
    from detrun.recipe import load_recipe
    from detrun.records.jobs import ExperimentFile

    options = TraceOptions(
        level=level,
        steps=parse_steps(steps) or (1, 1),
        ranks=parse_ranks(ranks),
        scopes=tuple(scopes) if scopes else None,
        byte_budget=parse_bytes(byte_budget),
        call_sites=call_sites,
        arms=count,
        agreed=yes,
    )
    loaded = load_recipe(recipe, overrides or (), arms or ())
    store = open_archive(archive, loaded.archive)
    cluster = choose_cluster(loaded.recipe.cluster)
    folder = start_trace(loaded, store, cluster, options, ["detrun", *sys.argv[1:]], say)
    if detach:
        say_submitted(folder)
        return 0
    return follow_to_verdict(folder, ExperimentFile.read(folder.experiment_file), cluster, as_json, standalone)
