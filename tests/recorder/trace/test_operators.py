"""Level 4: every operator of a window, where it belongs, what went in and what came out."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
import xxhash
from torch import nn

from tests.recorder.trace.traced import Net, events, files, find, index, trace, train


def _bytes(tensor: torch.Tensor) -> bytes:
    return xxhash.xxh3_128_digest(tensor.detach().contiguous().numpy().tobytes())


def test_operators_are_found_in_forward_backward_and_optimizer_with_their_scopes(tmp_path: Path) -> None:
    found = events(trace(train, tmp_path))
    places = {(e.phase, e.scope, e.op) for e in found}
    assert ("forward", "first.0", "aten.addmm.default") in places
    assert ("forward", "first.1", "aten.gelu.default") in places
    assert ("backward", "first.1", "aten.gelu_backward.default") in places
    assert ("backward", "last", "aten.mm.default") in places
    assert ("optimizer", "last.weight", "aten.addcdiv_.default") in places
    assert ("between", "", "aten.mean.default") in places
    assert {e.step for e in found} == {1, 2}
    assert [e.seq for e in found] == list(range(len(found)))


def test_the_gradient_of_a_parameter_used_twice_adds_up_in_the_scope_of_its_module(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    made = trace(partial(train, steps=1, microbatches=2, net=Twice), tmp_path, steps=(1, 1))
    sums = find(made, "aten.add_.Tensor", phase="backward")
    assert {e.scope for e in sums} == {"inner"}
    assert {e.microbatch for e in sums} == {1}


def test_micro_batches_are_told_apart_in_forward_and_backward(tmp_path: Path) -> None:
    made = trace(partial(train, microbatches=3), tmp_path, steps=(2, 2))
    for op, phase in (("aten.gelu.default", "forward"), ("aten.gelu_backward.default", "backward")):
        assert [(e.step, e.microbatch, e.occurrence) for e in find(made, op, phase=phase)] == [
            (2, 0, 0),
            (2, 1, 0),
            (2, 2, 0),
        ]


def test_backward_passes_that_come_later_belong_to_their_own_micro_batch(tmp_path: Path) -> None:
    def program() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = [model(torch.ones(2, 4) * n).sum() for n in range(3)]
        for loss in reversed(losses):
            loss.backward()
        optimizer.step()

    made = trace(program, tmp_path, steps=(1, 1))
    assert [e.microbatch for e in find(made, "aten.gelu_backward.default")] == [2, 1, 0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_is_a_phase_of_its_own_with_the_bits_of_the_first(tmp_path: Path, reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=reentrant)
            return self.last(inner)

    def program() -> None:
        torch.manual_seed(0)
        model = Checkpointed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(3, 4, requires_grad=True)).sum().backward()
        optimizer.step()

    made = trace(program, tmp_path, steps=(1, 1))
    again = find(made, "aten.addmm.default", phase="recompute")
    first = find(made, "aten.addmm.default", phase="forward", scope="first.0")
    assert [(e.scope, e.microbatch) for e in again] == [("first.0", 0), ("first.0", 1)]
    assert [e.outputs for e in again] == [e.outputs for e in first]
    backward = find(made, "aten.gelu_backward.default")
    assert [(e.phase, e.scope, e.microbatch) for e in backward] == [
        ("backward", "first.1", 0),
        ("backward", "first.1", 1),
    ]


def test_digests_are_those_of_the_bytes_in_memory(tmp_path: Path) -> None:
    x = torch.arange(12.0).reshape(3, 4)

    def program() -> None:
        weight = torch.nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        torch.sin(x)
        torch.sin(x.t())
        torch.sin(x[:, 1:3])
        torch.sin(x[:0])
        (weight * 1.0).backward()
        optimizer.step()

    whole, turned, part, empty = find(trace(program, tmp_path, steps=(1, 1)), "aten.sin.default")
    assert whole.signature == "float32[3,4] -> float32[3,4]"
    assert (whole.inputs, whole.outputs) == ((_bytes(x),), (_bytes(x.sin()),))
    assert turned.signature == "float32[4,3]@1,0 -> float32[4,3]@1,0"
    assert (turned.inputs, turned.outputs) == (whole.inputs, whole.outputs)
    assert part.inputs == (_bytes(x[:, 1:3]),)
    assert part.signature == "float32[3,2] -> float32[3,2]"
    assert empty.inputs == (xxhash.xxh3_128_digest(b""),)


def test_an_in_place_operation_has_the_old_content_as_input_and_the_new_one_as_output(tmp_path: Path) -> None:
    x = torch.arange(4.0)
    before = _bytes(x)

    def program() -> None:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
        x.mul_(3)
        x.copy_(torch.ones(4))
        torch.add(x, 1, out=x)

    made = trace(program, tmp_path, steps=(1, 1))
    (mul,) = find(made, "aten.mul_.Tensor")
    assert (mul.inputs, mul.outputs, mul.scalars) == ((before,), (_bytes(torch.arange(4.0) * 3),), "3")
    (copy,) = find(made, "aten.copy_.default")
    assert copy.inputs == (_bytes(torch.ones(4)),)  # what is overwritten is no input
    (add,) = find(made, "aten.add.out")
    assert add.outputs == (_bytes(torch.ones(4) + 1),)


def test_views_are_no_events(tmp_path: Path) -> None:
    def program() -> None:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
        x = torch.arange(12.0)
        x.view(3, 4).t()[1:].unsqueeze(0).detach().expand(2, 3, 3).select(0, 1)

    made = trace(program, tmp_path, steps=(1, 1))
    assert [e.op for e in events(made)] in (["state", "aten.arange.start"], ["state", "aten.arange.default"])
    assert index(made)[-1]["coverage"]["skipped_views"] >= 6


def test_what_wrote_an_input_is_named_by_how_long_ago_it_was(tmp_path: Path) -> None:
    def program() -> None:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
        a = torch.ones(3)  # 0
        b = torch.zeros(4)  # 1
        b[:3].copy_(a)  # 2
        b[3:].fill_(2)  # 3
        torch.sin(b[:3])  # 4
        torch.sin(b)  # 5
        torch.sin(a)  # 6

    sines = find(trace(program, tmp_path, steps=(1, 1)), "aten.sin.default")
    assert [e.producers for e in sines] == [(2,), (2,), (6,)]


def test_operations_that_draw_carry_the_state_of_their_generator(tmp_path: Path) -> None:
    def program() -> None:
        torch.manual_seed(3)
        torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
        own = torch.Generator().manual_seed(5)
        torch.rand(2)
        torch.rand(2)
        torch.rand(2, generator=own)
        torch.manual_seed(3)
        torch.rand(2)
        torch.sin(torch.ones(2))

    drawn = [e for e in events(trace(program, tmp_path, steps=(1, 1))) if e.op.startswith("aten.rand.")]
    states = [e.rng for e in drawn]
    assert None not in states
    assert states[0] == states[3]
    assert len(set(states)) == 3
    assert all(e.rng is None for e in find(tmp_path, "aten.sin.default"))


def test_attention_without_dropout_draws_nothing(tmp_path: Path) -> None:
    def program() -> None:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
        q = torch.ones(1, 2, 4, 8)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)

    attention = [e for e in events(trace(program, tmp_path, steps=(1, 1))) if "scaled_dot_product" in e.op]
    assert attention
    assert all(e.rng is None for e in attention)


def test_routing_says_where_each_row_goes(tmp_path: Path) -> None:
    def program() -> None:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
        scores = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
        scores.topk(2)

    (topk,) = find(trace(program, tmp_path, steps=(1, 1)), "aten.topk.default")
    assert topk.rows is not None
    assert topk.rows[0] == topk.rows[2] != topk.rows[1]


def test_numbers_among_the_arguments_are_kept_exactly(tmp_path: Path) -> None:
    def program() -> None:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
        torch.ones(3).add_(torch.ones(3), alpha=0.1)
        torch.ones(3).mul_(0.3)

    made = trace(program, tmp_path, steps=(1, 1))
    assert find(made, "aten.add_.Tensor")[0].scalars == f"alpha={(0.1).hex()}"
    assert find(made, "aten.mul_.Tensor")[0].scalars == (0.3).hex()


def test_two_equal_runs_write_equal_bytes_and_the_training_is_the_same_as_without(tmp_path: Path) -> None:
    program = partial(train, steps=3, net=partial(Net, 0.5))
    a = trace(program, tmp_path / "a", steps=(2, 3), call_sites=True)
    b = trace(program, tmp_path / "b", steps=(2, 3), call_sites=True)
    assert files(a) == files(b)
    bare = trace(program, tmp_path / "c", steps=(90, 91))
    assert a.result == bare.result
    assert not (bare.attempt / "trace").exists()


def test_one_flipped_bit_is_an_origin_at_the_operation_that_made_it(tmp_path: Path) -> None:
    library = []

    def program(flip: bool) -> None:
        def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
            out = torch.empty_like(x)
            torch.ops.aten.gelu.out(x, approximate=approximate, out=out)
            if flip:
                out.view(torch.int32).view(-1)[0] ^= 1
            return out

        library.append(torch.library.Library("aten", "IMPL"))
        library[0].impl("gelu", gelu, "CPU")
        train()

    b = events(trace(partial(program, True), tmp_path / "b", steps=(1, 1)))
    a = events(trace(partial(program, False), tmp_path / "c", steps=(1, 1)))
    pairs = list(zip(a, b, strict=True))
    assert all(one.key == other.key for one, other in pairs)
    origins = [one for one, other in pairs if one.inputs == other.inputs and one.outputs != other.outputs]
    assert origins[0].op == "aten.gelu.default"
    assert origins[0].scope == "first.1"


def test_the_line_of_the_program_is_found_for_forward_and_backward(tmp_path: Path) -> None:
    made = trace(train, tmp_path, steps=(1, 1), call_sites=True)
    (forward,) = find(made, "aten.gelu.default")
    assert forward.site.startswith("traced.py:")
    assert forward.site.endswith(" in forward")
    (backward,) = find(made, "aten.gelu_backward.default")
    assert backward.site == forward.site
    assert find(made, "aten.addcdiv_.default")[0].site.endswith(" in train")


def test_scopes_narrow_the_trace_and_leave_the_rest_alone(tmp_path: Path) -> None:
    made = trace(train, tmp_path, scopes=["last", "last.*"])
    assert {e.scope for e in events(made)} == {"last", "last.weight", "last.bias"}
    assert index(made)[0]["scopes"] == ["last", "last.*"]
