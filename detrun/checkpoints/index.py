"""What a checkpoint holds, by digest and by name: for asking whether what was live is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from detrun.checkpoints.entry import Entry
from detrun.checkpoints.random_states import RandomState, random_states
from detrun.checkpoints.read import open_checkpoint
from detrun.errors import RecordError
from detrun.fingerprint.byte_digest import digest_dense

_STATE_BYTES = 625 * 4
"""Words and position: what two records of one Mersenne twister have in common; a held normal deviate may follow."""


class CheckpointIndex:
    """Digests, values and random states of a checkpoint. `values` are its plain values by name; `problems` is what
    could not be read, by name, so that an answer of "not there" is known for what it is."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.problems: dict[str, str] = {}
        self.random_states: list[RandomState] = []
        self._names: dict[str, None] = {}
        self._by_digest: dict[str, list[str]] = {}
        self._by_last: dict[str, list[str]] = {}

    def find(self, digest: str) -> list[str]:
        """The names of tensors with this digest (as in a state row), and of shards, as "name[offset,…]"."""
        return list(self._by_digest.get(digest, ()))

    def find_random(self, raw: bytes) -> list[str]:
        """The names of random states of these bytes, as a state row keeps them."""
        return [
            state.name
            for state in self.random_states
            if state.raw == raw or (state.generator == "mt19937" and len(raw) > _STATE_BYTES and _same(state.raw, raw))
        ]

    def has_name(self, suffix: str) -> list[str]:
        """The names that are `suffix` or end with a dot and it."""
        last = suffix.rpartition(".")[2]
        return [name for name in self._by_last.get(last, ()) if name == suffix or name.endswith(f".{suffix}")]

    @property
    def names(self) -> list[str]:
        """Every name, in the checkpoint's order."""
        return list(self._names)

    def add(self, entry: Entry) -> None:
        """Digest an entry and its shards, and note them. What cannot be read is noted as a problem."""
        self._names[entry.name] = None
        self._by_last.setdefault(entry.name.rpartition(".")[2], []).append(entry.name)
        if entry.value is not None:
            self.values[entry.name] = entry.value
            return
        try:
            self._note(entry.digest(), entry.name)
            for chunk in entry.chunks if len(entry.chunks) > 1 else ():
                where = f"{entry.name}[{','.join(map(str, chunk.offsets))}]"
                self._note(digest_dense(entry.dtype, chunk.shape, chunk.blocks()), where)
        except RecordError as error:
            self.problems[entry.name] = str(error)

    def _note(self, digest: str | None, name: str) -> None:
        if digest is not None:
            self._by_digest.setdefault(digest, []).append(name)


def index(path: Path) -> CheckpointIndex:
    """Read a whole checkpoint once and index it. Raises UsageError where there is none."""
    found = CheckpointIndex()
    with open_checkpoint(path) as checkpoint:
        found.random_states = list(random_states(_noted(found, checkpoint.entries())))
    return found


def _noted(found: CheckpointIndex, entries: Iterator[Entry]) -> Iterator[Entry]:
    for entry in entries:
        found.add(entry)
        yield entry


def _same(state: bytes, raw: bytes) -> bool:
    return state == raw[:_STATE_BYTES]
