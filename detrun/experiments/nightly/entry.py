"""The entry for cron, and for Slurm's scrontab: absolute paths and a whole environment, as neither brings one."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import detrun
from detrun.errors import UsageError
from detrun.experiments.nightly.run import NightlyOptions, recipe_files
from detrun.records.archive import Archive
from detrun.records.nights import nights_dir
from detrun.report.notify import FILE, URLS, VARIABLES, notify_file

_TAKEN = ("PATH", "HOME", "SHELL", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SLURM_CONF", "SLURM_CLUSTERS")
_OF_PYTHON = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "LD_LIBRARY_PATH")
_OF_A_RUN = ("DETRUN_ARM", "DETRUN_ATTEMPT", "DETRUN_SEED", "DETRUN_STEPS", "DETRUN_STATE", "DETRUN_TRACE")
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|URL", re.IGNORECASE)
LONGEST = 998
"""Characters of a line that every cron takes."""


@dataclass(frozen=True)
class Entry:
    """Lines for a table, and what to know about them."""

    text: str
    warnings: list[str]


def cron_entry(
    given: Sequence[Path],
    archive: Archive,
    options: NightlyOptions,
    at: str,
    *,
    slurm: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Entry:
    """A line for `crontab -e` (slurm: `scrontab -e`) that runs this night every day. at: `HH:MM` by the clock of the
    machine that runs it. Raises UsageError for another `at`, and for paths that no table can hold."""
    minute, hour = _clock(at)
    environment, warnings = entry_environment(os.environ if environ is None else environ)
    command = shlex.join(entry_command(given, archive, options))
    place = shlex.quote(str(Path.cwd()))
    head = [f"# detrun {detrun.__version__}: every night at {at}, made on {socket.gethostname()}"]
    if slurm:
        log = nights_dir(archive) / "scron.log"
        head += [
            "#SCRON --job-name=detrun-nightly",
            "#SCRON --ntasks=1",
            "#SCRON --time=12:00:00",
            f"#SCRON --output={_escaped(str(log))}",
            "#SCRON --open-mode=append",
        ]
        # scrontab's own lines for variables came late; a shell's are understood by all of them.
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
        lines = [*head, f"{minute} {hour} * * * cd {place} && {settings} exec {command}"]
    else:
        lines = [*head, *(f"{name}={_cron_value(value)}" for name, value in environment.items())]
        lines.append(f"{minute} {hour} * * * cd {place} && exec {command}".replace("%", r"\%"))
    if any("\n" in line for line in lines):
        raise UsageError("a path or a variable with a line end in it fits into no table")
    if not slurm and (longest := max(map(len, lines))) > LONGEST:
        warnings.append(f"a line has {longest} characters; some crons take no more than {LONGEST}")
    if not slurm:
        warnings.append("in a crontab the variables hold for the entries below them too: put this at the end")
    return Entry("\n".join(lines) + "\n", warnings)


def entry_command(given: Sequence[Path], archive: Archive, options: NightlyOptions) -> list[str]:
    """The command, every path in it absolute."""
    paths = [str(path.absolute()) for path in given]
    if missing := [path for path in paths if not Path(path).exists()]:
        raise UsageError(f"{missing[0]} does not exist")
    recipe_files(given)  # a folder without recipes is said now
    command = [sys.executable, "-m", "detrun", "nightly", *paths, "--archive", str(archive.root), "--quiet"]
    default = NightlyOptions()
    if options.only != default.only:
        command += ["--only", ",".join(options.only)]
    if options.localize_budget != default.localize_budget:
        command += ["--localize-budget", f"{options.localize_budget:g}"]
    if options.against:
        command += ["--against", options.against]
    if options.at_once:
        command += ["--at-once", str(options.at_once)]
    return [*command, *(["--yes"] if options.agreed else [])]


def entry_environment(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables an entry needs, without any that may be a secret, and a word about those that were left out."""
    warnings = []
    ours = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("DETRUN_") and not name.startswith(_OF_A_RUN) and name not in VARIABLES
    }
    if hidden := [name for name in ours if _SECRET.search(name)]:
        warnings.append(f"left out, as they may be secrets: {', '.join(hidden)}")
    found = {name: environ[name] for name in (*_TAKEN, *_OF_PYTHON) if environ.get(name)}
    found["SHELL"] = "/bin/sh"  # the one that the line is written for
    found.update({name: value for name, value in ours.items() if name not in hidden and name != "DETRUN_ARCHIVE"})
    if file := notify_file():
        found[FILE] = str(Path(file).expanduser().absolute())  # where the secrets lie is none
    else:
        warnings.append(
            f"nobody will be notified: {URLS} is not written down; put the URLs into a file that only you may read, "
            f"and set {FILE} to its path before you print this"
        )
    return found, warnings


def _clock(at: str) -> tuple[int, int]:
    match = re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", at)
    if match is None:
        raise UsageError(f"--at: {at!r} is no time of day", hint='such as --at "02:30"')
    return int(match[2]), int(match[1])


def _cron_value(value: str) -> str:
    """As cron reads it: quotes around are taken off, blanks at either end are lost without them."""
    if value != value.strip() or value[:1] in ("'", '"'):
        return f"'{value}'" if "'" not in value else f'"{value}"'
    return value


def _escaped(path: str) -> str:
    return path if re.fullmatch(r"[\w/.+-]+", path) else f'"{path}"'
