"""Covers: _sharded/rules/compute.py, _sharded/blocks.py: operations whose operands are laid out in
different ways.

Every ATen operation of a function and of its backward pass is run again by itself, with every
operand on the host, whole on every device or cut along any dim.  Almost all dims have 4 elements,
so that no error tells when one is taken for another.
"""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from _support import EAGER, TEST_ALL
from torch.utils._python_dispatch import TorchDispatchMode

import torchpmap as tp
from torchpmap._sharded.arguments import written_by

pytestmark = pytest.mark.usefixtures("pool")


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def indices(*shape):
    return torch.arange(torch.Size(shape).numel()).mul(7).remainder(4).reshape(shape)


def order(*shape):
    """A permutation of 0 to 3 along the last dim."""
    return torch.randn(shape).argsort(-1)


def conv(dims, transposed=False, **options):
    function = getattr(F, f"conv{'_transpose' if transposed else ''}{dims}d")
    return lambda: function(
        randn(4, 4, *(4,) * dims), randn(4, 4, *(3,) * dims), randn(4), **options
    )


def masked_conv(*wanted):
    """Only the gradients of some of input, weight and bias are wanted."""

    def run():
        operands = [randn(4, 4, 4), randn(4, 4, 3), randn(4)]
        for operand, wants in zip(operands, wanted, strict=True):
            operand.requires_grad_(wants)
        return F.conv1d(*operands)

    return run


def masked_norm(*wanted):
    def run():
        operands = [randn(4, 4, 4), randn(4), randn(4)]
        for operand, wants in zip(operands, wanted, strict=True):
            operand.requires_grad_(wants)
        return F.layer_norm(operands[0], [4], *operands[1:])

    return run


def batch_norm(training):
    def run():
        mean, var = torch.zeros(4).double(), torch.ones(4).double()
        return F.batch_norm(randn(4, 4, 4), mean, var, randn(4), randn(4), training=training)

    return run


def loss(function, reduction):
    def run():
        x, target = randn(4, 4, 4).sigmoid(), randn(4, 4, 4).sigmoid().detach()
        if function is F.binary_cross_entropy:
            return function(x, target, randn(4, 4).detach(), reduction=reduction)
        return function(x, target, reduction=reduction)

    return run


LOSSES = [
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy),
    *(F.binary_cross_entropy_with_logits, F.soft_margin_loss, F.poisson_nll_loss),
]
MASKS = [mask for mask in itertools.product([True, False], repeat=3) if any(mask)]
REDUCTIONS = ["none", "mean", "sum"]

CASES = {
    **{f"layer_norm {mask}": masked_norm(*mask) for mask in MASKS},
    **{f"conv {mask}": masked_conv(*mask) for mask in MASKS},
    **{f"{f.__name__} {how}": loss(f, how) for f in LOSSES for how in REDUCTIONS},
    "layer_norm 2 dims": lambda: F.layer_norm(randn(4, 4, 4), [4, 4], randn(4, 4), randn(4, 4)),
    "layer_norm plain": lambda: F.layer_norm(randn(4, 4, 4), [4]),
    "rms_norm": lambda: F.rms_norm(randn(4, 4, 4), [4], randn(4)),
    "group_norm": lambda: F.group_norm(randn(4, 4, 4), 2, randn(4), randn(4)),
    "batch_norm": batch_norm(True),
    "batch_norm eval": batch_norm(False),
    "instance_norm": lambda: F.instance_norm(randn(4, 4, 4)),
    "softmax": lambda: randn(4, 4, 4).softmax(1),
    "log_softmax": lambda: randn(4, 4, 4).log_softmax(-1),
    "conv2d": conv(2),
    "conv groups": lambda: F.conv1d(randn(4, 4, 4), randn(4, 1, 3), randn(4), groups=4),
    "conv unbatched": lambda: F.conv1d(randn(4, 4), randn(4, 4, 3), randn(4)),
    "conv transposed": conv(1, transposed=True),
    "embedding": lambda: F.embedding(indices(4, 4), randn(4, 4)),
    "embedding padding": lambda: F.embedding(indices(4, 4), randn(4, 4), padding_idx=1),
    "embedding freq": lambda: F.embedding(indices(4, 4), randn(4, 4), scale_grad_by_freq=True),
    "embedding row": lambda: F.embedding(indices(4), randn(4, 4)),
    "nll": lambda: F.nll_loss(randn(4, 4), indices(4)),
    "nll weight": lambda: F.nll_loss(randn(4, 4), indices(4), randn(4).detach()),
    "nll none": lambda: F.nll_loss(randn(4, 4), indices(4), reduction="none"),
    "nll2d": lambda: F.nll_loss(randn(4, 4, 4, 4), indices(4, 4, 4)),
    "cross_entropy": lambda: F.cross_entropy(randn(4, 4, 4), indices(4, 4)),
    "cross_entropy soft": lambda: F.cross_entropy(randn(4, 4), randn(4, 4), label_smoothing=0.1),
    "kl_div": lambda: F.kl_div(randn(4, 4), randn(4, 4).exp(), reduction="batchmean"),
    "mm": lambda: randn(4, 4) @ randn(4, 4),
    "mv": lambda: randn(4, 4) @ randn(4),
    "dot": lambda: randn(4) @ randn(4),
    "bmm": lambda: torch.bmm(randn(4, 4, 4), randn(4, 4, 4)),
    "baddbmm": lambda: torch.baddbmm(randn(4, 4, 4), randn(4, 4, 4), randn(4, 4, 4), beta=2),
    "baddbmm row": lambda: torch.baddbmm(randn(4), randn(4, 4, 4), randn(4, 4, 4), alpha=2),
    "addmm": lambda: torch.addmm(randn(4, 4), randn(4, 4), randn(4, 4), beta=0.5, alpha=3),
    "addmm row": lambda: torch.addmm(randn(4), randn(4, 4), randn(4, 4)),
    "addmm column": lambda: torch.addmm(randn(4, 1), randn(4, 4), randn(4, 4)),
    "addmv": lambda: torch.addmv(randn(4), randn(4, 4), randn(4)),
    "addbmm": lambda: torch.addbmm(randn(4, 4), randn(4, 4, 4), randn(4, 4, 4)),
    "addr": lambda: torch.addr(randn(4, 4), randn(4), randn(4)),
    "linear": lambda: F.linear(randn(4, 4, 4), randn(4, 4), randn(4)),
    "bilinear": lambda: F.bilinear(randn(4, 4), randn(4, 4), randn(4, 4, 4), randn(4)),
    "einsum": lambda: torch.einsum("bij,bkj->ikb", randn(4, 4, 4), randn(4, 4, 4)),
    "attention": lambda: F.scaled_dot_product_attention(*[randn(4, 4, 4, 4) for _ in range(3)]),
    "attention causal": lambda: F.scaled_dot_product_attention(
        *[randn(4, 4, 4, 4) for _ in range(3)], is_causal=True
    ),
    "attention mask": lambda: F.scaled_dot_product_attention(
        *[randn(4, 4, 4, 4) for _ in range(3)], attn_mask=randn(4, 4)
    ),
    "where": lambda: torch.where(randn(4, 4) > 0, randn(4, 4, 4), randn(4, 1, 4)),
    "lerp": lambda: torch.lerp(randn(4, 4), randn(4), randn(4, 1)),
    "addcmul": lambda: torch.addcmul(randn(4, 4, 4), randn(4, 4), randn(4), value=2),
    "masked_fill": lambda: randn(4, 4, 4).masked_fill(randn(4, 4) > 0, 1.5),
    "masked_scatter": lambda: randn(4, 4).masked_scatter(randn(4, 4) > 0, randn(4, 4)),
    "masked_select": lambda: randn(4, 4)[randn(4, 4) > 0],
    "gather": lambda: randn(4, 4, 4).gather(1, order(4, 4, 4)),
    "gather part": lambda: randn(4, 4, 4).gather(1, indices(2, 4, 4)),
    "scatter": lambda: randn(4, 4, 4).scatter(2, order(4, 4, 4), randn(4, 4, 4)),
    "scatter value": lambda: randn(4, 4, 4).scatter(2, order(4, 4, 4), 2.0),
    "scatter_add": lambda: randn(4, 4).scatter_add(0, indices(4, 4), randn(4, 4)),
    "scatter_add part": lambda: randn(4, 4).scatter_add(0, indices(2, 4), randn(2, 4)),
    "scatter_reduce": lambda: randn(4, 4).scatter_reduce(1, indices(4, 4), randn(4, 4), "mean"),
    "index": lambda: randn(4, 4, 4)[:, indices(4)],
    "index 2": lambda: randn(4, 4, 4)[indices(4), :, indices(4)],
    "index 3": lambda: randn(4, 4, 4)[indices(4, 1), indices(4)],
    "index_put": lambda: randn(4, 4, 4).index_put((order(4),), randn(4, 4)),
    "index_select": lambda: randn(4, 4, 4).index_select(1, indices(4)),
    "index_add": lambda: randn(4, 4, 4).index_add(1, indices(4), randn(4, 4, 4), alpha=2),
    "index_add flat": lambda: randn(4).index_add(0, indices(4), randn(4)),
    "index_copy": lambda: randn(4, 4, 4).index_copy(2, order(4), randn(4, 4, 4)),
    "index_fill": lambda: randn(4, 4, 4).index_fill(1, indices(4)[:2], 2.0),
    "take": lambda: randn(4, 4).take(indices(4, 4)),
    "take_along_dim": lambda: randn(4, 4).take_along_dim(indices(4, 1), 1),
    "cumsum": lambda: randn(4, 4, 4).cumsum(1),
    "cumprod": lambda: randn(4, 4).cumprod(0),
    "cummax": lambda: randn(4, 4).cummax(1).values,
    "logcumsumexp": lambda: randn(4, 4).logcumsumexp(0),
    "sort": lambda: randn(4, 4, 4).sort(1).values,
    "topk": lambda: randn(4, 4, 4).topk(2, 0).values,
    "max": lambda: randn(4, 4, 4).max(1).values,
    "median": lambda: randn(4, 4).median(0).values,
    "var": lambda: randn(4, 4, 4).var((0, 2)),
    "norm": lambda: torch.linalg.vector_norm(randn(4, 4, 4), dim=1),
    "logsumexp": lambda: randn(4, 4, 4).logsumexp(1),
    "amax": lambda: randn(4, 4, 4).amax((0, 1)),
    "prod": lambda: randn(4, 4).prod(1),
    "max_pool": lambda: F.max_pool2d(randn(4, 4, 4, 4), 2),
    "max_pool1d": lambda: F.max_pool1d(randn(4, 4, 4), 2),
    "max_pool3d": lambda: F.max_pool3d(randn(4, 4, 4, 4), 2),
    "max_unpool": lambda: F.max_unpool2d(*F.max_pool2d(randn(4, 4, 4), 2, return_indices=True), 2),
    "avg_pool": lambda: F.avg_pool2d(randn(4, 4, 4, 4), 2),
    "adaptive": lambda: F.adaptive_avg_pool2d(randn(4, 4, 4, 4), 2),
    "adaptive max": lambda: F.adaptive_max_pool2d(randn(4, 4, 4), 2),
    "upsample": lambda: F.interpolate(randn(4, 4, 4, 4), scale_factor=2),
    "upsample linear": lambda: F.interpolate(randn(4, 4, 4), scale_factor=2, mode="linear"),
    "grid_sample": lambda: F.grid_sample(randn(4, 4, 4, 4), randn(4, 4, 4, 2), align_corners=False),
    "pad": lambda: F.pad(randn(4, 4, 4), (1, 1)),
    "pad reflect": lambda: F.pad(randn(4, 4, 4), (1, 1), mode="reflect"),
    "glu": lambda: F.glu(randn(4, 4, 4), 1),
    "prelu": lambda: F.prelu(randn(4, 4, 4), randn(4)),
    "gelu": lambda: F.gelu(randn(4, 4)),
    "silu": lambda: F.silu(randn(4, 4)),
    "logsigmoid": lambda: F.logsigmoid(randn(4, 4)),
    "dropout": lambda: F.dropout(randn(4, 4), 0.5),
    "cat": lambda: torch.cat([randn(4, 4, 4), randn(4, 4, 4)], 1),
    "stack": lambda: torch.stack([randn(4, 4), randn(4, 4)], 1),
    "cdist": lambda: torch.cdist(randn(4, 4, 4), randn(4, 4, 4)),
    "cross": lambda: torch.linalg.cross(randn(4, 3), randn(4, 3), dim=1),
    "solve": lambda: torch.linalg.solve(randn(4, 4, 4), randn(4, 4, 4)),
    "triangular": lambda: torch.linalg.solve_triangular(
        randn(4, 4, 4).triu() + 4 * torch.eye(4), randn(4, 4, 4), upper=True
    ),
    "det": lambda: torch.linalg.det(randn(4, 4, 4)),
    "inverse": lambda: torch.linalg.inv(randn(4, 4, 4)),
    "qr": lambda: torch.linalg.qr(randn(4, 4, 4))[1],
    "tensordot": lambda: torch.tensordot(randn(4, 4, 4), randn(4, 4, 4), 2),
    "searchsorted": lambda: torch.searchsorted(randn(4, 4).sort().values, randn(4, 4)),
    "bucketize": lambda: torch.bucketize(randn(4, 4), randn(4).sort().values),
    "isin": lambda: torch.isin(indices(4, 4), indices(2)),
    "bincount": lambda: torch.bincount(indices(4), randn(4).detach()),
    "histc": lambda: torch.histc(randn(4, 4).detach(), 4, -2, 2),
    "renorm": lambda: torch.renorm(randn(4, 4), 2, 0, 1.0),
    "heaviside": lambda: torch.heaviside(randn(4, 4).detach(), randn(4).detach()),
}


class Record(TorchDispatchMode):
    """The operations that run, with copies of what they get."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        mentions = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        is_repeatable = torch.Tag.nondeterministic_seeded not in func.tags
        if mentions and is_repeatable and not func.is_view and "empty" not in str(func):
            self.calls.append((func, *copied((args, kwargs))))
        return func(*args, **kwargs)


def copied(tree):
    def copy(x):
        return x.detach().clone(memory_format=torch.contiguous_format)

    return pytree.tree_map_only(torch.Tensor, copy, tree)


def calls_of(function):
    """Every operation once."""
    torch.manual_seed(0)
    with Record() as record:
        result = function()
        if result.requires_grad:
            result.backward(torch.randn_like(result))
    found = {}
    for func, args, kwargs in record.calls:
        kinds = pytree.tree_map_only(torch.Tensor, lambda x: tuple(x.shape), (args, kwargs))
        found.setdefault((func, str(kinds)), (func, args, kwargs))
    return list(found.values())


def layouts_of(tensor, devices, written):
    """Ways to lay a tensor out."""
    yield "whole", lambda x: tp.replicate(x, devices)
    if not written:
        yield "here", lambda x: x
    count = len(devices)
    flat = tp.make_mesh((count,), ("i",), devices=devices)
    for dim, size in enumerate(tensor.shape):
        if size % count == 0 and size:
            yield f"cut {dim}", put(tp.NamedSharding(flat, tp.P(*[None] * dim, "i")))
    if count == 4 and tensor.ndim > 1 and not any(size % 2 for size in tensor.shape[:2]):
        grid = tp.make_mesh((2, 2), ("a", "b"), devices=devices)
        yield "grid", put(tp.NamedSharding(grid, tp.P("a", "b")))
        yield "grid row", put(tp.NamedSharding(grid, tp.P(None, "b")))
        if tensor.shape[1] % 4 == 0:
            yield "grid both", put(tp.NamedSharding(grid, tp.P(None, ("a", "b"))))


def put(sharding):
    return lambda x: tp.device_put(x, sharding)


def choices_of(call, devices, most, choose):
    """Layouts for the operands of a call: ``most`` of all combinations, at random."""
    func, args, kwargs = call
    operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    written = {id(x) for x in written_by(func, args, kwargs)}
    each = [dict(layouts_of(x, devices, id(x) in written)) for x in operands]
    combinations = list(itertools.product(*each))
    combinations = [names for names in combinations if set(names) != {"here"}]
    if len(combinations) > most:
        combinations = choose.sample(combinations, most)
    return [
        [(name, puts[name]) for name, puts in zip(names, each, strict=True)]
        for names in combinations
    ]


def outcome(func, args, kwargs):
    """What a call gives and what it leaves in its operands, on the host."""
    result = func(*args, **kwargs)
    leaves = pytree.tree_leaves((result, args, kwargs), is_leaf=lambda x: x is None)
    return [x.to_host() if type(x) is tp.ShardedTensor else x for x in leaves]


def check(call, layouts):
    func, args, kwargs = copied(call)
    expected = outcome(*copied(call))
    remaining = iter(layouts)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda x: next(remaining)[1](x), (args, kwargs)
    )
    given = outcome(func, args, kwargs)
    for left, right in zip(given, expected, strict=True):
        if isinstance(right, torch.Tensor):
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-9, equal_nan=True)
        else:
            assert left == right


# how many of the ways to lay out the operands of a call are tried
MOST = 12 if TEST_ALL else 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_mixed_layouts(name, num_devices):
    choose = random.Random(f"{name} {num_devices}")
    for call in calls_of(CASES[name]):
        for layouts in choices_of(call, tp.devices()[:num_devices], MOST, choose):
            check(call, layouts)


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False), (True, False, True)])
def test_layer_norm_backward(wanted):
    """All of what may be whole or cut along dim 1, in all ways."""
    func = torch.ops.aten.native_layer_norm_backward.default
    call = next(call for call in calls_of(masked_norm(*wanted)) if call[0] is func)
    devices = tp.devices()[:2]
    rows = [dict(layouts_of(x, devices, False)) for x in (call[1][0], call[1][1], *call[1][3:5])]
    ways = [[(name, ways[name]) for name in ("whole", "cut 1")] for ways in rows]
    weights = [("whole", lambda x: tp.replicate(x, devices))] * 2
    for layouts in itertools.product(*ways):
        check(call, [*layouts, *weights])


@pytest.mark.parametrize("wants_input", [True, False])
@pytest.mark.parametrize("earlier", [False, True])
def test_layer_norm(wants_input, earlier):
    """A whole layer norm, whose gradient is cut: by a factor, or as an earlier one was."""
    torch.manual_seed(0)
    cut = tp.pmap(lambda x: x, in_axes=1, out_axes=1, compile=EAGER)
    values, factor = torch.randn(4, 4, 4), torch.randn(4, 4, 4)
    layer = torch.nn.LayerNorm(4)
    twin = copy.deepcopy(layer)._apply(tp.replicate)
    here = values.clone().requires_grad_(wants_input)
    there = tp.replicate(values).requires_grad_(wants_input)
    if earlier:
        (cut(values).requires_grad_() * 1).sum().backward()
        factor = tp.replicate(factor)
        twin(there).mul(factor).sum().backward()
    else:
        twin(there).mul(cut(factor)).sum().backward()
    layer(here).mul(factor.cpu()).sum().backward()
    pairs = [(twin.weight, layer.weight), (twin.bias, layer.bias)]
    for left, right in [*pairs, (there, here)][: 2 + wants_input]:
        torch.testing.assert_close(left.grad.cpu(), right.grad)
