"""Which piece of state a failed resume is to be blamed on, and what mends it: rules as data, and one choice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from detrun.compare.positions import order_was_lost, positions
from detrun.compare.state import RowDifference


@dataclass(frozen=True, slots=True)
class Blame:
    """kind: the culprit's, as verdicts name it. catalog: the entry of the root-cause catalog. fix: what to do."""

    kind: str
    catalog: str
    fix: str


BLAMES: Mapping[str, Blame] = {
    "parameters": Blame(
        "parameter", "parameter-not-restored", "save and load the model's state_dict at full precision"
    ),
    "buffers": Blame("buffer", "buffer-not-restored", "make it a persistent buffer, or save it beside the state_dict"),
    "optimizer": Blame(
        "optimizer",
        "optimizer-not-restored",
        "save and load the optimizer's state_dict on every rank, in the dtype it has",
    ),
    "scaler": Blame("scaler", "scaler-not-restored", "save and load the gradient scaler's state_dict"),
    "scheduler": Blame(
        "scheduler", "scheduler-not-restored", "save the scheduler's state_dict after its step, and step it once a step"
    ),
    "hyperparameters": Blame(
        "optimizer", "hyperparameter-not-restored", "load the optimizer's param_groups, then the scheduler"
    ),
    "module-state": Blame(
        "module-state",
        "module-state-not-restored",
        "make the attribute a buffer, or save it through get_extra_state and set_extra_state",
    ),
    "ema": Blame("ema", "ema-not-restored", "save and load the averaged copy of the weights"),
    "tracked": Blame("module-state", "tracked-not-restored", "save and load what detrun.track names"),
    "rng": Blame(
        "rng", "rng-not-restored", "save detrun.rng_state() with the checkpoint and call detrun.set_rng_state() last"
    ),
    "batch": Blame("data", "loader-position", "save the loader's position as of the batches consumed, and restore it"),
    "loader": Blame("data", "loader-position", "save the loader's position as of the batches consumed, and restore it"),
    "gradients": Blame(
        "parameter", "gradients-not-restored", "save the accumulated gradients, or save only where none are held"
    ),
    "local": Blame("module-state", "variable-not-restored", "save this variable with the checkpoint"),
}
PRECISION = Blame(
    "precision",
    "low-precision-rebuilt",
    "rebuild the low-precision weights from the masters along the conversion that training uses, or save them",
)

# What is restored first is looked at first; data comes after the streams it is drawn from.
_ORDER = (
    "parameters",
    "buffers",
    "optimizer",
    "scaler",
    "scheduler",
    "hyperparameters",
    "module-state",
    "ema",
    "tracked",
    "rng",
    "batch",
    "gradients",
    "loader",
    "local",
)


@dataclass(frozen=True, slots=True)
class Suspect:
    """What is blamed: the differences that make it up. firm: False where it is all that can explain what differs later,
    and would not count alone."""

    blame: Blame
    component: str
    differences: Sequence[RowDifference]
    firm: bool = True

    @property
    def ranks(self) -> list[int]:
        return sorted({difference.rank for difference in self.differences})


def suspects(
    differences: Sequence[RowDifference],
    offsets: Mapping[int, int],
    explaining: Sequence[RowDifference] = (),
    *,
    data_first: bool = False,
) -> list[Suspect]:
    """All that is to be blamed, likeliest first. offsets: by rank, the steps by which the first batch is off, where it
    is one of the reference's. explaining: differences that count for nothing alone. data_first: the first step that
    differs does so in what it was given."""
    by_component: dict[str, list[RowDifference]] = {}
    loader = _whole_loader(differences, explaining)
    for difference in differences:
        if loader and difference.component in ("rng", "batch"):
            by_component.setdefault("loader", list(loader)).append(difference)
        elif _is_low_precision(difference, differences):
            by_component.setdefault("precision", []).append(difference)
        else:
            by_component.setdefault(difference.component, []).append(difference)
    firm = bool(by_component)
    counters = positions(explaining)
    if not firm:
        by_component.update({"loader": counters} if data_first and counters else _by_name(explaining))
    order = ["precision", *_ORDER]
    # A first batch that is another step's, and counters that say so: the loader, and its streams with it. Without
    # counters the batch may as well be drawn from a stream that was lost.
    counts = [d for d in explaining if d.component == "loader" and _counts(d, offsets.get(d.rank, 0))]
    if offsets and "batch" in by_component and (counts or "rng" not in by_component):
        by_component["loader"] = [*counts, *by_component.pop("batch")]
    if "batch" in by_component:
        by_component["batch"] += counters
        if order_was_lost(explaining, by_component.get("rng", [])):
            order.remove("batch")
            order.insert(order.index("rng"), "batch")
    if "loader" in by_component:
        order.remove("loader")
        order.insert(order.index("rng"), "loader")
    return [
        Suspect(PRECISION if component == "precision" else BLAMES[component], component, by_component[component], firm)
        for component in order
        if component in by_component
    ]


def _counts(difference: RowDifference, offset: int) -> bool:
    """One number that may be why the data is off by so many steps. None that was drawn: seeds and orders differ where
    the stream that they are drawn from does. None that only one run has, such as what a log holds of earlier epochs.
    And where the data is behind, none that is ahead, such as the epoch that a run was told to begin with."""
    texts = [each.value or "" for each in (difference.a, difference.b) if each is not None]
    drawn = "seed" in difference.key[1].rpartition(".")[2].lower()
    if drawn or len(texts) < 2 or not all(_NUMBER.fullmatch(text) for text in texts):
        return False
    return offset >= 0 or int(texts[1]) < int(texts[0])


_NUMBER = re.compile(r"-?\d{1,18}")
_NAMES = (
    ("scaler", re.compile(r"scale")),
    ("ema", re.compile(r"(^|[._])(ema|avg|average|shadow)")),
    ("scheduler", re.compile(r"sched|(^|[._])lr([._]|$)|warmup")),
)
"""What a variable's name says that it is."""


def _by_name(explaining: Sequence[RowDifference]) -> dict[str, list[RowDifference]]:
    """Where nothing else explains it, variables that came back other than they were, by what they are called."""
    found: dict[str, list[RowDifference]] = {}
    for difference in explaining:
        if difference.component in ("local", "module-state") and difference.kind != "extra":
            name = difference.key[1].lower()
            component = next((component for component, words in _NAMES if words.search(name)), "local")
            found.setdefault(component, []).append(difference)
    return found


def _whole_loader(differences: Sequence[RowDifference], explaining: Sequence[RowDifference]) -> list[RowDifference]:
    """What a loader counts and holds, if on every rank its counters, its own streams and the data differ and no other
    stream does: then it is the loader that was not restored, and its streams with it."""
    held = [d for d in explaining if d.component == "loader" and d.kind != "extra"]
    counting = {(d.rank, d.key[1].partition(".")[0]) for d in held if d.row.value is not None}
    streams = [difference for difference in differences if difference.component == "rng"]
    data = {difference.rank for difference in differences if difference.component == "batch"}
    if not streams or any((d.rank, d.key[1].partition(".")[0]) not in counting or d.rank not in data for d in streams):
        return []
    return held


def _is_low_precision(difference: RowDifference, differences: Sequence[RowDifference]) -> bool:
    """Packed values of a low-precision tensor or the scales beside them, while no full-precision parameter differs on
    that rank."""
    if not _is_packed(difference) and not (
        difference.component in _HOLD_PACKED
        and "scale" in difference.key[1].rpartition(".")[2]
        and any(_is_packed(other) and _belongs(difference, other) for other in differences)
    ):
        return False
    return not any(
        other.component == "parameters" and not _is_packed(other) and other.rank == difference.rank
        for other in differences
    )


_HOLD_PACKED = ("parameters", "buffers", "module-state")


def _is_packed(difference: RowDifference) -> bool:
    """Eight bits or fewer an element, or a part of a tensor subclass that packs values and scales."""
    part = difference.key[2]
    few = difference.row.dtype.startswith(("float8", "float4", "float6"))
    return difference.component in _HOLD_PACKED and (few or part not in ("", "local"))


def _belongs(scale: RowDifference, packed: RowDifference) -> bool:
    """Whether a scale lies in the module that holds packed values, or below it."""
    return scale.rank == packed.rank and scale.key[1].startswith(f"{packed.key[1].rpartition('.')[0]}.")
