"""The exclusive or that other tools write: as they write it, and why it is no evidence."""

from __future__ import annotations

import torch

from detrun.fingerprint.device import segment_sums
from detrun.fingerprint.hash_tensor import xor_hashes
from detrun.fingerprint.host import digest_tensors
from tests.fingerprint.test_host import Wrapper


def test_it_is_torchs_own_value_part_by_part() -> None:
    values, scale = torch.randn(6, 4), torch.tensor(2.0)
    assert xor_hashes(values) == {"": int(torch.hash_tensor(values).item())}
    assert xor_hashes(values.t()) == xor_hashes(values)
    assert xor_hashes(Wrapper(values, scale)) == {
        "data_": int(torch.hash_tensor(values).item()), "scale": int(torch.hash_tensor(scale).item()),
    }  # fmt: skip


def test_formats_it_does_not_take_are_widened_or_left_out() -> None:
    values = torch.randn(8).to(torch.float8_e4m3fn)
    assert xor_hashes(values) == {"": int(torch.hash_tensor(values.double()).item())}
    assert xor_hashes(torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)) == {"": None}
    assert xor_hashes(torch.empty(0)) == {"": None}
    assert xor_hashes(torch.empty(3, device="meta")) == {"": None}


def test_what_it_does_not_see_the_digests_do() -> None:
    tensor = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    rows, pair = tensor.clone(), tensor.clone()
    rows[[2, 5]] = tensor[[5, 2]]
    pair.view(torch.int32)[[1, 9], [3, 4]] ^= 1
    for other in (rows, pair):
        assert xor_hashes(other) == xor_hashes(tensor)
        assert digest_tensors([other]) != digest_tensors([tensor])
        ours, theirs = segment_sums([tensor]), segment_sums([other])
        assert ours is not None
        assert theirs is not None
        assert not torch.equal(ours, theirs)
