"""What is known of operators that their schema does not say, each with its reason. Data, and how to ask it.

Names are those of the overload packet, "aten.empty"; a rule holds for all overloads.
"""

from __future__ import annotations

ALIASES = {
    "aten._unsafe_view": "the same memory under another shape; the schema calls it a new tensor, for autograd's sake",
    "aten.detach": "the same tensor outside of the graph",
    "aten.alias": "the same tensor",
    "aten.lift_fresh": "the same tensor",
    "aten.lift": "the same tensor",
    "aten._reshape_alias": "the same memory under another shape",
    "aten.is_pinned": "asks and computes nothing",
    "aten.is_same_size": "asks and computes nothing",
    "aten.record_stream": "tells the allocator and computes nothing",
    "aten.resize_": "only makes room; what is in it is whatever lay there",
    "aten.set_": "gives a tensor other memory and computes nothing",
    "aten._has_compatible_shallow_copy_type": "asks and computes nothing",
}
"""Operators that are no event: they read nothing and write nothing."""

CREATORS = {
    "aten.empty": "memory without content",
    "aten.empty_like": "memory without content",
    "aten.empty_strided": "memory without content",
    "aten.empty_permuted": "memory without content",
    "aten.empty_quantized": "memory without content",
    "aten._empty_affine_quantized": "memory without content",
    "aten.new_empty": "memory without content",
    "aten.new_empty_strided": "memory without content",
    "aten._efficientzerotensor": "a stand-in for zeros that has no memory",
}
"""Operators whose result is memory that nothing was written into: no event, and what reads it is flagged."""

GROWERS = {
    "aten.resize_": "new room at the end has no content",
    "aten.resize_as_": "new room at the end has no content",
    "inductor.resize_storage_bytes_": "sharded training gives back the memory of gathered parameters and takes it anew",
}
"""In-place operators after which a part of the memory may have no content."""

OVERWRITERS = {
    "aten.copy_": "all of it is replaced",
    "aten._foreach_copy_": "all of it is replaced",
    "aten.fill_": "all of it is replaced",
    "aten.zero_": "all of it is replaced",
    "aten._foreach_zero_": "all of it is replaced",
    "aten.normal_": "all of it is drawn",
    "aten.uniform_": "all of it is drawn",
    "aten.bernoulli_": "all of it is drawn",
    "aten.random_": "all of it is drawn",
    "aten.exponential_": "all of it is drawn",
    "aten.geometric_": "all of it is drawn",
    "aten.log_normal_": "all of it is drawn",
    "aten.cauchy_": "all of it is drawn",
    "aten.eye": "all of it is replaced",
    "fsdp.split_with_sizes_copy": "all of them are replaced",
    "fsdp.chunk_cat": "all of it is replaced",
}
"""Operators whose first written argument is not read. Of every operator, an argument named `out` or one that is given
by keyword and written is not read either."""

PARTIAL = {
    "fsdp.all_gather_copy_in": (1, "the buffer of a gather, of which it fills one rank's part"),
}
"""Operators that give back a buffer of which they fill a part, and which result that is: the rest of it has no content,
so it is no output; the part is another result."""

SCRATCH = {
    "aten.mkldnn_rnn_layer": (3, "the workspace of its backward pass, which has gaps that nothing writes"),
    "aten._ctc_loss": (1, "a table for its backward pass, not written beyond the length of each sequence"),
}
"""Operators one of whose results is memory for their own backward pass that is not written everywhere, and which: it is
no output, and what reads it is flagged."""

HIDDEN_WRITES = {
    "aten.native_batch_norm": ("running_mean", "running_var"),
    "aten.cudnn_batch_norm": ("running_mean", "running_var"),
    "aten.miopen_batch_norm": ("running_mean", "running_var"),
}
"""Arguments that are written although the schema does not say so: the running statistics, in training mode."""

ROUTERS = {
    "aten.topk": 1,
    "aten.sort": 1,
    "aten.argsort": 0,
    "aten.nonzero": 0,
    "aten.where": 0,
    "aten.searchsorted": 0,
    "aten.bucketize": 0,
}
"""Operators whose result says where something goes, and which of their results that is: an integer or boolean one gets
a digest a row."""

DRAWS_NOTHING = {
    "aten._scaled_dot_product_flash_attention_for_cpu": ("dropout_p", 3),
    "aten._scaled_dot_product_flash_attention": ("dropout_p", 3),
    "aten._scaled_dot_product_efficient_attention": ("dropout_p", 5),
    "aten._scaled_dot_product_cudnn_attention": ("dropout_p", 5),
    "aten._scaled_dot_product_attention_math": ("dropout_p", 4),
    "aten._scaled_dot_product_fused_attention_overrideable": ("dropout_p", 4),
    "aten.native_dropout": ("p", 1),
}
"""Operators that are marked as drawing random numbers but draw none where this argument (name, place) is 0 or not
given."""

DRAWING = frozenset({"aten.native_dropout", "aten._fused_dropout", "aten.rrelu_with_noise"})
"""Operators that draw although some versions of torch do not mark them."""

SKIPPED_NAMESPACES = {
    "prim": "asks a tensor for what it is",
    "c10d": "seen at every level, without a dispatch mode",
    "_c10d_functional": "calls operators of c10d, which are seen themselves",
    "_c10d_functional_autograd": "the same",
    "profiler": "marks a stretch of time",
    "_dtensor": "moves shards by collectives that are seen themselves",
}
"""Namespaces of which no operator is an event here."""
