"""What no import contract can say: names that must not be known, imports that must not be heavy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "detrun"

FRAMEWORKS = ("megatron", "torchtitan", "lightning", "transformers", "deepspeed", "accelerate")
# A rule's source may be named where the rule is data.
RULE_DATA = {
    "determinism/canonical.py",
    "diagnose/catalog.yaml",
    "checkpoints/layouts.yaml",
    "records/sources/patterns.yaml",
}


def sources() -> list[Path]:
    """The package's own text outside the built-in program."""
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.yaml"), *PACKAGE.rglob("*.j2")]
    return [path for path in files if "workloads" not in path.relative_to(PACKAGE).parts]


def fault_names() -> list[str]:
    listed = subprocess.run(
        [sys.executable, "-m", "detrun.workloads.hybrid", "--list-faults"], capture_output=True, text=True, check=True
    )
    # Names of one plain word (`nan`, `small`, `die`) are words of English too.
    return [name for name in re.findall(r"^([a-z][a-z0-9-]+)", listed.stdout, re.MULTILINE) if "-" in name]


def test_no_room_knows_a_planted_fault_or_a_test_case() -> None:
    names = fault_names() + [path.parent.name for path in (ROOT / "tests" / "cases").glob("*/case.yaml")]
    assert len(names) > 20
    found = [
        f"{path.relative_to(ROOT)}: {name}" for path in sources() for name in names if name in path.read_text("utf-8")
    ]
    assert not found


def test_no_framework_is_named_outside_adapters_and_rule_data() -> None:
    found = []
    for path in sources():
        where = path.relative_to(PACKAGE).as_posix()
        if where in RULE_DATA or where.startswith("recorder/adapters/"):
            continue
        text = path.read_text("utf-8").lower()
        found += [f"{where}: {name}" for name in FRAMEWORKS if re.search(rf"\b{name}\b", text)]
    assert not found


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["list"]])
def test_light_commands_import_nothing_heavy(argv: list[str], tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from detrun.cli import main\n"
        f"main({argv!r})\n"
        "heavy = {'torch', 'pandas', 'pyarrow', 'submitit', 'plotly', 'paramiko'} & set(sys.modules)\n"
        "print(json.dumps(sorted(heavy)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_importing_detrun_is_free() -> None:
    code = "import sys; before = set(sys.modules); import detrun; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pandas", "pydantic", "typer", "rich"} & set(done.stdout.split())


def test_the_public_surface_is_this() -> None:
    import detrun

    assert sorted(detrun.__all__) == ["__version__", "record", "rng_state", "set_rng_state", "track"]
