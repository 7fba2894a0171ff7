"""What all charts share: figures of plotly's JSON form, arrays packed as plotly reads them, and plotly's own script.

Figures are plain data and plotly's script is copied as a file: plotly's Python side is not imported, which would
cost more than the whole comparison.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detrun.errors import ArchiveError
from detrun.records.files import one_line, write_atomically

if TYPE_CHECKING:
    from numpy.typing import NDArray

Figure = dict[str, Any]
"""`{"data": [...], "layout": {...}}`."""

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down", "pentagon")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""Lines are told apart by more than color."""

COLORS = ("#3b7dd8", "#d9731f", "#2b9a66", "#b8519c", "#8f7a1d", "#6a67ce", "#c2454a", "#2a97a3", "#7a7a7a")
"""Of arms, and of metrics; each is seen on white and on black."""

GRID = "rgba(128,128,128,.25)"
MAX_LABEL = 60


def label(text: object, limit: int = MAX_LABEL) -> str:
    """Foreign text in a figure: plotly reads markup in names, and a metric may be called anything."""
    return html.escape(one_line(str(text), limit), quote=False)  # it would show &quot; as it stands


def packed(array: NDArray[Any]) -> dict[str, Any]:
    """An array as plotly reads it, in a third of the room that its decimals would take."""
    kind = array.dtype.newbyteorder("<")
    code = f"{kind.kind}{kind.itemsize}"
    return {"dtype": code, "bdata": base64.b64encode(array.astype(kind).tobytes()).decode()}


def layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    """A layout on a clear ground; colors of text and lines are set where the page is shown, by its scheme."""
    axis = {"gridcolor": GRID, "zeroline": False, "automargin": True}
    made: dict[str, Any] = {
        "margin": {"l": 56, "r": 12, "t": 12, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "itemclick": "toggle"},
        "xaxis": {**axis, "title": {"text": x}},
        "yaxis": {**axis, "title": {"text": y}},
        "hoverlabel": {"namelength": -1},
    }
    for key, value in more.items():
        made[key] = {**made[key], **value} if isinstance(made.get(key), dict) else value
    return made


def plotly_script() -> tuple[str, Path]:
    """A name for plotly's script that tells its version, and where the installed package keeps it."""
    spec = importlib.util.find_spec("plotly")
    places = list(spec.submodule_search_locations or ()) if spec else []
    path = Path(places[0]) / "package_data" / "plotly.min.js" if places else Path("plotly.min.js")
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            version = re.search(r"v([0-9][0-9.]*)", file.read(400))
    except OSError:
        raise ArchiveError(
            "plotly's script is missing from this installation",
            where=str(path),
            hint="pip install --force-reinstall plotly",
        ) from None
    return (f"plotly-{version[1].rstrip('.') if version else 'unknown'}.min.js", path)


def save_script(archive: Path) -> str:
    """Copies plotly's script into the archive's `assets` folder unless it is there; returns its file name."""
    name, source = plotly_script()
    target = archive / "assets" / name
    if not target.is_file():
        write_atomically(target, source.read_bytes())
    return name
