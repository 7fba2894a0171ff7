"""What the launcher asks of the recorder, and what else it may put into a session. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Protocol


@dataclass(frozen=True)
class Settings:
    """What the launcher asks of the recorder, from the environment of the process."""

    attempt_dir: str
    attempt: int = 0
    state_every: int = 1
    determinism: str = "none"
    steps_done: int | None = 0
    """Steps that earlier attempts of this arm took (DETRUN_STEPS_DONE); None if nobody said."""
    microbatches_done: int = 0
    """Micro-batches of the first step that an earlier attempt took (DETRUN_MICROBATCHES_DONE)."""
    state_at: frozenset[int] | None = frozenset()
    """Steps after which state is captured even where no save is seen (DETRUN_STATE_AT); None: it never is."""
    state_bytes: int = 64 << 20
    """Bytes of tensors kept at a boundary (DETRUN_STATE_BYTES)."""

    @staticmethod
    def from_environment(env: Mapping[str, str]) -> Settings | None:
        """None where detrun did not start this process."""
        folder = env.get("DETRUN_ATTEMPT_DIR")
        if not folder:
            return None
        attempt = int(env.get("DETRUN_ATTEMPT") or 0)
        done = env.get("DETRUN_STEPS_DONE")
        return Settings(
            attempt_dir=folder,
            attempt=attempt,
            state_every=int(env.get("DETRUN_STATE_EVERY") or 1),
            determinism=env.get("DETRUN_DETERMINISM") or "none",
            steps_done=int(done) if done else (0 if attempt == 0 else None),
            microbatches_done=int(env.get("DETRUN_MICROBATCHES_DONE") or 0),
            state_at=_steps(env.get("DETRUN_STATE_AT") or ""),
            state_bytes=int(env.get("DETRUN_STATE_BYTES") or 64 << 20),
        )


def _steps(text: str) -> frozenset[int] | None:
    if text.strip() == "none":
        return None
    return frozenset(int(step) for step in text.split(",") if step.strip())


class Interruption(Protocol):
    """What may end this process at a planned moment. Its methods may raise SystemExit or not return."""

    def step_closed(self, step: int) -> None: ...

    def forward_begins(self, step: int, microbatch: int) -> None: ...

    def save_begins(self, path: str | None) -> None: ...

    def save_ends(self, path: str | None) -> None: ...

    def backward_ends(self, total_microbatches: int) -> None: ...


class Sabotage(Protocol):
    """What changes a piece of state once, in an arm that tests whether detrun would notice."""

    def first_forward(self, frame: FrameType) -> None: ...
