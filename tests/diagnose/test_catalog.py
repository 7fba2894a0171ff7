"""The catalog as data: complete, consistent, and the page that is made of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from detrun.compare.culprit import BLAMES, PRECISION
from detrun.diagnose.catalog import Entry, catalog
from detrun.diagnose.facts import Facts
from detrun.diagnose.operations import base_name, is_custom, known_nondeterministic, traits_of
from detrun.diagnose.page import catalog_page
from detrun.experiments.changes import CHANGES

PAGE = Path(__file__).parents[2] / "docs" / "catalog.md"
ENTRIES = catalog().entries


def test_the_page_is_the_data(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        PAGE.write_text(catalog_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == catalog_page()


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.id for entry in ENTRIES])
def test_an_entry_is_whole(entry: Entry) -> None:
    known = Facts().known()
    for sign in entry.signs:
        assert set(sign.wanted) <= set(known)
        assert set(re.findall(r"\{(\w+)\}", sign.why)) <= set(known)
    assert any(sign.weight > 0 for sign in entry.signs)
    assert {*entry.experiments, *entry.excluded_by} <= set(catalog().experiments)
    assert all(source.startswith("https://") and " " not in source for source in entry.sources)
    assert all(len(text) > 20 for text in (entry.symptom, entry.cause, entry.confirm, entry.fix))


def test_ids_are_distinct() -> None:
    assert len({entry.id for entry in ENTRIES}) == len(ENTRIES)


def test_every_cause_that_a_resume_check_names_is_an_entry_with_its_fix() -> None:
    for blame in (*BLAMES.values(), PRECISION):
        entry = catalog().entry(blame.catalog)
        assert entry is not None
        assert entry.fix == blame.fix


def test_every_experiment_is_a_change_that_can_be_run() -> None:
    assert set(catalog().experiments) == {*CHANGES, "toggle"}
    named = {name for entry in ENTRIES for name in entry.experiments}
    assert named == set(catalog().experiments)


@pytest.mark.parametrize(
    ("op", "traits"),
    [
        ("aten.index_put_.default", {"accumulates"}),
        ("aten::scatter_add_", {"accumulates"}),
        ("aten.topk.default", {"orders"}),
        ("aten.native_dropout.default", {"draws"}),
        ("c10d.allreduce_", {"communicates"}),
        ("aten.add.Tensor", set()),
    ],
)
def test_what_an_operation_is_prone_to_is_told_by_its_name(op: str, traits: set[str]) -> None:
    assert traits_of(op) >= traits
    if not traits:
        assert not traits_of(op)


def test_names_of_operations() -> None:
    assert base_name("aten.index_put_.default") == "aten.index_put_"
    assert base_name("batch") == "batch"
    assert is_custom("my_lib.my_op.default")
    assert not is_custom("aten.mm.default")
    assert not is_custom("module")


def test_what_torch_lists_depends_on_the_device() -> None:
    assert known_nondeterministic("aten.scatter_add_.default", "cuda") is not None
    assert known_nondeterministic("aten.scatter_add_.default", "cpu") is None
    rule = known_nondeterministic("aten._index_put_impl_.default", "cpu")
    assert rule is not None
    assert (rule.threads, rule.elements) == (2, 32768)
