"""What is uploaded: the recipe with the code around it, as files below one folder, known by their content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from detrun.errors import RecipeError
from detrun.launch.preflight import human
from detrun.launch.snapshot import CODE_STATE, snapshot_code

MAX_FILES = 20_000
MAX_BYTES = 1024 * 1024 * 1024
_PATIENCE = 60.0
_NOT_CODE = {"__pycache__", "node_modules"}


@dataclass(frozen=True)
class Item:
    """One file of a tree. path: below its base, with `/`. link: where a symbolic link points; digest: SHA-256."""

    path: str
    size: int
    mode: int
    digest: str
    link: str | None = None


@dataclass(frozen=True)
class Tree:
    """Files below one folder here, to be the same files below one folder there. left_out: why some are not in it."""

    base: Path
    items: tuple[Item, ...]
    state: Path | None
    left_out: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """What names the whole; 32 hexadecimal digits."""
        listed = json.dumps([asdict(item) for item in self.items], sort_keys=True)
        return hashlib.sha256(listed.encode()).hexdigest()[:32]

    @property
    def size(self) -> int:
        return sum(item.size for item in self.items)

    def source(self, item: Item) -> Path:
        """Where an item's bytes are here."""
        if self.state is not None and item.path.startswith(f"{CODE_STATE}/"):
            return self.state / item.path.removeprefix(f"{CODE_STATE}/")
        return self.base / item.path

    def listed(self) -> list[dict[str, Any]]:
        return [asdict(item) for item in self.items]

    def forget(self) -> None:
        """Removes what was written to be uploaded."""
        if self.state is not None:
            shutil.rmtree(self.state, ignore_errors=True)


def snapshot(folders: Sequence[Path], current: Path, always: Sequence[Path] = ()) -> Tree:
    """The code in and around some folders: of a repository all that git does not ignore, else the folder's own files.

    folders: the last one is the program's. current: the folder that the command is called in; paths stay right if it is
    one of theirs. always: files (absolute) that are in it even if git ignores them. Raises RecipeError where it is more
    than what a snapshot may hold.
    """
    roots = _roots(folders)
    wider = [root for root in roots if current.resolve().is_relative_to(root)]
    base = Path(os.path.commonpath([*roots, *wider]))
    items: dict[str, Item] = {}
    left_out: list[str] = []
    total = 0
    for root, files in [*((root, _files(root)) for root in roots), (base, iter(always))]:
        for path in files:
            name = path.relative_to(base).as_posix()
            if name in items:
                continue
            item = _item(path, name, base)
            if isinstance(item, str):
                left_out.append(item)
                continue
            items[name] = item
            total += item.size
            if len(items) > MAX_FILES or total > MAX_BYTES:
                raise RecipeError(
                    f"the code to upload is more than {MAX_FILES:,} files or {human(MAX_BYTES)}",
                    where=str(root),
                    hint="give the recipe a folder of its own, or make it a git repository whose .gitignore names the"
                    " data; data belongs on the cluster, and a recipe may name it by an absolute path",
                )
    state = Path(tempfile.mkdtemp(prefix="detrun-code-"))
    snapshot_code(folders[-1], state)  # of the program's own folder
    for path in sorted(state.iterdir()):
        of_state = _item(path, f"{CODE_STATE}/{path.name}", state)
        if isinstance(of_state, Item):
            items[of_state.path] = of_state
    return Tree(base, tuple(items[name] for name in sorted(items)), state, tuple(left_out))


def _roots(folders: Iterable[Path]) -> list[Path]:
    """The repositories that the folders are in, or the folders; none of them lies in another."""
    found = sorted({_repository(folder) or folder.resolve() for folder in folders})
    return [root for root in found if not any(root != other and root.is_relative_to(other) for other in found)]


def _repository(folder: Path) -> Path | None:
    told = _git(folder, "rev-parse", "--show-toplevel")
    return Path(os.fsdecode(told.rstrip(b"\n"))).resolve() if told else None


def _git(folder: Path, *words: str) -> bytes | None:
    if shutil.which("git") is None:
        return None
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _files(root: Path) -> Iterator[Path]:
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard") if _repository(root) else None
    if listed is None:
        yield from _walk(root)
        return
    for name in sorted({os.fsdecode(raw) for raw in listed.split(b"\0") if raw}):
        path = root / name
        if path.is_dir() and not path.is_symlink():  # a repository in this one
            yield from _files(path)
        else:
            yield path


def _walk(root: Path) -> Iterator[Path]:
    """A folder that no git knows: all but what is hidden, made by Python, or an environment of it."""
    count = 0
    for folder, folders, names in os.walk(root):
        keep = sorted(name for name in folders if not name.startswith(".") and name not in _NOT_CODE)
        folders[:] = [name for name in keep if not (Path(folder) / name / "pyvenv.cfg").exists()]
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in sorted([*names, *links]):
            if not name.startswith("."):
                yield Path(folder) / name
                count += 1
        if count > MAX_FILES + 1:
            return  # the caller says so


def _item(path: Path, name: str, base: Path) -> Item | str:
    """The file as an item, or why it is none."""
    try:
        name.encode()
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            target = str(path.readlink())
            inside = not Path(target).is_absolute() and (path.parent / target).resolve().is_relative_to(base.resolve())
            return Item(name, 0, 0, "", target) if inside else f"{name}: a link to somewhere else"
        if not stat.S_ISREG(mode):
            return f"{name}: no plain file"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _digest(file)
            size = file.tell()
    except FileNotFoundError:
        return f"{name}: not there (deleted, and git still knows it)"
    except UnicodeEncodeError:
        return f"{name.encode(errors='replace').decode()}: its name is not UTF-8"
    except OSError as error:
        return f"{name}: cannot be read ({error.strerror})"
    return Item(name, size, 0o755 if mode & stat.S_IXUSR else 0o644, digest.hexdigest())


def _digest(file: Any) -> Any:
    """hashlib.file_digest, which Python 3.10 lacks."""
    digest = hashlib.sha256()
    while block := file.read(1024 * 1024):
        digest.update(block)
    return digest
