"""The edge of the command line: however a command ends, it becomes an exit code and at most a few lines on stderr."""

from __future__ import annotations

import io
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO, cast

from detrun.errors import DetrunError, ExitCode
from detrun.report.notify import without_secrets

_crash_folder: list[Path] = []


def use_crash_folder(folder: Path) -> None:
    """Where a crash file goes from here on: the archive, once a command knows it."""
    _crash_folder[:] = [folder]


def guarded(run: Callable[[], int], argv: Sequence[str] | None = None) -> int:
    """Call `run` and return its exit code, or the one of what it raised, told on stderr as a person reads it."""
    with _lasting_streams():
        code = _outcome(run, list(sys.argv[1:] if argv is None else argv))
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
    return int(code)


def _outcome(run: Callable[[], int], argv: list[str]) -> int:
    try:
        return run()
    except DetrunError as error:
        _say(error.render())
        if error.exit_code == ExitCode.BUG:
            _say(f"hint: {_crash_hint(error, argv)}")
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):
            # typer's answer to a broken pipe, with exit code 1. The streams here never break: it was another pipe.
            return _bug(leaving.__context__, argv)
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or ExitCode.OK
        _say(f"error: {leaving.code}")
        return ExitCode.USER
    except Exception as error:  # noqa: BLE001  the last line of defence: told as a bug, kept in a file
        return _bug(error, argv)


def _bug(error: BaseException, argv: list[str]) -> int:
    reason = next(iter(str(error).splitlines()), "")
    _say(f"error: a bug of detrun: {type(error).__name__}{': ' if reason else ''}{reason}")
    _say(f"hint: {_crash_hint(error, argv)}")
    return ExitCode.BUG


def _say(text: str) -> None:
    # File names, recipes and schedulers' words are foreign text: none of it may move the cursor.
    shown = "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )
    with suppress(OSError, ValueError):
        print(without_secrets(shown), file=sys.stderr, flush=True)


def _crash_hint(error: BaseException, argv: list[str]) -> str:
    path = _crash_file(error, argv)
    if path is None:
        return "its details could not be written anywhere."
    return f"its details are in {path}; send them with a report."


def _crash_file(error: BaseException, argv: list[str]) -> Path | None:
    """Write the traceback under the archive, else under the temporary folder; None if neither can be written."""
    now = datetime.now(timezone.utc)
    text = "".join(
        [
            f"detrun crash, {now.isoformat(timespec='seconds')}\n",
            f"command line: detrun {' '.join(argv)}\n",
            f"python {platform.python_version()} on {platform.platform()}\n\n",
            *traceback.format_exception(error),
        ]
    )
    for folder in _crash_folders():
        with suppress(OSError):
            # mkstemp: a new file that only this user reads, whatever lies in a shared temporary folder already.
            handle, name = tempfile.mkstemp(f"-{now:%Y%m%dT%H%M%S}.txt", "detrun-crash-", folder)
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(without_secrets(text))
            return Path(name)
    return None


def _crash_folders() -> Iterator[Path]:
    yield from _crash_folder
    if os.environ.get("DETRUN_ARCHIVE"):
        yield Path(os.environ["DETRUN_ARCHIVE"])
    yield Path(".detrun")
    yield Path(tempfile.gettempdir())


@contextmanager
def _lasting_streams() -> Iterator[None]:
    """For a while, stdout and stderr whose reader may go away and whose encoding may lack a character.

    `detrun pair … | head` must end with the verdict's exit code: once the pipe is closed, output is dropped.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Lasting(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Lasting:
    """A text stream that goes on when nobody reads it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:  # the reader has gone, or the disk behind it is full
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        """Let the descriptor lead nowhere, so that what is still buffered can be flushed at exit without an error."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
