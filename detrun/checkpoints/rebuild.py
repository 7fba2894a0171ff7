"""What a checkpoint's pickle may call: constructors of tensors, arrays and plain containers, none of which does more
than note what it was given. The names are those of torch, numpy and the standard library; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from detrun.checkpoints.sources import HeldSource
from detrun.checkpoints.tensors import Storage, StoredTensor, dense_strides, numbers, stored_tensor
from detrun.checkpoints.unpickle import Global, Opaque
from detrun.errors import RecordError
from detrun.fingerprint.elements import LAYOUTS

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}
_NUMPY = {
    "b1": "bool",
    **{f"{kind}{size}": f"{word}{8 * size}" for kind, word in (("i", "int"), ("u", "uint")) for size in (1, 2, 4, 8)},
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"c{size}": f"complex{8 * size}" for size in (8, 16)},
}


@dataclass(slots=True, eq=False)
class Described:
    """A tensor with more than its bytes: a subclass, or one with attributes.

    tensor: its own bytes, None where a wrapper has only those of the tensors in `state`. summary: class, dtype, shape.
    """

    summary: str
    tensor: StoredTensor | None
    state: Any


@dataclass(slots=True, eq=False)
class NumpyDtype:
    """A numpy dtype: its name as torch has it, or numpy's own where torch has none."""

    code: str
    big_endian: bool = False

    def absorb(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1:
            self.big_endian = state[1] == ">"

    @property
    def name(self) -> str | None:
        return _NUMPY.get(self.code)


@dataclass(slots=True, eq=False)
class NumpyArray:
    """A numpy array; `content` is a tensor, or an Opaque where its elements are no numbers."""

    content: StoredTensor | Opaque | None = None

    def absorb(self, state: Any) -> None:
        _version, shape, dtype, fortran, raw = state
        self.content = _array(shape, dtype, bool(fortran), raw)


def storage_dtype(kind: Any) -> str:
    """The dtype of a storage class that a persistent id names. Raises ValueError."""
    dtype = _STORAGES.get(kind.name.rpartition(".")[2]) if isinstance(kind, Global) else None
    if dtype is None:
        raise ValueError("a storage of an unknown kind")
    return dtype


def _dtype(name: Any) -> str:
    if not isinstance(name, Global):
        raise ValueError("a dtype that is none")
    return name.name.removeprefix("torch.")


def _array(shape: Any, dtype: Any, fortran: bool, raw: Any) -> StoredTensor | Opaque:
    if not isinstance(dtype, NumpyDtype) or not isinstance(shape, tuple):
        raise ValueError("an array without a dtype")
    if dtype.name is None or not isinstance(raw, bytes):
        return Opaque(f"numpy.ndarray of {dtype.code}", (shape, raw))
    size = LAYOUTS[dtype.name].element_bytes
    storage = Storage(dtype.name, HeldSource(raw, "an array in a pickle"), big_endian=dtype.big_endian)
    stride = tuple(reversed(dense_strides(shape[::-1]))) if fortran else dense_strides(shape)
    tensor = stored_tensor(storage, 0, shape, stride)
    if tensor.elements * size != len(raw):
        raise ValueError("an array of another size than its shape")
    return tensor


def _array_from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> StoredTensor | Opaque:
    return _array(shape, dtype, order == "F", raw)


def _new_array(*_args: Any) -> NumpyArray:
    return NumpyArray()


def _numpy_dtype(code: Any, *_args: Any) -> NumpyDtype:
    if not isinstance(code, str):
        raise ValueError("a dtype that is none")
    return NumpyDtype(code)


def _numpy_scalar(dtype: Any, raw: Any = b"") -> StoredTensor | Opaque:
    return _array((), dtype, False, raw)


def _encode(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("a text in an unknown encoding")
    return text.encode("latin-1")


def _bytearray(content: Any = b"", encoding: Any = None) -> bytes:
    if isinstance(content, bytes):
        return content
    return _encode(content, encoding)


def _mapping(content: Any = ()) -> dict[Any, Any]:
    if not isinstance(content, (dict, list, tuple)):
        raise ValueError("a mapping of what is none")
    return dict(content)


def _default_mapping(*_args: Any) -> dict[Any, Any]:
    return {}


def _complex(real: Any, imaginary: Any = 0.0) -> complex:
    if not isinstance(real, (int, float)) or not isinstance(imaginary, (int, float)):
        raise ValueError("a complex number of what are no numbers")
    return complex(real, imaginary)


def _container(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    def make(content: Any = ()) -> Any:
        if not isinstance(content, (list, tuple, set, frozenset, dict)):
            raise ValueError("a container of what is none")
        return kind(content)

    return make


def _device(kind: Any, index: Any = None) -> str:
    if not isinstance(kind, str) or not isinstance(index, (int, type(None))):
        raise ValueError("a device that is none")
    return kind if index is None else f"{kind[:80]}:{index}"


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> StoredTensor:
    return stored_tensor(storage, offset, shape, stride)


def _tensor_v2(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any = None, _hooks: Any = None, metadata: Any = None
) -> StoredTensor:
    return stored_tensor(storage, offset, shape, stride, metadata=metadata)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, metadata: Any = None
) -> StoredTensor:
    return stored_tensor(storage, offset, shape, stride, _dtype(dtype), metadata)


def _parameter(data: Any, *_args: Any) -> Any:
    return data


def _parameter_with_state(data: Any, _grad: Any, _hooks: Any, state: Any) -> Any:
    return _described(data, "torch.nn.Parameter", state)


def _wrapper(cls: Any, dtype: Any, shape: Any, *_args: Any) -> Described:
    return Described(f"{_name(cls)} {_dtype(dtype)}[{', '.join(map(str, numbers(shape)))}]", None, None)


def _from_type(function: Any, cls: Any, args: Any, state: Any) -> Any:
    if not isinstance(function, Global) or function.name not in _TENSORS:
        return Opaque(_name(cls), (args,), state)
    made = _TENSORS[function.name](*args)
    if isinstance(made, Described):
        return Described(made.summary, made.tensor, state)
    return _described(made, _name(cls), state)


def _described(made: Any, cls: str, state: Any) -> Any:
    if isinstance(made, StoredTensor) and state:
        return Described(f"{cls} {made.dtype}[{', '.join(map(str, made.shape))}]", made, state)
    return made


def _sparse(layout: Any, data: Any) -> Described:
    names = ("indices", "values") if layout == "torch.sparse_coo" else ("compressed", "plain", "values")
    return Described(f"sparse tensor ({layout})", None, dict(zip((*names, "size", "coalesced"), data, strict=False)))


def _storage_of_bytes(raw: Any) -> Any:
    """A tensor's memory inside a pickle that is no file of `torch.save`: it is one of its own, as bytes."""
    from detrun.checkpoints.torch_file import load_pickles  # which reads with this table

    if not isinstance(raw, bytes):
        raise ValueError("memory that is none")
    try:
        return load_pickles(HeldSource(raw, "a tensor in a pickle"))
    except RecordError as error:
        raise ValueError(str(error)) from None


def _name(value: Any) -> str:
    return value.name if isinstance(value, Global) else "an unknown class"


_TENSORS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
}
CALLS: dict[str, Callable[..., Any]] = {
    **_TENSORS,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _bytearray,
    "builtins.complex": _complex,
    "builtins.dict": _mapping,
    "builtins.frozenset": _container(frozenset),
    "builtins.list": _container(list),
    "builtins.set": _container(set),
    "builtins.tuple": _container(tuple),
    "collections.Counter": _mapping,
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": _default_mapping,
    "_codecs.encode": _encode,
    "torch.Size": _container(tuple),
    "torch.device": _device,
    "torch.serialization._get_layout": lambda name: name,
    "torch.storage._load_from_bytes": _storage_of_bytes,
    "torch._utils._rebuild_parameter_with_state": _parameter_with_state,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "numpy.dtype": _numpy_dtype,
    **{f"numpy.{core}.multiarray._reconstruct": _new_array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _numpy_scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _array_from_buffer for core in ("core", "_core")},
}
"""By dotted name. Whatever is not here becomes an `Opaque`."""
