"""Digests that may still be on their way from a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from detrun.fingerprint import device as device_digest
from detrun.fingerprint.byte_digest import digest_bytes
from detrun.fingerprint.host import HostHasher
from detrun.recorder.pending import DeviceBytes, HostBytes, read


@dataclass(frozen=True)
class HostDigest:
    """A digest that is known."""

    name: str

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def text(self) -> str:
        return self.name


@dataclass(frozen=True)
class DeviceDigest:
    """The digest of a component of which at least a part lies on a device."""

    description: bytes
    sums: Sequence[HostBytes | DeviceBytes]

    def ready(self) -> bool:
        return all(part.ready() for part in self.sums)

    def wait(self) -> None:
        for part in self.sums:
            part.wait()

    def text(self) -> str:
        return device_digest.ml128_text(self.description, b"".join(part.raw() for part in self.sums))


def combined_text(texts: Sequence[str]) -> str:
    """One digest of several, in order."""
    joined = "\n".join(texts).encode()
    if any(text.startswith(device_digest.ALGORITHM) for text in texts):
        return device_digest.ml128_text(joined, b"")
    return digest_bytes(joined)


def seal(hasher: HostHasher, elsewhere: Sequence[torch.Tensor]) -> HostDigest | DeviceDigest:
    """The digest of what `hasher` was fed and of the tensors it could not read, which lie on devices."""
    if not elsewhere:
        return HostDigest(hasher.text())
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in elsewhere:
        by_device.setdefault(tensor.device, []).append(tensor)
    sums = [device_digest.segment_sums(tensors) for tensors in by_device.values()]
    return DeviceDigest(hasher.raw(), [read(part) for part in sums if part is not None])
