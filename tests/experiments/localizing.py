"""Arms of the built-in program and of small ones, traced and held against each other, or localized as a whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from detrun.compare.trace_summary import Lead, TraceComparison
from detrun.experiments.compare_traces import compare_traces
from detrun.experiments.follow import Follower, Pace
from detrun.experiments.judge import judge
from detrun.experiments.reference import ReferenceArm
from detrun.experiments.resume import ResumeOptions, plan_resume, resolve_interrupts
from detrun.experiments.start import Question, start
from detrun.experiments.trace import TraceOptions, start_trace
from detrun.experiments.trace_plan import BYTE_BUDGET, Request, Window
from detrun.launch.local import LocalCluster
from detrun.recipe import load_recipe
from detrun.records.archive import Archive
from detrun.records.layout import AttemptFolder, ExperimentFolder
from detrun.records.verdict import Verdict
from tests.running import Ran, detrun

PACE = Pace(look=0.1, poll=0.2, at_rest=2.0, grace=2.0, lost=60.0)
SMALL = ["--width", "32", "--sequence-length", "32", "--batch-size", "2"]
PROGRAM = [sys.executable, "-m", "detrun.workloads.hybrid", "--steps", "{steps}", "--seed", "{seed}", "--out", "{out}"]
SAVES: dict[str, Any] = {
    "directory": "{out}/checkpoints",
    "pattern": "step-{step}",
    "save_args": ["--save-every", "{save_every}"],
    "resume_args": ["--resume", "{checkpoint}"],
}


def program_recipe(folder: Path, ranks: int = 1, args: Sequence[str] = (), **keys: Any) -> Path:
    """The built-in program, small. args: after those that make it small; keys: of the recipe, as they are."""
    launch = {
        "launcher": "torchrun" if ranks > 1 else "none",
        "command": PROGRAM,
        "args": [*SMALL, *args],
        "ranks_per_node": ranks,
        "env": {"OMP_NUM_THREADS": "1"},
    }
    recipe = {"name": "built-in", "cluster": "local", "launch": launch, "steps": 3, "metrics": {}, **keys}
    path = folder / "built-in.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def traced(path: Path, *, arms_wanted: int = 1, **options: Any) -> list[AttemptFolder]:
    """Runs a recipe's arms with the tracer on, in this process, and returns the first attempt of each: `detrun trace`.

    options: of TraceOptions. What was asked for was recorded.
    """
    archive = Archive(path.parent / ".detrun")
    asked = TraceOptions(arms=arms_wanted, **options)
    cluster = LocalCluster()
    folder = start_trace(load_recipe(path), archive, cluster, asked, ["detrun"], lambda _: None)
    Follower(cluster, folder, PACE).follow(lambda _: None)
    verdict = judge(folder.path, report=False)
    assert verdict.verdict == "identical", f"{[finding.what for finding in verdict.findings]}\n{logs_of(folder)}"
    return [folder.attempt(arm, 0) for arm in "ab"[: asked.arms]]


@dataclass
class Bench:
    """A recipe whose clean arm is traced once, and held against one arm after another that has a fault.

    A fault is planted in one arm alone, so the other is the same run in every test.
    """

    folder: Path
    ranks: int = 1
    args: Sequence[str] = ()
    window: tuple[int, int] = (2, 2)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    clean: AttemptFolder | None = None

    def run(self, *args: str) -> AttemptFolder:
        """A traced arm of the program with more arguments."""
        path = program_recipe(self.folder, self.ranks, [*self.args, *args], **self.recipe)
        return traced(path, steps=self.window)[0]

    def reference(self) -> AttemptFolder:
        """The arm without a fault."""
        self.clean = self.clean or self.run()
        return self.clean

    def planted(self, fault: str, *args: str) -> TraceComparison:
        """The arm with a fault (empty: with none either) and more arguments, against the one without."""
        a, b = self.reference(), self.run(*(["--fault", fault] if fault else []), *args)
        result = compare_traces(a, b, range(self.ranks))
        assert not result.incomplete, result.incomplete
        return result


@dataclass
class ResumeBench:
    """The same for a resume: a reference that saves is traced once, and what was killed and resumed is held against it
    from the first step after the restore on."""

    folder: Path
    ranks: int = 1
    args: Sequence[str] = ()
    window: tuple[int, int] = (4, 6)
    reference: ExperimentFolder | None = None

    def resumed(self, fault: str | None) -> tuple[TraceComparison, Verdict]:
        """What the traces say of an arm that was resumed with a fault (None: without), and the verdict on its resume
        check."""
        keys: dict[str, Any] = {
            "steps": 6,
            "checkpoint": {**SAVES, "save_every": 3},
            "interrupt": {"kind": "kill", "at_step": 4},
        }
        path = program_recipe(self.folder, self.ranks, self.args, **keys)
        loaded = load_recipe(path, (), [f"b.args=--fault {fault}"] if fault else ())
        request = Request(Window(self.window), 4, BYTE_BUDGET).as_variable()
        given = ReferenceArm(self.reference, "a") if self.reference is not None else None
        cluster = LocalCluster()
        folder = start(
            loaded,
            Archive(self.folder / ".detrun"),
            cluster,
            Question("resume-check", given.document if given else None, resolve_interrupts(loaded, "local")),
            lambda place: plan_resume(
                loaded, place, "local", ResumeOptions(), dict(os.environ), given, traces={"a": request, "b": request}
            ),
            ["detrun"],
        )
        Follower(cluster, folder, PACE).follow(lambda _: None)
        verdict = judge(folder.path, report=False)
        assert verdict.verdict in ("identical", "diverged"), f"{verdict.not_verified}\n{logs_of(folder)}"
        if fault is None:
            self.reference = folder
        home = self.reference or folder
        result = compare_traces(home.attempt("a", 0), folder.attempt("b", 1), range(self.ranks), from_batch=True)
        assert not result.incomplete, result.incomplete
        return result, verdict


def logs_of(folder: ExperimentFolder) -> str:
    """The end of every rank's log."""
    return "\n".join(log.read_text(errors="replace")[-2000:] for log in folder.path.glob("arms/*/*/log/*.log"))


def lead_of(result: TraceComparison) -> Lead:
    """The lead, which there has to be."""
    assert result.lead is not None, (result.verdict, result.notes, result.hint)
    return result.lead


def described(lead: Lead) -> str:
    """For a failed test."""
    event = lead.event
    place = f"{event.op} in {event.scope or '(none)'}, {event.phase}, rank {lead.rank}, step {event.step}"
    return f"{lead.role}/{lead.kind}: {place}: {lead.why}"


def localize(path: Path, *arguments: str, timeout: float = 280) -> Ran:
    """`detrun localize` of a recipe, as a user calls it."""
    return detrun("localize", str(path), "--json", *arguments, cwd=path.parent, timeout=timeout, env=dict(os.environ))


def findings(ran: Ran, kind: str) -> list[dict[str, Any]]:
    """The verdict's findings of a kind."""
    return [finding for finding in ran.verdict["findings"] if finding["kind"] == kind]
