"""Planted faults, read from the command line and called at their seams: `--fault name@step=7,rank=1`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from detrun.workloads.hybrid.fault import Fault, Option
from detrun.workloads.hybrid.fault_table import ALL_RANKS, KINDS, FaultKind
from detrun.workloads.hybrid.operations import INTERVENTIONS
from detrun.workloads.hybrid.settings import SettingsError

if TYPE_CHECKING:
    from detrun.workloads.hybrid.train import Trainer


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
        options = kind.defaults
        for pair in filter(None, rest.split(",")):
            key, equals, value = pair.partition("=")
            if not equals or key not in options:
                raise SettingsError(
                    f"--fault {text}: {pair!r} is no option; {name} takes {', '.join(options) or 'none'}"
                )
            options[key] = _read(text, key, value, options[key])
        rank = options.pop("rank", ALL_RANKS)
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

    def change_resume(self, path: Path | None) -> Path | None:
        for fault in self.faults:
            path = path and fault.change_resume(path)
        return path

    def after_restore(self) -> None:
        for fault in self.faults:
            fault.after_restore()

    def at_exit(self) -> None:
        for fault in self.faults:
            fault.at_exit()

    def _after_optimizer(self, *_: Any) -> None:
        for fault in self.faults:
            fault.after_optimizer()
