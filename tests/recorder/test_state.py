"""Digests of batches, optimizer state, buffers; the gradient norm; the environment."""

from __future__ import annotations

import math
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from detrun.recorder.batch import batch_digest
from detrun.recorder.environment import packages, redacted
from detrun.recorder.norm import gradient_norm
from detrun.recorder.state import buffers_digest, optimizer_digest, tensors_digest


@dataclass
class Sample:
    ids: torch.Tensor
    mask: np.ndarray[Any, Any]


ARGUMENTS = [
    (torch.arange(4),),
    (torch.arange(4), "text"),
    (torch.arange(4), 1),
    (torch.arange(4), 1.0),
    (torch.arange(4), True),
    (torch.arange(4), None),
    ([torch.arange(4)],),
    (torch.arange(4).view(2, 2),),
    (torch.arange(4).int(),),
    (np.arange(4),),
    (np.arange(4).astype(np.int16),),
    (np.arange(8)[::2],),
    (np.array([], np.float32),),
    (np.array("2020-01-01", "M8[D]"),),
    ({"ids": torch.arange(4)},),
    ({"mask": torch.arange(4)},),
    (UserDict(ids=torch.arange(4)),),
    (Sample(torch.arange(4), np.ones(2)),),
    (Sample(torch.arange(4), np.zeros(2)),),
    (torch.nn.utils.rnn.pack_sequence([torch.arange(3.0), torch.arange(2.0)]),),
    (b"bytes",),
    (object(),),
    (np.array([object()]),),
]


def test_arguments_that_differ_have_different_digests() -> None:
    texts = [batch_digest(arguments, {}).text() for arguments in ARGUMENTS]
    again = [batch_digest(arguments, {}).text() for arguments in ARGUMENTS]
    assert texts == again
    assert len(set(texts)) == len(texts) - 1  # a mapping is a mapping, whatever its type
    assert batch_digest((), {"ids": torch.arange(4)}).text() != batch_digest((torch.arange(4),), {}).text()


def test_tensors_that_require_a_gradient_are_no_data() -> None:
    first, second = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    assert batch_digest((first,), {}).text() == batch_digest((second,), {}).text()


def test_deep_and_recursive_arguments_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    batch_digest((endless,), {})


def adam(**options: Any) -> tuple[nn.Module, torch.optim.Adam]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters(), **options)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def test_optimizer_digest_sees_state_hyper_parameters_and_what_is_missing() -> None:
    base = optimizer_digest([adam()[1]]).text()
    assert optimizer_digest([adam()[1]]).text() == base
    assert optimizer_digest([adam(lr=2e-3)[1]]).text() != base
    assert optimizer_digest([adam(amsgrad=True)[1]]).text() != base
    net, optimizer = adam()
    optimizer.state[net.weight]["exp_avg"].view(-1).view(torch.int32)[0] ^= 1
    assert optimizer_digest([optimizer]).text() != base
    net, optimizer = adam()
    del optimizer.state[net.bias]
    assert optimizer_digest([optimizer]).text() != base
    assert net.bias not in optimizer.state  # reading the state did not create one


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.float32(0.1), np.float32(0.2)),
        (np.array([0.9, 0.99]), np.array([0.9, 0.999])),
        ({1: 0.5}, {2: 0.5}),
    ],
)
def test_optimizer_digest_sees_hyper_parameters_of_numpy_and_in_mappings(one: object, other: object) -> None:
    digests = []
    for value in (one, one, other):
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        optimizer.param_groups[0]["extra"] = value
        digests.append(optimizer_digest([optimizer]).text())
    assert digests[0] == digests[1] != digests[2]


def test_buffers_are_seen_once_and_none_is_none() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    digest = buffers_digest([net, net])
    assert digest is not None
    assert digest.text() == tensors_digest(list(net.buffers())).text()
    assert buffers_digest([nn.Linear(2, 2)]) is None


def value_of(gradients: list[torch.Tensor | None]) -> float:
    (norm,) = gradient_norm(gradients)
    assert norm.dtype == "float64"
    return float(norm.value())


def test_gradient_norm_of_all_kinds_of_gradients() -> None:
    torch.manual_seed(0)
    dense = [torch.randn(7, 5), torch.randn(40_000), torch.randn(())]
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in dense))
    assert value_of([*dense, None]) == pytest.approx(expected, rel=1e-6)
    assert gradient_norm([None]) == []
    mixed = [dense[0], dense[1].double(), dense[2].bfloat16()]
    assert value_of(mixed) == pytest.approx(expected, rel=1e-2)
    assert value_of([torch.tensor([3 + 4j])]) == 5.0
    doubled = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([3.0, 4.0]), (4,))
    assert value_of([doubled]) == 7.0
    assert math.isnan(value_of([torch.tensor([math.nan, 1.0])]))
    assert value_of([torch.tensor([math.inf, 1.0])]) == math.inf


def test_gradient_norm_does_not_depend_on_threads() -> None:
    gradients: list[torch.Tensor | None] = [torch.randn(1_000_003), torch.randn(100)]
    threads = torch.get_num_threads()
    values = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            values.append(value_of(gradients))
    finally:
        torch.set_num_threads(threads)
    assert values[0].hex() == values[1].hex()


def test_secrets_are_never_in_clear() -> None:
    env = {
        "OMP_NUM_THREADS": "2",
        "RANK": "0",
        "PYTHONPATH": "/x",
        "NCCL_API_KEY": "s3cret",
        "TORCH_TOKEN": "s3cret",
        "SLURM_PASSWORD": "s3cret",
        "PYTHON_AUTH": "s3cret",
        "DETRUN_URL": "s3cret",
        "PYTORCH_CREDENTIALS": "s3cret",
        "CUDA_COOKIE": "s3cret",
        "PYTHONPROXY": "http://me:s3cret@proxy",
        "HOME": "/home/s3cret",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "ODD\udc80": "s3cret\udc80",
    }
    found = redacted(env)
    assert found["clear"] == {"OMP_NUM_THREADS": "2", "RANK": "0", "PYTHONPATH": "/x"}
    assert set(found["digest"]) == set(env) - set(found["clear"])
    assert "s3cret" not in str(found)
    assert redacted({**env, "HOME": "/other"})["digest"]["HOME"] != found["digest"]["HOME"]


def test_installed_packages_are_listed() -> None:
    found = packages()
    assert found["torch"].startswith(torch.__version__.split("+")[0])
    assert "numpy" in found
