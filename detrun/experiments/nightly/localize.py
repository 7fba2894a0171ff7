"""The last part of a night: what diverged is localized, one after the other, while the budget of node-hours lasts."""

from __future__ import annotations

from detrun.errors import DetrunError, UserError
from detrun.experiments.clusters import cluster_of
from detrun.experiments.localize import PASSES, LocalizeOptions, run_localize
from detrun.experiments.nightly.run import LockLost, NightRun, node_hours
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import ExperimentFolder
from detrun.records.nights import OPEN, Item

SLOWER = 2.0
"""How much longer a traced arm is reckoned to take than an untraced one."""


def plan_localizations(run: NightRun, paths: list[str]) -> list[Item]:
    """An item for the first check of each recipe that diverged; those that have one already keep it."""
    for path in paths:
        if run.night.item(path, "localize") is not None:
            continue
        diverged = [run.night.item(path, kind) for kind in ("pair", "resume-check")]
        first = next((item for item in diverged if item is not None and item.verdict == "diverged"), None)
        if first is not None:
            run.night.items.append(Item(recipe=first.recipe, path=path, kind="localize", of=first.experiment))
    return [item for item in run.night.of(paths) if item.kind == "localize" and item.state in OPEN]


def localize_all(run: NightRun, items: list[Item]) -> None:
    """Localizes each of the items that the budget allows; of the rest it is said that they were left out, and why."""
    budget = run.options.localize_budget
    for item in items:
        spent = sum(each.node_hours or 0.0 for each in run.night.items if each.kind == "localize")
        assert item.of is not None
        needs = node_hours(ExperimentFolder(run.archive.root / item.of)) * (PASSES - 1) * SLOWER
        begun = run.folder_of(item)
        if begun is None and (budget <= 0 or spent + needs > budget):
            run.leave_out(
                item,
                f"not localized: it would take about {needs:.2g} node-hours, and {max(0.0, budget - spent):.2g} of "
                f"{budget:g} are left; detrun localize {item.of} does it",
            )
            continue
        try:
            _localize(run, item, begun)
        except LockLost:
            raise
        except UserError as error:
            run.leave_out(item, f"not localized: {error}")
        except DetrunError as error:
            run.fail(item, error)
        except Exception as error:  # noqa: BLE001  the night goes on
            run.fail(item, run.bug(error))


def _localize(run: NightRun, item: Item, begun: ExperimentFolder | None) -> None:
    target = begun or ExperimentFolder(run.archive.root / str(item.of))
    experiment = ExperimentFile.read(target.experiment_file)
    item.state = "running"
    item.experiment = begun.id if begun else None
    run.save()

    def say(line: str) -> None:
        run.check()  # every pass says so before it starts
        run.say(f"{item.recipe} localize: {line}")

    options = LocalizeOptions(agreed=run.options.agreed, labels=run.labels)
    folder, verdict = run_localize(target, run.archive, cluster_of(experiment), options, run.command_line, say)
    item.experiment = folder.id
    run.settle(item, folder, verdict)
