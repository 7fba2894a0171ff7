"""Which variables are live at a call, in every Python that is at hand, and that looking changes nothing."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from detrun.recorder import liveness
from detrun.recorder.liveness import live_names, live_variables

PROBE = Path(__file__).with_name("liveness_probe.py")

EXPECTED = {
    "forward": ["average", "seed", "step", "target", "velocity"],
    "after the loop": ["seed"],
    "in a try": ["kept", "other", "result"],
    "in a finally": ["other", "result"],
    "in a with": ["file", "first"],
    "after a with": ["file", "second"],
    "deleted": [],
    "before a swap": ["one", "two"],
    "with a closure": ["reads", "shared"],
    "before a branch": ["flag", "one", "three", "two"],
    "not begun": [],
    "suspended": ["step"],
}


def python(version: str) -> str | None:
    """An interpreter of that version that starts."""
    for name in (f"python{version}", *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))):
        found = shutil.which(name)
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None


PYTHONS = {"this": sys.executable, **{version: python(version) for version in ("3.10", "3.11", "3.12", "3.13", "3.14")}}
"""This interpreter, and whichever others are here."""


@pytest.mark.parametrize("version", [version for version, path in PYTHONS.items() if path])
def test_what_may_still_be_read_is_live_in_every_python(version: str) -> None:
    interpreter = PYTHONS[version]
    assert interpreter is not None
    folder = str(Path(liveness.__file__).parent)
    done = subprocess.run([interpreter, str(PROBE), folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    noted = json.loads(done.stdout)
    assert {name: noted[name] for name in EXPECTED} == EXPECTED
    # A comprehension that is inlined keeps what it hides, which counts as reading it.
    assert set(noted["before a comprehension"]) - {"item"} == {"total"}
    assert {"module_average", "module_step", "read_by_function"} <= set(noted["in a module"])
    assert "module_unread" not in noted["in a module"]


class Thing:
    def eval(self) -> None:
        """Of the same name as a function that reads the variables around it."""


def trains() -> tuple[bool, object]:
    thing = Thing()
    thing.eval()
    reference = weakref.ref(thing)
    seen = "reference" in live_variables(sys._getframe())
    thing = None  # type: ignore[assignment]
    gc.collect()
    return seen, reference()


def test_reading_a_frame_keeps_nothing_alive() -> None:
    assert trains() == (True, None)


def test_a_program_that_reads_its_own_locals_keeps_that_dictionary() -> None:
    def program() -> dict[str, Any]:
        rate, size = 1, 2
        config = locals()
        live_variables(sys._getframe())
        assert config["rate"] == rate
        assert config["size"] == size
        return config

    assert program()


def test_an_instruction_of_a_later_python_reads_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(value: int) -> int:
        return value

    real = list(liveness.dis.get_instructions(function.__code__))
    index = next(i for i, instruction in enumerate(real) if instruction.opname.startswith("LOAD_FAST"))
    real[index] = real[index]._replace(opname="LOAD_FAST_SOMEHOW_STORE_FAST_X", argval=("value", "b", "c"))
    monkeypatch.setattr(liveness.dis, "get_instructions", lambda _code: iter(real))
    liveness._flow.cache_clear()
    live_names.cache_clear()
    assert live_names(function.__code__, -1) == {"value", "b", "c"}
    monkeypatch.undo()
    liveness._flow.cache_clear()
    live_names.cache_clear()


def test_every_frame_of_a_real_program_is_read_without_an_error() -> None:
    code = [
        value.__code__
        for module in list(sys.modules.values())
        for value in list(getattr(module, "__dict__", {}).values())
        if type(value) is FunctionType
    ][:3000]
    for each in code:
        names = live_names(each, len(each.co_code) // 2)
        assert names <= {*each.co_varnames, *each.co_cellvars, *each.co_freevars, *each.co_names}
