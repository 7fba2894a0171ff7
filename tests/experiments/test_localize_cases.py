"""The cases of real-life faults, localized: the operation that each names, or what lies outside of all operations."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from detrun.compare.trace_summary import TraceComparison
from detrun.experiments.compare_traces import compare_traces
from tests.experiments.localizing import described, findings, lead_of, localize, traced
from tests.experiments.test_resume_cases import CASES, CULPRITS, RANKS
from tests.experiments.test_resume_cases import recipe_of as resume_recipe_of
from tests.running import detrun

pytestmark = pytest.mark.slow


def case_of(name: str) -> dict[str, Any]:
    document = yaml.safe_load((CASES / name / "case.yaml").read_text())
    assert isinstance(document, dict)
    return document


def recipe_of(name: str, folder: Path, steps: int = 2, **keys: Any) -> Path:
    """The case at its own number of ranks."""
    launch = case_of(name)["launch"]
    program = [sys.executable, str(CASES / name / "train.py")]
    recipe = {
        "name": "case",
        "cluster": "local",
        "launch": {
            "launcher": "torchrun" if launch["nproc"] > 1 else "none",
            "ranks_per_node": launch["nproc"],
            "command": [*program, "--steps", "{steps}", "--seed", "{seed}", "--out", "{out}"],
            "env": {"OMP_NUM_THREADS": "1"},
        },
        "steps": steps,
        "seed": launch["seed"],
        "watchdog": {"start": 60.0},
        **keys,
    }
    path = folder / "case.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def compared(path: Path, steps: tuple[int, int] = (1, 1)) -> TraceComparison:
    """Two traced runs of a recipe."""
    a, b = traced(path, arms_wanted=2, steps=steps)
    result = compare_traces(a, b)
    assert not result.incomplete, result.incomplete
    return result


def origins(result: TraceComparison) -> list[str]:
    leads = [result.lead, *result.others] if result.lead else []
    return [described(lead) for lead in leads if lead is not None and lead.role == "origin"]


def test_a_reduction_in_the_order_of_arrival_is_the_origin_on_each_rank(tmp_path: Path) -> None:
    case = case_of("pair_allreduce_arrival_2rank")
    result = compared(recipe_of("pair_allreduce_arrival_2rank", tmp_path))
    lead = lead_of(result)
    assert (lead.role, lead.event.step) == ("origin", case["culprit"]["step"]), described(lead)
    assert lead.event.op.removesuffix(".default") == case["culprit"]["name"]
    assert not lead.inputs
    (group,) = result.groups
    assert group.ranks == (0, 1)


def test_a_fused_loss_that_adds_as_it_comes_is_the_origin_in_the_first_layer(tmp_path: Path) -> None:
    ran = localize(recipe_of("pair_aux_loss_atomics", tmp_path, 3))
    assert ran.code == 1, ran.explain()
    case, culprit = case_of("pair_aux_loss_atomics")["culprit"], ran.verdict["culprit"]
    assert culprit["name"].removesuffix(".default") == case["name"]
    found = tuple(culprit[name] for name in ("role", "kind", "scope", "step", "phase", "rank"))
    assert found == ("origin", case["kind"], case["scope"], case["step"], "forward", 0)
    assert culprit["catalog"] == "fused-atomics"
    assert culprit["call_site"].startswith("train.py:")
    (bytes_,) = findings(ran, "bytes")
    assert bytes_["evidence"]["differing"] >= 1
    assert bytes_["evidence"]["max_ulp"] >= 1
    assert findings(ran, "reproduction")


def test_experts_added_as_they_arrive_blame_no_operation(tmp_path: Path) -> None:
    result = compared(recipe_of("pair_moe_arrival_order", tmp_path))
    lead = lead_of(result)
    assert (lead.role, lead.kind) == ("outside-the-trace", "control-flow"), described(lead)
    event = lead.event
    assert (event.op.split(".")[1].rstrip("_"), event.scope, event.step) == ("index_add", "blocks.1.ffn", 1)
    assert origins(result) == []


def test_a_vocabulary_in_hash_order_is_data_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    result = compared(recipe_of("pair_hashseed_vocab", tmp_path, pin="none"))
    lead = lead_of(result)
    assert (lead.role, lead.kind, lead.event.step) == ("outside-the-trace", "data", 1), described(lead)
    assert origins(result) == []


@pytest.mark.parametrize(
    ("name", "steps", "window"),
    [
        ("control_ddp_2rank", 2, (1, 2)),
        ("control_everything_saved", 8, (1, 2)),  # it steps its optimizer every few steps of its own
        ("control_nan_losses", 7, (6, 7)),
    ],
)
def test_nothing_is_found_in_a_control(name: str, steps: int, window: tuple[int, int], tmp_path: Path) -> None:
    result = compared(recipe_of(name, tmp_path, steps), window)
    assert (result.verdict, result.lead, result.others) == ("identical", None, [])
    assert result.events > 100


def resumes() -> list[Any]:
    """In CI one of them; one with two ranks, and the others, where everything is run."""
    marks = {"resume_numpy_rng_lost": []}
    return [pytest.param(name, marks=marks.get(name, [pytest.mark.full])) for name in CULPRITS]


@pytest.mark.parametrize("name", resumes())
def test_what_a_resume_lost_is_named(name: str, tmp_path: Path) -> None:
    resume = case_of(name)["expect"]["resume"][0]
    path = resume_recipe_of(name, resume, tmp_path)
    checked = detrun("resume-check", str(path), "--json", "--fresh", cwd=tmp_path, env=dict(os.environ))
    assert checked.code == 1, checked.explain()
    ran = detrun("localize", checked.verdict["id"], "--json", cwd=tmp_path)
    assert ran.code == 1, ran.explain()
    kind, names = CULPRITS[name]
    culprit = ran.verdict["culprit"]
    assert (culprit["role"], culprit["kind"]) == ("outside-the-trace", kind), ran.explain()
    told = str(culprit["names"])
    assert all(text in told for text in names), told
    assert culprit["ranks"] == RANKS.get(name, culprit["ranks"])
