"""Makes an experiment's folder as a clean pair of runs would leave it, and then spoils it where a test says.

made = make_experiment(tmp_path)                          # two arms, 2 ranks × 6 steps, byte-equal
made.edit("b", 1, 4, flip_metric("grad_norm"))            # one bit of one metric
made.edit_job("b", state="failed", exit_code=1)
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detrun.records.archive import Archive
from detrun.records.jobs import ArmPlan, ExperimentFile, JobFile
from detrun.records.layout import MARKER, AttemptFolder, ExperimentFolder
from detrun.records.metrics_writer import MetricValue, StepLine, encode

METRICS = ("loss", "lm_loss", "load_balancing_loss", "mtp_loss", "grad_norm")
STATE = ("parameters", "gradients", "optimizer")

Line = dict[str, Any]


def digest(*parts: object) -> str:
    """A digest as the recorder writes it, of anything."""
    text = "/".join(map(str, parts))
    return f"xxh3:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def float32_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


@dataclass
class MadeExperiment:
    """An experiment's folder with handles to spoil it."""

    folder: ExperimentFolder
    file: ExperimentFile
    attempt_number: int = 0

    def attempt(self, arm: str) -> AttemptFolder:
        return self.folder.attempt(arm, self.attempt_number)

    def metrics_path(self, arm: str, rank: int) -> Path:
        return self.attempt(arm).metrics(rank)

    def lines(self, arm: str, rank: int) -> list[Line]:
        return [json.loads(line) for line in self.metrics_path(arm, rank).read_bytes().splitlines()]

    def write_lines(self, arm: str, rank: int, lines: Sequence[Line | bytes]) -> None:
        raw = [line if isinstance(line, bytes) else json.dumps(line, separators=(",", ":")).encode() for line in lines]
        self.metrics_path(arm, rank).write_bytes(b"".join(line + b"\n" for line in raw))

    def edit(self, arm: str, rank: int, step: int, change: Callable[[Line], None]) -> None:
        """Changes the line of one step in place."""
        lines = self.lines(arm, rank)
        for line in lines:
            if line["step"] == step:
                change(line)
        self.write_lines(arm, rank, lines)

    def edit_every(self, arm: str, rank: int, change: Callable[[Line], None], steps: range | None = None) -> None:
        """Changes the lines of all steps, or of some."""
        lines = self.lines(arm, rank)
        for line in lines:
            if steps is None or line["step"] in steps:
                change(line)
        self.write_lines(arm, rank, lines)

    def drop(self, arm: str, rank: int, *steps: int) -> None:
        """Removes the lines of some steps."""
        self.write_lines(arm, rank, [line for line in self.lines(arm, rank) if line["step"] not in steps])

    def cut(self, arm: str, rank: int, keep: int) -> None:
        """Leaves `keep` bytes of a metrics file."""
        path = self.metrics_path(arm, rank)
        path.write_bytes(path.read_bytes()[:keep])

    def edit_environment(self, arm: str, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
        path = self.attempt(arm).environment(rank)
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    def edit_job(self, arm: str, **fields: Any) -> None:
        path = self.attempt(arm).job_file
        job = JobFile.read(path)
        JobFile.model_validate({**job.model_dump(), **fields}).write(path)

    def edit_experiment(self, **fields: Any) -> None:
        self.file = ExperimentFile.model_validate({**self.file.model_dump(), **fields})
        self.file.write(self.folder.experiment_file)


@dataclass
class Made:
    """What `make_experiment` writes; a test changes a field or two."""

    arms: Sequence[str] = ("a", "b")
    ranks: int = 2
    steps: int = 6
    recorded_steps: int | None = None
    metrics: Sequence[str] = METRICS
    required: Sequence[str] = METRICS
    state_every: int = 1
    microbatches: int = 1
    nodes: Sequence[str] = ("node1", "node2")
    declared: dict[str, dict[str, Any]] = field(default_factory=dict)
    pinned: dict[str, str] = field(default_factory=lambda: {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"})
    name: str = "hybrid-cpu"
    replicas: bool = True


def make_experiment(root: Path, made: Made | None = None, id: str | None = None, **fields: Any) -> MadeExperiment:
    """Writes a clean experiment below `root`, an archive's folder. `fields` are those of `Made`."""
    made = made or Made(**fields)
    if id is None:
        folder = Archive(root).create(made.name, "pair")
    else:
        folder = ExperimentFolder(root / id)
        folder.path.mkdir(parents=True)
        (folder.path / MARKER).touch()
    file = experiment_file(folder.id, made)
    file.write(folder.experiment_file)
    lines = {rank: metrics_bytes(made, rank) for rank in range(made.ranks)}
    for index, arm in enumerate(made.arms):
        attempt = folder.attempt(arm, 0)
        for part in (attempt.metrics_dir, attempt.environment_dir, attempt.recorder_dir, attempt.log_dir):
            part.mkdir(parents=True)
        folder.work_dir(arm).mkdir()
        for rank in range(made.ranks):
            attempt.metrics(rank).write_bytes(lines[rank])
            environment = environment_document(folder, arm, rank, made, index)
            attempt.environment(rank).write_text(json.dumps(environment))
            attempt.recorder(rank).write_text(json.dumps(cost_document(made)))
        job_file(arm, index, made).write(attempt.job_file)
    return MadeExperiment(folder, file)


def experiment_file(id: str, made: Made) -> ExperimentFile:
    roles = ["reference", *["repeat"] * (len(made.arms) - 1)]
    return ExperimentFile(
        id=id,
        experiment="pair",
        created="2026-11-29T10:15:02Z",
        recipe={
            "name": made.name,
            "launch": {"command": ["python", "train.py", "--out", "{out}"], "args": []},
            "metrics": {"required": list(made.required), "state_every": made.state_every, "ignore": []},
        },
        recipe_path=f"recipes/{made.name}.yaml",
        recipe_lines={"metrics.required": 14},
        command_line=["detrun", "pair", f"recipes/{made.name}.yaml"],
        cluster="local",
        placement="pinned",
        arms=[
            ArmPlan.model_validate({"id": arm, "role": role, "declared": made.declared.get(arm, {})})
            for arm, role in zip(made.arms, roles, strict=True)
        ],
        ranks=made.ranks,
        steps=made.steps,
        seed=1234,
        pinned=made.pinned,
    )


def metrics_bytes(made: Made, rank: int) -> bytes:
    """A rank's metrics file; metrics and parameters are the same on every rank, batches and gradients are not."""
    steps = made.steps if made.recorded_steps is None else made.recorded_steps
    return b"".join(
        encode(
            StepLine(
                step=step,
                metrics=[
                    MetricValue(name, "backward", float32_bits(5.0 / (step + 1) + position), "float32")
                    for position, name in enumerate(made.metrics)
                ],
                microbatches=made.microbatches,
                batch=digest("batch", rank, step),
                state={name: digest(name, step, rank if name == "gradients" else "") for name in STATE}
                if made.state_every and step % made.state_every == 0
                else None,
                rng=digest("rng", rank, step) if made.state_every and step % made.state_every == 0 else None,
            )
        )
        for step in range(1, steps + 1)
    )


def environment_document(folder: ExperimentFolder, arm: str, rank: int, made: Made, index: int) -> dict[str, Any]:
    attempt = folder.attempt(arm, 0).path
    host = made.nodes[rank % len(made.nodes)] if made.nodes else "here"
    return {
        "schema_version": 1,
        "rank": rank,
        "world_size": made.ranks,
        "local_rank": rank,
        "host": host,
        "pid": 1000 + 100 * index + rank,
        "python": {
            "version": "3.11.4",
            "executable": "/usr/bin/python3",
            "argv": ["train.py", "--out", str(folder.work_dir(arm)), *made.declared.get(arm, {}).get("args", [])],
            "cwd": "/home/someone",
        },
        "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
        "env": {
            "clear": {
                "OMP_NUM_THREADS": "1",
                "PYTHONHASHSEED": "0",
                "DETRUN_ARM": arm,
                "DETRUN_ATTEMPT": "0",
                "DETRUN_ATTEMPT_DIR": str(attempt),
                "PYTHONPATH": f"{folder}/recorder:/home/someone",
                "TORCHELASTIC_RUN_ID": f"run-{index}",
                "SLURM_JOB_ID": str(4182 + index),
                "SLURM_NTASKS": "2",
                **made.declared.get(arm, {}).get("env", {}),
            },
            "digest": {"MASTER_PORT": digest("port", index), "HOME": digest("home")},
        },
        "torch": {"deterministic_algorithms": True, "num_threads": 1, "default_dtype": "float32"},
        "cpu": {"model": "Model X", "capability": "AVX512", "affinity": [0, 1], "count": 2},
        "devices": [],
        "seeds": {"PYTHONHASHSEED": "0", "DETRUN_SEED": "1234", "torch_initial_seed": 1234},
        "initial": {
            "parameters": digest("parameters", 0),
            "rng": {"python": digest("python", 0), "numpy": digest("numpy", 0), "torch_cpu": digest("cpu", rank)},
        },
        "coordinates": {"dp": rank},
        "replicas": list(range(made.ranks)) if made.replicas else None,
        "recorder": {"version": "0.1.0", "digest": "xxh3-128", "settings": {"state_every": made.state_every}},
    }


def cost_document(made: Made) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "steps": made.steps,
        "cpu_seconds": {"metrics": 0.05, "state": 0.2, "other": 0.05},
        "process_cpu_seconds": 10.0,
        "warnings": [],
    }


def job_file(arm: str, index: int, made: Made) -> JobFile:
    return JobFile(
        arm=arm,
        attempt=0,
        jobs=[str(4182 + index)],
        nodes=list(made.nodes),
        state="done",
        started="2026-11-29T10:15:03Z",
        ended="2026-11-29T10:15:33Z",
        exit_code=0,
    )


def flip_metric(name: str, bit: int = 1) -> Callable[[Line], None]:
    """Flips bits of a metric, with its value following."""

    def change(line: Line) -> None:
        metric = line["metrics"][name]
        bits = int(metric["bits"], 16) ^ bit
        metric["bits"] = f"0x{bits:08x}"
        metric["value"] = float(f"{struct.unpack('<f', struct.pack('<I', bits))[0]:.9g}")

    return change


def flip_state(component: str) -> Callable[[Line], None]:
    """Changes the digest of a component of the state."""

    def change(line: Line) -> None:
        line["state"][component] = flipped(line["state"][component])

    return change


def flip_stream(name: str) -> Callable[[Line], None]:
    """Changes the digest of `batch` or `rng`."""

    def change(line: Line) -> None:
        line[name] = flipped(line[name])

    return change


def flipped(text: str, bit: int = 0) -> str:
    """A digest with one bit changed."""
    prefix, _, body = text.partition(":")
    return f"{prefix}:{int(body, 16) ^ (1 << bit):0{len(body)}x}"
