"""The canonical environment."""

from __future__ import annotations

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
