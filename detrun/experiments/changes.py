"""The one thing that a discriminating experiment changes for all arms: a recipe in, a recipe out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from detrun.diagnose.facts import Facts
from detrun.experiments.plan import arm_ids
from detrun.recipe import Recipe

FILLS = (90, 15, 195, 60)
"""What MALLOC_PERTURB_ is given; memory then holds the bytes' complements."""


@dataclass(frozen=True)
class Change:
    """apply: the changed recipe, for arms of these ids. refuses: why it does not fit what is known of the runs, or
    None."""

    apply: Callable[[Recipe, Sequence[str]], Recipe]
    refuses: Callable[[Recipe, Facts], str | None] = lambda recipe, facts: None  # noqa: ARG005


def with_env(recipe: Recipe, **variables: str) -> Recipe:
    """Variables for every arm, whatever else says of them."""
    launch = recipe.launch.model_copy(update={"env": {**recipe.launch.env, **variables}})
    arms = {
        name: arm.model_copy(update={"env": {key: value for key, value in arm.env.items() if key not in variables}})
        for name, arm in recipe.arms.items()
    }
    return recipe.model_copy(update={"launch": launch, "arms": arms})


def with_args(recipe: Recipe, args: Sequence[str]) -> Recipe:
    """Further arguments for every arm."""
    launch = recipe.launch.model_copy(update={"args": (*recipe.launch.args, *args)})
    return recipe.model_copy(update={"launch": launch})


def repeating(recipe: Recipe, other: str, repeats: int) -> Recipe:
    """The recipe with what it declares for arm `other` declared for every repeat."""
    arms = {name: arm for name, arm in recipe.arms.items() if name == "a"}
    if other in recipe.arms:
        arms.update(dict.fromkeys(arm_ids(repeats + 1)[1:], recipe.arms[other]))
    return recipe.model_copy(update={"arms": arms})


def _deterministic(recipe: Recipe, _: Sequence[str]) -> Recipe:
    return recipe.model_copy(update={"determinism": "strict"})


def _different_fills(recipe: Recipe, arms: Sequence[str]) -> Recipe:
    from detrun.recipe.schema import Arm

    own = {}
    for position, name in enumerate(arms):
        arm = recipe.arms.get(name, Arm())
        # From the second one on they repeat: whatever two neighbours are held against, they are not the same.
        fill = FILLS[0] if position == 0 else FILLS[1 + (position - 1) % (len(FILLS) - 1)]
        own[name] = arm.model_copy(update={"env": {**arm.env, "MALLOC_PERTURB_": str(fill)}})
    return recipe.model_copy(update={"arms": {**recipe.arms, **own}})


def _already_deterministic(recipe: Recipe, facts: Facts) -> str | None:
    if recipe.determinism == "strict" or facts.deterministic:
        return "deterministic algorithms were on"
    return None


def _already_one_thread(recipe: Recipe, facts: Facts) -> str | None:  # noqa: ARG001
    return "each rank had one thread" if facts.threads == 1 else None


def _already_pinned(recipe: Recipe, facts: Facts) -> str | None:  # noqa: ARG001
    return "the hash seed was pinned" if facts.hash_seed == "pinned" else None


def _no_device(recipe: Recipe, facts: Facts) -> str | None:  # noqa: ARG001
    return None if facts.device == "cuda" else "no device was used"


def _device(recipe: Recipe, facts: Facts) -> str | None:  # noqa: ARG001
    return "what fills the C library's memory fills no device's" if facts.device == "cuda" else None


CHANGES: Mapping[str, Change] = {
    "unchanged": Change(lambda recipe, _: recipe),
    "deterministic-algorithms": Change(_deterministic, _already_deterministic),
    "unfilled-memory": Change(
        lambda recipe, arms: with_env(_deterministic(recipe, arms), DETRUN_FILL="0"), _already_deterministic
    ),
    "one-thread": Change(
        lambda recipe, _: with_env(recipe, OMP_NUM_THREADS="1", OMP_THREAD_LIMIT="1", MKL_NUM_THREADS="1"),
        _already_one_thread,
    ),
    "hash-seed": Change(lambda recipe, _: with_env(recipe, PYTHONHASHSEED="0"), _already_pinned),
    "filled-memory": Change(lambda recipe, _: with_env(recipe, MALLOC_PERTURB_=str(FILLS[0])), _device),
    "different-fills": Change(_different_fills, _device),
    "blocking-launches": Change(lambda recipe, _: with_env(recipe, CUDA_LAUNCH_BLOCKING="1"), _no_device),
    "pinned-configuration": Change(
        lambda recipe, _: with_env(
            recipe,
            TORCHINDUCTOR_DETERMINISTIC="1",
            TORCHINDUCTOR_MAX_AUTOTUNE="0",
            TORCHINDUCTOR_COORDINATE_DESCENT_TUNING="0",
        ),
        _no_device,
    ),
}
"""By the catalog's ids, but `toggle`, whose arguments come from the command line."""

GENERAL = ("deterministic-algorithms", "one-thread", "hash-seed", "filled-memory", "pinned-configuration")
"""Those that are run where nothing points to a cause, in this order."""
