"""Which line of the program an event comes from."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import torch

import detrun

_sequence: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_current_node = torch._C._current_autograd_node

_OWN = Path(detrun.__file__).parent
_FOREIGN = (
    "<",
    f"{Path(torch.__file__).parent}/",
    *(f"{_OWN / part}/" for part in ("recorder", "fingerprint", "records")),
)
_STANDARD = f"{sysconfig.get_path('stdlib')}/"
_LIBRARIES = (f"{sysconfig.get_path('purelib')}/", f"{sysconfig.get_path('platlib')}/")


class Sites:
    """Finds the first frame outside of torch, the standard library and the recorder. In a backward pass that is the
    call which made the node of the graph: it is noted in the forward pass, by the node's number."""

    def __init__(self) -> None:
        self._known: dict[CodeType, str | None] = {}
        self._nodes: dict[int, str] = {}
        self._older: dict[int, str] = {}

    def site(self, backward: bool) -> str:
        """`train.py:212 in combine` for the event that happens on this thread now, "" if no frame is the program's."""
        if backward:
            node = _current_node()
            if node is not None:
                number = node._sequence_nr()
                found = self._nodes.get(number) or self._older.get(number)
                if found is not None:
                    return found
            return self._of_stack()
        return self.note()

    def note(self) -> str:
        """The same outside of a backward pass; remembers it for the node that was made last."""
        found = self._of_stack()
        if torch.is_grad_enabled():
            self._nodes[_sequence() - 1] = found
        return found

    def step_begins(self) -> None:
        """Forget what is older than the last step: its graph may still be in use."""
        self._older, self._nodes = self._nodes, {}

    def _of_stack(self) -> str:
        frame: FrameType | None = sys._getframe(2)
        known = self._known
        while frame is not None:
            code = frame.f_code
            try:
                text = known[code]
            except KeyError:
                text = known[code] = _name(code)
            if text is not None:
                return f"{text}:{frame.f_lineno} in {code.co_name}"
            frame = frame.f_back
        return ""


def _name(code: CodeType) -> str | None:
    """The name of the file if it is the program's."""
    path = code.co_filename
    if path.startswith(_FOREIGN) or (path.startswith(_STANDARD) and not path.startswith(_LIBRARIES)):
        return None
    return Path(path).name
