"""What is found of a program's own state, under which names and standings, and what is left alone."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import itertools
import os
import random
import subprocess
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, RandomSampler

from detrun.recorder import live
from detrun.recorder.live import Found, find


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l0 = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.l1 = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.l1(self.norm(self.l0(x)))


def look(model: nn.Module | None = None, depth: int = 1, warn: Any = None) -> dict[str, Found]:
    """What is found from the caller, as capture would: its model's own tensors are known."""
    roots = [] if model is None else [model]
    known = {id(t) for m in roots for t in [*m.parameters(), *m.buffers()]}
    return {found.name: found for found in find(sys._getframe(depth), roots, known, warn=warn)}


def kinds(found: dict[str, Found], *names: str) -> list[tuple[str, str]]:
    return [(found[name].component, found[name].standing) for name in names]


HARD, SURVIVING, SOFT = "hard", "surviving", "soft"


# Averages, moments


@pytest.mark.parametrize(
    "make",
    [
        lambda m: {n: p.detach().clone() for n, p in m.named_parameters()},
        lambda m: {k: v.clone() for k, v in m.state_dict().items()},
        lambda m: {f"module.{n}": p.detach().clone() for n, p in m.named_parameters()},
        lambda m: {p: p.detach().clone() for p in m.parameters()},
        lambda m: {id(p): p.detach().clone() for p in m.parameters()},
        lambda m: [p.detach().clone() for p in m.parameters()],
        lambda m: copy.deepcopy(m),
        lambda m: AveragedModel(m),
        lambda m: nn.utils.parameters_to_vector(m.parameters()).detach().clone(),
    ],
    ids=["dict", "state_dict", "wrapped", "by parameter", "by id", "list", "module", "averaged", "flat"],
)
def test_an_average_of_the_parameters_is_found_in_every_form(make: Callable[[nn.Module], Any]) -> None:
    def program() -> tuple[dict[str, Found], Any]:
        model = Net()
        smooth = make(model)
        return look(model), smooth

    found, _ = program()
    averages = [f for f in found.values() if f.component == "ema"]
    assert averages
    assert {f.standing for f in averages} == {HARD}
    assert all(f.name.startswith("smooth") for f in averages)
    assert {f.value.numel() for f in averages} >= {32} or len(averages) == 1


def test_an_average_is_named_after_the_parameters() -> None:
    def program() -> dict[str, Found]:
        model = Net()
        ema = [p.detach().clone() for p in model.parameters()]
        found = look(model)
        assert ema
        return found

    assert {"ema.l0.weight", "ema.norm.bias", "ema.l1.bias"} <= set(program())


def test_a_hand_written_optimizers_moments_are_optimizer_state() -> None:
    class Momentum:
        def __init__(self, parameters: Any) -> None:
            self.parameters = list(parameters)
            self.velocity = [torch.zeros_like(p) for p in self.parameters]
            self.steps = 3

    def program() -> dict[str, Found]:
        model = Net()
        opt = Momentum(model.parameters())
        found = look(model)
        assert opt.steps == 3
        return found

    found = program()
    assert kinds(found, "l0.weight.opt.velocity", "opt.steps") == [("optimizer", HARD), ("local", SOFT)]


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.state_dict(),
        lambda m: [p.grad for p in m.parameters()],
        lambda m: list(m.parameters()),
        lambda m: [p.data for p in m.parameters()],
        lambda m: dict(m.named_parameters()),
        lambda m: m.l0.weight.view(-1),
    ],
)
def test_what_shares_memory_with_the_training_is_not_told_twice(make: Callable[[Net], Any]) -> None:
    def program() -> dict[str, Found]:
        model = Net()
        model(torch.ones(2, 4)).sum().backward()
        same = make(model)
        found = look(model)
        assert same is not None
        return found

    assert not [name for name in program() if name.startswith("same")]


def test_copies_that_steps_leave_behind_do_not_count_at_once() -> None:
    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model = model
            self.last_gradients = [torch.ones_like(p) for p in model.parameters()]
            self.last_update = [torch.ones_like(p) for p in model.parameters()]
            self.ema = {n: p.detach().clone() for n, p in model.named_parameters()}
            self.snapshot = {n: p.detach().clone() for n, p in model.named_parameters()}

        def step(self) -> dict[str, Found]:
            found = look(self.model)
            assert self.ema
            return found

    found = Trainer(Net()).step()
    names = ("last_gradients.l0.weight", "last_update.l0.weight", "ema.l0.weight", "snapshot.l0.weight")
    assert kinds(found, *names) == [("ema", SOFT), ("ema", SURVIVING), ("ema", HARD), ("ema", SOFT)]


# Generators


def test_generators_are_found_wherever_they_are() -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.noise = torch.Generator()

    class Loader:
        def __init__(self) -> None:
            self.order_generator = np.random.default_rng(3)

    def batches() -> Iterator[int]:
        own = torch.Generator().manual_seed(2)
        while True:
            yield int(torch.randint(0, 9, (), generator=own))

    def program() -> dict[str, Found]:
        model = Noise()
        gen, legacy, python = torch.Generator(), np.random.RandomState(1), random.Random(1)
        loader, source, held = Loader(), batches(), {"a": [torch.Generator()]}
        bit = np.random.PCG64(1)
        same = np.random.Generator(bit)
        next(source)
        draw = functools.partial(torch.rand, 2, generator=torch.Generator())
        found = look(model)
        assert [gen, legacy, python, loader, source, held, draw, same, bit]
        return found

    found = program()
    names = ["noise", "gen", "legacy", "python", "loader.order_generator", "source.own", "held.a[0]", "draw.generator"]
    assert kinds(found, *names) == [("rng", SURVIVING)] * len(names)
    assert len([f for f in found.values() if f.component == "rng"]) == len(names) + 1  # two on one bit generator


def test_process_wide_generators_are_not_told_again() -> None:
    def program() -> dict[str, Found]:
        default, numpys, pythons = torch.default_generator, np.random.mtrand._rand, random._inst  # type: ignore[attr-defined]
        system = random.SystemRandom()
        found = look()
        assert [default, numpys, pythons, system]
        return found

    assert not [f for f in program().values() if f.component == "rng"]


def test_a_trackers_saved_streams() -> None:
    class RngTracker:
        def __init__(self) -> None:
            self.states_ = {"model-parallel": torch.get_rng_state()}

    def program() -> dict[str, Found]:
        tracker = RngTracker()
        found = look()
        assert tracker
        return found

    assert kinds(program(), "tracker.states_.model-parallel") == [("rng", SURVIVING)]


def hidden(seed: int) -> Iterator[int]:
    private = torch.Generator().manual_seed(seed)
    offset = 5
    for _ in range(9):
        yield int(torch.randint(0, 9, (), generator=private))
        offset += 1


def test_an_iterator_without_a_name_is_found_in_its_loop() -> None:
    def program() -> dict[str, Found]:
        for _batch in hidden(3):
            return look()
        raise AssertionError

    found = program()
    assert kinds(found, "hidden.private", "hidden.offset") == [("rng", SURVIVING), ("loader", SOFT)]


# Modules


def test_plain_attributes_of_modules() -> None:
    class Fp8(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.amax_history = torch.zeros(8)
            self.history: collections.deque[float] = collections.deque([1.0, 2.0], maxlen=4)
            self.bank = [torch.zeros(2), torch.ones(2)]
            self.calls = 7
            self.scales = {"forward": torch.ones(()), "backward": 2.0}
            self.last = self(torch.ones(1, 4))  # a product of autograd
            self.label = "text"

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Fp8()])
            self.drop = nn.Dropout(0.3)

    found = {name: f for name, f in look(Model()).items() if f.component == "module-state"}
    prefix = "layers.0."
    assert set(found) == {
        *(prefix + n for n in ("amax_history", "history", "bank[0]", "bank[1]", "calls")),
        *(prefix + n for n in ("scales.forward", "scales.backward")),
        "drop.p",
        "training",
        "requires_grad",
    }
    assert {f.standing for f in found.values()} == {SURVIVING}
    assert found["layers.0.history"].value == (1.0, 2.0)


def test_what_is_frozen_in_a_model_is_told() -> None:
    def program() -> dict[str, Found]:
        model = Net()
        model.l0.bias.requires_grad_(False)
        model.norm.eval()
        return look(model)

    found = program()
    assert found["training"].value == "all but norm"
    assert found["requires_grad"].value == "all but l0.bias"
    assert kinds(found, "training", "requires_grad") == [("module-state", SURVIVING)] * 2
    untouched = look(Net().eval())
    assert (untouched["training"].value, untouched["requires_grad"].value) == ("all", "all")


def test_a_hooks_closure_is_state_of_its_module() -> None:
    model = Net()

    def observe() -> Callable[..., None]:
        peaks = torch.zeros(3)

        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            peaks[0] = args[0].max()

        return hook

    model.l0.register_forward_pre_hook(observe())
    assert kinds(look(model), "l0.hook.peaks") == [("module-state", SURVIVING)]


def test_other_modules_tensors_are_told_and_named_by_their_variable() -> None:
    def program() -> dict[str, Found]:
        model = Net()
        critic = nn.Linear(3, 3)
        found = look(model)
        assert critic
        return found

    assert kinds(program(), "critic.weight", "critic.bias") == [("module-state", SURVIVING)] * 2


# Variables and objects


def test_only_what_is_read_again_counts() -> None:
    def program() -> dict[str, Found]:
        found: dict[str, Found] = {}
        bank, loss, target, total = torch.zeros(3), torch.zeros(()), torch.zeros(1), 0.0
        for step in range(2):
            batch = torch.full((2,), float(step))
            target = batch * 2
            found = look()
            loss = (batch - target).sum()
            total += float(loss)
            bank += 1
            _unread = torch.ones(4)
        return found if total else {}

    found = program()
    assert {"bank", "batch", "target", "total"} <= set(found)
    assert not {"loss", "_unread", "step"} & set(found)
    assert kinds(found, "bank", "total") == [("local", SURVIVING), ("local", SOFT)]


def test_attributes_of_the_programs_objects() -> None:
    class State:
        __slots__ = ("memory", "step")

        def __init__(self) -> None:
            self.step = 4
            self.memory = torch.zeros(5)

    class Trainer:
        def __init__(self) -> None:
            self.state = State()
            self.queue = collections.deque([torch.zeros(2)])
            self.names = ["a", "b"]
            self.running = types.SimpleNamespace(mean=np.zeros(3))
            self.me = self
            self.counter = itertools.count(5)
            self.count = functools.partial(print, State())

        def step(self) -> dict[str, Found]:
            found = look()
            assert self
            return found

    found = Trainer().step()
    names = ("state.memory", "queue[0]", "running.mean", "state.step", "counter.position")
    assert kinds(found, *names) == [("local", SURVIVING)] * 3 + [("local", SOFT)] * 2
    assert found["counter.position"].value == 5
    assert not [name for name in found if "me." in name or "names" in name]


def test_what_is_only_shown_or_saved_never_counts_alone() -> None:
    def program() -> dict[str, Found]:
        running_loss, checkpoint, memory = torch.zeros(1), {"x": torch.zeros(2)}, torch.zeros(3)
        started, t0, elapsed, lr = time.time(), time.perf_counter(), 0.5, 0.1
        pid = 4711
        found = look()
        assert [running_loss, checkpoint, memory, started, t0, elapsed, lr, pid]
        return found

    found = program()
    assert kinds(found, "running_loss", "checkpoint.x", "memory") == [("local", SOFT)] * 2 + [("local", SURVIVING)]
    assert not {"t0", "elapsed", "pid"} & set(found)
    assert "lr" in found


def test_where_a_program_is_in_its_data_only_explains() -> None:
    class Rows(Dataset[int]):
        def __init__(self) -> None:
            self.rows = torch.arange(12)

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            return int(self.rows[index])

    class Stream:
        def __init__(self) -> None:
            self.at = 3
            self.buffer = [np.zeros(2)]

    def program() -> dict[str, Found]:
        order = torch.Generator()
        loader = DataLoader(Rows(), batch_size=2, sampler=RandomSampler(range(12), generator=order))
        it, stream, sampler_epoch = iter(loader), Stream(), 2
        next(it)
        found = look()
        assert [loader, it, stream, sampler_epoch, order]
        return found

    found = program()
    assert kinds(found, "order") == [("rng", SURVIVING)]
    names = ("stream.at", "stream.buffer[0]", "sampler_epoch", "it._num_yielded")
    assert kinds(found, *names) == [("loader", SOFT)] * 4
    assert {f.standing for f in found.values() if f.component == "loader"} == {SOFT}


def test_a_generator_inside_torchs_own_sampler_never_counts() -> None:
    def program() -> dict[str, Found]:
        loader = DataLoader(range(12), batch_size=2, shuffle=True)  # type: ignore[arg-type]
        it = iter(loader)
        next(it)
        found = look()
        assert it
        return found

    assert {f.standing for f in program().values() if f.component == "rng"} <= {SOFT}


def test_a_second_variable_of_the_same_name_is_told_by_its_function() -> None:
    def inner() -> dict[str, Found]:
        memory = torch.zeros(1)
        found = look()
        assert memory is not None
        return found

    def outer() -> dict[str, Found]:
        memory = torch.zeros(2)
        found = inner()
        assert memory is not None
        return found

    found = outer()
    assert found["memory"].value.numel() == 1
    assert found["outer.memory"].value.numel() == 2


def test_one_object_has_one_name_the_shortest() -> None:
    def program() -> dict[str, Found]:
        bank = torch.zeros(3)
        a_longer_name = {"bank": bank, "deep": [{"er": bank}]}
        zz = bank
        found = look()
        assert a_longer_name
        assert zz is bank
        return found

    assert [name for name, f in program().items() if isinstance(f.value, Tensor) and f.value.numel() == 3] == ["zz"]


def test_names_are_the_same_in_every_process_of_a_program() -> None:
    def program() -> list[str]:
        keyed = {object(): torch.zeros(1), ("a", 1): torch.zeros(2), 3: torch.zeros(3), id(object()): torch.zeros(4)}
        bag = {torch.zeros(5)}
        found = look()
        assert keyed
        assert bag
        return [name for name in found if name.startswith(("keyed", "bag"))]

    assert sorted(program()) == ["bag[0]", "keyed[#0]", "keyed[#3]", "keyed[3]", "keyed[a, 1]"]
    assert program() == program()


# What it must not do


def test_none_of_the_programs_code_runs() -> None:
    class Trap:
        def __init__(self) -> None:
            self.memory = torch.zeros(2)

        def _fail(self, *_args: Any) -> Any:
            raise AssertionError("the program's code ran")

        __getattr__ = __eq__ = __iter__ = __len__ = __bool__ = __repr__ = __next__ = state_dict = _fail  # type: ignore[assignment]
        __class__ = property(_fail)  # type: ignore[assignment]
        value = property(_fail)
        __hash__ = None  # type: ignore[assignment]

    class Listing(list):  # type: ignore[type-arg]
        __iter__ = __len__ = __getitem__ = Trap._fail  # type: ignore[assignment]

    class Mapped(dict):  # type: ignore[type-arg]
        __iter__ = __len__ = __getitem__ = items = values = keys = Trap._fail  # type: ignore[assignment]

    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, *_args: Any, **_kwargs: Any) -> Any:
            raise AssertionError("the program's code ran")

    def program() -> dict[str, Found]:
        trap, listing, mapped = Trap(), Listing([torch.zeros(1)]), Mapped({"a": torch.zeros(1)})
        loud = torch.zeros(2).as_subclass(Loud)
        return keep(look(), trap, listing, mapped, loud)

    assert {"trap.memory", "listing[0]", "mapped.a", "loud"} <= set(program())


def keep(found: dict[str, Found], *_things: object) -> dict[str, Found]:
    return found


def test_nothing_is_kept_alive_and_no_number_is_drawn() -> None:
    def program() -> tuple[weakref.ref[Tensor], Any]:
        tensor, gen = torch.zeros(2), torch.Generator()
        before = (gen.get_state(), torch.get_rng_state(), random.getstate())
        found = look()
        assert found["tensor"].value is tensor
        del found
        after = (gen.get_state(), torch.get_rng_state(), random.getstate())
        assert all(torch.equal(a, b) for a, b in zip(before[:2], after[:2], strict=True))
        assert before[2] == after[2]
        return weakref.ref(tensor), gen

    gc.disable()  # by reference counts alone: a collection may be long in coming
    try:
        assert program()[0]() is None
    finally:
        gc.enable()


def test_what_is_cut_off_is_said() -> None:
    said: list[str] = []

    def program() -> dict[str, Found]:
        samples = [{"text": i} for i in range(5000)]
        words = [f"w{i}" for i in range(5000)]
        found = look(warn=said.append)
        assert samples
        assert words
        return found

    program()
    assert len(said) == 1
    assert "samples" in said[0]
    assert "words" not in said[0]


def test_the_walk_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_OBJECTS", 300)
    said: list[str] = []

    def program() -> dict[str, Found]:
        tree = [[[[i] for _ in range(20)] for _ in range(20)] for i in range(20)]
        bank = torch.zeros(3)
        found = look(warn=said.append)
        assert tree
        assert bank is not None
        return found

    assert "bank" in program()
    assert said


def test_frames_and_objects_of_libraries_are_passed_over() -> None:
    found: dict[str, Found] = {}

    class Net2(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.update(look())
            return x

    def program() -> None:
        marker = torch.zeros(7)
        nn.Sequential(Net2())(torch.ones(1))  # torch's frames lie between this one and where it looks
        assert marker is not None

    program()
    assert "marker" in found
    assert not [name for name in found if "args" in name or "kwargs" in name]


# Scripts, checkpoints, with-blocks

SCRIPT = """
import sys, torch
from torch import nn
from detrun.recorder.live import find
LIMIT, ema, dead, counter, unread = 7, torch.zeros(3), torch.zeros(4), 0, torch.ones(2)
by_function = torch.zeros(5)
def reads():
    return by_function
for step in range(2):
    batch = torch.full((6,), float(step))
    found = find(sys._getframe(), [], ())
    dead = batch * 2
    ema = ema + dead[:3]
    counter += 1
print(sorted((f.name, f.standing) for f in found))
"""


def test_a_scripts_globals_count_by_the_same_rule(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    expected = [("batch", SURVIVING), ("by_function", SURVIVING), ("counter", SOFT), ("ema", SURVIVING)]
    assert done.stdout.strip() == str(expected)


def test_other_modules_globals_are_told_by_their_module(tmp_path: Path) -> None:
    (tmp_path / "bank.py").write_text(
        "import torch\nmemory = torch.zeros(3)\nSIZE = 3\nTICKS = 3\n\ndef tick():\n    global TICKS\n    TICKS += 1\n"
    )
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, bank\nfrom detrun.recorder.live import find\n"
        "def main():\n    return [f.name for f in find(sys._getframe(), [], ())]\nprint(main())\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.strip() == "['bank.TICKS', 'bank.memory']", done.stderr


def test_a_loaded_checkpoint_is_no_state() -> None:
    def program() -> dict[str, Found]:
        model = Net()
        opt = torch.optim.Adam(model.parameters())
        weights = {k: v.clone() for k, v in model.state_dict().items()}
        whole = {"model": weights, "opt": opt.state_dict(), "velocity": [torch.zeros(2)]}
        other = {
            "model": {k: v.clone() for k, v in model.state_dict().items()},
            "velocity": [torch.zeros_like(p) for p in model.parameters()],
            "memory": torch.zeros(2),
        }
        found = look(model)
        return keep(found, whole, other, opt)

    found = program()
    assert not [name for name in found if name.startswith("whole.")]
    told = {f.standing for name, f in found.items() if "other" in name}
    assert told == {SOFT}


@contextlib.contextmanager
def timer() -> Iterator[None]:
    inside = torch.zeros(3)
    yield
    inside += 1


def test_a_context_manager_is_no_iterator() -> None:
    def program() -> dict[str, Found]:
        with timer():
            return look()

    assert not [name for name in program() if "inside" in name]
