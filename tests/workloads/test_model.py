from __future__ import annotations

from dataclasses import replace
from pydoc_data.topics import topics

import pytest
import torch
from torch import Tensor

import detrun
from detrun.workloads.hybrid import operations
from detrun.workloads.hybrid.data import VOCABULARY, ByteLoader, load_documents
from detrun.workloads.hybrid.mamba import CausalConvolution, ssd_chunked
from detrun.workloads.hybrid.model import HybridModel
from detrun.workloads.hybrid.moe import MixtureOfExperts, Router, balance_experts
from detrun.workloads.hybrid.parallel import Ranks
from detrun.workloads.hybrid.seeds import seed_all
from detrun.workloads.hybrid.settings import ModelSettings, SettingsError

SMALL = ModelSettings(pattern="ME*", width=32, head_size=16, experts=4, dropout=0.0)


def sequential_recurrence(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """h[t] = exp(log_decay[t]) · h[t-1] + x[t] ⊗ b[t];  y[t] = h[t] c[t]."""
    state = torch.zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[-1], dtype=x.dtype)
    results = []
    for t in range(x.shape[1]):
        state = log_decay[:, t].exp()[..., None, None] * state + x[:, t, :, :, None] * b[:, t, None, None]
        results.append((state * c[:, t, None, None]).sum(-1))
    return torch.stack(results, dim=1)


def test_ssd_and_its_gradients_equal_the_sequential_recurrence() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 24, 3, 5, dtype=torch.float64)
    log_decay = -torch.rand(2, 24, 3, dtype=torch.float64)
    b, c = torch.randn(2, 2, 24, 4, dtype=torch.float64)
    inputs = [tensor.requires_grad_() for tensor in (x, log_decay, b, c)]
    chunked, naive = ssd_chunked(*inputs, chunk=8), sequential_recurrence(*inputs)
    torch.testing.assert_close(chunked, naive)
    weights = torch.randn_like(naive)
    gradients = torch.autograd.grad((naive * weights).sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad((chunked * weights).sum(), inputs), gradients)


def test_convolution_equals_torchs_and_is_causal() -> None:
    torch.manual_seed(0)
    convolution = CausalConvolution(6)
    x = torch.randn(2, 10, 6)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    expected = torch.nn.functional.conv1d(padded, convolution.weight.T[:, None], convolution.bias, groups=6)
    torch.testing.assert_close(convolution(x), expected.transpose(1, 2))


def test_operators_have_right_gradients() -> None:
    torch.manual_seed(0)
    y, gate = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True), torch.randn(3, 5).double()
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    gate = gate.expand(2, 3, 5).clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: operations.gated_norm(*a, 1e-5, ""), (y, gate, weight))
    assert torch.autograd.gradcheck(lambda parts: operations.ordered_sum(parts, ""), (y,))


def test_ordered_sum_adds_in_index_order() -> None:
    parts = torch.tensor([1e8, 1.0, -1e8, 1.0])
    assert operations.ordered_sum(parts, "") == 1.0
    assert operations.sum_in_order(parts, [0, 2, 1, 3]) == 2.0


def test_experts_equal_a_loop_over_tokens() -> None:
    torch.manual_seed(0)
    moe = MixtureOfExperts(SMALL)
    x = torch.randn(2, 16, 32)
    result = moe(x)
    routing = moe.routing
    assert routing is not None
    for token, experts, gates, got in zip(
        x.view(-1, 32), routing.experts, routing.gates, result.view(-1, 32), strict=True
    ):
        expected = sum(g * moe.experts[int(e)](token) for e, g in zip(experts, gates, strict=True))
        torch.testing.assert_close(got, expected)


def test_an_expert_without_tokens_still_has_gradients() -> None:
    torch.manual_seed(0)
    moe = MixtureOfExperts(SMALL)
    with torch.no_grad():
        moe.router.affinity.weight.zero_()
        moe.router.affinity.weight[:2] = 1.0  # with positive inputs only experts 0 and 1 are chosen
    moe(torch.rand(2, 16, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in moe.experts.parameters())
    assert not moe.experts[3].up.weight.grad.any()


def test_load_balancing_loss_is_one_for_an_even_load() -> None:
    moe = MixtureOfExperts(SMALL)
    moe.router.affinity.weight.data = torch.eye(32)[:4] + torch.eye(32)[[1, 2, 3, 0]] * 0.5
    moe(torch.eye(32)[:4].repeat(8, 1)[None])
    assert moe.routing is not None
    assert moe.routing.load_balancing_loss.item() == pytest.approx(1.0)


def test_expert_biases_steer_the_choice_and_not_the_gates() -> None:
    torch.manual_seed(0)
    router, plain = Router(replace(SMALL, expert_bias=0.1)), Router(SMALL)
    plain.load_state_dict(router.state_dict(), strict=False)
    x = torch.randn(32, 32)
    unbiased, given = router(x), plain(x)
    assert torch.equal(unbiased.experts, given.experts)
    assert torch.equal(unbiased.gates, given.gates)
    router.expert_bias[3] = 10.0
    routing = router(x)
    assert (routing.experts == 3).any(-1).all()
    scores = router.affinity(x).sigmoid().gather(-1, routing.experts)
    torch.testing.assert_close(routing.gates, scores / scores.sum(-1, keepdim=True))


def test_balancing_moves_biases_towards_an_even_load_and_starts_to_count_anew() -> None:
    model = HybridModel(replace(SMALL, expert_bias=0.1))
    router = model.blocks[1].mixer.router
    router.load += torch.tensor([9, 1, 1, 5])
    balance_experts(model, 0.1, Ranks(0, 1, torch.device("cpu")))
    torch.testing.assert_close(router.expert_bias, torch.tensor([-0.1, 0.1, 0.1, -0.1]))
    assert not router.load.any()


def test_model_is_causal_and_heads_predict_the_next_and_the_next_but_one() -> None:
    torch.manual_seed(0)
    model = HybridModel(SMALL).eval()
    heads: list[tuple[Tensor, Tensor]] = []

    def keep(hidden: Tensor, targets: Tensor) -> Tensor:
        heads.append((hidden.detach(), targets))
        return hidden.sum() * 0

    model._cross_entropy = keep  # type: ignore[method-assign]
    tokens = torch.randint(256, (1, 18))
    model(tokens)
    changed = tokens.clone()
    changed[0, 10] = 255 - changed[0, 10]
    model(changed)
    (hidden, targets), (mtp_hidden, mtp_targets), (other, _), (mtp_other, _) = heads
    assert torch.equal(targets, tokens[:, 1:17])
    assert torch.equal(mtp_targets, tokens[:, 2:18])
    # The expert block multiplies other groups of rows once a token is routed otherwise, hence close, not equal.
    torch.testing.assert_close(hidden[:, :10], other[:, :10])
    assert not torch.allclose(hidden[:, 10], other[:, 10])
    torch.testing.assert_close(mtp_hidden[:, :9], mtp_other[:, :9])  # sees one token further: t+1
    assert not torch.allclose(mtp_hidden[:, 9], mtp_other[:, 9])


def test_default_data_is_real_text_in_a_fixed_order() -> None:
    documents = load_documents(None)
    assert [document.name for document in documents] == sorted(topics)
    assert sum(len(document.text) for document in documents) > 300_000
    assert b'The "assert" statement' in b"".join(document.text for document in documents)


def test_a_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "text"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(3000)) + b"no newline")
    documents = load_documents(path)
    assert len(documents) > 3
    assert b"".join(document.text for document in documents) == path.read_bytes()
    assert all(document.text.endswith(b"\n") for document in documents[:-1])
    path.write_bytes(b"")
    with pytest.raises(SettingsError, match="empty"):
        load_documents(path)


def loader(rank: int = 0, world_size: int = 1) -> ByteLoader:
    documents = load_documents(None)
    return ByteLoader(documents, batch_size=3, sequence_length=32, seed=1, rank=rank, world_size=world_size)


def test_ranks_share_an_order_and_no_document() -> None:
    first, second = loader(0, 2), loader(1, 2)
    assert (first.order == second.order).all()
    drawn = [{first._next_document().name for _ in range(39)}, {second._next_document().name for _ in range(39)}]
    assert not drawn[0] & drawn[1]


def test_a_new_epoch_has_a_new_order_and_a_loader_continues_across_it() -> None:
    seed_all(1, 0)
    whole = loader()
    order = whole.order.copy()
    batches = [next(whole) for _ in range(20)]
    streams, state = detrun.rng_state(), whole.state_dict()
    batches += [next(whole) for _ in range(20)]
    assert whole.epoch >= 1
    assert (whole.order != order).any()
    resumed = loader()
    detrun.set_rng_state(streams)
    resumed.load_state_dict(state)
    for expected in batches[20:]:
        assert torch.equal(next(resumed), expected)
    assert all(batch.max() < VOCABULARY for batch in batches)
