"""What the hooks ask of torch beyond its public names, and what happens where a version lacks it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from torch._C._dynamo import eval_frame

from detrun.recorder.hooks import _never_compile


@pytest.mark.parametrize("name", ["set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction"])
def test_a_torch_without_the_compilers_private_names_is_recorded_all_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(eval_frame, name)
    _never_compile(lambda: None, inner_too=True)
