"""`python -m benchmarks [NAME ...]`: runs every benchmark (or those named), one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def names() -> list[str]:
    """Every module of this folder that is a benchmark."""
    return sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))


def main(wanted: list[str]) -> int:
    unknown = set(wanted) - set(names())
    if unknown:
        print(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names())}", file=sys.stderr)
        return 2
    worst = 0
    for name in wanted or names():
        print(f"== {name}", flush=True)
        worst = max(worst, subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
