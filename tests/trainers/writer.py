"""A training program that no recorder can look into: no torch, a loss in plain arithmetic, rounded to float32, which it
writes as JSON lines, CSV, TensorBoard events and log lines. It saves, resumes, and can be nudged by one float32."""

import argparse
import csv
import json
import random
import struct
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--write", default="jsonl", help="of jsonl, csv, tensorboard, log; several by commas")
parser.add_argument("--digits", default="hex", help="hex, or a format such as .6f")
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--resume")
parser.add_argument("--forget", action="store_true", help="the generator is not restored")
parser.add_argument("--nudge-at", type=int, default=0)
parser.add_argument("--csv-off-at", type=int, default=0, help="the CSV file tells another loss in this step")
parser.add_argument("--drop-at", type=int, default=0, help="nothing is written of this step")
args = parser.parse_args()


def single(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def next_up(value):
    return struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", value))[0] + 1))[0]


def text(value):
    return value.hex() if args.digits == "hex" else format(value, args.digits)


out = Path(args.out)
out.mkdir(parents=True, exist_ok=True)
kinds = args.write.split(",")
generator = random.Random(args.seed)
done, weight = 0, 1.0
if args.resume:
    state = json.loads((Path(args.resume) / "state.json").read_text())
    done, weight = state["step"], float.fromhex(state["weight"])
    if not args.forget:
        version, numbers, gauss = state["random"]
        generator.setstate((version, tuple(numbers), gauss))

writer = None
if "tensorboard" in kinds:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(out / "tb"))
table = (out / "metrics.csv").open("a", newline="")
if table.tell() == 0:
    csv.writer(table).writerow(["step", "loss", "grad_norm", "seconds"])

for step in range(done + 1, args.steps + 1):
    time.sleep(args.sleep)
    gradient = single(weight * 0.1 + generator.random())
    if step == args.nudge_at:
        gradient = next_up(gradient)
    weight = single(weight - 0.05 * gradient)
    loss, norm = single(weight * weight + 2.0), single(abs(gradient))
    if step != args.drop_at:
        if "jsonl" in kinds:
            entry = {"step": step, "loss": text(loss), "grad_norm": text(norm), "seconds": time.time()}
            with (out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\n")
        if "csv" in kinds:
            shown = loss + 0.5 if step == args.csv_off_at else loss
            csv.writer(table).writerow([step, text(shown), text(norm), time.time()])
            table.flush()
        if writer is not None:
            writer.add_scalar("train/loss", loss, step)
            writer.add_scalar("grad_norm", norm, step)
            writer.flush()
        if "log" in kinds:
            print(f"step {step} | loss {loss:.5f} | norm {norm:.4f} | took {time.time():.3f}")
    if args.save_every and step % args.save_every == 0:
        folder = out / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        state = {"step": step, "weight": weight.hex(), "random": generator.getstate()}
        (folder / "state.json").write_text(json.dumps(state))
