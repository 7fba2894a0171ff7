"""Reads the state files of one rank around a restore and has them compared: at the save, right after the restore, and
one step later."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from detrun.compare.attempts import Position
from detrun.compare.resume_evidence import Boundary
from detrun.compare.state import Key, RankComparison, RowDifference, compare_rows, surviving, tally_groups
from detrun.errors import RecordError
from detrun.records.environment_reader import RankEnvironment
from detrun.records.layout import AttemptFolder
from detrun.records.state_reader import StateTable, read_state
from detrun.records.state_row import StateRow

_LASTING = frozenset({"parameters", "buffers", "optimizer", "scheduler", "scaler", "rng"})
"""Components that a run which had them at a save has at the next step's begin too."""

MAX_OTHER_RANKS = 64
"""Ranks of the reference that are searched for a state that was restored on the wrong one."""


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank of a resumed attempt. writers: attempts that may have written its checkpoint, likeliest first. began:
    where it came back; told: where it was told to, which is how its own boundaries are named. cut_short: it was ended
    from outside in its first step, so that a boundary's last moments may lie behind its end. absent: what the program
    does not have, by the recipe's word."""

    rank: int
    reference: AttemptFolder
    attempt: AttemptFolder
    writers: Sequence[AttemptFolder]
    began: Position
    told: Position
    environment_a: RankEnvironment | None
    environment_b: RankEnvironment | None
    cut_short: bool = False
    absent: Collection[str] = ()


def compare_state(state: RankState, restored: Boundary, saved: Boundary) -> None:
    """Adds a rank to what is known of a restore."""
    restored.position = saved.position = state.began
    at_save, rows = _compare_save(state, saved)
    a = _full(_table(state.reference, state.began.begin, state.rank))
    b = _full(_table(state.attempt, state.told.begin, state.rank))
    restored.ranks += 1
    for table, who in ((a, "the reference"), (b, "the resumed run")):
        if isinstance(table, str):
            why = f"{who} has no state at the begin of step {state.began.step + 1}: {table}"
            if table is a:
                why += "; where a rank sees no save of its own, checkpoint.save_every tells it when there is one"
            restored.missing.setdefault(why, []).append(state.rank)
    if isinstance(a, str) or isinstance(b, str):
        return
    restored.cpu_seconds += [a.cpu_seconds, b.cpu_seconds]
    found = compare_rows(state.rank, a.rows, b.rows, _kept(a), _kept(b), {*a.missing, *b.missing})
    later_a = _table(state.reference, _next(state.began).begin, state.rank)
    later_b = _table(state.attempt, _next(state.told).begin, state.rank)
    later = None
    if not isinstance(later_a, str) and not isinstance(later_b, str):
        keys = {difference.key for difference in found.differences}
        later = compare_rows(state.rank, _only(later_a.rows, keys), _only(later_b.rows, keys))
    for why in (*_unseen(state, a, b, {key[0] for key in rows}), *_undecided(found.differences, at_save, later)):
        restored.missing.setdefault(why, []).append(state.rank)
    counted, explaining = surviving(found.differences, at_save, later)
    for difference in (*counted, *explaining):
        difference.at_start = _is_at_start(difference, state)
        difference.saved_as = rows.get(difference.key)
    soft = [difference.label for difference in explaining]
    counts = {label: count for label, count in found.groups.items() if label not in soft or count > soft.count(label)}
    tally_groups(restored.groups, counts, counted)
    restored.explaining += explaining
    restored.unseeded += [name for name in found.unseeded if name not in restored.unseeded]


def _compare_save(state: RankState, saved: Boundary) -> tuple[dict[Key, bool], dict[Key, str | bytes | None]]:
    """By row: whether reference and interrupted run agreed on it at the save, and how to find it in the checkpoint."""
    saved.ranks += 1
    a = _table(state.reference, state.began.end, state.rank)
    if isinstance(a, str):
        saved.missing.setdefault(f"the reference has no state at the save of {state.began.words}: {a}", []).append(
            state.rank
        )
        return _agreed_later(state), {}
    rows = {row.key: _to_be_found(row, a) for row in a.rows}
    b: StateTable | str = "there was no earlier attempt"
    for writer in state.writers:
        b = _table(writer, state.began.end, state.rank)
        if not isinstance(b, str):
            break
    if isinstance(b, str):
        saved.missing.setdefault(
            f"the interrupted run has no state at the save of {state.began.words}: {b}", []
        ).append(state.rank)
        return _agreed_later(state), rows
    saved.cpu_seconds += [a.cpu_seconds, b.cpu_seconds]
    found = compare_rows(state.rank, a.rows, b.rows, _kept(a), _kept(b), {*a.missing, *b.missing})
    apart = {difference.key for difference in found.differences}
    counted = [d for d in found.differences if d.standing == "hard" and d.component != "gradients"]
    tally_groups(saved.groups, found.groups, counted)
    return {row.key: row.key not in apart for row in a.rows}, rows


def _agreed_later(state: RankState) -> dict[Key, bool]:
    """Where no save was seen: by row, whether the two runs agreed on it at the begin that came next, if the one that
    was interrupted lived to it."""
    a = _full(_table(state.reference, state.began.begin, state.rank))
    lived = [_full(_table(writer, state.began.begin, state.rank)) for writer in state.writers]
    b = next((table for table in lived if not isinstance(table, str)), "none did")
    if isinstance(a, str) or isinstance(b, str):
        return {}
    found = compare_rows(state.rank, a.rows, b.rows, unseen={*a.missing, *b.missing})
    apart = {difference.key for difference in found.differences}
    return {row.key: row.key not in apart for row in a.rows}


def _full(table: StateTable | str) -> StateTable | str:
    """The table, if it is one of everything."""
    return "the file holds a part of it only" if isinstance(table, StateTable) and table.scope != "full" else table


def _unseen(state: RankState, a: StateTable, b: StateTable, at_save: Collection[str]) -> Iterator[str]:
    """What the tables of one boundary leave out, and would be called equal by omission."""
    step = state.began.step + 1
    for component in sorted({"parameters", "rng", *_LASTING.intersection(at_save)}):
        if component not in state.absent and not any(row.component == component for row in (*a.rows, *b.rows)):
            yield f"the state at the begin of step {step} has no {component}"
    for component in sorted({*a.missing, *b.missing}):
        late = component in ("gradients", "hyperparameters")
        if late and (state.cut_short or (component in a.missing and component in b.missing)):
            continue  # it did not live to the moment at which they are looked at, or no run of this program comes there
        who = (
            "both runs"
            if component in a.missing and component in b.missing
            else ("the reference" if component in a.missing else "the resumed run")
        )
        yield f"{component} at the begin of step {step} were not captured in {who}"


def _undecided(
    found: Sequence[RowDifference], at_save: Mapping[Key, bool], later: RankComparison | None
) -> Iterator[str]:
    """Differences of a module's own variables of which nothing tells whether they were lost or are made anew."""
    still = {difference.key for difference in later.differences} if later is not None else None
    for difference in found:
        if difference.component != "module-state" or difference.standing != "surviving":
            continue
        if still is not None and difference.key not in still:
            continue  # made anew
        if not at_save:
            yield f"{difference.name} differs, and without the state at the save nothing tells whether it was lost"
        elif still is None and at_save.get(difference.key, False):
            yield f"{difference.name} differs, and without the state one step later nothing tells whether it was lost"


def _to_be_found(row: StateRow, table: StateTable) -> str | bytes | None:
    """By what a checkpoint may hold a row: a tensor's digest, a generator's state."""
    return _kept(table)(row) if row.component == "rng" else row.digest


def _table(attempt: AttemptFolder, boundary: str, rank: int) -> StateTable | str:
    """A rank's state file, or why there is none."""
    try:
        return read_state(attempt, boundary, rank)
    except RecordError as error:
        return f"the file {error.what}"


def _kept(table: StateTable) -> Callable[[StateRow], bytes | None]:
    """The kept bytes of a table's rows; those that cannot be trusted count as not kept."""

    def read(row: StateRow) -> bytes | None:
        try:
            return table.bytes_of(row)
        except RecordError:
            return None

    return read


def _next(position: Position) -> Position:
    return Position(position.step + 1)


def _only(rows: Iterable[StateRow], keys: set[Key]) -> list[StateRow]:
    return [row for row in rows if row.key in keys]


def _is_at_start(difference: RowDifference, state: RankState) -> bool:
    """Whether a stream of the process is, after the restore, where every run begins: nothing loaded it."""
    if difference.component != "rng" or not state.environment_a or not state.environment_b:
        return False
    name = f"rng.{difference.key[1]}"
    a, b = state.environment_a.initial.get(name), state.environment_b.initial.get(name)
    return a is not None and a == b


def elsewhere(boundary: Boundary, reference: AttemptFolder, ranks: int) -> None:
    """Notes, for every difference, which other rank's state of the reference it is."""
    wanted = [d for d in boundary.differences if d.kind == "different" and d.b is not None and d.b.digest]
    if ranks < 2 or not wanted:
        return
    keys = {difference.key for difference in wanted}
    holders: dict[tuple[Key, str], list[int]] = {}
    for rank in range(min(ranks, MAX_OTHER_RANKS)):
        table = _table(reference, boundary.position.begin, rank)
        if isinstance(table, str):
            continue
        for row in table.rows:
            if row.key in keys and row.digest:
                holders.setdefault((row.key, row.digest), []).append(rank)
    for difference in wanted:
        assert difference.b is not None and difference.b.digest is not None
        others = [r for r in holders.get((difference.key, difference.b.digest), []) if r != difference.rank]
        difference.from_rank = others[0] if others else None
