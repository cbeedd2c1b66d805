"""Covers: _sharded/rules/compute.py, _sharded/blocks.py: operations whose operands are laid out in
different ways.

Every ATen operation of a function and of its backward pass is run again by itself, with every
operand on the host, whole on every device or cut along any dim.  Almost all dims have 4 elements,
so that no error tells when one is taken for another.
"""

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


def vector():
    return randn(4)


def matrix():
    return randn(4, 4)


def cube():
    return randn(4, 4, 4)


def images():
    return randn(4, 4, 4, 4)


def statistics():
    """A mean and a variance, as a batch norm begins with."""
    return torch.zeros(4).double(), torch.ones(4).double()


def indices(*shape):
    return torch.arange(torch.Size(shape).numel()).mul(7).remainder(4).reshape(shape)


def order(*shape):
    """A permutation of 0 to 3 along the last dim."""
    return torch.randn(shape).argsort(-1)


def masked(function, wanted, *shapes):
    """Only the gradients of some of input, weight and bias are wanted."""

    def run():
        pairs = zip(shapes, wanted, strict=True)
        return function(*[randn(*shape).requires_grad_(wants) for shape, wants in pairs])

    return run


def masked_norm(wanted):
    return masked(lambda x, *rest: F.layer_norm(x, [4], *rest), wanted, (4, 4, 4), (4,), (4,))


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
    **{f"layer_norm {mask}": masked_norm(mask) for mask in MASKS},
    **{f"conv {mask}": masked(F.conv1d, mask, (4, 4, 4), (4, 4, 3), (4,)) for mask in MASKS},
    **{f"{f.__name__} {how}": loss(f, how) for f in LOSSES for how in REDUCTIONS},
    "layer_norm 2 dims": lambda: F.layer_norm(cube(), [4, 4], matrix(), matrix()),
    "layer_norm plain": lambda: F.layer_norm(cube(), [4]),
    "rms_norm": lambda: F.rms_norm(cube(), [4], vector()),
    "group_norm": lambda: F.group_norm(cube(), 2, vector(), vector()),
    "batch_norm": lambda: F.batch_norm(cube(), *statistics(), vector(), vector(), True),
    "batch_norm eval": lambda: F.batch_norm(cube(), *statistics(), vector(), vector(), False),
    "instance_norm": lambda: F.instance_norm(cube()),
    "softmax": lambda: cube().softmax(1),
    "log_softmax": lambda: cube().log_softmax(-1),
    "conv2d": lambda: F.conv2d(images(), randn(4, 4, 3, 3), vector()),
    "conv groups": lambda: F.conv1d(cube(), randn(4, 1, 3), vector(), groups=4),
    "conv unbatched": lambda: F.conv1d(matrix(), randn(4, 4, 3), vector()),
    "conv transposed": lambda: F.conv_transpose1d(cube(), randn(4, 4, 3), vector()),
    "embedding": lambda: F.embedding(indices(4, 4), matrix()),
    "embedding padding": lambda: F.embedding(indices(4, 4), matrix(), padding_idx=1),
    "embedding freq": lambda: F.embedding(indices(4, 4), matrix(), scale_grad_by_freq=True),
    "embedding row": lambda: F.embedding(indices(4), matrix()),
    "nll": lambda: F.nll_loss(matrix(), indices(4)),
    "nll weight": lambda: F.nll_loss(matrix(), indices(4), vector().detach()),
    "nll none": lambda: F.nll_loss(matrix(), indices(4), reduction="none"),
    "nll2d": lambda: F.nll_loss(images(), indices(4, 4, 4)),
    "cross_entropy": lambda: F.cross_entropy(cube(), indices(4, 4)),
    "cross_entropy soft": lambda: F.cross_entropy(matrix(), matrix(), label_smoothing=0.1),
    "kl_div": lambda: F.kl_div(matrix(), matrix().exp(), reduction="batchmean"),
    "mm": lambda: matrix() @ matrix(),
    "mv": lambda: matrix() @ vector(),
    "dot": lambda: vector() @ vector(),
    "bmm": lambda: torch.bmm(cube(), cube()),
    "baddbmm": lambda: torch.baddbmm(cube(), cube(), cube(), beta=2),
    "baddbmm row": lambda: torch.baddbmm(vector(), cube(), cube(), alpha=2),
    "addmm": lambda: torch.addmm(matrix(), matrix(), matrix(), beta=0.5, alpha=3),
    "addmm row": lambda: torch.addmm(vector(), matrix(), matrix()),
    "addmm column": lambda: torch.addmm(randn(4, 1), matrix(), matrix()),
    "addmv": lambda: torch.addmv(vector(), matrix(), vector()),
    "addbmm": lambda: torch.addbmm(matrix(), cube(), cube()),
    "addr": lambda: torch.addr(matrix(), vector(), vector()),
    "linear": lambda: F.linear(cube(), matrix(), vector()),
    "bilinear": lambda: F.bilinear(matrix(), matrix(), cube(), vector()),
    "einsum": lambda: torch.einsum("bij,bkj->ikb", cube(), cube()),
    "attention": lambda: F.scaled_dot_product_attention(*[images() for _ in range(3)]),
    "attention causal": lambda: F.scaled_dot_product_attention(
        *[images() for _ in range(3)], is_causal=True
    ),
    "attention mask": lambda: F.scaled_dot_product_attention(
        images(), images(), images(), matrix()
    ),
    "where": lambda: torch.where(matrix() > 0, cube(), randn(4, 1, 4)),
    "lerp": lambda: torch.lerp(matrix(), vector(), randn(4, 1)),
    "addcmul": lambda: torch.addcmul(cube(), matrix(), vector(), value=2),
    "masked_fill": lambda: cube().masked_fill(matrix() > 0, 1.5),
    "masked_scatter": lambda: matrix().masked_scatter(matrix() > 0, matrix()),
    "masked_select": lambda: matrix()[matrix() > 0],
    "gather": lambda: cube().gather(1, order(4, 4, 4)),
    "gather part": lambda: cube().gather(1, indices(2, 4, 4)),
    "scatter": lambda: cube().scatter(2, order(4, 4, 4), cube()),
    "scatter value": lambda: cube().scatter(2, order(4, 4, 4), 2.0),
    "scatter_add": lambda: matrix().scatter_add(0, indices(4, 4), matrix()),
    "scatter_add part": lambda: matrix().scatter_add(0, indices(2, 4), randn(2, 4)),
    "scatter_reduce": lambda: matrix().scatter_reduce(1, indices(4, 4), matrix(), "mean"),
    "index": lambda: cube()[:, indices(4)],
    "index 2": lambda: cube()[indices(4), :, indices(4)],
    "index 3": lambda: cube()[indices(4, 1), indices(4)],
    "index_put": lambda: cube().index_put((order(4),), matrix()),
    "index_select": lambda: cube().index_select(1, indices(4)),
    "index_add": lambda: cube().index_add(1, indices(4), cube(), alpha=2),
    "index_add flat": lambda: vector().index_add(0, indices(4), vector()),
    "index_copy": lambda: cube().index_copy(2, order(4), cube()),
    "index_fill": lambda: cube().index_fill(1, indices(4)[:2], 2.0),
    "take": lambda: matrix().take(indices(4, 4)),
    "take_along_dim": lambda: matrix().take_along_dim(indices(4, 1), 1),
    "cumsum": lambda: cube().cumsum(1),
    "cumprod": lambda: matrix().cumprod(0),
    "cummax": lambda: matrix().cummax(1).values,
    "logcumsumexp": lambda: matrix().logcumsumexp(0),
    "sort": lambda: cube().sort(1).values,
    "topk": lambda: cube().topk(2, 0).values,
    "max": lambda: cube().max(1).values,
    "median": lambda: matrix().median(0).values,
    "var": lambda: cube().var((0, 2)),
    "norm": lambda: torch.linalg.vector_norm(cube(), dim=1),
    "logsumexp": lambda: cube().logsumexp(1),
    "amax": lambda: cube().amax((0, 1)),
    "prod": lambda: matrix().prod(1),
    "max_pool": lambda: F.max_pool2d(images(), 2),
    "max_pool1d": lambda: F.max_pool1d(cube(), 2),
    "max_pool3d": lambda: F.max_pool3d(images(), 2),
    "max_unpool": lambda: F.max_unpool2d(*F.max_pool2d(cube(), 2, return_indices=True), 2),
    "avg_pool": lambda: F.avg_pool2d(images(), 2),
    "adaptive": lambda: F.adaptive_avg_pool2d(images(), 2),
    "adaptive max": lambda: F.adaptive_max_pool2d(cube(), 2),
    "upsample": lambda: F.interpolate(images(), scale_factor=2),
    "upsample linear": lambda: F.interpolate(cube(), scale_factor=2, mode="linear"),
    "grid_sample": lambda: F.grid_sample(images(), randn(4, 4, 4, 2), align_corners=False),
    "pad": lambda: F.pad(cube(), (1, 1)),
    "pad reflect": lambda: F.pad(cube(), (1, 1), mode="reflect"),
    "glu": lambda: F.glu(cube(), 1),
    "prelu": lambda: F.prelu(cube(), vector()),
    "gelu": lambda: F.gelu(matrix()),
    "silu": lambda: F.silu(matrix()),
    "logsigmoid": lambda: F.logsigmoid(matrix()),
    "dropout": lambda: F.dropout(matrix(), 0.5),
    "cat": lambda: torch.cat([cube(), cube()], 1),
    "stack": lambda: torch.stack([matrix(), matrix()], 1),
    "cdist": lambda: torch.cdist(cube(), cube()),
    "cross": lambda: torch.linalg.cross(randn(4, 3), randn(4, 3), dim=1),
    "solve": lambda: torch.linalg.solve(cube(), cube()),
    "triangular": lambda: torch.linalg.solve_triangular(
        cube().triu() + 4 * torch.eye(4), cube(), upper=True
    ),
    "det": lambda: torch.linalg.det(cube()),
    "inverse": lambda: torch.linalg.inv(cube()),
    "qr": lambda: torch.linalg.qr(cube())[1],
    "tensordot": lambda: torch.tensordot(cube(), cube(), 2),
    "searchsorted": lambda: torch.searchsorted(matrix().sort().values, matrix()),
    "bucketize": lambda: torch.bucketize(matrix(), vector().sort().values),
    "isin": lambda: torch.isin(indices(4, 4), indices(2)),
    "bincount": lambda: torch.bincount(indices(4), vector().detach()),
    "histc": lambda: torch.histc(matrix().detach(), 4, -2, 2),
    "renorm": lambda: torch.renorm(matrix(), 2, 0, 1.0),
    "heaviside": lambda: torch.heaviside(matrix().detach(), vector().detach()),
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
    call = next(call for call in calls_of(masked_norm(wanted)) if call[0] is func)
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
