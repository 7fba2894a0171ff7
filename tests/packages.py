"""Programs that tests need and a machine may lack: installed where that may be, never passed over in CI."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

# Debian keeps daemons where a plain user's PATH does not lead.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])


def find_program(names: Sequence[str]) -> str | None:
    return next((found for name in names if (found := shutil.which(name, path=PATH))), None)


def ensure_program(names: Sequence[str], package: str) -> str:
    """The path of the first of these programs that is there, after the package was installed if none was.

    Skips the test where it cannot be installed, and fails it in CI.
    """
    found = find_program(names)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        # pytest-xdist's workers may all come here at once, and apt takes one at a time.
        with (Path(tempfile.gettempdir()) / "detrun-tests-apt.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = find_program(names) or _installed(names, package)
    if found is None:
        what = f"no {names[0]} here, and it could not be installed"
        if "CI" in os.environ:
            pytest.fail(what, pytrace=False)
        pytest.skip(what)
    return found


def _installed(names: Sequence[str], package: str) -> str | None:
    policy = Path("/usr/sbin/policy-rc.d")  # 101 means "do not start services"
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", package]):
            command = ["apt-get", "-o", "DPkg::Lock::Timeout=120", *words]
            subprocess.run(command, env=env, capture_output=True, check=False)
    finally:
        if ours:
            policy.unlink(missing_ok=True)
    return find_program(names)
