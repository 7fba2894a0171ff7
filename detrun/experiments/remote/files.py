"""Where what is brought back from other machines lies, and which machine an experiment is on.

<archive here>/remote/<host>/<id>/where.json        which host, which archive there
                                  verdict.json experiment.json report.html junit.xml
              /remote/<host>/nights/<night>/…        index.html history.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detrun.errors import AmbiguousExperimentError, ClusterError, DetrunError, UnknownExperimentError
from detrun.launch.ssh.far_files import ID, MAX_FILE, NIGHT, OF_ARCHIVE, OF_EXPERIMENT, OF_NIGHT
from detrun.records.archive import Archive
from detrun.records.files import read_object, write_atomically

FOLDER = "remote"
MAX_TOTAL = 2 * 1024 * 1024 * 1024
_SCRIPT = re.compile(r'<script[^<>]*\bsrc="(?:\.\./)?assets/(plotly-[0-9A-Za-z.]+\.min\.js)"[^<>]*></script>')


@dataclass(frozen=True)
class Place:
    """What is remembered of an experiment that is on another machine."""

    id: str
    host: str
    way: str
    program: str | None
    archive: str


class Landing:
    """The folder of one host in the archive here."""

    def __init__(self, archive: Archive, host: str) -> None:
        self._archive = archive
        self.folder = archive.root / FOLDER / (re.sub(r"[^A-Za-z0-9._@-]+", "-", host).lstrip(".-") or "host")
        self.pages: list[Path] = []
        self.junit: Path | None = None
        self._left = MAX_TOTAL

    def take(self, message: dict[str, Any], more: Callable[[], bytes]) -> None:
        """One file as the far end announces it, its bytes by `more`; nothing is written but what has a known name."""
        name, kind, of, size = (message.get(key) for key in ("file", "kind", "of", "size"))
        if type(size) is not int or not 0 <= size <= MAX_FILE or size > self._left:
            raise ClusterError("the other end sends a file that is too large")
        folder = self._folder_of(kind, of, name)
        data = bytearray()
        while len(data) < size:
            piece = more()
            if not piece:
                raise ClusterError("the other end sends less than it announced")
            data += piece
        if len(data) != size:
            raise ClusterError("the other end sends more than it announced")
        self._left -= size
        self._make_folder(folder)
        content = bytes(data)
        if str(name).endswith(".html"):
            content = _standing_alone(content)
        path = folder / str(name)
        write_atomically(path, content)
        if name == "report.html" or name == "history.html":
            self.pages = [*(page for page in self.pages if page != path), path]
        if kind == "night" and name == "junit.xml":
            self.junit = path

    def remember(self, id: str, host: str, way: str, program: str | None, archive: str) -> None:
        """Writes down where an experiment is."""
        folder = self._folder_of("experiment", id, "experiment.json")
        self._make_folder(folder)
        about = {"schema_version": 1, "host": host, "ssh": way, "remote_python": program, "archive": archive}
        write_atomically(folder / "where.json", json.dumps(about, indent=1).encode() + b"\n")

    def _folder_of(self, kind: object, of: object, name: object) -> Path:
        """Names come from another machine: only those that are known lead anywhere, and never out of the folder."""
        if isinstance(of, str):
            if kind == "experiment" and name in OF_EXPERIMENT and ID.fullmatch(of):
                return self.folder / of
            if kind == "night" and name in OF_NIGHT and NIGHT.fullmatch(of):
                return self.folder / "nights" / of
            if kind == "archive" and name in OF_ARCHIVE:
                return self.folder
        raise ClusterError("the other end sends a file that nobody asked for")

    def _make_folder(self, folder: Path) -> None:
        try:
            self._archive.make_root()
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return  # the write that follows says why


def _standing_alone(page: bytes) -> bytes:
    """The page with plotly's script in it, where it names the one that this installation has."""
    from markupsafe import Markup

    from detrun.report.chart import plotly_script

    text = page.decode("utf-8", "replace")
    found = _SCRIPT.search(text)
    if found is None:
        return page
    try:
        name, source = plotly_script()
        script = source.read_text(encoding="utf-8")
    except (DetrunError, OSError):
        return page
    if found[1] != name:
        return page
    inline = Markup("<script>") + Markup(script) + Markup("</script>")  # noqa: S704  the installed package's own
    return (text[: found.start()] + str(inline) + text[found.end() :]).encode("utf-8", "backslashreplace")


def remembered(archive: Archive, host: str | None = None) -> list[Place]:
    """Every experiment of the archive here that is on another machine, or on that one; oldest first."""
    root = archive.root / FOLDER
    found = []
    for file in root.glob("*/*/where.json"):
        if not ID.fullmatch(file.parent.name):
            continue
        try:
            about = read_object(file)
        except DetrunError:
            continue
        words = [about.get(key) for key in ("host", "ssh", "archive")]
        if all(isinstance(word, str) for word in words) and host in (None, words[0]):
            program = about.get("remote_python")
            name, way, place = map(str, words)
            found.append(Place(file.parent.name, name, way, str(program) if program else None, place))
    return sorted(found, key=lambda place: place.id[-20:])


def find_place(archive: Archive, text: str, host: str | None = None) -> Place | None:
    """The experiment that an id, its beginning or its last part names, or None.

    AmbiguousExperimentError where it is several.
    """
    places = remembered(archive, host)
    if text == "@latest":
        return places[-1] if places else None
    found = [place for place in places if place.id == text]
    found = found or [p for p in places if p.id.startswith(text) or p.id.endswith(f"-{text}")]
    if len({place.id for place in found}) > 1:
        raise AmbiguousExperimentError(
            f"{text!r} names {len(found)} experiments on other machines",
            candidates=[place.id for place in found[-10:]],
            hint="a longer beginning, or the last part of the id, tells them apart",
        )
    return found[-1] if found else None


def place_of(archive: Archive, text: str) -> Place:
    """The same; UnknownExperimentError where it is none."""
    place = find_place(archive, text)
    if place is None:
        raise UnknownExperimentError(
            f"nobody here knows on which machine {text!r} is", hint=f"detrun --host HOST fetch {text}"
        )
    return place
