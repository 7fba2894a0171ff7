"""What a number of clean pairs says about the chance that a pair diverges.

If n independent pairs are all clean, the chance p of a divergence per pair is, with 95 % confidence, below
the p at which so many clean pairs would still be seen in 5 % of all trials: (1 - p) ** n = 0.05. (Clopper and
Pearson's one-sided bound for zero events; for large n about 3 / n, the rule of three.)
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
