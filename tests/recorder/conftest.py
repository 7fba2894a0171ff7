"""What tests of the walk over live objects need: the program that they play is the only one in the process."""

from __future__ import annotations

from types import ModuleType

import pytest

from detrun.recorder import hidden, owned, places

_WALKING = ("test_live", "test_sabotage", "test_tracking", "test_capture")


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests' modules, and the parts of detrun that no training process has, are imported here by accident."""
    name = request.module.__name__
    if name.rpartition(".")[2] not in _WALKING:
        return

    def program_modules() -> list[tuple[str, ModuleType]]:
        others = ("tests", "test_", "detrun")
        return [entry for entry in owned.program_modules() if entry[0] == name or not entry[0].startswith(others)]

    for room in (places, hidden):
        monkeypatch.setattr(room, "program_modules", program_modules)
