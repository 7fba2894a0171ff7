"""Hostile and broken pickles: nothing runs, nothing is written, nothing grows without bound."""

from __future__ import annotations

import os
import pickle
import random
import resource
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detrun.checkpoints.rebuild import CALLS
from detrun.checkpoints.unpickle import Global, Opaque, unpickle
from detrun.errors import RecordError
from tests.checkpoints.making import entries


def load(raw: bytes) -> Any:
    return unpickle(raw, "here", CALLS)[0]


class Runs:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner) | st.lists(inner)
    ),
    max_leaves=12,
)


@given(plain, st.integers(2, 5))
def test_plain_values_are_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_containers_are_plain_ones(protocol: int) -> None:
    value = {
        "ordered": OrderedDict(a=1),
        "default": defaultdict(int, b=2),
        "counter": Counter("aab"),
        "set": {1, 2},
        "frozen": frozenset({3}),
        "size": torch.Size([2, 3]),
        "array": bytearray(b"xy"),
        "random": random.Random(1).getstate(),
    }
    assert load(pickle.dumps(value, protocol)) == {**value, "size": (2, 3), "array": b"xy"}


def test_shared_and_recursive_objects_stay_so() -> None:
    inner: list[Any] = [1]
    inner.append(inner)
    found = load(pickle.dumps({"a": inner, "b": inner}))
    assert found["a"] is found["b"] is found["a"][1]


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("function", [os.system, eval, exec, print, open, getattr, __import__, subprocess.Popen])
def test_no_function_is_called(function: Any, protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    raw = pickle.dumps(Runs(function, f"open({str(mark)!r}, 'w')"), protocol)
    found = load(raw)
    assert isinstance(found, Opaque)
    assert found.name.rpartition(".")[2] == function.__name__
    assert not mark.exists()


def test_a_class_is_not_looked_up_or_imported() -> None:
    raw = b"\x80\x04\x8c\x0bantigravity\x8c\x03fly\x93)R."
    found = load(raw)
    assert isinstance(found, Opaque) and found.name == "antigravity.fly"
    assert "antigravity" not in sys.modules


def test_what_a_call_returned_cannot_be_called_or_set_up() -> None:
    # getattr(os, "system")("…"), then BUILD on what came back
    system = b"cbuiltins\ngetattr\n(cos\nsystem\nX\x06\x00\x00\x00systemtR"
    raw = b"\x80\x04" + system + b"(X\x02\x00\x00\x00idtR}X\x01\x00\x00\x00aK\x01sb."
    found = load(raw)
    assert isinstance(found, Opaque) and found.state == {"a": 1}


def test_known_functions_are_not_changed_by_a_pickle() -> None:
    # BUILD with a slot state on a global would set attributes of a function
    before = dict(vars(CALLS["torch.Size"]))
    load(b"\x80\x04ctorch\nSize\nN}X\x0c\x00\x00\x00__defaults__)s\x86b.")
    assert dict(vars(CALLS["torch.Size"])) == before


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "cut short"),
        (b"\x80\x04", "cut short"),
        (b"\x80\x04X\xff\xff\xff\x7fabc.", "cut short"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "cut short"),
        (b"\x80\x04\x96\xff\xff\xff\xff\xff\xff\xff\x7f.", "cut short"),
        (b"\x80\x04]e.", "mark"),
        (b"\x80\x04h\x05.", "KeyError"),
        (b"\x80\x04\x82\x01.", "0x82"),
        (b"\x80\x04\x97.", "0x97"),
        (b"\x80\x04K\x01K\x02a.", "no list"),
        (b"\x80\x04]}(]K\x01u.", "TypeError"),
        (b"\x80\x04ctorch\nSize\nK\x01\x85R.", "ValueError"),
        (b"\x80\x04ctorch._utils\n_rebuild_tensor_v2\n)R.", "TypeError"),
        (b"\x80\x04c" + b"a" * 5000 + b"\n.", "ValueError"),
    ],
)
def test_damage_is_told(raw: bytes, words: str) -> None:
    with pytest.raises(RecordError, match=words):
        load(raw)


def test_a_high_memo_number_allocates_nothing() -> None:
    assert load(b"\x80\x04K\x01r\xff\xff\xff\xff.") == 1


def test_copies_are_bounded() -> None:
    # one list, and a set made of it again and again
    many = b"".join(b"K%c" % (i % 256) for i in range(200_000))
    raw = b"\x80\x04](" + many + b"eq\x00" + b"(" + b"cbuiltins\nlist\nh\x00\x85R" * 5_000 + b"t."
    with pytest.raises(RecordError, match="copies without end"):
        load(raw)


def test_deep_nesting_is_read_or_refused_without_a_crash(tmp_path: Path) -> None:
    raw = b"\x80\x04" + b"(" * 100_000 + b"l" * 100_000 + b"."
    (tmp_path / "deep.pkl").write_bytes(raw)
    found = entries(tmp_path / "deep.pkl")
    assert "nested more than" in (next(iter(found.values())).problem or "")


def test_a_value_that_holds_itself_ends(tmp_path: Path) -> None:
    loop: dict[str, Any] = {"a": 1}
    loop["self"] = loop
    torch.save(loop, tmp_path / "loop.pt")
    found = entries(tmp_path / "loop.pt")
    assert found["a"].value == "1"
    assert "nested more than" in (found["loop.pt"].problem or "")


def test_entries_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detrun.checkpoints.flatten.MOST_ENTRIES", 1000)
    bomb: Any = [1]
    for _ in range(40):
        bomb = [bomb, bomb]
    torch.save(bomb, tmp_path / "bomb.pt")
    assert any("more than 1,000 values" in (entry.problem or "") for entry in entries(tmp_path / "bomb.pt").values())


def test_a_hostile_checkpoint_writes_nothing_and_stays_small(tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    torch.save({"w": torch.ones(3), "x": Runs(os.system, f"touch {tmp_path}/ran")}, folder / "a.pt")
    with zipfile.ZipFile(folder / "a.pt", "a") as archive:
        archive.writestr("../../escaped", "x")
        archive.writestr("a/data/../../../escaped", "x")
        archive.writestr("/tmp/detrun-escaped", "x")
    before = sorted(tmp_path.rglob("*"))
    found = entries(folder / "a.pt")
    assert found["w"].digest() and found["x"].value == "posix.system" and found["x.0"].value
    assert sorted(tmp_path.rglob("*")) == before and not Path("/tmp/detrun-escaped").exists()


def test_a_tensor_that_claims_more_than_its_memory_is_refused(tmp_path: Path) -> None:
    small = torch.ones(1)
    torch.save({"huge": small.as_strided((1 << 20, 1 << 20), (0, 0)), "ok": small}, tmp_path / "a.pt")
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = entries(tmp_path / "a.pt")
    assert "stands for" in (found["huge"].problem or "")
    assert found["ok"].problem is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - usage < 64 * 1024


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    for begin in (b"", b"\x80\x04", b"\x80\x02("):
        try:
            load(begin + raw)
        except RecordError:
            continue


@given(st.integers(0, 1000), st.integers(0, 255))
def test_a_real_pickle_with_a_changed_byte_is_read_or_refused(place: int, byte: int) -> None:
    raw = bytearray(pickle.dumps({"a": [1, 2.5, "x"], "b": torch.Size([1, 2]), "c": OrderedDict(x={1, 2})}, 2))
    raw[place % len(raw)] = byte
    try:
        load(bytes(raw))
    except RecordError:
        return


def test_a_name_is_no_more_than_its_text() -> None:
    assert load(pickle.dumps(os.path.join)) == Global("posixpath.join")
