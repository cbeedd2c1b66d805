"""Covers: _rules*.py, _sharded/graphs.py, _sharded/blocks.py: which operations on ShardedTensors
stay on the devices, and that their numbers are torch's.

Every case is a function of ``Values``, called with values on the devices and with the same plain
tensors; plain torch says what must come out.
"""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from _sharded_values import HERE, HOST, WHOLE, Values, fetched_bytes, numbers, on_devices, where
from _spies import asked
from hypothesis import given, settings
from hypothesis import strategies as st

import torchpmap as tp
from torchpmap._base.torch_internals import FakeTensorMode
from torchpmap._sharded.blocks import own_block

pytestmark = pytest.mark.usefixtures("pool")


def leaves(result):
    return list(result) if isinstance(result, tuple | list) else [result]


def check(function, place, monkeypatch, num_bytes=0):
    """The numbers are torch's, the result is where it should be, and as much was fetched."""
    values = on_devices()
    calls = asked(monkeypatch)
    results = leaves(function(values))
    assert fetched_bytes(calls) == num_bytes
    expected = leaves(function(HERE))
    assert len(results) == len(expected)
    for result, right in zip(results, expected, strict=True):
        assert where(result) == place
        assert result.shape == right.shape
        torch.testing.assert_close(result.cpu(), right, equal_nan=True)
        if type(result) is tp.ShardedTensor:  # the block of every device, not only the first
            for shard in result.addressable_shards:
                assert shard.data.dtype == right.dtype
                torch.testing.assert_close(shard.data, right[shard.index], equal_nan=True)


CUT_0 = {
    # elementwise, with numbers
    "neg": lambda v: -v.x,
    "abs": lambda v: v.x.abs(),
    "sin": lambda v: v.x.sin(),
    "exp": lambda v: torch.exp(v.x),
    "relu": lambda v: F.relu(v.x),
    "gelu": lambda v: F.gelu(v.x),
    "silu": lambda v: F.silu(v.x),
    "tanh": lambda v: torch.tanh(v.x),
    "hardswish": lambda v: F.hardswish(v.x),
    "sqrt of negatives": lambda v: v.x.sqrt(),
    "isnan": lambda v: v.x.sqrt().isnan(),
    "nan_to_num": lambda v: v.x.sqrt().nan_to_num(7.0),
    "add number": lambda v: v.x + 1,
    "add float to ints": lambda v: v.ints + 0.5,
    "add int to bool": lambda v: v.mask + 1,
    "add complex": lambda v: v.x + 2j,
    "radd": lambda v: 1 + v.x,
    "rsub": lambda v: 1 - v.x,
    "rdiv": lambda v: 1 / (v.x + 20),
    "pow": lambda v: v.x**2,
    "rpow": lambda v: 2**v.x,
    "pow negative": lambda v: (v.x + 20) ** -1.5,
    "floordiv": lambda v: v.ints // 2,
    "mod": lambda v: v.ints % 3,
    "fmod": lambda v: torch.fmod(v.x, 2.5),
    "add with alpha": lambda v: torch.add(v.x, v.y, alpha=3),
    "lerp": lambda v: torch.lerp(v.x, v.y, 0.25),
    "addcmul": lambda v: torch.addcmul(v.x, v.y, v.x, value=0.5),
    "clamp": lambda v: v.x.clamp(-1, 2),
    "clamp by tensors": lambda v: torch.clamp(v.x, min=v.y, max=v.number),
    "round": lambda v: (v.x / 3).round(decimals=1),
    "threshold": lambda v: F.threshold(v.x, 0.5, -1),
    "leaky_relu": lambda v: F.leaky_relu(v.x, 0.3),
    # comparisons and logic
    "gt number": lambda v: v.x > 1,
    "eq": lambda v: v.x == v.y,
    "le whole": lambda v: v.x <= v.same,
    "logical_not": lambda v: ~v.mask,
    "and": lambda v: v.mask & (v.x > 2),
    "isclose": lambda v: torch.isclose(v.x, v.y),
    "where": lambda v: torch.where(v.mask, v.x, v.y),
    "where number": lambda v: torch.where(v.mask, v.x, 0.0),
    "where one-sided": lambda v: torch.where(v.x > 0, 1, v.ints),
    "masked_fill": lambda v: v.x.masked_fill(v.mask, -7),
    "masked_fill tensor": lambda v: v.x.masked_fill(v.mask, v.number),
    "maximum": lambda v: torch.maximum(v.x, v.y),
    "shift": lambda v: v.bytes << 1,
    # broadcasting
    "add whole": lambda v: v.x + v.same,
    "sub from whole": lambda v: v.same - v.x,
    "add bias": lambda v: v.x + v.bias,
    "mul 0-d": lambda v: v.x * v.number,
    "mul by sums": lambda v: v.x * v.x.sum((1, 2), keepdim=True),
    "div by max": lambda v: v.x / v.x.amax(0),
    "cut along a broadcast's dim": lambda v: v.flat[:, None, None] * v.x,
    "outer": lambda v: torch.outer(v.flat, v.bias),
    # tensors of the host go to the devices
    "add host": lambda v: v.x + v.host,
    "host first": lambda v: v.host - v.x,
    "add host bias": lambda v: v.x * v.host_bias,
    "host 0-d keeps dtype": lambda v: v.x * torch.tensor(0.1, dtype=torch.float64),
    "host 0-d of a higher kind": lambda v: v.ints * torch.tensor(0.5, dtype=torch.float64),
    "host 1-d promotes": lambda v: v.x * torch.ones(3, dtype=torch.float64),
    "half by 0-d": lambda v: v.half * torch.tensor(0.1),
    "half by number": lambda v: v.half * 0.1,
    "bytes by number": lambda v: v.bytes * 2,
    "bytes by ints": lambda v: v.bytes * v.ints[:, 0],
    # casts and new tensors
    "double": lambda v: v.x.double(),
    "to dtype": lambda v: v.x.to(torch.int32),
    "to like": lambda v: v.x.to(v.half),
    "to a copy": lambda v: v.x.to(torch.float32, copy=True),
    "to another dtype in a copy": lambda v: v.x.to(torch.int32, False, True),
    "bool": lambda v: v.x.bool(),
    "type_as": lambda v: v.ints.type_as(v.half),
    "zeros_like": lambda v: torch.zeros_like(v.x),
    "ones_like": lambda v: torch.ones_like(v.ints, dtype=torch.float64),
    "full_like": lambda v: torch.full_like(v.x, 3),
    "new_zeros": lambda v: v.x.new_zeros(v.x.shape),
    "clone": lambda v: v.x.clone(),
    "contiguous": lambda v: v.x.contiguous(),
    # reductions of other dims
    "sum": lambda v: v.x.sum(1),
    "sum of two": lambda v: v.x.sum((1, 2)),
    "sum keepdim": lambda v: v.x.sum(-1, keepdim=True),
    "sum as double": lambda v: v.x.sum(1, dtype=torch.float64),
    "mean": lambda v: v.x.mean(2),
    "amax": lambda v: v.x.amax(1),
    "max with places": lambda v: v.x.max(2),
    "argmin": lambda v: v.x.argmin(1),
    "prod": lambda v: v.x.prod(2),
    "any": lambda v: v.mask.any(1),
    "all": lambda v: v.mask.all(2),
    "norm": lambda v: v.x.norm(dim=(1, 2)),
    "vector_norm": lambda v: torch.linalg.vector_norm(v.x, 1, dim=2),
    "std": lambda v: v.x.std(2),
    "var and mean": lambda v: torch.var_mean(v.x, dim=1),
    "logsumexp": lambda v: v.x.logsumexp(2),
    "median": lambda v: v.x.median(2),
    "count_nonzero": lambda v: v.x.count_nonzero(1),
    # along other dims
    "softmax": lambda v: v.x.softmax(-1),
    "log_softmax": lambda v: F.log_softmax(v.x, 1),
    "cumsum": lambda v: v.x.cumsum(-1),
    "cumprod": lambda v: v.x.cumprod(-1),
    "cummax": lambda v: v.x.cummax(1),
    "sort": lambda v: v.x.sort(2, descending=True),
    "argsort": lambda v: torch.argsort(v.x, dim=2, stable=True),
    "topk": lambda v: v.x.topk(2, -1),
    "flip": lambda v: v.x.flip(1, 2),
    "roll": lambda v: v.x.roll(1, 2),
    "gather": lambda v: v.x.gather(2, v.ints.abs() % 3),
    "scatter": lambda v: v.x.scatter(2, v.ints.abs() % 3, -9.0),
    "index_select": lambda v: v.x.index_select(2, torch.tensor([2, 0])),
    "glu": lambda v: F.glu(v.x, 1),
    "layer_norm": lambda v: F.layer_norm(v.x, (3,), v.bias, v.bias),
    "pad": lambda v: F.pad(v.x, (1, 1)),
    "tril": lambda v: v.x.tril(),
    # products
    "matmul": lambda v: v.x @ v.w,
    "matmul host": lambda v: v.x @ HERE.w,
    "linear": lambda v: F.linear(v.x, v.w.T, torch.ones(5)),
    "batched matmul": lambda v: v.x @ v.y.mT,
    "einsum": lambda v: torch.einsum("nab,ncb->nac", v.x, v.y),
    "mv": lambda v: v.rows @ torch.ones(6),
    "addmm": lambda v: torch.addmm(torch.ones(4), v.rows, torch.ones(6, 4), beta=2, alpha=3),
    "embedding": lambda v: F.embedding(v.ints.abs() % 3, v.w),
    "conv": lambda v: F.conv1d(v.x, torch.ones(2, 2, 2)),
    # views
    "transpose": lambda v: v.x.transpose(1, 2),
    "unsqueeze": lambda v: v.x.unsqueeze(-1),
    "squeeze": lambda v: v.x[:, :1].squeeze(1),
    "squeeze of nothing": lambda v: v.flat.squeeze(0),
    "flatten": lambda v: v.x.flatten(1),
    "flatten leading": lambda v: v.x.flatten(0, 1),
    "reshape": lambda v: v.x.reshape(4, 3, 2),
    "unflatten": lambda v: v.rows.view(8, 2, 3),
    "unflatten the cut dim": lambda v: v.rows.view(4, 2, 6),
    "reshape to one dim": lambda v: v.rows.reshape(-1),
    "index": lambda v: v.x[:, 1],
    "index twice": lambda v: v.x[:, 1, -1],
    "slice": lambda v: v.x[:, :, 1:],
    "step": lambda v: v.x[..., ::2],
    "full slice": lambda v: v.x[0:4],
    "newaxis": lambda v: v.x[:, None],
    "list index": lambda v: v.x[:, [1, 0, 1]],
    "two lists": lambda v: v.x[:, [1, 0], [2, 2]],
    "select": lambda v: v.x.select(2, 1),
    "narrow": lambda v: v.x.narrow(1, 1, 1),
    "diagonal": lambda v: v.x.diagonal(dim1=1, dim2=2),
    "expand": lambda v: v.flat[:, None].expand(4, 3),
    "repeat": lambda v: v.x.repeat(1, 2, 1),
    "as real": lambda v: torch.view_as_real(v.z),
    "real": lambda v: v.z.real,
    "conj": lambda v: v.z.conj() * 1,
    "bits": lambda v: v.x.view(torch.int32),
    "unbind": lambda v: v.x.unbind(1),
    "split": lambda v: v.x.split([1, 2], 2),
    "chunk": lambda v: v.rows.chunk(3, 1),
    "cat": lambda v: torch.cat([v.x, v.y, v.same], 2),
    "cat with an empty one": lambda v: torch.cat([torch.tensor([]), v.x, v.w.new_empty(0)], -2),
    "stack": lambda v: torch.stack([v.x, v.y], -1),
}

CUT_1 = {
    "elementwise": lambda v: v.columns * 2 + 1,
    "from rows": lambda v: v.x.transpose(0, 1),
    "permute": lambda v: v.x.permute(2, 0, 1),
    "movedim": lambda v: v.x.movedim(0, 1),
    "T": lambda v: v.rows.T,
    "stack in front": lambda v: torch.stack([v.x, v.y]),
    "unsqueeze in front": lambda v: v.x[None],
    "expand in front": lambda v: v.x.expand(2, 4, 2, 3),
    "sum": lambda v: v.columns.sum(2),
    "softmax": lambda v: v.columns.softmax(0),
    "whole @ cut": lambda v: v.w.T @ v.last,
    "flatten": lambda v: v.columns.flatten(1),
    "cat": lambda v: torch.cat([v.columns, v.columns]),
    "cumsum": lambda v: v.last.cumsum(0),
}

TO_WHOLE = {
    "sum": lambda v: v.x.sum(),
    "sum dim": lambda v: v.x.sum(0),
    "sum keepdim": lambda v: v.x.sum((0, 2), keepdim=True),
    "sum of ints": lambda v: v.ints.sum(),
    "sum of bools": lambda v: v.mask.sum(0),
    "sum of halves": lambda v: v.half.sum(),
    "sum of complex": lambda v: v.z.sum(0),
    "sum of columns": lambda v: v.columns.sum(1),
    "mean": lambda v: v.x.mean(),
    "mean dim": lambda v: v.rows.mean(0),
    "amax": lambda v: v.x.amax(0),
    "amin": lambda v: v.columns.amin((0, 1)),
    "max": lambda v: v.x.max(),
    "min": lambda v: v.ints.min(),
    "max keeps nan": lambda v: v.x.sqrt().amax(0),
    "prod": lambda v: v.x.prod(0),
    "prod of all": lambda v: v.bytes.prod(),
    "any": lambda v: v.mask.any(),
    "all": lambda v: (v.x < 6).all(0),
    "norm": lambda v: v.x.norm(),
    "norm 1": lambda v: v.x.norm(1, dim=0),
    "norm 3": lambda v: torch.linalg.vector_norm(v.x, 3, dim=(0, 1)),
    "norm 0": lambda v: torch.linalg.vector_norm(v.x, 0, dim=0),
    "norm inf": lambda v: torch.linalg.vector_norm(v.x, math.inf),
    "norm -inf": lambda v: torch.linalg.vector_norm(v.x, -math.inf, dim=0),
    "logsumexp": lambda v: v.x.logsumexp(0),
    "logsumexp of two": lambda v: v.x.logsumexp((0, 1)),
    "count_nonzero": lambda v: v.x.count_nonzero(),
    "nansum": lambda v: v.x.sqrt().nansum(),
    "contraction": lambda v: v.last @ v.flat,
    "rows.T @ rows": lambda v: v.rows.T @ v.rows,
    "dot": lambda v: v.flat @ v.flat,
    "whole stays whole": lambda v: v.w * 2 + v.number,
    "whole product": lambda v: v.w @ v.w.T,
    "whole by host": lambda v: v.bias * v.host_bias,
    "sort of a whole": lambda v: v.same.sort(0),
    "cumsum of a whole": lambda v: v.same.cumsum(0),
    "slice of a whole": lambda v: v.same[1:3],
    "inverse of a whole": lambda v: torch.linalg.inv_ex(v.w[:, :3] + 9 * torch.eye(3))[0],
    "new tensor of another shape": lambda v: v.x.new_zeros(3),
}

X, ROWS, SMALL = 96, 192, 16


def square(v):
    return v.flat[:, None].expand(4, 4)


TO_HOST = {
    "cumsum": (lambda v: v.x.cumsum(0), X),
    "cumsum from the back": (lambda v: v.flat.cumsum(-1), SMALL),
    "softmax": (lambda v: v.x.softmax(0), X),
    "sort": (lambda v: v.rows.sort(0), ROWS),
    "argmax": (lambda v: v.x.argmax(0), X),
    "argmax of all": (lambda v: v.x.argmax(), X),
    "max with places": (lambda v: v.x.max(0), X),
    "std": (lambda v: v.x.std(0), X),
    "median": (lambda v: v.x.median(), X),
    "flip": (lambda v: v.x.flip(0), X),
    "roll": (lambda v: v.x.roll(1), X),
    "cat": (lambda v: torch.cat([v.x, v.y]), 2 * X),
    "index": (lambda v: v.x[[0, 2]], X),
    "mask": (lambda v: v.x[v.x > 0], 2 * X - 72),
    "nonzero": (lambda v: v.flat.nonzero(), SMALL),
    "tril": (lambda v: v.rows.tril(), ROWS),
    "different dims": (lambda v: square(v) + square(v).T, 64 + 64),
    "outer of two": (lambda v: torch.outer(v.flat, v.flat), 2 * SMALL),
    "qr": (lambda v: torch.linalg.qr(v.rows)[1], ROWS),
    "scatter": (lambda v: v.x.scatter(0, v.ints.abs() % 3, 1.0), X + 2 * X),
}


@pytest.mark.parametrize("function", CUT_0.values(), ids=CUT_0)
def test_stays_cut_along_dim_0(function, monkeypatch):
    check(function, 0, monkeypatch)


@pytest.mark.parametrize("function", CUT_1.values(), ids=CUT_1)
def test_stays_cut_along_dim_1(function, monkeypatch):
    check(function, 1, monkeypatch)


@pytest.mark.parametrize("function", TO_WHOLE.values(), ids=TO_WHOLE)
def test_ends_whole_on_every_device(function, monkeypatch):
    check(function, WHOLE, monkeypatch)


@pytest.mark.parametrize(("function", "num_bytes"), TO_HOST.values(), ids=TO_HOST)
def test_gathers(function, num_bytes, monkeypatch):
    check(function, HOST, monkeypatch, num_bytes)


# Random expressions ------------------------------------------------------------------------------

UNARY = [
    torch.neg,
    torch.abs,
    torch.sign,
    lambda t: t * 3 - 1,
    lambda t: t.clamp(-4, 4),
    lambda t: t.flip(-1),
    lambda t: t.cumsum(0).fmod(7),
    lambda t: t.cumsum(-1).fmod(7),
    lambda t: t.mT,
    lambda t: t.transpose(0, 1),
    lambda t: t.sort(1).values,
    lambda t: t[:, :, ::2].repeat(1, 1, 2),
    lambda t: t.reshape(16, 4).view(4, 4, 4),
    lambda t: t.sum(0, keepdim=True).fmod(7).expand(4, 4, 4),
    lambda t: t.amax((0, 2))[:, None] + torch.zeros(4, 4, 4),
    lambda t: t - t.mean(),
    lambda t: t.select(0, 1).expand(4, 4, 4),
]
BINARY = [
    torch.add,
    torch.sub,
    torch.minimum,
    lambda a, b: torch.where(a > b, a, b + 1),
    lambda a, b: (a @ b).fmod(7),
    lambda a, b: (a.mT @ b).fmod(7),
    lambda a, b: torch.cat([a[:2], b[2:]]),
    lambda a, b: torch.stack([a, b]).sum(0),
    lambda a, b: a.lerp(b, 0.5),
]

cubes = st.sampled_from(["rows", "columns", "whole", "host"])
expressions = st.recursive(
    cubes,
    lambda inner: (
        st.tuples(st.integers(0, len(UNARY) - 1), inner)
        | st.tuples(st.integers(0, len(BINARY) - 1), inner, inner)
    ),
    max_leaves=6,
)


def cube(kind):
    """[4, 4, 4] of small integers; another one for every kind."""
    return numbers(4, 4, 4).roll(["rows", "columns", "whole", "host"].index(kind) + 1)


def evaluated(expression, value_of):
    if isinstance(expression, str):
        return value_of[expression]
    number, *operands = expression
    table = UNARY if len(operands) == 1 else BINARY
    return table[number](*[evaluated(operand, value_of) for operand in operands])


@settings(max_examples=150)
@given(expressions)
def test_random_expressions(expression):
    plain = {kind: cube(kind) for kind in ("rows", "columns", "whole", "host")}
    placed = {
        "rows": tp.device_put(plain["rows"], tp.devices()),
        "columns": tp.device_put(plain["columns"].transpose(0, 1), tp.devices()).transpose(0, 1),
        "whole": tp.replicate(plain["whole"]),
        "host": plain["host"],
    }
    result = evaluated(expression, placed)
    torch.testing.assert_close(result.cpu(), evaluated(expression, plain), rtol=1e-5, atol=1e-4)


# In place ----------------------------------------------------------------------------------------

IN_PLACE = {
    "add": lambda v: v.x.add_(1),
    "add with alpha": lambda v: v.x.add_(v.y, alpha=-0.5),
    "mul by itself": lambda v: v.x.mul_(v.x),
    "sub whole": lambda v: v.x.sub_(v.same),
    "div by host": lambda v: v.x.div_(v.host_bias + 20),
    "addcdiv": lambda v: v.x.addcdiv_(v.y, v.same.abs() + 1, value=-0.1),
    "lerp": lambda v: v.x.lerp_(v.y, 0.1),
    "clamp": lambda v: v.x.clamp_(-1, 1),
    "fill": lambda v: v.x.fill_(7),
    "fill 0-d": lambda v: v.x.fill_(v.number),
    "zero": lambda v: v.x.zero_(),
    "copy": lambda v: v.x.copy_(v.y),
    "copy of another dtype": lambda v: v.x.copy_(v.ints),
    "copy of a row": lambda v: v.x.copy_(v.bias),
    "masked_fill": lambda v: v.x.masked_fill_(v.mask, 0.5),
    "relu": lambda v: F.relu_(v.x),
    "cumsum": lambda v: v.x.cumsum_(2),
    "index_fill": lambda v: v.x.index_fill_(2, torch.tensor([0]), 9.0),
    "out": lambda v: torch.add(v.x, v.y, out=v.x),
    "augmented": lambda v: v.x.__iadd__(v.x.mean()),
}


@pytest.mark.parametrize("function", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place_stays(function, monkeypatch):
    values = on_devices()
    before = values.x.clone()
    layout = values.x.sharding
    calls = asked(monkeypatch)
    assert function(values) is values.x
    assert fetched_bytes(calls) == 0
    assert values.x.sharding == layout
    expected = Values(**{f.name: getattr(HERE, f.name).clone() for f in fields(Values)})
    function(expected)
    torch.testing.assert_close(values.x.cpu(), expected.x)
    torch.testing.assert_close(before.cpu(), HERE.x)  # values are immutable


def test_in_place_on_a_whole_value_with_a_cut_one_gathers(monkeypatch):
    values = on_devices()
    calls = asked(monkeypatch)
    values.same.add_(values.x)
    assert fetched_bytes(calls) == 2 * X
    assert where(values.same) == WHOLE
    torch.testing.assert_close(values.same.cpu(), HERE.same + HERE.x)


def test_a_device_is_not_asked_for_its_index():
    with FakeTensorMode():
        whole = torch.empty(4, 6, device="cuda:0")
        index = torch.empty((), dtype=torch.int64, device="cuda:0")
        assert own_block(whole, 1, 3, index).shape == (4, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.float8_e4m3fn, torch.bool])
def test_a_block_is_the_same_however_the_index_is_read(monkeypatch, dtype):
    whole = torch.arange(24).view(4, 6).to(dtype)
    index = torch.tensor(2)
    expected = own_block(whole, 1, 3, index)
    assert expected.float().tolist() == whole[:, 4:].float().tolist()
    found = own_block(whole, 1, 3, Elsewhere(index))
    assert found.is_contiguous()
    assert found.float().tolist() == expected.float().tolist()


class Elsewhere:
    """An index that is not to be read."""

    is_cpu = False

    def __init__(self, index):
        self.index = index

    def __getattr__(self, name):
        return getattr(self.index, name)
