"""Starts pretrain_tiny.py on a machine without a GPU. Takes all of Megatron's command line."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main() -> None:
    import cuda_on_cpu

    cuda_on_cpu.install()
    if "mamba_cpu" in sys.argv:
        import mamba_cpu

        mamba_cpu.install()
    import census
    import nudge

    census.install()
    nudge.install()
    import pretrain_tiny

    pretrain_tiny.main()


if __name__ == "__main__":
    main()
