"""Covers: _rules*.py, _sharded/lower.py, spmd.py: what stays on devices; numbers."""

import pytest
import torch
from _sharded_values import (
    HERE,
    HOST,
    OF_VALUES,
    WHOLE,
    each,
    fetched_bytes,
    functions,
    here,
    on_devices,
    on_mesh,
    where,
)
from _spies import asked

import torchpmap as tp
from torchpmap._base.torch_internals import FakeTensorMode
from torchpmap._sharded.spmd import own_block

pytestmark = pytest.mark.usefixtures("pool")


def leaves(result):
    return list(result) if isinstance(result, tuple | list) else [result]


CUT_0 = """
    # elementwise, with numbers
    -x; x.abs(); x.sin(); torch.exp(x); F.relu(x); F.gelu(x); F.silu(x); torch.tanh(x)
    F.hardswish(x); x.sqrt(); x.sqrt().isnan(); x.sqrt().nan_to_num(7.0); x + 1; ints + 0.5
    mask + 1; x + 2j; 1 + x; 1 - x; 1 / (x + 20); x**2; 2**x; (x + 20) ** -1.5; ints // 2; ints % 3
    torch.fmod(x, 2.5); torch.add(x, y, alpha=3); torch.lerp(x, y, 0.25)
    torch.addcmul(x, y, x, value=0.5); x.clamp(-1, 2); torch.clamp(x, min=y, max=number)
    (x / 3).round(decimals=1); F.threshold(x, 0.5, -1); F.leaky_relu(x, 0.3)
    # comparisons and logic
    x > 1; x == y; x <= same; ~mask; mask & (x > 2); torch.isclose(x, y); torch.where(mask, x, y)
    torch.where(mask, x, 0.0); torch.where(x > 0, 1, ints); x.masked_fill(mask, -7)
    x.masked_fill(mask, number); torch.maximum(x, y); bytes << 1
    # broadcasting
    x + same; same - x; x + bias; x * number; x * x.sum((1, 2), keepdim=True); x / x.amax(0)
    flat[:, None, None] * x; torch.outer(flat, bias)
    # tensors of the host go to the devices
    x + host; host - x; x * host_bias; x * torch.tensor(0.1, dtype=torch.float64)
    ints * torch.tensor(0.5, dtype=torch.float64); x * torch.ones(3, dtype=torch.float64)
    half * torch.tensor(0.1); half * 0.1; bytes * 2; bytes * ints[:, 0]
    # casts and new tensors
    x.double(); x.to(torch.int32); x.to(half); x.to(torch.float32, copy=True)
    x.to(torch.int32, False, True); x.bool(); ints.type_as(half); torch.zeros_like(x)
    torch.ones_like(ints, dtype=torch.float64); torch.full_like(x, 3); x.new_zeros(x.shape)
    x.clone(); x.contiguous()
    # reductions of other dims
    x.sum(1); x.sum((1, 2)); x.sum(-1, keepdim=True); x.sum(1, dtype=torch.float64); x.mean(2)
    x.amax(1); x.max(2); x.argmin(1); x.prod(2); mask.any(1); mask.all(2); x.norm(dim=(1, 2))
    torch.linalg.vector_norm(x, 1, dim=2); x.std(2); torch.var_mean(x, dim=1); x.logsumexp(2)
    x.median(2); x.count_nonzero(1)
    # along other dims
    x.softmax(-1); F.log_softmax(x, 1); x.cumsum(-1); x.cumprod(-1); x.cummax(1)
    x.sort(2, descending=True); torch.argsort(x, dim=2, stable=True); x.topk(2, -1); x.flip(1, 2)
    x.roll(1, 2); x.gather(2, ints.abs() % 3); x.scatter(2, ints.abs() % 3, -9.0)
    x.index_select(2, torch.tensor([2, 0])); F.glu(x, 1); F.layer_norm(x, (3,), bias, bias)
    F.pad(x, (1, 1)); x.tril()
    # products
    x @ w; x @ HERE.w; F.linear(x, w.T, torch.ones(5)); x @ y.mT; torch.einsum("nab,ncb->nac", x, y)
    rows @ torch.ones(6); torch.addmm(torch.ones(4), rows, torch.ones(6, 4), beta=2, alpha=3)
    F.embedding(ints.abs() % 3, w); F.conv1d(x, torch.ones(2, 2, 2))
    # views
    x.transpose(1, 2); x.unsqueeze(-1); x[:, :1].squeeze(1); flat.squeeze(0); x.flatten(1)
    x.flatten(0, 1); x.reshape(4, 3, 2); rows.view(8, 2, 3); rows.view(4, 2, 6); rows.reshape(-1)
    x[:, 1]; x[:, 1, -1]; x[:, :, 1:]; x[..., ::2]; x[0:4]; x[:, None]; x[:, [1, 0, 1]]
    x[:, [1, 0], [2, 2]]; x.select(2, 1); x.narrow(1, 1, 1); x.diagonal(dim1=1, dim2=2)
    flat[:, None].expand(4, 3); x.repeat(1, 2, 1); torch.view_as_real(z); z.real; z.conj() * 1
    x.view(torch.int32); x.unbind(1); x.split([1, 2], 2); rows.chunk(3, 1)
    torch.cat([x, y, same], 2); torch.cat([torch.tensor([]), x, w.new_empty(0)], -2)
    torch.stack([x, y], -1)
    # a few rows: each device puts those that it has
    x.select_scatter(w[:2, :3], 0, -1); x.select_scatter(y[:, 0], 1, 0); x.slice_scatter(same, 0)
    x.slice_scatter(same[1:3], 0, 1, 3); rows.slice_scatter(torch.ones(3, 6), 0, 1, -1, 2)
    mask.select_scatter(same[0] > 0, 0, 3)
"""
CUT_1 = """
    columns * 2 + 1; x.transpose(0, 1); x.permute(2, 0, 1); x.movedim(0, 1); rows.T
    torch.stack([x, y]); x[None]; x.expand(2, 4, 2, 3); columns.sum(2); columns.softmax(0)
    w.T @ last; columns.flatten(1); torch.cat([columns, columns]); last.cumsum(0)
"""
TO_WHOLE = """
    x.sum(); x.sum(0); x.sum((0, 2), keepdim=True); ints.sum(); mask.sum(0); half.sum(); z.sum(0)
    columns.sum(1); x.mean(); rows.mean(0); x.amax(0); columns.amin((0, 1)); x.max(); ints.min()
    x.sqrt().amax(0); x.prod(0); bytes.prod(); mask.any(); (x < 6).all(0); x.norm()
    x.norm(1, dim=0); torch.linalg.vector_norm(x, 3, dim=(0, 1))
    torch.linalg.vector_norm(x, 0, dim=0); torch.linalg.vector_norm(x, torch.inf)
    torch.linalg.vector_norm(x, -torch.inf, dim=0); x.logsumexp(0); x.logsumexp((0, 1))
    x.count_nonzero(); x.sqrt().nansum(); last @ flat; rows.T @ rows; flat @ flat; w * 2 + number
    w @ w.T; bias * host_bias; same.sort(0); same.cumsum(0); same[1:3]
    torch.linalg.inv_ex(w[:, :3] + 9 * torch.eye(3))[0]; x.new_zeros(3)
    torch.nn.grad.conv1d_weight(x, (2, 2, 1), x)
    # a few rows: each device sends those that it has
    x.select(0, 2); x[-1, 1]; x[1, 0, 2]; x[1:2]; rows[3:5]; rows[1::6, 2:]; rows[6:99][1]
    mask[2:3]; bytes.select(0, 1); ints[1, 1]; half[3:]; z[2:3]; z.mH[:, 1]; last[:, 2]; x[3:, 0]
    columns[:, 3:]
"""
X, ROWS, FLAT = 96, 192, 16  # bytes
PLACES = [
    (0, 0, CUT_0),
    (1, 0, CUT_1),
    (WHOLE, 0, TO_WHOLE),
    (0, X, "x.cumsum(0); x.softmax(0); x.flip(0); x.roll(1)"),
    (WHOLE, X, "x.argmax(0); x.argmax(); x.max(0); x.std(0); x.median(); x[[0, 2]]; x[1:3]"),
    (0, ROWS, "rows.sort(0); rows.tril(); rows[1:5]; rows.unfold(0, 2, 2)"),
    (WHOLE, ROWS, "torch.linalg.qr(rows)[1]"),
    (0, FLAT, "flat.cumsum(-1)"),
    (HOST, FLAT, "flat.nonzero()"),
    (0, FLAT, "torch.outer(flat, flat)"),
    (WHOLE, FLAT, "F.nll_loss(flat, torch.tensor(2))"),
    (0, 2 * X, "torch.cat([x, y])"),
    (HOST, 2 * X - 72, "x[x > 0]"),
    (0, X + 2 * X, "x.scatter(0, ints.abs() % 3, 1.0)"),
    (0, 64, "flat[:, None].expand(4, 4) + flat[:, None].expand(4, 4).T"),  # in two dims
]
CASES = [
    pytest.param(function, place, num_bytes, id=f"{place}: {expression}")
    for place, num_bytes, text in PLACES
    for expression, function in functions(OF_VALUES, text).items()
]


@pytest.mark.parametrize(("function", "place", "num_bytes"), CASES)
def test_where_results_are_and_what_is_gathered_for_them(function, place, num_bytes, monkeypatch):
    values = on_devices()
    calls = asked(monkeypatch)
    with tp.debug.report_gathers() as gathers:
        results = leaves(function(**vars(values)))
    assert sum(gather.num_bytes for gather in gathers) == num_bytes
    assert fetched_bytes(calls) == (num_bytes if place == HOST else 0)
    expected = leaves(function(**vars(HERE)))
    assert len(results) == len(expected)
    for result, right in zip(results, expected, strict=True):
        assert where(result) == place
        assert result.shape == right.shape
        torch.testing.assert_close(result.cpu(), right, equal_nan=True)
        if type(result) is tp.ShardedTensor:  # the block of every device, not only the first
            for shard in result.addressable_shards:
                assert shard.data.dtype == right.dtype
                torch.testing.assert_close(shard.data, right[shard.index], equal_nan=True)


BITS = [
    *(torch.bool, torch.uint8, torch.uint16, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float64, torch.float8_e4m3fn, torch.complex32, torch.complex64),
]


PARTS = """
    x.select(0, 7); x[3:6]; x[2::19]; x[-1, 2]
    x.select_scatter(x.select(0, 2), 0, 7); x.slice_scatter(x[::6], 0, 2, 24, 4)
"""


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("spec", [["i"], [("i", "j")], [("j", "i")], ["j", "i"]], ids=str)
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_rows_keep_every_bit(dtype, spec):
    """Those that a device does not have must not change the others: -0.0 + 0.0 is 0.0."""
    x = torch.tensor([1.5, 0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2e-5, -3.0])
    if not (dtype.is_floating_point or dtype.is_complex):
        x = torch.arange(8)
    x = torch.stack([x.roll(k) for k in range(32)])
    x = (torch.complex(x, x.roll(1, 1)) if dtype.is_complex else x).to(dtype)
    there = on_mesh(x, spec, (2, 2), ("i", "j"))
    for f in functions("x", PARTS).values():
        expected, result = f(x), f(there)
        for shard in result.addressable_shards:
            assert same_bits(shard.data, expected[shard.index])


def same_bits(x, y):
    x, y = (z.clone().reshape(-1) for z in (x, y))
    x, y = (torch.view_as_real(z) if z.is_complex() else z for z in (x, y))
    nan = [z.float().isnan() for z in (x, y)]  # of NaN there are many
    bits = [z.view(torch.uint8).reshape(*z.shape, -1) for z in (x, y)]
    unequal = (bits[0] != bits[1]).any(-1)
    return x.dtype == y.dtype and torch.equal(*nan) and not (unequal & ~nan[0]).any()


IN_PLACE = """
    x.add_(1); x.add_(y, alpha=-0.5); x.mul_(x); x.sub_(same); x.div_(host_bias + 20)
    x.addcdiv_(y, same.abs() + 1, value=-0.1); x.lerp_(y, 0.1); x.clamp_(-1, 1); x.fill_(7)
    x.fill_(number); x.zero_(); x.copy_(y); x.copy_(ints); x.copy_(bias); x.masked_fill_(mask, 0.5)
    F.relu_(x); x.cumsum_(2); x.index_fill_(2, torch.tensor([0]), 9.0); torch.add(x, y, out=x)
    x.__iadd__(x.mean())
"""


@each("function", OF_VALUES, IN_PLACE)
def test_in_place_stays(function, monkeypatch):
    values, expected = on_devices(), here()
    before = values.x.clone()
    layout = values.x.sharding
    calls = asked(monkeypatch)
    assert function(**vars(values)) is values.x
    assert fetched_bytes(calls) == 0
    assert values.x.sharding == layout
    function(**vars(expected))
    torch.testing.assert_close(values.x.cpu(), expected.x)
    torch.testing.assert_close(before.cpu(), HERE.x)  # values are immutable


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.float8_e4m3fn, torch.bool])
def test_a_block_is_the_same_however_the_index_is_read(monkeypatch, dtype):
    whole = torch.arange(24).view(4, 6).to(dtype)
    index = torch.tensor(2)
    expected = own_block(whole, 1, 3, index)
    assert expected.float().tolist() == whole[:, 4:].float().tolist()
    found = own_block(whole, 1, 3, Elsewhere(index))
    assert found.is_contiguous()
    assert found.float().tolist() == expected.float().tolist()
    with FakeTensorMode():  # a device is not asked for its index
        whole = torch.empty(4, 6, device="cuda:0", dtype=dtype)
        index = torch.empty((), dtype=torch.int64, device="cuda:0")
        assert own_block(whole, 1, 3, index).shape == (4, 2)


class Elsewhere:
    """An index that is not to be read."""

    is_cpu = False

    def __init__(self, index):
        self.index = index

    def __getattr__(self, name):
        return getattr(self.index, name)
