"""Every fault that can be planted in the built-in program, traced against an arm without it: the operation, or what
came from outside of all operations, in its module, on its rank, at its step. The whole command for a few of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from detrun.compare.trace_summary import TraceComparison
from detrun.experiments.localize_verdict import follows_the_restore
from tests.experiments.localizing import (
    SAVES,
    Bench,
    ResumeBench,
    described,
    findings,
    lead_of,
    localize,
    program_recipe,
)
from tests.running import TRAINERS, Ran, detrun, write_recipe

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Planted:
    """A fault at step 2, and what is to be said of it. after: the operation and scope that bracket an unseen producer.
    alone: only the faulty arm has the event. others: how many more places part by themselves on each rank that it is
    planted on. until: the last step traced."""

    fault: str
    role: str
    kind: str
    op: str
    scope: str = ""
    phase: str = "forward"
    rank: int = 0
    after: tuple[str, str] | None = None
    alone: bool = False
    others: int = 0
    step: int = 2
    until: int = 2
    args: tuple[str, ...] = ()

    def on(self, rank: int) -> Planted:
        """The same on one rank."""
        return replace(self, fault=f"{self.fault},rank={rank}", rank=rank)


NUDGE = Planted("nudge@step=2", "origin", "op", "hybrid.gated_norm.default", "blocks.2.mixer.norm")
HIDDEN = Planted(
    "nudge-hidden@step=2",
    "uncaptured-producer",
    "op",
    "aten.pow.Tensor_Scalar",
    "blocks.2.norm",
    after=("aten.add.Tensor", "blocks.1"),
)
SWAP = Planted("swap-tokens@step=2", "origin", "op", "hybrid.order_tokens.default", "blocks.1.mixer")
# Two routers in two micro-batches; the first of them leads.
RACE = Planted("race-aux-loss@step=2", "origin", "op", "hybrid.ordered_sum.default", "blocks.1.mixer.router", others=3)
REORDER = Planted("reorder-reduction@step=2", "origin", "op", "hybrid.ordered_sum.default", phase="between")
WEIGHT = Planted(
    "weight-bit@step=2",
    "uncaptured-producer",
    "parameter",
    "parameters",
    "embedding.weight",
    "optimizer",
    after=("aten._foreach_addcdiv_.ScalarList", ""),
)
DRIFT = Planted(
    "replica-drift@step=2",
    "outside-the-trace",
    "control-flow",
    "aten.mul_.Tensor",
    "norm.weight",
    "optimizer",
    alone=True,
)
TOKEN = Planted("wrong-token@step=2", "outside-the-trace", "data", "batch")
DRAW = Planted("extra-draw@step=2", "outside-the-trace", "rng", "aten.rand.default", phase="between", alone=True)
# What a metric is computed by comes after its step, and is recorded with the next.
_METRIC = Planted("", "outside-the-trace", "control-flow", "", phase="between", alone=True, step=3, until=3)

ONE_RANK = [
    NUDGE,
    HIDDEN,
    SWAP,
    RACE,
    replace(REORDER, args=("--batch-size", "3", "--micro-batches", "3")),
    WEIGHT,
    Planted("nan@step=2", "outside-the-trace", "control-flow", "aten.mul.Tensor", phase="between", alone=True),
    replace(_METRIC, fault="negative-zero@step=2", op="aten.neg.default"),
    replace(_METRIC, fault="heal@step=2", op="aten.clone.default"),
    replace(_METRIC, fault="small@step=2", op="aten.clone.default"),
    Planted("hash-order@step=2", "outside-the-trace", "data", "batch"),
    Planted("directory-order@step=2", "outside-the-trace", "data", "batch"),
    TOKEN,
    DRAW,
    Planted(
        "save-draws",
        "outside-the-trace",
        "rng",
        "aten.rand.default",
        phase="between",
        alone=True,
        args=("--save-every", "1"),
    ),
]
TWO_RANKS = [NUDGE.on(1), HIDDEN.on(1), SWAP.on(1), REORDER, TOKEN.on(1), DRAW.on(1)]
FOUR_RANKS = [RACE.on(3), WEIGHT.on(2)]
MORE_RANKS = [RACE.on(1), WEIGHT.on(1), DRIFT.on(1), NUDGE, HIDDEN, SWAP, RACE, WEIGHT, TOKEN, DRAW]

_benches: dict[tuple[int, int, tuple[str, ...]], Bench] = {}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _benches.clear()
    return tmp_path_factory.mktemp("benches")


def compared(planted: Planted, ranks: int, place: Path) -> TraceComparison:
    # A fault of saving is held against an arm that does not save.
    clean = () if planted.fault == "save-draws" else planted.args
    key = (ranks, planted.until, clean)
    if key not in _benches:
        folder = place / str(len(_benches))
        folder.mkdir()
        _benches[key] = Bench(folder, ranks, clean, window=(2, planted.until))
    return _benches[key].planted(planted.fault, *(planted.args if clean != planted.args else ()))


def check(planted: Planted, result: TraceComparison, ranks: int) -> None:
    lead = lead_of(result)
    told = described(lead)
    assert (lead.role, lead.kind) == (planted.role, planted.kind), told
    event = lead.event
    assert (event.op, event.scope, event.phase) == (planted.op, planted.scope, planted.phase), told
    assert (event.step, lead.rank) == (planted.step, planted.rank), told
    assert (lead.a is None, lead.b is None) == (planted.alone, False), told
    after = None if lead.after is None else (lead.after.op, lead.after.scope)
    assert after == planted.after, told
    assert (result.pattern == "origin") is (planted.role == "origin")
    on = ranks if "rank=" not in planted.fault else 1
    assert len(result.others) == on * (planted.others + 1) - 1, [described(other) for other in result.others]
    assert all((other.role, other.event.op) == (planted.role, planted.op) for other in result.others)


@pytest.mark.parametrize("planted", TWO_RANKS, ids=lambda planted: planted.fault)
def test_a_fault_on_two_ranks_is_found_where_it_was_planted(planted: Planted, place: Path) -> None:
    check(planted, compared(planted, 2, place), 2)


@pytest.mark.parametrize("planted", FOUR_RANKS, ids=lambda planted: planted.fault)
def test_a_fault_on_four_ranks_is_found_where_it_was_planted(planted: Planted, place: Path) -> None:
    check(planted, compared(planted, 4, place), 4)


@pytest.mark.full
@pytest.mark.parametrize("planted", ONE_RANK, ids=lambda planted: planted.fault)
def test_a_fault_is_found_where_it_was_planted(planted: Planted, place: Path) -> None:
    check(planted, compared(planted, 1, place), 1)


@pytest.mark.full
@pytest.mark.parametrize("planted", MORE_RANKS, ids=lambda planted: planted.fault)
def test_more_faults_on_two_ranks(planted: Planted, place: Path) -> None:
    check(planted, compared(planted, 2, place), 2)


@pytest.mark.parametrize("fault", ["", "slow@step=1,seconds=0.05"], ids=["no fault", "slow"])
def test_nothing_is_found_where_nothing_differs(fault: str, place: Path) -> None:
    bench = Bench(place, 2)
    _benches.setdefault((2, 2, ()), bench)
    result = _benches[2, 2, ()].planted(fault)
    assert (result.verdict, result.lead, result.others) == ("identical", None, [])
    assert result.events > 5000


# Of a resume


@dataclass(frozen=True)
class Restored:
    """A fault at restore: the culprit of its resume check. read: whether a traced step reads what came back wrong."""

    fault: str
    kind: str
    name: str
    rank: int = 0
    read: bool = True


RESTORED = [
    Restored("resume-nudge-parameter", "parameter", "norm.weight"),
    Restored("resume-lose-buffer", "buffer", "expert_bias"),
    Restored("resume-lose-moments", "optimizer", "exp_avg"),
    Restored("resume-round-moment", "optimizer", "exp_avg_sq"),
    Restored("resume-optimizer-step", "optimizer", "step"),
    Restored("resume-hyper-parameter", "optimizer", "lr"),
    Restored("resume-schedule-twice", "scheduler", "last_epoch"),
    Restored("resume-lose-ema", "ema", "ema"),
    Restored("resume-lose-stream@stream=python", "rng", "python"),
    Restored("resume-lose-stream@stream=numpy", "rng", "numpy"),
    Restored("resume-lose-stream@stream=torch", "rng", "torch_cpu"),
    Restored("resume-lose-stream@stream=order_generator", "rng", "order_generator"),
    Restored("resume-lose-stream@stream=crop_generator", "rng", "crop_generator"),
    Restored("resume-extra-draw", "rng", "torch_cpu"),
    Restored("resume-restart-data", "data", "loader"),
    Restored("resume-skip-batch@batches=2", "data", "loader"),
    Restored("resume-count-prefetched", "data", "loader"),
    Restored("resume-repeat-batch", "data", "loader"),
]
LOW_PRECISION = [
    ("fp8", Restored("resume-lose-amax", "buffer", "amax")),
    ("fp8", Restored("resume-requantize", "precision", "weight")),
    ("mxfp8", Restored("resume-requantize", "precision", "weight")),
    ("nvfp4", Restored("resume-requantize", "precision", "weight")),
]


def check_restored(bench: ResumeBench, restored: Restored) -> None:
    """A difference that was there before the first batch; no operation is blamed for it."""
    result, verdict = bench.resumed(restored.fault)
    assert verdict.culprit is not None
    assert verdict.culprit["kind"] == restored.kind
    assert restored.name in verdict.culprit["name"]
    if not restored.read:
        assert result.lead is None, described(result.lead)
        return
    lead = lead_of(result)
    assert follows_the_restore(lead), described(lead)
    assert lead.rank == restored.rank
    assert not [other for other in result.others if not follows_the_restore(other)]


@pytest.fixture(scope="module")
def resumes(tmp_path_factory: pytest.TempPathFactory) -> ResumeBench:
    bench = ResumeBench(tmp_path_factory.mktemp("resumes"), args=("--expert-bias", "0.001", "--prefetch", "2"))
    result, verdict = bench.resumed(None)
    assert verdict.verdict == "identical"
    assert (result.verdict, result.lead) == ("identical", None)
    return bench


@pytest.mark.full
@pytest.mark.parametrize("restored", RESTORED, ids=lambda restored: restored.fault)
def test_a_fault_at_restore_blames_no_operation(restored: Restored, resumes: ResumeBench) -> None:
    check_restored(resumes, restored)


@pytest.mark.full
def test_a_loss_scale_that_starts_anew(tmp_path: Path) -> None:
    bench = ResumeBench(tmp_path, args=("--loss-scaling",))
    check_restored(bench, Restored("resume-reset-scaler", "scaler", "scale"))


@pytest.mark.full
@pytest.mark.parametrize(
    "restored",
    [
        Restored("resume-rank0-rng", "rng", "torch_cpu", 1),
        Restored("resume-lose-moments@rank=1", "optimizer", "exp_avg", 1),
    ],
    ids=lambda restored: restored.fault,
)
def test_a_fault_at_the_restore_of_one_rank(restored: Restored, tmp_path: Path) -> None:
    check_restored(ResumeBench(tmp_path, ranks=2), restored)


@pytest.mark.full
@pytest.mark.parametrize(("low_precision", "restored"), LOW_PRECISION, ids=str)
def test_low_precision_weights_at_restore(low_precision: str, restored: Restored, tmp_path: Path) -> None:
    check_restored(ResumeBench(tmp_path, args=("--low-precision", low_precision)), restored)


# The whole command


def localized(folder: Path, fault: str, *more: str) -> Ran:
    return localize(program_recipe(folder, steps=4), "--arm", f"b.args=--fault {fault}", *more)


def place_of(culprit: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(culprit[name] for name in ("role", "kind", "name", "scope", "phase", "rank", "step", "microbatch"))


def left_behind(folder: Path) -> tuple[Path, list[str]]:
    """The experiment's folder, and its passes in order."""
    (found,) = (folder / ".detrun").glob("*-localize-*")
    return found, sorted(path.name for path in (found / "passes").glob("[0-9]*"))


def test_an_origin_from_the_metrics_to_its_bytes(tmp_path: Path) -> None:
    ran = localized(tmp_path, "nudge@step=2")
    assert ran.code == 1, ran.explain()
    verdict = ran.verdict
    assert (verdict["verdict"], verdict["experiment"], verdict["not_verified"]) == ("diverged", "localize", [])
    assert verdict["first_divergence"]["step"] == 2
    culprit = verdict["culprit"]
    op, scope = "hybrid.gated_norm.default", "blocks.2.mixer.norm"
    assert place_of(culprit) == ("origin", "op", op, scope, "forward", 0, 2, 0)
    assert (culprit["occurrence"], culprit["ranks"], culprit["after"]) == (0, [0], None)
    assert culprit["call_site"].startswith("mamba.py:")
    assert culprit["inputs"] == "3 tensors, 16.6 kB, equal"
    (bytes_,) = findings(ran, "bytes")
    assert (bytes_["evidence"]["elements"], bytes_["evidence"]["differing"]) == (2048, 1)
    assert bytes_["evidence"]["max_ulp"] == 1
    assert findings(ran, "cause")[0]["evidence"]["catalog"] == culprit["catalog"]
    assert culprit["fix"]
    (reproduction,) = findings(ran, "reproduction")
    assert "torch alone cannot call it" in reproduction["what"]
    assert [finding["evidence"]["level"] for finding in findings(ran, "descent")] == [1, 4]
    (table,) = findings(ran, "clean-table")
    assert sum(row["differing"] for row in table["evidence"]["rows"]) == 1
    (observer,) = findings(ran, "observer")
    assert observer["evidence"]["repeats"] == ["a", "b"]
    assert findings(ran, "coverage")[0]["evidence"]["level"] == 4
    folder, passes = left_behind(tmp_path)
    assert passes == ["1-pair", "2-operators", "3-bytes"]
    page = (folder / "report.html").read_text()
    assert op.rpartition(".")[0].replace(".", "::") in page or op in page
    # Arm a repeats itself, so arm b was held against its digests while it ran, and kept what differed first.
    kept = (folder / "passes/3-bytes/arms/b/attempt-0/kept/rank00000.jsonl").read_text()
    assert '"live":true' in kept
    # A localization that is done is told again, and nothing is run.
    again = detrun("localize", folder.name, "--json", cwd=tmp_path)
    assert (again.code, again.verdict["culprit"]) == (1, culprit)
    assert left_behind(tmp_path)[1] == passes


def test_a_producer_that_no_operator_shows_is_bracketed(tmp_path: Path) -> None:
    ran = localized(tmp_path, "nudge-hidden@step=2")
    assert ran.code == 1, ran.explain()
    culprit = ran.verdict["culprit"]
    op, scope = "aten.pow.Tensor_Scalar", "blocks.2.norm"
    assert place_of(culprit) == ("uncaptured-producer", "op", op, scope, "forward", 0, 2, 0)
    after = {"op": "aten.add.Tensor", "scope": "blocks.1", "phase": "forward", "step": 2}
    assert culprit["after"].items() >= after.items()
    assert culprit["inputs"] is None
    (bytes_,) = findings(ran, "bytes")
    assert bytes_["evidence"]["tensor"] == "input 0"
    assert (bytes_["evidence"]["differing"], bytes_["evidence"]["max_ulp"]) == (1, 1)
    assert findings(ran, "reproduction") == []


def test_one_draw_too_many_is_no_racing_dropout(tmp_path: Path) -> None:
    ran = localized(tmp_path, "extra-draw@step=2")
    assert ran.code == 1, ran.explain()
    culprit = ran.verdict["culprit"]
    assert place_of(culprit)[:3] == ("outside-the-trace", "rng", "aten.rand.default")
    assert (culprit["step"], culprit["arms"]) == (2, ["b"])
    assert culprit["catalog"] == findings(ran, "cause")[0]["evidence"]["catalog"]
    assert left_behind(tmp_path)[1] == ["1-pair", "2-operators"], "arm a has no such event whose bytes could be kept"


def test_a_metric_alone_is_looked_for_where_it_is_computed(tmp_path: Path) -> None:
    ran = localized(tmp_path, "negative-zero@step=2")
    assert ran.code == 1, ran.explain()
    culprit = ran.verdict["culprit"]
    assert place_of(culprit)[:3] == ("outside-the-trace", "control-flow", "aten.neg.default")
    assert ran.verdict["first_divergence"]["step"] == 2


def test_a_resume_that_diverged_is_localized_by_its_id(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"checkpoint": {**SAVES, "save_every": 3}, "interrupt": {"kind": "kill", "at_step": 4}}
    path = program_recipe(tmp_path, steps=6, **keys)
    arm = "b.args=--fault resume-round-moment"
    checked = detrun("resume-check", str(path), "--json", "--arm", arm, cwd=tmp_path)
    assert checked.code == 1, checked.explain()
    ran = detrun("localize", checked.verdict["id"], "--json", cwd=tmp_path)
    assert ran.code == 1, ran.explain()
    culprit, blamed = ran.verdict["culprit"], checked.verdict["culprit"]
    assert (culprit["role"], culprit["kind"]) == ("outside-the-trace", "optimizer")
    assert culprit["names"] == blamed["names"]
    assert any("exp_avg_sq" in str(name) for name in culprit["names"])
    assert (culprit["phase"], culprit["step"]) == ("optimizer", 4), "where it is read first"
    assert not findings(ran, "reproduction")


def test_a_recipe_that_repeats_itself_has_nothing_to_localize(tmp_path: Path) -> None:
    ran = localize(program_recipe(tmp_path), "--repeat", "1")
    assert ran.code == 0, ran.explain()
    assert (ran.verdict["verdict"], ran.verdict["culprit"]) == ("identical", None)
    assert "nothing to localize" in findings(ran, "levels")[0]["what"]
    assert left_behind(tmp_path)[1] == ["1-pair"]


def sometimes(folder: Path, *launches: int) -> Path:
    """A program whose launches of these numbers compute something else; every pass launches it twice."""
    program = [str(TRAINERS / "sometimes.py"), "--steps", "{steps}", "--seed", "{seed}", "--out", "{out}"]
    args = ["--count", str(folder / "launches"), "--launches", *map(str, launches)]
    keys = {"launch": {"launcher": "none", "ranks_per_node": 1, "command": [sys.executable, *program]}, "metrics": {}}
    return write_recipe(folder, args=args, steps=3, **keys)


def test_a_fault_that_does_not_come_back_is_not_verified(tmp_path: Path) -> None:
    ran = localize(sometimes(tmp_path, 2), "--repeat", "2")
    assert ran.code == 3, ran.explain()
    assert (ran.verdict["verdict"], ran.verdict["culprit"]) == ("not-verified", None)
    (told,) = findings(ran, "not-repeated")
    assert told["evidence"]["tries"] == 2
    assert findings(ran, "repeats")[0]["evidence"] == {"came_back": 0, "of": 2}
    assert left_behind(tmp_path)[1] == ["1-pair", "2-operators", "3-operators-2"]


def test_a_fault_that_comes_back_now_and_then_is_waited_for(tmp_path: Path) -> None:
    ran = localize(sometimes(tmp_path, 2, 6), "--repeat", "2", "--no-bytes")
    assert ran.code == 1, ran.explain()
    culprit = ran.verdict["culprit"]
    assert (culprit["role"], culprit["step"]) == ("outside-the-trace", 2)
    assert findings(ran, "repeats")[0]["evidence"] == {"came_back": 1, "of": 2}
