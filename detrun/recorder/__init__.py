"""Runs inside the training process: records bit-exact metrics and state digests of every step, and changes nothing.

`install` hooks torch, `start` serves a program that never imports torch; both do nothing where detrun did not start
the process. Importing this package imports neither torch nor numpy.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from detrun.recorder.session import Session

_session: Session | None = None


def start() -> Session | None:
    """The session of this process; made at the first call, None where detrun did not start the process or where it
    cannot be made. Never raises."""
    global _session
    if _session is None:
        try:
            import detrun
            from detrun.recorder.interrupt import Interruption
            from detrun.recorder.session import Session
            from detrun.recorder.settings import Settings

            settings = Settings.from_environment(os.environ)
            if settings is None:
                return None
            _session = Session(settings)
            _session.interruption = Interruption.from_environment(os.environ, _session)
            detrun._sink = _session.record
        except Exception:  # noqa: BLE001 - the program's run is worth more than its record
            report_failure()
    return _session


def install() -> None:
    """Hook torch, which must have been imported. Called by the `sitecustomize` that detrun puts on PYTHONPATH.

    Never raises: what fails is left in the attempt's folder, and the missing records forbid the verdict "identical".
    """
    try:
        session = start()
        if session is None:
            return
        session.streams.note_torch()
        from detrun.recorder import adapters, hooks
        from detrun.recorder.observer import Observer

        observer = Observer(session)
        hooks.install(session, observer)
        adapters.install(session, observer)
        if os.environ.get("DETRUN_TRACE"):
            from detrun.recorder import trace

            trace.install(session, observer)
        if os.environ.get("DETRUN_SABOTAGE"):
            from detrun.recorder import sabotage

            session.sabotage = sabotage.asked(
                os.environ,
                session.attempt,
                session.rank,
                optimizers=lambda: list(observer.optimizers.live().values()),
                schedulers=observer.capture.schedulers.all,
                roots=observer.models.live,
                streams=session.streams,
            )
        if session.settings.determinism == "strict":
            from detrun.determinism.canonical import apply_torch_settings

            apply_torch_settings(fill=os.environ.get("DETRUN_FILL") != "0")
    except Exception:  # noqa: BLE001 - the program's run is worth more than its record
        report_failure()


def report_failure() -> None:
    """Leave the current exception as `recorder/failed-<pid>.txt` in the attempt's folder; if even that fails, on
    stderr."""
    text = traceback.format_exc()
    try:
        folder = Path(os.environ["DETRUN_ATTEMPT_DIR"]) / "recorder"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"failed-{os.getpid()}.txt").write_text(text, encoding="utf-8")
    except (KeyError, OSError):
        print(f"detrun: the recorder could not start:\n{text}", file=sys.stderr)
