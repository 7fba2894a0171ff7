"""One row of a trace: an operation, a collective, a module call or another event of one rank, and what went in and out.

Shared by the writer, which runs inside the training process, and the reader; standard library only.

Two events of two runs of one program are the same event if their keys are equal. What the comparison holds against
each other is the rest, except for `seq`, `producers` and `site`, which say where an event lies and not what it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

SCHEMA_VERSION = 1

Phase = Literal["forward", "backward", "recompute", "optimizer", "between"]
Kind = Literal["op", "collective", "send", "recv", "module", "batch", "optimizer", "parameter", "recompute", "opaque"]

NO_CONTENT = bytes(16)
"""The digest of a part that has no content to read: meta, freed, no memory, still in flight."""

TRACE_FIELDS = (
    ("seq", "int64"),
    ("step", "int32"),
    ("microbatch", "int32"),
    ("phase", "text"),
    ("scope", "text"),
    ("op", "text"),
    ("kind", "text"),
    ("occurrence", "int32"),
    ("signature", "text"),
    ("scalars", "text"),
    ("parts", "digests"),
    ("n_inputs", "int32"),
    ("producers", "int32-list"),
    ("flags", "text"),
    ("rng", "digest"),
    ("site", "text"),
    ("group", "text"),
    ("peer", "int32"),
    ("rows", "uint64-list"),
)
"""The columns of a trace file, in order, and what each is on disk:

int32, int64: plain, never null. text: dictionary<int32, string>. digests: list<dictionary<int32, fixed binary 16>>.
int32-list: list<int32>. digest: fixed binary 16, null where there is none. uint64-list: list<uint64>, null where there
is none.

`parts` holds the digests of the inputs and then those of the outputs, `n_inputs` says how many are inputs: in one
column, since an input is nearly always the output of an earlier event, and so is stored once.
"""

METADATA = "detrun."
"""Before every key of a trace file's own description."""

TRACE_KIND = "trace"
"""Value of the description's key `kind`."""


class EventKey(NamedTuple):
    """What identifies an event within a rank."""

    step: int
    microbatch: int
    phase: str
    scope: str
    op: str
    occurrence: int


@dataclass(frozen=True)
class TraceEvent:
    """What is known of one event.

    seq: its place in the order in which the rank's events ended, from 0 over the whole trace: what happens inside
    another event comes before it. microbatch: that of the forward pass; in backward and recompute, of the forward pass
    it belongs to. scope: dotted module name, "" outside modules; in phase "optimizer" the parameter's name where it is
    known. occurrence: earlier events of this rank with the same step, microbatch, phase, scope and op. signature:
    dtypes and shapes of all parts in order, "float32[512,128] int64[512] -> float32[512,128]"; a part of a tensor
    subclass is named ("qdata:int8[8]"), a dense tensor whose dimensions lie in another order than C's carries that
    order ("float32[128,512]@1,0"), an absent one is "-" and has no part. scalars: the other arguments, floats as
    `float.hex()`. inputs, outputs: 16 bytes a part, NO_CONTENT where nothing could be read. producers: a number an
    input part: how many events ago its storage was last written, 0 if that is not known. flags: which parts must not
    lead, "i0:uninitialized,o1:in-flight", "" for none. rng: digest of the random number generator before the event,
    None if it draws nothing. site: "train.py:212 in combine", "" if it was not asked for. group: the ranks of a
    collective, "0-3"; peer: the other rank of a send or a receive, -1 for none. rows: a number an index along the
    first dimension of the output that says where something goes, or of the first one: equal where the rows are; None if
    they were not taken.
    """

    seq: int
    step: int
    microbatch: int
    phase: str
    scope: str
    op: str
    kind: str
    occurrence: int
    signature: str = "->"
    scalars: str = ""
    inputs: tuple[bytes, ...] = ()
    outputs: tuple[bytes, ...] = ()
    producers: tuple[int, ...] = ()
    flags: str = ""
    rng: bytes | None = None
    site: str = ""
    group: str = ""
    peer: int = -1
    rows: tuple[int, ...] | None = None

    @property
    def key(self) -> EventKey:
        return EventKey(self.step, self.microbatch, self.phase, self.scope, self.op, self.occurrence)
