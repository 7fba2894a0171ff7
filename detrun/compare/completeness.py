"""Whether the records of a rank hold everything that was asked for. Asked before anything is called equal.

`survey_rank` looks at one rank of one arm and returns a small value; `gaps_of_arm` joins the ranks of an arm,
as some questions (did every rank stop at the same step? does a pipeline's stage lack a metric by design?)
can only be answered there. Both are pure: records in, gaps out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from detrun.compare.folding import steps_in_words
from detrun.compare.streams import Gap
from detrun.records.metrics_line import Held, stem_of
from detrun.records.metrics_reader import RankMetrics

STATE_COMPONENTS = ("parameters", "gradients", "optimizer")
"""What a step at which state is due holds, beside the RNG streams."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the recipe asked the recorder for. required_line: the recipe's line, for the reader's sake.

    absent: metrics and streams that this program does not have, by the recipe's word. cut_short: arms are ended before
    the recipe's last step, by plan.
    """

    steps: int
    ranks: int
    required: tuple[str, ...] = ()
    state_every: int = 1
    ignore: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    required_line: int | None = None
    cut_short: bool = False

    @property
    def requirement(self) -> str:
        """`required by the recipe, line 14`."""
        line = f", line {self.required_line}" if self.required_line else ""
        return f"required by the recipe{line}"


@dataclass(slots=True)
class RankSurvey:
    """What one rank of one arm recorded, in short.

    first, last: steps; first is 0 where nothing was recorded.
    metrics, components: names that any step holds. parameters: 16 bytes a step, in the steps' order, of the
    parameters' digest (zeros where there is none), for holding replicas against each other.
    """

    arm: str
    rank: int
    last: int = 0
    first: int = 0
    steps: int = 0
    microbatches: int = 0
    unreadable: bool = False
    end: str = ""
    gaps: list[Gap] = field(default_factory=list)
    metrics: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    has_batch: bool = False
    has_rng: bool = False
    parameters: bytes = b""

    def of_arm(self, arm: str) -> RankSurvey:
        """The survey of another arm's rank whose file holds the same bytes."""
        return replace(self, arm=arm, gaps=[replace(gap, arm=arm) for gap in self.gaps])


def survey_rank(arm: str, rank: int, records: RankMetrics, asked: Asked, first: int = 1) -> RankSurvey:
    """Surveys a rank's records against what was asked for. first: the step they have to begin with."""
    survey = RankSurvey(arm, rank)
    if not records.steps:
        survey.unreadable = True
        worst = records.problems[0] if records.problems else None
        what = worst.what if worst else "nothing was recorded"
        survey.gaps.append(Gap(worst.kind if worst else "empty", what, rank, arm, line=worst.line if worst else None))
        return survey
    survey.first, survey.last = min(records.steps), max(records.steps)
    survey.steps = len(records.steps)
    survey.microbatches = sum(record.microbatches for record in records.steps.values())
    survey.parameters = _trail(records, survey.last)
    _note_lines(survey, records, asked, first)
    _note_contents(survey, records, asked)
    return survey


def _trail(records: RankMetrics, last: int) -> bytes:
    """The parameters' digests of steps 1 to `last`; what lies far behind the steps recorded is not a trail."""
    steps = records.steps
    if last > 2 * len(steps) + 1000:
        return b""
    digests = [record.parameters if (record := steps.get(step)) else None for step in range(1, last + 1)]
    return bytes.fromhex("".join(digest[:32].rjust(32, "0") if digest else _NONE for digest in digests))


_NONE = "0" * 32


def _note_lines(survey: RankSurvey, records: RankMetrics, asked: Asked, first: int) -> None:
    """Gaps in the sequence of steps up to the last one recorded, each with the line that explains it."""
    problems = list(records.problems)
    missing = _missing(records, first, survey.last)
    torn = next((problem for problem in problems if problem.kind == "torn"), None)
    if torn and survey.last < asked.steps:
        survey.end = f" ({torn.what})"
        problems.remove(torn)
    if missing:
        what = f"{'step' if len(missing) == 1 else 'steps'} {_short(missing)} missing"
        lines = [problem for problem in problems if problem.kind in ("invalid", "schema")]
        if len(lines) == 1 and len(missing) == 1:
            what += f" ({lines[0].what})"
            problems.remove(lines[0])
        survey.gaps.append(Gap("missing-step", what, survey.rank, survey.arm, missing[0]))
    for problem in problems:
        survey.gaps.append(Gap(problem.kind, problem.what, survey.rank, survey.arm, problem.step, problem.line))


def _missing(records: RankMetrics, first: int, last: int) -> list[int]:
    """Steps from `first` to `last` without a record; of a number out of all proportion, only the first thousand."""
    end = min(last, first + len(records.steps) + 1000)
    return [step for step in range(first, end + 1) if step not in records.steps]


def _short(numbers: Sequence[int]) -> str:
    words = steps_in_words(numbers).partition(" ")[2].partition(" ")[2]
    return f"{words} {'is' if len(numbers) == 1 else 'are'}"


def _note_contents(survey: RankSurvey, records: RankMetrics, asked: Asked) -> None:
    """Metrics and streams that some or all steps lack."""
    kinds: dict[Held, list[int]] = {}
    for step, record in records.steps.items():
        kinds.setdefault(record.held, []).append(step)
    survey.metrics = tuple(dict.fromkeys(name for kind in kinds for name in kind.metrics))
    survey.components = tuple(dict.fromkeys(name for kind in kinds for name in kind.state))
    survey.has_batch = any(kind.batch for kind in kinds)
    survey.has_rng = any(kind.rng for kind in kinds)
    total = len(records.steps)

    for name in asked.required:
        theirs = asked.names.get(name, name)
        lacking = [
            s for kind, steps in kinds.items() if name not in kind.metrics and theirs not in kind.metrics for s in steps
        ]
        if not lacking:
            continue
        when = "" if len(lacking) == total else f" {steps_in_words(lacking)}"
        kind_of_gap = "metric" if len(lacking) == total else "metric-step"
        what = f"{name} is missing{when} ({asked.requirement}{_or_is_it(name, survey, len(lacking) == total)})"
        survey.gaps.append(Gap(kind_of_gap, what, survey.rank, survey.arm, min(lacking), name=name))

    every = [step for steps in kinds.values() for step in steps]
    if survey.has_batch or (asked.state_every and "batch" not in asked.absent):
        lacking = [step for kind, steps in kinds.items() if not kind.batch for step in steps]
        _note_stream(survey, "batch", lacking, every, "metrics.absent: [batch] if the program has none")
    if not asked.state_every:
        return
    due = [step for step in every if step % asked.state_every == 0]
    for name in (*STATE_COMPONENTS, "rng"):
        if name not in asked.absent:
            lacking = [
                step
                for kind, steps in kinds.items()
                if not (kind.rng if name == "rng" else name in kind.state)
                for step in steps
                if step % asked.state_every == 0
            ]
            why = f"metrics.state_every is {asked.state_every}"
            _note_stream(survey, "RNG" if name == "rng" else name, lacking, due, why)


def _or_is_it(name: str, survey: RankSurvey, never: bool) -> str:
    """`; recorded were loss and grad_norm`: what a name that never came up may have been meant for."""
    plain = [metric for metric in survey.metrics if stem_of(metric) == metric]
    if not never or not plain:
        return ""
    near = difflib.get_close_matches(name, plain, n=1)
    return f"; did you mean {near[0]}?" if near else f"; recorded were {', '.join(plain[:8])}"


def _note_stream(survey: RankSurvey, label: str, lacking: Sequence[int], due: Sequence[int], why: str) -> None:
    if not lacking:
        return
    verb = "are" if label.endswith("s") else "is"
    what = f"{label} {verb} missing {steps_in_words(lacking, len(due))} ({why})"
    survey.gaps.append(Gap("stream", what, survey.rank, survey.arm, min(lacking), name=label))


NO_STEP_SEEN = (
    "the program ended well and no step was seen: torch.optim did none, and no module's parameters changed after a "
    "backward pass (detrun.record(step, loss=...) once a step tells where they are)"
)


@dataclass(frozen=True, slots=True)
class ArmEnd:
    """How an arm's job ended, as far as completeness cares."""

    exit_code: int | None
    clean: bool


def counts_microbatches(surveys: Sequence[RankSurvey], ends: Mapping[str, ArmEnd], asked: Asked) -> int | None:
    """The number of optimizer steps where the program counts micro-batches as its steps, else None.

    So it is if every rank of every arm recorded the same number of steps without a hole, fewer than asked
    for, their micro-batches add up to exactly what was asked for, and every arm ended cleanly.
    """
    if not surveys or not all(end.clean and end.exit_code == 0 for end in ends.values()):
        return None
    lasts = {survey.last for survey in surveys}
    if len(lasts) != 1 or len(surveys) != asked.ranks * len(ends):
        return None
    last = lasts.pop()
    whole = all(s.steps == last and s.microbatches == asked.steps and not s.end for s in surveys)
    return last if whole and 0 < last < asked.steps else None


def gaps_of_arm(
    surveys: Sequence[RankSurvey],
    asked: Asked,
    end: ArmEnd | None = None,
    stages: Mapping[int, object] | None = None,
    optimizer_steps: int | None = None,
) -> list[Gap]:
    """All gaps of one arm's ranks.

    stages: each rank's pipeline stage, where the program has several. A metric that a whole stage lacks in
    every step is that stage's nature, as long as another stage has it.
    optimizer_steps: what `counts_microbatches` said.
    """
    last_due = optimizer_steps or asked.steps
    gaps = gaps_within(surveys, stages)
    for survey in surveys:
        if survey.unreadable:
            continue
        if survey.last < last_due:
            how = " though it ended with exit code 0" if end and end.exit_code == 0 and end.clean else ""
            what = f"metrics end at step {survey.last} of {last_due}{survey.end or how}"
            gaps.append(Gap("short", what, survey.rank, survey.arm, survey.last))
        elif survey.last > last_due:
            what = f"metrics go on to step {survey.last}, {last_due} steps were asked for"
            gaps.append(Gap("long", what, survey.rank, survey.arm, survey.last))
    if end and end.clean and end.exit_code == 0 and all(survey.unreadable for survey in surveys):
        gaps = [replace(gap, what=f"{gap.what}; {NO_STEP_SEEN}") if gap.kind == "missing" else gap for gap in gaps]
    return gaps


def gaps_within(surveys: Sequence[RankSurvey], stages: Mapping[int, object] | None) -> list[Gap]:
    """What is missing in the steps that the ranks took, however many those are. stages: as above."""
    excused = _excused(surveys, stages)
    return [
        gap
        for survey in surveys
        for gap in survey.gaps
        if not (gap.kind == "metric" and stages and (stages.get(survey.rank), gap.name) in excused)
    ]


def _excused(surveys: Sequence[RankSurvey], stages: Mapping[int, object] | None) -> set[tuple[object, str | None]]:
    """Metrics that no rank of a pipeline's stage has and some rank of another stage has."""
    if not stages or len(set(map(repr, stages.values()))) < 2:
        return set()
    lacking: dict[tuple[object, str | None], int] = {}
    sizes: dict[object, int] = {}
    for survey in surveys:
        stage = stages.get(survey.rank)
        sizes[stage] = sizes.get(stage, 0) + 1
        for gap in survey.gaps:
            if gap.kind == "metric":
                lacking[stage, gap.name] = lacking.get((stage, gap.name), 0) + 1
    whole = {key for key, ranks in lacking.items() if ranks == sizes[key[0]]}
    names = {name for _, name in whole}
    everywhere = {name for name in names if all((stage, name) in whole for stage in sizes)}
    return {key for key in whole if key[1] not in everywhere}
