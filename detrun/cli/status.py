"""`detrun status`: how an experiment stands, looked at once."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from detrun.cli.common import (
    ArchiveOption,
    IdArgument,
    JsonOption,
    arm_names,
    cluster_of,
    open_archive,
    read_verdict,
    to_find,
)

if TYPE_CHECKING:
    from detrun.launch.cluster import Cluster
    from detrun.records.layout import ExperimentFolder


def status(experiment: IdArgument = "@latest", archive: ArchiveOption = None, as_json: JsonOption = False) -> int:
    """Shows each arm's job, state, steps and nodes, and the verdict if there is one; of a localization, its passes."""
    from detrun.experiments.follow import Follower
    from detrun.records.files import one_line
    from detrun.records.jobs import ExperimentFile
    from detrun.report.answer import word

    folder = open_archive(archive).resolve(experiment)
    asked = ExperimentFile.read(folder.experiment_file)
    follower = Follower(cluster_of(asked), folder)
    follower.poll_once()
    views = follower.views()
    passes = _passes(folder, cluster_of(asked))
    judged = read_verdict(folder)
    verdict = word(judged) if judged else None
    if as_json:
        arms = [
            {
                "id": view.arm,
                "state": view.state,
                "steps": view.steps,
                "job": view.job,
                "reason": view.reason or None,
                "nodes": view.nodes,
                "attempt": view.attempt,
                "resumed_from": view.resumed,
            }
            for view in views
        ]
        document = {"id": folder.id, "verdict": verdict, "steps": asked.steps, "arms": arms, "passes": passes}
        json.dump(document, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return 0
    console = Console()
    console.print(f"{folder.id}   {verdict or 'no verdict yet'}", markup=False, highlight=False, soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    if asked.reference is not None:
        arm, other = asked.reference.arm, asked.reference.experiment
        console.print(f"  {asked.arms[0].id}  is arm {arm} of {other}", markup=False, highlight=False, soft_wrap=True)
    names = arm_names(asked)
    for view in views:
        table.add_row(
            f"  {view.arm} {names.get(view.arm, '')}",
            f"attempt {view.attempt} {view.state}" if view.attempt else view.state,
            f"{min(view.steps, asked.steps)}/{asked.steps}",
            f"job {view.job}" if view.job else "not submitted",
            one_line(",".join(view.nodes)),
            one_line(view.reason, 1000),
        )
    for each in passes:
        going = "   ".join(f"{arm['id']} {arm['state']} {arm['steps']}" for arm in each["arms"])
        table.add_row(f"  pass {each['name']}", each["verdict"] or f"no verdict yet   {going}")
    console.print(table, markup=False, highlight=False)
    if verdict is None:
        which = to_find(folder)
        console.print(f"hint: detrun attach {which}", markup=False, highlight=False)
    return 0


def _passes(folder: ExperimentFolder, cluster: Cluster) -> list[dict[str, Any]]:
    """The experiments that this one ran on its way, and where the arms of the one that has no verdict are."""
    from detrun.experiments.follow import Follower

    found = []
    for place in folder.passes().values():
        judged = read_verdict(place)
        arms: list[dict[str, Any]] = []
        if judged is None:
            follower = Follower(cluster, place)
            follower.poll_once()
            arms = [{"id": view.arm, "state": view.state, "steps": view.steps} for view in follower.views()]
        found.append({"name": place.path.name, "verdict": judged.verdict if judged else None, "arms": arms})
    return found
