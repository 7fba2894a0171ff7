"""Classes of modules with a `__call__` of their own, which need not come to that of torch's base class."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn

from detrun.recorder.session import Session

Call = Callable[..., Any]


def hook(session: Session, call: Call, wrap: Callable[[Call], Call]) -> None:
    """Wrap the `__call__` of each such class as the class is made. call: what stands for the base class's; wrap: makes
    the same for another."""
    before = vars(nn.Module).get("__init_subclass__")

    def made(kind: type[nn.Module], /, **options: Any) -> None:
        if before is not None:
            before.__get__(None, kind)(**options)
        else:
            super(nn.Module, kind).__init_subclass__(**options)
        try:
            base = next(base for base in kind.__mro__ if "__call__" in vars(base))
            own = vars(base)["__call__"]
            if type(own) is types.FunctionType and own.__code__ is not call.__code__ and base is not nn.Module:
                kind.__call__ = wrap(own)  # type: ignore[method-assign]
        except Exception as error:  # noqa: BLE001 - a class of its own kind is made as it would be
            session.warn(f"calls of {kind.__qualname__} are not seen: {type(error).__name__}: {error}")

    nn.Module.__init_subclass__ = classmethod(made)  # type: ignore[assignment]
