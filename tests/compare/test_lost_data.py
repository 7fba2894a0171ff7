"""What is blamed where a resumed run was given other data, and no loader's state says why."""

from __future__ import annotations

from typing import Any

from detrun.compare.culprit import Suspect, suspects
from detrun.compare.state import RowDifference
from detrun.records.state_row import Standing, StateRow


def differing(component: Any, name: str, *, kept: bool = True, **fields: Any) -> RowDifference:
    """kept: the reference did not change it between the save and the begin."""
    standing: Standing = "soft" if component in ("local", "loader") else "hard"
    a = StateRow(component, name, "", standing, digest="xxh3:a", **fields)
    b = StateRow(component, name, "", standing, digest="xxh3:b", **fields)
    return RowDifference((component, name, ""), 1, "different", a, b, saved_as="xxh3:a" if kept else "xxh3:before")


def counter(name: str, here: str = "3", there: str = "0") -> RowDifference:
    a, b = (StateRow("local", name, "", "soft", dtype="int", elements=1, value=value) for value in (here, there))
    return RowDifference(("local", name, ""), 1, "different", a, b)


def stream(ahead: int | None) -> RowDifference:
    made = differing("rng", "shuffling")
    made.ahead = ahead
    return made


def first(found: list[Suspect]) -> tuple[str, list[str]]:
    return found[0].blame.kind, [difference.name for difference in found[0].differences]


BATCH = differing("batch", "batch")
ORDER = differing("local", "order", dtype="int64", shape=(40,), elements=40)


def test_an_order_made_anew_from_streams_that_ran_on_is_lost_data() -> None:
    assert first(suspects([stream(39), BATCH], {}, [ORDER])) == ("data", ["batch", "order"])


def test_a_stream_that_was_lost_is_blamed_for_the_order_drawn_from_it() -> None:
    for ahead in (None, -39):
        assert first(suspects([stream(ahead), BATCH], {}, [ORDER])) == ("rng", ["shuffling"])


def test_an_order_that_the_reference_draws_after_the_save_as_well_follows_its_stream() -> None:
    drawn = differing("local", "order", kept=False, dtype="int64", shape=(40,), elements=40)
    assert first(suspects([stream(39), BATCH], {}, [drawn]))[0] == "rng"


def test_the_counters_beside_a_wrong_batch_are_named_with_it() -> None:
    inputs = differing("local", "x", dtype="float32", shape=(4, 4), elements=16)
    assert first(suspects([BATCH], {}, [counter("seen"), inputs])) == ("data", ["batch", "seen"])


def test_a_counter_that_leads_to_other_data_later_is_the_data_s_position() -> None:
    found = suspects([], {}, [counter("offset"), counter("running", "0x1.8p+0", "0x1.0p+0")], data_first=True)
    assert first(found) == ("data", ["offset"])
    assert not found[0].firm


def test_a_counter_that_leads_to_other_results_is_a_variable() -> None:
    assert first(suspects([], {}, [counter("offset")]))[0] == "module-state"


def of_loader(name: str, here: str, there: str) -> RowDifference:
    a, b = (StateRow("loader", name, "", "soft", dtype="int", elements=1, value=value) for value in (here, there))
    return RowDifference(("loader", name, ""), 1, "different", a, b)


def test_a_first_batch_of_another_step_is_the_loader_s_fault_where_it_counts_otherwise() -> None:
    yielded = of_loader("it._num_yielded", "4", "1")
    assert first(suspects([stream(None), BATCH], {1: -3}, [yielded]))[0] == "data"


def test_what_was_drawn_from_a_lost_stream_and_where_the_run_was_told_to_begin_are_no_position() -> None:
    drawn = [of_loader("it._base_seed", "72", "71"), of_loader("it.sampler", "[2, 0, 1]", "[1, 0, 2]")]
    told = of_loader("epochs.first", "1", "2")
    logged = of_loader("epochs.logs[0].epoch", "1", "")
    logged.kind, logged.b = "missing", None
    assert first(suspects([stream(None), BATCH], {1: -3}, [*drawn, told, logged])) == ("rng", ["shuffling"])
