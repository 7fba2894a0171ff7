"""The archive: a folder of experiments, the only history there is.

Several people and several commands may work in one archive at the same time, on a file system that many
machines share. So an experiment's folder is claimed by making it, and no index is kept beside the folders.
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from detrun.errors import AmbiguousExperimentError, ArchiveError, UnknownExperimentError, UsageError
from detrun.records.layout import MARKER, ExperimentFolder

DEFAULT_FOLDER = ".detrun"
LATEST = "@latest"
_ID = re.compile(r".+-(?P<time>[0-9]{8}T[0-9]{6})-[0-9a-f]{4}")
_NAME = re.compile(r"[A-Za-z0-9._+-]+")  # what `create` makes; nothing else is ours
_MAX_NAME = 80
_SHOWN_CANDIDATES = 10


class Archive:
    """Experiments below one folder. The folder need not exist until the first experiment is created."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).expanduser().absolute()

    @classmethod
    def find(
        cls,
        option: str | os.PathLike[str] | None = None,
        recipe: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Archive:
        """The archive in force: `--archive`, else DETRUN_ARCHIVE, else the recipe's, else `.detrun` here."""
        environ = os.environ if environ is None else environ
        chosen = option or environ.get("DETRUN_ARCHIVE") or recipe or DEFAULT_FOLDER
        try:
            return cls((cwd or Path.cwd()) / Path(chosen).expanduser())
        except RuntimeError:  # expanduser's word for a home that is nobody's
            raise UsageError(f"archive {str(chosen)[:200]}: there is no such user") from None
        except FileNotFoundError:
            raise UsageError("the current folder does not exist any more", hint="cd to another one.") from None

    def create(self, name: str, kind: str, now: datetime | None = None) -> ExperimentFolder:
        """A new, empty experiment folder `<name>-<kind>-<UTC time>-<4 hex>`, already marked as ours.

        `name` is the recipe's; characters that do not belong in a file name become `-`.
        Raises ArchiveError where the archive cannot be written.
        """
        moment = (now or datetime.now(timezone.utc)).astimezone(timezone.utc)
        stem = f"{_file_name(name)}-{_file_name(kind)}-{moment:%Y%m%dT%H%M%S}"
        try:
            self.make_root()
            for _ in range(1000):
                folder = self.root / f"{stem}-{secrets.token_hex(2)}"
                try:
                    folder.mkdir()
                except FileExistsError:
                    continue
                (folder / MARKER).touch()
                return ExperimentFolder(folder)
        except OSError as error:
            raise ArchiveError(
                f"an experiment cannot be created here: {error.strerror}",
                where=str(self.root),
                hint="--archive DIR (or DETRUN_ARCHIVE) names another folder",
            ) from None
        raise ArchiveError(f"no free experiment id left for {stem}", where=str(self.root))

    def list(self) -> list[ExperimentFolder]:
        """Every experiment of the archive, oldest first; an archive that does not exist yet has none."""
        try:
            with os.scandir(self.root) as entries:
                names = [
                    entry.name
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False) and _NAME.fullmatch(entry.name)
                ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ArchiveError(f"cannot be read: {error.strerror}", where=str(self.root)) from None
        ours = [key for name in names if (key := _age(self.root / name)) is not None]
        return [ExperimentFolder(self.root / name) for *_, name in sorted(ours)]

    def resolve(self, text: str) -> ExperimentFolder:
        """The experiment that `text` names: its id, a unique beginning or last part of it, or `@latest`.

        Raises UsageError where the text can be no id (it never leaves the archive's folder),
        UnknownExperimentError and AmbiguousExperimentError.
        """
        if text != LATEST and (not _NAME.fullmatch(text) or text in (".", "..")):
            raise UsageError(
                f"{text[:100]!r} is not an experiment's id",
                hint="an id, its beginning, its last part (such as 3f9a), or @latest",
            )
        experiments = self.list()
        if not experiments:
            raise UnknownExperimentError(
                "the archive holds no experiment",
                where=str(self.root),
                hint="is this the right archive? --archive DIR or DETRUN_ARCHIVE names another",
            )
        if text == LATEST:
            return experiments[-1]
        by_id = {experiment.id: experiment for experiment in experiments}
        if text in by_id:
            return by_id[text]
        found = [id for id in by_id if id.startswith(text) or id.endswith(f"-{text}")]
        if len(found) == 1:
            return by_id[found[0]]
        if found:
            shown = found[-_SHOWN_CANDIDATES:]
            more = len(found) - len(shown)
            raise AmbiguousExperimentError(
                f"{text!r} names {len(found)} experiments" + (f"; the last {len(shown)}:" if more else ""),
                candidates=shown,
                where=str(self.root),
                hint="a longer beginning, or the last part of the id, tells them apart",
            )
        close = difflib.get_close_matches(text, by_id, n=1, cutoff=0.5)
        raise UnknownExperimentError(
            f"no experiment is called {text!r}",
            where=str(self.root),
            hint=f"did you mean {close[0]}?" if close else f"the latest is {experiments[-1].id}",
        )

    def make_root(self) -> None:
        """Makes the archive's own folder where it is not there yet. Raises OSError."""
        try:
            self.root.mkdir(parents=True)
        except FileExistsError:
            return
        # A default archive lies in a working tree; its records are nobody's to commit.
        (self.root / ".gitignore").write_text("*\n", encoding="utf-8")


def _file_name(text: str) -> str:
    cleaned = re.sub(r"[^A-Za-z0-9._+]+", "-", text).strip("-.")[:_MAX_NAME].rstrip("-.")
    return cleaned or "unnamed"


def _age(folder: Path) -> tuple[str, int, str] | None:
    """What experiments sort by, or None for a folder that is none.

    The time inside the id comes first, as a copy of the archive would change the files' own.
    """
    try:
        marked = (folder / MARKER).lstat().st_mtime_ns
    except OSError:
        return None
    match = _ID.fullmatch(folder.name)
    return (match["time"] if match else "", marked, folder.name)
