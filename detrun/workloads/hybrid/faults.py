"""The faults that can be planted, as a table; read from the command line; called at their seams.

`--fault name@step=7,rank=1`: each is exact, nothing differs before its first step or on ranks it does not
name (beyond what those ranks receive).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from detrun.workloads.hybrid import input_faults as inputs
from detrun.workloads.hybrid import numeric_faults as numeric
from detrun.workloads.hybrid import process_faults as process
from detrun.workloads.hybrid import resume_faults as resume
from detrun.workloads.hybrid.fault import Fault, Option
from detrun.workloads.hybrid.operations import INTERVENTIONS
from detrun.workloads.hybrid.settings import SettingsError

if TYPE_CHECKING:
    from detrun.workloads.hybrid.train import Trainer

ALL_RANKS = "all"
AT_STEP: Mapping[str, Option] = {"step": 7}
ON_RESUME: Mapping[str, Option] = {}


@dataclass(frozen=True)
class FaultKind:
    """A fault as it is listed. `options` holds those it takes beside `rank`, with their defaults."""

    name: str
    summary: str
    expected: str
    """What a perfect tool says when one arm has the fault and the other has not, unless it says otherwise."""
    build: type[Fault]
    options: Mapping[str, Option] = field(default_factory=lambda: AT_STEP)
    rank: int | str = ALL_RANKS


KINDS = (
    FaultKind(
        "nudge",
        "one ULP in the result of a Mamba-2 block's fused norm, inside its operator, once",
        "diverged at the step (state; metrics may lag): origin op hybrid::gated_norm in that module",
        numeric.Nudge,
        {"step": 7, "module": ""},
    ),
    FaultKind(
        "nudge-hidden",
        "one ULP in a module's output, written behind every operator's back, once",
        "diverged at the step: an uncaptured producer at that module's output on that rank",
        numeric.NudgeHidden,
        {"step": 7, "module": "blocks.1"},
    ),
    FaultKind(
        "swap-tokens",
        "two tokens of one expert change places in the first expert block, once",
        "diverged at the step: origin op hybrid::order_tokens, same multiset of rows in another order",
        numeric.SwapTokens,
    ),
    FaultKind(
        "race-aux-loss",
        "partial sums of the load-balancing loss added in an order from os.urandom, from the step on",
        "diverged at the step, load_balancing_loss first: origin op hybrid::ordered_sum in a router; with the"
        " fault in both arms too, at that step or soon after",
        numeric.RaceAuxLoss,
    ),
    FaultKind(
        "reorder-reduction",
        "gradients of ranks and micro-batches added last to first, once; give it to all ranks",
        "diverged at the step: losses equal, gradients not; origin op hybrid::ordered_sum outside the model",
        numeric.ReorderReduction,
    ),
    FaultKind(
        "weight-bit",
        "lowest bit of one weight that nothing reads, flipped after the update",
        "diverged at the end of the step in parameters (embedding.weight); every metric identical for ever",
        numeric.WeightBit,
    ),
    FaultKind(
        "replica-drift",
        "one rank's final norm scaled by 1 + 2**-10, the same in every run",
        "replicas differ within an arm from the end of the step on; two arms that both have it are identical",
        numeric.ReplicaDrift,
        rank=1,
    ),
    FaultKind(
        "nan",
        "the loss is NaN from the step on",
        "diverged at the step; with the fault in both arms identical, as NaN equals the same NaN",
        numeric.NotANumber,
    ),
    FaultKind(
        "negative-zero",
        "the metric router_z_loss is -0.0 instead of +0.0, once",
        "diverged at the step in that metric only, 0 apart in value; state identical",
        numeric.NegativeZero,
    ),
    FaultKind(
        "heal",
        "the reported mtp_loss is one ULP off, once; training is not touched",
        "diverged at the step in that metric only; equal again from the next step on, state identical",
        numeric.Heal,
    ),
    FaultKind(
        "small",
        "every reported metric is one ULP off from the step on, equal to six decimals; training is not touched",
        "diverged at the step in every metric that is not zero, equal to six decimals; state identical",
        numeric.Small,
    ),
    FaultKind(
        "hash-order",
        "document order follows iteration over a set of str",
        "diverged at the step, batch first: data order; identical if both have it and one PYTHONHASHSEED",
        inputs.HashOrder,
    ),
    FaultKind(
        "directory-order",
        "document order follows a folder's listing, different in every run and rank",
        "diverged at the step, batch first: data order; also when both arms have the fault",
        inputs.DirectoryOrder,
    ),
    FaultKind(
        "wrong-token",
        "the first token of a batch is another one, once",
        "diverged at the step, batch first: data",
        inputs.WrongToken,
    ),
    FaultKind(
        "extra-draw",
        "one draw too many from torch's CPU stream",
        "diverged at the step: RNG (torch), then dropout; batch and begin-of-step parameters identical",
        inputs.ExtraDraw,
    ),
    FaultKind("stall", "sleeps for ever in the step", "stalled at the step on that rank", process.Stall),
    FaultKind("die", "kills itself with SIGKILL in the step", "lost that rank in the step", process.Die),
    FaultKind("crash", "raises an exception in the step", "failed in the step, with its log", process.Crash),
    FaultKind(
        "early-exit",
        "exits with 0 after the step",
        "not verified: steps after it are missing though the exit code is 0",
        process.EarlyExit,
    ),
    FaultKind(
        "die-at-exit",
        "aborts after the last step is complete and recorded",
        "the job failed, all steps are recorded",
        process.DieAtExit,
        {},
    ),
    FaultKind(
        "slow",
        "sleeps `seconds` in every step from the step on",
        "identical",
        process.Slow,
        {"step": 1, "seconds": 0.2},
    ),
    FaultKind(
        "resume-lose-stream",
        f"on resume one stream starts from the seed again; stream= {', '.join(resume.STREAMS)}",
        "restored state differs: that RNG stream; metrics from the first step that draws from it",
        resume.LoseStream,
        {"stream": "numpy"},
    ),
    FaultKind(
        "resume-rank0-rng",
        "on resume every rank gets rank 0's random number streams",
        "restored state differs: RNG of every rank but 0",
        resume.RankZeroStreams,
        ON_RESUME,
    ),
    FaultKind(
        "resume-extra-draw",
        "on resume one draw from torch's CPU stream after its restore",
        "restored state differs: RNG (torch)",
        resume.DrawAfterRestore,
        ON_RESUME,
    ),
    FaultKind(
        "resume-lose-moments",
        "on resume the optimizer's moments are dropped",
        "restored state differs: optimizer; first resumed losses and gradients equal, second not",
        resume.LoseMoments,
        ON_RESUME,
    ),
    FaultKind(
        "resume-restart-data",
        "on resume the loader starts at its beginning",
        "restored state differs: loader; batch of the first resumed step differs",
        resume.RestartData,
        ON_RESUME,
    ),
    FaultKind(
        "resume-schedule-twice",
        "on resume the learning-rate schedule is one step ahead",
        "restored state differs: scheduler; metrics from the second resumed step",
        resume.ScheduleTwice,
        ON_RESUME,
    ),
    FaultKind(
        "save-draws",
        "every save draws from torch's CPU stream first",
        "a run that saves at other steps than its reference diverges at the step after the save: RNG (torch)",
        resume.SaveDraws,
        {},
    ),
)


def describe_faults() -> str:
    """The table as text, for `--list-faults`."""
    lines = []
    for kind in KINDS:
        options = [f"{name}={value}" for name, value in {**kind.options, "rank": kind.rank}.items()]
        lines += [
            f"{kind.name}  [{','.join(options)}]",
            f"    {kind.summary}",
            f"    expected: {kind.expected}",
        ]
    return "\n".join(lines)


@dataclass(frozen=True)
class FaultRequest:
    """One `--fault`, read and checked, not yet bound to a run."""

    kind: FaultKind
    rank: int | None
    """None: all ranks."""
    options: Mapping[str, Option]

    @classmethod
    def parse(cls, text: str) -> FaultRequest:
        """Read `name@key=value,key=value`."""
        name, _, rest = text.partition("@")
        kind = next((kind for kind in KINDS if kind.name == name), None)
        if kind is None:
            raise SettingsError(f"--fault {text}: no such fault; there are {', '.join(k.name for k in KINDS)}")
        options: dict[str, Option] = {**kind.options, "rank": kind.rank}
        for pair in filter(None, rest.split(",")):
            key, equals, value = pair.partition("=")
            if not equals or key not in options:
                raise SettingsError(f"--fault {text}: {pair!r} is no option; {name} takes {', '.join(options)}")
            options[key] = _read(text, key, value, options[key])
        rank = options.pop("rank")
        return cls(kind, None if rank == ALL_RANKS else int(rank), options)


def _read(text: str, key: str, value: str, default: Option) -> Option:
    """`value` in the type that the option's default has."""
    if isinstance(default, str) and (key != "rank" or value == ALL_RANKS):
        return value
    try:
        number: Option = float(value) if isinstance(default, float) else int(value)
    except ValueError:
        number = -1
    if isinstance(number, (int, float)) and number < (1 if key == "step" else 0):
        raise SettingsError(f"--fault {text}: {key}={value!r} is no valid number")
    return number


class FaultSet:
    """The faults of one run, bound to it by `attach`. Each seam calls this rank's faults in order."""

    def __init__(self, requests: Iterable[FaultRequest] = ()) -> None:
        self.requests = list(requests)
        self.faults: list[Fault] = []

    @classmethod
    def parse(cls, texts: Sequence[str]) -> FaultSet:
        return cls(FaultRequest.parse(text) for text in texts)

    def attach(self, trainer: Trainer) -> None:
        """Bind to a run, before a checkpoint is loaded. Raises SettingsError if a fault cannot act in it."""
        INTERVENTIONS.clear()
        world = trainer.ranks.world_size
        for request in self.requests:
            if request.rank is not None and request.rank >= world:
                raise SettingsError(f"--fault {request.kind.name}: rank={request.rank}, but there are {world} ranks")
            # Built on every rank, so that all of them report what is wrong with it.
            fault = request.kind.build(trainer, request.options)
            if request.rank in (None, trainer.ranks.rank):
                self.faults.append(fault)
        # Hooks of the optimizer itself run before the global ones through which an observer sees the step's
        # end.
        trainer.optimizer.register_step_post_hook(self._after_optimizer)

    def begin_step(self) -> None:
        for fault in self.faults:
            fault.begin_step()

    def change_batch(self, tokens: Tensor) -> None:
        for fault in self.faults:
            fault.change_batch(tokens)

    def change_loss(self, loss: Tensor) -> Tensor:
        for fault in self.faults:
            loss = fault.change_loss(loss)
        return loss

    def change_metrics(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        for fault in self.faults:
            metrics = fault.change_metrics(metrics)
        return metrics

    def end_step(self) -> None:
        for fault in self.faults:
            fault.end_step()

    def before_save(self) -> None:
        for fault in self.faults:
            fault.before_save()

    def after_restore(self) -> None:
        for fault in self.faults:
            fault.after_restore()

    def at_exit(self) -> None:
        for fault in self.faults:
            fault.at_exit()

    def _after_optimizer(self, *_: Any) -> None:
        for fault in self.faults:
            fault.after_optimizer()
