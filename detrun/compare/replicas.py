"""Whether copies of the same parameters, held by several ranks of one arm, stay equal in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH = 16
"""Bytes a step in a trail of parameter digests."""


@dataclass(frozen=True, slots=True)
class ReplicaDrift:
    """Replicas of one arm part at `step`: `group` holds one copy each, `apart` are those off the majority,
    or the whole group where there is none."""

    arm: str
    step: int
    group: tuple[int, ...]
    apart: tuple[int, ...]
    declared: bool


def find_drift(
    arm: str,
    trails: Mapping[int, bytes],
    declared: Mapping[int, tuple[int, ...] | None],
) -> list[ReplicaDrift]:
    """The groups of replicas of an arm whose parameters differ in some step, with the first such step.

    trails: WIDTH bytes a step and rank, as a survey holds them; zeros where a step has no digest.
    declared: each rank's group of replicas, None where it says nothing. If no rank says anything, ranks that
    all agree in the first step are taken for replicas of each other.
    """
    groups = sorted({group for group in declared.values() if group and len(group) > 1})
    guessed = not any(group is not None for group in declared.values())
    if guessed and len(trails) > 1:
        firsts = {_first(trail) for trail in trails.values()}
        if len(firsts) == 1 and firsts != {None}:
            groups = [tuple(sorted(trails))]
    found = []
    for group in groups:
        present = [rank for rank in group if trails.get(rank)]
        if len({trails[rank] for rank in present}) < 2:
            continue
        drift = _first_drift(present, trails)
        if drift:
            found.append(ReplicaDrift(arm, drift[0], group, drift[1], not guessed))
    return found


def _first(trail: bytes) -> bytes | None:
    for start in range(0, len(trail), WIDTH):
        digest = trail[start : start + WIDTH]
        if any(digest):
            return digest
    return None


def _first_drift(ranks: Sequence[int], trails: Mapping[int, bytes]) -> tuple[int, tuple[int, ...]] | None:
    shortest = min(len(trails[rank]) for rank in ranks)
    for start in range(0, shortest, WIDTH):
        digests = {rank: trails[rank][start : start + WIDTH] for rank in ranks}
        known = [digest for digest in digests.values() if any(digest)]
        if len(set(known)) > 1:
            usual = max(sorted(set(known)), key=known.count)
            if known.count(usual) * 2 <= len(known):  # no majority: nothing says whose copy is the odd one
                return start // WIDTH + 1, tuple(ranks)
            apart = tuple(rank for rank, digest in digests.items() if any(digest) and digest != usual)
            return start // WIDTH + 1, apart
    return None
