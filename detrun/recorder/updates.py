"""Tells the steps of a program that has no optimizer of torch's: one whose own code writes to the parameters.

Such a step is over once the parameters are no longer what they were when the last backward pass began: gradients that
are still being accumulated leave them alone. That is looked at where the program next does something (a forward pass
begins, a save begins, it ends), so that whatever the program does by itself after its update belongs to the step.
"""

from __future__ import annotations

import ctypes
import sys
import types
import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from detrun.recorder.owned import program_modules

_HEAD = 8
"""Bytes of a parameter that are looked at: a write through `.data` leaves no other trace."""


class Updates:
    """Holds none of the parameters alive."""

    def __init__(self) -> None:
        self._marks: list[tuple[weakref.ref[Tensor], object]] = []

    def mark(self, roots: Sequence[nn.Module]) -> None:
        """A backward pass begins: what the parameters are now."""
        self._marks = [(weakref.ref(parameter), _mark(parameter)) for parameter in trained(roots)]

    def happened(self) -> list[Tensor] | None:
        """The parameters that still exist, if any was written to or replaced since; None until the next mark."""
        now = [(reference(), mark) for reference, mark in self._marks]
        if all(parameter is not None and _mark(parameter) == mark for parameter, mark in now):
            return None
        self._marks = []
        return [parameter for parameter, _ in now if parameter is not None]


def trained(roots: Sequence[nn.Module]) -> list[Tensor]:
    """The parameters of these modules, each once."""
    return list({id(p): p for root in roots for p in root.parameters()}.values())


def program_records() -> bool:
    """Does the program name its steps itself (`detrun.record`)? Then only they are its steps."""
    own = sys.modules.get("detrun")
    wanted = (own, getattr(own, "record", None))
    for _, module in program_modules():
        for value in list(vars(module).values()):
            if any(value is one for one in wanted if one is not None) or _reads_detrun(value):
                return True
    return False


def _reads_detrun(value: object) -> bool:
    """A function that imports detrun when it runs."""
    return type(value) is types.FunctionType and "detrun" in value.__code__.co_names


def _mark(parameter: Tensor) -> object:
    address = parameter.data_ptr()
    head = b""
    if parameter.is_cpu and address and parameter.nbytes:
        head = ctypes.string_at(address, min(_HEAD, parameter.nbytes))
    return parameter._version, address, head
