"""Two ranks, and compiled programs: recorded and unrecorded runs end with the same bytes. Whole launches, so slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from detrun.recorder.export import export_recorder
from detrun.records.layout import AttemptFolder
from detrun.records.state_reader import read_state

pytestmark = pytest.mark.slow

RANKS = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from tests.recorder.programs import Net, batch, ending, seed

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, mode = dist.get_rank(), sys.argv[1]
seed()
net = model = Net()
if mode == "ddp":
    model = nn.parallel.DistributedDataParallel(net)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    shape, names = ((2,), ("shard",)) if mode == "fsdp" else ((2, 1), ("replicate", "shard"))
    net = model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in (net[0], net[3], net):
        fully_shard(layer, mesh=mesh)
torch.manual_seed(100 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    optimizer.zero_grad()
    model(batch(10 * step + rank)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
local = lambda t: t.to_local() if hasattr(t, "to_local") else t
found = {name: local(t).detach().clone() for name, t in net.state_dict().items()}
for i, state in enumerate(optimizer.state.values()):
    found.update({f"{i}.{name}": local(t).clone() for name, t in state.items()})
found["rng"] = torch.get_rng_state()
torch.save(found, f"{sys.argv[2]}/rank{rank}.pt")
dist.barrier()
dist.destroy_process_group()
"""

COMPILED = """
import sys
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from tests.recorder.programs import Net, batch, ending, seed

torch.set_num_threads(1)
mode, backend = sys.argv[1], CompileCounterWithBackend(sys.argv[3])
seed()
net = run = Net()
if "hooked" in mode:
    net.l0.register_forward_hook(lambda module, args, output: output * 1.5)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
step_optimizer = optimizer.step
if "model" in mode:
    run = torch.compile(net, backend=backend)
if "inplace" in mode:
    net.compile(backend=backend)
def forward(x):
    return run(x).square().mean()
if "function" in mode:
    forward = torch.compile(forward, backend=backend, fullgraph=True)
if "optimizer" in mode:
    step_optimizer = torch.compile(lambda: optimizer.step(), backend=backend)
for step in range(3):
    optimizer.zero_grad()
    forward(batch(step)).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    step_optimizer()
found = {name: torch.frombuffer(bytearray(raw or b"0"), dtype=torch.uint8) for name, raw in
         ending([net], [optimizer]).items()}
breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
found["graphs"] = torch.tensor([backend.frame_count, backend.op_count, breaks if "optimizer" not in mode else 0])
torch.save(found, f"{sys.argv[2]}/rank0.pt")
"""


def launch(code: str, ranks: int, folder: Path, *arguments: str, recorder: Path | None = None) -> list[bytes]:
    """Run a program and return what each rank ended with. Raises if it fails."""
    folder.mkdir()
    script = folder / "program.py"
    script.write_text(code)
    root = str(Path(__file__).parents[2])
    env = {key: value for key, value in os.environ.items() if not key.startswith("DETRUN_")}
    env.update(OMP_NUM_THREADS="1", PYTHONPATH=root)
    if recorder is not None:
        env.update(PYTHONPATH=f"{recorder}{os.pathsep}{root}", DETRUN_ATTEMPT_DIR=str(folder / "attempt"))
        env["DETRUN_STATE_AT"] = "1,2"
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *torchrun, str(script), arguments[0], str(folder), *arguments[1:]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(folder / f"rank{rank}.pt").read_bytes() for rank in range(ranks)]


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / "attempt" / "metrics" / f"rank{rank:05d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorder")
    export_recorder(folder)
    return folder


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "hsdp"])
def test_two_ranks(mode: str, tmp_path: Path, recorder: Path) -> None:
    plain = launch(RANKS, 2, tmp_path / "plain", mode)
    recorded = launch(RANKS, 2, tmp_path / "recorded", mode, recorder=recorder)
    assert recorded == plain
    attempt = tmp_path / "recorded" / "attempt"
    assert sorted(p.name for p in (attempt / "metrics").iterdir()) == ["rank00000.jsonl", "rank00001.jsonl"]
    for rank in (0, 1):
        assert [line["step"] for line in lines(tmp_path / "recorded", rank)] == [1, 2, 3]
        cost = json.loads((attempt / "recorder" / f"rank{rank:05d}.json").read_text())
        assert cost["warnings"] == []
        environment = json.loads((attempt / "environment" / f"rank{rank:05d}.json").read_text())
        assert environment["world_size"] == 2
        assert environment["replicas"] == (None if mode == "fsdp" else [0, 1])
        assert environment["coordinates"] == ({} if mode == "fsdp" else {"dp": rank})
    states = [[line["state"]["parameters"] for line in lines(tmp_path / "recorded", rank)] for rank in (0, 1)]
    assert (states[0] == states[1]) == (mode != "fsdp")
    for rank in (0, 1):
        table = read_state(AttemptFolder(attempt, "a", 0), "begin-00000003", rank)
        parts = {row.part for row in table.rows if row.component in ("parameters", "optimizer") and row.elements > 1}
        assert parts == ({""} if mode == "ddp" else {"local"})


@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        ("model", "aot_eager"),
        ("model hooked", "aot_eager"),
        ("inplace", "aot_eager"),
        ("function", "aot_eager"),
        ("function hooked", "aot_eager"),
        ("model optimizer", "aot_eager"),
        ("model", "inductor"),
    ],
)
def test_compiled_programs_have_the_same_graphs_and_bytes(
    mode: str, backend: str, tmp_path: Path, recorder: Path
) -> None:
    plain = launch(COMPILED, 1, tmp_path / "plain", mode, backend)
    recorded = launch(COMPILED, 1, tmp_path / "recorded", mode, backend, recorder=recorder)
    assert recorded == plain
    found = lines(tmp_path / "recorded", 0)
    assert [line["step"] for line in found] == [1, 2, 3]
    assert all({"loss", "grad_norm"} <= set(line["metrics"]) for line in found)
    if "function" not in mode:
        assert all("batch" in line for line in found)
