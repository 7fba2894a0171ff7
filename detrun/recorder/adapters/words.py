"""What the name of a logged value says: whether it is about the training or about the machine."""

from __future__ import annotations

import re

from detrun.recorder import live_words

_RATES = "speed throughput runtime tps fps mfu hfu flops tflops latency"
_UNITS = "hours hour minutes minute second sec secs ms gb gib mb mib bytes"
_PARTS = "memory mem vram gpu cpu util utilization"
_MACHINE = frozenset(word for words in (_RATES, _UNITS, _PARTS) for word in words.split())
_RATE = re.compile(r"per_?(s|sec|second|min|minute|hour|gpu|device)$|/(s|sec|second)$", re.IGNORECASE)


def is_about_time(name: str) -> bool:
    """Whether a value called so is a time, a rate, or how much of the machine is in use: two runs differ in it."""
    return bool(_RATE.search(name)) or live_words.says(name, _MACHINE | live_words.CLOCKS)
