"""Verdicts of `detrun localize` and `detrun trace` as data, one a scene: what the experiment hands to the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from detrun.records.jobs import ArmPlan, ExperimentFile
from detrun.records.verdict import ArmSummary, AttemptSummary, Figure, Finding, FirstDivergence, Severity, Verdict

ID = "hybrid-cpu-localize-20261129T101502-3f9a"
READING = "on all ranks compared: look at the operation itself"
ACCUMULATE = "atomic or threaded accumulation in varying order"


def experiment(**fields: Any) -> ExperimentFile:
    """What was asked. fields: those of ExperimentFile."""
    made: dict[str, Any] = {
        "id": ID,
        "experiment": "localize",
        "created": "2026-11-29T10:15:02Z",
        "recipe": {"name": "hybrid-cpu"},
        "recipe_path": "recipes/hybrid-cpu.yaml",
        "command_line": ["detrun", "localize", "recipes/hybrid-cpu.yaml"],
        "cluster": "local",
        "placement": "pinned",
        "arms": [ArmPlan(id="a", role="reference"), ArmPlan(id="b", role="repeat")],
        "ranks": 2,
        "steps": 30,
        "seed": 1234,
        "pinned": {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
    }
    return ExperimentFile.model_validate({**made, **fields})


def finding(kind: str, what: str = "", severity: Severity = "info", **evidence: Any) -> Finding:
    where = evidence.pop("where", {})
    return Finding(kind=kind, severity=severity, where=where, what=what or kind, evidence=evidence)


def descent(level: int, events: int | None, differing: int = 0, origins: int = 0, **fields: Any) -> Finding:
    name = {1: "metrics", 2: "semantic", 3: "modules", 4: "operators"}[level]
    counted = {} if events is None else {"events": events, "equal": events - differing, "differing": differing}
    evidence = {"level": level, "name": name, **counted, "origins": origins, "steps": [1, 1], "ranks": [0, 1], **fields}
    return finding("descent", f"level {level}", where={"level": level}, **evidence)


def coverage(*not_captured: str, **fields: Any) -> Finding:
    evidence = {"level": 4, "steps": [1, 1], "ranks": [0, 1], "not_captured": list(not_captured), "opaque": {}}
    return finding("coverage", "what was traced", **{**evidence, **fields})


def kernels(*names: str, threads: int = 2) -> list[dict[str, str]]:
    launched = [{"kind": "kernel", "name": name} for name in names]
    return [*launched, {"kind": "setting", "name": "threads", "value": str(threads)}]


def verdict(word: str, findings: Sequence[Finding], culprit: dict[str, Any] | None = None, **fields: Any) -> Verdict:
    """A verdict on these findings. fields: those of Verdict."""
    first = FirstDivergence(step=1, boundary="end", stream="gradients", ranks=[0], arms=["a", "b"])
    attempts = [AttemptSummary(n=0, jobs=["4182"], nodes=["node1"], first_step=1, last_step=2, exit_code=0)]
    made: dict[str, Any] = {
        "id": ID,
        "experiment": "localize",
        "recipe": "hybrid-cpu",
        "verdict": word,
        "exit_code": {"identical": 0, "diverged": 1, "not-verified": 3}[word],
        "first_divergence": first if word == "diverged" else None,
        "culprit": culprit,
        "findings": list(findings),
        "not_verified": [f.what for f in findings if f.severity in ("infrastructure", "not-verified")],
        "arms": [
            ArmSummary(id=arm, role=role, attempts=attempts) for arm, role in (("a", "reference"), ("b", "repeat"))
        ],
    }
    return Verdict.model_validate({**made, **fields})


def culprit(**fields: Any) -> dict[str, Any]:
    made = {
        "kind": "op",
        "name": "aten.index_put_.default",
        "names": ["aten.index_put_.default"],
        "scope": "layers.1.moe",
        "phase": "backward",
        "rank": 0,
        "ranks": [0],
        "coordinates": {"dp": 0},
        "step": 1,
        "microbatch": 0,
        "occurrence": 2,
        "call_site": "train.py:212 in combine",
        "role": "origin",
        "after": None,
        "inputs": "3 tensors, 1.2 MB, equal",
        "catalog": "accumulate-order",
        "fix": None,
    }
    return {**made, **fields}


def accumulated() -> Finding:
    return finding(
        "cause",
        ACCUMULATE,
        catalog="accumulate-order",
        title=ACCUMULATE,
        why="the operation adds to rows that several threads share",
        confirm="detrun localize --set pin.threads=1",
        fix="torch.use_deterministic_algorithms(True), or sort the indices and sum each run of equal ones",
    )


def origin() -> tuple[Verdict, ExperimentFile]:
    """An operation whose inputs are equal and whose output differs, down to its bytes and a script."""
    findings = [
        descent(1, None),
        descent(4, 1214, 1, 1),
        finding(
            "bytes",
            elements=32768,
            differing=118,
            min_ulp=1,
            max_ulp=2,
            rows=[17, 40, 41, 90],
            rows_total=12,
            permutation=None,
            nan=0,
            signed_zeros=0,
            dtype="float32",
            shape=[512, 64],
            bitmap="....#...##......................................................",
        ),
        accumulated(),
        finding("confirmed", experiment="torch.use_deterministic_algorithms(True)", identical=3, of=3),
        finding("confirmed", experiment="one thread", identical=3, of=3),
        finding("confirmed", experiment="PYTHONHASHSEED pinned", identical=0, of=3),
        finding("reproduction", script="repro/aten_index_put.py", distinct=12, runs=12, text=""),
        finding("observer", "traced metrics carry the bits of the untraced ones"),
        coverage("collectives by C++ extensions", opaque={"fused_adam": 2}),
    ]
    return verdict("diverged", findings, culprit()), experiment()


def many_origins() -> tuple[Verdict, ExperimentFile]:
    """The same operation on every rank and in several layers; which of its calls were clean; kernels that differ."""
    places = [
        {"scope": f"layers.{layer}.attention", "rank": rank, "op": "aten.mm.default", "step": 7}
        for layer in (1, 2, 3)
        for rank in (0, 1)
    ]
    rows = [
        {"by": "shape", "value": "float32[128,64] float32[64,64]", "clean": 12, "differing": 0},
        {"by": "shape", "value": "float32[512,64] float32[64,64]", "clean": 0, "differing": 6},
        {"by": "phase", "value": "forward", "clean": 9, "differing": 6},
        {"by": "rank", "value": "0", "clean": 6, "differing": 3},
    ]
    findings = [
        descent(2, 310, 44, 0, steps=[7, 7]),
        descent(3, 812, 120, 6, steps=[7, 7]),
        descent(4, 3028, 961, 6, steps=[7, 7]),
        finding("spread", places=places[1:], groups=[{"op": "aten.mm.default", "reading": READING}]),
        finding(
            "propagation", rows=[{**each, "phase": "forward", "scope": f"layers.{n}"} for n, each in enumerate(places)]
        ),
        finding("clean-table", rows=rows),
        finding("kernels", "other kernels in the arms", a=kernels("gemm", "splitk_reduce"), b=kernels("gemm")),
        finding("bytes", "the bytes do not settle it (3 passes): arm b kept nothing of it", "warning"),
        finding("reproduction", script="repro/aten_mm.py", distinct=1, runs=12, text=""),
        coverage(steps=[7, 7]),
    ]
    blamed = culprit(
        name="aten.mm.default",
        scope="layers.1.attention",
        phase="forward",
        ranks=[0, 1],
        step=7,
        call_site=None,
        inputs="2 tensors, 148 kB, equal",
        catalog=None,
    )
    return verdict("diverged", findings, blamed), experiment()


def uncaptured() -> tuple[Verdict, ExperimentFile]:
    """Something between two events wrote what the trace does not see."""
    after = {"op": "aten._to_copy.default", "scope": "layers.0.norm", "phase": "forward", "step": 7}
    blamed = culprit(
        role="uncaptured-producer",
        name="aten.mm.default",
        scope="layers.0.mlp",
        phase="forward",
        step=7,
        rank=1,
        ranks=[1],
        after=after,
        inputs="2 tensors, 148 kB, the first differs",
    )
    findings = [descent(4, 3028, 700, 0, steps=[7, 7]), coverage("writes of C++ extensions", steps=[7, 7])]
    return verdict("diverged", findings, blamed), experiment()


def _outside(kind: str, name: str, **fields: Any) -> tuple[Verdict, ExperimentFile]:
    more = {"phase": "forward", "scope": "experts.3", "call_site": None, "inputs": None, **fields}
    blamed = culprit(role="outside-the-trace", kind=kind, name=name, catalog=None, ranks=[0, 1], **more)
    findings = [descent(4, 3028, 700, 0), coverage()]
    return verdict("diverged", findings, blamed), experiment()


def from_data() -> tuple[Verdict, ExperimentFile]:
    return _outside("data", "batch", phase="between", scope="")


def from_rng() -> tuple[Verdict, ExperimentFile]:
    return _outside("rng", "aten.native_dropout.default", scope="layers.0.dropout")


def from_order() -> tuple[Verdict, ExperimentFile]:
    return _outside("control-flow", "aten.mm.default")


def from_scalar() -> tuple[Verdict, ExperimentFile]:
    why = "its plain arguments are 0x1.0p-1 in A and 0x1.8p-1 in B"
    return _outside("scalar", "aten.mul.Scalar", scope="", why=why)


def nothing() -> tuple[Verdict, ExperimentFile]:
    findings = [descent(1, None), descent(4, 3028, steps=[7, 9]), coverage(steps=[7, 9])]
    return verdict("identical", findings), experiment()


def a_pair_was_enough() -> tuple[Verdict, ExperimentFile]:
    """No pair diverged, so that nothing was traced: the verdict is the last pair's."""
    metrics = {"steps": 30, "metrics": ["loss", "grad_norm"], "batch": True}
    findings = [
        finding("levels", "3 pairs of the recipe came out identical: there is nothing to localize", pairs=3),
        finding("same-nodes", "same nodes: node1"),
        finding("coverage", "compared by bits: 2 metrics", **metrics),
    ]
    return verdict("identical", findings), experiment()


def pair_not_verified() -> tuple[Verdict, ExperimentFile]:
    """The pair that was to show the step left nothing to compare."""
    what = "there is nothing that both arms recorded"
    return verdict("not-verified", [finding("nothing-compared", what, "not-verified")]), experiment()


def trace_changed_the_run() -> tuple[Verdict, ExperimentFile]:
    what = "grad_norm of the traced arm a differs from the untraced one's at step 1, rank 0 (1 ULP)"
    return verdict("not-verified", [finding("observer", what, "not-verified"), descent(1, None)]), experiment()


def did_not_come_back() -> tuple[Verdict, ExperimentFile]:
    what = "the fault came back in 0 of 3 tries: every traced pair was identical"
    return verdict("not-verified", [finding("not-repeated", what, "not-verified"), descent(1, None)]), experiment()


def incomplete() -> tuple[Verdict, ExperimentFile]:
    what = "arm b, rank 1: the trace ends at step 1 (byte budget)"
    findings = [finding("trace", what, "not-verified"), descent(4, 900), coverage()]
    return verdict("not-verified", findings), experiment()


def outside_the_capture() -> tuple[Verdict, ExperimentFile]:
    what = "step 1 on ranks 0-1 was traced at level 4; the gradients differ at its end all the same"
    findings = [
        finding("outside-the-capture", what, "not-verified", widen="--steps 1-3"),
        descent(1, None),
        descent(4, 3028),
        coverage(),
    ]
    return verdict("not-verified", findings), experiment()


def died() -> tuple[Verdict, ExperimentFile]:
    job = Finding(
        kind="job",
        severity="infrastructure",
        where={"arm": "b", "rank": 1, "path": "passes/1-operators/arms/b/attempt-0/log/rank00001.log"},
        what="arm b, rank 1: failed with exit code 1; no step recorded",
        evidence={"log_tail": ["RuntimeError: no space left"]},
    )
    return verdict("not-verified", [job, descent(1, None)], exit_code=4), experiment()


def traced() -> tuple[Verdict, ExperimentFile]:
    figures = {
        "trace_events": Figure(value=3028, unit="events", n=2),
        "trace_bytes": Figure(value=118_000, unit="bytes", n=2),
    }
    findings = [coverage("collectives by C++ extensions", steps=[7, 9])]
    return (
        verdict("identical", findings, experiment="trace", figures=figures),
        experiment(experiment="trace", arms=[ArmPlan(id="a", role="reference")]),
    )


SCENES = (
    origin,
    many_origins,
    uncaptured,
    from_data,
    from_rng,
    from_order,
    from_scalar,
    nothing,
    a_pair_was_enough,
    pair_not_verified,
    trace_changed_the_run,
    did_not_come_back,
    incomplete,
    outside_the_capture,
    died,
    traced,
)
