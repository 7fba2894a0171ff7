"""What has no content that two equal runs would share is flagged, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import torch

from detrun.records.trace_row import NO_CONTENT
from tests.recorder.trace.traced import events, find, trace


def _window() -> None:
    """The window opens with the first optimizer."""
    torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)


def test_memory_without_content_is_flagged_until_it_is_written(tmp_path: Path) -> None:
    def program() -> None:
        _window()
        x = torch.empty(8)
        torch.sin(x)  # 0: nothing is written
        x[:4].fill_(1)
        torch.sin(x)  # 1: half of it is
        torch.sin(x[:4])  # 2: that half
        x[4:].copy_(torch.ones(4))
        torch.sin(x)  # 3: all of it
        y = torch.empty_like(x).normal_()
        torch.sin(y)  # 4
        z = x.new_empty(4, 2)
        z[:, 0] = 1
        torch.sin(z)  # 5: one column
        z[:, 1] = 2
        torch.sin(z)  # 6

    made = trace(program, tmp_path, steps=(1, 1))
    sines = find(made, "aten.sin.default")
    flag = "i0:uninitialized"
    assert [e.flags for e in sines] == [flag, flag, "", "", "", flag, ""]
    assert not [e for e in events(made) if e.op.startswith("aten.empty") or e.op.startswith("aten.new_empty")]


def test_a_product_that_ignores_its_blank_operand_is_flagged_at_that_operand_alone(tmp_path: Path) -> None:
    def program() -> None:
        _window()
        torch.baddbmm(torch.empty(1, 2, 2), torch.ones(1, 2, 2), torch.ones(1, 2, 2), beta=0)

    (product,) = find(trace(program, tmp_path, steps=(1, 1)), "aten.baddbmm.default")
    assert product.flags == "i0:uninitialized"


def test_memory_that_torch_fills_is_not_blank(tmp_path: Path) -> None:
    def program() -> None:
        torch.use_deterministic_algorithms(True)
        _window()
        torch.sin(torch.empty(3))

    (sine,) = find(trace(program, tmp_path, steps=(1, 1)), "aten.sin.default")
    assert sine.flags == ""


def test_room_that_was_given_back_and_taken_anew_has_no_content(tmp_path: Path) -> None:
    def program() -> None:
        _window()
        x = torch.ones(4)
        x.untyped_storage().resize_(0)
        torch.ops.aten.sin.default(torch.ones(1))
        freed = torch.zeros(0)
        freed.resize_(4)
        torch.sin(freed)

    sines = find(trace(program, tmp_path, steps=(1, 1)), "aten.sin.default")
    assert [e.flags for e in sines] == ["", "i0:uninitialized"]


def test_tensors_without_memory_are_named_and_not_read(tmp_path: Path) -> None:
    def program() -> None:
        _window()
        torch.sin(torch.ones(2, device="meta"))

    (sine,) = find(trace(program, tmp_path, steps=(1, 1)), "aten.sin.default")
    assert sine.signature == "float32[2] -> float32[2]"
    assert (sine.inputs, sine.outputs) == ((NO_CONTENT,), (NO_CONTENT,))
    assert sine.flags == "i0:no-memory,o0:no-memory"


def test_what_was_changed_behind_the_operators_back_is_seen(tmp_path: Path) -> None:
    def program() -> None:
        _window()
        x = torch.ones(4)
        x.numpy()[2] = 5
        torch.sin(x)

    made = trace(program, tmp_path, steps=(1, 1))
    ones, sine = find(made, "aten.ones.default")[-1], find(made, "aten.sin.default")[0]
    assert sine.producers == (sine.seq - ones.seq,)
    assert sine.inputs != ones.outputs


def test_another_tensor_at_the_same_address_has_another_writer(tmp_path: Path) -> None:
    def program() -> None:
        _window()
        for _ in range(20):
            x = torch.ones(1000)
            del x
            y = torch.frombuffer(bytearray(4000), dtype=torch.float32)
            torch.sin(y)

    assert all(e.producers == (0,) for e in find(trace(program, tmp_path, steps=(1, 1)), "aten.sin.default"))


def test_sparse_and_complex_tensors_are_read_by_their_parts(tmp_path: Path) -> None:
    def program() -> None:
        _window()
        torch.ones(3, 3).to_sparse() * 2
        torch.ones(2, dtype=torch.complex64).conj() * 2

    made = trace(program, tmp_path, steps=(1, 1))
    sparse = [e for e in events(made) if "indices:" in e.signature]
    assert sparse
    assert all(len(e.inputs) + len(e.outputs) >= 2 for e in sparse)
    assert [e for e in find(made, "aten.mul.Tensor") if e.signature.startswith("complex64[2]")]


def test_nothing_of_the_program_is_kept_alive(tmp_path: Path) -> None:
    def program() -> list[bool]:
        import gc
        import weakref

        _window()
        x = torch.ones(1000)
        y = torch.sin(x)
        seen = [weakref.ref(x), weakref.ref(y)]
        storage = y.untyped_storage()._weak_ref()
        del x, y
        gc.collect()
        return [reference() is None for reference in seen] + [torch.UntypedStorage._expired(storage)]

    assert trace(program, tmp_path, steps=(1, 1)).result == [True, True, True]


def test_the_workspace_of_a_recurrent_layer_is_no_result_of_it(tmp_path: Path) -> None:
    def program() -> None:
        _window()
        torch.nn.LSTM(4, 4)(torch.ones(2, 3, 4))[0].sum().backward()

    made = trace(program, tmp_path, steps=(1, 1))
    for forward in find(made, "aten.mkldnn_rnn_layer.default"):
        assert len(forward.outputs) == 3
    for backward in find(made, "aten.mkldnn_rnn_layer_backward.default"):
        assert "uninitialized" in backward.flags
