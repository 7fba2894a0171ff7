"""CPU time spent in the recorder against the CPU time of the training it records, on one thread.

    python benchmarks/recorder_overhead.py [--steps 100] [--state-every 0] [--json]

Runs a transformer with AdamW and gradient clipping, and one that never clips (so that the recorder computes the norm
itself), each recorded in a process of its own, and prints the recorder's own account (`recorder/rank00000.json`): the
share of metrics, and of state digests if asked for, in the CPU time of the steps. The target for metrics is 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from detrun.recorder.export import export_recorder

TRAINING = """
import sys, time
import torch
from torch import nn

steps, clip = int(sys.argv[1]), sys.argv[2] == "clip"
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(128, 4, 512, 0.1, batch_first=True)
model = nn.Sequential(nn.Embedding(512, 128), nn.TransformerEncoder(layer, 4), nn.Linear(128, 512))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
begun = 0.0
for step in range(steps + 5):
    if step == 5:
        begun = time.process_time()
        import detrun.recorder
        session = detrun.recorder._session
        before = dict(session.cost.cpu_seconds) if session else {}
    ids = torch.randint(0, 512, (6, 48))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
spent = time.process_time() - begun
import json
own = {k: v - before[k] for k, v in session.cost.cpu_seconds.items()} if session else {}
print(json.dumps({"cpu_seconds": spent, "recorder": own, "parameters": len(list(model.parameters()))}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--state-every", type=int, default=0, help="0 (the default): metrics only")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    options = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        export_recorder(Path(folder) / "recorder")
        script = Path(folder) / "train.py"
        script.write_text(TRAINING, encoding="utf-8")
        for kind in ("clip", "no clip"):
            figures[kind] = _run(Path(folder), script, kind, options.steps, options.state_every)
    if options.json:
        document = {"benchmark": "recorder_overhead", "steps": options.steps, "state_every": options.state_every}
        print(json.dumps({**document, "figures": figures}))
        return
    for kind, figure in figures.items():
        print(f"{kind}: " + ", ".join(f"{name} {value}" for name, value in figure.items()))


def _run(folder: Path, script: Path, kind: str, steps: int, state_every: int) -> dict[str, float]:
    attempt = folder / kind.replace(" ", "-")
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder / "recorder"),
        "DETRUN_ATTEMPT_DIR": str(attempt),
        "DETRUN_STATE_EVERY": str(state_every),
    }
    command = [sys.executable, str(script), str(steps), kind]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    own, total = result["recorder"], result["cpu_seconds"]
    rest = total - sum(own.values())
    return {
        "steps": steps,
        "parameters": result["parameters"],
        "step_cpu_ms": round(rest / steps * 1e3, 2),
        "metrics_us_per_step": round(own["metrics"] / steps * 1e6, 1),
        "metrics_share": round(own["metrics"] / rest, 5),
        "state_us_per_step": round(own["state"] / steps * 1e6, 1),
        "state_share": round(own["state"] / rest, 5),
    }


if __name__ == "__main__":
    main()
