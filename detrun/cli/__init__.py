"""The command line. `main` is the entry point; commands are found in the table of `app.py`.

Importing this package imports no command, and `detrun --help` neither torch nor pandas nor pydantic.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never raises and never shows a traceback.

    argv: the words after `detrun`; None takes them from the process.
    """
    from detrun.cli.errors import guarded
    from detrun.report.notify import take_from_environment

    take_from_environment()

    def run() -> int:
        from detrun.cli.app import run

        return run(argv)

    return guarded(run, argv)


__all__ = ["main"]
