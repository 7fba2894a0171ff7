"""Files of safetensors: a JSON header that says where each tensor lies, and the tensors' bytes.

Read here and not through the library, which maps files into memory and needs a framework for dtypes that numpy lacks.
Format: https://github.com/huggingface/safetensors (8 bytes little-endian header length, header, bytes).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from detrun.checkpoints.entry import Entry
from detrun.checkpoints.flatten import tensor_entry
from detrun.checkpoints.sources import Source, read
from detrun.checkpoints.tensors import Storage, dense_strides, numbers, stored_tensor
from detrun.checkpoints.torch_file import Run
from detrun.errors import RecordError
from detrun.fingerprint.elements import LAYOUTS
from detrun.records.files import one_line, parse_object

_MOST_HEADER = 100_000_000
"""As in the library."""
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "C64": "complex64",
    "BOOL": "bool",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


def looks_like_safetensors(head: bytes) -> bool:
    """Whether a file that begins with these (16 or more) bytes can be one."""
    return len(head) >= 16 and int.from_bytes(head[:8], "little") <= _MOST_HEADER and head[8:9] == b"{"


def read_header(source: Source) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its tensors' bytes begin.

    Raises RecordError where it is damaged, or the file has not the length that the header says.
    """
    size = int.from_bytes(read(source, 0, 8), "little")
    if size > _MOST_HEADER:
        raise RecordError(f"has a header of {size:,} bytes, which is none", where=source.where)
    header = parse_object(read(source, 8, size), source.where)
    ends = [_offsets(about, source.where)[1] for name, about in header.items() if name != "__metadata__"]
    wanted = 8 + size + max(ends, default=0)
    if source.length != wanted:
        kind = "is cut short" if source.length < wanted else "is longer than its header says"
        raise RecordError(f"{kind}: {source.length:,} bytes of {wanted:,}", where=source.where)
    return header, 8 + size


def safetensors_entries(source: Run) -> Iterator[Entry]:
    """The entries of a safetensors file, in the order of their bytes. Raises RecordError."""
    header, base = read_header(source)
    texts = header.pop("__metadata__", {})
    if isinstance(texts, dict):
        for key, value in texts.items():
            yield Entry(f"__metadata__.{key}", "str", value=repr(value))
    for name in sorted(header, key=lambda name: _offsets(header[name], source.where)):
        yield _entry(name, header[name], base, source)


def _entry(name: str, about: dict[str, Any], base: int, source: Run) -> Entry:
    begin, end = _offsets(about, source.where)
    code = str(about.get("dtype"))
    dtype = _DTYPES.get(code)
    try:
        shape = numbers(about.get("shape"))
    except ValueError as error:
        return Entry(name, problem=f"has {error}")
    if dtype is None:
        return Entry(name, code[:40], shape, problem=f"has a dtype that is not known: {one_line(code, 40)}")
    if LAYOUTS[dtype].packed and shape:
        shape = (*shape[:-1], shape[-1] // 2)  # there in elements of 4 bits, in torch in pairs of them
    if math.prod(shape) * LAYOUTS[dtype].element_bytes != end - begin:
        return Entry(name, dtype, shape, problem=f"has {end - begin:,} bytes, which its shape does not fit")
    storage = Storage(dtype, source.part(base + begin, end - begin))
    return tensor_entry(name, stored_tensor(storage, 0, shape, dense_strides(shape)))


def _offsets(about: Any, where: str) -> tuple[int, int]:
    try:
        begin, end = numbers(about["data_offsets"])
    except (TypeError, KeyError, ValueError):
        raise RecordError("has a header that does not say where a tensor lies", where=where) from None
    if begin > end:
        raise RecordError("has a header with a tensor that ends before it begins", where=where)
    return begin, end
