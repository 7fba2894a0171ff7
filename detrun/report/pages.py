"""What all pages share: templates that escape everything, and no network."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from detrun.records.files import printable


def environment() -> Environment:
    """The templates' environment. `base.html.j2` has the blocks title, style and body."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        # Escaping leaves what turns the reading direction or hides; markup that is safe (plotly's script) stays.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
