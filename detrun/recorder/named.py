"""What the program (`detrun.record`) or an adapter says of a step by name, and which step that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from detrun.recorder.draft import EACH, Draft
from detrun.recorder.pending import Scalar, scalar_from
from detrun.records.metrics_writer import MetricValue, encode_supplement

if TYPE_CHECKING:
    from detrun.recorder.session import Session

Value = tuple[str, str, Scalar]
"""A metric's name, its source, and what it is."""


class Named:
    """The named values of one session. What it adds goes into the open step, or behind one that was written."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def record(self, step: int, metrics: Mapping[str, object]) -> None:
        """Of the step that the program numbers so."""
        session = self._session
        with session.lock:
            values = self._read(metrics, "record")
            taken = session.closed + (0 if session.held is None else 1)
            none_yet = taken < session.numbering.first()
            begun = session.draft.begun() or not session.has_optimizers
            current = taken + 1 if begun or none_yet else taken
            unsettled = session.numbering.shift is None
            number = session.numbering.translate(int(step), current, begun or not none_yet)
            if unsettled and session.numbering.done is None and number != current:
                session.closed += number - current  # an attempt resumed from where only the program knows
            self._place(number, values, "record")

    def tell(self, name: str, value: object, source: str) -> None:
        """Of the step that is going on, or else has just ended."""
        session = self._session
        with session.lock:
            values = self._read({name: value}, source)
            if session.held is not None and not session.draft.begun():
                session.held.named += values
            elif session.in_step or session.draft.begun() or session.closed < session.numbering.first():
                session.draft.named += values
            else:
                self._place(session.closed, values, source)

    def put(self, step: int, values: Sequence[Value]) -> None:
        """A line of its own, behind the step's, once the values are there."""
        waits_for = [value for _, _, value in values]
        self._session.put(step, waits_for, lambda: _supplement(step, values))

    def _read(self, metrics: Mapping[str, object], source: str) -> list[Value]:
        values: list[Value] = []
        for name, value in metrics.items():
            scalar = scalar_from(value)
            if scalar is None:
                self._session.warn(f"{source}({name}=…): not a number but {type(value).__name__}; left out")
            else:
                values.append((name, source, scalar))
        return values

    def _place(self, number: int, values: list[Value], source: str) -> None:
        session = self._session
        if not session.has_optimizers and number > session.closed and source == "record":
            # Nothing else tells where a step ends: the first record of a step closes it.
            session.write_environment({}, [])
            session.draft.named += values
            if session.state_due(number):
                session.draft.rng = session.streams.rolled_up()
            session.closed, session.held, session.draft = number - 1, session.draft, Draft()
            session.close_held()
        elif session.held is not None and number == session.closed + 1:
            session.held.named += values
        elif number == session.next_step():
            session.draft.named += values
        elif session.is_rank():
            self.put(max(number, session.closed) if source == "record" else number, values)


def _supplement(step: int, values: Sequence[Value]) -> bytes:
    return encode_supplement(
        step,
        [
            MetricValue(name, "adapter" if source == EACH else source, value.bits(), value.dtype)
            for name, source, value in values
        ],
    )
