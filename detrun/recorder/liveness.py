"""Which variables of a running frame may still be read before they are written again.

A backward dataflow over the bytecode. Whatever a program computes anew in every step is dead between two of its steps,
even though the variable still holds the old value; what is live is what a resumed program has to have again.

Instructions are recognised by their names, whose parts have meant the same from Python 3.10 to 3.14 (`LOAD_FAST`,
`STORE_FAST_LOAD_FAST`, `LOAD_FAST_BORROW`, …). Run on 3.10, 3.11, 3.12 and 3.13; on 3.14 not yet.
Standard library only.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

_FAST = re.compile(r"(LOAD|STORE|DELETE)_FAST")
_NAMED = re.compile(r"(LOAD|STORE|DELETE)_(?:NAME|GLOBAL|FROM_DICT_OR_GLOBALS)")
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "INTERPRETER_EXIT"})
_GOES = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE", "JUMP_NO_INTERRUPT"})
_SETUPS = frozenset({"SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH"})
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_SNAPSHOT_READERS = frozenset({"locals", "vars", "dir", "eval", "exec"})


def live_variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame that are live after the instruction it is at, in the order of its locals.

    In a module's frame these are global names; those that any function of the module reads count as live. Nothing is
    kept alive: the dictionary that older Pythons leave on a frame whose locals were read is emptied again.
    """
    code = frame.f_code
    names = live_names(code, frame.f_lasti)
    values: Mapping[str, Any] = frame.f_locals
    live = {name: values[name] for name in list(values) if name in names}
    if (
        isinstance(values, dict)
        and sys.version_info < (3, 13)
        and code.co_flags & inspect.CO_OPTIMIZED
        and not _flow(code).may_hold_snapshot  # else it may be the program's own dictionary
    ):
        values.clear()
    return live


@lru_cache(maxsize=1024)
def live_names(code: CodeType, lasti: int) -> frozenset[str]:
    """Names that may be read after the instruction at byte `lasti` (-1: before the first one) and before they are
    written. Cell and free variables always count: another function may read them at any time."""
    flow = _flow(code)
    # While it calls, a frame may point to the space for caches behind the instruction.
    live = flow.before[0] if lasti < 0 else flow.after[bisect_right(flow.offsets, lasti) - 1]
    return frozenset(name for name, bit in flow.bits.items() if live & bit) | flow.always


class _Flow:
    """Liveness at every instruction of a code object; sets of names are bit sets.

    offsets: where each instruction begins, in bytes. before, after: what is live there. may_hold_snapshot: the code
    calls `locals` or one of its kin, and may have kept what that returned.
    """

    def __init__(self, code: CodeType) -> None:
        fast = bool(code.co_flags & inspect.CO_OPTIMIZED)
        instructions = list(dis.get_instructions(code))
        self.offsets = [instruction.offset for instruction in instructions]
        self.bits: dict[str, int] = {}
        self.may_hold_snapshot = any(
            name in _SNAPSHOT_READERS for instruction in instructions for _, name in _events(instruction, _NAMED)
        )
        self.always = frozenset((*code.co_cellvars, *code.co_freevars) if fast else _read_by_functions(code))
        events = [list(_events(instruction, _FAST if fast else _NAMED)) for instruction in instructions]
        for name in (name for listed in events for _, name in listed):
            self.bits.setdefault(name, 1 << len(self.bits))
        swallows = _ends_of_swallowing(instructions)
        after = [self._successors(i, at, jumps=i not in swallows) for i, at in enumerate(instructions)]
        self._solve(events, after, self._handlers(code))

    def _successors(self, index: int, instruction: dis.Instruction, *, jumps: bool) -> list[int]:
        name = instruction.opname
        if name in _ENDS:
            return []
        after = [index + 1] if name not in _GOES and index + 1 < len(self.offsets) else []
        if jumps and instruction.opcode in _JUMPS and isinstance(instruction.argval, int):
            after.append(self._index(instruction.argval))
        return after

    def _index(self, offset: int) -> int:
        return max(0, bisect_right(self.offsets, offset) - 1)

    def _handlers(self, code: CodeType) -> list[list[int]]:
        """For each instruction, where it may lead by raising."""
        handlers: list[list[int]] = [[] for _ in self.offsets]
        entries = getattr(dis.Bytecode(code), "exception_entries", None)
        ranges = [(e.start, e.end, e.target) for e in entries or ()]
        if entries is None:  # 3.10 keeps a stack of blocks instead; a block reaches to its handler at most
            ranges = [(i.offset, i.argval, i.argval) for i in dis.get_instructions(code) if i.opname in _SETUPS]
        for start, end, target in ranges:
            for index in range(self._index(start), bisect_right(self.offsets, end - 1)):
                handlers[index].append(self._index(target))
        return handlers

    def _solve(self, events: list[list[tuple[str, str]]], after: list[list[int]], handlers: list[list[int]]) -> None:
        uses, keeps = [], []
        for listed in events:
            use, keep = 0, ~0
            for action, name in reversed(listed):
                if action == "LOAD":
                    use |= self.bits[name]
                else:
                    use &= ~self.bits[name]
                    keep &= ~self.bits[name]
            uses.append(use)
            keeps.append(keep)
        count = len(events)
        self.before, self.after = [0] * count, [0] * count
        changed = True
        while changed:
            changed = False
            for index in range(count - 1, -1, -1):
                follows = 0
                for successor in after[index]:
                    follows |= self.before[successor]
                raised = 0
                for handler in handlers[index]:
                    raised |= self.before[handler]
                before = uses[index] | follows & keeps[index] | raised
                if before != self.before[index] or follows | raised != self.after[index]:
                    self.before[index], self.after[index] = before, follows | raised
                    changed = True


def _ends_of_swallowing(instructions: list[dis.Instruction]) -> set[int]:
    """Jumps of a `with` whose manager swallows an exception. Hardly one does; if it counted, whatever a `with` block
    assigns would seem to be read behind it without having been assigned."""
    names = [instruction.opname for instruction in instructions]
    begun = [index for index, name in enumerate(names) if name == "WITH_EXCEPT_START"]
    return {i for index in begun for i in range(index + 1, index + 4) if "IF_TRUE" in "".join(names[i : i + 1])}


@lru_cache(maxsize=256)
def _flow(code: CodeType) -> _Flow:
    return _Flow(code)


def _events(instruction: dis.Instruction, pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """What an instruction does to variables, in order: (LOAD | STORE | DELETE, name)."""
    actions = pattern.findall(instruction.opname)
    if not actions:
        return
    argument = instruction.argval
    names = argument if isinstance(argument, tuple) else (argument,)
    if len(names) != len(actions):  # an instruction of a later Python: to read is the safe guess
        actions = ["LOAD"] * len(names)
    for action, name in zip(actions, names, strict=True):
        yield action, str(name)


def _read_by_functions(code: CodeType) -> Iterator[str]:
    """Global names that the functions, classes and comprehensions inside a code object read."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for instruction in dis.get_instructions(inner):
                yield from (name for action, name in _events(instruction, _NAMED) if action == "LOAD")
            yield from _read_by_functions(inner)
