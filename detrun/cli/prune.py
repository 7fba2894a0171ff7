"""`detrun prune`: removes what an archive no longer needs; fingerprints stay."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from detrun.cli.common import ArchiveOption, archive_option, open_archive, say


def prune(
    logs: Annotated[int, typer.Option("--logs", min=0, metavar="DAYS", help="How many days logs stay.")] = 30,
    keep: Annotated[
        int,
        typer.Option("--keep", min=0, metavar="N", help="How many of a recipe's newest experiments keep everything."),
    ] = 20,
    archive: ArchiveOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it. Without this it is only said what would go.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What goes as one JSON document on stdout.")] = False,
) -> int:
    """Removes logs older than some days, and traces, kept bytes, checkpoints and outputs of what came out identical.

    Of failures, of the newest experiments of each recipe and of baselines these stay, and of every experiment what its
    verdict rests on: experiment.json, verdict.json, metrics, environments, state digests, the report. Nothing of an
    experiment that runs or has no verdict is touched, nor of a folder that detrun has not marked, and no link is
    followed. pruned.json in an experiment's folder says what it has lost. Exit code 4: something could not be removed.
    """
    from detrun.errors import ArchiveError
    from detrun.experiments.prune import PruneRules, apply_prune, plan_prune
    from detrun.experiments.prune.words import document, lines
    from detrun.records.layout import ExperimentFolder

    store = open_archive(archive)
    plan = plan_prune(store, PruneRules(logs, keep))
    if yes:
        plan = apply_prune(store, plan)
    if as_json:
        json.dump(document(plan), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        for line in lines(plan, archive_option(ExperimentFolder(store.root / "any"))):
            sys.stdout.write(f"{line}\n")
    for text in plan.failed[:20]:
        say(f"could not be removed: {text}")
    if plan.failed:
        raise ArchiveError(
            f"{len(plan.failed)} could not be removed",
            where=str(store.root),
            hint="are they another user's? The rest is done, and the same command tries again",
        )
    return 0
