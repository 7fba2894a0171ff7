"""`detrun logs`: what an arm's ranks and their launcher printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from detrun.cli.common import ArchiveOption, IdArgument, open_archive
from detrun.errors import NotVerifiedError, UsageError

if TYPE_CHECKING:
    from detrun.records.layout import AttemptFolder, ExperimentFolder


def logs(
    experiment: IdArgument = "@latest",
    arm: Annotated[str, typer.Option("--arm", help="Which arm.")] = "a",
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Which rank; without it, the launcher's own log too.")
    ] = None,
    attempt_number: Annotated[
        int | None, typer.Option("--attempt", min=0, help="Which attempt of an arm that was resumed.", metavar="N")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many last lines of each log; 0 is all.")] = 40,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on printing what is added until the arm ends.")
    ] = False,
    archive: ArchiveOption = None,
) -> int:
    """Prints an arm's logs; without --attempt those of its newest attempt, of a localization those of its last pass."""
    folder = open_archive(archive).resolve(experiment)
    attempts = folder.attempts(arm)
    if not attempts:
        ran = [place for place in folder.passes().values() if place.attempts(arm)]
        attempts = ran[-1].attempts(arm) if ran else []
    if not attempts:
        known = sorted(path.name for path in (folder.path / "arms").glob("*") if path.is_dir())
        reference = _reference(folder)
        if reference is not None and arm == reference[0]:
            _, other, theirs = reference
            raise UsageError(
                f"arm {arm} of {folder.id} was not run: arm {theirs} of {other} stands in for it",
                hint=f"detrun logs {other} --arm {theirs}",
            )
        if arm not in known:
            raise UsageError(f"{folder.id} has no arm {arm}", hint=f"its arms: {', '.join(known) or 'none yet'}")
        raise NotVerifiedError(f"arm {arm} of {folder.id} has not begun", hint=f"detrun status {folder.id}")
    if attempt_number is not None and attempt_number not in {attempt.number for attempt in attempts}:
        raise UsageError(f"arm {arm} of {folder.id} has no attempt {attempt_number}", hint=_those(attempts))
    attempt = next((a for a in attempts if a.number == attempt_number), attempts[-1])
    if rank is not None:
        paths = [attempt.log(rank)]
        if not paths[0].exists() and not follow:
            raise UsageError(f"arm {arm} has no log of rank {rank}", hint=f"its logs lie in {attempt.log_dir}")
    else:
        paths = sorted(attempt.log_dir.glob("*.log"))
    positions = {path: _print_tail(path, lines, len(paths) > 1) for path in paths}
    if not any(positions.values()) and not follow:
        who = f"rank {rank}" if rank is not None else "every rank"
        print(f"{who} of arm {arm} printed nothing", file=sys.stderr)
    if follow:
        _follow(positions, attempt, all_of_them=rank is None)
    return 0


def _those(attempts: Sequence[AttemptFolder]) -> str:
    numbers = ", ".join(str(attempt.number) for attempt in attempts)
    return f"its attempts: {numbers}" if len(attempts) > 1 else f"its only attempt is {numbers}"


def _reference(folder: ExperimentFolder) -> tuple[str, str, str] | None:
    """The arm that was not run, and the experiment and arm that stand in for it."""
    from detrun.errors import RecordError
    from detrun.records.jobs import ExperimentFile

    try:
        experiment = ExperimentFile.read(folder.experiment_file)
    except RecordError:
        return None
    found = experiment.reference
    return (experiment.arms[0].id, found.experiment, found.arm) if found else None


def _print_tail(path: Path, lines: int, titled: bool) -> int:
    """Prints a log's end and returns the position reached in it."""
    data = _added(path, 0)
    if titled and data:
        print(f"==> {path} <==")
    text = data.decode("utf-8", "replace").splitlines()
    for line in text[-lines:] if lines else text:
        print(line)
    sys.stdout.flush()
    return len(data)


def _added(path: Path, position: int) -> bytes:
    """What a log holds from a position on; nothing of what is no plain file (a pipe would hold us for ever)."""
    from detrun.records.files import read_plain

    try:
        return read_plain(path, limit=sys.maxsize, offset=position)
    except NotVerifiedError:
        return b""


def _follow(positions: dict[Path, int], attempt: AttemptFolder, all_of_them: bool) -> None:
    from detrun.errors import RecordError
    from detrun.experiments.follow import FINAL
    from detrun.records.jobs import JobFile

    ended = False
    while True:
        if all_of_them:  # a rank's log is there from the rank's start on
            positions.update({path: 0 for path in sorted(attempt.log_dir.glob("*.log")) if path not in positions})
        for path, position in positions.items():
            if data := _added(path, position):
                sys.stdout.write(data.decode("utf-8", "replace"))
                sys.stdout.flush()
                positions[path] = position + len(data)
        if ended:
            return
        try:
            ended = JobFile.read(attempt.job_file).state in FINAL
        except RecordError:
            ended = False
        if not ended:
            time.sleep(0.5)
