"""The digest of a step and of each scope in it: equal if all events are, in whatever order events came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from detrun.fingerprint.byte_digest import ByteHasher
from detrun.recorder.trace.fingerprints import digest_of_bytes

if TYPE_CHECKING:
    from detrun.recorder.trace.tracer import Draft

_BITS = (1 << 128) - 1


class Rolling:
    """Sums of events by scope, mod 2^128. An event counts by what two runs are compared by: its key, its signature,
    its scalars, its random state, its flags and the digests of its unflagged parts; not by where it lies."""

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}

    def add(self, rows: Sequence[Draft]) -> None:
        sums = self._sums
        from_bytes = int.from_bytes
        for row in rows:
            text = "\0".join(
                (
                    f"{row.microbatch},{row.occurrence},{len(row.inputs)}",
                    row.phase,
                    row.op,
                    row.signature,
                    row.scalars,
                    row.flags,
                    row.group,
                    "",
                )
            )
            parts = b"".join(row.inputs) + b"".join(row.outputs) if not row.flags else _unflagged(row)
            raw = text.encode("utf-8", "backslashreplace") + (row.rng or b"-") + parts
            scope = row.scope
            sums[scope] = sums.get(scope, 0) + from_bytes(digest_of_bytes(raw), "little")

    def finish(self) -> tuple[str, dict[str, str]]:
        """(32 hex digits for the step, 16 for each scope)."""
        whole = ByteHasher()
        scopes = {}
        for scope in sorted(self._sums):
            raw = (self._sums[scope] & _BITS).to_bytes(16, "little")
            whole.feed_text(scope)
            whole.feed_bytes(raw)
            scopes[scope] = raw[:8].hex()
        return whole.raw().hex(), scopes


def _unflagged(row: Draft) -> bytes:
    flagged = {each.partition(":")[0] for each in row.flags.split(",")}
    kept = [part for index, part in enumerate(row.inputs) if f"i{index}" not in flagged]
    kept += [part for index, part in enumerate(row.outputs) if f"o{index}" not in flagged]
    return b"".join(kept)
