"""The faults that can be planted, as a table.

Each is exact: nothing differs before its first step or on ranks it does not name (beyond what those ranks receive).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from detrun.workloads.hybrid import input_faults as inputs
from detrun.workloads.hybrid import numeric_faults as numeric
from detrun.workloads.hybrid import process_faults as process
from detrun.workloads.hybrid import resume_faults as state
from detrun.workloads.hybrid import resume_stream_faults as streams
from detrun.workloads.hybrid.fault import Fault, Option

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
    rank: int | str | None = ALL_RANKS
    """The default; None: it acts on all ranks or on none, and takes no rank."""

    @property
    def defaults(self) -> dict[str, Option]:
        """All the options it takes."""
        return {**self.options} if self.rank is None else {**self.options, "rank": self.rank}


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
        "resume-nudge-parameter",
        "on resume one weight is one ULP off, the greatest of `parameter`",
        "restored state differs: that parameter, 1 element, 1 ULP; gradients of the first resumed step",
        state.NudgeParameter,
        {"parameter": "norm.weight"},
    ),
    FaultKind(
        "resume-lose-buffer",
        "on resume one buffer is as in a new model; buffer=, else the first expert bias",
        "restored state differs: that buffer; metrics once it decides otherwise than the saved one",
        state.LoseBuffer,
        {"buffer": ""},
    ),
    FaultKind(
        "resume-lose-moments",
        "on resume the optimizer's moments are dropped",
        "restored state differs: optimizer, every moment (missing); first resumed losses and gradients equal, second"
        " not; with rank= on that rank only",
        state.LoseMoments,
        ON_RESUME,
    ),
    FaultKind(
        "resume-round-moment",
        "on resume one moment of one layer went through bfloat16; `moment` is exp_avg or exp_avg_sq",
        "restored state differs: optimizer, that moment of that parameter only; metrics from the second resumed step",
        state.RoundMoment,
        {"parameter": "head.weight", "moment": "exp_avg_sq"},
    ),
    FaultKind(
        "resume-optimizer-step",
        "on resume the optimizer counts `steps` steps fewer than it made",
        "restored state differs: optimizer, every step counter (moments equal); metrics from the second resumed step",
        state.SetBackOptimizerStep,
        {"steps": 1},
    ),
    FaultKind(
        "resume-hyper-parameter",
        "on resume the learning rate is the first step's until the schedule sets the next one",
        "restored state differs: hyper-parameters (lr), scheduler equal; metrics from the second resumed step",
        state.FirstLearningRate,
        ON_RESUME,
    ),
    FaultKind(
        "resume-schedule-twice",
        "on resume the learning-rate schedule is one step ahead",
        "restored state differs: scheduler; metrics from the second resumed step",
        state.ScheduleTwice,
        ON_RESUME,
    ),
    FaultKind(
        "resume-reset-scaler",
        "on resume the loss scale and its growth counter start anew",
        "restored state differs: scaler; metric loss_scale from the first resumed step, all else equal",
        state.ResetScaler,
        ON_RESUME,
    ),
    FaultKind(
        "resume-lose-ema",
        "on resume the moving average of the weights starts anew from the weights",
        "restored state differs: EMA; every metric equal for ever",
        state.LoseEma,
        ON_RESUME,
    ),
    FaultKind(
        "resume-lose-amax",
        "on resume the amax histories of FP8 layers are empty, their scales as saved",
        "restored state differs: amax histories (buffers), packed weights and scales equal; metrics from the second"
        " resumed step",
        state.LoseAmaxHistory,
        ON_RESUME,
    ),
    FaultKind(
        "resume-requantize",
        "on resume low-precision weights are rebuilt another way: FP8 scaled by the master's own amax, MXFP8 scales"
        " rounded down, NVFP4's upper scale without its factor 6",
        "restored state differs: packed values and scales, masters equal (precision); metrics from the first resumed"
        " step",
        state.Requantize,
        ON_RESUME,
    ),
    FaultKind(
        "resume-lose-stream",
        f"on resume one stream starts from the seed again; stream= {', '.join(streams.STREAMS)}",
        "restored state differs: that RNG stream; metrics from the first step that draws from it",
        streams.LoseStream,
        {"stream": "numpy"},
    ),
    FaultKind(
        "resume-rank0-rng",
        "on resume every rank gets rank 0's random number streams",
        "restored state differs: RNG of every rank but 0, equal to rank 0's",
        streams.RankZeroStreams,
        ON_RESUME,
    ),
    FaultKind(
        "resume-extra-draw",
        "on resume one draw from torch's CPU stream after its restore",
        "restored state differs: RNG (torch), one draw ahead",
        streams.DrawAfterRestore,
        ON_RESUME,
    ),
    FaultKind(
        "resume-restart-data",
        "on resume the loader starts at its beginning",
        "restored state differs: loader; batch of the first resumed step differs",
        streams.RestartData,
        ON_RESUME,
    ),
    FaultKind(
        "resume-skip-batch",
        "on resume the loader is `batches` batches ahead",
        "batch of the first resumed step is that of a later one; so are loader and RNG (python, numpy), which it draws"
        " from",
        streams.SkipBatch,
        {"batches": 1},
    ),
    FaultKind(
        "resume-count-prefetched",
        "on resume the loader is as many batches ahead as --prefetch had read and nobody had used",
        "batch of the first resumed step is that of so many steps later; so are loader and RNG (python, numpy)",
        streams.CountPrefetched,
        ON_RESUME,
    ),
    FaultKind(
        "resume-repeat-batch",
        "on resume the loader gives the last step's batch once more",
        "batch of the first resumed step is that of the step before; so are loader and RNG (python, numpy)",
        streams.RepeatBatch,
        ON_RESUME,
    ),
    FaultKind(
        "resume-previous",
        "resumes from the checkpoint before the one asked for",
        "the attempt's first step is not the one after the checkpoint it was given; identical from there",
        state.PreviousCheckpoint,
        ON_RESUME,
        rank=None,
    ),
    FaultKind(
        "resume-ignored",
        "starts at step 1 though a checkpoint was given",
        "the attempt began at step 1 instead of resuming; identical from there",
        state.IgnoreCheckpoint,
        ON_RESUME,
        rank=None,
    ),
    FaultKind(
        "save-draws",
        "every save draws from torch's CPU stream first",
        "a run that saves at other steps than its reference diverges at the step after the save: RNG (torch)",
        streams.SaveDraws,
        {},
    ),
)


def describe_faults() -> str:
    """The table as text, for `--list-faults`."""
    lines = []
    for kind in KINDS:
        options = [f"{name}={value}" for name, value in kind.defaults.items()]
        lines += [
            f"{kind.name}  [{','.join(options)}]",
            f"    {kind.summary}",
            f"    expected: {kind.expected}",
        ]
    return "\n".join(lines)
