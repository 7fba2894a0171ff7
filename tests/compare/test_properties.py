"""What holds for every record set: single bits are found where they are, nothing missing is ever identical."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detrun.compare.streams import PairTally, compare_rank
from detrun.experiments.judge import judge
from detrun.records.metrics_reader import parse_rank_metrics
from detrun.records.verdict import Verdict
from tests.records_factory import METRICS, STATE, Made, MadeExperiment, flipped, make_experiment, metrics_bytes

STEPS, RANKS = 5, 3
LABELS = {"rng": "RNG"}
quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> MadeExperiment:
    return make_experiment(tmp_path_factory.mktemp("archive"), ranks=RANKS, steps=STEPS)


@pytest.fixture
def made(pristine: MadeExperiment) -> Iterator[MadeExperiment]:
    """The pristine experiment, restored when a test is through with it."""
    yield pristine
    restore(pristine)


def restore(made: MadeExperiment) -> None:
    for arm, rank in itertools.product("ab", range(RANKS)):
        made.metrics_path(arm, rank).write_bytes(metrics_bytes(Made(ranks=RANKS, steps=STEPS), rank))


def judged(made: MadeExperiment) -> Verdict:
    return judge(made.folder, write=False)


arms, ranks, steps = st.sampled_from("ab"), st.integers(0, RANKS - 1), st.integers(1, STEPS)
streams = st.sampled_from([*METRICS, *STATE, "batch", "rng"])


@quick
@given(arm=arms, rank=ranks, step=steps, stream=streams, bit=st.integers(0, 127))
def test_a_single_bit_is_found_at_its_step_rank_and_stream(
    made: MadeExperiment, arm: str, rank: int, step: int, stream: str, bit: int
) -> None:
    restore(made)

    def flip(line: dict[str, Any]) -> None:
        if stream in METRICS:
            metric = line["metrics"][stream]
            metric["bits"] = f"0x{int(metric['bits'], 16) ^ (1 << bit % 32):08x}"
        elif stream in STATE:
            line["state"][stream] = flipped(line["state"][stream], bit)
        else:
            line[stream] = flipped(line[stream], bit)

    made.edit(arm, rank, step, flip)
    verdict = judged(made)
    assert verdict.exit_code == 1
    first = verdict.first_divergence
    assert first is not None
    assert (first.step, first.boundary, first.stream) == (step, "end", LABELS.get(stream, stream))
    assert first.ranks == [rank]
    assert list(first.metrics) == ([stream] if stream in METRICS else [])
    assert len(verdict.of_severity("divergence")) == 1


@quick
@given(data=st.data(), arm=arms, rank=ranks, bit=st.integers(0, 7))
def test_no_flipped_bit_of_a_metrics_file_is_identical(
    made: MadeExperiment, data: st.DataObject, arm: str, rank: int, bit: int
) -> None:
    restore(made)
    path = made.metrics_path(arm, rank)
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << bit
    path.write_bytes(raw)
    assert judged(made).exit_code in (1, 3)


@quick
@given(data=st.data(), arm=arms, rank=ranks)
def test_no_cut_of_a_metrics_file_is_identical(made: MadeExperiment, data: st.DataObject, arm: str, rank: int) -> None:
    restore(made)
    made.cut(arm, rank, data.draw(st.integers(0, made.metrics_path(arm, rank).stat().st_size - 1)))
    verdict = judged(made)
    assert verdict.exit_code == 3
    assert any(f"arm {arm}, rank {rank}" in reason for reason in verdict.not_verified)


@pytest.mark.parametrize("arm", ["a", "b"])
def test_no_missing_line_is_identical(made: MadeExperiment, arm: str) -> None:
    for rank, step in itertools.product(range(RANKS), range(1, STEPS + 1)):
        restore(made)
        made.drop(arm, rank, step)
        assert judged(made).exit_code == 3


def test_no_missing_file_is_identical(pristine: MadeExperiment, tmp_path: Path) -> None:
    names = [path.relative_to(pristine.folder) for path in pristine.folder.path.rglob("*") if path.is_file()]
    evidence = [n for n in names if n.parts[0] == "arms" and "recorder" not in n.parts]
    assert len(evidence) == 2 * (1 + 2 * RANKS)
    for name in evidence:
        copy = tmp_path / pristine.folder.id
        shutil.copytree(pristine.folder, copy)
        (copy / name).unlink()
        assert judge(copy, write=False).exit_code == 3, name
        shutil.rmtree(copy)


@quick
@given(
    lines=st.lists(st.tuples(steps, streams, st.integers(0, 31)), max_size=8),
    rank=ranks,
)
def test_any_record_set_equals_itself(lines: list[tuple[int, str, int]], rank: int) -> None:
    documents = [json.loads(line) for line in metrics_bytes(Made(steps=STEPS), rank).splitlines()]
    for step, stream, bit in lines:
        document = documents[step - 1]
        if stream in METRICS:
            bits = int(document["metrics"][stream]["bits"], 16) ^ (1 << bit)
            document["metrics"][stream] |= {"bits": f"0x{bits:08x}", "value": "nan"}
        else:
            document.pop(stream, None)
    raw = b"".join(json.dumps(document).encode() + b"\n" for document in documents)
    tally = PairTally("a", "b")
    compare_rank(tally, rank, parse_rank_metrics(raw), parse_rank_metrics(raw))
    assert (tally.streams, tally.gaps) == ({}, [])
    assert len(tally.compared) == STEPS


@quick
@given(st.lists(st.tuples(ranks, steps, streams, st.integers(0, 31)), max_size=12), st.randoms())
def test_tallies_of_ranks_merge_in_any_order(changes: list[tuple[int, int, str, int]], random: Any) -> None:
    def tally_of(some: list[int]) -> PairTally:
        tally = PairTally("a", "b")
        for rank in some:
            raw = metrics_bytes(Made(steps=STEPS), rank)
            documents = [json.loads(line) for line in raw.splitlines()]
            for where, step, stream, bit in changes:
                if where == rank and stream in METRICS:
                    metric = documents[step - 1]["metrics"][stream]
                    metric["bits"] = f"0x{int(metric['bits'], 16) ^ (1 << bit):08x}"
            spoilt = b"".join(json.dumps(document).encode() + b"\n" for document in documents)
            compare_rank(tally, rank, parse_rank_metrics(raw), parse_rank_metrics(spoilt))
        return tally

    whole = tally_of(list(range(RANKS)))
    order = list(range(RANKS))
    random.shuffle(order)
    merged = PairTally("a", "b")
    for rank in order:
        merged.merge(tally_of([rank]))
    assert merged.compared == whole.compared
    assert merged.streams.keys() == whole.streams.keys()
    for stream, tally in whole.streams.items():
        other = merged.streams[stream]
        assert (other.first_step, sorted(other.ranks), other.a, other.b) == (
            tally.first_step,
            sorted(tally.ranks),
            tally.a,
            tally.b,
        )
        assert other.visible == tally.visible
        assert {s: (t.ranks, t.ulp) for s, t in other.steps.items()} == {
            s: (t.ranks, t.ulp) for s, t in tally.steps.items()
        }
