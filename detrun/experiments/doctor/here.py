"""What doctor checks where it was called: Slurm's commands and settings, the archive, what is recorded of the code."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from detrun import __version__
from detrun.errors import ClusterError
from detrun.launch.preflight import SPACE_FLOOR, human
from detrun.launch.slurm import COMMANDS, describe_partition
from detrun.launch.submit import clean_environment
from detrun.report.doctor_screen import Check

PATIENCE = 20.0
NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "pvfs", "orangefs", "wekafs", "fuse", "9p", "afs")


@dataclass(frozen=True)
class Answer:
    """What a command printed, and in how many seconds. code None: it is not there, or did not answer, as `err` says."""

    code: int | None
    out: str
    err: str
    seconds: float

    @property
    def last(self) -> str:
        lines = [line for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"exit code {self.code}"


def ask(argv: Sequence[str], patience: float = PATIENCE) -> Answer:
    """Runs a command with a time limit; never raises."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            argv,
            env=clean_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"no answer within {patience:.0f} s", patience)
    except OSError as error:
        return Answer(None, "", str(error.strerror or error), time.monotonic() - began)
    return Answer(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


def check_detrun() -> Check:
    python = sys.version.split()[0]
    return Check("detrun", "ok", f"{__version__}, Python {python} at {sys.executable}")


def check_commands() -> Check:
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        remedy = "put Slurm's bin folder on PATH, or run detrun on a login node"
        return Check("Slurm's commands", "fail", f"missing: {', '.join(missing)}", remedy)
    told = ask(["sbatch", "--version"])
    if told.code != 0:
        return Check("Slurm's commands", "fail", f"sbatch --version: {told.last}", "does sbatch work by hand?")
    return Check("Slurm's commands", "ok", f"{', '.join(COMMANDS)}: {told.out.strip()}")


def check_controller() -> Check:
    """scontrol ping and one squeue, which is what detrun asks again and again."""
    ping = ask(["scontrol", "ping"])
    if ping.code != 0:
        remedy = "scontrol ping by hand; is this a login node of the cluster, is SLURM_CONF right?"
        return Check("controller", "fail", f"scontrol ping: {ping.last}", remedy)
    queue = ask(["squeue", "--noheader", "--name=detrun-doctor"])
    if queue.code != 0:
        return Check("controller", "fail", f"squeue: {queue.last}", "squeue by hand; detrun follows its jobs with it")
    figures = {"squeue_seconds": queue.seconds}
    measured = f"scontrol ping answers, squeue in {seconds(queue.seconds)}"
    if queue.seconds > 5:
        return Check("controller", "warn", measured, "the controller is busy; following jobs will be slow", figures)
    return Check("controller", "ok", measured, figures=figures)


def check_accounting() -> Check:
    if shutil.which("sacct") is None:
        return Check("accounting", "warn", "there is no sacct", _NO_ACCOUNTING)
    told = ask(["sacct", "--noheader", "--parsable2", "--allocations", "--starttime=now-1hour", "--format=JobIDRaw"])
    if told.code == 0:
        return Check("accounting", "ok", f"sacct answers in {seconds(told.seconds)}")
    return Check("accounting", "warn", f"sacct: {told.last}", _NO_ACCOUNTING)


_NO_ACCOUNTING = (
    "detrun works without it, by its own markers and squeue; how a job ended that left no marker is then not known"
)


def check_nodes(partition: str | None) -> tuple[Check, int]:
    """The partition's nodes by state, and how many of them can be used. partition None: the default one."""
    name = f"partition {partition}" if partition else "default partition"
    try:
        limits = describe_partition(partition)
    except ClusterError as error:
        return Check("nodes", "fail", error.what, error.hint or "see sinfo"), 0
    wanted = [f"--partition={partition}"] if partition else []
    told = ask(["sinfo", "--noheader", "--format=%P|%T|%D", *wanted])
    states: dict[str, int] = {}
    for line in told.out.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 3 and fields[2].isdigit() and (partition or fields[0].endswith("*")):
            states[fields[1]] = states.get(fields[1], 0) + int(fields[2])
    usable = sum(count for word, count in states.items() if _USABLE.match(word))
    if not states:
        return Check("nodes", "unknown", f"sinfo shows no node of the {name}", "name one with slurm.partition"), 0
    limit = f"; jobs of at most {limits.minutes:g} minutes" if limits.minutes is not None else ""
    measured = f"{name}: {', '.join(f'{count} {word}' for word, count in sorted(states.items()))}{limit}"
    if not usable:
        return Check("nodes", "fail", measured, "no node can take a job: sinfo -R says why"), 0
    return Check("nodes", "ok", measured), usable


_USABLE = re.compile(r"(idle|mix|alloc|comp)[a-z]*[~#%$@^]?$")


def read_settings() -> dict[str, str]:
    """`scontrol show config` as a mapping; empty where it does not answer."""
    told = ask(["scontrol", "show", "config"])
    return parse_settings(told.out) if told.code == 0 else {}


def parse_settings(text: str) -> dict[str, str]:
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def check_settings(settings: Mapping[str, str]) -> list[Check]:
    """The settings that decide how jobs are ended, forgotten and started again."""
    if not settings:
        return [Check("settings", "unknown", "scontrol show config did not answer", "scontrol show config by hand")]
    return [
        _kill_wait(settings),
        _min_job_age(settings),
        Check("requeueing", "ok", f"JobRequeue={settings.get('JobRequeue', '?')} (detrun's jobs say --no-requeue)"),
        _tracking(settings),
        Check("tasks", "ok", f"TaskPlugin={settings.get('TaskPlugin', '?')}"),
        _preemption(settings),
    ]


def _kill_wait(settings: Mapping[str, str]) -> Check:
    wait = leading_number(settings.get("KillWait"))
    if wait is None:
        return Check("KillWait", "unknown", "not in scontrol show config", "ask your site")
    measured = f"{wait:g} s from TERM to KILL when a job is cancelled or runs out of time"
    figures = {"seconds": wait}
    if wait < 10:
        remedy = "a large checkpoint is not saved in that time: interrupt with kind: signal well before slurm.time ends"
        return Check("KillWait", "warn", measured, remedy, figures)
    if wait > 120:
        return Check("KillWait", "warn", measured, "detrun cancel takes that long to take effect", figures)
    return Check("KillWait", "ok", measured, figures=figures)


def _min_job_age(settings: Mapping[str, str]) -> Check:
    age = leading_number(settings.get("MinJobAge"))
    if age is None:
        return Check("MinJobAge", "unknown", "not in scontrol show config", "ask your site")
    measured = f"squeue remembers an ended job for {age:g} s"
    return Check("MinJobAge", "ok", measured)


def _tracking(settings: Mapping[str, str]) -> Check:
    kind = settings.get("ProctrackType", "?")
    note = "" if kind.endswith("cgroup") else ", under which a process may outlive its job; detrun ends its own"
    return Check("process tracking", "ok", f"{kind}{note}")


def _preemption(settings: Mapping[str, str]) -> Check:
    mode = settings.get("PreemptMode", "?")
    if mode.upper().startswith("OFF"):
        return Check("preemption", "ok", "off")
    remedy = "an arm that is preempted is reported as lost (exit 4); a QOS or partition that is not preempted avoids it"
    return Check("preemption", "warn", f"PreemptMode={mode}", remedy)


def leading_number(text: str | None) -> float | None:
    found = re.match(r"\s*([0-9]+)", text or "")
    return float(found[1]) if found else None


def check_archive(root: Path, folder: Path, several_machines: bool) -> list[Check]:
    """Writing, renaming and claiming in the archive, its file system, and what is free. folder: one of ours in it."""
    return [_writable(root, folder), _space(folder, several_machines)]


def _writable(root: Path, folder: Path) -> Check:
    began = time.perf_counter()
    try:
        first, second = folder / "here-1", folder / "here-2"
        for path in (first, second):
            with path.open("wb") as file:
                file.write(path.name.encode())
                file.flush()
                os.fsync(file.fileno())
        first.replace(second)
        renamed = second.read_bytes() == b"here-1" and not first.exists()
        try:
            os.close(os.open(second, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            exclusive = False
        except FileExistsError:
            exclusive = True
        second.unlink()
    except OSError as error:
        return Check("archive", "fail", f"{root}: {error.strerror}", "--archive DIR names another folder")
    took = time.perf_counter() - began
    if not (renamed and exclusive):
        broken = "renaming" if not renamed else "O_EXCL"
        remedy = "records and locks rest on it: --archive DIR on another file system"
        return Check("archive", "fail", f"{root}: {broken} does not hold on this file system", remedy)
    if odd := sorted({"%", "\\"} & set(str(root))):
        remedy = "--archive DIR without that character"
        return Check("archive", "fail", f"{root}: sbatch would read the {odd[0]} in it as a pattern", remedy)
    measured = f"{root}: two files written to the disk and one renamed over the other in {seconds(took)}"
    return Check("archive", "ok", measured, figures={"write_seconds": took})


def _space(folder: Path, several_machines: bool) -> Check:
    usage = os.statvfs(folder)
    free, kind = usage.f_bavail * usage.f_frsize, file_system(folder)
    files = f", {usage.f_favail:,} more files" if usage.f_files else ""
    measured = f"{human(free)} free{files} on {kind}"
    figures = {"free_bytes": float(free)}
    if free < SPACE_FLOOR or (usage.f_files and usage.f_favail < 1000):
        return Check("archive space", "fail", measured, "free some space, or name another --archive", figures)
    if free < 10e9:
        remedy = "checkpoints of two arms are kept until detrun prune: free some space before large models"
        return Check("archive space", "warn", measured, remedy, figures)
    if several_machines and not kind.startswith(NETWORK):
        measured += ", not one of the usual network file systems; whether nodes see it is measured below"
    return Check("archive space", "ok", measured, figures=figures)


def file_system(path: Path) -> str:
    """The type of the file system that a path lies on, as the mount table has it."""
    best, kind = -1, "an unknown file system"
    try:
        table = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return kind
    resolved = path.resolve()
    for line in table.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        place = Path(fields[1].encode().decode("unicode_escape"))
        if (place == resolved or place in resolved.parents) and len(place.parts) > best:
            best, kind = len(place.parts), fields[2]
    return kind


def check_git() -> Check:
    told = ask(["git", "--version"])
    if told.code == 0:
        return Check("git", "ok", told.out.strip())
    remedy = "install git where detrun is called: without it no commit and no changes are recorded with an experiment"
    return Check("git", "warn", f"git: {told.last}", remedy)


def check_notifications(environment: Mapping[str, str]) -> Check | None:
    """The file that holds notification URLs is for its owner alone; None where none is named."""
    path = environment.get("DETRUN_NOTIFY_FILE")
    if not path:
        return None
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
    except OSError as error:
        return Check("notifications", "fail", f"DETRUN_NOTIFY_FILE: {error.strerror}", "correct the path, or unset it")
    if mode & 0o077:
        return Check("notifications", "fail", f"{path} may be read by others (mode {mode:o})", f"chmod 600 {path}")
    return Check("notifications", "ok", f"{path}, for its owner alone")


def seconds(value: float) -> str:
    """A duration as a person reads it."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
