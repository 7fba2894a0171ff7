"""`detrun localize`: from "diverged at step 412" down to the operation, in passes that each see less and look closer.

    pair (or the experiment that diverged)     the step
    level 2, where there are many ranks        the ranks
    level 4                                    the operation, or what came from outside of all operations
    bytes                                      the same arms once more, its tensors kept: what really differs

Every pass is an experiment in a folder of this one's, done once its verdict is there: a command that was stopped takes
up where it was left, and nothing is run twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from detrun.compare.trace_summary import TraceComparison
from detrun.errors import RecordError, UsageError
from detrun.experiments.again import recipe_of
from detrun.experiments.checks import PairOptions, check_before_launch, check_shape, plan_pair
from detrun.experiments.compare_traces import compare_traces
from detrun.experiments.localize_verdict import Descent, Traced, conclude, held_against
from detrun.experiments.observer_check import check_observer
from detrun.experiments.passes import run_pass
from detrun.experiments.plan import Plan, Run, Site, declared_for, plan_whole_runs
from detrun.experiments.resume import ResumeOptions, plan_resume, resolve_interrupts
from detrun.experiments.start import Question, write_experiment
from detrun.experiments.trace_plan import BYTE_BUDGET, Request, Window, plan_traced
from detrun.launch.cluster import Cluster
from detrun.recipe import LoadedRecipe, check_launchable, check_recorded
from detrun.records.archive import Archive
from detrun.records.jobs import ArmPlan, ExperimentFile, Reference
from detrun.records.layout import AttemptFolder, ExperimentFolder
from detrun.records.verdict import FirstDivergence, Verdict

MANY_RANKS = 16
"""More than these are looked at by their collectives first, and by their operations only where that points to."""

KEPT_EVENTS = 16
"""Events whose tensors are kept in the last pass: the one that the verdict names and what may stand in for it."""

PASSES = 3
"""A pair, the operations, the bytes: what a localization usually takes, and what its cost is reckoned by."""

WIDENINGS = 2

RESUMED_STEPS = 8
"""Most steps after a restore that the first pass looks at."""


@dataclass(frozen=True)
class LocalizeOptions:
    """steps: the window, instead of the step that a comparison of metrics finds. level: the only level looked at.
    byte_budget: of trace files, for all ranks of an arm. repeat: how often a fault that did not come back is waited
    for. keep: whether the last pass, which keeps bytes, is run. agreed: --yes was given. labels: as a pair's."""

    steps: tuple[int, int] | None = None
    level: int | None = None
    ranks: tuple[int, ...] | None = None
    scopes: tuple[str, ...] | None = None
    byte_budget: int = BYTE_BUDGET
    repeat: int = 3
    keep: bool = True
    agreed: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> LocalizeOptions:
        """The options of a localization that was begun, from its experiment.json."""
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items() if name in known
        }
        return cls(**values)


@dataclass(frozen=True)
class Baseline:
    """The experiment whose difference is to be localized. resumed: arm b's last attempt went on from a checkpoint."""

    folder: ExperimentFolder
    experiment: ExperimentFile
    verdict: Verdict
    resumed: bool

    @property
    def other(self) -> str:
        """The arm that is held against arm a."""
        first = self.verdict.first_divergence
        return next((arm for arm in first.arms if arm != "a"), "b") if first else "b"

    def attempts(self) -> tuple[AttemptFolder, AttemptFolder]:
        """The two attempts that part, untraced."""
        reference = self.experiment.reference
        home = ExperimentFolder(Path(reference.path)) if reference else self.folder
        arm = reference.arm if reference else "a"
        own = self.folder.attempts(self.other)
        return home.attempt(arm, 0), own[-1] if own else self.folder.attempt(self.other, 0)


def run_localize(
    target: LoadedRecipe | ExperimentFolder,
    archive: Archive,
    cluster: Cluster,
    options: LocalizeOptions,
    command_line: Sequence[str],
    say: Callable[[str], None],
) -> tuple[ExperimentFolder, Verdict]:
    """Localizes what differs: of a recipe, after its arms were run as a pair; or of an experiment that diverged.

    Returns this experiment's folder and the verdict, which is written there last. Raises RecipeError, UsageError (an
    experiment that has nothing to localize), and what launching raises.
    """
    if isinstance(target, ExperimentFolder):
        asked = ExperimentFile.read(target.experiment_file)
        if asked.experiment == "localize":
            return target, _take_up(target, asked, cluster, command_line, say)
        baseline = _baseline(target)
        loaded = recipe_of(target, asked)
        reference = Reference(experiment=target.id, path=str(target.path), arm="a")
    else:
        loaded, baseline, reference = target, None, None
    check_launchable(loaded)
    check_recorded(loaded, "localize")
    _check_options(loaded, options)
    if baseline is not None and (missed := _missed(loaded, options, baseline)):
        raise UsageError(f"--steps: {missed}", hint="without --steps, detrun localize traces where they part")
    environment = dict(os.environ)

    def plan_in(place: ExperimentFolder) -> Plan:
        """The arms as they run untraced."""
        if baseline is None:
            return plan_pair(loaded, place, cluster.name, PairOptions(), environment)
        site = Site.of(loaded, place, cluster.name, environment)
        return plan_whole_runs(site, [Run(arm) for arm in _arms(loaded, baseline.other)])

    planned = plan_in(ExperimentFolder(archive.root / "planned"))
    times = PASSES if baseline is None else PASSES - 1
    cost = check_before_launch(loaded, archive, cluster.name, planned, options.agreed, environment, times)
    if cost:
        say(cost)
    folder = archive.create(loaded.recipe.name, "localize")
    question = Question("localize", reference, options=asdict(options), labels=options.labels)
    write_experiment(loaded, folder, plan_in(folder), cluster.name, question, command_line)
    return folder, _Localization(loaded, folder, cluster, options, command_line, say, baseline).run()


def _check_options(loaded: LoadedRecipe, options: LocalizeOptions) -> None:
    """Raises UsageError for a window beyond the recipe's steps or ranks."""
    recipe = loaded.recipe
    if options.steps is not None and options.steps[1] > recipe.steps:
        raise UsageError(
            f"--steps: the recipe takes {recipe.steps} steps, {options.steps[1]} is beyond", hint="--steps A-B"
        )
    if options.ranks and max(options.ranks) >= recipe.total_ranks:
        raise UsageError(
            f"--ranks: there is no rank {max(options.ranks)}", hint=f"ranks are 0 to {recipe.total_ranks - 1}"
        )


def _missed(loaded: LoadedRecipe, options: LocalizeOptions, baseline: Baseline) -> str:
    """Why the steps that are asked for cannot show where the arms part; empty if they may."""
    first = baseline.verdict.first_divergence
    if options.steps is None or first is None:
        return ""
    begin, end = options.steps
    if begin > max(1, first.step):
        return f"the arms part at step {first.step}, before {window_of(options.steps)}"
    every = max(1, loaded.recipe.metrics.state_every)
    if not baseline.resumed and end < max(1, (first.step - 1) // every * every + 1):
        return f"the arms part at step {first.step}, after {window_of(options.steps)}"
    return ""


def window_of(steps: tuple[int, int]) -> str:
    """`step 7` or `steps 7 to 9`."""
    return f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"


def _take_up(
    folder: ExperimentFolder,
    asked: ExperimentFile,
    cluster: Cluster,
    command_line: Sequence[str],
    say: Callable[[str], None],
) -> Verdict:
    """Goes on with a localization whose command was stopped, as it was asked for. One that has its verdict is done."""
    if folder.verdict_file.exists():
        return Verdict.read(folder.verdict_file)
    options = LocalizeOptions.from_record(asked.options)
    loaded = recipe_of(folder, asked)
    baseline = _baseline(ExperimentFolder(Path(asked.reference.path))) if asked.reference else None
    return _Localization(loaded, folder, cluster, options, command_line, say, baseline).run()


def _baseline(folder: ExperimentFolder) -> Baseline:
    experiment = ExperimentFile.read(folder.experiment_file)
    if experiment.experiment not in ("pair", "resume-check"):
        raise UsageError(
            f"{folder.id} is a {experiment.experiment}: a pair or a resume check can be localized",
            hint="detrun list shows them; or detrun localize RECIPE",
        )
    if not folder.verdict_file.exists():
        raise UsageError(f"{folder.id} has no verdict yet", hint=f"detrun attach {folder.id}")
    verdict = Verdict.read(folder.verdict_file)
    if verdict.verdict != "diverged" or verdict.first_divergence is None:
        raise UsageError(
            f"{folder.id} did not diverge ({verdict.verdict}): there is nothing to localize",
            hint="detrun localize RECIPE runs a new pair first",
        )
    if not 0 <= verdict.first_divergence.step <= experiment.steps:
        what = f"names step {verdict.first_divergence.step} of {experiment.steps}"
        raise RecordError(what, where=str(folder.verdict_file))
    return Baseline(folder, experiment, verdict, experiment.experiment == "resume-check")


def _arms(loaded: LoadedRecipe, other: str) -> list[ArmPlan]:
    """The reference, and as arm b what the recipe declares for `other`."""
    return [
        ArmPlan(id="a", role="reference", declared=declared_for(loaded.recipe, "a")),
        ArmPlan(id="b", role="repeat", declared=declared_for(loaded.recipe, other)),
    ]


class _Localization:
    """One descent. Every decision follows from the passes before it, so that a second run takes the same way."""

    def __init__(
        self,
        loaded: LoadedRecipe,
        folder: ExperimentFolder,
        cluster: Cluster,
        options: LocalizeOptions,
        command_line: Sequence[str],
        say: Callable[[str], None],
        baseline: Baseline | None,
    ) -> None:
        self.loaded = loaded
        self.folder = folder
        self.cluster = cluster
        self.options = options
        self.command_line = command_line
        self.say = say
        self.environment = dict(os.environ)
        self.ranks = loaded.recipe.total_ranks
        self.given = baseline
        self.descent = Descent(folder, ExperimentFile.read(folder.experiment_file))

    def run(self) -> Verdict:
        baseline = self.given or self._pair()
        if baseline is None:
            return conclude(self.descent)
        self.baseline = self.descent.baseline = baseline
        first = baseline.verdict.first_divergence
        assert first is not None
        self.descent.first = first
        self.descent.missed = _missed(self.loaded, self.options, baseline)
        if self.descent.missed:
            return conclude(self.descent)
        traced = self._descend(self._first_window(first))
        if traced is not None and traced.comparison.lead is not None and self.options.keep and self.descent.may_settle:
            self._settle(traced)
        return conclude(self.descent)

    # Passes

    def _pair(self) -> Baseline | None:
        """The metrics of a new pair; None where it does not diverge, which is then the verdict."""
        for number in range(1, self.options.repeat + 1):
            place, verdict = run_pass(
                self.loaded,
                self.folder,
                _name("pair", number),
                self.cluster,
                Question("pair"),
                lambda folder: plan_pair(self.loaded, folder, self.cluster.name, PairOptions(), self.environment),
                self.command_line,
                self.say,
            )
            self.descent.pairs.append(verdict)
            if verdict.first_divergence is not None:
                return Baseline(place, ExperimentFile.read(place.experiment_file), verdict, False)
            if verdict.verdict != "identical":
                return None
        return None

    def _trace(self, name: str, requests: Mapping[str, Request]) -> Traced:
        """One traced pass, its traces held against each other and its metrics against the untraced ones."""
        window = requests["a"].window
        last = window.steps[1]
        if self.baseline.resumed:
            question = Question("resume-check", None, resolve_interrupts(self.loaded, self.cluster.name))
        else:
            question = Question("pair", steps=last)
        place, verdict = run_pass(
            self.loaded,
            self.folder,
            name,
            self.cluster,
            question,
            lambda folder: self._plan(folder, requests, last),
            self.command_line,
            self.say,
        )
        a, b = held_against(place)
        comparison = compare_traces(a, b, window.ranks_of(self.ranks), from_batch=self._just_resumed(window))
        observer = check_observer(self.baseline.attempts(), (a, b), self.ranks, last)
        traced = Traced(
            place, verdict, requests["a"].level, window, comparison, observer, requests["a"].keep is not None
        )
        self.descent.traced.append(traced)
        return traced

    def _just_resumed(self, window: Window) -> bool:
        """Whether the window begins with the first step after a restore."""
        restored = self._restored()
        return restored is not None and window.steps[0] == restored + 1

    def _restored(self) -> int | None:
        """The step whose checkpoint the resumed arm went on from, where the resume check names it."""
        restored = (self.baseline.verdict.culprit or {}).get("step") if self.baseline.resumed else None
        return restored if isinstance(restored, int) else None

    def _plan(self, folder: ExperimentFolder, requests: Mapping[str, Request], last: int) -> Plan:
        if self.baseline.resumed:
            traces = {arm: request.as_variable() for arm, request in requests.items()}
            options = ResumeOptions(fresh=True)
            return plan_resume(self.loaded, folder, self.cluster.name, options, self.environment, traces=traces)
        check_shape(self.loaded, self.cluster.name)
        site = Site.of(self.loaded, folder, self.cluster.name, self.environment)
        return plan_traced(site, _arms(self.loaded, self.baseline.other), requests, last)

    # Decisions

    def _first_window(self, first: FirstDivergence) -> Window:
        """The step that parts, and the next where no state does. Where state is not recorded every step, all since it
        was last seen to be equal."""
        if self.options.steps is not None:
            return Window(self.options.steps, self.options.ranks, self.options.scopes)
        every = max(1, self.loaded.recipe.metrics.state_every)
        begin = first.step if every == 1 else max(1, (first.step - 1) // every * every + 1)
        if self.baseline.resumed:
            restored = self._restored()
            begin = begin if restored is None else min(begin, restored + 1)
        end = max(begin, first.step)
        if self.baseline.resumed:
            # What came back wrong may be read steps later.
            felt = min((metric.step for metric in first.metrics.values()), default=end)
            end = max(end, min(felt, begin + RESUMED_STEPS - 1))
        if not first.state:
            # A metric is reported after its step: what computes it is recorded with the step that follows.
            end = min(self.loaded.recipe.steps, end + 1)
        return Window((begin, end), self.options.ranks, self.options.scopes)

    def _descend(self, window: Window) -> Traced | None:
        """Level by level to where the operations are known; wider where the window held nothing, again where the fault
        stayed away."""
        levels = [self.options.level] if self.options.level else ([2, 4] if self.ranks > MANY_RANKS else [4])
        traced: Traced | None = None
        for level in levels:
            tries = {"again": 0, "wider": 0}
            while True:
                name = _name({2: "collectives", 3: "modules"}.get(level, "operators"), sum(tries.values()) + 1)
                request = Request(window, level, self._budget(window))
                traced = self._trace(name, {"a": request, "b": request})
                comparison = traced.comparison
                if comparison.lead is not None or traced.broken or not comparison.events or comparison.incomplete:
                    break  # found; or a wider window would hold no more
                if traced.verdict.first_divergence is None:
                    tries["again"] += 1
                    if tries["again"] >= self.options.repeat:
                        break
                    continue
                if self.options.steps is not None or tries["wider"] >= WIDENINGS:
                    break
                tries["wider"] += 1
                window = self._wider(window, traced)
            if traced.comparison.lead is None:
                break
            if level == 2 and len(levels) > 1:
                window = replace(window, ranks=_pointed_to(traced.comparison))
        return traced

    def _wider(self, window: Window, traced: Traced) -> Window:
        """Back to where this pass parted, if that was earlier than known; else a step more on either side."""
        first = traced.verdict.first_divergence
        begin, end = window.steps
        if first is not None and first.step < begin:
            return replace(window, steps=(first.step, end))
        earliest = (self._restored() or 0) + 1
        return replace(window, steps=(max(earliest, begin - 1), min(self.loaded.recipe.steps, end + 1)))

    def _settle(self, traced: Traced) -> None:
        """The arms once more with the named tensors kept, until their bytes show it or `repeat` is used up."""
        for number in range(1, self.options.repeat + 1):
            keys = traced.keys(KEPT_EVENTS)
            lead = traced.comparison.lead
            assert lead is not None
            ranks = _pointed_to(traced.comparison) if self.ranks > MANY_RANKS else traced.window.ranks
            window = replace(traced.window, ranks=ranks)
            request = Request(window, traced.level, self._budget(window), call_sites=True, keep=keys, kernels=True)
            repeats = traced.observer.repeats("a")
            against = str(traced.place.attempt("a", 0).path) if repeats else None
            again = self._trace(_name("bytes", number), {"a": request, "b": replace(request, against=against)})
            self.descent.look_at_bytes(again, keys)
            if self.descent.settled or again.broken:
                return
            if again.comparison.lead is not None:
                traced = again

    def _budget(self, window: Window) -> int:
        """Of a rank."""
        return max(1, self.options.byte_budget // max(1, len(window.ranks_of(self.ranks))))


def _name(stem: str, number: int) -> str:
    return stem if number == 1 else f"{stem}-{number}"


def _pointed_to(comparison: TraceComparison) -> tuple[int, ...]:
    """The ranks that a level's lead points to: those of its events, and the members of its collective."""
    lead = comparison.lead
    assert lead is not None
    ranks = {lead.rank, *(other.rank for other in comparison.others[:KEPT_EVENTS])}
    return tuple(sorted(ranks))
