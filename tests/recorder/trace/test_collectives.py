"""Collectives, sends and receives of two ranks, whoever calls them: seen without waiting, the same in equal runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from detrun.recorder.export import export_recorder
from detrun.recorder.trace.collectives import SHAPES, rank_spans
from detrun.records.trace_row import TraceEvent
from tests.recorder.trace.traced import events

PROGRAM = """
import hashlib, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce as taken_by_name

torch.set_num_threads(1)
mode, out = sys.argv[1], sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()
other = 1 - rank
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
model = net
if mode.startswith("ddp"):
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01, gradient_as_bucket_view=mode == "ddp-view")
if mode == "fsdp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    for layer in (net[0], net[2], net[4], net):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(10 + rank)


def pipeline(x):
    for _ in range(2):
        if rank == 0:
            y = net[:2](x)
            sent = dist.isend(y.detach(), 1)
            gradient = torch.empty_like(y)
            received = dist.irecv(gradient, 1)
            sent.wait(), received.wait()
            y.backward(gradient)
        else:
            y = torch.empty(16, 64)
            dist.recv(y, 0)
            y.requires_grad_()
            net[2:](y).square().mean().backward()
            dist.send(y.grad, 0)


def many(step):
    works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in net.parameters()]
    z = torch.randn(64, 64) @ torch.randn(64, 64)
    for work in works:
        work.wait()
    if os.environ.get("FAULT") and step == 3 and rank == 1:
        z[3, 4] += 1e-3
    taken_by_name(z)
    dist.all_gather([torch.empty(4), torch.empty(4)], torch.full((4,), float(rank + step)))
    root = torch.full((3,), float(rank))
    dist.broadcast(root, 1)
    dist.all_to_all_single(torch.empty(4), torch.arange(4.0) + rank)
    dist.barrier()
    dist.all_gather_object([None, None], {"pid": os.getpid()})
    both = [dist.P2POp(dist.isend, z, other), dist.P2POp(dist.irecv, torch.empty(64, 64), other)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    from torch.distributed._functional_collectives import all_reduce
    (all_reduce(z, "sum", dist.group.WORLD) + 1).sum()
    dist.reduce(root, 0)


for step in range(1, 5):
    optimizer.zero_grad()
    x = torch.randn(16, 64)
    if mode == "pipeline":
        pipeline(x)
    else:
        model(x).square().mean().backward()
    if mode == "many":
        many(step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
digest = hashlib.sha256()
for parameter in net.parameters():
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    digest.update(local.detach().contiguous().numpy().tobytes())
open(f"{out}/done{rank}", "w").write(digest.hexdigest())
dist.barrier()
dist.destroy_process_group()
os._exit(0)
"""


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorder")
    export_recorder(folder)
    return folder


def launch(mode: str, folder: Path, recorder: Path, level: int | None, **more: str) -> list[str]:
    """Run it on two ranks; returns a digest of what each ended with."""
    folder.mkdir()
    script = folder / "program.py"
    script.write_text(PROGRAM)
    root = str(Path(__file__).parents[3])
    env = {key: value for key, value in os.environ.items() if not key.startswith("DETRUN_")}
    env.update(OMP_NUM_THREADS="1", PYTHONPATH=f"{recorder}{os.pathsep}{root}", **more)
    if level is not None:
        env["DETRUN_ATTEMPT_DIR"] = str(folder)
        env["DETRUN_TRACE"] = json.dumps({"level": level, "steps": [2, 3]})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([*command, mode, str(folder)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return [(folder / f"done{rank}").read_text() for rank in (0, 1)]


def comparable(event: TraceEvent) -> TraceEvent:
    """Without the parts that are flagged as not to be trusted."""
    flagged = {word.partition(":")[0] for word in event.flags.split(",")}
    parts = {
        side: tuple(b"" if f"{side[0]}{at}" in flagged else part for at, part in enumerate(getattr(event, side)))
        for side in ("inputs", "outputs")
    }
    return TraceEvent(**{**event.__dict__, **parts})


def of_kind(found: list[TraceEvent], *kinds: str) -> list[TraceEvent]:
    return [event for event in found if event.kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "level"),
    [("many", 2), ("many", 4), ("pipeline", 2), ("pipeline", 4), ("ddp", 2), ("ddp-view", 4), ("fsdp", 2), ("fsdp", 4)],
)
def test_equal_runs_have_equal_traces_and_end_as_without_one(
    mode: str, level: int, tmp_path: Path, recorder: Path
) -> None:
    plain = launch(mode, tmp_path / "plain", recorder, None)
    for name in ("a", "b"):
        assert launch(mode, tmp_path / name, recorder, level) == plain
    for rank in (0, 1):
        a, b = (events(tmp_path / name, rank) for name in ("a", "b"))
        assert [comparable(event) for event in a] == [comparable(event) for event in b]
        collectives = of_kind(a, "collective", "send", "recv")
        assert collectives
        assert all(event.flags == "" and event.op.startswith("c10d.") for event in collectives)
        assert {event.step for event in collectives} == {2, 3}
        assert {event.group for event in collectives} == {"0-1"}
        end = json.loads((tmp_path / "a" / "trace" / f"rank{rank:05d}.jsonl").read_text().splitlines()[-1])
        assert end["complete"] and end["coverage"]["not_captured"] == []


@pytest.mark.slow
def test_every_way_to_call_a_collective_is_seen(tmp_path: Path, recorder: Path) -> None:
    launch("many", tmp_path / "a", recorder, 2)
    found = [event for event in events(tmp_path / "a", 0) if event.step == 2]
    collectives = of_kind(found, "collective", "send", "recv")
    # Six asynchronous, one by a name taken before, one of a functional collective.
    assert [event.op for event in collectives].count("c10d.allreduce_") == 8
    by_op = {event.op: event for event in collectives}
    assert by_op["c10d.barrier"].signature == "->"
    assert by_op["c10d.alltoall_base_"].signature == "float32[4] -> float32[4]"
    assert by_op["c10d.broadcast_"].signature == "-> float32[3]"  # rank 1 is the root
    assert by_op["c10d.reduce_"].signature == "float32[3] -> float32[3]"  # rank 0 is
    assert (by_op["c10d.send"].peer, by_op["c10d.recv_"].peer) == (1, 1)
    assert by_op["c10d.recv_"].inputs == () and len(by_op["c10d.recv_"].outputs) == 1
    objects = [event for event in collectives if event.scalars == "object"]
    assert len(objects) == 2 and not any(event.inputs or event.outputs for event in objects)
    other = [event for event in events(tmp_path / "a", 1) if event.step == 2]
    reduced = {event.op: event for event in of_kind(other, "collective")}
    assert reduced["c10d.reduce_"].outputs == ()
    assert reduced["c10d.broadcast_"].inputs == reduced["c10d.broadcast_"].outputs
    received = next(event for event in other if event.op == "c10d.recv_")
    assert received.outputs == by_op["c10d.send"].inputs


@pytest.mark.slow
def test_a_reducer_in_cpp_is_seen_with_what_all_ranks_agree_on(tmp_path: Path, recorder: Path) -> None:
    launch("ddp", tmp_path / "a", recorder, 2)
    ranks = [
        [event for event in events(tmp_path / "a", rank) if event.op == "c10d.allreduce_" and event.step == 3]
        for rank in (0, 1)
    ]
    assert len(ranks[0]) == len(ranks[1]) == 2
    for mine, other in zip(*ranks, strict=True):
        assert mine.phase == "backward"
        assert mine.inputs != other.inputs and mine.outputs == other.outputs


@pytest.mark.slow
def test_a_changed_contribution_of_one_rank_shows_in_its_collective_alone(tmp_path: Path, recorder: Path) -> None:
    launch("many", tmp_path / "a", recorder, 2)
    launch("many", tmp_path / "b", recorder, 2, FAULT="1")
    for rank in (0, 1):
        a, b = (events(tmp_path / name, rank) for name in ("a", "b"))
        first, second = next((x, y) for x, y in zip(a, b, strict=True) if x != y)
        assert (first.op, first.step, first.occurrence) == ("c10d.allreduce_", 3, 6)
        assert first.key == second.key
        assert (first.inputs == second.inputs) == (rank == 0)
        assert first.outputs != second.outputs


def test_ranks_are_told_in_spans() -> None:
    assert rank_spans([0, 1, 2, 3]) == "0-3"
    assert rank_spans([2, 0]) == "0,2"
    assert rank_spans([0, 1, 6, 7, 9]) == "0-1,6-7,9"


def test_every_operator_of_torch_is_known() -> None:
    import torch

    names = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")}
    assert names - set(SHAPES) == {"check_for_nan"}  # looks at a tensor, and moves nothing
