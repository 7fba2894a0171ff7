"""What a trace holds and what it does not, for its last line."""

from __future__ import annotations

from typing import Any

_MOST_REMARKS = 100


class Coverage:
    """flagged: parts that carry a flag. skipped_views: calls that only look at memory in another way."""

    def __init__(self) -> None:
        self.flagged = 0
        self.skipped_views = 0
        self._opaque: dict[str, int] = {}
        self._not_captured: list[str] = []

    def opaque(self, name: str, count: int) -> None:
        """Something ran whose inside cannot be seen: it is counted under its name."""
        self._opaque[name] = self._opaque.get(name, 0) + count

    def not_captured(self, text: str) -> None:
        """Say once what this trace does not hold."""
        if text not in self._not_captured and len(self._not_captured) < _MOST_REMARKS:
            self._not_captured.append(text)

    def told(self, events: int) -> dict[str, Any]:
        """As the index has it. events: how many were written."""
        return {
            "events": events,
            "opaque": dict(sorted(self._opaque.items())),
            "not_captured": list(self._not_captured),
            "flagged": self.flagged,
            "skipped_views": self.skipped_views,
        }
