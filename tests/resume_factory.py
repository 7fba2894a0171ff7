"""Makes an experiment's folder as a resume check of a clean program would leave it, for tests to spoil.

made = make_resume(tmp_path)                               # killed after step 5, resumed from step 3, 2 ranks × 8 steps
made.rewrite("b", 1, "begin-00000004", 1, without("rng"))  # one row less on one rank
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from detrun.records.jobs import ArmPlan, JobFile
from detrun.records.layout import AttemptFolder
from detrun.records.state_reader import read_state
from detrun.records.state_row import StateRow
from detrun.records.state_writer import StateWriter
from tests.records_factory import (
    Made,
    MadeExperiment,
    digest,
    environment_document,
    make_experiment,
)

SAVE_EVERY = 3
Rows = list[StateRow]


@dataclass
class MadeResume(MadeExperiment):
    """A resume check's folder with handles to spoil it; each takes the attempt beside the arm."""

    stops: Sequence[int] = ()

    def at(self, arm: str, number: int) -> MadeExperiment:
        """The handles of `MadeExperiment`, for one attempt."""
        return MadeExperiment(self.folder, self.file, number)

    def edit_raw_job(self, arm: str, number: int, fields: dict[str, Any]) -> None:
        """Changes job.json without asking whether it stays a valid one."""
        path = self.folder.attempt(arm, number).job_file
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    def edit_raw_experiment(self, **fields: Any) -> None:
        path = self.folder.experiment_file
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    def rewrite(
        self, arm: str, number: int, boundary: str, rank: int, change: Callable[[Rows], Rows], **fields: Any
    ) -> None:
        """Writes a state file anew with other rows, or another description (step, scope, missing)."""
        attempt = self.folder.attempt(arm, number)
        table = read_state(attempt, boundary, rank)
        described: dict[str, Any] = {"step": table.step, "scope": table.scope, "missing": table.missing, **fields}
        writer = StateWriter(attempt.path, boundary, rank)
        writer.write(change(list(table.rows)), microbatch=table.microbatch, cpu_seconds=0.01, **described)


def without(*components: str) -> Callable[[Rows], Rows]:
    return lambda rows: [row for row in rows if row.component not in components]


def altered(*components: str, **fields: Any) -> Callable[[Rows], Rows]:
    """Other bits in every row of these components, and other fields."""

    def change(rows: Rows) -> Rows:
        return [
            replace(row, digest=digest("another", row.name), value=None, **fields)
            if row.component in components
            else row
            for row in rows
        ]

    return change


def make_resume(
    root: Path,
    stops: Sequence[int] = (5,),
    controls: Sequence[str] = (),
    steps: int = 8,
    id: str | None = None,
    **fields: Any,
) -> MadeResume:
    """A clean resume check below `root`: a save every three steps, killed after the step of each of `stops`.

    controls: purposes of further arms (`observer`, `self-test:rng`). fields: those of `records_factory.Made`.
    """
    names = ["a", "b", *"cdefgh"[: len(controls)]]
    made = Made(arms=names, steps=steps, **fields)
    whole = make_experiment(root, made, id)
    folder = whole.folder
    roles = ["reference", "interrupted", *["control"] * len(controls)]
    plans = [
        ArmPlan.model_validate({"id": arm, "role": role, "purpose": purpose})
        for arm, role, purpose in zip(names, roles, [None, None, *controls], strict=True)
    ]
    checkpoint = {
        "directory": "{out}/checkpoints",
        "save_every": SAVE_EVERY,
        "resume_args": ["--resume", "{checkpoint}"],
        "pattern": "step-{step}",
    }
    file = whole.file.model_copy(
        update={
            "experiment": "resume-check",
            "arms": plans,
            "interrupts": [{"kind": "kill", "at_step": stop, "moment": "end", "ranks": "all"} for stop in stops],
            "recipe": {**whole.file.recipe, "checkpoint": checkpoint},
        }
    )
    file.write(folder.experiment_file)
    whole.file = file
    result = MadeResume(folder, file, 0, stops)
    _state(folder.attempt("a", 0), made, 0, steps)
    begins = [0, *(stop // SAVE_EVERY * SAVE_EVERY for stop in stops)]
    for number, (begin, end) in enumerate(zip(begins, [*stops, None], strict=True)):
        _attempt(result, made, "b", number, begin, end)
    for arm, purpose in zip(names[2:], controls, strict=True):
        if purpose == "observer":
            continue
        folder.attempt(arm, 0).path.rename(folder.attempt(arm, 1).path)
        _attempt(result, made, arm, 1, begins[1], None)
        for rank in range(made.ranks):
            result.rewrite(arm, 1, f"begin-{begins[1] + 1:08d}", rank, altered("rng"))
            path = folder.attempt(arm, 1).sabotage(rank)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"schema_version": 1, "kind": purpose, "done": True, "what": "a stream"}))
    return result


def _attempt(result: MadeResume, made: Made, arm: str, number: int, begin: int, end: int | None) -> None:
    """One attempt: its records are those of the whole run, cut to what it ran."""
    folder, source = result.folder, result.folder.attempt("a", 0)
    attempt = folder.attempt(arm, number)
    shutil.rmtree(attempt.path, ignore_errors=True)
    for part in (attempt.metrics_dir, attempt.environment_dir, attempt.recorder_dir, attempt.log_dir):
        part.mkdir(parents=True)
    for rank in range(made.ranks):
        lines = source.metrics(rank).read_bytes().splitlines(keepends=True)
        attempt.metrics(rank).write_bytes(b"".join(lines[begin:end]))
        environment = environment_document(folder, arm, rank, made, 1)
        environment["env"]["clear"]["DETRUN_ATTEMPT"] = str(number)
        environment["env"]["clear"]["DETRUN_ATTEMPT_DIR"] = str(attempt.path)
        if number:
            environment["python"]["argv"] += ["--resume", str(folder.work_dir(arm) / f"checkpoints/step-{begin}")]
            environment["initial"]["parameters"] = digest("parameters", begin, "")
        attempt.environment(rank).write_text(json.dumps(environment))
        shutil.copy(source.recorder(rank), attempt.recorder(rank))
    _state(attempt, made, begin, made.steps if end is None else end)
    job = JobFile(arm=arm, attempt=number, jobs=["4183"], nodes=list(made.nodes), state="done", exit_code=0)
    document = job.model_dump()
    if number:
        place = str(folder.work_dir(arm) / f"checkpoints/step-{begin}")
        document["resumed_from"] = {"path": place, "step": begin, "source": "saves"}
    if end is not None:
        interruption = {"kind": "kill", "step": end, "ranks": list(range(made.ranks))}
        document |= {"state": "interrupted", "exit_code": 137, "interruption": interruption}
    JobFile.model_validate(document).write(attempt.job_file)


def _state(attempt: AttemptFolder, made: Made, begin: int, end: int) -> None:
    """The state files of an attempt that ran the steps after `begin` up to `end`."""
    for rank in range(made.ranks):
        saves = [step for step in range(begin + 1, end + 1) if step % SAVE_EVERY == 0]
        for step in saves:
            _write(attempt, f"end-{step:08d}", rank, step, step)
        for step in dict.fromkeys([*([begin] if begin else []), *(step for step in saves if step < end)]):
            _write(attempt, f"begin-{step + 1:08d}", rank, step, step + 1)
            if step + 1 < end:
                _write(attempt, f"begin-{step + 2:08d}", rank, step + 1, step + 2, light=True)


def _write(attempt: AttemptFolder, boundary: str, rank: int, done: int, step: int, *, light: bool = False) -> None:
    rows = [StateRow("local", "average", standing="surviving", value=float(done).hex())]
    if not light:
        rows += [
            StateRow("parameters", "layer.weight", dtype="float32", shape=(2, 3), elements=6, digest=digest("w", done)),
            StateRow("gradients", "layer.weight", dtype="float32", shape=(2, 3), elements=6),
            StateRow("optimizer", "layer.weight.exp_avg", "", "hard", "float32", (2, 3), 6, digest("m", done)),
            StateRow("hyperparameters", "group0.lr", value=(0.01).hex()),
            StateRow("rng", "torch_cpu", digest=digest("cpu", rank, done), info={"generator": "mt19937-torch"}),
            StateRow("rng", "python", digest=digest("python", rank, done), info={"generator": "mt19937-python"}),
        ]
        if boundary.startswith("begin"):
            rows.append(StateRow("batch", "batch", digest=digest("batch", rank, done + 1)))
    writer = StateWriter(attempt.path, boundary, rank)
    writer.write(rows, step=step, microbatch=0, scope="light" if light else "full", cpu_seconds=0.01)


def tear(path: Path, by: int) -> None:
    os.truncate(path, max(0, path.stat().st_size - by))
