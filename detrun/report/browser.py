"""Opens a page in the browser of whoever sits here."""

from __future__ import annotations

import webbrowser
from pathlib import Path


def open_page(path: Path) -> bool:
    """Whether a browser took the page; False on a machine that has none. `BROWSER` in the environment names one."""
    try:
        return webbrowser.open(path.resolve().as_uri())
    except (webbrowser.Error, OSError):
        return False
