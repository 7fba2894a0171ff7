"""The environment that every rank of an arm gets from detrun, and what of it is pinned. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from detrun.determinism.canonical import canonical_environment


@dataclass(frozen=True)
class ArmEnvironment:
    """env: variables set; pinned: what is held equal in all arms, for the report.

    threads: OMP_NUM_THREADS is still to be set, to cores / ranks, where the job runs.
    """

    env: dict[str, str]
    pinned: dict[str, str]
    threads: bool


def arm_environment(
    *,
    arm: str,
    attempt: int,
    attempt_folder: str,
    seed: int,
    steps: int,
    state_every: int,
    determinism: str,
    pin: bool,
    asked: Mapping[str, str],
    inherited: Mapping[str, str],
    local_threads: int | None,
    state_at: str | None = None,
) -> ArmEnvironment:
    """The variables of one arm's ranks.

    asked: the recipe's and the arm's own variables, which win over everything here. inherited: the
    environment the job starts from, as far as it is known; a value found there is left alone by the
    deterministic settings. local_threads: cores / ranks where that is known before the job runs. state_at: steps at
    which state is captured, None where nobody will ask for it.
    """
    pinned: dict[str, str] = {}
    env: dict[str, str] = {}
    if determinism == "strict":
        env.update({name: value for name, value in canonical_environment().items() if name not in inherited})
    threads = False
    if pin:
        pinned["PYTHONHASHSEED"] = "0"
        if local_threads is not None:
            pinned["OMP_NUM_THREADS"] = str(local_threads)
        else:
            threads = "OMP_NUM_THREADS" not in asked
        pinned = {name: value for name, value in pinned.items() if name not in asked}
        env.update(pinned)
        pinned.update({name: asked[name] for name in ("PYTHONHASHSEED", "OMP_NUM_THREADS") if name in asked})
        if threads:
            pinned["OMP_NUM_THREADS"] = "cores / ranks"
    env.update(asked)
    env.update(
        DETRUN_ARM=arm,
        DETRUN_ATTEMPT=str(attempt),
        DETRUN_ATTEMPT_DIR=attempt_folder,
        DETRUN_SEED=str(seed),
        DETRUN_STEPS=str(steps),
        DETRUN_STATE_EVERY=str(state_every),
        DETRUN_DETERMINISM=determinism,
    )
    if state_at is not None:
        env["DETRUN_STATE_AT"] = state_at
    return ArmEnvironment(env, pinned, threads)
