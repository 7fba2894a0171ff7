"""Streams that nobody seeded differ between any two runs and say nothing; everything else about a stream counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from detrun.recorder.export import export_recorder
from detrun.recorder.rng import UNSEEDED

REPORT = """
import json
from detrun.recorder.rng import RngStreams
streams = RngStreams()
{work}
print(json.dumps(streams.digests()))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    export_recorder(folder)
    return folder


def digests(exported: Path, tmp_path: Path, work: str, before: str = "") -> dict[str, str]:
    """What a fresh process says of its streams after some work, the modules having been imported under our finder."""
    code = f"import random, numpy.random\n{before}\n" + REPORT.format(work=work)
    env = {**os.environ, "PYTHONPATH": str(exported), "DETRUN_ATTEMPT_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize(
    "work",
    [
        "",
        "random.random()",
        "numpy.random.rand()",
        "[random.gauss(0, 1) for _ in range(5000)]",
        "numpy.random.standard_normal(5000)",
        "random.random(); streams.digests(); [random.random() for _ in range(5000)]",
        "numpy.random.rand(1500, 1500); [random.random() for _ in range(300_000)]",
    ],
)
def test_drawing_from_a_stream_that_nobody_seeded(exported: Path, tmp_path: Path, work: str) -> None:
    found = digests(exported, tmp_path, work)
    assert found["python"] == found["numpy"] == UNSEEDED


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("stream", "seed", "draw"),
    [("python", "random.seed(7)", "random.random()"), ("numpy", "numpy.random.seed(7)", "numpy.random.rand()")],
)
def test_a_seeded_stream_counts(
    exported: Path, tmp_path: Path, stream: str, seed: str, draw: str, before: bool
) -> None:
    def look(work: str) -> str:
        return digests(exported, tmp_path, *(("", work) if before else (work, "")))[stream]

    assert look(seed) == look(seed) != UNSEEDED
    assert look(seed) != look(f"{seed}; {draw}")


def test_a_stream_set_to_a_saved_state_counts(exported: Path, tmp_path: Path) -> None:
    found = digests(exported, tmp_path, "random.setstate((3, tuple(range(624)) + (624,), None))")
    assert found["python"] != UNSEEDED


def test_a_stream_seeded_after_many_looks_counts(exported: Path, tmp_path: Path) -> None:
    work = "for _ in range(3): random.random(); streams.digests()\nrandom.seed(1)"
    assert digests(exported, tmp_path, work)["python"] != UNSEEDED


def torch_stream(exported: Path, tmp_path: Path, work: str) -> str:
    code = f"import torch, detrun.recorder\n{work}\nprint(detrun.recorder._session.streams.digests()['torch_cpu'])"
    env = {**os.environ, "PYTHONPATH": str(exported), "DETRUN_ATTEMPT_DIR": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_torchs_stream_says_nothing_either_until_it_is_seeded(exported: Path, tmp_path: Path) -> None:
    drawn = "state = torch.get_rng_state(); torch.randn(5000); torch.set_rng_state(state); torch.rand(3)"
    assert torch_stream(exported, tmp_path, drawn) == UNSEEDED
    seeded = torch_stream(exported, tmp_path, "torch.rand(3); torch.manual_seed(7)")
    assert seeded == torch_stream(exported, tmp_path, "torch.manual_seed(7)") != UNSEEDED


def test_a_named_stream_counts_in_the_steps_that_draw_from_it() -> None:
    import torch

    from detrun.recorder.rng import RngStreams
    from detrun.recorder.streams import global_rows

    streams = RngStreams()
    used, idle = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    streams.add("used", lambda: used.get_state())
    streams.add("idle", lambda: idle.get_state())
    streams.step_begins()
    torch.rand(1, generator=used)
    end = streams.rolled_up()
    idle.manual_seed(3)  # another process has another state of what nobody draws from
    streams.step_begins()
    assert {"used", "idle"} <= set(streams.digests())
    torch.rand(1, generator=used)
    assert streams.rolled_up() != end
    standings = {row.name: row.standing for row, _ in global_rows(streams)}
    assert standings["used"] == "hard"

    other = RngStreams()
    again, different = torch.Generator().manual_seed(1), torch.Generator().manual_seed(7)
    other.add("used", lambda: again.get_state())
    other.add("idle", lambda: different.get_state())
    other.step_begins()
    torch.rand(1, generator=again)
    assert other.rolled_up() == end
    assert {row.name: row.standing for row, _ in global_rows(other)}["idle"] == "soft"
