"""The catalog as a page: docs/catalog.md. `python -m detrun.diagnose.page` prints it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

from detrun.diagnose.catalog import Entry, catalog

_HEAD = """\
# Root causes

What makes two runs of the same training differ, as `detrun localize` and `detrun diagnose` name it. Each cause has the
experiment that tells it from the others and what mends it. This page is made from `detrun/diagnose/catalog.yaml`; the
signs by which an entry is recognized stand there too.

`detrun diagnose ID` runs the experiments that fit what is known of a pair or a localization that diverged, each with
one thing changed in every arm, and reports which made them agree.
"""


def catalog_page() -> str:
    """The page as Markdown."""
    return "\n".join([_HEAD, *_changes(), *_index(), *(line for entry in catalog().entries for line in _entry(entry))])


def _changes() -> Iterator[str]:
    yield "## What can be changed"
    yield ""
    yield "| `--change` | in every arm | if the arms then agree | if they do not |"
    yield "|---|---|---|---|"
    for id, experiment in catalog().experiments.items():
        yield f"| `{id}` | {experiment.what} | {experiment.identical} | {experiment.diverged} |"
    yield ""
    yield "Everything is held against `unchanged`: a change counts only where the fault comes back without it."
    yield ""


def _index() -> Iterator[str]:
    yield "## All causes"
    yield ""
    for entry in catalog().entries:
        yield f"- [{entry.id}](#{entry.id}): {entry.symptom}"
    yield ""


def _entry(entry: Entry) -> Iterator[str]:
    yield f"## {entry.id}"
    yield ""
    yield f"**Seen:** {entry.symptom}  "
    yield f"**Cause:** {entry.cause}  "
    yield f"**To confirm:** {entry.confirm}  "
    yield f"**Changes to try:** {', '.join(f'`{name}`' for name in entry.experiments)}  "
    yield f"**Fix:** {entry.fix}  "
    yield f"**Sources:** {', '.join(f'[{_name(link)}]({link})' for link in entry.sources)}"
    yield ""


def _name(link: str) -> str:
    """`pytorch#51366` of an issue, else the site and the page."""
    place = urlsplit(link)
    parts = [part for part in place.path.split("/") if part]
    if place.netloc == "github.com" and len(parts) == 4:
        return f"{parts[1]}#{parts[3]}"
    page = parts[-1].removesuffix(".html") if parts else ""
    return f"{place.netloc.removeprefix('docs.')}: {page}" if page else place.netloc


if __name__ == "__main__":
    sys.stdout.write(catalog_page())
