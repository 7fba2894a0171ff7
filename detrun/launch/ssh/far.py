"""The far end: one verb a call, asked for by a message on stdin and answered on stdout."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Callable
from typing import Any

from detrun import __version__
from detrun.errors import DetrunError, UsageError
from detrun.launch.ssh import far_files, far_runs, far_store
from detrun.launch.ssh.wire import EndedError, Wire, greeting


def hello(wire: Wire, request: dict[str, Any]) -> None:  # noqa: ARG001  a verb like the others
    """Says who is there."""
    wire.write({"host": socket.gethostname(), "python": platform.python_version(), "executable": sys.executable})


VERBS: dict[str, Callable[[Wire, dict[str, Any]], None]] = {
    "hello": hello,
    "receive": far_store.receive,
    "start": far_runs.start,
    "follow": far_runs.follow,
    "end": far_runs.end,
    "forget": far_runs.forget,
    "bring": far_files.bring,
}


def serve(verb: str) -> int:
    """Does what the first message on stdin asks for. An error is a message too; its exit code is also the process'."""
    if verb not in VERBS:
        raise UsageError(f"{verb[:40]} is nothing that the far end does")
    output = os.dup(1)
    os.dup2(2, 1)  # whatever prints by itself must not get in between

    def send(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(output, view) :]

    wire = Wire(lambda limit: os.read(0, limit), send)
    try:
        send(greeting(__version__))
        request, _ = wire.read()
        VERBS[verb](wire, request)
    except (EndedError, BrokenPipeError):
        return 4  # nobody is there any more
    except DetrunError as error:
        return _tell(wire, error)
    except (KeyError, TypeError, ValueError) as error:
        return _tell(wire, UsageError(f"the request cannot be understood: {type(error).__name__}: {error}"))
    return 0


def _tell(wire: Wire, error: DetrunError) -> int:
    try:
        wire.write(
            {
                "error": {
                    "what": error.what,
                    "where": error.where,
                    "hint": error.hint,
                    "excerpt": list(error.excerpt),
                    "code": int(error.exit_code),
                }
            }
        )
    except OSError:
        return 4
    return int(error.exit_code)
