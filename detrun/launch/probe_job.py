"""Doctor's own small job: submitted, talked with through its folder in the archive, and taken back without a trace.

Not through submitit: what is measured is what Slurm does with a batch shell and its steps, `probe.py` standing in the
place of our driver and of the ranks.
"""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detrun.errors import ArchiveError, SubmissionError
from detrun.launch import probe as script
from detrun.launch.cluster import JobStatus, SubmittedJob
from detrun.launch.command import srun_options
from detrun.launch.placement import run_quietly
from detrun.launch.slurm import SlurmCluster
from detrun.launch.submit import clean_environment
from detrun.records.files import one_line

PREFIX = ".doctor-"
MINUTES = 5
PINGS = 6  # the first one also waits for the step to start, and does not count
PATIENCE = 60.0
SEEN_WITHIN = 30  # seconds that a network file system may take to show a folder
LOOK_PATIENCE = 240.0
FORSAKEN = 3600.0
SUBFOLDERS = ("nodes", "ping", "exclusive", "tcp", "signals")


@dataclass(frozen=True)
class Probe:
    """What the job is to look at, and how it is asked for.

    options: sbatch's; setup: shell lines before all else; srun: further arguments of its steps (a container's).
    python: what runs probe.py in a step. program: the Python whose torch is asked for, None where it is not known.
    commands, files: programs that have to be on PATH, files that have to be there from workdir on.
    prepend: a folder in front of PATH, as an arm has it. signals: whether signals and requeueing are tried too.
    """

    nodes: int = 1
    tasks_per_node: int = 1
    options: Mapping[str, object] = field(default_factory=dict)
    setup: Sequence[str] = ()
    srun: Sequence[str] = ()
    python: str = sys.executable
    program: str | None = sys.executable
    commands: Sequence[str] = ()
    files: Sequence[str] = ()
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    prepend: str | None = None
    signals: bool = True

    def as_dict(self, look: Sequence[str], listen: Sequence[str]) -> dict[str, Any]:
        """probe.json, which the script reads. look, listen: the argument lists of its steps."""
        return {
            "look": list(look),
            "listen": list(listen),
            "pings": PINGS,
            "program": self.program,
            "commands": list(self.commands),
            "files": list(self.files),
            "workdir": self.workdir,
            "env": dict(self.env),
            "prepend": self.prepend,
            "signals": self.signals,
        }


@dataclass(frozen=True)
class Ping:
    """One way there and back through a file, in seconds, and how far the node's clock is ahead (± seconds / 2)."""

    seconds: float
    ahead: float


@contextmanager
def probe_folder(archive: Path) -> Iterator[Path]:
    """A folder of ours in the archive, which is removed at the end with every folder that had to be made for it.

    What an earlier doctor that was killed left behind goes too.
    """
    missing = [folder for folder in (archive, *archive.parents) if not folder.exists()]
    path = archive / f"{PREFIX}{secrets.token_hex(4)}"
    try:
        for name in SUBFOLDERS:
            (path / name).mkdir(parents=True)
        shutil.copyfile(str(script.__file__), path / "probe.py")
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)
        raise ArchiveError(
            f"cannot be written: {error.strerror}", where=str(archive), hint="--archive DIR names another folder"
        ) from None
    try:
        _remove_forsaken(archive)
        yield path
    finally:
        _remove(path)
        for folder in missing:
            with suppress(OSError):  # somebody else uses it by now
                folder.rmdir()


def _remove(path: Path) -> None:
    # A process of the job may be on its way out and write a last line.
    for _ in range(5):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.3)


def _remove_forsaken(archive: Path) -> None:
    for path in archive.glob(f"{PREFIX}*"):
        with suppress(OSError):
            old = time.time() - path.lstat().st_mtime > FORSAKEN
            if old and not path.is_symlink() and (path / "probe.py").is_file():
                shutil.rmtree(path, ignore_errors=True)


def look_here(folder: Path, probe: Probe, environment: Mapping[str, str]) -> dict[str, Any]:
    """What probe.py sees on this machine: the same that it looks for on a node, without pings."""
    asked = {**probe.as_dict([], []), "pings": 0}
    (folder / "probe.json").write_text(json.dumps(asked) + "\n", encoding="utf-8")
    name = script.node_name()
    (folder / "names.json").write_text(json.dumps([name]) + "\n", encoding="utf-8")
    argv = [sys.executable, str(folder / "probe.py"), "look", str(folder)]
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            argv,
            env=clean_environment(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LOOK_PATIENCE,
            check=False,
        )
    return read_answers(folder).get(name, {"error": "it did not look around within its time"})


def read_answers(folder: Path) -> dict[str, dict[str, Any]]:
    """What each node has seen, by its name."""
    found = {}
    for path in sorted((folder / "nodes").glob("*.json")):
        with suppress(OSError, ValueError):
            found[path.stem] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return found


class ProbeJob:
    """The job, from its submission to its end."""

    def __init__(self, folder: Path, probe: Probe, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.probe = probe
        self.environment = clean_environment(environment)
        self.name = f"detrun-doctor-{folder.name.removeprefix(PREFIX)}"
        self.job: SubmittedJob | None = None
        self.cluster = SlurmCluster()

    @property
    def id(self) -> str:
        assert self.job is not None
        return self.job.id

    def submit(self) -> None:
        """Raises SubmissionError with sbatch's own words."""
        step = ["srun", f"--nodes={self.probe.nodes}", f"--ntasks={self.probe.nodes}", "--ntasks-per-node=1"]
        step += ["--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--cpu-bind=none", *self.probe.srun]
        look, listen = ([*step, self.probe.python, str(self.folder / "probe.py")] for _ in range(2))
        asked = self.probe.as_dict([*look, "look", str(self.folder)], [*listen, "listen", str(self.folder)])
        (self.folder / "probe.json").write_text(json.dumps(asked) + "\n", encoding="utf-8")
        batch = self.folder / "batch.sh"
        batch.write_text(batch_script(self.folder, self.probe.setup), encoding="utf-8")
        options: dict[str, object] = {
            **self.probe.options,
            "job-name": self.name,
            "nodes": self.probe.nodes,
            "ntasks-per-node": self.probe.tasks_per_node,
            "time": MINUTES,
            # What the batch script says goes into the folder; one that is not there on the node must not fail the job.
            "output": "/dev/null",
            "requeue" if self.probe.signals else "no-requeue": True,
        }
        code, out, err = self._sbatch(["sbatch", "--parsable", *srun_options(options), str(batch)])
        if code != 0:
            words = [line.removeprefix("sbatch: error: ").strip() for line in err.splitlines() if line.strip()]
            raise SubmissionError(f"sbatch refused the job: {one_line(' '.join(words[-3:]), 400)}")
        job_id = (out.strip().splitlines() or [""])[-1].partition(";")[0]
        self.job = SubmittedJob(self.name, job_id, time.time())

    def _sbatch(self, argv: Sequence[str]) -> tuple[int, str, str]:
        # In a session of its own, and waited for after a Ctrl-C too: before sbatch answers the job is nobody's.
        process = subprocess.Popen(
            argv,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise SubmissionError(f"sbatch did not answer within {PATIENCE:.0f} s") from None
        except KeyboardInterrupt:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=PATIENCE)
            raise
        return process.returncode, out, err

    def status(self) -> JobStatus:
        assert self.job is not None
        return self.cluster.poll([self.job])[self.name]

    def events(self) -> list[dict[str, Any]]:
        """What the batch process has noted, in its order; a torn last line waits for the next look."""
        found = []
        with suppress(OSError):
            for line in (self.folder / "events.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return found

    @property
    def looked(self) -> int | None:
        """The exit code of the step that looked around; None while it has not ended."""
        codes = [event["code"] for event in self.events() if event["event"] == "step" and event["number"] == 0]
        return int(codes[0]) if codes else None

    def wait_until(self, condition: Callable[[], object], patience: float, watch: bool = True) -> bool:
        """Whether the condition holds within `patience` seconds; with `watch` an ended job ends the wait."""
        until = time.monotonic() + patience
        asked = time.monotonic()
        while not condition():
            now = time.monotonic()
            if now > until:
                return False
            if watch and now - asked > 2:
                asked = now
                if not self.status().alive:
                    time.sleep(1.0)  # its last words may still be on their way through the file system
                    return bool(condition())
            time.sleep(0.05)
        return True

    def log(self) -> str:
        """The last lines that the batch script and its steps printed."""
        try:
            text = (self.folder / "job.log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join([line for line in text.splitlines() if line.strip()][-3:])

    def stage(self) -> str | None:
        """How far the batch script came: folder, setup, python; None if it never saw its folder."""
        try:
            return (self.folder / "stage").read_text(encoding="utf-8").strip()
        except OSError:
            return None

    def end(self) -> None:
        """Ends the job, also one whose id we never learnt, and waits until its processes are gone."""
        with suppress(OSError):
            (self.folder / "end").touch()
        if self.job is not None:
            run_quietly(["scancel", self.job.id])
        else:
            run_quietly(["scancel", f"--name={self.name}"])
            return
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self.status().alive:
            time.sleep(0.3)


def batch_script(folder: Path, setup: Sequence[str]) -> str:
    """Waits for the folder, which a network file system may show late, then set-up lines as an arm has them."""
    place = shlex.quote(str(folder))
    lines = [
        "#!/bin/bash",
        f"for _ in $(seq {SEEN_WITHIN}); do [ -d {place} ] && break; sleep 1; done",
        f"cd {place} || exit 66",
        "exec >>job.log 2>&1",
        "echo setup >stage",
        *(["set -e", *setup, "set +e", f"cd {place}"] if setup else []),
        "echo python >stage",
        f"exec {shlex.quote(sys.executable)} probe.py batch {place}",
    ]
    return "\n".join(lines) + "\n"


def ping(job: ProbeJob, names: Sequence[str]) -> dict[str, list[Ping]]:
    """Writes a file a node and a round, and waits for each node's answer beside it."""
    answers: dict[str, list[Ping]] = {name: [] for name in names}
    for number in range(PINGS):
        sent: dict[str, tuple[float, float]] = {}
        for name in names:
            (job.folder / "ping" / f"ping-{name}-{number}").touch()
            sent[name] = (time.time(), time.perf_counter())
        until = time.monotonic() + PATIENCE
        asked = time.monotonic()
        while sent and time.monotonic() < until:
            for name in list(sent):
                told = _read_pong(job.folder / "ping" / f"pong-{name}-{number}")
                if told is not None:
                    wall, began = sent.pop(name)
                    took = time.perf_counter() - began
                    answers[name].append(Ping(took, told - (wall + took / 2)))
            if time.monotonic() - asked > 1:
                asked = time.monotonic()
                if job.looked is not None:  # the step is over: it never ran, or failed
                    break
            time.sleep(0.002)
        if sent:
            break
    return answers


def _read_pong(path: Path) -> float | None:
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["time"])
    except (OSError, ValueError, KeyError):
        return None
