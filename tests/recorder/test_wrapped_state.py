"""State behind a wrapper: optimizers inside an optimizer, parameters in no group, parts of a flat tensor."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from detrun.recorder import components
from detrun.recorder.components import Names
from detrun.recorder.optimizers import all_of, with_inner
from detrun.recorder.rows import Rows
from detrun.recorder.state import optimizer_digest
from tests.recorder.harness import run


class Container(torch.optim.Optimizer):
    """An optimizer that has others, and no state of its own."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.inner = [torch.optim.Adam([parameter], lr=0.1) for parameter in parameters]
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for inner in self.inner:
            inner.step()


def train_container(nudge: bool) -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    optimizer = Container(list(model.parameters()))
    for step in range(1, 4):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if nudge and step == 1:
            optimizer.inner[0].state[model.weight]["exp_avg_sq"].zero_()
    assert not optimizer.state


def test_the_state_of_the_optimizers_inside_counts(tmp_path: Path) -> None:
    runs = [run(partial(train_container, nudge), tmp_path / str(nudge)).steps() for nudge in (False, True)]
    assert list(runs[0]) == [1, 2, 3]
    same = [runs[0][step]["state"]["optimizer"] == runs[1][step]["state"]["optimizer"] for step in (1, 2, 3)]
    assert same == [True, False, False]


def train_with_a_head_of_the_loss() -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    body = _Body(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        hidden = body(torch.ones(2, 4))
        sum(body.parts["head"](part).sum() for part in hidden.chunk(2)).backward()
        optimizer.step()


class _Body(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["body"](x)


def test_a_part_that_is_called_behind_its_root_is_given_no_batch(tmp_path: Path) -> None:
    steps = run(train_with_a_head_of_the_loss, tmp_path).steps()
    assert [steps[step]["microbatches"] for step in (1, 2)] == [1, 1]
    assert steps[1]["batch"] == steps[2]["batch"]  # what the head is given is another in each step


def test_a_parameter_in_no_group_is_state() -> None:
    flat = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([flat])
    flat.grad = torch.ones(4)
    optimizer.step()
    before = optimizer_digest([optimizer]).text()
    optimizer.param_groups[0]["params"] = []
    assert all_of(optimizer) == [flat]
    assert optimizer_digest([optimizer]).text() == before
    optimizer.state[flat]["exp_avg"][1] += 1
    assert optimizer_digest([optimizer]).text() != before
    assert with_inner([optimizer], [optimizer]) == [optimizer]


def test_a_flat_tensor_has_a_row_for_each_part() -> None:
    flat = nn.Parameter(torch.arange(6.0))
    optimizer = torch.optim.Adam([flat])
    flat.grad = torch.ones(6)
    optimizer.step()
    optimizer.param_groups[0]["params"] = []
    names = Names([], [optimizer], {id(flat): [("a[0:2]", 0, 2), ("b[4:7]", 2, 3)]})
    rows = Rows(None)
    components.add_parameters(rows, names, _fail)
    components.add_optimizers(rows, names, [optimizer], _fail)
    found = {(row.component, row.name): row.shape for row in rows.finished()}
    assert found == {
        ("parameters", "a[0:2]"): (2,),
        ("parameters", "b[4:7]"): (3,),
        ("optimizer", "a[0:2].exp_avg"): (2,),
        ("optimizer", "b[4:7].exp_avg"): (3,),
        ("optimizer", "a[0:2].exp_avg_sq"): (2,),
        ("optimizer", "b[4:7].exp_avg_sq"): (3,),
        ("optimizer", "optimizer0.param0.step"): (),
    }


def _fail(text: str) -> None:
    raise AssertionError(text)
