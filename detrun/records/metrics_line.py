"""One line of a metrics file as a record.

A comparison of thousands of ranks sees millions of lines of very few shapes, and most of them are equal in both
arms. So the first line of a shape is parsed and checked in full and turned into a pattern; later lines that
match the pattern are known to be well-formed, and their contents are parsed only if somebody asks.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from detrun.fingerprint.scalar import DTYPES, width
from detrun.records.files import one_line

SCHEMA_VERSION = 1
MAX_LINE_BYTES = 4 << 20
MAX_PATTERNS = 32

_CHARACTERS = {dtype: width(dtype) // 4 + 2 for dtype in DTYPES}
"""Length of a value's bits as `0x…`, by dtype."""

_KNOWN = frozenset({"v", "step", "metrics", "batch", "microbatches", "state", "rng", "skipped", "first_microbatch"})
_SUPPLEMENT = frozenset({"v", "step", "metrics"})
_METRIC = frozenset({"bits", "dtype", "value", "source"})
_digest = re.compile(r"[a-z][a-z0-9_]*:[0-9a-f]{8,128}").fullmatch
_DERIVED = re.compile(r"(.+?)(?:\[[0-9]+\]| \([a-z_]+\))+")
_bits = re.compile(r"0x[0-9a-f]+").fullmatch

DERIVED = " (derived)"
"""Behind the name of a metric that is bookkeeping, by an adapter's word: recorded, never held against another run's."""

Metric = dict[str, Any]
"""`{"bits": "0x…", "dtype": …, "value": …, "source": …}`, already checked."""


class UnusableLine(Exception):  # noqa: N818  (says what a line is; never leaves records)
    """A line that cannot be taken; the text reads on behind `line 7 `."""

    def __init__(self, kind: str, what: str, step: int | None = None) -> None:
        super().__init__(what)
        self.kind = kind
        self.step = step


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Which metrics and streams a record holds. There is one object for each such set in a process."""

    metrics: tuple[str, ...]
    state: tuple[str, ...]
    batch: bool
    rng: bool


_held: dict[tuple[tuple[str, ...], tuple[str, ...], bool, bool], Held] = {}


@dataclass(slots=True, eq=False)
class Contents:
    """What a step recorded. Digests carry their algorithm in front."""

    metrics: dict[str, Metric]
    batch: str | None = None
    state: dict[str, str] = field(default_factory=dict)
    rng: str | None = None
    other: dict[str, Any] = field(default_factory=dict)

    def held(self) -> Held:
        key = (tuple(self.metrics), tuple(self.state), self.batch is not None, self.rng is not None)
        found = _held.get(key)
        if found is None:
            if len(_held) > 10_000:  # names that never repeat are not worth remembering
                _held.clear()
            found = _held[key] = Held(*key)
        return found


class StepRecord:
    """What one rank recorded in one step. Two records that are the same object hold the same bytes.

    parameters: the digest of the parameters, without its algorithm, or None. first_microbatch: where only the later
    part of the step is here, the number of micro-batches before it, else 0.
    """

    __slots__ = (
        "_contents", "_raw", "first_microbatch", "held", "microbatches", "parameters", "skipped", "step", "supplement",
    )  # fmt: skip

    def __init__(
        self,
        step: int,
        microbatches: int = 1,
        skipped: bool = False,
        supplement: bool = False,
        *,
        contents: Contents | None = None,
        raw: bytes = b"",
        held: Held | None = None,
        parameters: str | None = None,
        first_microbatch: int = 0,
    ) -> None:
        self.step = step
        self.first_microbatch = first_microbatch
        self.microbatches = microbatches
        self.skipped = skipped
        self.supplement = supplement
        self._contents = contents
        self._raw = raw
        self.parameters = parameters
        if contents is not None:
            held = contents.held()
            self.parameters = contents.state.get("parameters", "").partition(":")[2] or None
        if held is None:
            raise TypeError("a record needs its contents or what it holds")
        self.held = held

    @property
    def contents(self) -> Contents:
        """The whole record; parsed when first asked for."""
        if self._contents is None:
            self._contents = _contents_of(from_json(self._raw))
        return self._contents


def stem_of(name: str) -> str:
    """The metric that one is derived from: `loss` of `loss[0]` (a micro-batch's) and of `loss (adapter)` (another
    source's word); any other name is its own stem."""
    match = _DERIVED.fullmatch(name)
    return match[1] if match else name


def shown_name(name: str) -> str:
    """A metric's name in a sentence."""
    return one_line(name, 60)


class LineReader:
    """Parses lines and remembers their shapes. Not thread-safe."""

    def __init__(self) -> None:
        self._patterns: list[_Pattern] = []

    def parse(self, raw: bytes) -> StepRecord:
        """One line without its newline; UnusableLine where it cannot be taken."""
        for place, pattern in enumerate(self._patterns):
            match = pattern.match(raw)
            if match:
                if place:  # the shape of the last line is likely that of the next
                    self._patterns.insert(0, self._patterns.pop(place))
                step, microbatches, parameters = match.group("step", "microbatches", "parameters")
                return StepRecord(
                    int(step),
                    int(microbatches),
                    raw=raw,
                    held=pattern.held,
                    parameters=parameters.decode() if parameters else None,
                )
        record, line = parse_line(raw)
        if len(self._patterns) < MAX_PATTERNS:
            learned = _learn(raw, line, record)
            if learned:
                self._patterns.insert(0, learned)
        return record


def parse_line(raw: bytes) -> tuple[StepRecord, dict[str, Any]]:
    """One line without its newline, checked in full, with the JSON object it was; UnusableLine where it is none."""
    if len(raw) > MAX_LINE_BYTES:
        raise UnusableLine("invalid", f"is {len(raw):,} bytes long")
    try:
        line = from_json(raw)
    except ValueError as error:
        raise UnusableLine("invalid", f"is not valid JSON ({one_line(str(error), 60)})") from None
    if type(line) is not dict:
        raise UnusableLine("invalid", "is not a JSON object")
    version = line.get("v")
    step = line.get("step")
    if type(version) is not int or version != SCHEMA_VERSION:
        shown = one_line(str(version), 20)
        raise UnusableLine("schema", f"has schema version {shown}, this detrun reads {SCHEMA_VERSION}")
    if type(step) is not int or step < 1:
        raise UnusableLine("invalid", f"has no step number (step is {one_line(str(step), 20)})")
    _check_metrics(line.get("metrics"), step)
    _check_digest(line.get("batch"), "batch", step)
    _check_digest(line.get("rng"), "rng", step)
    state = line.get("state")
    if state is not None and type(state) is not dict:
        raise UnusableLine("invalid", "holds a state that is no object", step)
    for component, digest in (state or {}).items():
        _check_digest(digest, component, step, needed=True)
    count = line.get("microbatches", 1)
    if type(count) is not int or count < 0:
        raise UnusableLine("invalid", "holds no number of micro-batches", step)
    skipped = line.get("skipped", False)
    if type(skipped) is not bool:
        raise UnusableLine("invalid", "does not say whether the step was skipped", step)
    first = line.get("first_microbatch", 0)
    if type(first) is not int or first < 0:
        raise UnusableLine("invalid", "does not say with which micro-batch it begins", step)
    supplement = line.keys() == _SUPPLEMENT
    record = StepRecord(step, count, skipped, supplement, contents=_contents_of(line), first_microbatch=first)
    return record, line


def _contents_of(line: dict[str, Any]) -> Contents:
    other = {} if line.keys() <= _KNOWN else {key: line[key] for key in line if key not in _KNOWN}
    return Contents(line["metrics"], line.get("batch"), line.get("state") or {}, line.get("rng"), other)


def _check_metrics(metrics: Any, step: int) -> None:
    if type(metrics) is not dict:
        raise UnusableLine("invalid", "has no metrics", step)
    name = ""
    try:
        for name, metric in metrics.items():
            bits = metric["bits"]
            if len(bits) != _CHARACTERS[metric["dtype"]] or not _bits(bits):
                raise UnusableLine("invalid", f"gives {shown_name(name)} no bits of its dtype", step)
    except (TypeError, KeyError):
        raise UnusableLine("invalid", f"gives {shown_name(name)} no bits of a known dtype", step) from None


def _check_digest(digest: Any, name: str, step: int, needed: bool = False) -> None:
    if digest is None and not needed:
        return
    if type(digest) is not str or not _digest(digest):
        raise UnusableLine("invalid", f"holds no digest of {shown_name(name)}", step)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A shape of line: all that match are well-formed and hold the same metrics and streams."""

    match: Any
    held: Held


_NUMBER = rb'(?:-?(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{1,30})?(?:e[+-]?[0-9]{1,4})?|"nan"|"inf"|"-inf")'


def _learn(raw: bytes, line: dict[str, Any], record: StepRecord) -> _Pattern | None:
    """The pattern of a line, or None where it is not written as the recorder writes its usual lines."""
    if (
        record.supplement
        or record.skipped
        or record.first_microbatch
        or "microbatches" not in line
        or not line.keys() <= _KNOWN
    ):
        return None
    if b"@" in raw or any(metric.keys() != _METRIC for metric in line["metrics"].values()):
        return None
    parts: list[bytes] = []

    def stand_in(pattern: bytes) -> str:
        parts.append(pattern)
        return f"@{len(parts) - 1}@"

    def digest(text: str, group: bytes = b"") -> str:
        algorithm, _, body = text.partition(":")
        inner = b"[0-9a-f]{%d}" % len(body)
        return f"{algorithm}:{stand_in(b'(?P<%s>%s)' % (group, inner) if group else inner)}"

    shape: dict[str, Any] = {}
    for key, value in line.items():
        if key == "metrics":
            shape[key] = {
                name: {
                    field: stand_in(b"0x[0-9a-f]{%d}" % (len(metric["bits"]) - 2))
                    if field == "bits"
                    else stand_in(_NUMBER)
                    if field == "value"
                    else item
                    for field, item in metric.items()
                }
                for name, metric in value.items()
            }
        elif key == "state":
            shape[key] = {
                name: digest(item, b"parameters" if name == "parameters" else b"") for name, item in value.items()
            }
        elif key in ("batch", "rng"):
            shape[key] = digest(value)
        elif key in ("step", "microbatches"):
            shape[key] = stand_in(b"(?P<%s>[1-9][0-9]{0,14})" % key.encode())
        else:
            shape[key] = value
    written = re.escape(json.dumps(shape, separators=(",", ":")).encode())
    bare = {b"value", b"step", b"microbatches"}
    pattern = re.sub(
        rb'"(\w+)":"@([0-9]+)@"',
        lambda m: b'"%s":%s' % (m[1], parts[int(m[2])]) if m[1] in bare else m[0],
        written,
    )
    pattern = re.sub(rb"@([0-9]+)@", lambda m: parts[int(m[1])], pattern)
    if b"(?P<parameters>" not in pattern:
        pattern += b"(?P<parameters>)"
    try:
        compiled = re.compile(pattern)
    except re.error:
        return None
    return _Pattern(compiled.fullmatch, record.held) if compiled.fullmatch(raw) else None
