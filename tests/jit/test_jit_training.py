"""Covers: _transforms/jit.py, _plan/whole_plan.py and _trace/optimizers.py: training steps, in each
layout of parameters.

What is right is what the same step gives in plain torch.
"""

import functools
import itertools
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
    "Adafactor": {"weight_decay": 0.1},
    "Adagrad": {"lr": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01},
    "AdamW": {"lr": 0.01},
    "Adamax": {},
    "ASGD": {"t0": 1},
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


def rates(optimizer):
    return CosineAnnealingLR(optimizer, 10).step


def all_settings(optimizer):
    """Changes those that ``OneCycleLR`` does, and the weight decay."""

    def change():
        for group in optimizer.param_groups:
            for name in ("lr", "momentum", "weight_decay"):
                if group.get(name):
                    group[name] *= 0.9
            if "betas" in group:
                group["betas"] = (group["betas"][0] * 0.9, *group["betas"][1:])

    return change


def train(kind, model, optimizer, jit=lambda step: step, put=lambda batch: batch, schedule=rates):
    """The losses of some jitted steps with a schedule, and the step."""
    step = jit(step_of(model, optimizer))
    change = schedule(optimizer)
    losses = []
    for batch in batches(kind, STEPS):
        losses.append(float(step(*put(batch))))
        change()
    return losses, step


def train_outside(kind, model, optimizer, jit=lambda forward: forward, put=lambda batch: batch):
    """The losses of some steps of which only the model is jitted, and that function."""
    forward, losses = jit(lambda x: model(x)), []
    for batch in batches(kind, STEPS):
        x, y = put(batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, forward


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def check_training(
    kind, layout, train, make=adamw, compile=EAGER, atol=1e-12, whole=torch.Tensor.cpu, num_traces=1
):
    """It is that of plain torch; the optimizer of what is on the devices."""
    plain, model = made(kind), placed(made(kind), layout)
    theirs, mine = make(plain.parameters()), make(model.parameters())
    expected, _ = train(kind, plain, theirs)
    jit = functools.partial(tp.jit, compile=compile, fullgraph=True)
    losses, jitted = train(kind, model, mine, jit, lambda batch: cut(batch, layout))
    assert losses == pytest.approx(expected, rel=1e-12)
    assert jitted.num_traces == num_traces
    right = plain.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(whole(value), right[name], atol=atol, rtol=0)
    return mine


# the true gradient of a bias before a batch norm is 0, and Adam divides by it
TRAININGS = {"a step": (train, adamw, 1e-8), "the model": (train_outside, sgd, 1e-10)}


@pytest.mark.parametrize("compile", mostly_long([EAGER], True))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "jitted"), [*itertools.product(MODELS, TRAININGS)])
def test_training_is_that_of_plain_torch(kind, layout, jitted, compile):
    train, make, atol = TRAININGS[jitted]
    check_training(kind, layout, train, make, compile, atol)


def test_a_setting_that_has_become_zero_is_traced_again():
    def schedule(optimizer):
        values = iter([0.1, 0.2, 0.0, 0.0])
        return lambda: optimizer.param_groups[0].update(weight_decay=next(values))

    make = functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.3)
    # 0.3; 0.1, with an input from now on; 0.2; 0
    trained = functools.partial(train, schedule=schedule)
    check_training("network", "replicated", trained, make, num_traces=3)


@pytest.mark.parametrize("schedule", mostly_long([rates, all_settings], all_settings))
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_optimizer(layout, name, schedule):
    make = functools.partial(getattr(torch.optim, name), **OPTIMIZERS[name])
    defaults = make([torch.zeros(1)]).defaults
    again = any(defaults.get(name) for name in ("momentum", "betas", "weight_decay"))
    again &= schedule is all_settings
    trained = functools.partial(train, schedule=schedule)
    optimizer = check_training("network", layout, trained, make, num_traces=1 + again)
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
        (
            "transformer",
            "fully sharded",
            {"all_gather_into_tensor": 50, "reduce_scatter_tensor": 1, "all_reduce": 2},
        ),
        # no weight moves: each block adds up twice each way; then the loss, gradients and norms
        ("transformer", "tensor-parallel", {"all_reduce": 11}),
    ],
)
def test_messages_of_a_step(kind, layout, expected):
    model = placed(made(kind), layout)
    (batch,) = batches(kind, 1)
    step = tp.jit(step_of(model, adamw(model.parameters())), compile=EAGER)
    cost = step.lower(*cut(batch, layout)).cost()
    assert Counter(each.name for each in cost.collectives) == expected


@pytest.mark.long
def test_under_torchrun():
    finished = launch(4, str(Path(__file__).with_name("_torchrun_jit.py")))
    assert finished.code == 0, finished.output
