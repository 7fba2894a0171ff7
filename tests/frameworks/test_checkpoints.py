"""Checkpoints as the frameworks really write them: found, told whole, shown and held against each other by tensor,
without the model and without the framework."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from detrun.checkpoints.audit import audit
from detrun.checkpoints.diff import diff
from detrun.checkpoints.entry import Entry
from detrun.checkpoints.find import find_checkpoints
from detrun.checkpoints.read import open_checkpoint
from detrun.checkpoints.sources import FileSource
from detrun.fingerprint.elements import LAYOUTS
from tests.frameworks import environment
from tests.frameworks.harness import HERE, SAVED, STEPS, TOOLS

TINY_GPT = """--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 20 --lr-warmup-iters 2
    --tokenizer-type NullTokenizer --vocab-size 127 --mock-data --split 90,5,5 --transformer-impl local
    --distributed-backend gloo --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-rope-fusion --log-interval 1 --eval-iters 0 --eval-interval 1000 --num-workers 0
    --position-embedding-type rope --disable-bias-linear --normalization RMSNorm"""
EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --mtp-num-layers 1"""
TORCHRUN = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0"


@dataclass(frozen=True)
class Kind:
    """How a framework is made to save. directory: of the checkpoints, below the run's folder. holds: names that a
    checkpoint has, as regular expressions. victim: of a tensor that is then changed by one bit. launched: by torchrun,
    not by itself. path: for PYTHONPATH."""

    arguments: Callable[[Path], list[str]]
    layout: str
    holds: tuple[str, ...]
    victim: str
    directory: str = "checkpoints"
    launched: bool = True
    path: tuple[Path, ...] = ()


def megatron(*more: str) -> Callable[[Path], list[str]]:
    def arguments(folder: Path) -> list[str]:
        saving = f"--save {folder}/checkpoints --save-interval {SAVED} --train-iters {STEPS} --seed 1".split()
        return [
            str(HERE / "megatron/train.py"),
            *TINY_GPT.split(),
            "--data-cache-path",
            f"{folder}/cache",
            *saving,
            *more,
        ]

    return arguments


def torchtitan(folder: Path) -> list[str]:
    subprocess.run([str(environment.PYTHON), str(HERE / "torchtitan/assets.py"), str(folder / "assets")], check=True)
    given = (
        f"--module llama3 --config llama3_debugmodel --hf-assets-path {folder}/assets/tokenizer"
        f" --dataloader.dataset_path {folder}/assets/corpus --training.seq_len 32 --training.local_batch_size 1"
        f" --training.steps {STEPS} --debug.seed 1 --parallelism.spmd_backend partial_dtensor --checkpoint.enable"
        f" --checkpoint.interval {SAVED} --checkpoint.last_save_model_only --dump_folder {folder}"
    )
    return [str(HERE / "torchtitan/titan_on_cpu.py"), *given.split()]


def driver(name: str, *more: str) -> Callable[[Path], list[str]]:
    return lambda folder: [str(HERE / name), "--out", str(folder), "--steps", str(STEPS), *more]


MEGATRON = (environment.MEGATRON_HOME, HERE / "megatron")
SAVE = ("--save-every", str(SAVED))
KINDS = {
    "megatron": Kind(
        megatron("--use-distributed-optimizer", *EXPERTS.split()),
        "Megatron iteration",
        (r"rng_state/.*", r"common_state/.*iteration", r".*optimizer.*\.exp_avg(_sq)?", r"mtp\.layers\.0\..*weight"),
        r"decoder\.layers\.self_attention\.linear_qkv\.weight",
        path=MEGATRON,
    ),
    "megatron-legacy": Kind(
        megatron("--ckpt-format", "torch", "--tensor-model-parallel-size", "2"),
        "Megatron iteration (legacy)",
        (
            r"mp_rank_01/model_optim_rng\.optimizer\.state\.0\.exp_avg",
            r".*rng_state\.0\.torch_rng_state",
            r".*\.iteration",
        ),
        r"mp_rank_01/model_optim_rng\.model\.decoder\.layers\.1\.mlp\.linear_fc2\.weight",
        path=MEGATRON,
    ),
    "torchtitan": Kind(
        torchtitan,
        "torchtitan step",
        (r"train_state\.step", r"optimizer\.state\..*\.exp_avg", r"dataloader\.dp_rank_1\..+", r"lr_scheduler\..*"),
        r"layers\.2\.attention\.wo\.weight",
        directory="checkpoint",
        path=(HERE / "torchtitan",),
    ),
    "trainer": Kind(
        driver("lightning/trainer.py", *SAVE),
        "Lightning file",
        (
            r"state_dict\.body\..*",
            r"optimizer_states\.0\.state\.0\.exp_avg",
            r"loops\.fit_loop\..*",
            r"lr_schedulers\..*",
        ),
        r"optimizer_states\.0\.state\.3\.exp_avg_sq",
        launched=False,
    ),
    "fabric": Kind(
        driver("lightning/fabric.py", *SAVE),
        "Fabric file",
        (r"model\.body\..*", r"optimizer\.state\.0\.exp_avg", r"step"),
        r"model\.head\.weight",
    ),
    "transformers": Kind(
        driver("transformers/train.py", *SAVE),
        "Trainer checkpoint",
        (
            r"model\.transformer\..*",
            r"optimizer\.state\.0\.exp_avg",
            r"rng_state_1\.cpu",
            r"trainer_state\.global_step",
        ),
        r"model\.transformer\.h\.1\.mlp\.c_fc\.weight",
    ),
    "deepspeed-1": Kind(
        driver("deepspeed/train.py", "--zero", "1", "--bucket", "100000", "--save", str(SAVED)),
        "DeepSpeed tag",
        (r"mp_rank_00_model_states\.module\.emb\.weight", r"zero_pp_rank_1_.*exp_avg_sq", r".*global_steps"),
        r"mp_rank_00_model_states\.module\.body\.layers\.1\.linear1\.weight",
        directory=".",
        path=(environment.DEEPSPEED_HOME,),
    ),
    "deepspeed-3": Kind(
        driver("deepspeed/train.py", "--zero", "3", "--bucket", "100000", "--save", str(SAVED)),
        "DeepSpeed tag",
        (r"zero_pp_rank_1_mp_rank_00_model_states\..*", r"zero_pp_rank_1_.*fp32_flat_groups\..*"),
        r"zero_pp_rank_1_mp_rank_00_optim_states\..*\.exp_avg",
        directory=".",
        path=(environment.DEEPSPEED_HOME,),
    ),
}


def train(kind: Kind, folder: Path) -> Path:
    """Trains, and gives the directory of the checkpoints."""
    folder.mkdir(parents=True)
    command = [str(environment.PYTHON)]
    if kind.launched:
        command += TORCHRUN.split()
    env = {
        **os.environ,
        "PYTHONPATH": ":".join(str(each) for each in (*kind.path, TOOLS)),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
    }
    log = folder / "log"
    with log.open("wb") as file:
        subprocess.run(
            [*command, *kind.arguments(folder)], cwd=folder, env=env, stdout=file, stderr=file, timeout=400, check=False
        )
    directory = folder / kind.directory
    assert len(find_checkpoints(directory)) == 2, log.read_text(errors="replace")[-4000:]
    return directory


def entries(path: Path) -> dict[str, Entry]:
    with open_checkpoint(path) as checkpoint:
        found = {}
        for entry in checkpoint.entries():
            assert entry.problem is None, f"{entry.name}: {entry.problem}"
            if entry.value is None:
                entry.digest()  # all of it can be read
            found[entry.name] = entry
        return found


def flip_a_bit(path: Path, name: str) -> None:
    """Changes the lowest bit of the first element of a tensor, where it lies in its file."""
    with open_checkpoint(path) as checkpoint:
        (entry,) = [entry for entry in checkpoint.entries() if entry.name == name]
        part = entry.chunks[0] if entry.chunks else entry.data
        tensor = part.stored() if part is not None else None
        assert tensor is not None and isinstance(tensor.storage.source, FileSource)
        place = tensor.storage.source.offset + tensor.offset * LAYOUTS[tensor.dtype].element_bytes
        file = tensor.storage.source.path
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


QUICK = ("megatron", "transformers")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in KINDS])
def test_every_checkpoint_is_read_and_one_changed_bit_of_it_is_named(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    directory = train(kind, tmp_path / "run")
    early, late = find_checkpoints(directory, ranks=2)
    assert [(each.step, each.why, each.layout) for each in (early, late)] == [
        (SAVED, "", kind.layout),
        (STEPS, "", kind.layout),
    ]
    # torchtitan's last one is the model alone.
    assert (early.no_resume, bool(late.no_resume)) == ("", name == "torchtitan")
    assert not [fault for fault in audit(directory) if fault.certain]

    held = entries(early.path)
    for pattern in kind.holds:
        assert any(re.fullmatch(pattern, each) for each in held), f"{pattern}: {sorted(held)[:80]}"
    if name != "torchtitan":
        assert any(each.what == "bytes" for each in diff(early.path, late.path))

    copy = tmp_path / "copy" / early.path.name
    copy.parent.mkdir()
    (shutil.copytree if early.path.is_dir() else shutil.copyfile)(early.path, copy)
    assert list(diff(early.path, copy)) == []
    victim = next(each for each in held if re.fullmatch(kind.victim, each))
    flip_a_bit(copy, victim)
    (difference,) = diff(early.path, copy)
    assert (difference.name, difference.differing_elements, difference.max_ulp) == (victim, 1, 1)


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
def test_two_runs_leave_the_same_state(name: str, tmp_path: Path) -> None:
    """What differs is where each wrote it, and when."""
    first, second = (train(KINDS[name], tmp_path / arm) for arm in "ab")
    for one, other in zip(find_checkpoints(first), find_checkpoints(second), strict=True):
        assert [each for each in diff(one.path, other.path) if each.what != "value"] == []
