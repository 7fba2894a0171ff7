"""Records every collective, send and receive, at every level, without a dispatch mode.

torch runs each of them as a dispatcher operator (`c10d::…`), also when a C++ reducer, a sharding library, a functional
collective or a function that was imported by name calls it. While a window is open these operators have a kernel of
ours between the dispatch modes and the backends (the key BackendSelect), which redispatches to the backend with the
same arguments and gives back what it got. Outside a window there is no kernel and nothing to pay.

Nothing is ever waited for: a send and a receive that waited here for each other would hang for good. An operator
returns before it is done, so its outputs are digested right after the program itself waited for them; where it waits
inside C++, when the backward pass or the step ends, if they are done by then.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from detrun.recorder.trace.leaves import aside, keep_begin, keep_end

if TYPE_CHECKING:
    from detrun.recorder.trace.tracer import Deferred, Draft, Tracer


class Shape(NamedTuple):
    """Which arguments an operator reads, which it writes, and who takes part.

    reads, writes: positions of tensor arguments (tensors or lists of them); what is written only is no input. root:
    position of the root's rank in the group; reads_at_root and writes_at_root: only the root reads (writes). peer:
    position of the other side of a point-to-point operation. scalars: positions of plain arguments that decide what
    it does.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    group: int
    kind: str = "collective"
    root: int | None = None
    reads_at_root: bool = False
    writes_at_root: bool = False
    peer: int | None = None
    scalars: tuple[tuple[str, int], ...] = ()


SHAPES = {
    "allreduce_": Shape((0,), (0,), 1),
    "allreduce_coalesced_": Shape((0,), (0,), 1),
    "allgather_": Shape((1,), (0,), 2),
    "_allgather_base_": Shape((1,), (0,), 2),
    "allgather_coalesced_": Shape((1,), (0,), 2),
    "allgather_into_tensor_coalesced_": Shape((1,), (0,), 2),
    "reduce_scatter_": Shape((1,), (0,), 2),
    "_reduce_scatter_base_": Shape((1,), (0,), 2),
    "reduce_scatter_tensor_coalesced_": Shape((1,), (0,), 2),
    "alltoall_": Shape((1,), (0,), 2),
    "alltoall_base_": Shape((1,), (0,), 2, scalars=(("output_splits", 3), ("input_splits", 4))),
    "broadcast_": Shape((0,), (0,), 1, root=2, reads_at_root=True),
    "reduce_": Shape((0,), (0,), 1, root=3, writes_at_root=True),
    "gather_": Shape((1,), (0,), 2, root=3, writes_at_root=True),
    "scatter_": Shape((1,), (0,), 2, root=3, reads_at_root=True),
    "send": Shape((0,), (), 1, kind="send", peer=2, scalars=(("tag", 3),)),
    "recv_": Shape((), (0,), 1, kind="recv", peer=2, scalars=(("tag", 3),)),
    "recv_any_source_": Shape((), (0,), 1, kind="recv", scalars=(("tag", 2),)),
    "barrier": Shape((), (), 1),
    "monitored_barrier_": Shape((), (), 1),
}
"""The operators of torch's `c10d` library (torch/csrc/distributed/c10d/Ops.cpp)."""

_OBJECTS = frozenset(
    {
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
    }
)
_C10D_FILE = "distributed_c10d.py"
"""Python functions that send pickled objects: paths, times and host names, which differ between equal runs."""

_WAITS = ("wait", "synchronize", "block_current_stream")


@dataclass(eq=False)
class _InFlight:
    """An operator whose outputs may not be there yet. Holds its Work until the program has waited for it. future: the
    one of the Work, where its end means that host memory is written."""

    work: Any
    future: Any
    storages: list[int]
    entry: Deferred | None = None

    def is_done(self) -> bool:
        if self.future is not None and self.future.done():
            return True
        return bool(self.work is not None and self.work.is_completed())


@dataclass
class Collectives:
    """Installed while a window is open: `open` and `close`, in pairs. Never raises into the program."""

    tracer: Tracer
    _library: Any = None
    _restore: list[Callable[[], None]] = field(default_factory=list)
    _flying: dict[int, list[_InFlight]] = field(default_factory=dict)
    _coalesced: list[_InFlight] | None = None
    _groups: dict[str, tuple[str, list[int]]] = field(default_factory=dict)

    def open(self) -> None:
        """Put the kernels in place. Does nothing where torch has no distributed part."""
        if self._library is not None or not torch.distributed.is_available():
            return
        self._library = library = _library("c10d")
        for name, shape in SHAPES.items():
            packet = getattr(torch.ops.c10d, name, None)
            if packet is not None:
                library.impl(name, self._kernel(name, shape, packet.default), "BackendSelect", with_keyset=True)
        self._functional = _library("_c10d_functional")
        self._functional.impl("wait_tensor", self._wait_tensor(), "BackendSelect", with_keyset=True)
        for name in _WAITS:
            self._patch(torch.distributed.Work, name, self._waiting)
        self._patch(torch.distributed.ProcessGroup, "_start_coalescing", self._starting)
        self._patch(torch.distributed.ProcessGroup, "_end_coalescing", self._ending)

    def close(self) -> None:
        """Take the kernels away again."""
        if self._library is None:
            return
        for library in (self._library, self._functional):
            library._destroy()
        self._library = None
        for restore in reversed(self._restore):
            restore()
        self._restore.clear()
        self._flying.clear()
        self._groups.clear()
        self._coalesced = None

    # The kernels

    def _kernel(self, name: str, shape: Shape, operator: Any) -> Callable[..., Any]:
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        redispatch = operator.redispatch
        begins, ends = self._begins, self._ends

        def kernel(keyset: Any, *args: Any) -> Any:
            call = begins(name, shape, args)
            result = redispatch(keyset & below, *args)
            if call is not None:
                ends(*call, result)
            return result

        return kernel

    def _begins(self, name: str, shape: Shape, args: tuple[Any, ...]) -> tuple[Draft, list[Tensor]] | None:
        """The draft of a call, and the tensors that it will have written."""
        tracer = self.tracer
        try:
            group = torch.distributed.ProcessGroup.unbox(args[shape.group])
            at_root = shape.root is None or args[shape.root] == group.rank()
            reads = _tensors(args, shape.reads) if at_root or not shape.reads_at_root else []
            destinations = _tensors(args, shape.writes)
            if any(tensor.is_meta or hasattr(tensor, "fake_mode") for tensor in reads or destinations):
                return None  # the compiler tries out what it will do
            spans, members = self._members(group)
            scalars = [f"root={args[shape.root]}"] if shape.root is not None else []
            scalars += [f"{label}={args[at]!r}" for label, at in shape.scalars]
            if _sends_objects(reads or destinations):
                reads, destinations, scalars = [], [], [*scalars, "object"]
            peer = -1 if shape.peer is None else int(args[shape.peer])
            draft = tracer.begin(
                shape.kind,
                f"c10d.{name}",
                reads,
                scalars=" ".join(scalars),
                group=spans,
                peer=members[peer] if 0 <= peer < len(members) else peer,
                overwritten=destinations,
            )
            if draft is None:
                return None
            keep_begin(tracer, draft, reads)
            return draft, destinations if at_root or not shape.writes_at_root else []
        except Exception as error:  # noqa: BLE001 - the program's run is worth more than its record
            tracer.fail(error)
            return None

    def _ends(self, draft: Draft, outputs: list[Tensor], result: Any) -> None:
        tracer = self.tracer
        try:
            boxed = result[-1] if isinstance(result, tuple) else result
            work = torch.distributed.Work.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else None
            if not outputs or (work is None and self._coalesced is None):
                tracer.end(draft, outputs)
                keep_end(tracer, draft, outputs)
                return
            on_host = all(tensor.is_cpu for tensor in outputs)
            flying = _InFlight(work, _future(work) if on_host else None, [_storage(tensor) for tensor in outputs])
            if self._coalesced is not None:
                flying.work = flying.future = None  # several in one: what says when they are done comes at the end
                self._coalesced.append(flying)
            else:
                self._flying[id(work)] = [flying]
            flying.entry = tracer.defer(draft, outputs, flying.is_done, ordered=not on_host)
        except Exception as error:  # noqa: BLE001 - as above
            tracer.fail(error)

    # What tells that the program has waited

    def sweep(self) -> None:
        """A point at which the program has waited for what C++ started, as the end of a backward pass."""
        if self._flying:
            self.tracer.sweep()
            done = [key for key, several in self._flying.items() if all(_is_read(flying) for flying in several)]
            for key in done:
                del self._flying[key]

    def _waited(self, works: Iterable[list[_InFlight]]) -> None:
        """The program has waited for these: what they wrote is there for it, and so for the tracer."""
        entries = [flying.entry for several in works for flying in several]
        self.tracer.arrived([entry for entry in entries if entry is not None])

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        flying = self._flying

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            several = flying.get(id(work))
            if several is None:
                return original(work, *args, **kwargs)
            with aside(self.tracer):  # some copy their result into place here
                result = original(work, *args, **kwargs)
            flying.pop(id(work), None)
            self._waited([several])
            return result

        return wait

    def _wait_tensor(self) -> Callable[..., Any]:
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        redispatch = torch.ops._c10d_functional.wait_tensor.default.redispatch
        flying = self._flying

        def wait_tensor(keyset: Any, tensor: Tensor) -> Any:
            result = redispatch(keyset & below, tensor)
            if flying and not tensor.is_meta:
                storage = _storage(tensor)
                done = [key for key, several in flying.items() if any(storage in one.storages for one in several)]
                self._waited([flying.pop(key) for key in done])
            return result

        return wait_tensor

    def _starting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start(group: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(group, *args, **kwargs)
            self._coalesced = []
            return result

        return start

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def end(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(group, *args, **kwargs)
            several, self._coalesced = self._coalesced or [], None
            if work is None:
                self._waited([several])
            elif several:
                for flying in several:
                    flying.work = work  # no future: on a device it ends when the work is queued
                self._flying[id(work)] = several
            return work

        return end

    def _patch(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, wrap(original))
            self._restore.append(lambda: setattr(owner, name, original))

    def _members(self, group: Any) -> tuple[str, list[int]]:
        """The global ranks of a group, as text and in the order of their ranks in the group."""
        name = group.group_name
        known = self._groups.get(name)
        if known is None:
            ranks = torch.distributed.distributed_c10d._world.pg_group_ranks.get(group)
            members = sorted(ranks, key=ranks.__getitem__) if ranks else list(range(group.size()))
            known = self._groups[name] = (rank_spans(members), members)
        return known


def rank_spans(ranks: Sequence[int]) -> str:
    """Ranks as text: "0-3", "0,2", "0-1,6-7"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _library(namespace: str) -> Any:
    made: Any = torch.library.Library  # has no types
    return made(namespace, "IMPL")


def _future(work: Any) -> Any:
    try:
        return work.get_future()
    except (RuntimeError, NotImplementedError):  # sends and receives have none
        return None


def _is_read(flying: _InFlight) -> bool:
    return flying.entry is None or flying.entry.draft.complete


def _tensors(args: Sequence[Any], positions: Iterable[int]) -> list[Tensor]:
    found: list[Tensor] = []
    for at in positions:
        _collect(args[at], found)
    return found


def _collect(item: Any, found: list[Tensor]) -> None:
    if isinstance(item, Tensor):
        found.append(item)
    elif isinstance(item, (list, tuple)):
        for entry in item:
            _collect(entry, found)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _sends_objects(tensors: Sequence[Tensor]) -> bool:
    """Does a function that pickles objects call? Only where the dtypes are those of its sizes and bytes."""
    if any(tensor.dtype not in (torch.uint8, torch.int64) for tensor in tensors):
        return False
    frame = sys._getframe(3)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code.co_name in _OBJECTS and frame.f_code.co_filename.endswith(_C10D_FILE):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
