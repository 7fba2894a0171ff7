"""Finds what a program keeps beside its modules, optimizers, schedulers and scalers: its own generators, averages of
the parameters, attributes, tensors and counters, under the names that the program has for them.

The walk starts at the variables that are live in the program's frames (`liveness`), at the root modules and at the
globals of the program's modules. It runs none of the program's code, draws nothing, keeps nothing alive, and is
bounded: at most `MOST_OBJECTS` objects, `reach.MOST_CHILDREN` of one container.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from detrun.recorder import live_words, reach
from detrun.recorder.copies import Models, holds_optimizer_state, module_tensors
from detrun.recorder.owned import is_feed_type, is_program_file, is_program_type
from detrun.recorder.places import Entry, Place, loops, module_globals, variables
from detrun.recorder.streams import is_generator, is_global, is_saved_state, stream_of
from detrun.records.state_row import Component, Standing

MOST_OBJECTS = 20_000
_LONG = 16
"""Numbers in a list that are still told one by one; more are an array."""
_MODULE_OWN = frozenset([*nn.Module().__dict__, "call_super_init", "dump_patches", "T_destination"])
_OPTIMIZER_OWN = frozenset(["defaults", "state", "param_groups"])
_LOADER_STATE = frozenset(
    ["dataset", "sampler", "batch_sampler", "generator", "_iterator", "_dataset", "_dataset_iter"]
)
_LOADER_STATE |= {"_sampler_iter", "_index_sampler", "_num_yielded", "_base_seed", "_generator"}
"""Of torch's loaders and their iterators; the rest are settings and what workers happen to have done."""
UNCOMPARED: dict[type, frozenset[str]] = {}
"""Attributes of frameworks' classes of which adapters know that they are no state: what they hold only explains."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Found(NamedTuple):
    """One piece. value: a tensor, a numpy array or number, a bool, int, float or complex, a tuple of such numbers, a
    text, a generator, or the saved state of one (component `rng`; `streams.generator_row` makes its row)."""

    component: Component
    name: str
    standing: Standing
    value: Any


def find(
    frame: types.FrameType | None,
    roots: Sequence[nn.Module | tuple[str, nn.Module]],
    known_ids: Iterable[int],
    *,
    warn: Callable[[str], None] | None = None,
) -> list[Found]:
    """Everything that is found from `frame` upwards, in an order that equal programs share.

    roots: the root modules, or (prefix that their parameters are named with, module). known_ids: ids of objects that
    other parts of the state file cover (parameters, optimizers' tensors, …): neither told nor entered; torch's
    optimizers, schedulers and scalers never are. warn: is told where something was cut off.
    """
    named = [root if isinstance(root, tuple) else ("", root) for root in roots]
    # A tensor subclass may answer the reading of any attribute with code of its own.
    with torch._C.DisableTorchFunctionSubclass():
        walk = _Walk(named, known_ids)
        walk.run([(Place(prefix, type(root).__name__, "module"), root) for prefix, root in named])
        walk.enter(variables(frame))
        walk.run(module_globals(frame))
        walk.run(loops())
    if warn is not None and walk.cut:
        more = f" and {len(walk.cut) - 3} more" if len(walk.cut) > 3 else ""
        warn(f"live objects: not looked at to the end: {', '.join(walk.cut[:3])}{more}")
    return list(walk.found.values())


class _Walk:
    """found: by (component, name). cut: names of what was not looked at to the end."""

    def __init__(self, roots: Sequence[tuple[str, nn.Module]], known_ids: Iterable[int]) -> None:
        self.found: dict[tuple[str, str], Found] = {}
        self.cut: list[str] = []
        self._models = Models(roots)
        self._known = set(known_ids)
        self._seen: set[int] = set()
        self._held: list[Any] = []  # an object that lived for a moment must not lend its id to another
        self._kinds: dict[type, _Visit] = {}  # functions, not methods: those would hold this walk, and it the program
        self._variables: dict[str, int] = {}
        self._visited = 0

    def enter(self, variables: list[Entry]) -> None:
        """The variables of the program's frames."""
        self._variables = {place.name: id(value) for place, value in reversed(variables)}
        self.run(variables)

    def run(self, level: list[Entry]) -> None:
        """Breadth first, on each level by name: what has several names is found under the nearest and shortest."""
        while level:
            level.sort(key=lambda entry: (len(entry[0].name), entry[0].name))
            following: list[Entry] = []
            for place, item in level:
                if self._visited >= MOST_OBJECTS:
                    self.cut.append(place.name)
                    return
                visit = self._kinds.get(type(item)) or self._visitor(type(item))
                if visit is _Walk._skip:
                    continue
                self._visited += 1
                following += visit(self, place, item)
            level = following

    def _visitor(self, kind: type) -> _Visit:
        own = _Walk
        chosen: list[tuple[bool, _Visit]] = [
            (kind in (bool, int, float, complex) or issubclass(kind, np.number), own._number),
            (issubclass(kind, Tensor) or issubclass(kind, np.ndarray), own._tensor),
            (is_generator(kind), own._generator),
            (issubclass(kind, nn.Module), own._module),
            (reach.is_container(kind), own._container),
            (reach.is_callable_holder(kind) or reach.is_iterator(kind), own._holder),
            (issubclass(kind, (type, types.ModuleType, enum.Enum, BaseException, LRScheduler, str, bytes)), own._skip),
            (issubclass(kind, Optimizer), own._optimizer if is_program_type(kind) else own._skip),
            (is_feed_type(kind) or is_program_type(kind) or kind is types.SimpleNamespace, own._object),
        ]
        self._kinds[kind] = next((visit for fits, visit in chosen if fits), own._skip)
        return self._kinds[kind]

    def _skip(self, _place: Place, _item: Any) -> Iterable[Entry]:
        return ()

    def _first(self, item: Any, *, entered: bool = False) -> bool:
        """Is it looked at for the first time, and by nobody else? entered: also where others tell of it."""
        if id(item) in self._seen or (id(item) in self._known and not entered):
            return False
        self._seen.add(id(item))
        self._held.append(item)
        return True

    def _tell(self, place: Place, component: Component, standing: Standing, value: Any, name: str = "") -> None:
        name = name or place.name
        shown, count = name, 1
        while (component, shown) in self.found:
            shown = f"{place.owner}.{name}" + (f"#{count}" if count > 1 else "")
            count += 1
        self.found[component, shown] = Found(component, shown, standing, value)

    # What is told

    def _number(self, place: Place, value: Any) -> Iterable[Entry]:
        last = place.name.rpartition(".")[2]
        if isinstance(value, float) and live_words.says(last, live_words.CLOCKS):
            return ()
        if not live_words.says(last, live_words.HANDLES):
            self._tell(place, *self._standing(place, soft=True), value)
        return ()

    def _tensor(self, place: Place, item: Any) -> Iterable[Entry]:
        if not self._first(item):
            return ()
        if isinstance(item, np.ndarray):
            # What is mapped from a file to be read is data, such as an index of samples, and may be larger than memory.
            mapped = isinstance(item, np.memmap) and not item.flags.writeable
            if not item.dtype.hasobject and not mapped:
                self._tell(place, *self._standing(place), item)
        elif self._is_state(item):
            if is_saved_state(item) and place.origin != "feed" and any(w in place.name for w in live_words.DRAWN):
                self._tell(place, "rng", "soft" if place.proven or place.quiet else "surviving", item)
            elif self._models.is_flat_copy(item):
                self._tell(place, *self._copy_standing(place), item)
            else:
                self._tell(place, *self._standing(place), item)
        return ()

    def _generator(self, place: Place, item: Any) -> Iterable[Entry]:
        stream = stream_of(item)
        if not is_global(item) and self._first(stream):
            self._tell(place, "rng", "soft" if place.quiet else "surviving", item)
        return ()

    def _is_state(self, tensor: Tensor) -> bool:
        """A product of autograd is made anew in every step; what shares memory with a known tensor is that tensor."""
        return tensor.is_leaf and not self._models.shares_memory(tensor)

    def _standing(self, place: Place, *, soft: bool = False) -> tuple[Component, Standing]:
        if place.origin == "feed":
            return "loader", "soft"
        shown_only = place.quiet or live_words.says(place.name, live_words.SAVED)
        if place.origin == "module":
            return "module-state", "soft" if shown_only else "surviving"
        shown_only = shown_only or live_words.says(place.name, live_words.BOOKKEEPING)
        return "local", "soft" if soft or shown_only else "surviving"

    def _copy_standing(self, place: Place, *, module: bool = False) -> tuple[Component, Standing]:
        """What is shaped like the parameters lives from step to step if a live variable holds it or its name says so;
        else it may be something that each step leaves behind, such as copies of the gradients."""
        average = module or (live_words.says(place.name, live_words.AVERAGES) and "exp_avg" not in place.name)
        moment = not average and live_words.says(place.name, live_words.OPTIMIZER_STATE)
        component: Component = "optimizer" if moment else "ema"
        left_behind = not place.proven and live_words.says(place.name, live_words.GRADIENTS)
        if place.quiet or left_behind or live_words.says(place.name, live_words.SAVED):
            return "ema", "soft"
        return component, "hard" if place.proven or average or moment else "surviving"

    def _tell_copy(self, place: Place, pairs: Iterable[tuple[str, Tensor]], *, module: bool = False) -> None:
        component, standing = self._copy_standing(place, module=module)
        for name, tensor in pairs:
            if self._is_state(tensor) and self._first(tensor):
                shown = f"{name}.{place.name}" if component == "optimizer" else f"{place.name}.{name}"
                self._tell(place, component, standing, tensor, shown.strip("."))

    # What is entered

    def _container(self, place: Place, item: Any) -> Iterable[Entry]:
        kind = type(item)
        numbers = reach.plain_numbers(item, kind)
        if numbers is not None and (not issubclass(kind, dict) or len(numbers) > _LONG):
            # Equal tuples may be one object: only what can change is told once.
            if issubclass(kind, tuple) or self._first(item):
                self._tell(place, *self._standing(place, soft=True), _as_value(numbers))
            return ()
        if not self._first(item):
            return ()
        if issubclass(kind, dict):
            if holds_optimizer_state(item):
                return ()
            place = replace(place, quiet=place.quiet or self._models.is_checkpoint(item))
        pairs = self._models.copy_in(item, kind)
        if pairs is not None:
            self._tell_copy(place, pairs)
        members = reach.members(item, kind, self._models.names_of)
        if len(members) < reach.size(item, kind) and self._has_more(item, kind):
            self.cut.append(place.name)
        found = [(place.child(suffix, proven=place.proven), value) for suffix, value in members]
        if is_program_type(kind):
            found += [(place.child(f".{name}"), value) for name, value in reach.attributes(item)]
        return found

    def _has_more(self, item: Any, kind: type) -> bool:
        """Is there anything to see in a container that is not looked at to its end?"""
        if issubclass(kind, (set, frozenset)):
            return False
        return any((self._kinds.get(of) or self._visitor(of)) is not _Walk._skip for of in reach.kinds_in(item, kind))

    def _holder(self, place: Place, item: Any) -> Iterable[Entry]:
        code: types.CodeType | None = None
        if type(item) is types.FunctionType:
            code = item.__code__
        elif type(item) is types.GeneratorType:
            code = item.gi_code
        inner = code is not None and not is_program_file(code.co_filename)
        if (inner and place.origin != "feed") or not self._first(item):
            return ()
        live = place.proven and type(item) is types.GeneratorType
        inner = inner or place.quiet
        return [
            (place.child(suffix, proven=live, quiet=inner), value)
            for suffix, value in reach.inside(item)
            if self._variables.get(suffix[1:]) != id(value)  # a closure's variable is that of the frame around it
        ]

    def _object(self, place: Place, item: Any) -> Iterable[Entry]:
        if not self._first(item):
            return ()
        kind = type(item)
        if any(live_words.says_feed(base.__name__) or is_feed_type(base) for base in kind.__mro__[:-1]):
            place = replace(place, origin="feed")
        wanted = _LOADER_STATE if is_feed_type(kind) and "DataLoader" in kind.__name__ else None
        uncompared = _uncompared(kind)
        return [
            (place.child(f".{name}", quiet=name in uncompared), value)
            for name, value in reach.attributes(item)
            if "__" not in name and (wanted is None or name in wanted)
        ]

    def _optimizer(self, place: Place, item: Any) -> Iterable[Entry]:
        if not self._first(item, entered=True):
            return ()
        return [
            (place.child(f".{name}"), value)
            for name, value in reach.attributes(item)
            if name not in _OPTIMIZER_OWN and not name.startswith("_")
        ]

    def _module(self, place: Place, item: nn.Module) -> Iterable[Entry]:
        if id(item) in self._seen:
            return ()
        is_root = self._models.is_root(item)
        if not is_root:
            pairs = self._models.copy_of_module(item)
            if pairs is not None:
                self._tell_copy(place, pairs, module=True)
            else:
                for name, tensor in module_tensors(item):
                    if self._is_state(tensor) and self._first(tensor):
                        self._tell(place, "module-state", "surviving", tensor, f"{place.name}.{name}".strip("."))
        else:
            self._tell_switches(place, item)
        found: list[Entry] = []
        stack: list[tuple[str, Any]] = [("", item)]
        while stack:
            path, module = stack.pop()
            if not self._first(module, entered=True):
                continue
            here = (
                replace(place.child(path), origin="module") if path else replace(place, origin="module", proven=False)
            )
            found += self._attributes_of(here, module)
            inner = reach.instance_dict(module).get("_modules")
            children = list(inner.items()) if isinstance(inner, dict) else []
            stack += [(f"{path}.{name}", child) for name, child in reversed(children) if child is not None]
        return found

    def _tell_switches(self, place: Place, root: nn.Module) -> None:
        """What a program switches off in a model: parameters that are frozen, parts that rest while the whole trains.
        A row each, which is there with nothing switched off as well."""
        frozen = [name for name, parameter in root.named_parameters() if not parameter.requires_grad]
        mode = reach.instance_dict(root).get("training")
        resting = [name for name, part in root.named_modules() if reach.instance_dict(part).get("training") != mode]
        for switch, names in (("requires_grad", frozen), ("training", resting)):
            value = f"all but {', '.join(names)}" if names else "all"
            self._tell(place, "module-state", "surviving", value, f"{place.name}.{switch}".strip("."))

    def _attributes_of(self, place: Place, module: nn.Module) -> Iterator[Entry]:
        own = any(is_program_type(base) for base in type(module).__mro__[:-1])
        constants, uncompared = _constants(module) if own else (), _uncompared(type(module))
        for name, value in reach.attributes(module):
            if name in _HOOKS and isinstance(value, dict):
                for hook in list(value.values()):
                    shown = hook.__name__ if type(hook) is types.FunctionType else type(hook).__name__
                    yield place.child(f".{shown}"), hook
            elif name not in _MODULE_OWN and "__" not in name and (own or _may_change(name, value)):
                if name in constants and type(value) is not float:
                    continue
                there = place.of_module(f".{name}")
                yield replace(there, quiet=True) if name in uncompared else there, value


_Visit = Callable[[_Walk, Place, Any], Iterable[Entry]]


def _constants(module: nn.Module) -> frozenset[str]:
    """Attributes that torch's classes call constant, such as the sizes of a layer."""
    listed = [base.__dict__.get("__constants__", ()) for base in type(module).__mro__ if not is_program_type(base)]
    return frozenset(name for names in listed if isinstance(names, (list, tuple)) for name in names)


def _uncompared(kind: type) -> frozenset[str]:
    if not UNCOMPARED:
        return frozenset()
    return frozenset().union(*(UNCOMPARED.get(base, ()) for base in kind.__mro__))


def _may_change(name: str, value: object) -> bool:
    """An attribute of one of torch's own modules that may be state: its sizes are not."""
    if (type(value) is float and name != "eps") or isinstance(value, (Tensor, torch.Generator)):
        return True
    return reach.is_container(type(value)) and reach.plain_numbers(value, type(value)) is None


def _as_value(numbers: list[Any]) -> Any:
    if len(numbers) <= _LONG:
        return tuple(numbers)
    kinds = set(map(type, numbers))
    try:
        return np.array(numbers, dtype=np.float64 if float in kinds else np.int64)
    except OverflowError:
        return tuple(numbers)
