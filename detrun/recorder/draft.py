"""What is known of a step that has not been written yet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from detrun.recorder.pending import Scalar, Waiting
from detrun.records.metrics_writer import MetricValue, StepLine

EACH = "adapter, each micro-batch"
"""The source of a named value that an adapter tells once a micro-batch: it is counted as a loss is."""


class Digest(Waiting, Protocol):
    """A digest that may still be on its way; `text` once it is ready."""

    def text(self) -> str: ...


@dataclass
class Draft:
    """Gathers a step: scalars and digests in the order in which they came up.

    `losses`: the scalar each backward call started from; `grad_losses`: that of each `torch.autograd.grad`, which
    counts where nothing else is a loss. `clip_norms`: what each clipping returned. `own_norms`: for each optimizer
    whose gradients nobody clipped, the norms of its gradients, one a device. `named`: what the program recorded
    itself, as (name, source, value). `resting_batches`: what modules in evaluation mode were given; they count where no
    module in training mode was given anything. `backwards`: outermost backward passes; `first_microbatch`: how many
    micro-batches of this step an earlier attempt took, so that only a part of it is here.
    """

    losses: list[Scalar] = field(default_factory=list)
    grad_losses: list[Scalar] = field(default_factory=list)
    clip_norms: list[Scalar] = field(default_factory=list)
    own_norms: list[Scalar] = field(default_factory=list)
    named: list[tuple[str, str, Scalar]] = field(default_factory=list)
    batches: list[Digest] = field(default_factory=list)
    resting_batches: list[Digest] = field(default_factory=list)
    gradients: list[tuple[int, Digest]] = field(default_factory=list)
    end_state: dict[str, Digest] = field(default_factory=dict)
    rng: str | None = None
    overflows: list[Scalar] = field(default_factory=list)
    skipped: bool = False
    backwards: int = 0
    first_microbatch: int = 0

    def begun(self) -> bool:
        """Has anything of this step happened?"""
        return bool(self.losses or self.batches or self.named)

    def microbatches_done(self) -> int:
        """Micro-batches of this step so far, those of earlier attempts included."""
        return self.first_microbatch + (self.backwards or len(self.grad_losses))

    def absorb(self, later: Draft) -> None:
        """Add what turned out to belong to the same step. The later end of the step is the step's end."""
        for name in _LISTS:
            getattr(self, name).extend(getattr(later, name))
        self.end_state = later.end_state or self.end_state
        self.rng = later.rng or self.rng
        self.skipped = self.skipped or later.skipped
        self.backwards += later.backwards

    def add_gradients(self, digest: Digest, place: int = 0) -> None:
        """Those of one optimizer. place: where it belongs among the others if it is not where it stepped."""
        self.gradients.append((place, digest))

    def _gradients(self) -> list[Digest]:
        return [digest for _, digest in sorted(self.gradients, key=lambda entry: entry[0])]

    def waits_for(self) -> list[Waiting]:
        scalars = [*(self.losses or self.grad_losses), *self.clip_norms, *self.own_norms, *self.overflows]
        scalars += [value for _, _, value in self.named]
        late: list[Waiting] = [value for value in scalars if value.known is None]
        return [*late, *(self.batches or self.resting_batches), *self._gradients(), *self.end_state.values()]

    def line(self, step: int, *, with_state: bool) -> StepLine:
        """The step's line; everything in `waits_for` must be ready."""
        state: dict[str, str] = {}
        if with_state:
            for name in ("parameters", "gradients", "optimizer", "buffers"):
                if name == "gradients":
                    if self.gradients:
                        state[name] = _together(self._gradients())
                elif name in self.end_state:
                    state[name] = self.end_state[name].text()
        batches = self.batches or self.resting_batches
        overflowed = any(float(value.value()) != 0.0 for value in self.overflows)
        return StepLine(
            step=step,
            metrics=list(self.metrics()),
            microbatches=len(self._own_losses()) or len(batches) or None,
            # Of a part of a step, neither its batch nor its loss is that of the step.
            batch=_together(batches) if batches and not self.first_microbatch else None,
            state=state,
            rng=self.rng if with_state else None,
            skipped=self.skipped or overflowed,
            first_microbatch=self.first_microbatch,
        )

    def _told(self, name: str) -> bool:
        """Whether an adapter gave this metric: what was found otherwise is then something else."""
        return any(name == known and source == "adapter" for known, source, _ in self.named)

    def _own_losses(self) -> list[Scalar]:
        return [] if self._told("loss") else self.losses or self.grad_losses

    def metrics(self) -> Iterator[MetricValue]:
        losses = self._own_losses()
        if self.first_microbatch:
            for index, loss in enumerate(losses, self.first_microbatch):
                yield _metric(f"loss[{index}]", "backward", loss)
        else:
            yield from _series("loss", "backward", losses, mean=True)
        if not self._told("grad_norm"):
            yield from _series("grad_norm", "clip_grad_norm_", self.clip_norms, mean=False)
            if len(self.own_norms) == 1:
                yield _own(self.own_norms[0])
            elif self.own_norms:
                yield _float64("grad_norm", "recorder", _root_of_squares(self.own_norms))
        series: dict[str, list[Scalar]] = {}
        for name, source, value in self.named:
            if source == EACH:
                series.setdefault(name, []).append(value)
            else:
                yield _metric(name, source, value)
        for name, values in series.items():
            if self.first_microbatch:
                for index, value in enumerate(values, self.first_microbatch):
                    yield _metric(f"{name}[{index}]", "adapter", value)
            else:
                yield from _series(name, "adapter", values, mean=True)


_LISTS = (
    "losses", "grad_losses", "clip_norms", "own_norms", "named", "batches", "resting_batches", "gradients", "overflows",
)  # fmt: skip


def _series(name: str, source: str, values: Sequence[Scalar], *, mean: bool) -> Iterator[MetricValue]:
    """One value as it is. Several: each exactly, as `name[i]`, and under the plain name their float64 mean in order,
    or, where a mean has no meaning, the last of them."""
    if not values:
        return
    if len(values) == 1:
        yield _metric(name, source, values[0])
        return
    if mean:
        yield _float64(name, source, _mean(values))
    else:
        yield _metric(name, source, values[-1])
    for index, value in enumerate(values):
        yield _metric(f"{name}[{index}]", source, value)


def _mean(values: Sequence[Scalar]) -> float:
    total = 0.0
    for value in values:
        total += float(value.value())
    return total / len(values)


def _root_of_squares(values: Sequence[Scalar]) -> float:
    """Added up from the smallest on, so that the order in which optimizers step makes no difference."""
    parts = [float(value.value()) for value in values]
    if any(part != part for part in parts):
        return math.nan
    return math.sqrt(sum(sorted(part * part for part in parts)))


def _metric(name: str, source: str, value: Scalar) -> MetricValue:
    return MetricValue(name, source, value.bits(), value.dtype)


def _own(norm: Scalar) -> MetricValue:
    """A norm that the recorder computed. Which sign its NaN has depends on how the gradients lie in memory."""
    value = norm.value()
    if value == value:
        return _metric("grad_norm", "recorder", norm)
    from detrun.fingerprint.scalar import bits_of

    return MetricValue("grad_norm", "recorder", bits_of(math.nan, norm.dtype), norm.dtype)


def _float64(name: str, source: str, value: float) -> MetricValue:
    from detrun.fingerprint.scalar import bits_of

    # Of a NaN that was computed here, the sign is an accident.
    return MetricValue(name, source, bits_of(value if value == value else math.nan, "float64"), "float64")


def _together(digests: Sequence[Digest]) -> str:
    if len(digests) == 1:
        return digests[0].text()
    from detrun.recorder.digests import combined_text

    return combined_text([digest.text() for digest in digests])
