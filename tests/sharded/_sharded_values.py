"""Tensors in all layouts that operations on blocks take, and where results are."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import pytest
import torch
from _support import EAGER

import torchpmap as tp

WHOLE, HOST = "whole", "host"


def numbers(*shape):
    """Small integers in no order, negative ones among them: sums of them are exact."""
    count = math.prod(shape)
    return ((torch.arange(count) * 7 + 3) % 11 - 5).to(torch.float32).reshape(shape)


@dataclass
class Values:
    """Tensors in all layouts that take part."""

    x: torch.Tensor  # [4, 2, 3], cut along dim 0
    y: torch.Tensor  # [4, 2, 3], cut along dim 0
    rows: torch.Tensor  # [8, 6], cut along dim 0, two rows on each device
    columns: torch.Tensor  # [2, 4, 3], cut along dim 1
    last: torch.Tensor  # [3, 4], cut along dim 1
    flat: torch.Tensor  # [4], cut
    mask: torch.Tensor  # bool [4, 2, 3], cut along dim 0
    ints: torch.Tensor  # int64 [4, 2, 3], cut along dim 0
    bytes: torch.Tensor  # uint8 [4, 3], cut along dim 0
    half: torch.Tensor  # bfloat16 [4, 3], cut along dim 0
    z: torch.Tensor  # complex64 [4, 2], cut along dim 0
    w: torch.Tensor  # [3, 5], whole on every device
    same: torch.Tensor  # [4, 2, 3], whole on every device
    bias: torch.Tensor  # [3], whole on every device
    number: torch.Tensor  # [], whole on every device
    host: torch.Tensor  # [4, 2, 3], on the host
    host_bias: torch.Tensor  # [3], on the host


HERE = Values(
    x=numbers(4, 2, 3),
    y=numbers(4, 2, 3).flip(0) + 0.5,
    rows=numbers(8, 6),
    columns=numbers(2, 4, 3),
    last=numbers(3, 4),
    flat=numbers(4),
    mask=numbers(4, 2, 3) > 0,
    ints=numbers(4, 2, 3).long(),
    bytes=(numbers(4, 3) + 5).to(torch.uint8),
    half=numbers(4, 3).bfloat16(),
    z=torch.complex(numbers(4, 2), numbers(4, 2) + 1),
    w=numbers(3, 5),
    same=numbers(4, 2, 3) * 2,
    bias=numbers(3),
    number=torch.tensor(2.5),
    host=numbers(4, 2, 3) + 1,
    host_bias=numbers(3) + 1,
)

DIMS = {"columns": 1, "last": 1, "w": None, "same": None, "bias": None, "number": None}


def on_devices():
    """The values where they belong."""
    put = {}
    for field in fields(Values):
        value = getattr(HERE, field.name)
        dim = DIMS.get(field.name, 0)
        if field.name.startswith("host"):
            put[field.name] = value.clone()
        elif dim is None:
            put[field.name] = tp.replicate(value)
        else:
            spec = tp.P(*[None] * dim, "i")
            sharding = tp.NamedSharding(tp.make_mesh((4,), ("i",), devices=tp.devices()), spec)
            put[field.name] = tp.device_put(value, sharding)
    return Values(**put)


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


ROWS = torch.arange(8.0).reshape(4, 2)

LAYOUTS = {
    "rows": lambda: tp.device_put(ROWS, tp.devices()),
    "columns": lambda: tp.pmap(lambda x: x, in_axes=1, out_axes=1, compile=EAGER)(ROWS),
    "replicated": lambda: tp.replicate(ROWS),
    "reversed": lambda: tp.device_put(ROWS, tp.devices()[::-1]),
    "on one": lambda: tp.device_put(ROWS, tp.devices()[2]),
    "2x2": lambda: tp.device_put(
        ROWS,
        tp.NamedSharding(tp.make_mesh((2, 2), ("x", "y"), devices=tp.devices()), tp.P("x", "y")),
    ),
}
any_layout = pytest.mark.parametrize("put", LAYOUTS.values(), ids=LAYOUTS)
