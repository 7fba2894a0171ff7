"""The state of the program's repository when an experiment begins: commit, and what is not committed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from detrun.records.jobs import Code

DIFF_LIMIT = 32 * 1024 * 1024
CODE_STATE = ".detrun-code"
"""In a copy of the code that no git knows: what this module found where the copy was made."""
PATIENCE = 30.0


def snapshot_code(workdir: Path, folder: Path) -> Code:
    """Writes code/commit.txt and, for a dirty tree, code/diff.patch; says what was found.

    A folder outside any repository, or a machine without git, gives an empty answer: the program may
    come from a package or a container. In an uploaded copy it is what was found where the copy was made.
    """
    copied = next((path / CODE_STATE for path in (workdir, *workdir.parents) if (path / CODE_STATE).is_dir()), None)
    if copied is not None:
        return _as_found(copied, folder)
    commit = _git(workdir, "rev-parse", "HEAD")
    if commit is None:
        return Code()
    folder.mkdir(parents=True, exist_ok=True)
    revision = commit.decode().strip()
    (folder / "commit.txt").write_text(revision + "\n", encoding="utf-8")
    status = _git(workdir, "status", "--porcelain=v1", "-z", "--untracked-files=normal") or b""
    if not status.strip():
        return Code(commit=revision, dirty=False)
    (folder / "status.txt").write_bytes(status.replace(b"\0", b"\n"))
    diff = _git(workdir, "diff", "--binary", "HEAD") or b""
    if not diff or len(diff) > DIFF_LIMIT:
        return Code(commit=revision, dirty=True)
    (folder / "diff.patch").write_bytes(diff)
    return Code(commit=revision, dirty=True, diff="code/diff.patch")


def _as_found(copied: Path, folder: Path) -> Code:
    """What another machine wrote down of the code before it was uploaded."""
    commit, status, diff = (copied / name for name in ("commit.txt", "status.txt", "diff.patch"))
    if not commit.is_file():
        return Code()
    folder.mkdir(parents=True, exist_ok=True)
    for path in (commit, status, diff):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    return Code(
        commit=commit.read_text(encoding="utf-8").strip(),
        dirty=status.is_file(),
        diff="code/diff.patch" if diff.is_file() else None,
    )


def _git(workdir: Path, *arguments: str) -> bytes | None:
    if shutil.which("git") is None:
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(workdir), *arguments], check=False, capture_output=True, timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
