"""`detrun diagnose`: the arms of an experiment that diverged, again and again with one thing changed for all of them.

What makes them agree, where they did not before, is the cause or holds it. Every change is a pass of its own, in a
folder of this experiment's; a command that was stopped goes on with the first change that has no verdict.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from detrun.errors import RecipeError, UsageError
from detrun.experiments.again import recipe_of
from detrun.experiments.changes import CHANGES, repeating, with_args
from detrun.experiments.checks import check_before_launch, check_shape
from detrun.experiments.diagnose_verdict import NOT_RUN, choose, conclude, known_of
from detrun.experiments.passes import run_pass
from detrun.experiments.plan import Plan, Run, Site, pair_arms, plan_whole_runs
from detrun.experiments.start import Question, write_experiment
from detrun.experiments.trace_plan import ended_after
from detrun.launch.cluster import Cluster
from detrun.launch.preflight import check_node_hours
from detrun.recipe import LoadedRecipe, Recipe, check_launchable, check_recorded
from detrun.records.archive import Archive
from detrun.records.jobs import ExperimentFile, Reference
from detrun.records.layout import ExperimentFolder
from detrun.records.verdict import Verdict

KIND = "diagnose"

MOST_STEPS = 10
"""Steps of an arm that diverged at once; otherwise twice as many as it took to diverge."""


@dataclass(frozen=True)
class DiagnoseOptions:
    """repeat: how many arms are held against the first one, for each change. steps: of each arm; None: as many as the
    difference needs. only: changes to run, in place of those that fit. toggles: by name, further arguments for every
    arm. agreed: --yes was given."""

    repeat: int = 3
    steps: int | None = None
    only: tuple[str, ...] = ()
    toggles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    agreed: bool = False

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DiagnoseOptions:
        """The options of a diagnosis that was begun, from its experiment.json."""
        toggles = {str(name): tuple(map(str, args)) for name, args in dict(record.get("toggles", {})).items()}
        return cls(int(record.get("repeat", 3)), record.get("steps"), tuple(record.get("only", ())), toggles, True)


def run_diagnose(
    target: ExperimentFolder,
    archive: Archive,
    cluster: Cluster,
    options: DiagnoseOptions,
    command_line: Sequence[str],
    say: Callable[[str], None],
) -> tuple[ExperimentFolder, Verdict]:
    """Runs the changes that fit what is known of a pair or a localization, and returns this experiment's folder and its
    verdict, which is written there last. target: that, or a diagnosis that was begun.

    Raises UsageError for an experiment that cannot be diagnosed and an unknown change, and what launching raises.
    """
    asked = ExperimentFile.read(target.experiment_file)
    if asked.experiment == KIND:
        return _take_up(target, cluster, command_line, say)
    check_target(target, asked)
    unknown = [name for name in options.only if name not in CHANGES]
    if unknown:
        raise UsageError(f"{unknown[0]} is no change", hint=f"there are: {', '.join(CHANGES)}")
    loaded = recipe_of(target, asked)
    check_launchable(loaded)
    check_recorded(loaded, "diagnose")
    check_shape(loaded, cluster.name)
    planned = _Diagnosis(
        loaded, ExperimentFolder(archive.root / "planned"), target, cluster, options, command_line, say
    )
    if cost := planned.check(archive):
        say(cost)
    folder = archive.create(loaded.recipe.name, KIND)
    question = Question(KIND, Reference(experiment=target.id, path=str(target.path), arm="a"), options=asdict(options))
    write_experiment(loaded, folder, planned.plan("unchanged", folder), cluster.name, question, command_line)
    return folder, _Diagnosis(loaded, folder, target, cluster, options, command_line, say).run()


def _take_up(
    folder: ExperimentFolder, cluster: Cluster, command_line: Sequence[str], say: Callable[[str], None]
) -> tuple[ExperimentFolder, Verdict]:
    if folder.verdict_file.exists():
        return folder, Verdict.read(folder.verdict_file)
    asked = ExperimentFile.read(folder.experiment_file)
    if asked.reference is None:
        raise UsageError(f"{folder.id} does not say what it diagnoses", hint="detrun diagnose ID, of what diverged")
    target = ExperimentFolder(Path(asked.reference.path))
    options = DiagnoseOptions.from_record(asked.options)
    return folder, _Diagnosis(recipe_of(folder, asked), folder, target, cluster, options, command_line, say).run()


def check_target(target: ExperimentFolder, asked: ExperimentFile) -> None:
    """Raises UsageError for what has nothing to diagnose."""
    if asked.experiment == "resume-check":
        raise UsageError(
            f"{target.id} is a resume check, whose verdict names what was not restored and what to do",
            hint="detrun localize ID finds the first operation that differs after the restore",
        )
    if asked.experiment not in ("pair", "localize"):
        raise UsageError(
            f"{target.id} is a {asked.experiment}: a pair or a localization can be diagnosed",
            hint="detrun list shows them",
        )
    if not target.verdict_file.exists():
        raise UsageError(f"{target.id} has no verdict yet", hint=f"detrun attach {target.id}")
    verdict = Verdict.read(target.verdict_file)
    if verdict.first_divergence is None:
        raise UsageError(f"{target.id} did not diverge ({verdict.verdict}): there is nothing to diagnose")
    if asked.reference is not None and _is_resume(asked.reference):
        raise UsageError(
            f"{target.id} localizes what a resume lost: the same cannot be told by uninterrupted arms",
            hint="its verdict names the piece of state and what to do",
        )


def _is_resume(reference: Reference) -> bool:
    return ExperimentFile.read(ExperimentFolder(Path(reference.path)).experiment_file).experiment == "resume-check"


class _Diagnosis:
    """The changes of one experiment. Which fit follows from its target alone: a second run takes the same way."""

    def __init__(
        self,
        loaded: LoadedRecipe,
        folder: ExperimentFolder,
        target: ExperimentFolder,
        cluster: Cluster,
        options: DiagnoseOptions,
        command_line: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.cluster = cluster
        self.options = options
        self.command_line = command_line
        self.say = say
        self.environment = dict(os.environ)
        self.known = known_of(target)
        first = self.known.first
        other = next((arm for arm in first.arms if arm != "a"), "b")
        recipe = repeating(loaded.recipe, other, options.repeat)
        self.loaded = replace(loaded, recipe=recipe)
        self.last = min(recipe.steps, options.steps or max(MOST_STEPS, 2 * first.step))
        self.chosen, self.left_out = choose(self.known, recipe, options.only)
        self.names = [*self.chosen, *(f"toggle-{name}" for name in options.toggles)]

    def check(self, archive: Archive) -> str | None:
        """What `check_before_launch` checks, for all passes together."""
        recipe, environment = self.loaded.recipe, self.environment
        plan = self.plan("unchanged", self.folder)
        check_before_launch(self.loaded, archive, self.cluster.name, plan, True, environment)
        if self.cluster.name != "slurm":
            return None
        arms = len(plan.arms) * len(self.names)
        return check_node_hours(
            arms, recipe.launch.nodes, plan.minutes_per_arm, recipe.limits.node_hours, self.options.agreed
        )

    def run(self) -> Verdict:
        for name in self.names:
            loaded = replace(self.loaded, recipe=self.changed(name))
            try:
                run_pass(
                    loaded,
                    self.folder,
                    name,
                    self.cluster,
                    Question("pair", steps=self.last),
                    partial(self.plan, name),
                    self.command_line,
                    self.say,
                )
            except RecipeError as error:
                # Such as a variable that forbids deterministic algorithms: of this change alone.
                self.say(f"{name}: {error.what}")
                (self.folder.path / NOT_RUN).mkdir(exist_ok=True)
                (self.folder.path / NOT_RUN / f"{name}.txt").write_text(f"{error.what}\n", encoding="utf-8")
        return conclude(self.folder)

    def changed(self, name: str) -> Recipe:
        """The recipe of one pass."""
        recipe = self.loaded.recipe
        toggle = name.removeprefix("toggle-")
        if name not in CHANGES:
            return with_args(recipe, self.options.toggles[toggle])
        return CHANGES[name].apply(recipe, [arm.id for arm in pair_arms(recipe, self.options.repeat)])

    def plan(self, name: str, place: ExperimentFolder) -> Plan:
        """The jobs of one pass: arms that are ended when the steps that are wanted are complete."""
        recipe = self.changed(name)
        loaded = replace(self.loaded, recipe=recipe)
        site = Site.of(loaded, place, self.cluster.name, self.environment)
        cut = ended_after(recipe, self.last)
        arms = pair_arms(recipe, self.options.repeat)
        return plan_whole_runs(site, [Run(arm, interrupt=cut, captures=False) for arm in arms])
