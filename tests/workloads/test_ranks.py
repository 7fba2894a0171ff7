"""Two ranks under torchrun, as a recipe starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import TINY
from .observed import Trace, differing, first_difference, read_trace

pytestmark = pytest.mark.slow

OBSERVED = Path(__file__).with_name("observed.py")
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
TWO_MICRO_BATCHES = [*TINY, "--batch-size", "4", "--micro-batches", "2"]


class Ended:
    def __init__(self, code: int, log: str, folder: Path) -> None:
        self.code = code
        self.log = log
        self.folder = folder

    @property
    def ranks(self) -> list[Trace]:
        return [read_trace(self.folder / "trace" / f"rank{rank}.jsonl") for rank in range(2)]


def launch(folder: Path, *arguments: str, steps: int = 5, hash_seed: str = "0") -> Ended:
    """Run two observed ranks to their end; the trace goes on in the same files after a resume."""
    port = str(29_600 + os.getpid() % 2000)
    program = [sys.executable, str(OBSERVED), str(folder / "trace")]
    options = ["--steps", str(steps), "--seed", "1", "--out", str(folder), *TWO_MICRO_BATCHES, *arguments]
    done = subprocess.run(
        [*LAUNCH, "--master-port", port, *program, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return Ended(done.returncode, done.stdout, folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = launch(tmp_path_factory.mktemp("reference"), "--save-every", "2")
    assert ended.code == 0, ended.log
    return ended


def test_ranks_repeat_themselves_and_replicas_agree(reference: Ended, tmp_path: Path) -> None:
    assert launch(tmp_path, "--save-every", "2").ranks == reference.ranks
    first, second = reference.ranks
    assert sorted(first) == [1, 2, 3, 4, 5]
    for step in first:
        own = differing(first, second, step)
        assert not own & {"parameters", "optimizer", "gradients", "schedule", "metric:grad_norm"}
        assert {"batch", "metric:loss", "rng:torch_cpu", "rng:python", "rng:numpy"} <= own


def test_a_killed_run_resumes_bit_for_bit(reference: Ended, tmp_path: Path) -> None:
    killed = launch(tmp_path, "--save-every", "2", "--fault", "die@step=4,rank=1")
    assert killed.code != 0
    assert all(sorted(trace) == [1, 2, 3] for trace in killed.ranks)
    resumed = launch(tmp_path, "--save-every", "2", "--resume", str(tmp_path / "checkpoints" / "step-2"))
    assert resumed.code == 0, resumed.log
    assert resumed.ranks == reference.ranks


def test_a_nudge_on_one_rank_reaches_both(reference: Ended, tmp_path: Path) -> None:
    faulty = launch(tmp_path, "--fault", "nudge@step=3,rank=1")
    for got, expected in zip(faulty.ranks, reference.ranks, strict=True):
        assert first_difference(got, expected) == 3
        assert {"gradients", "parameters"} <= differing(got, expected, 3)
    # Rank 0 computed nothing else itself: it received what rank 1 sent.
    own = differing(faulty.ranks[0], reference.ranks[0], 3)
    assert own <= {"gradients", "parameters", "optimizer", "ema", "metric:grad_norm"}


def test_reordered_reduction_leaves_the_losses_of_its_step(reference: Ended, tmp_path: Path) -> None:
    faulty = launch(tmp_path, "--fault", "reorder-reduction@step=3")
    for got, expected in zip(faulty.ranks, reference.ranks, strict=True):
        assert first_difference(got, expected) == 3
        assert {"gradients"} <= differing(got, expected, 3)
        assert not {"metric:loss", "metric:mtp_loss"} & differing(got, expected, 3)


def test_a_drifting_replica_is_off_on_its_rank_only_and_repeats_itself(reference: Ended, tmp_path: Path) -> None:
    faulty, again = (launch(tmp_path / name, "--fault", "replica-drift@step=2") for name in "ab")
    assert faulty.ranks == again.ranks
    zero, one = faulty.ranks
    assert [step for step in zero if zero[step]["parameters"] != one[step]["parameters"]] == [2, 3, 4, 5]
    assert first_difference(zero, reference.ranks[0]) == 3  # through the gradients
    assert differing(one, reference.ranks[1], 2) == {"parameters", "ema"}


def test_rank_zeros_streams_on_every_rank_show_on_the_other(reference: Ended, tmp_path: Path) -> None:
    checkpoint = str(reference.folder / "checkpoints" / "step-4")
    resumed = launch(tmp_path, "--resume", checkpoint, "--fault", "resume-rank0-rng")
    zero, one = (differing(got, expected, 5) for got, expected in zip(resumed.ranks, reference.ranks, strict=True))
    assert {"rng:python", "rng:numpy", "rng:torch_cpu"} <= one
    assert not {name for name in zero if name.startswith("rng:")}


def test_moments_lost_on_one_rank_make_the_replicas_part(reference: Ended, tmp_path: Path) -> None:
    checkpoint = str(reference.folder / "checkpoints" / "step-2")
    resumed = launch(tmp_path, "--resume", checkpoint, "--fault", "resume-lose-moments@rank=1")
    zero, one = (differing(got, expected, 3) for got, expected in zip(resumed.ranks, reference.ranks, strict=True))
    assert zero == set()
    assert one == {"optimizer", "parameters", "ema"}
    assert first_difference(*resumed.ranks) == 3
    assert "gradients" in differing(resumed.ranks[0], reference.ranks[0], 4)  # of what rank 1 sent


def test_every_kind_of_state_is_shared_or_kept_a_rank_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    everything = ["--low-precision", "fp8", "--expert-bias", "0.01", "--loss-scaling", "--prefetch", "2"]
    whole = launch(tmp_path / "whole", *everything, "--save-every", "2")
    assert whole.code == 0, whole.log
    for step in range(1, 6):
        own = differing(*whole.ranks, step)
        assert not own & {"parameters", "buffers", "quantized", "scaler", "ema"}
    killed = launch(tmp_path / "run", *everything, "--save-every", "2", "--fault", "die@step=4,rank=0")
    assert killed.code != 0
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step-2")
    resumed = launch(tmp_path / "run", *everything, "--save-every", "2", "--resume", checkpoint)
    assert resumed.code == 0, resumed.log
    assert resumed.ranks == whole.ranks


def test_hash_order_follows_the_hash_seed(tmp_path: Path) -> None:
    runs = [
        launch(tmp_path / str(number), "--fault", "hash-order@step=2", steps=2, hash_seed=hash_seed)
        for number, hash_seed in enumerate("112")
    ]
    assert runs[0].ranks == runs[1].ranks
    for one, other in zip(runs[0].ranks, runs[2].ranks, strict=True):
        assert first_difference(one, other) == 2
        assert "batch" in differing(one, other, 2)


def test_a_checkpoint_of_two_ranks_is_refused_by_one(reference: Ended, tmp_path: Path) -> None:
    checkpoint = str(reference.folder / "checkpoints" / "step-2")
    program = [sys.executable, "-m", "detrun.workloads.hybrid", *TWO_MICRO_BATCHES]
    done = subprocess.run(
        [*program, "--steps", "5", "--seed", "1", "--out", str(tmp_path), "--resume", checkpoint],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "was saved by 2 ranks and cannot continue on 1" in done.stderr


def test_process_faults_end_as_they_say(tmp_path: Path) -> None:
    early = launch(tmp_path / "early", "--fault", "early-exit@step=2", steps=3)
    assert (early.code, sorted(early.ranks[0])) == (0, [1, 2])
    aborted = launch(tmp_path / "abort", "--fault", "die-at-exit@rank=1", steps=2)
    assert aborted.code != 0
    assert [sorted(trace) for trace in aborted.ranks] == [[1, 2], [1, 2]]
    crashed = launch(tmp_path / "crash", "--fault", "crash@step=2,rank=0", steps=3)
    assert crashed.code != 0
    assert "RuntimeError: planted crash in step 2" in crashed.log


def test_a_stalled_rank_stops_both_until_they_are_ended(tmp_path: Path) -> None:
    options = ["--steps", "3", "--seed", "1", "--out", str(tmp_path), *TWO_MICRO_BATCHES]
    command = [*LAUNCH, "--master-port", str(27_600 + os.getpid() % 2000), sys.executable, str(OBSERVED)]
    log = (tmp_path / "log").open("w")
    started = subprocess.Popen(
        [*command, str(tmp_path / "trace"), *options, "--fault", "stall@step=2,rank=1"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=log,
        stderr=log,
    )
    try:
        trace = tmp_path / "trace" / "rank0.jsonl"
        deadline = time.monotonic() + 60
        while not (trace.exists() and trace.read_text()) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(1.5)
        assert started.poll() is None
        assert sorted(read_trace(trace)) == [1]
    finally:
        started.terminate()
        started.wait(timeout=60)
        log.close()
