"""What a trace is asked for in, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from detrun.recorder.trace.window import VARIABLE, TraceSettings


def asked(**given: Any) -> TraceSettings:
    settings = TraceSettings.from_environment({VARIABLE: json.dumps({"level": 4, "steps": [3, 5], **given})})
    assert settings is not None
    return settings


@pytest.mark.parametrize("env", [{}, {VARIABLE: ""}])
def test_nothing_is_traced_unasked(env: dict[str, str]) -> None:
    assert TraceSettings.from_environment(env) is None


def test_a_window_has_its_first_and_its_last_step() -> None:
    assert [step for step in range(10) if asked().wants_step(step)] == [3, 4, 5]


def test_ranks_and_scopes_bound_it_and_unasked_do_not() -> None:
    everything, some = asked(), asked(ranks=[0, 2], scopes=["layers.1", "layers.1.*"])
    assert [rank for rank in range(4) if everything.wants_rank(rank)] == [0, 1, 2, 3]
    assert [rank for rank in range(4) if some.wants_rank(rank)] == [0, 2]
    assert everything.wants_scope("anything")
    assert some.wants_scope("layers.1")
    assert some.wants_scope("layers.1.moe.experts.2")
    assert not some.wants_scope("layers.10")
    assert not some.wants_scope("")
    assert not asked(scopes=[]).wants_scope("layers.1")
    assert not asked(ranks=[]).wants_rank(0)


def test_kept_events_are_keys_with_a_budget() -> None:
    keep = asked(keep={"events": [[3, 0, "forward", "layers.1", "aten.mm.default", 2]], "bytes": 1000}).keep
    assert keep is not None
    assert keep.events == ((3, 0, "forward", "layers.1", "aten.mm.default", 2),)
    assert keep.bytes == 1000


@pytest.mark.parametrize(
    "text",
    [
        "[]", "{}", "7", '{"level": 4}', '{"level": 5, "steps": [1, 2]}', '{"level": 4, "steps": [2, 1]}',
        '{"level": 4, "steps": [1]}', '{"level": 4, "steps": [1, 2], "keep": {"events": [[1]]}}', "{",
    ],
)  # fmt: skip
def test_what_cannot_be_understood_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        TraceSettings.from_environment({VARIABLE: text})
