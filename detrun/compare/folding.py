"""Many ranks, steps or hosts in few words: `ranks 0-3, 7`, `node[1-4]`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_HOST = re.compile(r"(.*?)([0-9]+)((?:\.[^0-9].*)?)")


def ranges(numbers: Iterable[int], most: int = 6) -> str:
    """`0-3, 7`; beyond `most` stretches the rest is only counted."""
    stretches: list[list[int]] = []
    for number in sorted(set(numbers)):
        if stretches and number == stretches[-1][1] + 1:
            stretches[-1][1] = number
        else:
            stretches.append([number, number])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in stretches[:most]]
    rest = sum(high - low + 1 for low, high in stretches[most:])
    return ", ".join(shown) + (f" and {rest:,} more" if rest else "")


def ranks_in_words(ranks: Iterable[int], of: int | None = None) -> str:
    """`rank 3`, `ranks 0-3, 7`, or `every rank` where `of` says how many there are."""
    distinct = set(ranks)
    if of is not None and len(distinct) >= of > 1:
        return "every rank"
    return f"rank {next(iter(distinct))}" if len(distinct) == 1 else f"ranks {ranges(distinct)}"


def steps_in_words(steps: Iterable[int], of: int | None = None) -> str:
    """`at step 3`, `at steps 3-9`, or `in every step` where `of` says how many there are."""
    distinct = set(steps)
    if of is not None and len(distinct) >= of:
        return "in every step"
    return f"at step {next(iter(distinct))}" if len(distinct) == 1 else f"at steps {ranges(distinct)}"


def hosts(names: Sequence[str], most: int = 8) -> str:
    """`node[1-4,7], login` as Slurm writes host lists; leading zeros are kept."""
    numbered: dict[tuple[str, str], list[str]] = {}
    plain: list[str] = []
    for name in dict.fromkeys(names):
        match = _HOST.fullmatch(name)
        if match:
            numbered.setdefault((match[1], match[3]), []).append(match[2])
        else:
            plain.append(name)
    folded = [f"{prefix}{_bracketed(numbers)}{suffix}" for (prefix, suffix), numbers in sorted(numbered.items())]
    everything = folded + sorted(plain)
    shown = ", ".join(everything[:most])
    return shown + (f" and {len(everything) - most} more" if len(everything) > most else "")


def _bracketed(numbers: Sequence[str]) -> str:
    """`[1-2,4]`; numbers of one width run on from each other, and `9` and `10` do where no zero pads them."""
    padded = any(number.startswith("0") and number != "0" for number in numbers)
    stretches: list[list[str]] = []
    for number in sorted(numbers, key=lambda text: (len(text), text)):
        last = stretches[-1][1] if stretches else ""
        follows = last and int(number) == int(last) + 1 and (not padded or len(number) == len(last))
        if follows:
            stretches[-1][1] = number
        else:
            stretches.append([number, number])
    written = [low if low == high else f"{low}-{high}" for low, high in stretches]
    return written[0] if len(numbers) == 1 else f"[{','.join(written)}]"
