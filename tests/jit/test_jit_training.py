"""Covers: _transforms/jit.py, _plan/whole_plan.py and _trace/optimizers.py: training steps, in each
layout of parameters.

What is right is what the same step gives in plain torch.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from _launched import launch
from _models import LAYOUTS, MODELS, batches, cut, made, placed
from _support import EAGER, mostly_long
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

STEPS = 4
OPTIMIZERS = {
    "Adadelta": {},
    "Adagrad": {"lr": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01},
    "AdamW": {"lr": 0.01},
    "Adamax": {},
    "RAdam": {},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
}


def step_of(model, optimizer):
    """A usual step, with clipping."""

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    return step


def train(kind, model, optimizer, jit=lambda step: step, put=lambda batch: batch):
    """The losses of some steps with a schedule, and the step."""
    step = jit(step_of(model, optimizer))
    schedule = CosineAnnealingLR(optimizer, 10)
    losses = []
    for batch in batches(kind, STEPS):
        losses.append(float(step(*put(batch))))
        schedule.step()
    return losses, step


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("compile", mostly_long([EAGER], True))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_is_that_of_plain_torch(kind, layout, compile):
    plain = made(kind)
    expected, _ = train(kind, plain, adamw(plain))
    model = placed(made(kind), layout)
    losses, step = train(
        kind,
        model,
        adamw(model),
        lambda step: tp.jit(step, compile=compile, fullgraph=True),
        lambda batch: cut(batch, layout),
    )
    assert losses == pytest.approx(expected, rel=1e-12)
    assert step.num_traces == 1
    for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
        # the true gradient of a bias before a batch norm is 0, and Adam divides by it
        torch.testing.assert_close(mine.cpu(), right, atol=1e-8, rtol=0)
    for mine, right in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine.cpu(), right, atol=1e-8, rtol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_optimizer(layout, name):
    kind, make = "network", getattr(torch.optim, name)
    plain = made(kind)
    expected, _ = train(kind, plain, make(plain.parameters(), **OPTIMIZERS[name]))
    model = placed(made(kind), layout)
    optimizer = make(model.parameters(), **OPTIMIZERS[name])
    losses, step = train(
        kind,
        model,
        optimizer,
        lambda step: tp.jit(step, compile=EAGER, fullgraph=True),
        lambda batch: cut(batch, layout),
    )
    assert losses == pytest.approx(expected, rel=1e-12)
    assert step.num_traces == 1
    for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), right, atol=1e-12, rtol=0)
    for entries in optimizer.state.values():
        for value in entries.values():
            assert type(value) is (tp.ShardedTensor if value.dim() else torch.Tensor)


@pytest.mark.parametrize(
    ("kind", "layout", "expected"),
    [
        # one message has the gradients of all parameters, and one the loss
        ("network", "replicated", {"all_reduce": 2}),
        ("transformer", "replicated", {"all_reduce": 2}),
        # each weight is gathered for its product; the gradients are scattered in one message
        (
            "network",
            "fully sharded",
            {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 1, "all_reduce": 2},
        ),
        # no weight moves: each block adds up twice each way; then the loss, gradients and norms
        ("transformer", "tensor-parallel", {"all_reduce": 11}),
    ],
)
def test_messages_of_a_step(kind, layout, expected):
    model = placed(made(kind), layout)
    (batch,) = batches(kind, 1)
    step = tp.jit(step_of(model, adamw(model)), compile=EAGER)
    cost = step.lower(*cut(batch, layout)).cost()
    assert Counter(each.name for each in cost.collectives) == expected


@pytest.mark.long
def test_under_torchrun():
    finished = launch(4, str(Path(__file__).with_name("_torchrun_jit.py")))
    assert finished.code == 0, finished.output
