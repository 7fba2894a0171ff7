"""Reads a pickle as data: no class is looked up, nothing is imported, and no function but those of a fixed table runs.

A pickle is a program for a small stack machine. This one builds plain values and containers. A class or function is
only a `Global`, its dotted name; what a pickle wants to call is looked up in `calls`, which holds what makes tensors
and arrays (`rebuild.py`); everything else becomes an `Opaque`, which keeps the arguments and the state it was given
and does nothing with them. Memory stays within a fixed multiple of the pickle's size: what copies is charged for.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from detrun.errors import RecordError

MOST_BYTES = 1 << 30
"""A larger pickle is refused: it holds what its tensors are called and shaped like, not the tensors."""
_MOST_OPERATIONS = 1 << 26
_COPIES = 4
"""What calls copy (elements of containers, eight bytes of text) may be so many times the pickle's bytes."""
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class BrokenPickleError(ValueError):
    """The bytes are no pickle, are cut short, or want more than a checkpoint's would."""


@dataclass(frozen=True, slots=True)
class Global:
    """A class, a function or a constant that a pickle names, such as `torch.float32`."""

    name: str


@dataclass(slots=True, eq=False)
class Opaque:
    """An object of a class that is not known: what it was made with, without being made.

    name: of its class, dotted. args: of its constructor. state: what `__setstate__` would get. items and pairs: what
    was appended to it or set in it, where it is some kind of list or mapping.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def absorb(self, state: Any) -> None:
        """Take the state of a BUILD."""
        self.state = state


Calls = Mapping[str, Callable[..., Any]]


def unpickle(
    raw: bytes, where: str, calls: Calls, persistent: Callable[[Any], Any] | None = None, begin: int = 0
) -> tuple[Any, int]:
    """The object in a pickle that starts at `begin`, and the position after its end.

    calls: what may be called, by dotted name; it gets the arguments as they are in the pickle and raises ValueError or
    TypeError for those that make no sense. persistent: what makes an object of a persistent id. Raises RecordError.
    """
    if len(raw) > MOST_BYTES:
        raise RecordError(f"holds a pickle of {len(raw):,} bytes, {MOST_BYTES:,} at most are read", where=where)
    machine = _Machine(raw, begin, calls, persistent)
    try:
        return machine.run(), machine.at
    except BrokenPickleError as error:
        raise RecordError(f"holds a damaged pickle: {error}", where=where) from None
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, struct.error, OverflowError) as error:
        what = f"{type(error).__name__} at byte {machine.at:,}"
        raise RecordError(f"holds a damaged pickle ({what})", where=where) from None
    except (RecursionError, MemoryError):
        raise RecordError("holds a pickle that is nested too deep or too large", where=where) from None


class _Mark:
    """Marks the beginning of a run of arguments on the stack."""


_MARK = _Mark()
_STOP = object()


class _Machine:
    def __init__(self, raw: bytes, begin: int, calls: Calls, persistent: Callable[[Any], Any] | None) -> None:
        self.raw = raw
        self.at = begin
        self.calls = calls
        self.persistent = persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[str, Global] = {}
        self.copies = (1 << 20) + _COPIES * len(raw)

    def run(self) -> Any:
        raw, operations, most = self.raw, _OPERATIONS, len(self.raw)
        for _ in range(_MOST_OPERATIONS):
            if self.at >= most:
                raise BrokenPickleError("it is cut short")
            operation = operations[raw[self.at]]
            if operation is None:
                raise BrokenPickleError(
                    f"operation {raw[self.at]:#04x} at byte {self.at:,} has no place in a checkpoint"
                )
            self.at += 1
            if operation(self) is _STOP:
                return self.stack.pop()
        raise BrokenPickleError("it makes too many objects")

    def charge(self, argument: Any) -> None:
        """Pay for a copy that a call may make of its argument."""
        if isinstance(argument, (str, bytes)):
            self.copies -= len(argument) >> 3
        elif isinstance(argument, (list, tuple, dict, set, frozenset)):
            self.copies -= len(argument)
        if self.copies < 0:
            raise BrokenPickleError("it copies without end")

    # -- reading

    def take(self, count: int) -> bytes:
        begin, end = self.at, self.at + count
        if end > len(self.raw):
            raise BrokenPickleError("it is cut short")
        self.at = end
        return self.raw[begin:end]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> str:
        end = self.raw.index(b"\n", self.at, self.at + 4096)
        text = self.raw[self.at : end].decode("utf-8")
        self.at = end + 1
        return text

    def since_mark(self) -> list[Any]:
        stack = self.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is _MARK:
                items = stack[index + 1 :]
                del stack[index:]
                return items
        raise BrokenPickleError("a mark is missing")

    # -- names and calls

    def push_global(self, module: str, name: str) -> None:
        dotted = f"{_OLD_MODULES.get(module, module)}.{name}"
        found = self.globals.get(dotted)
        if found is None:
            found = self.globals[dotted] = Global(dotted)
        self.stack.append(found)

    def call(self, function: Any, args: Any, kwargs: Any = None) -> Any:
        if not isinstance(args, tuple):
            raise BrokenPickleError("a call's arguments are not a tuple")
        if not isinstance(function, Global):
            return Opaque("an object that was called", (function, *args))
        known = self.calls.get(function.name)
        if known is None:
            return Opaque(function.name, args if not kwargs else (*args, kwargs))
        for argument in args:
            self.charge(argument)
        return known(*args)


def _build(machine: _Machine) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    absorb = getattr(target, "absorb", None)
    if absorb is not None:
        absorb(state)
    # The attributes of a dictionary are versions of modules (`state_dict()._metadata`); plain values have none.


def _append(target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, Opaque):
        target.items.extend(items)
    else:
        raise BrokenPickleError("it appends to what is no list")


def _set(target: Any, flat: list[Any]) -> None:
    if isinstance(target, dict):
        target.update(zip(flat[::2], flat[1::2], strict=True))
    elif isinstance(target, Opaque):
        target.pairs.extend(zip(flat[::2], flat[1::2], strict=True))
    else:
        raise BrokenPickleError("it sets an item of what is no dictionary")


def _add(machine: _Machine) -> None:
    items, target = machine.since_mark(), machine.stack[-1]
    if not isinstance(target, set):
        raise BrokenPickleError("it adds to what is no set")
    target.update(items)


def _put(machine: _Machine, index: int) -> None:
    machine.memo[index] = machine.stack[-1]


def _text(machine: _Machine, size: int) -> None:
    machine.stack.append(machine.take(machine.number(size)).decode("utf-8", "surrogatepass"))


def _old_text(machine: _Machine, size: int) -> None:
    raw = machine.take(machine.number(size))
    try:
        machine.stack.append(raw.decode("ascii"))
    except UnicodeDecodeError:
        machine.stack.append(raw)


def _bytes(machine: _Machine, size: int) -> None:
    machine.stack.append(machine.take(machine.number(size)))


def _long(machine: _Machine, size: int) -> None:
    machine.stack.append(int.from_bytes(machine.take(machine.number(size)), "little", signed=True))


def _tuple(machine: _Machine, count: int) -> None:
    if len(machine.stack) < count:
        raise BrokenPickleError("it takes more than there is")
    items = tuple(machine.stack[-count:])
    del machine.stack[-count:]
    machine.stack.append(items)


def _dict_since_mark(machine: _Machine) -> None:
    flat = machine.since_mark()
    machine.stack.append(dict(zip(flat[::2], flat[1::2], strict=True)))


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not (isinstance(name, str) and isinstance(module, str)):
        raise BrokenPickleError("a class's name is no text")
    machine.push_global(module, name)


def _global(machine: _Machine) -> None:
    module = machine.line()
    machine.push_global(module, machine.line())


def _reduce(machine: _Machine) -> None:
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.call(function, args))


def _new(machine: _Machine) -> None:
    args, cls = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.call(cls, args))


def _new_with_names(machine: _Machine) -> None:
    kwargs, args, cls = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.call(cls, args, kwargs))


def _persistent(machine: _Machine) -> None:
    pid = machine.stack.pop()
    machine.stack.append(
        Opaque("a persistent object", (pid,)) if machine.persistent is None else machine.persistent(pid)
    )


def _skip(size: int) -> Callable[[_Machine], Any]:
    return lambda machine: machine.take(size)


def _push(value: Any) -> Callable[[_Machine], Any]:
    return lambda machine: machine.stack.append(value)


_BY_CODE: dict[int, Callable[[_Machine], Any]] = {
    0x80: _skip(1),  # PROTO
    0x95: _skip(8),  # FRAME
    ord("."): lambda _: _STOP,
    ord("("): _push(_MARK),
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): lambda m: m.since_mark(),
    ord("2"): lambda m: m.stack.append(m.stack[-1]),
    ord("N"): _push(None),
    0x88: _push(True),
    0x89: _push(False),
    ord("J"): lambda m: m.stack.append(int.from_bytes(m.take(4), "little", signed=True)),
    ord("K"): lambda m: m.stack.append(m.number(1)),
    ord("M"): lambda m: m.stack.append(m.number(2)),
    0x8A: lambda m: _long(m, 1),
    0x8B: lambda m: _long(m, 4),
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    ord("U"): lambda m: _old_text(m, 1),
    ord("T"): lambda m: _old_text(m, 4),
    0x8C: lambda m: _text(m, 1),
    ord("X"): lambda m: _text(m, 4),
    0x8D: lambda m: _text(m, 8),
    ord("C"): lambda m: _bytes(m, 1),
    ord("B"): lambda m: _bytes(m, 4),
    0x8E: lambda m: _bytes(m, 8),
    0x96: lambda m: _bytes(m, 8),  # a bytearray
    ord("]"): lambda m: m.stack.append([]),
    ord(")"): lambda m: m.stack.append(()),
    ord("}"): lambda m: m.stack.append({}),
    0x8F: lambda m: m.stack.append(set()),
    ord("l"): lambda m: m.stack.append(m.since_mark()),
    ord("d"): _dict_since_mark,
    ord("t"): lambda m: m.stack.append(tuple(m.since_mark())),
    0x85: lambda m: _tuple(m, 1),
    0x86: lambda m: _tuple(m, 2),
    0x87: lambda m: _tuple(m, 3),
    0x91: lambda m: m.stack.append(frozenset(m.since_mark())),
    ord("a"): lambda m: _append(m.stack[-2], [m.stack.pop()]),
    ord("e"): lambda m: _append_run(m),
    ord("s"): lambda m: _set_one(m),
    ord("u"): lambda m: _set_run(m),
    0x90: _add,
    ord("h"): lambda m: m.stack.append(m.memo[m.number(1)]),
    ord("j"): lambda m: m.stack.append(m.memo[m.number(4)]),
    ord("q"): lambda m: _put(m, m.number(1)),
    ord("r"): lambda m: _put(m, m.number(4)),
    0x94: lambda m: _put(m, len(m.memo)),
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _reduce,
    ord("b"): _build,
    0x81: _new,
    0x92: _new_with_names,
    ord("Q"): _persistent,
}
"""Protocols 2 to 5. Extension codes and out-of-band buffers have no place in a file; text opcodes of protocol 0 and 1
are written by nothing that writes checkpoints."""

_OPERATIONS: list[Callable[[_Machine], Any] | None] = [_BY_CODE.get(code) for code in range(256)]


def _append_run(machine: _Machine) -> None:
    items = machine.since_mark()
    _append(machine.stack[-1], items)


def _set_one(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set(machine.stack[-1], [key, value])


def _set_run(machine: _Machine) -> None:
    flat = machine.since_mark()
    _set(machine.stack[-1], flat)
