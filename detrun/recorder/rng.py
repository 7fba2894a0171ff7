"""Digests of the process-wide random number streams. Reading them draws nothing.

Python's, numpy's and torch's generators are seeded by the operating system when nobody seeds them, so their states
differ between any two runs. A stream that the program never seeded says nothing about determinism by its state: what
was drawn from it shows in batches, gradients and parameters if it had an effect. Its digest is the word `unseeded`.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from detrun.fingerprint.byte_digest import ByteHasher

if TYPE_CHECKING:
    import numpy as np

UNSEEDED = "unseeded"

_WORDS = 624
"""Words of a Mersenne Twister's state; after so many draws all are made anew from the old ones."""

_MAX_REFILLS = 16384
"""So many refills of an unseeded stream between two looks are recognised; more than ten million words count as
seeding."""

_AT_ONCE = 512
"""Refills computed together: 2.5 MB."""


class FreshStream:
    """A Mersenne Twister as the operating system seeded it, and whether it is still that one.

    words: its 624 words, little endian uint32.
    """

    def __init__(self, words: bytes) -> None:
        self._words: bytes | None = words

    def is_unseeded(self, words: bytes) -> bool:
        """Whether a state has come from the first one by drawing alone; once it has not, it never will again."""
        if self._words is None:
            return False
        if words != self._words and not _follows(self._words, words):
            self._words = None
            return False
        self._words = words
        return True


class RngStreams:
    """The streams of this process; made when torch was imported."""

    def __init__(self) -> None:
        # Noted by sitecustomize when the modules were imported, before anybody can have seeded them.
        noted: dict[str, Any] = getattr(sys, "_detrun_fresh_rng", {})
        self._fresh: dict[str, FreshStream] = {}
        self._noted = noted
        self._torch_seed: int | None = None
        self.named: dict[str, Callable[[], Any]] = {}
        """Streams that an adapter told of: what reads the state of each."""
        self._at_first: dict[str, str] = {}
        self._before_step: dict[str, str] = {}

    def add(self, name: str, read: Callable[[], Any]) -> None:
        """A stream of the program's own. read: gives a torch.Generator, its state (uint8, on the host), or None.

        A framework may have streams for purposes that a model has no use for, and restore them wrongly: of what nobody
        draws from, the state has no effect."""
        self.named[name] = read

    def step_begins(self) -> None:
        """Nothing has been drawn yet in a step whose end will be looked at."""
        if self.named:
            self._before_step = self._named()
            self._at_first = {**self._before_step, **self._at_first}

    def idle(self) -> set[str]:
        """The named streams from which nobody has drawn since this process began to train."""
        now = self._named() if self._at_first else {}
        return {name for name in now if self._at_first.get(name, now[name]) == now[name]}

    def note_torch(self) -> None:
        """torch has just been imported: nobody can have seeded it yet."""
        self._torch_seed = sys.modules["torch"].initial_seed()

    def forked(self) -> None:
        """In a forked child, where Python has just seeded its stream anew, whoever seeded it before."""
        self._noted = {**self._noted, "random": random.getstate()}
        self._fresh.pop("python", None)

    def torch_is_unseeded(self) -> bool:
        """Whether torch's generator on the host still descends from the seed that the operating system gave it."""
        torch = sys.modules.get("torch")
        return torch is not None and self._torch_seed is not None and torch.initial_seed() == self._torch_seed

    def digests(self) -> dict[str, str]:
        """A digest a stream: `python`, `numpy` (the legacy global one), `torch_cpu`, and `cuda:<i>` where a device's
        context exists."""
        found = {"python": self._python(), "numpy": self._numpy(), **_torch()}
        if "torch_cpu" in found and self.torch_is_unseeded():
            found["torch_cpu"] = UNSEEDED
        found |= self._named()
        return {name: digest for name, digest in found.items() if digest is not None}

    def rolled_up(self) -> str:
        """One digest of all streams, of the named ones only those that were drawn from in this step."""
        before = self._before_step
        digests = self.digests()
        return roll_up({n: d for n, d in digests.items() if n not in self.named or before.get(n) != d})

    def _named(self) -> dict[str, str]:
        found = {}
        for name, read in self.named.items():
            state = read()
            if state is not None:
                found[name] = _generator(state) if hasattr(state, "get_state") else _state(state)
        return found

    def _python(self) -> str:
        version, words, gauss = random.getstate()
        raw = array("I", words).tobytes()
        if self._unseeded("python", "random", raw[: 4 * _WORDS]):
            return UNSEEDED
        hasher = ByteHasher()
        hasher.feed_text(f"{version} {gauss!r}")
        hasher.feed_bytes(raw)
        return hasher.text()

    def _numpy(self) -> str | None:
        module = sys.modules.get("numpy.random")
        if module is None:
            # Not even imported: the same as never seeded, whenever some library happens to import it.
            return UNSEEDED if "numpy" in sys.modules else None
        state = module.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":
            words = state["state"]["key"].astype("<u4").tobytes()
            if self._unseeded("numpy", "numpy.random.mtrand", words):
                return UNSEEDED
        hasher = ByteHasher()
        _feed(hasher, state)
        return hasher.text()

    def _unseeded(self, name: str, module: str, words: bytes) -> bool:
        if name not in self._fresh:
            noted = self._noted.get(module)
            if noted is None:
                return False
            first = array("I", noted[1][:_WORDS]).tobytes() if name == "python" else noted["state"]["key"].tobytes()
            self._fresh[name] = FreshStream(first)
        return self._fresh[name].is_unseeded(words)


def _follows(first: bytes, words: bytes) -> bool:
    """Whether a Mersenne Twister with the words `first` comes by drawing alone to the words `words`. Python's generator
    and numpy's are the same one."""
    import numpy as np

    stream = np.random.MT19937()
    stream.state = {"bit_generator": "MT19937", "state": {"key": np.frombuffer(first, "<u4"), "pos": _WORDS}}
    sought = _tempered(np.frombuffer(words, "<u4"))
    for _ in range(_MAX_REFILLS // _AT_ONCE):
        # What is drawn is a state's words, tempered, so that nothing but drawing is needed to see all states.
        drawn = stream.random_raw(_AT_ONCE * _WORDS).reshape(_AT_ONCE, _WORDS)
        if any((drawn[index] == sought).all() for index in np.flatnonzero(drawn[:, 0] == sought[0])):
            return True
    return False


def _tempered(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = words.astype("u8")
    x ^= x >> 11
    x ^= (x << 7) & 0x9D2C5680
    x ^= (x << 15) & 0xEFC60000
    x ^= x >> 18
    return x


def roll_up(digests: dict[str, str]) -> str:
    hasher = ByteHasher()
    for name, digest in digests.items():
        hasher.feed_text(f"{name}={digest}")
    return hasher.text()


def _feed(hasher: ByteHasher, state: Any) -> None:
    if isinstance(state, dict):
        for key in sorted(state):
            hasher.feed_text(str(key))
            _feed(hasher, state[key])
    elif hasattr(state, "tobytes") and getattr(state, "shape", None):
        hasher.feed_text(str(state.dtype))
        hasher.feed_bytes(state.tobytes())
    else:
        hasher.feed_text(float(state).hex() if isinstance(state, float) else repr(state))


def _torch() -> dict[str, str | None]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "default_generator"):
        return {}
    found: dict[str, str | None] = {"torch_cpu": _generator(torch.default_generator)}
    if torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        for index, generator in enumerate(torch.cuda.default_generators):
            if torch._C._cuda_hasPrimaryContext(index):
                found[f"cuda:{index}"] = _generator(generator)
    return found


def _generator(generator: Any) -> str:
    # A generator's state is a host tensor, a device's too: seed and offset are kept on the host.
    from detrun.fingerprint.host import digest_tensors

    return digest_tensors([generator.get_state()])


def _state(state: Any) -> str:
    from detrun.fingerprint.host import digest_tensors

    return digest_tensors([state])
