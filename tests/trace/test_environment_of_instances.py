"""Covers: _trace/reach.py: which attributes of instances are watched: those that code mentions."""

import argparse
import contextlib
import copy
import dataclasses
import operator

import pytest
import torch
from _outside import noticed

import torchpmap as tp

clone = copy.copy


class Trainer:
    rate = 1

    def __init__(self):
        self.scale, self.step, self.count, self.losses = 2, 0, 0, []

    def of_scale(self):
        return self.scale

    def takes_a_step(self, optimizer):
        optimizer.step()
        return self.scale

    def takes_a_step_inside(self, optimizer):
        return [lambda: optimizer.step() + self.scale for _ in range(2)]

    def by_a_name(self, name):
        return getattr(self, name)

    def by_a_constant(self):
        return getattr(self, "scale", 0), hasattr(self.losses, "sum"), getattr(self, "x", self.step)

    def by_a_made_name(self):
        return getattr(self, "co" + "unt"[len(self.losses) :])

    def as_text(self):
        return "{0.count}".format(self)  # noqa: UP030, UP032 (this is what is tested)

    def as_another_text(self):
        return "{:.2f}".format(self.scale), "a".replace("a", "b")  # noqa: UP032

    def of_all(self):
        return sum(vars(self).values())

    def of_a_copy(self):
        return copy.copy(self)

    def of_another_copy(self):
        return clone(self)

    def of_a_getter(self, getter=operator.attrgetter("count")):
        return getter(self)

    def of_a_mode(self, model, table):
        return model.eval(), table.copy(), str(self.scale).replace("2", "3")

    def close(self):
        return self.scale

    def closed(self):
        with contextlib.closing(self):
            return 1

    def of_rate(self):
        return self.rate

    def matched(self):
        match self:
            case Trainer(count=count):
                return count


@dataclasses.dataclass(eq=False, repr=False)
class Config:
    scale: int = 2
    count: int = 0

    def of_scale(self):
        return self.scale

    def as_dict(self, take_apart=dataclasses.asdict):
        return take_apart(self)


@dataclasses.dataclass(repr=False)
class Comparable(Config):
    """Its ``==`` reads all fields."""


class Configured(Trainer):
    def __init__(self):
        super().__init__()
        self.config = Comparable()

    def of_scale(self):
        return self.config.scale


@dataclasses.dataclass(eq=False, repr=False)
class Node:
    count: int = 0

    def of_type(self):
        return type(self)


torch.utils._pytree.register_dataclass(Node)


class Options(argparse.Namespace):
    def of_type(self):
        return type(self)


class Model(torch.nn.Module):
    rate = 1

    def __init__(self):
        super().__init__()
        self.scale, self.count = 2, 0

    def forward(self, x):
        return x * self.scale

    def of_rate(self):
        return self.rate

    def lacks_it(self):
        return hasattr(self, "bias")


class Wide(torch.nn.Linear):
    """Torch's code reads its attributes too."""


def set_to(name, value):
    return lambda each: setattr(each, name, value)


def set_instead_of_count(name):
    def change(each):
        del each.count
        setattr(each, name, 2)

    return change


@pytest.mark.parametrize(
    ("make", "name", "change", "is_noticed"),
    [
        (Trainer, "of_scale", set_to("scale", 3), True),
        (Trainer, "of_scale", set_to("count", 1), False),
        (Trainer, "of_scale", lambda each: each.losses.append(1), False),
        (Trainer, "takes_a_step", set_to("step", 1), False),
        (Trainer, "takes_a_step", set_to("step", print), True),
        (Trainer, "takes_a_step_inside", set_to("step", 1), False),
        (Trainer, "by_a_name", set_to("count", 1), True),
        (Trainer, "by_a_constant", set_to("count", 1), False),
        (Trainer, "by_a_constant", set_to("scale", 1), True),
        (Trainer, "by_a_constant", set_to("step", 1), True),
        (Trainer, "by_a_made_name", set_to("count", 1), True),
        (Trainer, "as_text", set_to("count", 1), True),
        (Trainer, "as_another_text", set_to("count", 1), False),
        (Trainer, "of_all", set_to("count", 1), True),
        (Trainer, "of_a_copy", set_to("count", 1), True),
        (Trainer, "of_another_copy", set_to("count", 1), True),
        (Trainer, "of_a_getter", set_to("count", 1), True),
        (Trainer, "matched", set_to("count", 1), True),
        (Trainer, "of_a_mode", set_to("scale", 3), True),
        (Trainer, "of_a_mode", set_to("count", 1), False),
        (Trainer, "closed", set_to("scale", 3), True),
        (Trainer, "of_rate", set_to("rate", 2), True),
        (Trainer, "of_rate", set_to("count", 1), False),
        (Config, "of_scale", set_to("count", 1), False),
        (Comparable, "of_scale", set_to("count", 1), True),
        (Configured, "of_scale", set_to("count", 1), False),
        (Config, "as_dict", set_to("count", 1), True),
        (Node, "of_type", set_to("count", 1), True),
        (lambda: Options(count=0), "of_type", set_to("count", 1), True),
        (Model, "forward", set_to("scale", 3), True),
        (Model, "forward", set_to("count", 1), False),
        (Model, "forward", lambda each: each.eval(), True),
        (Model, "of_rate", set_instead_of_count("rate"), True),
        (Model, "lacks_it", set_instead_of_count("bias"), True),
        (lambda: Wide(1, 1), "forward", set_to("in_features", 2), True),
    ],
)
def test_attributes(make, name, change, is_noticed):
    instance = make()
    assert noticed(getattr(instance, name), lambda: change(instance)) == is_noticed


def test_a_trainer_that_counts_is_traced_once():
    class Training:
        def __init__(self, model):
            self.model, self.step, self.losses = model, 0, []
            self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
            self.clip = 1.0
            self.jitted = tp.jit(self.train_step)

        def train_step(self, x):
            self.optimizer.zero_grad()
            loss = self.model(x).square().sum() * self.clip
            loss.backward()
            self.optimizer.step()
            return loss

        def fit(self, num_steps):
            for _ in range(num_steps):
                self.losses.append(self.jitted(torch.ones(4, 2)).item())
                self.step += 1

    torch.manual_seed(0)
    training = Training(torch.nn.Linear(2, 1))
    training.fit(3)
    assert training.jitted.num_traces == 1
    training.clip = 0.5
    training.fit(1)
    assert training.jitted.num_traces == 2
    torch.manual_seed(0)
    plain = Training(torch.nn.Linear(2, 1))
    plain.jitted = plain.train_step
    plain.fit(3)
    plain.clip = 0.5
    plain.fit(1)
    torch.testing.assert_close(training.losses, plain.losses)
