"""Facts, as a planted fault leaves them, lead to its entry in the catalog."""

from __future__ import annotations

from typing import Any

import pytest

from detrun.diagnose.catalog import catalog
from detrun.diagnose.facts import Facts, facts_of_bytes, merged, one_bit
from detrun.diagnose.match import match

ORIGIN: dict[str, Any] = {"role": "origin", "kind": "op", "inputs_equal": True, "step": 7, "device": "cpu"}
INPUT: dict[str, Any] = {"role": "outside-the-trace", "kind": "data", "inputs_equal": False, "device": "cpu"}
PLAIN: dict[str, Any] = {"threads": 1, "deterministic": False, "hash_seed": "pinned", "software_differs": False}

PLANTED: list[tuple[str, str, dict[str, Any]]] = [
    (
        "threads add into one embedding row",
        "accumulate-order",
        {
            **ORIGIN,
            "op": "aten._index_put_impl_.default",
            "phase": "backward",
            "scope": "embed",
            "threads": 2,
            "deterministic": False,
            "total": 32768,
            "differing": 118,
            "max_ulp": 2,
            "distinct": 12,
            "runs": 12,
        },
    ),
    (
        "a scatter_add on a device",
        "accumulate-order",
        {**ORIGIN, "op": "aten.scatter_add_.default", "device": "cuda", "scope": "layers.1.moe", "phase": "forward"},
    ),
    (
        "a fused auxiliary loss adds in arrival order",
        "fused-atomics",
        {
            **ORIGIN,
            "op": "fused_lib.balance_loss",
            "scope": "layers.0.router",
            "phase": "forward",
            "total": 1,
            "differing": 1,
            "max_ulp": 1,
            "metrics_first": ("load_balancing_loss",),
            "ranks_affected": 2,
            "ranks_total": 2,
        },
    ),
    (
        "attention's backward",
        "attention-backward",
        {
            **ORIGIN,
            "op": "aten._scaled_dot_product_flash_attention_backward.default",
            "phase": "backward",
            "device": "cuda",
        },
    ),
    ("a look-back scan", "scan-order", {**ORIGIN, "op": "aten.cumsum.default", "device": "cuda", "scope": "layers.0"}),
    (
        "split-K",
        "split-k",
        {
            **ORIGIN,
            "op": "aten.mm.default",
            "device": "cuda",
            "scope": "layers.0",
            "max_ulp": 3,
            "configurations_differ": False,
        },
    ),
    (
        "another configuration measured as the fastest",
        "autotuned-kernels",
        {
            **ORIGIN,
            "op": "aten.mm.default",
            "step": 1,
            "device": "cuda",
            "configurations_differ": True,
            "autotuned": True,
        },
    ),
    ("a compiled region", "autotuned-kernels", {**ORIGIN, "op": "compiled.region", "compiled": True, "step": 1}),
    (
        "another BLAS in one arm",
        "library-kernels",
        {
            **ORIGIN,
            "op": "aten.addmm.default",
            "software_differs": True,
            "differing_software": ("nvidia-cublas",),
            "distinct": 1,
            "runs": 12,
        },
    ),
    (
        "another number of threads in one arm",
        "thread-count",
        {**ORIGIN, "op": "aten.sum.default", "threads": 2, "threads_differ": True},
    ),
    (
        "threads race in an operation that nobody lists",
        "thread-race",
        {**ORIGIN, "op": "aten.gelu.default", "threads": 2, "distinct": 7, "runs": 12},
    ),
    (
        "a collective of many ranks",
        "scale-dependent",
        {
            **ORIGIN,
            "op": "c10d.allreduce_",
            "kind": "collective",
            "ranks_total": 256,
            "ranks_affected": 256,
            "clean_at_smaller_scale": True,
        },
    ),
    (
        "a reduction over ranks in the order of arrival",
        "collective-order",
        {**ORIGIN, "op": "comm_lib.ring_sum", "scope": "", "phase": "between", "ranks_affected": 2, "ranks_total": 2},
    ),
    (
        "an all-reduce that picks its algorithm",
        "collective-order",
        {**ORIGIN, "op": "c10d.allreduce_", "kind": "collective", "ranks_affected": 2, "ranks_total": 2},
    ),
    (
        "gradients of ranks added in another order",
        "placement-order",
        {**ORIGIN, "op": "own_lib.ordered_sum", "scope": "", "phase": "between", "kind": "op", "max_ulp": 1},
    ),
    (
        "arms on other nodes",
        "placement-order",
        {**ORIGIN, "op": "c10d.reduce_scatter_", "kind": "collective", "placement_differs": True, "ranks_total": 4},
    ),
    (
        "a scratch buffer shared by two calls",
        "shared-scratch",
        {
            **ORIGIN,
            "op": "own_lib.fused_norm",
            "scope": "layers.1",
            "phase": "forward",
            "distinct": 1,
            "runs": 12,
            "flags": ("in-flight",),
        },
    ),
    (
        "a kernel that nobody sees",
        "uncaptured-kernel",
        {
            "role": "uncaptured-producer",
            "kind": "op",
            "op": "aten.add.Tensor",
            "after": "aten.mm.default",
            "scope": "blocks.1",
            "step": 7,
        },
    ),
    (
        "a non-blocking copy read early",
        "copy-read-early",
        {"role": "suspect", "kind": "op", "op": "aten.mul.Tensor", "flags": ("nonblocking",), "step": 3},
    ),
    (
        "a copy overwritten while it ran",
        "copy-read-early",
        {
            "role": "uncaptured-producer",
            "kind": "op",
            "op": "aten.mul.Tensor",
            "after": "aten.copy_.default",
            "flags": ("nonblocking",),
            "step": 3,
        },
    ),
    (
        "a bucket read while it is reduced",
        "read-in-flight",
        {"role": "suspect", "kind": "op", "op": "aten.mul.Tensor", "flags": ("in-flight",), "step": 3},
    ),
    (
        "a padding row that nobody wrote",
        "uninitialized-memory",
        {"role": "suspect", "kind": "uninitialized", "op": "aten.mm.default", "flags": ("uninitialized",), "step": 1},
    ),
    (
        "circular padding that reads what it has not written",
        "uninitialized-memory",
        {**ORIGIN, "op": "aten._pad_circular.default", "threads": 1, "distinct": 9, "runs": 12, "max_ulp": 10**9},
    ),
    (
        "two tokens change places",
        "ties-and-arrival",
        {
            **ORIGIN,
            "op": "own_lib.order_tokens",
            "scope": "layers.1.moe",
            "phase": "forward",
            "permutation": "rows",
            "differing": 512,
        },
    ),
    (
        "top-k among equals",
        "ties-and-arrival",
        {**ORIGIN, "op": "aten.topk.default", "scope": "layers.1.router", "phase": "forward"},
    ),
    (
        "experts visited as they arrive",
        "call-order",
        {**INPUT, "kind": "control-flow", "op": "aten.index_add.default", "scope": "blocks.1.ffn", "step": 1},
    ),
    (
        "a vocabulary from a set of str",
        "hash-seed",
        {**INPUT, "op": "aten.lift_fresh.default", "step": 1, "hash_seed": "random"},
    ),
    ("a directory as it is listed", "listing-order", {**INPUT, "op": "batch", "step": 1, "hash_seed": "pinned"}),
    (
        "samples as workers finish",
        "loader-arrival",
        {**INPUT, "op": "batch", "step": 5, "permutation": "rows", "hash_seed": "pinned"},
    ),
    (
        "a generator seeded from the clock",
        "clock-as-seed",
        {**INPUT, "kind": "rng", "op": "aten.native_dropout.default", "step": 1, "seeded": False},
    ),
    (
        "one draw too many",
        "rng-shifted",
        {**INPUT, "kind": "rng", "op": "aten.bernoulli_.float", "step": 7, "shifted_by": 1},
    ),
    (
        "one draw too many, by nobody knows how much",
        "rng-shifted",
        {**INPUT, "kind": "rng", "op": "aten.bernoulli_.float", "step": 7},
    ),
    (
        "a switch that came too late",
        "settings-after-copy",
        {
            **ORIGIN,
            "op": "aten.index_put_.default",
            "deterministic": True,
            "threads": 2,
            "settings_changed": True,
            "total": 100,
        },
    ),
    (
        "a flipped bit",
        "hardware",
        {
            **ORIGIN,
            "op": "aten.mul.Tensor",
            "differing": 1,
            "total": 4096,
            "one_bit": True,
            "ranks_affected": 1,
            "ranks_total": 4,
            "comes_back": False,
            "distinct": 1,
            "runs": 12,
        },
    ),
    (
        "dropout drawn again in a recomputation",
        "recompute-rng",
        {
            "role": "origin",
            "kind": "recompute",
            "op": "aten.native_dropout.default",
            "scope": "layers.2",
            "phase": "recompute",
            "step": 1,
        },
    ),
    ("a save that draws", "saving-draws", {"observer_differs": True, "first_stream": "rng", "step": 4, "kind": "rng"}),
    ("noise in a replicated layer", "replicas-drift", {"replicas_agree": False}),
]

RESTORED = {
    "rng-not-restored": "rng",
    "low-precision-rebuilt": "precision",
    "parameter-not-restored": "parameters",
    "buffer-not-restored": "buffers",
    "optimizer-not-restored": "optimizer",
    "scaler-not-restored": "scaler",
    "scheduler-not-restored": "scheduler",
    "hyperparameter-not-restored": "hyperparameters",
    "module-state-not-restored": "module-state",
    "ema-not-restored": "ema",
    "tracked-not-restored": "tracked",
    "loader-position": "loader",
    "gradients-not-restored": "gradients",
    "variable-not-restored": "local",
}


@pytest.mark.parametrize(("fault", "entry", "facts"), PLANTED, ids=[fault for fault, _, _ in PLANTED])
def test_a_planted_fault_leads_to_its_entry(fault: str, entry: str, facts: dict[str, Any]) -> None:
    found = match(Facts(**{**PLAIN, **facts}))
    assert found[0].entry.id == entry, [(each.entry.id, each.strength, each.why) for each in found]
    assert found[0].why


@pytest.mark.parametrize(("entry", "component"), RESTORED.items())
def test_what_a_resume_lost_leads_to_its_entry(entry: str, component: str) -> None:
    assert match(Facts(resume=True, component=component))[0].entry.id == entry
    assert not match(Facts(component=component))


def test_every_entry_has_a_planted_fault() -> None:
    planted = {entry for _, entry, _ in PLANTED} | set(RESTORED)
    assert planted == {entry.id for entry in catalog().entries}


def test_nothing_fits_nothing() -> None:
    assert match(Facts()) == []
    assert match(Facts(**{**PLAIN, "role": "receiver", "kind": "collective", "op": "c10d.allreduce_"})) == []


def test_deterministic_algorithms_speak_against_what_they_cover() -> None:
    known = {**ORIGIN, "op": "aten.index_put_.default", "threads": 2, "total": 40_000}
    off, on = (match(Facts(**known, deterministic=switch)) for switch in (False, True))
    strengths = [{each.entry.id: each.strength for each in found}.get("accumulate-order", 0) for found in (off, on)]
    assert strengths[0] > strengths[1]


@pytest.mark.parametrize(("threads", "total", "raced"), [(2, 40_000, True), (1, 40_000, False), (2, 100, False)])
def test_a_cpu_races_from_two_threads_and_enough_elements_on(threads: int, total: int, raced: bool) -> None:
    facts = Facts(op="aten.index_put_.default", device="cpu", threads=threads, total=total, deterministic=False)
    assert facts.known()["nondeterministic"] is raced


def test_why_names_the_operation_and_its_numbers() -> None:
    (first, *_) = match(
        Facts(role="origin", kind="op", op="aten.scatter_add_.default", device="cuda", distinct=12, runs=12)
    )
    assert "aten.scatter_add_ adds in the order of arrival" in first.why[0]
    assert any("12 results in 12 runs" in why for why in first.why)


def test_one_bit_is_told_from_one_element() -> None:
    difference = {"elements": 4, "differing": 1, "max_ulp": 1}
    assert facts_of_bytes("float32", difference, b"\0\0\0\0", b"\1\0\0\0")["one_bit"] is True
    assert facts_of_bytes("float32", difference, b"\0\0\0\0", b"\3\0\0\0")["one_bit"] is False
    assert not one_bit(b"\0", b"\0")


def test_of_two_sources_the_last_one_counts() -> None:
    facts = merged([{"threads": 1, "device": "cpu"}, {"threads": 2, "device": ""}])
    assert (facts.threads, facts.device) == (2, "cpu")
