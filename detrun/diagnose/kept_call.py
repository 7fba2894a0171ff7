"""A kept event as the call it was: what a script needs to make it again, and why one may not be able to."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detrun.diagnose.operations import is_custom
from detrun.errors import NotVerifiedError
from detrun.records.kept_reader import KeptEvent

ITEMSIZES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "float4_e2m1fn_x2": 1,
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes an element, of the dtypes that a script can rebuild."""

_OPERATOR = re.compile(r"[A-Za-z_]\w{0,100}\.[A-Za-z_]\w{0,200}(\.[A-Za-z_]\w{0,100})?")
_WORD = re.compile(r"[a-z][a-z0-9_]{0,40}")
_DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,4})?")


class CannotReproduceError(NotVerifiedError):
    """Why no script can be made that repeats an event; a sentence without its subject."""


@dataclass(frozen=True)
class CallTensor:
    """A tensor as it was kept. raw: its elements, dense and in C order. strides and storage_offset in elements;
    tensors of one storage shared memory."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    storage_offset: int
    device: str
    raw: bytes
    part: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class KeptCall:
    """One call of an operator. arguments: JSON words as `detrun.records.kept_writer` has them.

    generator: kind and state of the random number generator that it drew from.
    """

    op: str
    arguments: Mapping[str, Any] | None
    inputs: tuple[CallTensor, ...]
    outputs: tuple[CallTensor, ...]
    generator: tuple[str, bytes] | None = None
    threads: int = 1
    deterministic: bool = False
    title: str = ""


def call_of(event: KeptEvent) -> KeptCall:
    """A kept event as a call. Raises RecordError where its bytes are not there, CannotReproduceError where a tensor
    that it was given was not kept."""
    sides: dict[str, list[CallTensor]] = {"input": [], "output": []}
    numbers = []
    for tensor in event.tensors:
        if tensor.side == "input":
            numbers.append(tensor.index)
        sides[tensor.side].append(
            CallTensor(
                tensor.dtype,
                tensor.shape,
                tensor.strides,
                tensor.storage,
                tensor.storage_offset,
                tensor.device,
                event.bytes_of(tensor),
                tensor.part,
            )
        )
    op = event.key[4]
    if not any(tensor.part for tensor in sides["input"]) and numbers != list(range(len(numbers))):
        raise CannotReproduceError("was given a tensor whose memory was not kept")
    step, microbatch, phase, scope, _, occurrence = event.key
    where = f"in {scope or 'no module'}, {phase}, step {step}, micro-batch {microbatch}, occurrence {occurrence}"
    return KeptCall(
        op,
        event.call,
        tuple(sides["input"]),
        tuple(sides["output"]),
        event.generator_state(),
        event.threads,
        event.deterministic,
        f"{where} {event.site}",
    )


def check_repeatable(call: KeptCall, module: str | None = None) -> None:
    """Raises CannotReproduceError where a script with torch alone (and `module`) cannot repeat it."""
    if not call.arguments:
        raise CannotReproduceError("is no single call of an operator, so that nothing was kept that could be called")
    if not _OPERATOR.fullmatch(call.op):
        raise CannotReproduceError("is no operator of torch's dispatcher")
    if is_custom(call.op) and module is None:
        library = call.op.partition(".")[0]
        raise CannotReproduceError(
            f"is an operator of {library}, which the program itself registers; torch alone cannot call it"
        )
    check_tensors(call.inputs)


def check_tensors(tensors: Sequence[CallTensor]) -> None:
    """Raises CannotReproduceError for what cannot be rebuilt from raw bytes."""
    for tensor in tensors:
        if tensor.part:
            raise CannotReproduceError("was given a tensor of a subclass, whose parts alone were kept")
        size = ITEMSIZES.get(tensor.dtype)
        if size is None:
            raise CannotReproduceError(f"was given a tensor of {tensor.dtype[:40]}, which cannot be rebuilt from bytes")
        if len(tensor.raw) != tensor.elements * size or len(tensor.strides) != len(tensor.shape):
            raise CannotReproduceError("was given a tensor whose kept bytes are not what its shape asks for")
        if min((*tensor.shape, *tensor.strides, tensor.storage_offset, 0)) < 0:
            raise CannotReproduceError("was given a tensor whose shape cannot be")


def expression(word: Any) -> str:
    """Python for one argument; `t` are the tensors, `generator` the generator. Raises CannotReproduceError."""
    if isinstance(word, list):
        return f"[{', '.join(map(expression, word))}]"
    if word is None or isinstance(word, (bool, int, float, str)):
        return repr(word)
    if not isinstance(word, dict) or len(word) != 1:
        raise CannotReproduceError("was given an argument that was not understood")
    ((kind, value),) = word.items()
    if kind == "tensor" and type(value) is int and value >= 0:
        return f"t[{value}]"
    if kind == "float" and value in ("nan", "inf", "-inf"):
        return f"float({value!r})"
    if kind == "complex" and isinstance(value, list) and len(value) == 2:
        return f"complex({', '.join(map(expression, value))})"
    if kind in ("dtype", "layout", "memory_format") and isinstance(value, str) and _WORD.fullmatch(value):
        return f"torch.{value}"
    if kind == "device" and isinstance(value, str) and _DEVICE.fullmatch(value):
        return f"torch.device({value!r})"
    if kind == "generator":
        return "generator"
    raise CannotReproduceError(f"was given an object that cannot be rebuilt: {str(value)[:80]}")


def operator_expression(op: str) -> str:
    """Python for an operator: `torch.ops.aten.index_put_.default`."""
    return f"torch.ops.{op}" if op.count(".") > 1 else f"torch.ops.{op}.default"


def argument_expressions(call: KeptCall) -> tuple[str, str]:
    """Python for what stands between the brackets of a list of positional and a dictionary of named arguments."""
    arguments = call.arguments or {}
    positional, named = arguments.get("args", []), arguments.get("kwargs", {})
    if not isinstance(positional, list) or not isinstance(named, dict):
        raise CannotReproduceError("was given arguments that were not understood")
    return (
        ", ".join(map(expression, positional)),
        ", ".join(f"{str(name)!r}: {expression(word)}" for name, word in named.items()),
    )
