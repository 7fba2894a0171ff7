"""What is true of every call of one operator, worked out once from its schema and the rules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from detrun.recorder.trace import rules

READ, REPLACED, CHANGED, PLAIN = "read", "replaced", "changed", "plain"


class Facts(NamedTuple):
    """func: the operator. call: what it calls. name: "aten.mm.default". skip: no event at all. creator, grower: see
    `rules`. places, words: what is done to each argument by position and by name: READ, REPLACED (written, not read),
    CHANGED (both), or PLAIN for one that holds no tensor. writes: the written ones, as (position, name). fresh: which
    results are no written argument given back. draws: whether it draws random numbers. silent: the argument (name,
    place) that makes it draw none if it is 0. router: which result says where something goes, -1 for none. functional:
    a collective whose result is there only after its wait. scratch: which result has gaps that nothing writes, -1 for
    none."""

    func: Any
    call: Any
    name: str
    skip: bool
    creator: bool
    grower: bool
    places: tuple[str, ...]
    words: dict[str, str]
    writes: tuple[tuple[int, str], ...]
    fresh: tuple[bool, ...]
    draws: bool
    silent: tuple[str, int] | None
    router: int
    functional: bool
    waits: bool
    copies: bool
    scratch: int = -1
    only: int = -2
    """The written argument that is all an operator gives back, -1 for one fresh result, -2 where it is more."""


def facts_of(func: Any) -> Facts:
    """Raises AttributeError for what is no OpOverload."""
    schema = func._schema
    namespace, _, base = schema.name.partition("::")
    packet = f"{namespace}.{base}"
    name = f"{packet}.{schema.overload_name or 'default'}"
    hidden = rules.HIDDEN_WRITES.get(packet, ())
    places: list[str] = []
    words: dict[str, str] = {}
    writes: list[tuple[int, str]] = []
    replaced_one = False
    draws = torch.Tag.nondeterministic_seeded in func.tags or packet in rules.DRAWING
    for position, argument in enumerate(schema.arguments):
        kind = str(argument.type)
        draws = draws or "Generator" in kind
        done = PLAIN
        if "Tensor" in kind:
            done = READ
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written:
                first = packet in rules.OVERWRITERS and not replaced_one
                done = REPLACED if first or argument.is_out or argument.kwarg_only else CHANGED
                replaced_one = True
            elif argument.name in hidden:
                written, done = True, CHANGED
            if written:
                writes.append((position if not argument.kwarg_only else -1, argument.name))
        words[argument.name] = done
        if not argument.kwarg_only:
            places.append(done)
    is_view = bool(getattr(func, "is_view", False))
    partial, _ = rules.PARTIAL.get(packet, (-1, ""))
    scratch, _ = rules.SCRATCH.get(packet, (-1, ""))
    facts = Facts(
        func=func,
        call=func._op,
        name=name,
        skip=is_view or packet in rules.ALIASES or namespace in rules.SKIPPED_NAMESPACES,
        creator=packet in rules.CREATORS,
        grower=packet in rules.GROWERS,
        places=tuple(places),
        words=words,
        writes=tuple(writes),
        fresh=tuple(
            (result.alias_info is None or not result.alias_info.is_write) and at not in (partial, scratch)
            for at, result in enumerate(schema.returns)
        ),
        draws=draws,
        silent=rules.DRAWS_NOTHING.get(packet),
        router=rules.ROUTERS.get(packet, -1),
        functional=namespace == "_c10d_functional" and base != "wait_tensor",
        waits=packet == "_c10d_functional.wait_tensor",
        copies=packet in ("aten.copy_", "aten._to_copy", "aten._foreach_copy_"),
        scratch=scratch,
    )
    special = facts.functional or facts.waits or facts.copies or scratch >= 0
    if special or len(facts.fresh) != 1 or str(schema.returns[0].type) != "Tensor":
        return facts
    if not writes and facts.fresh[0]:
        return facts._replace(only=-1)
    if len(writes) == 1 and writes[0][0] >= 0 and not facts.fresh[0]:
        return facts._replace(only=writes[0][0])
    return facts
