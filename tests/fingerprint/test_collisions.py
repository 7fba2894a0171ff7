"""Collisions among 10^5 pairs of near-equal tensors; the benchmark of the same name counts 10^7."""

from __future__ import annotations

from benchmarks.digest_collisions import CHANGES, SOURCES, count

PAIRS = 100_000


def test_near_equal_tensors_never_share_a_digest() -> None:
    kinds = count(PAIRS, seed=1)
    assert len(kinds) == len(CHANGES) * len(SOURCES)
    total = {key: sum(kind[key] for kind in kinds.values()) for key in next(iter(kinds.values()))}
    assert total["pairs"] > 0.95 * PAIRS
    assert all(kind["pairs"] > 0.7 * PAIRS / len(kinds) for kind in kinds.values())
    assert total["device digest"] == total["its first sum"] == total["its second sum"] == total["host digest"] == 0
    # what good bits would show: about PAIRS / 2^20, so hardly ever more than a few
    assert total["upper 20 bits of the first sum"] <= 4
    # why an exclusive or is no evidence: it does not see any order at all
    for source in SOURCES:
        swapped = kinds[f"two rows swapped, {source}"]
        assert swapped["torch.hash_tensor"] == swapped["pairs"]
