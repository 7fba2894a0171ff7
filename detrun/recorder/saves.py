"""Sees the program save: logs when each save to a file began and ended, and at which position of the training.

Only outermost saves count, on the thread that trains: what a library writes on the way is a part of them. A wrapper
passes its arguments and its result on as they are and holds none of them.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from detrun.recorder.late import after_import
from detrun.recorder.observer import Observer
from detrun.recorder.session import Session

VERSION = 1

_LIBRARIES = frozenset({"torch", "safetensors"})
"""Whose own calls are parts of another save, also of one that goes on in a thread after its call has returned."""

PathOf = Callable[[tuple[Any, ...], dict[str, Any]], "str | None"]
"""Where a call saves to; "" where it is no save to a file, None where that is not known."""


class Saves:
    """The log of this rank: `saves/rank<r>.jsonl`, two lines a save."""

    def __init__(self, session: Session, observer: Observer) -> None:
        self.session = session
        self.observer = observer
        self.depth = 0
        self._written: dict[str, dict[str, Any]] = {}

    def begins(self, path: str | None, writer: str) -> dict[str, Any] | None:
        """Log the beginning; returns the line of the end, None where the training has not begun or another thread
        trains."""
        session = self.session
        if session.off or not self.observer.capture.is_training_thread():
            return None
        session.run(self.observer.updated)
        step, microbatch = session.position()
        line = {"v": VERSION, "event": "begin", "path": path, "writer": writer, "step": step, "microbatch": microbatch}
        self._append(line)
        session.run(self.observer.save_begins)
        return {**line, "event": "end"}

    def ends(self, line: dict[str, Any] | None) -> None:
        if line is not None:
            self._append(line)
            if line["path"]:
                self._written[line["path"]] = line

    @contextmanager
    def during(self, path: str | None, writer: str) -> Iterator[None]:
        """A save that a framework writes by itself, complete when this ends without an error. path: absolute."""
        if self.depth or not self.begun():
            yield
            return
        line = self.begins(path, writer)
        self.session.interrupt("save_begins", path)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
        # In this order, as below: a process that is killed here leaves no end.
        self.session.interrupt("save_ends", path)
        self.ends(line)

    def renamed(self, source: Any, target: Any) -> None:
        """A file or folder has another name now: what was saved into it was saved there, as of the same position."""
        old, new = _path(source), _path(target)
        for path in [path for path in self._written if path == old or path.startswith(f"{old}/")]:
            line = {**self._written.pop(path), "path": new + path[len(old) :]}
            self._append({**line, "event": "begin"})
            self.ends(line)

    def has_written(self) -> bool:
        return bool(self._written)

    def begun(self) -> bool:
        """Has training begun, or is it about to?"""
        return self.session.has_optimizers or bool(self.observer.models)

    def _append(self, line: dict[str, Any]) -> None:
        session = self.session
        text = json.dumps({**line, "time": round(time.time(), 6)}) + "\n"

        def append() -> None:
            path = session.attempt / "saves" / f"rank{session.rank():05d}.jsonl"
            path.parent.mkdir(exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(file, text.encode())
            finally:
                os.close(file)

        session.run(session.when_claimed, append)


def install(session: Session, observer: Observer) -> None:
    """Hook the functions that save, also those of modules that are imported later."""
    saves = Saves(session, observer)
    observer.during_save = saves.during
    _replace(torch.save, _wrapped(saves, torch.save, "torch.save", _of_second))

    def hook(names: dict[str, str], path_of: PathOf) -> Callable[[Any], None]:
        def act(module: Any) -> None:
            try:
                for name, writer in names.items():
                    original = getattr(module, name, None)
                    if callable(original):
                        _replace(original, _wrapped(saves, original, writer, path_of))
            except Exception as error:  # noqa: BLE001 - the program's import must go through
                session.warn(f"saves of {module.__name__} are not seen: {type(error).__name__}: {error}")

        return act

    for name in ("rename", "replace"):
        _hook_renaming(saves, name)

    checkpoint = {"save": "dcp.save", "async_save": "dcp.async_save", "save_state_dict": "dcp.save"}
    after_import("torch.distributed.checkpoint.state_dict_saver", hook(checkpoint, _of_checkpoint))
    after_import("safetensors.torch", hook({"save_file": "safetensors", "save_model": "safetensors"}, _of_second))
    after_import("safetensors.numpy", hook({"save_file": "safetensors"}, _of_second))


def _wrapped(saves: Saves, original: Callable[..., Any], writer: str, path_of: PathOf) -> Callable[..., Any]:
    session = saves.session

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or saves.depth or not saves.begun() or _is_a_librarys(sys._getframe(1)):
            return original(*args, **kwargs)
        path = path_of(args, kwargs)
        if path == "":
            return original(*args, **kwargs)
        line = saves.begins(path, writer)
        session.interrupt("save_begins", path)
        saves.depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            saves.depth -= 1
        later = _completion(result)
        if later is None:
            # First: where the process is about to be killed in this save, this does not return, and it has no end.
            session.interrupt("save_ends", path)
            saves.ends(line)
        else:
            # It goes on in the background. A save that fails has no end.
            def done(future: Any) -> None:
                if future.exception() is None:
                    session.interrupt("save_ends", path)
                    saves.ends(line)

            later.add_done_callback(done)
        return result

    return save


def _hook_renaming(saves: Saves, name: str) -> None:
    """`os.rename` or `os.replace`: a checkpoint is best written under another name first."""
    original = getattr(os, name)
    run = saves.session.run

    @functools.wraps(original)
    def move(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        original(src, dst, *args, **kwargs)
        if saves.has_written():
            run(saves.renamed, src, dst)

    _replace(original, move)
    accessor = getattr(pathlib, "_NormalAccessor", None)  # in Python 3.10, Path has a reference of its own
    if accessor is not None:
        setattr(accessor, name, staticmethod(move))


def _completion(result: Any) -> Any:
    """The future of a save that has only begun, None for a save that is complete."""
    for candidate in (getattr(result, "upload_completion", None), result):
        if callable(getattr(candidate, "add_done_callback", None)):
            return candidate
    return None


def _is_a_librarys(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES


def _of_second(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """`torch.save(obj, f)`, `save_file(tensors, filename)`."""
    target = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
    return _path(target)


def _of_checkpoint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """`save(state_dict, *, checkpoint_id=…, storage_writer=…)`; the oldest form has the writer second."""
    target = kwargs.get("checkpoint_id")
    if target is None:
        writer = kwargs.get("storage_writer", args[1] if len(args) > 1 else None)
        target = writer if isinstance(writer, (str, os.PathLike)) else getattr(writer, "path", None)
    return _path(target) or None


def _path(target: Any) -> str:
    """Its absolute path, also of a file that was opened by its name; "" if it has none."""
    if not isinstance(target, (str, bytes, os.PathLike)):
        # A record of a zip archive that is being written is a part of the archive's file.
        archive = getattr(target, "_zipfile", None)
        target = getattr(target, "name", None) if archive is None else getattr(archive, "filename", None)
        if not isinstance(target, (str, bytes)) or not target:
            return ""
    try:
        text = os.fsdecode(target)
        return text if "://" in text else os.path.abspath(text)  # noqa: PTH100 - as text
    except (TypeError, ValueError):
        return ""


def _replace(original: Callable[..., Any], wrapper: Callable[..., Any]) -> None:
    """Replace a function wherever a module has it, under whatever name."""
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict):
            for name in [name for name, value in list(namespace.items()) if value is original]:
                setattr(module, name, wrapper)
