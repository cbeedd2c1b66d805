"""Tensors in all layouts that operations on blocks take, where results are, tables of functions."""

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _support import EAGER, entries
from torch import nn

import torchpmap as tp

WHOLE, HOST = "whole", "host"


def functions(arguments, text, **names):
    """Functions of the arguments by the expressions that are the entries of a text."""
    names |= {"torch": torch, "nn": nn, "F": F, "np": np, "tp": tp, "EAGER": EAGER}
    names |= {"numbers": numbers, "HERE": HERE}
    return {entry: eval(f"lambda {arguments}: {entry}", names) for entry in entries(text)}


def each(name, arguments, text):
    """A parameter that is each of the functions in turn."""
    table = functions(arguments, text)
    return pytest.mark.parametrize(name, table.values(), ids=table)


def on_mesh(value, spec, shape=(4,), names=("i",)):
    """A value on the devices, laid out by a mesh of them."""
    mesh = tp.make_mesh(shape, names, devices=tp.devices())
    return tp.device_put(value, tp.NamedSharding(mesh, tp.P(*spec)))


def numbers(*shape):
    """Small integers in no order, negative ones among them: sums of them are exact."""
    count = math.prod(shape)
    return ((torch.arange(count) * 7 + 3) % 11 - 5).to(torch.float32).reshape(shape)


VALUES = {
    "x": (numbers(4, 2, 3), 0),
    "y": (numbers(4, 2, 3).flip(0) + 0.5, 0),
    "rows": (numbers(8, 6), 0),  # two on each device
    "columns": (numbers(2, 4, 3), 1),
    "last": (numbers(3, 4), 1),
    "flat": (numbers(4), 0),
    "mask": (numbers(4, 2, 3) > 0, 0),
    "ints": (numbers(4, 2, 3).long(), 0),
    "bytes": ((numbers(4, 3) + 5).to(torch.uint8), 0),
    "half": (numbers(4, 3).bfloat16(), 0),
    "z": (torch.complex(numbers(4, 2), numbers(4, 2) + 1), 0),
    "w": (numbers(3, 5), WHOLE),
    "same": (numbers(4, 2, 3) * 2, WHOLE),
    "bias": (numbers(3), WHOLE),
    "number": (torch.tensor(2.5), WHOLE),
    "host": (numbers(4, 2, 3) + 1, HOST),
    "host_bias": (numbers(3) + 1, HOST),
}
"""Tensors, and the dim along which each is cut."""


OF_VALUES = ", ".join(VALUES)
"""Arguments of functions that are called with all values by name."""


def here():
    """The values in this process."""
    return SimpleNamespace(**{name: value.clone() for name, (value, _) in VALUES.items()})


HERE = here()


def on_devices():
    """The values where they belong."""
    put = {
        0: lambda x: on_mesh(x, ("i",)),
        1: lambda x: on_mesh(x, (None, "i")),
        WHOLE: tp.replicate,
        HOST: torch.clone,
    }
    return SimpleNamespace(**{name: put[dim](value) for name, (value, dim) in VALUES.items()})


def where(result):
    """The dim that is cut, WHOLE or HOST."""
    if type(result) is not tp.ShardedTensor:
        return HOST
    assert [d.id for d in result.sharding.mesh.devices.flat] == [0, 1, 2, 3]
    if result.is_fully_replicated:
        return WHOLE
    (dim,) = (dim for dim, entry in enumerate(result.sharding.spec) if entry is not None)
    return dim


def fetched_bytes(calls):
    return sum(target.nbytes for name, what in calls if name == "fetch" for *_, target in what)


@contextlib.contextmanager
def nothing_gathers():
    """What is in the block stays on the devices."""
    with tp.debug.report_gathers() as gathers:
        yield
    assert [gather.name for gather in gathers] == []


ROWS = torch.arange(8.0).reshape(4, 2)

LAYOUTS = {
    "rows": lambda: tp.device_put(ROWS, tp.devices()),
    "columns": lambda: tp.pmap(lambda x: x, in_axes=1, out_axes=1, compile=EAGER)(ROWS),
    "replicated": lambda: tp.replicate(ROWS),
    "reversed": lambda: tp.device_put(ROWS, tp.devices()[::-1]),
    "on one": lambda: tp.device_put(ROWS, tp.devices()[2]),
    "2x2": lambda: on_mesh(ROWS, ("x", "y"), (2, 2), ("x", "y")),
}
any_layout = pytest.mark.parametrize("put", LAYOUTS.values(), ids=LAYOUTS)
