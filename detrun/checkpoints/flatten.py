"""A nested object of a checkpoint as a flat run of entries with dotted names."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from detrun.checkpoints.entry import Bytes, Entry
from detrun.checkpoints.rebuild import CALLS, Described, NumpyArray, NumpyDtype
from detrun.checkpoints.tensors import Storage, StoredTensor, stored_tensor
from detrun.checkpoints.unpickle import Global, Opaque, unpickle
from detrun.errors import RecordError
from detrun.fingerprint.elements import LAYOUTS

MOST_ENTRIES = 2_000_000
_MOST_DEPTH = 100
_LONG = 8
"""A longer list of nothing but numbers is one array: the state of a generator, the order of a data set."""
_LONG_TEXT = 256
_MOST_PICKLED = 64 << 20
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_INNER_NAMES = {"_local_tensor": "local"}
"""Inner tensors that the recorder knows by a shorter name (`fingerprint.tensors.parts`)."""


def flatten(root: Any, where: str) -> Iterator[Entry]:
    """Every tensor and plain value below `root`, in the order it was saved in; names are unique.

    Raises RecordError where it has no end: too many entries, or nested too deep.
    """
    names: dict[str, int] = {}
    stack: list[Iterator[tuple[str, Any]]] = [iter([("", root)])]
    count = 0
    while stack:
        try:
            name, value = next(stack[-1])
        except StopIteration:
            stack.pop()
            continue
        entry, below = _take_apart(name, value)
        if entry is not None:
            count += 1
            if count > MOST_ENTRIES:
                raise RecordError(f"holds more than {MOST_ENTRIES:,} values", where=where)
            seen = names[entry.name] = names.get(entry.name, 0) + 1
            yield entry if seen == 1 else _renamed(entry, names, seen)
        if below is not None:
            if len(stack) > _MOST_DEPTH:
                raise RecordError(f"is nested more than {_MOST_DEPTH} deep at {name[:200]}", where=where)
            stack.append(below)


def tensor_entry(name: str, tensor: StoredTensor) -> Entry:
    """The entry of a tensor."""
    data = tensor if tensor.dtype in LAYOUTS else None
    return Entry(name, tensor.dtype, tensor.shape, data=data, problem=tensor.problem)


def _renamed(entry: Entry, names: dict[str, int], seen: int) -> Entry:
    while f"{entry.name}#{seen}" in names:
        seen += 1
    names[f"{entry.name}#{seen}"] = 1
    return Entry(f"{entry.name}#{seen}", entry.dtype, entry.shape, entry.value, entry.data, entry.chunks, entry.problem)


def _take_apart(name: str, value: Any) -> tuple[Entry | None, Iterator[tuple[str, Any]] | None]:
    """The entry that a value is, if it is one, and the named values below it, if there are any."""
    if isinstance(value, NumpyArray):
        if value.content is None:
            return Entry(name, "object", problem="is an array without content"), None
        value = value.content
    if isinstance(value, Storage):
        value = _as_tensor(value)
    if isinstance(value, StoredTensor):
        return tensor_entry(name, value), None
    if isinstance(value, bytes) and (inner := _pickled(name, value)) is not None:
        return _take_apart(name, inner)
    if isinstance(value, _PLAIN):
        return _plain(name, value), None
    if isinstance(value, dict):
        return (None, _named(name, value.items())) if value else (Entry(name, "dict", value="{}"), None)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _sequence(name, value)
    if isinstance(value, Described):
        outer = Entry(name, "object", value=value.summary)
        return (outer if value.tensor is None else tensor_entry(name, value.tensor)), _attributes(name, value.state)
    if isinstance(value, Opaque):
        return Entry(name, "object", value=value.name), _parts(name, value)
    if isinstance(value, (Global, NumpyDtype)):
        return Entry(name, "object", value=value.name if isinstance(value, Global) else value.code), None
    return Entry(name, "object", problem="is no value that a pickle makes"), None


def _pickled(name: str, raw: bytes) -> Any:
    """What bytes hold that are a pickle, as the states of loaders are; None for any others.

    Two pickles of one state need not be the same bytes.
    """
    if raw[:1] != b"\x80" or raw[1:2] not in (b"\x02", b"\x03", b"\x04", b"\x05") or raw[-1:] != b".":
        return None
    if len(raw) > _MOST_PICKLED:
        return None
    try:
        inner, end = unpickle(raw, name, CALLS)
    except RecordError:
        return None
    return inner if end == len(raw) and isinstance(inner, (dict, list, tuple)) and inner else None


def _as_tensor(storage: Storage) -> StoredTensor:
    length = storage.source.length if storage.source is not None else 0
    return stored_tensor(storage, 0, (length // LAYOUTS[storage.dtype].element_bytes,), (1,))


def _plain(name: str, value: Any) -> Entry:
    if isinstance(value, bytes):
        return Entry(name, "bytes", (len(value),), data=Bytes.held(value))
    if isinstance(value, str) and len(value) > _LONG_TEXT:
        raw = value.encode("utf-8", "surrogatepass")
        return Entry(name, "str", (len(raw),), data=Bytes.held(raw))
    if isinstance(value, float):
        return Entry(name, "float", value=value.hex())
    if value is None:
        return Entry(name, "none", value="None")
    # Python prints no number of thousands of digits in decimals.
    text = hex(value) if type(value) is int and value.bit_length() > 1024 else repr(value)
    return Entry(name, type(value).__name__, value=text)


def _sequence(name: str, value: Any) -> tuple[Entry | None, Iterator[tuple[str, Any]] | None]:
    if not value:
        return Entry(name, "list", value="[]"), None
    if isinstance(value, (set, frozenset)):
        if all(isinstance(item, _PLAIN) for item in value):
            # A set has no order of its own, and equal ones may be saved in different orders.
            value = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
        return None, _named(name, enumerate(value))
    if len(value) > _LONG:
        for kind, code, dtype in ((int, "q", "int64"), (float, "d", "float64")):
            if all(type(item) is kind for item in value):
                try:
                    return _numbers(name, array.array(code, value), dtype), None
                except OverflowError:
                    break
    return None, _named(name, enumerate(value))


def _numbers(name: str, values: array.array[Any], dtype: str) -> Entry:
    if sys.byteorder == "big":
        values.byteswap()
    return Entry(name, dtype, (len(values),), data=Bytes.held(values.tobytes()))


def _parts(name: str, value: Opaque) -> Iterator[tuple[str, Any]]:
    yield from _named(name, enumerate(value.args))
    yield from _attributes(name, value.state)
    yield from _named(name, enumerate(value.items))
    yield from _named(name, value.pairs)


def _attributes(name: str, state: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # attributes and slots
        yield from _attributes(name, state[0])
        state = state[1]
    if isinstance(state, dict):
        for key, value in state.items():
            inner = _INNER_NAMES.get(key, key) if isinstance(key, str) else _key(key)
            yield _join(name, inner), value
    elif state is not None:
        yield _join(name, "state"), state


def _named(name: str, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    return ((_join(name, _key(key)), value) for key, value in items)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _key(key: Any) -> str:
    """A key of a dictionary as a part of a name."""
    if isinstance(key, str):
        return key
    if isinstance(key, tuple):
        return ",".join(_key(part) for part in key[:8])
    if isinstance(key, Global):
        return key.name
    if isinstance(key, Opaque):
        return f"{key.name}({','.join(_key(part) for part in key.args[:8])})"
    if isinstance(key, int) and key.bit_length() > 1024:
        return hex(key)
    return repr(key) if isinstance(key, _PLAIN) else type(key).__name__
