"""Puts the operator mode under all modes of the program's and takes it away again.

Under them, since a program pops what it pushed: a mode of ours on top of its own would be popped in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from detrun.recorder.trace.mode import OperatorMode


class ModeStack:
    """The operator mode of this process, and whether it lies on the stack of the thread that trains."""

    def __init__(self, mode: OperatorMode) -> None:
        self._mode = mode
        self._wanted = False

    def switch(self, on: bool) -> None:
        """The window opens or closes."""
        self._wanted = on
        self._mode.on = on
        self.tidy()

    def tidy(self) -> None:
        """Put it on the stack or off it, if it is not where it belongs. While the stack holds a mode of the compiler's
        it stays as it is, until the next call."""
        self._tidy(self._wanted)

    def _tidy(self, wanted: bool) -> None:
        if self._lies() == wanted:
            return
        length = _length()
        user = _user_length()
        if user != length:
            return
        above = [torch._C._pop_torch_dispatch_stack(None) for _ in range(length)]
        above = [mode for mode in above if mode is not self._mode]
        if wanted:
            above.append(self._mode)
        for mode in reversed(above):
            torch._C._push_on_torch_dispatch_stack(mode)

    def thread_begins(self) -> None:
        """Another thread begins a part of the forward pass."""
        self.tidy()

    def thread_ends(self) -> None:
        """It ended: what that thread does besides is not the training's."""
        self._tidy(False)

    def _lies(self) -> bool:
        return any(torch._C._get_dispatch_stack_at(index) is self._mode for index in range(_length()))


def _length() -> int:
    return int(torch._C._len_torch_dispatch_stack())


def _user_length() -> int:
    """Without the compiler's own modes, which have fixed places."""
    return sum(
        1 for index in range(_length()) if getattr(torch._C._get_dispatch_stack_at(index), "_mode_key", None) is None
    )
