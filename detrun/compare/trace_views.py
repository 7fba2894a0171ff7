"""Operators whose result is memory that was there before: they compute nothing and can be no origin.

The recorder does not record them. A trace may hold them all the same, as calls of another library's operators or from
another writer.
"""

from __future__ import annotations

VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view", "_unsafe_view", "_reshape_alias", "reshape", "view_as_real", "view_as_complex", "as_strided", "slice",
        "select", "narrow", "t", "transpose", "permute", "movedim", "numpy_T", "expand", "squeeze", "unsqueeze",
        "unflatten", "unfold", "diagonal", "unbind", "split", "split_with_sizes", "chunk", "tensor_split", "detach",
        "alias", "lift", "lift_fresh", "values", "indices", "real", "imag",
    )
)  # fmt: skip


def is_view(op: str) -> bool:
    """Whether an operation, `aten.slice.Tensor`, only looks at memory. Copying versions (`slice_copy`) do not."""
    namespace, _, rest = op.partition(".")
    return f"{namespace}.{rest.partition('.')[0]}" in VIEWS
