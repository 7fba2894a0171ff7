"""`detrun resume-check`, the launching side: an undisturbed arm, one that is interrupted and resumed, and controls."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from detrun.errors import RecipeError
from detrun.experiments.checks import check_before_launch, check_shape
from detrun.experiments.plan import JobPlan, Plan, Run, Site, arm_ids, declared_for, plan_jobs
from detrun.experiments.reference import ReferenceArm, find_reference
from detrun.experiments.start import Question, start
from detrun.launch.cluster import Cluster
from detrun.launch.spec import HELD_KINDS
from detrun.recipe import Interrupt, LoadedRecipe, Recipe, check_interrupts, check_launchable, check_recorded, expand
from detrun.records.archive import Archive
from detrun.records.jobs import ArmPlan
from detrun.records.layout import ExperimentFolder

SABOTAGES = ("rng", "batch", "moment", "parameter", "scheduler")
"""What a self-test breaks at restore, an arm each."""

_SAVING = frozenset({"signal", "requeue", "node-failure", "timeout"})
"""Kinds whose signal a program may answer with a save of its own."""

_FALLBACK = "write interrupt: {kind: kill, at_step: …}, a step that saves nothing, after the first that does."


@dataclass(frozen=True)
class ResumeOptions:
    """observer: one more arm that never saves. self_test: arms with something broken at restore. fresh: no arm of an
    earlier experiment stands in for the reference. agreed: --yes was given. labels: as a pair's."""

    observer: bool = False
    self_test: bool = False
    fresh: bool = False
    agreed: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


def resolve_interrupts(loaded: LoadedRecipe, cluster: str) -> list[dict[str, Any]]:
    """The interruptions, one an attempt, with every default written out. Without any in the recipe: killed at a step
    that saves nothing, between the first save and the second.

    Raises RecipeError for what cannot happen with this recipe or on this cluster.
    """
    recipe = loaded.recipe
    check_interrupts(loaded)
    if recipe.checkpoint is None:
        raise RecipeError(
            "checkpoint is missing, and without checkpoints nothing is resumed",
            where=str(loaded.path),
            hint="add checkpoint: {directory: …, save_every: …, save_args: […], resume_args: […]}; see docs/recipe.md",
        )
    if not recipe.interrupt:
        return [_resolved(recipe, _default(loaded), 0)]
    for index, interrupt in enumerate(recipe.interrupt):
        _check(loaded, interrupt, index, cluster)
    return [_resolved(recipe, interrupt, index) for index, interrupt in enumerate(recipe.interrupt)]


def check_resumable(loaded: LoadedRecipe) -> None:
    """Raises RecipeError where the recipe says too little to resume an arm, or asks for what cannot happen."""
    check_launchable(loaded)
    resolve_interrupts(loaded, loaded.recipe.cluster)


def plan_resume(
    loaded: LoadedRecipe,
    folder: ExperimentFolder,
    cluster: str,
    options: ResumeOptions,
    environment: Mapping[str, str],
    reference: ReferenceArm | None = None,
    traces: Mapping[str, Mapping[str, Any]] | None = None,
) -> Plan:
    """The jobs of a resume check. Raises RecipeError for what this cluster or this experiment cannot do.

    traces: what the last attempt of an arm is to trace (DETRUN_TRACE), by arm.
    """
    recipe = loaded.recipe
    check_launchable(loaded)
    if options.self_test or options.observer:
        check_recorded(loaded, "--self-test" if options.self_test else "--observer")
    interrupts = resolve_interrupts(loaded, cluster)
    arms = resume_arms(recipe, options)
    if strangers := sorted(set(recipe.arms) - {"a", "b"}):
        raise loaded.error(
            f"arms.{strangers[0]}",
            f"arms.{strangers[0]}: a resume check has the arms a (undisturbed) and b (interrupted)",
            "what further arms have beside the rest is settled by what they are for.",
        )
    check_shape(loaded, cluster)
    site = Site.of(loaded, folder, cluster, environment)
    _check_directory(loaded, site)
    a, b, *controls = arms
    traces = traces or {}
    before = [Run(a, trace=traces.get("a"))] if reference is None else []
    own = [Run(b, attempt, how) for attempt, how in enumerate([*interrupts, None])]
    own[-1] = replace(own[-1], trace=traces.get("b"))
    after = [_control(arm) for arm in controls]
    held = [how["kind"] for how in interrupts if how["kind"] in HELD_KINDS]
    together = cluster == "local" or recipe.placement == "allocation"
    if together and not held and not (cluster == "local" and recipe.placement == "parallel"):
        jobs = [JobPlan("arms", [*before, *own, *after])]
    else:
        jobs = [*([JobPlan("a", before)] if before else []), *_own_jobs(own, after, recipe, bool(before))]
    attempt = folder.attempt("a", 0) if reference is None else reference.folder.attempt(reference.arm, 0)
    return plan_jobs(site, arms, jobs, str(attempt.path))


def resume_arms(recipe: Recipe, options: ResumeOptions) -> list[ArmPlan]:
    """The reference, the interrupted arm, and those asked for beside: they have what the recipe declares for the arm
    that they are held against."""
    purposes = [("a", "observer")] if options.observer else []
    purposes += [("b", f"self-test:{kind}") for kind in SABOTAGES] if options.self_test else []
    ids = arm_ids(2 + len(purposes))
    return [
        ArmPlan(id="a", role="reference", declared=declared_for(recipe, "a")),
        ArmPlan(id="b", role="interrupted", declared=declared_for(recipe, "b")),
        *(
            ArmPlan(id=arm, role="control", purpose=purpose, declared=declared_for(recipe, like))
            for arm, (like, purpose) in zip(ids[2:], purposes, strict=True)
        ),
    ]


def start_resume(
    loaded: LoadedRecipe,
    archive: Archive,
    cluster: Cluster,
    options: ResumeOptions,
    command_line: Sequence[str],
    say: Callable[[str], None],
    reference: ReferenceArm | None = None,
) -> ExperimentFolder:
    """Submits the arms and returns their experiment's folder. say: told what it may cost, before anything goes in.

    reference: an arm of an earlier experiment that stands in for arm a, which is then not run; without it, and unless
    `options.fresh`, one is looked for. Where anything fails on the way, nothing half-made is left behind.
    """
    environment = dict(os.environ)

    def plan_in(folder: ExperimentFolder) -> Plan:
        return plan_resume(loaded, folder, cluster.name, options, environment, reference)

    planned = plan_in(ExperimentFolder(archive.root / "planned"))
    if reference is None and not options.fresh:
        now = next(segment for segment in planned.requests[0].spec.segments if segment.arm == "a")
        found = find_reference(archive, loaded, cluster.name, now)
        if isinstance(found, ReferenceArm):
            reference = found
            planned = plan_in(ExperimentFolder(archive.root / "planned"))
            say(f"the reference is arm {found.arm} of {found.folder.id}; --fresh runs it anew")
        else:
            say(f"the reference is run: {found}")
    cost = check_before_launch(loaded, archive, cluster.name, planned, options.agreed, environment)
    if cost:
        say(cost)
    question = Question(
        "resume-check",
        reference.document if reference else None,
        resolve_interrupts(loaded, cluster.name),
        labels=options.labels,
    )
    return start(loaded, archive, cluster, question, plan_in, command_line)


def _default(loaded: LoadedRecipe) -> Interrupt:
    recipe = loaded.recipe
    every = recipe.checkpoint.save_every if recipe.checkpoint else None
    if every is None:
        raise loaded.error(
            "checkpoint",
            "checkpoint.save_every is missing, so that nobody knows between which saves to interrupt",
            f"add save_every: the program's own schedule in steps; or {_FALLBACK}",
        )
    step = min(every + max(1, every * 2 // 5), recipe.steps - 1)
    if step <= every:
        raise loaded.error(
            "checkpoint.save_every",
            f"checkpoint.save_every: the first save, after step {every} of {recipe.steps}, leaves nothing to resume",
            f"save more often, or run more steps: {every + 2} at least.",
        )
    return Interrupt(kind="kill", at_step=step)


def _check(loaded: LoadedRecipe, interrupt: Interrupt, index: int, cluster: str) -> None:
    """One interruption against what the recipe and the cluster make possible."""
    recipe, key = loaded.recipe, loaded.interrupt_key(index)
    kind, step = interrupt.kind, interrupt.at_step
    if kind in HELD_KINDS and cluster == "local":
        raise loaded.error(f"{key}.kind", f"{key}.kind: {kind} needs Slurm", "kill, signal and stop work anywhere.")
    if kind == "node-failure" and not interrupt.command:
        raise loaded.error(
            f"{key}.kind",
            f"{key}.kind: failing a node needs an administrator",
            "interrupt.command does it for those who may, such as "
            '[scontrol, update, "NodeName={node}", State=DOWN, Reason=detrun].',
        )
    if kind == "stop" and step == recipe.steps and interrupt.moment == "end":
        raise loaded.error(
            f"{key}.at_step",
            f"{key}.at_step: stop at the last step is the program's ordinary end",
            "choose an earlier step.",
        )
    every = recipe.checkpoint.save_every if recipe.checkpoint else None
    before = recipe.interrupt[index - 1].at_step if index else None
    if every and step is not None and before is not None and step <= (resumed := (before - 1) // every * every):
        raise loaded.error(
            f"{key}.at_step",
            f"{key}.at_step: {step} is behind this attempt when it begins: it goes on from the save of step {resumed}",
            f"choose {resumed + 1} or a later step.",
        )
    if every is None or step is None or index or kind in _SAVING:
        return
    # Killed in a save, at its begin or at the end of a step, the save of that step is no more.
    first = every if interrupt.moment not in ("end", "before-save") and kind != "kill-during-save" else every + 1
    if kind == "stop" and interrupt.moment == "end":
        first = every
    if step < first:
        raise loaded.error(
            f"{key}.at_step",
            f"{key}.at_step: {step} leaves nothing to resume from: the first save is that of step {every}",
            f"choose {first} or a later step.",
        )
    if kind == "kill-during-save" and -(-step // every) * every > recipe.steps:
        raise loaded.error(
            f"{key}.at_step",
            f"{key}.at_step: no save follows step {step} ({recipe.steps} steps, one every {every})",
            f"choose {recipe.steps // every * every} or an earlier step.",
        )


def _resolved(recipe: Recipe, interrupt: Interrupt, index: int) -> dict[str, Any]:
    resolved: dict[str, Any] = {
        "kind": interrupt.kind,
        "at_step": interrupt.at_step,
        "moment": interrupt.moment,
        "ranks": interrupt.ranks if isinstance(interrupt.ranks, str | int) else list(interrupt.ranks),
        "node": interrupt.node,
        "signal": interrupt.signal if interrupt.kind == "signal" else None,
        "seed": recipe.seed + index,
    }
    if interrupt.kind == "timeout":
        resolved["minutes"] = interrupt.minutes or 1
    if interrupt.kind == "node-failure":
        values = {"node": "@NODE@", "job": "@JOB@", "seed": str(recipe.seed), "steps": str(recipe.steps)}
        values.update(nodes=str(recipe.launch.nodes), ranks=str(recipe.total_ranks))
        resolved["command"] = [expand(text, values) for text in interrupt.command]
    return resolved


def _control(arm: ArmPlan) -> Run:
    if arm.purpose == "observer":
        return Run(arm, saves=False, captures=False)
    return Run(arm, 1, continues="b", sabotage=(arm.purpose or "").partition(":")[2])


def _own_jobs(own: Sequence[Run], after: Sequence[Run], recipe: Recipe, follows: bool) -> list[JobPlan]:
    """The jobs of the interrupted arm. An attempt that is to run into its time limit has a job of its own, and what
    comes after it waits for that."""
    jobs: list[JobPlan] = []
    runs: list[Run] = []
    kinds = {run.interrupt["kind"] for run in own if run.interrupt}
    requeue = bool(kinds & {"requeue", "node-failure"})
    # Within an allocation arms never overlap, and a job of its own keeps to that.
    waits = follows and recipe.placement == "allocation"

    def close(minutes: int | None = None) -> None:
        nonlocal runs, waits
        if runs:
            suffix = "b" if not jobs else f"b{len(jobs)}"
            jobs.append(JobPlan(suffix, runs, minutes, requeue, waits, any_nodes="node-failure" in kinds))
        runs, waits = [], True

    for run in own:
        if run.interrupt and run.interrupt["kind"] == "timeout":
            close()
            runs = [run]
            close(run.interrupt["minutes"])
        else:
            runs.append(run)
    runs += after
    close()
    return jobs


def _check_directory(loaded: LoadedRecipe, site: Site) -> None:
    """Each arm saves in a place of its own."""
    assert loaded.recipe.checkpoint is not None
    text = loaded.recipe.checkpoint.directory
    places = {arm: Path(expand(text, site.values(arm, 0))) for arm in ("a", "b")}
    if places["a"] == places["b"]:
        raise loaded.error(
            "checkpoint.directory",
            f"checkpoint.directory: {text} is the same for every arm, and each would overwrite the other's",
            'a folder below "{out}", which is each arm\'s own; the program is told of {out} by its arguments.',
        )
    if not places["a"].is_absolute():
        raise loaded.error(
            "checkpoint.directory",
            f"checkpoint.directory: {text} is no absolute path",
            'for example "{out}/checkpoints"',
        )
