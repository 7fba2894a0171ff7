"""What a number of pairs says about the chance that a pair diverges.

If n independent pairs are all clean, the chance p of a divergence per pair is, with 95 % confidence, below
the p at which so many clean pairs would still be seen in 5 % of all trials: (1 - p) ** n = 0.05. (Clopper and
Pearson's one-sided bound for zero events; for large n about 3 / n, the rule of three.)

For k divergences in n pairs their two-sided interval holds each p at which k or more, and k or fewer, would be seen in
at least 2.5 % of all trials (Clopper & Pearson, Biometrika 26, 1934).
"""

from __future__ import annotations

import math

CONFIDENCE = 0.95


def bound_of_clean_pairs(n: int) -> float:
    """The upper bound of the chance of divergence per pair after n clean pairs, n >= 1."""
    return float(1 - (1 - CONFIDENCE) ** (1 / n))


def pairs_for_bound(bound: float) -> int:
    """How many clean pairs bring the bound to `bound` or below it: 59 for 0.05."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(1 - bound))


def interval(events: int, n: int) -> tuple[float, float]:
    """Clopper and Pearson's two-sided 95 % interval of a chance after `events` of n trials, 0 <= events <= n, n >= 1.

    Exact, and therefore never narrower than it says.
    """
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if events == 0 else _chance_at(events - 1, n, 1 - tail)
    high = 1.0 if events == n else _chance_at(events, n, tail)
    return low, high


def _chance_at(k: int, n: int, value: float) -> float:
    """The p at which k or fewer of n trials have this chance; it falls with p, so that halving finds it."""
    import numpy as np

    events = np.arange(k + 1)
    ways = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(k + 1)])
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        if np.exp(ways + events * math.log(p) + (n - events) * math.log1p(-p)).sum() > value:
            low = p
        else:
            high = p
    return (low + high) / 2
