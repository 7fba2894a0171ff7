"""The frameworks that are tested against, as they come from PyPI, in an environment of their own below `.frameworks/`.

`python -m tests.frameworks.environment` makes it: about two minutes and 1.6 GB. What would bring another torch along is
installed without its dependencies; Megatron's wheel asks for a newer Python than it needs, and lies in a folder of its
own, as does DeepSpeed, which other frameworks would import if they found it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("DETRUN_FRAMEWORKS", ROOT / ".frameworks"))
WANTED = ROOT / "requirements" / "frameworks"
TORCH = "torch==2.13.0"
MEGATRON = "megatron-core==0.19.2"
DEEPSPEED = "deepspeed==0.19.8"

PYTHON = HOME / "all" / "bin" / "python"
"""The interpreter that has torch, transformers, Lightning and torchtitan."""
MEGATRON_HOME = HOME / "mcore"
"""Goes on PYTHONPATH."""
DEEPSPEED_HOME = HOME / "ds"
"""Goes on PYTHONPATH."""
UNSEEN_HOME = HOME / "unseen" / "site-packages"
"""Goes on PYTHONPATH of the trainers that no adapter knows, so that no other framework meets their packages."""


def make() -> None:
    """One process at a time. Raises subprocess.CalledProcessError where a package cannot be installed."""
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _make()
        _make_unseen()


def _make() -> None:
    stamp = HOME / "made-from"
    made_from = _made_from()
    if stamp.is_file() and stamp.read_text() == made_from:
        return
    _run(sys.executable, "-m", "venv", "--clear", str(HOME / "all"))
    pip = (str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(*pip, TORCH)
    _run(*pip, "--requirement", str(WANTED / "all.txt"))
    _run(*pip, "--no-deps", "--requirement", str(WANTED / "no-deps.txt"))
    alone = ("--no-deps", "--upgrade", "--target")
    _run(*pip, "--no-build-isolation", *alone, str(DEEPSPEED_HOME), DEEPSPEED, DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")
    newer = ("--python-version", "3.12", "--only-binary=:all:", "--ignore-requires-python")
    _run(*pip, *newer, *alone, str(MEGATRON_HOME), MEGATRON)
    _build_index_helpers(MEGATRON_HOME / "megatron" / "core" / "datasets")
    stamp.write_text(made_from)


def _make_unseen() -> None:
    """The trainers that no adapter knows, a few megabytes."""
    wanted, stamp = WANTED / "unseen" / "no-deps.txt", UNSEEN_HOME / "made-from"
    if stamp.is_file() and stamp.read_text() == wanted.read_text():
        return
    pip = (str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade")
    _run(*pip, "--target", str(UNSEEN_HOME), "--requirement", str(wanted))
    stamp.write_text(wanted.read_text())


def _made_from() -> str:
    texts = [path.read_text() for path in sorted(WANTED.glob("*.txt"))]
    return hashlib.sha256("\n".join([*texts, TORCH, MEGATRON, DEEPSPEED, sys.version]).encode()).hexdigest()


def _build_index_helpers(folder: Path) -> None:
    """The wheel's own are for the Python that it asks for."""
    asked = "import pybind11, sysconfig; print(pybind11.get_include(), sysconfig.get_path('include'))"
    found = subprocess.run([str(PYTHON), "-c", asked], check=True, capture_output=True, text=True).stdout.split()
    made = folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    flags = ("-O2", "-shared", "-std=c++17", "-fPIC", *(f"-I{path}" for path in found))
    _run("g++", *flags, str(folder / "helpers.cpp"), "-o", str(made))


def _run(*command: str, **env: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, **env})


if __name__ == "__main__":
    make()
