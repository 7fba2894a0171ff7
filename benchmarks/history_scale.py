"""How long an archive's experiments take to be listed, without and with the index's cache, and to be shown as pages.

python -m benchmarks.history_scale [--experiments 10000] [--packages 180]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from detrun.experiments.history import history_of, write_pages
from detrun.records.index import read_index
from detrun.records.index_cache import CACHE
from detrun.records.layout import MARKER
from tests.history_factory import Nights

LIMIT = 2.0


def fill(root: Path, experiments: int, packages: int) -> Nights:
    """So many experiments of three recipes, one in twenty diverged."""
    nights = Nights(root)
    installed = {f"package-{number}": f"1.{number}.0" for number in range(packages)}
    texts = {}
    for verdict in ("identical", "diverged"):
        id = nights.add("2026-01-01", "template", verdict, step=7, packages=installed)  # type: ignore[arg-type]
        texts[verdict] = (root / id / "verdict.json").read_text()
    for number in range(experiments - 2):
        day = f"2026{1 + number // 900 % 12:02}{1 + number // 30 % 28:02}"
        folder = root / f"recipe{number % 3}-pair-{day}T023000-{number:04x}"
        folder.mkdir()
        (folder / MARKER).touch()
        text = texts["diverged" if number % 20 == 0 else "identical"]
        dated = text.replace('"2026-01-01', f'"{day[:4]}-{day[4:6]}-{day[6:]}').replace(
            "template", f"recipe{number % 3}"
        )
        (folder / "verdict.json").write_text(dated)
    return nights


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=10_000)
    parser.add_argument("--packages", type=int, default=180)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        nights = fill(Path(folder), given.experiments, given.packages)
        time.sleep(2.5)  # younger verdicts are read again
        size = next(nights.root.glob("*/verdict.json")).stat().st_size
        cold = timed(lambda: read_index(nights.archive))
        warm = timed(lambda: read_index(nights.archive))
        shown = timed(lambda: write_pages(nights.archive, *history_of(nights.archive)))
        cache = (nights.root / CACHE).stat().st_size
    print(f"{given.experiments:,} verdicts of {size:,} bytes: {cold:.2f} s to list, {warm:.2f} s with the cache")
    print(f"({cache:,} bytes of cache); {shown:.2f} s for both pages")
    return int(max(cold, warm) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
