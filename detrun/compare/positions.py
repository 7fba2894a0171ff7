"""What tells of a lost position in the data where no loader does: a program's own counters and orders. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from detrun.compare.state import RowDifference

_WHOLE = re.compile(r"[-\d\s,()\[\]]+")
_HELD_BY = ("loader", "local", "module-state")


def positions(differences: Sequence[RowDifference]) -> list[RowDifference]:
    """Whole numbers, and lists of them, that came back different: what a program counts by or indexes with."""
    return [d for d in differences if d.component in _HELD_BY and d.kind == "different" and _is_whole(d)]


def order_was_lost(differences: Sequence[RowDifference], streams: Sequence[RowDifference]) -> bool:
    """Is there a list of indexes that the run should still have had, and made anew from streams that are too far on for
    it? Streams that were lost themselves are not ahead."""
    kept = [d for d in positions(differences) if d.row.elements > 1 and d.a and d.a.digest and d.saved_as == d.a.digest]
    return bool(kept) and all((stream.ahead or 0) > 0 for stream in streams)


def _is_whole(difference: RowDifference) -> bool:
    row = difference.row
    if row.value is not None:
        return row.value not in ("True", "False") and _WHOLE.fullmatch(row.value) is not None
    return row.dtype.startswith(("int", "uint")) and row.elements > 1
