"""One row of a state file: a tensor, a random number stream or a plain value of the training state at a boundary.

Shared by the writer, which runs inside the training process, and the reader; standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Component = Literal[
    "parameters",
    "buffers",
    "gradients",
    "optimizer",
    "hyperparameters",
    "scheduler",
    "scaler",
    "rng",
    "batch",
    "loader",
    "module-state",
    "ema",
    "tracked",
    "local",
]
Standing = Literal["hard", "surviving", "soft"]

NOT_KEPT = -1


@dataclass(frozen=True)
class StateRow:
    """What is known of one piece of state.

    name: dotted, as the program has it. part: "" or the inner part of a tensor subclass ("qdata", "scale"), which has a
    row of its own. standing: what a difference means. `hard`: the states differ. `surviving`: they do if the piece was
    equal at the save and is still different one step later; what every step makes anew may differ right after a
    restore. `soft`: it may explain a difference seen elsewhere and is none itself. digest: None where the piece is
    absent, such as a gradient that is None. value: canonical text of a scalar or of a short plain value; a float is
    `float.hex()`. offset: where its kept bytes begin, NOT_KEPT if they were not kept; nbytes: its size.
    """

    component: Component
    name: str
    part: str = ""
    standing: Standing = "hard"
    dtype: str = ""
    shape: tuple[int, ...] = ()
    elements: int = 0
    digest: str | None = None
    value: str | None = None
    offset: int = NOT_KEPT
    nbytes: int = 0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the piece within a rank."""
        return (self.component, self.name, self.part)
