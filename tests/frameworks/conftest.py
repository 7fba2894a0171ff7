"""Every test in here needs the frameworks; they are installed when the first one runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks import environment

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.frameworks)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session", autouse=True)
def frameworks() -> None:
    environment.make()
