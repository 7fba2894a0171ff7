"""What would go wrong is said before anything is submitted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from detrun.errors import ArchiveError, RecipeError, UsageError

SPACE_FLOOR = 64 * 1024 * 1024


def check_command(argv: Sequence[str], workdir: Path, path: str) -> None:
    """The program can be started from here. Not asked where a container or set-up lines bring it."""
    if not workdir.is_dir():
        raise RecipeError(f"launch.workdir {workdir} is not a folder", hint="it is relative to the recipe's folder")
    program = argv[0]
    found = (
        os.access(workdir / program, os.X_OK) and (workdir / program).is_file()
        if os.sep in program
        else shutil.which(program, path=path)
    )
    if not found:
        raise RecipeError(
            f"launch.command: there is no program {program}",
            hint="it is looked for on PATH, or from launch.workdir if it has a slash",
        )


def check_space(archive: Path, expected: int | None) -> None:
    """The archive's file system has room. expected: bytes that the last experiment of this recipe took."""
    free = shutil.disk_usage(_existing(archive)).free
    if free < SPACE_FLOOR:
        raise ArchiveError(f"{archive} has {human(free)} left", hint="free some space, or name another --archive")
    if expected is not None and expected > free:
        raise ArchiveError(
            f"{archive} has {human(free)} left, and the last experiment of this recipe wrote {human(expected)}",
            hint="free some space, save less often, or name another --archive",
        )


def check_node_hours(arms: int, nodes: int, minutes: int, limit: float | None, agreed: bool, what: str = "arms") -> str:
    """One line saying what will be asked for; UsageError above the limit without --yes."""
    hours = arms * nodes * minutes / 60
    text = f"{arms} {what} × {nodes} node{'s' if nodes > 1 else ''} × {_clock(minutes)} = up to {hours:.3g} node-hours"
    if limit is not None and hours > limit and not agreed:
        raise UsageError(
            f"{text}, above limits.node_hours ({limit:g})",
            hint="--yes submits all the same; slurm.time is the limit of one arm",
        )
    return text


def folder_size(folder: Path) -> int:
    """Bytes of all plain files below a folder; links are not followed."""
    total = 0
    for root, _folders, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118  (a Path each costs more than the stat)
            except OSError:
                continue
    return total


def human(size: float) -> str:
    """A size in bytes as a person reads it."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def trainer_path(environment: Mapping[str, str], prepend: str | None) -> str:
    """PATH as the trainer will have it."""
    path = environment.get("PATH", os.defpath)
    return os.pathsep.join([prepend, path]) if prepend else path


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _clock(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02d} h"
