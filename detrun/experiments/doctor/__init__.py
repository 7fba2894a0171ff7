"""Doctor: what a first run would trip over, measured before it does, on Slurm by a small job of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from detrun.errors import DetrunError, SubmissionError
from detrun.experiments.checks import PairOptions, plan_pair
from detrun.experiments.doctor.facts import check_facts
from detrun.experiments.doctor.here import (
    ask,
    check_accounting,
    check_archive,
    check_commands,
    check_controller,
    check_detrun,
    check_git,
    check_nodes,
    check_notifications,
    check_settings,
    read_settings,
    seconds,
)
from detrun.experiments.doctor.nodes import NOT_SHARED, check_machine, check_network, check_program, check_shared
from detrun.launch.command import interpreter_of
from detrun.launch.preflight import trainer_path
from detrun.launch.probe_job import LOOK_PATIENCE, Probe, ProbeJob, look_here, ping, probe_folder, read_answers
from detrun.launch.probe_signals import Trial
from detrun.launch.slurm import slurm_installed
from detrun.recipe import LoadedRecipe
from detrun.records.archive import Archive
from detrun.records.layout import ExperimentFolder
from detrun.report.doctor_screen import Check, Checkup

Say = Callable[[str], None]
Section = tuple[str, tuple[Check, ...]]
ACCOUNTED_WITHIN = 15.0


@dataclass(frozen=True)
class DoctorOptions:
    """quick: no trial of signals and requeueing. nodes: how many the job asks for, None is two where there are two.

    wait: minutes that the job may wait in the queue.
    """

    quick: bool = False
    nodes: int | None = None
    wait: float = 10.0


def examine(loaded: LoadedRecipe | None, archive: Archive, options: DoctorOptions, say: Say) -> Checkup:
    """All checks, for a recipe or for none. Raises RecipeError for a recipe that `pair` would refuse.

    Nothing is left behind: the job is ended and its folder removed, also after a Ctrl-C.
    """
    began = time.monotonic()
    _let_go_when_told()
    wanted = loaded.recipe.cluster if loaded else "auto"
    slurm = wanted == "slurm" or (wanted == "auto" and slurm_installed())
    with probe_folder(archive.root) as folder:
        probe = _probe_of(loaded, folder, "slurm" if slurm else "local", options)
        here = ("here", tuple(_here(archive.root, folder, slurm)))
        if slurm:
            sections, job = _on_slurm(folder, probe, loaded, options, say)
        else:
            sections, job = [_on_this_machine(folder, probe, say)], None
    where = "Slurm" if slurm else "this machine (Slurm's commands are not on PATH)"
    if not slurm and wanted == "local":
        where = "this machine"
    return Checkup(where, (here, *sections), time.monotonic() - began, job)


def _let_go_when_told() -> None:
    """TERM and a closed terminal end doctor as Ctrl-C does, so that its job does not stay behind."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with suppress(ValueError):  # not the main thread
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, leave)


def _here(root: Path, folder: Path, slurm: bool) -> list[Check]:
    checks = [check_detrun(), check_git(), *check_archive(root, folder, several_machines=slurm)]
    notifications = check_notifications(os.environ)
    return [*checks, notifications] if notifications else checks


def _probe_of(loaded: LoadedRecipe | None, folder: Path, cluster: str, options: DoctorOptions) -> Probe:
    """What an arm of the recipe would be launched with; without a recipe, detrun's own Python."""
    if loaded is None:
        return Probe(signals=not options.quick)
    request = plan_pair(loaded, ExperimentFolder(folder), cluster, PairOptions(), os.environ).requests[0]
    segment = request.spec.segments[0]
    program = interpreter_of(segment.argv)
    torchrun = ["torchrun"] if segment.launcher == "torchrun" and program is None else []
    return Probe(
        tasks_per_node=segment.ranks_per_node,
        options=request.options,
        setup=request.setup,
        srun=segment.srun,
        python=segment.wrapper_python or sys.executable,
        program=program,
        commands=[segment.argv[0], *torchrun],
        files=[word for word in segment.argv[1:] if word.endswith((".py", ".sh"))][:1],
        workdir=segment.workdir,
        env={name: value for name, value in segment.env.items() if not name.startswith("DETRUN_")},
        prepend=segment.prepend.get("PATH"),
        signals=not options.quick,
    )


def _on_this_machine(folder: Path, probe: Probe, say: Say) -> Section:
    say("looking around on this machine; importing torch may take a moment")
    seen = look_here(folder, probe, os.environ)
    answers = {str(seen.get("node", "this machine")): seen}
    checks = [*check_program(answers, probe, None), *check_network(answers), *check_machine(answers)]
    return "this machine", tuple(checks)


def _on_slurm(
    folder: Path, probe: Probe, loaded: LoadedRecipe | None, options: DoctorOptions, say: Say
) -> tuple[list[Section], str | None]:
    """Slurm's own sections, and the id of the job if there was one."""
    slurm, usable, settings = _scheduler(loaded)
    title = "Slurm"
    if any(check.status == "fail" for check in slurm):
        slurm.append(
            Check("job", "unknown", "not submitted, for what failed above", "mend that, and call doctor again")
        )
        return [(title, tuple(slurm))], None
    count = options.nodes or min(2, usable)
    with _job(folder, replace(probe, nodes=count), alone=options.nodes is None, say=say) as job:
        if isinstance(job, Check):
            return [(title, (*slurm, job))], None
        watched = Watched(job, options, say)
        started = watched.start()
        slurm.append(started)
        if started.status != "ok":
            return [(title, tuple(slurm))], job.id
        nodes = watched.look(loaded)
        sections: list[Section] = [(title, tuple(slurm)), ("nodes", tuple(nodes))]
        if not options.quick and watched.answers:
            say("trying who gets which signal; this takes a minute or two")
            sections.append(("signals (JOB, STEP: doctor's own)", tuple(check_facts(Trial(job).run(), settings))))
        job.end()
        return _with_accounting(sections, job), job.id


def _scheduler(loaded: LoadedRecipe | None) -> tuple[list[Check], int, dict[str, str]]:
    """Checks that need no job, how many nodes can take one, and Slurm's settings. The first failure ends them."""
    checks = [check_commands()]
    if checks[-1].status != "fail":
        checks.append(check_controller())
    if checks[-1].status == "fail":
        return checks, 0, {}
    settings = read_settings()
    nodes, usable = check_nodes(loaded.recipe.slurm.partition if loaded else None)
    return [*checks, check_accounting(), nodes, *check_settings(settings)], max(1, usable), settings


@contextmanager
def _job(folder: Path, probe: Probe, alone: bool, say: Say) -> Iterator[ProbeJob | Check]:
    """Doctor's job, submitted, and ended whatever happens; a check that says why there is none.

    alone: where two nodes are refused, one will do.
    """
    job = ProbeJob(folder, probe, os.environ)
    try:
        try:
            job.submit()
        except SubmissionError as error:
            if probe.nodes == 1 or not alone:
                yield Check("job", "fail", error.what, "partition, account, QOS and limits in slurm: of the recipe")
                return
            job = ProbeJob(folder, replace(probe, nodes=1), os.environ)
            try:
                job.submit()
            except SubmissionError as again:
                yield Check("job", "fail", again.what, "partition, account, QOS and limits in slurm: of the recipe")
                return
        say(f"job {job.id}, {job.probe.nodes} node{'s' if job.probe.nodes > 1 else ''}: submitted")
        yield job
    finally:
        with suppress(DetrunError):
            job.end()


class Watched:
    """The job from its start to the last answer of its nodes."""

    def __init__(self, job: ProbeJob, options: DoctorOptions, say: Say) -> None:
        self.job, self.options, self.say = job, options, say
        self.answers: dict[str, dict[str, Any]] = {}
        self.names: list[str] = []

    def start(self) -> Check:
        """Waits in the queue, and until the batch script has found its folder and its Python."""
        job, began, told = self.job, time.monotonic(), ""
        until = began + self.options.wait * 60
        names = job.folder / "names.json"
        while not names.exists():
            status = job.status()
            if not status.alive:
                if job.wait_until(names.exists, 5.0, watch=False):
                    break
                return self.never_began()
            if status.state == "pending" and time.monotonic() > until:
                measured = f"job {job.id} still waits after {self.options.wait:g} minutes ({status.reason})"
                return Check("job", "unknown", measured, "--wait MINUTES waits longer; squeue --start says how long")
            if status.state != "pending" and told != status.word:
                until = time.monotonic() + 120
            if status.state != "pending" and time.monotonic() > until:
                return self.never_began()
            line = f"job {job.id}: {status.word} {f'({status.reason})' if status.reason else ''}".rstrip()
            if status.word != told:
                told = status.word
                self.say(line)
            time.sleep(0.3)
        self.names = [str(name) for name in json.loads(names.read_text(encoding="utf-8"))]
        waited = time.monotonic() - began
        measured = f"job {job.id} ran on {', '.join(self.names)} {seconds(waited)} after it was submitted"
        return Check("job", "ok", measured, figures={"wait_seconds": waited})

    def never_began(self) -> Check:
        stage, log = self.job.stage(), self.job.log()
        last = f": {log.splitlines()[-1]}" if log else ""
        if stage is None:
            status = self.job.status()
            ended = f" (it ended as {status.word} {status.exit})" if status.word else ""
            return Check("job", "fail", f"job {self.job.id} did not find the archive on its node{ended}", NOT_SHARED)
        if stage == "setup":
            return Check("job", "fail", f"a line of slurm.setup failed{last}", "correct slurm.setup in the recipe")
        remedy = "install detrun in an environment on a file system that the nodes share"
        return Check("job", "fail", f"{sys.executable} did not run on the node{last}", remedy)

    def look(self, loaded: LoadedRecipe | None) -> list[Check]:
        """The checks of all nodes, once they have answered."""
        job, count = self.job, len(self.names)
        self.say(f"looking around on {', '.join(self.names)}; importing torch may take a moment")
        pings = ping(job, self.names)
        job.wait_until(lambda: len(read_answers(job.folder)) >= count or job.looked is not None, LOOK_PATIENCE)
        job.wait_until(lambda: len(read_answers(job.folder)) >= count, 5.0, watch=False)
        self.answers = answers = read_answers(job.folder)
        checks = check_shared(pings, answers) if answers else []
        if silent := [name for name in self.names if name not in answers]:
            last = f": {job.log().splitlines()[-1]}" if job.log() else f" within {LOOK_PATIENCE:.0f} s"
            remedy = f"srun has to start {job.probe.python} on every node: slurm.container, or the site"
            checks.append(Check("nodes", "fail", f"no answer from {', '.join(silent)}{last}", remedy))
        if not answers:
            return checks
        asked = str(job.probe.options.get("gpus-per-node") or "") or None
        here = None if loaded and (loaded.recipe.slurm.container or job.probe.setup) else program_here(job.probe)
        checks += [*check_program(answers, job.probe, here), *check_network(answers), *check_machine(answers, asked)]
        return checks


def program_here(probe: Probe) -> Mapping[str, Any] | None:
    """The program's Python and torch where doctor was called, without importing torch; None where it is not here."""
    if probe.program is None:
        return None
    path = trainer_path({**os.environ, **probe.env}, probe.prepend)
    python = shutil.which(probe.program, path=path)
    if python is None:
        return None
    code = (
        "import sys, json\nfrom importlib import metadata\ntry: torch = metadata.version('torch')\n"
        "except metadata.PackageNotFoundError: torch = None\n"
        "print(json.dumps({'python': sys.version.split()[0], 'torch': torch}))"
    )
    told = ask([python, "-c", code])
    try:
        found = json.loads(told.out.splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


def _with_accounting(sections: Sequence[Section], job: ProbeJob) -> list[Section]:
    """How long sacct takes to show how the job ended, where accounting is on."""
    title, slurm = sections[0]
    if not any(check.name == "accounting" and check.status == "ok" for check in slurm):
        return list(sections)
    began = time.monotonic()
    while time.monotonic() - began < ACCOUNTED_WITHIN:
        told = ask(["sacct", "-n", "-P", "-X", "-j", job.id, "--name", job.name, "-o", "State,End"])
        rows = [line for line in told.out.splitlines() if line.strip() and "Unknown" not in line]
        if rows and not rows[-1].startswith(("RUNNING", "PENDING", "COMPLETING")):
            state = rows[-1].partition("|")[0]
            lag = f"within {max(1.0, time.monotonic() - began):.0f} s"
            check = Check("accounting of the job", "ok", f"sacct showed its end ({state}) {lag}")
            break
        time.sleep(0.5)
    else:
        remedy = "detrun waits it out; where it stays so, sacct cannot tell how a lost job ended"
        check = Check(
            "accounting of the job", "warn", f"sacct did not show its end in {ACCOUNTED_WITHIN:.0f} s", remedy
        )
    return [(title, (*slurm, check)), *sections[1:]]
