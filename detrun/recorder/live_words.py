"""What the name of a variable, an attribute or a class says about it. Data: each table with the reason it is there."""

from __future__ import annotations

import re
from functools import lru_cache


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PIECES = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

AVERAGES = _words("ema avg average averaged averages shadow teacher swa polyak slow moving target")
"""Copies of the parameters that follow them; they live from step to step by their nature."""

OPTIMIZER_STATE = _words("velocity velocities vel momentum momenta mom moment moments exp buf bufs m v sq adam hessian")
"""Tensors shaped like the parameters that a hand-written optimizer keeps; they live from step to step, too."""

FEEDS = _words("batches batcher stream streams feeder feed reader prefetch prefetcher corpus data")
FEED_PARTS = ("loader", "sampler", "dataset", "iterator")
"""Where a program is in its data. The batch itself is compared: what stands here only explains."""

BOOKKEEPING = _words("loss losses log logs meter meters metric metrics acc accuracy correct stat stats")
"""What is gathered to be shown. If it steers the training after all, parameters or metrics differ as well."""

SAVED = _words("ckpt checkpoint snapshot saved payload backup staging state_dict")
"""Copies made to be written away; a resumed program has others or none."""

GRADIENTS = _words("grad grads gradient gradients")
"""Copies of gradients, which every step leaves behind, if an attribute keeps them."""

CLOCKS = _words("t0 t1 tic toc start time elapsed tick began clock seconds duration eta now timestamp")
"""Floats that are times, if they are called so."""

HANDLES = _words("pid ppid tid port fd fileno handle uuid hash addr address")
"""Numbers that the system hands out."""

DRAWN = ("rng", "tracker", "generator", "random")
"""Owners of saved generator states, such as trackers of named streams."""


@lru_cache(maxsize=8192)
def pieces(name: str) -> frozenset[str]:
    """The words of a dotted name in lower case: `trainer.emaModel[3]` has trainer, ema, model and 3; words that belong
    together by an underscore count together as well."""
    words = [word.lower() for word in _PIECES.findall(name)]
    return frozenset([*words, *re.split(r"[.\[\]]+", name.lower())])


def says(name: str, words: frozenset[str]) -> bool:
    return not words.isdisjoint(pieces(name))


def says_feed(name: str) -> bool:
    low = name.lower()
    return any(part in low for part in FEED_PARTS) or says(name, FEEDS)
