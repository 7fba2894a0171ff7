"""Verdicts on resume checks as data, one a scene: what the comparison hands to the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from detrun.records.jobs import ArmPlan, ExperimentFile, Reference
from detrun.records.verdict import (
    ArmSummary,
    AttemptSummary,
    Figure,
    Finding,
    FirstDivergence,
    MetricDifference,
    Value,
    Verdict,
)

ID = "hybrid-cpu-resume-check-20261129T101502-3f9a"
STEPS = 30
KILL = {"kind": "kill", "step": 14, "microbatch": 0, "ranks": [0, 1], "moment": "end", "planned": True, "detail": {}}
PIECES: Mapping[str, int] = {
    "parameters": 75,
    "gradients": 75,
    "exp_avg": 75,
    "exp_avg_sq": 75,
    "hyperparameters": 24,
    "scheduler": 2,
    "step": 75,
    "RNG numpy": 1,
    "RNG python": 1,
    "RNG torch_cpu": 1,
    "batch": 1,
    "loader": 11,
    "local": 37,
    "ema": 75,
    "module-state": 46,
}
FIXES = {
    "rng": "save detrun.rng_state() with the checkpoint and call detrun.set_rng_state() last",
    "optimizer": "save and load the optimizer's state_dict on every rank, in the dtype it has",
    "data": "save the loader's position as of the batches consumed, and restore it",
}


def experiment(**fields: Any) -> ExperimentFile:
    """What was asked. fields: those of ExperimentFile."""
    plans = [ArmPlan(id="a", role="reference"), ArmPlan(id="b", role="interrupted")]
    made: dict[str, Any] = {
        "id": ID,
        "experiment": "resume-check",
        "created": "2026-11-29T10:15:02Z",
        "recipe": {"name": "hybrid-cpu"},
        "recipe_path": "recipes/hybrid-cpu.yaml",
        "command_line": ["detrun", "resume-check", "recipes/hybrid-cpu.yaml"],
        "cluster": "local",
        "placement": "pinned",
        "arms": plans,
        "ranks": 2,
        "steps": STEPS,
        "seed": 1234,
        "pinned": {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        "interrupts": [{"kind": "kill", "at_step": 14}],
    }
    return ExperimentFile.model_validate({**made, **fields})


def reference_elsewhere() -> dict[str, Any]:
    """Fields of an experiment whose reference is a pair's arm."""
    other = "hybrid-cpu-pair-20261128T020000-77aa"
    return {"reference": Reference(experiment=other, path=f".detrun/{other}", arm="a")}


def attempts(
    stops: Sequence[tuple[int, dict[str, Any] | None, int | None]],
    rejected: Sequence[dict[str, str]] = (),
) -> list[AttemptSummary]:
    """Attempts of the interrupted arm: last step, why it ended by plan, and the step it was told to go on from."""
    return [
        AttemptSummary(
            n=number,
            jobs=["4182"],
            nodes=["node1"],
            first_step=(told or 0) + 1,
            last_step=last,
            exit_code=0 if interruption is None else 137,
            remark=f"interrupted by plan (kill) after step {last}" if interruption else None,
            interruption=interruption,
            resumed_from=None if told is None else _told(told, rejected if number == len(stops) - 1 else ()),
        )
        for number, (last, interruption, told) in enumerate(stops)
    ]


def _told(step: int, rejected: Sequence[dict[str, str]]) -> dict[str, Any]:
    return {"path": f"/ckpt/step-{step}", "step": step, "microbatch": 0, "rejected": list(rejected)}


ONCE: Sequence[tuple[int, dict[str, Any] | None, int | None]] = ((14, KILL, None), (STEPS, None, 10))


def table(
    marks: Mapping[str, tuple[str, list[int]]] = MappingProxyType({}),
    *,
    step: int = 10,
    attempt: int = 1,
    pieces: Mapping[str, int] = PIECES,
) -> Finding:
    """The state around a restore. marks: by component, (status after the restore, ranks)."""
    rows = []
    for component, count in pieces.items():
        status, ranks = marks.get(component, ("equal", []))
        saved = "-" if component == "batch" else "equal"
        rows.append({"component": component, "rows": count, "saved": saved, "restored": status, "ranks": ranks})
    where = {"arm": "b", "attempt": attempt, "step": step}
    evidence = {"rows": rows, "step": step, "microbatch": 0, "ranks": 2}
    return Finding(kind="restore-table", severity="info", where=where, what="state after it", evidence=evidence)


def lost(
    component: str,
    name: str,
    who: str,
    ranks: list[int],
    clues: str,
    pieces: Sequence[str],
    *,
    kind: str = "different",
    step: int = 10,
    attempt: int = 1,
) -> Finding:
    """A finding on a component that was not restored. pieces: the names of its rows that differ."""
    of = "optimizer" if component == "optimizer" else component
    differences = [
        {"component": of, "name": piece, "rank": rank, "kind": kind, "dtype": "float32", "elements": 4}
        for rank in ranks
        for piece in pieces
    ]
    verb = "differs" if component == "batch" else "were not restored" if len(pieces) > 1 else "was not restored"
    where = {"arm": "b", "arms": ["a", "b"], "attempt": attempt, "ranks": ranks, "step": step, "component": component}
    return Finding(
        kind="restore",
        severity="divergence",
        where=where,
        what=f"{name} {verb} ({who}): {clues}",
        evidence={"name": name, "differences": differences, "count": len(differences)},
    )


def metric(name: str, step: int, ranks: list[int], bits: tuple[str, str], values: tuple[float, float]) -> Finding:
    """A metric that differs from a step on."""
    a, b = ({"bits": each, "dtype": "float32", "value": value} for each, value in zip(bits, values, strict=True))
    ulp = abs(int(bits[0], 16) - int(bits[1], 16))
    return Finding(
        kind="metric",
        severity="divergence",
        where={"arms": ["a", "b"], "step": step, "ranks": ranks, "stream": name, "metric": name},
        what=f"{name} differs from step {step} on",
        evidence={"a": a, "b": b, "ulp": ulp, "ulp_by_step": [[step, ulp], [step + 1, 3 * ulp]]},
    )


def verdict(
    word: str,
    findings: Sequence[Finding],
    *,
    culprit: dict[str, Any] | None = None,
    stops: Sequence[tuple[int, dict[str, Any] | None, int | None]] = ONCE,
    rejected: Sequence[dict[str, str]] = (),
    recipe: str = "hybrid-cpu",
    id: str = ID,
) -> Verdict:
    """A verdict on these findings; what every check says of nodes and coverage is added."""
    metrics = [finding for finding in findings if finding.kind == "metric"]
    first = None
    if word == "diverged":
        first = FirstDivergence(
            step=metrics[0].where["step"],
            boundary="end",
            stream=metrics[0].where["stream"],
            ranks=metrics[0].where["ranks"],
            arms=["a", "b"],
            metrics={
                finding.where["metric"]: MetricDifference(
                    step=finding.where["step"],
                    ranks=finding.where["ranks"],
                    a=Value.model_validate(finding.evidence["a"]),
                    b=Value.model_validate(finding.evidence["b"]),
                    ulp=finding.evidence["ulp"],
                )
                for finding in metrics
            },
        )
    coverage = {"steps": STEPS, "metrics": ["loss", "lm_loss", "mtp_loss", "grad_norm"], "batch": True, "rng": True}
    common = [
        Finding(kind="same-nodes", severity="info", what="same nodes: node1"),
        Finding(kind="coverage", severity="info", what="compared by bits: 4 metrics", evidence=coverage),
    ]
    codes = {"identical": 0, "diverged": 1, "not-verified": 3}
    everything = [*findings, *common]
    return Verdict(
        id=id,
        experiment="resume-check",
        recipe=recipe,
        verdict=word,  # type: ignore[arg-type]
        exit_code=codes[word],
        first_divergence=first,
        culprit=culprit,
        findings=everything,
        not_verified=[f.what for f in everything if f.severity in ("infrastructure", "not-verified")],
        arms=[
            ArmSummary(id="a", role="reference", attempts=attempts([(STEPS, None, None)])),
            ArmSummary(id="b", role="interrupted", attempts=attempts(stops, rejected)),
        ],
        figures={
            "state_capture_seconds": Figure(value=0.1455, unit="CPU seconds a capture and rank", n=8),
            "recorder_cpu_share": Figure(value=0.043, unit="of CPU time", n=6),
            "state_digest_cpu_share": Figure(value=0.006, unit="of CPU time", n=6),
        },
    )


def overlap(what: str = "steps 11 to 14, run by attempts 0 and 1: the same bits") -> Finding:
    return Finding(kind="overlap", severity="info", where={"arm": "b"}, what=what)


def identical() -> tuple[Verdict, ExperimentFile]:
    return verdict("identical", [overlap(), table()]), experiment(**reference_elsewhere())


def fell_back() -> tuple[Verdict, ExperimentFile]:
    """Two interruptions; the second, in a save, left a partial checkpoint."""
    detail = {"files": 3, "bytes": 10_740_234}
    in_save = {**KILL, "kind": "kill-during-save", "step": 30, "detail": detail}
    stops = ((14, KILL, None), (30, in_save, 10), (STEPS, None, 20))
    partial = {"path": "/ckpt/.saving-30", "why": "its save was cut short on rank 0, 1"}
    findings = [
        overlap(),
        table(),
        table(step=20, attempt=2),
        Finding(kind="saving-harmless", severity="info", what="an arm that never saves took the same steps"),
        Finding(kind="self-test", severity="info", what="self-test: seen when broken on purpose: a moment"),
    ]
    interrupts = [{"kind": "kill", "at_step": 14}, {"kind": "kill-during-save", "at_step": 22}]
    return verdict("identical", findings, stops=stops, rejected=[partial]), experiment(interrupts=interrupts)


def lost_stream() -> tuple[Verdict, ExperimentFile]:
    """A random number stream of every rank, and for that the data of one."""
    clues = "at its state of the very first step: nothing loaded it; the checkpoint holds it"
    findings = [
        lost("rng", "the RNG stream numpy", "every rank", [0, 1], clues, ["numpy"]),
        lost("batch", "the input data", "rank 0", [0], "its first batch is none of the reference's", ["batch"]),
        metric("grad_norm", 11, [0, 1], ("0x3f6fd3ce", "0x3f728562"), (0.93682563, 0.94734776)),
        metric("loss", 11, [0], ("0x408c1009", "0x408bda28"), (4.3769574, 4.3703804)),
        overlap("steps 11 to 14, run by attempts 0 and 1: parted from step 11 on"),
        table({"RNG numpy": ("different", [0, 1]), "batch": ("different", [0]), "local": ("-", [])}),
        Finding(kind="explaining", severity="info", what="may have to do with it: local seen also differ (every rank)"),
        Finding(kind="self-test", severity="info", what="self-test: seen when broken on purpose: a moment"),
    ]
    culprit = {"name": "the RNG stream numpy", "kind": "rng", "step": 10, "fix": FIXES["rng"]}
    plans = [
        ArmPlan(id="a", role="reference"),
        ArmPlan.model_validate({"id": "b", "role": "interrupted", "declared": {"args": ["--fault", "x"]}}),
    ]
    return (
        verdict("diverged", findings, culprit={**culprit, "others": ["the input data"]}),
        experiment(arms=plans),
    )


def lost_moments() -> tuple[Verdict, ExperimentFile]:
    """All of the optimizer's state, on one rank of two."""
    keys = ("exp_avg", "exp_avg_sq", "step")
    names = [f"blocks.{number}.weight.{key}" for key in keys for number in range(75)]
    called = "the optimizer's exp_avg, exp_avg_sq and step of blocks.0.weight, blocks.1.weight and 73 more"
    clues = "nothing is there after the restore; the checkpoint holds it"
    findings = [
        lost("optimizer", called, "rank 1", [1], clues, names, kind="missing"),
        metric("grad_norm", 12, [0, 1], ("0x3f6fd3ce", "0x3f728562"), (0.93682563, 0.94734776)),
        overlap("steps 11 to 14, run by attempts 0 and 1: parted from step 11 on"),
        table({key: ("missing", [1]) for key in keys}),
    ]
    culprit = {"name": called, "kind": "optimizer", "step": 10, "fix": FIXES["optimizer"], "others": []}
    return verdict("diverged", findings, culprit=culprit), experiment()


def restarted_loader() -> tuple[Verdict, ExperimentFile]:
    """The second of two resumes begins the data anew."""
    clues = "the loader starts again: its first batch is that of step 1, 20 steps behind"
    name = "the data loader's position (loader)"
    findings = [
        lost("loader", name, "every rank", [0, 1], clues, ["loader.order_generator"], step=20, attempt=2),
        metric("loss", 21, [0, 1], ("0x408c1009", "0x408bda28"), (4.3769574, 4.3703804)),
        table(),
        table({"loader": ("different", [0, 1]), "batch": ("different", [0, 1])}, step=20, attempt=2),
    ]
    culprit = {"name": name, "kind": "data", "step": 20, "fix": FIXES["data"], "others": []}
    stops = ((14, KILL, None), (22, {**KILL, "step": 22, "ranks": [1]}, 10), (STEPS, None, 20))
    return verdict("diverged", findings, culprit=culprit, stops=stops), experiment()


def unexplained() -> tuple[Verdict, ExperimentFile]:
    """The run parts though all that was captured came back."""
    findings = [
        metric("loss", 13, [0], ("0x408c1009", "0x408c1008"), (4.3769574, 4.3769569)),
        overlap("steps 11 to 14, run by attempts 0 and 1: parted from step 13 on"),
        table(),
    ]
    return verdict("diverged", findings), experiment()


def elsewhere() -> tuple[Verdict, ExperimentFile]:
    """The program did not take the checkpoint that it was given."""
    where = {"arm": "b", "attempt": 1, "step": 10}
    said = "it did not resume: told to go on from step 10, it began again at step 0, silently"
    findings = [
        Finding(
            kind="resumed-elsewhere",
            severity="not-verified",
            where=where,
            what=said,
            evidence={"told": 10, "came_from": 0},
        ),
        Finding(
            kind="state",
            severity="not-verified",
            where={"arm": "b", "ranks": [0, 1]},
            what="the reference has no state at the begin of step 1: the file is missing (every rank)",
        ),
        overlap("steps 1 to 14, run by attempts 0 and 1: the same bits"),
        table(pieces={}),
    ]
    return verdict("not-verified", findings), experiment(**reference_elsewhere())


def not_repeatable() -> tuple[Verdict, ExperimentFile]:
    """The two runs differ before anything was restored."""
    what = "the two runs differ before anything was restored (gradients at step 7): the program does not repeat itself"
    findings = [
        Finding(kind="not-repeatable", severity="not-verified", where={"arms": ["a", "b"], "step": 7}, what=what),
        table({"exp_avg": ("-", []), "parameters": ("-", [])}),
    ]
    return verdict("not-verified", findings), experiment()


def never_interrupted() -> tuple[Verdict, ExperimentFile]:
    """The run reached its end before its interruption."""
    what = "arm b: attempt 0 was never interrupted: it ran to its last step (30); at_step 14 never came to its save"
    none = Finding(kind="not-resumed", severity="not-verified", what="no attempt was resumed")
    findings = [
        Finding(kind="not-interrupted", severity="not-verified", where={"arm": "b"}, what=what),
        none,
    ]
    return verdict("not-verified", findings, stops=((STEPS, None, None),)), experiment()


def died() -> tuple[Verdict, ExperimentFile]:
    """The resumed attempt failed before its first step."""
    log = "arms/b/attempt-1/log/rank00000.log"
    tail = ["Traceback (most recent call last):", "RuntimeError: cannot read /ckpt/step-10"]
    where = {"arm": "b", "attempt": 1, "rank": 0}
    gone = [
        ("environment-file", "arm b, rank 0: the environment file is missing"),
        ("missing", "arm b, rank 0: the metrics file is missing"),
        ("state", "the resumed run has no state at the begin of step 11: the file is missing (every rank)"),
    ]
    findings = [
        Finding(
            kind="job",
            severity="infrastructure",
            where={**where, "path": log},
            what="arm b, rank 0: failed with exit code 1; no step recorded",
            evidence={"log_tail": tail},
        ),
        *(Finding(kind=kind, severity="not-verified", where=where, what=what) for kind, what in gone),
        table(dict.fromkeys(PIECES, ("-", []))),
    ]
    found = verdict("not-verified", findings, stops=((14, KILL, None), (0, None, 10)))
    found.arms[1].attempts[1].exit_code, found.arms[1].attempts[1].last_step = 1, None
    return found, experiment()


def saving_changes() -> tuple[Verdict, ExperimentFile]:
    """An arm that never saves parts from the reference."""
    what = "the arm that never saves parts from the reference at step 11 (RNG): saving changes the run"
    where = {"arms": ["a", "c"], "step": 11}
    twice = Finding(
        kind="environment", severity="not-verified", what="torch.num_threads differs between the arms, undeclared"
    )
    saving = Finding(kind="saving-changes", severity="not-verified", where=where, what=what)
    return verdict("not-verified", [saving, twice, twice, overlap(), table()]), experiment()


SCENES = (
    died,
    saving_changes,
    identical,
    fell_back,
    lost_stream,
    lost_moments,
    restarted_loader,
    unexplained,
    elsewhere,
    not_repeatable,
    never_interrupted,
)
