"""What a run is made of, as frozen values; only the command line (`__main__`) fills them in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BLOCK_LETTERS = "M*E"
"""M: Mamba-2, *: attention, E: mixture of experts, as in Megatron's `--hybrid-override-pattern`."""

PRECISIONS = {"none": 1, "fp8": 1, "mxfp8": 32, "nvfp4": 16}
"""What `--low-precision` takes, each with the size of the blocks that share a scale: widths are multiples of it."""


class SettingsError(Exception):
    """The command line asks for what cannot be. The program prints this as one line and exits with 2."""


@dataclass(frozen=True)
class ModelSettings:
    """Shape of the model. Sizes are in elements, lengths in tokens."""

    pattern: str = "MEM*ME"
    """One letter a block, from `BLOCK_LETTERS`."""
    width: int = 96
    """Size of the residual stream."""
    head_size: int = 32
    """Size of one head, in attention and in Mamba-2."""
    state_size: int = 16
    """N, the state-space dimension of Mamba-2."""
    ssm_chunk: int = 16
    """Tokens that Mamba-2 treats as one quadratic chunk; the sequence length is a multiple of it."""
    experts: int = 8
    experts_per_token: int = 2
    dropout: float = 0.1
    load_balancing_coefficient: float = 0.01
    mtp_coefficient: float = 0.1
    z_loss_coefficient: float = 0.0
    """Router z-loss; off by default, and then its metric is exactly +0.0 at every step."""
    low_precision: str = "none"
    """Precision of the weights of attention and multi-token-prediction layers, one of `PRECISIONS`."""
    expert_bias: float = 0.0
    """By how much an expert's bias moves a step, towards an even load; 0 has no biases."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.pattern) - set(BLOCK_LETTERS))
        if unknown or not self.pattern:
            raise SettingsError(
                f"--pattern {self.pattern!r}: use M (Mamba-2), * (attention) and E (mixture of experts)"
            )
        if self.width % self.head_size or self.head_size % 2:
            raise SettingsError(
                f"--width {self.width}: must be a multiple of --head-size ({self.head_size}), an even number"
            )
        if not 1 <= self.experts_per_token <= self.experts:
            raise SettingsError(
                f"--experts-per-token {self.experts_per_token}: must lie in 1 to --experts ({self.experts})"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise SettingsError(f"--dropout {self.dropout}: must lie in [0, 1)")
        if self.expert_bias < 0.0:
            raise SettingsError(f"--expert-bias {self.expert_bias}: must not be negative")
        block = PRECISIONS[self.low_precision]
        if self.width % block:
            raise SettingsError(
                f"--width {self.width}: must be a multiple of {block} with --low-precision {self.low_precision}"
            )


@dataclass(frozen=True)
class TrainSettings:
    """One run of the training program."""

    steps: int
    """Total number of optimizer steps, of which a resumed run does only the rest."""
    seed: int
    out: Path
    model: ModelSettings = ModelSettings()
    save_every: int = 0
    """Steps between checkpoints; 0 saves none."""
    resume: Path | None = None
    data: Path | None = None
    batch_size: int = 4
    """Sequences a rank uses in one step, over all its micro-batches."""
    micro_batches: int = 2
    sequence_length: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 5
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    device: str = "auto"
    threads: int | None = None
    save_on_signal: tuple[str, ...] = ()
    """Signals (`TERM`, `USR1`) after which the run ends its step, saves a checkpoint and exits with 0."""
    exit_at: int | None = None
    """Step after which the run saves a checkpoint and exits with 0, though there are steps left."""
    prefetch: int = 0
    """Batches that the loader reads ahead of the one in use."""
    ema: float = 0.99
    """Decay of the moving average of the weights, which no step reads; 0 keeps none."""
    loss_scaling: bool = False
    """Scale the loss by a factor that grows and shrinks with what the gradients bear, as float16 needs it."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "micro_batches", "sequence_length"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.prefetch < 0:
            raise SettingsError(f"--prefetch {self.prefetch}: must not be negative")
        if not 0.0 <= self.ema < 1.0:
            raise SettingsError(f"--ema {self.ema}: must lie in [0, 1)")
        if self.exit_at is not None and self.exit_at < 1:
            raise SettingsError(f"--exit-at {self.exit_at}: must be at least 1")
        if self.seed < 0:
            raise SettingsError(f"--seed {self.seed}: must not be negative")
        if self.threads is not None and self.threads < 1:
            raise SettingsError(f"--threads {self.threads}: must be at least 1")
        if self.batch_size % self.micro_batches:
            raise SettingsError(
                f"--batch-size {self.batch_size}: must be a multiple of --micro-batches ({self.micro_batches})"
            )
        if self.sequence_length % self.model.ssm_chunk:
            raise SettingsError(
                f"--sequence-length {self.sequence_length}: must be a multiple of {self.model.ssm_chunk}"
            )
