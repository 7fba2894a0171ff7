"""Writes a stand-alone script that repeats an operation on its kept inputs, and runs it before it is offered."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from detrun.diagnose.kept_call import (
    ITEMSIZES,
    CallTensor,
    CannotReproduceError,
    KeptCall,
    argument_expressions,
    call_of,
    check_repeatable,
    check_tensors,
    operator_expression,
)
from detrun.errors import ArchiveError
from detrun.records.kept_reader import KeptEvent

RUNS = 12
PATIENCE = 120.0
_ALIGNED = 64
"""Vectorized kernels treat a tensor by its address; what began at a multiple of this does so again."""

_REDUCTIONS = ["sum", "avg", "max", "min", "product"]
_COLLECTIVES: Mapping[str, tuple[str, list[str]]] = {
    "c10d.allreduce_": ("all_reduce", _REDUCTIONS),
    "c10d.allreduce_coalesced_": ("all_reduce", _REDUCTIONS),
    "c10d.reduce_scatter_": ("reduce_scatter", _REDUCTIONS),
    "c10d._reduce_scatter_base_": ("reduce_scatter", _REDUCTIONS),
    "c10d.allgather_": ("all_gather", [""]),
    "c10d._allgather_base_": ("all_gather", [""]),
}


@dataclass(frozen=True)
class Outcome:
    """What a script showed. distinct: results in `runs` runs; 0 where it did not run, `text` then says why.
    equal: by arm, how many runs gave what that arm got."""

    distinct: int
    runs: int
    text: str
    equal: Mapping[str, int]


def write_script(event: KeptEvent, folder: Path, *, other: KeptEvent | None = None) -> Path:
    """A script that repeats the operation of an event that arm a kept, and knows what arm b (other) got.

    Returns the script's path in `folder`, which is made. Raises CannotReproduceError, RecordError where what was kept
    cannot be read, ArchiveError where the script cannot be written.
    """
    calls = {"a": call_of(event)}
    if other is not None:
        calls["b"] = call_of(other)
    return write_operator_script(calls, folder)


def write_operator_script(
    calls: Mapping[str, KeptCall], folder: Path, *, module: str | None = None, search: Sequence[str] = ()
) -> Path:
    """The same of calls by arm; the first one's inputs are used. module: what registers the operator, where that is not
    torch; search: folders in which it is found."""
    call = next(iter(calls.values()))
    check_repeatable(call, module)
    name = _file_name(call.op)
    files = {f"input{number}.bin": tensor.raw for number, tensor in enumerate(call.inputs)}
    generator = None
    if call.generator is not None:
        kind, files["generator.bin"] = call.generator
        own = kind.partition(":")[0] == "cuda"
        default = "torch.cuda.default_generators[0]" if own else "torch.default_generator"
        generator = {"device": repr("cuda" if own else "cpu"), "default": default}
    offsets, memory = _laid_out(call.inputs)
    positional, named = argument_expressions(call)
    text = _render(
        "operator.py.j2",
        name=name,
        title=_title(call),
        module=repr(module) if module else None,
        search=repr(list(search)),
        inputs=[
            {
                "file": repr(f"input{number}.bin"),
                "dtype": f"torch.{tensor.dtype}",
                "shape": tensor.shape,
                "strides": tensor.strides,
                "storage": storage,
                "offset": offset,
            }
            for number, (tensor, (storage, offset)) in enumerate(zip(call.inputs, offsets, strict=True))
        ],
        memory=memory,
        device=repr("cuda" if any(tensor.device.startswith("cuda") for tensor in call.inputs) else "cpu"),
        kept={repr(arm): [digest(tensor) for tensor in each.outputs] for arm, each in calls.items()},
        operator=operator_expression(call.op),
        positional=positional,
        named=named,
        generator=generator,
        threads=max(1, call.threads),
        deterministic=bool(call.deterministic),
    )
    return _write(folder, name, text, files)


def write_collective_script(arms: Mapping[str, Mapping[int, KeptCall]], folder: Path) -> Path:
    """A script that repeats a collective with a process a member. arms: by arm, the call of each member by its rank.

    Returns and raises as `write_script`.
    """
    members = next(iter(arms.values()))
    ranks = sorted(members)
    first = members[ranks[0]]
    known = _COLLECTIVES.get(first.op.removesuffix(".default"))
    if known is None or len(ranks) < 2:
        raise CannotReproduceError("is a collective for which no small program is written")
    shapes = [(tensor.dtype, tensor.shape) for tensor in first.inputs]
    files: dict[str, bytes] = {}
    for rank, call in members.items():
        check_tensors(call.inputs)
        if [(tensor.dtype, tensor.shape) for tensor in call.inputs] != shapes:
            raise CannotReproduceError("has members whose inputs have different shapes")
        files.update({f"rank{rank}-input{number}.bin": tensor.raw for number, tensor in enumerate(call.inputs)})
    name = _file_name(first.op)
    kind, reductions = known
    whole = first.op.removesuffix(".default") == "c10d._allgather_base_"
    text = _render(
        "collective.py.j2",
        name=name,
        title=_title(first),
        members=ranks,
        shapes=shapes,
        kind=kind,
        reductions=reductions,
        gathered="[torch.cat(gathered)]" if whole else "gathered",
        kept={
            repr(arm): [[digest(tensor) for tensor in calls[rank].outputs] if rank in calls else [] for rank in ranks]
            for arm, calls in arms.items()
        },
    )
    return _write(folder, name, text, files)


def run_script(
    path: Path, python: str, runs: int = RUNS, *, seconds: float = 5.0, patience: float = PATIENCE
) -> Outcome:
    """Runs a script of ours and says what it showed. python: the program's interpreter. seconds: how long it goes on
    after `runs` of one result, since threads that race may take turns for a while on a busy machine. Raises nothing: a
    script that does not run is an outcome."""
    ours = ("DETRUN_", "TORCHELASTIC_")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"):
        plain.pop(name, None)
    # One pool of threads as the run had it; the script sets its size.
    plain.pop("OMP_NUM_THREADS", None)
    try:
        done = subprocess.run(
            [python, str(path), "--runs", str(runs), "--seconds", f"{seconds:g}", "--json"],
            env=plain,
            cwd=path.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(0, runs, f"did not end within {patience:.0f} s", {})
    except OSError as error:
        return Outcome(0, runs, f"could not be started: {error.strerror}", {})
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    try:
        found = json.loads(lines[-1]) if done.returncode == 0 and lines else None
        if found is not None:
            distinct, made = int(found["distinct"]), int(found["runs"])
            equal = {arm: int(count) for arm, count in found["equal"].items()}
            return Outcome(distinct, made, told(distinct, made, equal), equal)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return Outcome(0, runs, f"did not run: {said[-1][:300] if said else f'exit code {done.returncode}'}", {})


def told(distinct: int, runs: int, equal: Mapping[str, int]) -> str:
    """The outcome in a few words."""
    if distinct != 1:
        return f"{distinct} distinct results in {runs} runs"
    got = [arm for arm, count in equal.items() if count == runs]
    whose = f"equal to arm {' and arm '.join(got)}'s" if got else "equal to no arm's"
    return f"does not reproduce alone: 1 result in {runs} runs, {whose}"


def digest(tensor: CallTensor) -> str:
    """What the script computes of a result, over the kept bytes."""
    text = f"{tensor.dtype}{list(tensor.shape)}"
    return hashlib.blake2b(text.encode() + tensor.raw, digest_size=16).hexdigest()


def _laid_out(tensors: Sequence[CallTensor]) -> tuple[list[tuple[int, int]], list[int]]:
    """Where each tensor lies: the number of its memory and where it begins there in bytes; and the memories' sizes.

    Tensors that shared memory share it again, at the same distances, without what lay before the first of them.
    """
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for tensor in tensors:
        size = ITEMSIZES[tensor.dtype]
        begin = tensor.storage_offset * size
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.strides, strict=True))
        end = begin + (last + 1) * size if tensor.elements else begin
        begins[tensor.storage] = min(begin // _ALIGNED * _ALIGNED, begins.get(tensor.storage, begin))
        ends[tensor.storage] = max(end, ends.get(tensor.storage, 0))
    numbers = {storage: number for number, storage in enumerate(begins)}
    begins = {storage: begin // _ALIGNED * _ALIGNED for storage, begin in begins.items()}
    memory = [max(0, ends[storage] - begin) for storage, begin in begins.items()]
    if sum(memory) > _most(tensors):
        raise CannotReproduceError("was given tensors that lie too far apart in one memory")
    places = [
        (numbers[tensor.storage], tensor.storage_offset * ITEMSIZES[tensor.dtype] - begins[tensor.storage])
        for tensor in tensors
    ]
    return places, memory


def _most(tensors: Sequence[CallTensor]) -> int:
    """A script should not take gigabytes for the gaps between kilobytes."""
    return max(1 << 30, 4 * sum(len(tensor.raw) for tensor in tensors))


def _title(call: KeptCall) -> str:
    text = " ".join(f"{call.op} {call.title}".split())
    return re.sub(r"[^ -~]|[\\\"]", "", text)[:160]


def _file_name(op: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", op.removesuffix(".default")).strip("_") or "operation"


def _render(template: str, **values: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=False,  # noqa: S701  Python, no markup; every value is made by repr or checked
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template).render(**values)


def _write(folder: Path, name: str, text: str, files: Mapping[str, bytes]) -> Path:
    try:
        data = folder / f"{name}-data"
        data.mkdir(parents=True, exist_ok=True)
        for file, raw in files.items():
            (data / file).write_bytes(raw)
        path = folder / f"{name}.py"
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        where = str(error.filename or folder)
        raise ArchiveError(f"the script cannot be written: {error.strerror}", where=where) from None
    return path
