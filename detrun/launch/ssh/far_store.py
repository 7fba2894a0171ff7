"""The far end's store: snapshots of code by their content, below `~/.cache/detrun/remote/code`.

code/<digest>/         a whole snapshot; only ever made by renaming
code/<digest>.part/    one on its way. What is in it already is not sent again
code/<digest>.json     what a whole one holds, for later ones that share files with it
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from detrun.errors import ArchiveError, UsageError
from detrun.launch.preflight import human
from detrun.launch.ssh.wire import Beat, Wire
from detrun.records.files import write_atomically

DIGEST = re.compile(r"[0-9a-f]{32}")
FLOOR = 1024 * 1024
"""Bytes that have to be left after an upload."""
UNUSED_DAYS = 60
_NEIGHBOURS = 5


def cache_folder() -> Path:
    """Where the far end keeps what is uploaded and what runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "detrun" / "remote"


def code_folder(digest: str) -> Path:
    """Where the snapshot of that digest lies; UsageError where the digest is none."""
    if not DIGEST.fullmatch(digest):
        raise UsageError("that is no snapshot's digest")
    return cache_folder() / "code" / digest


def receive(wire: Wire, request: dict[str, Any]) -> None:
    """Says which files are missing, takes them, and makes the whole snapshot of them.

    Raises ArchiveError where there is no room; what has arrived stays for the next try.
    """
    final = code_folder(str(request["digest"]))
    items = [_checked(item) for item in request["items"]]
    part = final.with_name(final.name + ".part")
    target = final if final.is_dir() else part
    beat = Beat(wire)
    try:
        target.mkdir(parents=True, exist_ok=True)
        missing = []
        for index, item in enumerate(items):
            if not _same(target / item["path"], item):
                missing.append(index)
            beat.if_due()
        if missing:
            missing = _take_from_neighbours(final, target, items, missing)
        needed = sum(items[index]["size"] for index in missing)
        free = shutil.disk_usage(target).free
        if needed and free < needed + FLOOR:
            raise _full(target, f"{human(needed)} are to be written and {human(free)} are left")
        wire.write({"missing": missing, "size": needed})
        _take(wire, target, items, missing)
        write_atomically(final.with_name(final.name + ".json"), json.dumps(items).encode())
        if target is part:
            _finish(part, final)
        os.utime(final)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _full(target, f"{error.strerror}") from None
        raise ArchiveError(f"cannot be written: {error.strerror}", where=str(error.filename or target)) from None
    wire.write({"done": True})
    forget_unused(final.parent, keep=final.name)


def _full(target: Path, why: str) -> ArchiveError:
    return ArchiveError(
        f"no room for the code: {why}",
        where=str(target.parent),
        hint="free some space there (or set XDG_CACHE_HOME there), then give the same command again: what has arrived"
        " is not sent again",
    )


def _take(wire: Wire, target: Path, items: list[dict[str, Any]], missing: list[int]) -> None:
    for index in missing:
        item = items[index]
        place = target / item["path"]
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}.{os.getpid()}.part")
        digest, left = hashlib.sha256(), item["size"]
        try:
            with temporary.open("wb") as file:
                while True:
                    message, data = wire.read()
                    if message.get("item") != index or len(data) > left:
                        raise UsageError(f"{item['path']}: the other end sent something else than it announced")
                    file.write(data)
                    digest.update(data)
                    left -= len(data)
                    if message.get("last"):
                        break
            if left or digest.hexdigest() != item["digest"]:
                raise ArchiveError(
                    "changed while it was sent", where=item["path"], hint="give the command again once it is at rest"
                )
            temporary.chmod(item["mode"])
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)


def _checked(item: Any) -> dict[str, Any]:
    """An item as it has to be: nothing of it leads out of the snapshot's folder."""
    if not isinstance(item, dict) or not isinstance(item.get("path"), str) or not isinstance(item.get("digest"), str):
        raise UsageError("a file of the snapshot is described wrongly")
    path, link = item["path"], item.get("link")
    whole = PurePosixPath(path)
    if not path or "\0" in path or whole.is_absolute() or ".." in whole.parts or str(whole) != path:
        raise UsageError(f"{path[:200]!r} leads out of the snapshot")
    if type(item.get("size")) is not int or item["size"] < 0 or item.get("mode") not in (0, 0o644, 0o755):
        raise UsageError(f"{path[:200]!r} is described wrongly")
    if link is not None and (not isinstance(link, str) or _leads_out(whole, link)):
        raise UsageError(f"{path[:200]!r} is a link that leads out of the snapshot")
    return {"path": path, "size": item["size"], "mode": item["mode"], "digest": item["digest"], "link": link}


def _leads_out(path: PurePosixPath, link: str) -> bool:
    whole = os.path.normpath(path.parent / link)
    return "\0" in link or PurePosixPath(link).is_absolute() or whole == ".." or whole.startswith("../")


def _same(place: Path, item: dict[str, Any]) -> bool:
    """Whether that very file is there. A link is made where it is not."""
    if item["link"] is not None:
        if place.is_symlink() and str(place.readlink()) == item["link"]:
            return True
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(item["link"])
        return True
    try:
        if place.is_symlink() or place.stat().st_size != item["size"]:
            return False
        if _digest_of(place) != item["digest"]:
            return False
        if place.stat().st_mode & 0o777 != item["mode"]:
            place.chmod(item["mode"])
        return True
    except OSError:
        return False


def _take_from_neighbours(final: Path, target: Path, items: list[dict[str, Any]], missing: list[int]) -> list[int]:
    """Copies what earlier snapshots hold, and returns what is missing still."""
    held = dict(_held_by(final))
    still: list[int] = []
    for index in missing:
        item = items[index]
        source = held.get(item["digest"])
        if source is None or not _same(source, item):
            still.append(index)
            continue
        place = target / item["path"]
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}.{os.getpid()}.part")
        try:
            shutil.copy2(source, temporary)
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)
    return still


def _held_by(final: Path) -> Iterator[tuple[str, Path]]:
    """Digests of files in the newest other snapshots, and where these are."""
    others = [path for path in final.parent.glob("*.json") if DIGEST.fullmatch(path.stem) and path.stem != final.name]
    for listing in sorted(others, key=_modified, reverse=True)[:_NEIGHBOURS]:
        try:
            items = [_checked(item) for item in json.loads(listing.read_bytes())]
        except (OSError, ValueError, TypeError, UsageError):
            continue
        for item in items:
            if item["link"] is None:
                yield item["digest"], listing.with_suffix("") / item["path"]


def _finish(part: Path, final: Path) -> None:
    try:
        part.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(part, ignore_errors=True)  # somebody else sent the same, and was sooner


def forget_unused(folder: Path, keep: str) -> None:
    """Removes snapshots that nothing has used for UNUSED_DAYS; only what is named as ours are."""
    limit = time.time() - UNUSED_DAYS * 86400
    for place in folder.iterdir():
        digest = place.name.removesuffix(".part")
        if place.is_dir() and DIGEST.fullmatch(digest) and digest != keep and _modified(place) < limit:
            shutil.rmtree(place, ignore_errors=True)
            place.with_name(f"{digest}.json").unlink(missing_ok=True)


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1024 * 1024):
            digest.update(block)
    return digest.hexdigest()


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
