import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrun.launch.queue import expand_nodes, parse_sacct, parse_squeue, state_of
from detrun.launch.slurm import minutes_of


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("PENDING", "pending"),
        ("CONFIGURING", "pending"),
        ("RUNNING", "running"),
        ("SUSPENDED", "running"),
        ("COMPLETING", "completing"),
        ("CANCELLED", "ended"),
        ("NODE_FAIL", "ended"),
        ("OUT_OF_MEMORY", "ended"),
        ("A_WORD_OF_NEXT_YEAR", "running"),
    ],
)
def test_state_words(word: str, state: str) -> None:
    assert state_of(word) == state


def test_squeue_lines() -> None:
    text = (
        "4182|PENDING||2026-11-29T10:42:00|Priority\n"
        "4183|RUNNING|node[3-4]|2026-11-29T10:02:00|None\n"
        "4184|PENDING||N/A|(ReqNodeNotAvail, UnavailableNodes:node[1|2])\n"
        "a broken line\n"
    )
    found = parse_squeue(text)
    assert found["4182"].state == "pending"
    assert found["4182"].reason == "Priority"
    assert found["4182"].start == "2026-11-29T10:42:00"
    assert found["4183"].nodes == ("node3", "node4")
    assert found["4183"].reason == ""
    assert found["4184"].start == ""
    assert set(found) == {"4182", "4183", "4184"}


def test_sacct_lines_keep_the_last_of_a_requeued_job() -> None:
    text = "7|REQUEUED|node1|0:0\n7|CANCELLED by 1000|None assigned|0:15\n"
    found = parse_sacct(text)
    assert found["7"].word == "CANCELLED"
    assert found["7"].state == "ended"
    assert found["7"].nodes == ()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("r1n[1-2]-ib", ["r1n1-ib", "r1n2-ib"]),
        ("", []),
        ("(null)", []),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20, unique=True))
def test_node_ranges_expand_to_every_member(numbers: list[int]) -> None:
    text = "n[" + ",".join(f"{n:03d}" for n in numbers) + "]"
    assert expand_nodes(text) == [f"n{n:03d}" for n in numbers]


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("2:00", 2),
        ("00:20:00", 20),
        ("1-00:00:00", 1440),
        ("infinite", None),
        ("90", 90),
        ("1-12", 2160),
        ("n/a", None),
    ],
)
def test_slurm_times(text: str, minutes: float | None) -> None:
    assert minutes_of(text) == minutes
