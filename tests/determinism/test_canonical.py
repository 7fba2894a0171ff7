"""The canonical environment."""

from __future__ import annotations

import warnings

import pytest
import torch

from detrun.determinism.canonical import (
    apply_torch_settings,
    canonical_environment,
    check_environment,
    torch_settings_in_force,
)


def test_the_canonical_environment_passes_its_own_check() -> None:
    env = canonical_environment()
    assert env["NCCL_ALGO"] == "Ring"
    assert env["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert check_environment(env) == []
    assert check_environment({}) == []


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("NCCL_ALGO", ["Ring", "ring,CollnetChain", "^NVLS"], ["Tree", "Ring,Tree", ""]),
        ("CUBLAS_WORKSPACE_CONFIG", [":16:8"], [":4096:2:16:8", ""]),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", ["0"], ["1"]),
        ("MAMBA_DETERMINISTIC", ["1", "1 "], ["0", "true"]),
        ("CAUSAL_CONV1D_DETERMINISTIC", ["1"], ["0"]),
    ],
)
def test_what_the_user_set_stands_or_is_refused(name: str, good: list[str], bad: list[str]) -> None:
    for value in good:
        assert check_environment({name: value}) == []
    for value in bad:
        (problem,) = check_environment({name: value, "HOME": "/"})
        assert problem.startswith(f"{name}={value} ")
        assert "unset it or set it to" in problem


def test_settings_are_applied_and_told() -> None:
    before = torch_settings_in_force()
    assert before["num_threads"] == torch.get_num_threads()
    assert before["default_dtype"] == "float32"
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    mkldnn = torch.backends.mkldnn.deterministic
    try:
        apply_torch_settings()
        after = torch_settings_in_force()
        assert after["deterministic_algorithms"] is True
        assert after["deterministic_warn_only"] is False
        assert after["cudnn.benchmark"] is False
        assert after["cudnn.deterministic"] is True
    finally:
        torch.use_deterministic_algorithms(before["deterministic_algorithms"])
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.mkldnn.deterministic = mkldnn
    for name, value in before.items():
        if not name.startswith("inductor."):
            assert torch_settings_in_force()[name] == value


def test_a_switch_with_a_newer_name_is_read_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed() -> int:
        warnings.warn("please use the new API", stacklevel=2)
        return 3

    monkeypatch.setattr(torch, "get_num_threads", renamed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch_settings_in_force()["num_threads"] == 3


def test_a_switch_that_a_version_lacks_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.backends.cuda, "cudnn_sdp_enabled")
    assert torch_settings_in_force()["cuda.cudnn_sdp"] is None
