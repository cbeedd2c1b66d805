"""Covers: _sharded/rules/compute.py, _sharded/spmd.py: operations whose operands are laid out in
different ways.

Every ATen operation of a function and of its backward pass is run again by itself, with every
operand on the host, whole on every device or cut along any dim.  Almost all dims have 4 elements,
so that no error tells when one is taken for another.
"""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from _sharded_values import functions
from _support import TEST_ALL
from torch.utils._python_dispatch import TorchDispatchMode

import torchpmap as tp
from torchpmap._base.writes import written_values

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

OTHERS = """
    F.layer_norm(cube(), [4, 4], matrix(), matrix()); F.layer_norm(cube(), [4])
    F.rms_norm(cube(), [4], vector()); F.group_norm(cube(), 2, vector(), vector())
    F.batch_norm(cube(), *statistics(), vector(), vector(), True)
    F.batch_norm(cube(), *statistics(), vector(), vector(), False); F.instance_norm(cube())
    cube().softmax(1); cube().log_softmax(-1); F.conv2d(images(), randn(4, 4, 3, 3), vector())
    F.conv1d(cube(), randn(4, 1, 3), vector(), groups=4)
    F.conv1d(matrix(), randn(4, 4, 3), vector())
    F.conv_transpose1d(cube(), randn(4, 4, 3), vector()); F.embedding(indices(4, 4), matrix())
    F.embedding(indices(4, 4), matrix(), padding_idx=1)
    F.embedding(indices(4, 4), matrix(), scale_grad_by_freq=True); F.embedding(indices(4), matrix())
    F.nll_loss(matrix(), indices(4)); F.nll_loss(matrix(), indices(4), vector().detach())
    F.nll_loss(matrix(), indices(4), reduction="none"); F.nll_loss(images(), indices(4, 4, 4))
    F.cross_entropy(cube(), indices(4, 4)); F.cross_entropy(matrix(), matrix(), label_smoothing=0.1)
    F.kl_div(matrix(), matrix().exp(), reduction="batchmean"); matrix() @ matrix()
    matrix() @ vector(); vector() @ vector(); torch.bmm(cube(), cube())
    torch.baddbmm(cube(), cube(), cube(), beta=2); torch.baddbmm(vector(), cube(), cube(), alpha=2)
    torch.addmm(matrix(), matrix(), matrix(), beta=0.5, alpha=3)
    torch.addmm(vector(), matrix(), matrix()); torch.addmm(randn(4, 1), matrix(), matrix())
    torch.addmv(vector(), matrix(), vector()); torch.addbmm(matrix(), cube(), cube())
    torch.addr(matrix(), vector(), vector()); F.linear(cube(), matrix(), vector())
    F.bilinear(matrix(), matrix(), cube(), vector()); torch.einsum("bij,bkj->ikb", cube(), cube())
    F.scaled_dot_product_attention(*[images() for _ in range(3)])
    F.scaled_dot_product_attention(*[images() for _ in range(3)], is_causal=True)
    F.scaled_dot_product_attention(images(), images(), images(), matrix())
    torch.where(matrix() > 0, cube(), randn(4, 1, 4)); torch.lerp(matrix(), vector(), randn(4, 1))
    torch.addcmul(cube(), matrix(), vector(), value=2); cube().masked_fill(matrix() > 0, 1.5)
    matrix().masked_scatter(matrix() > 0, matrix()); matrix()[matrix() > 0]
    cube().gather(1, order(4, 4, 4)); cube().gather(1, indices(2, 4, 4))
    cube().scatter(2, order(4, 4, 4), cube()); cube().scatter(2, order(4, 4, 4), 2.0)
    matrix().scatter_add(0, indices(4, 4), matrix())
    matrix().scatter_add(0, indices(2, 4), randn(2, 4))
    matrix().scatter_reduce(1, indices(4, 4), matrix(), "mean"); cube()[:, indices(4)]
    cube()[indices(4), :, indices(4)]; cube()[indices(4, 1), indices(4)]
    cube().index_put((order(4),), matrix()); cube().index_select(1, indices(4))
    cube().index_add(1, indices(4), cube(), alpha=2); vector().index_add(0, indices(4), vector())
    cube().index_copy(2, order(4), cube()); cube().index_fill(1, indices(4)[:2], 2.0)
    matrix().take(indices(4, 4)); matrix().take_along_dim(indices(4, 1), 1); cube().cumsum(1)
    matrix().cumprod(0); matrix().cummax(1).values; matrix().logcumsumexp(0); cube().sort(1).values
    cube().topk(2, 0).values; cube().max(1).values; matrix().median(0).values; cube().var((0, 2))
    torch.linalg.vector_norm(cube(), dim=1); cube().logsumexp(1); cube().amax((0, 1))
    matrix().prod(1); F.max_pool2d(images(), 2); F.max_pool1d(cube(), 2); F.max_pool3d(images(), 2)
    F.max_unpool2d(*F.max_pool2d(cube(), 2, return_indices=True), 2); F.avg_pool2d(images(), 2)
    F.adaptive_avg_pool2d(images(), 2); F.adaptive_max_pool2d(cube(), 2)
    F.interpolate(images(), scale_factor=2); F.interpolate(cube(), scale_factor=2, mode="linear")
    F.grid_sample(images(), randn(4, 4, 4, 2), align_corners=False); F.pad(cube(), (1, 1))
    F.pad(cube(), (1, 1), mode="reflect"); F.glu(cube(), 1); F.prelu(cube(), vector())
    F.gelu(matrix()); F.silu(matrix()); F.logsigmoid(matrix()); F.dropout(matrix(), 0.5)
    torch.cat([cube(), cube()], 1); torch.stack([matrix(), matrix()], 1)
    torch.cdist(cube(), cube()); torch.linalg.cross(randn(4, 3), randn(4, 3), dim=1)
    torch.linalg.solve(cube(), cube())
    torch.linalg.solve_triangular(cube().triu() + 4 * torch.eye(4), cube(), upper=True)
    torch.linalg.det(cube()); torch.linalg.inv(cube()); torch.linalg.qr(cube())[1]
    torch.tensordot(cube(), cube(), 2); torch.searchsorted(matrix().sort().values, matrix())
    torch.bucketize(matrix(), vector().sort().values); torch.isin(indices(4, 4), indices(2))
    torch.bincount(indices(4), vector().detach()); torch.histc(matrix().detach(), 4, -2, 2)
    torch.renorm(matrix(), 2, 0, 1.0); torch.heaviside(matrix().detach(), vector().detach())
"""
MAKERS = (randn, vector, matrix, cube, images, statistics, indices, order)
CASES = {
    **{f"layer_norm {mask}": masked_norm(mask) for mask in MASKS},
    **{f"conv {mask}": masked(F.conv1d, mask, (4, 4, 4), (4, 4, 3), (4,)) for mask in MASKS},
    **{f"{f.__name__} {how}": loss(f, how) for f in LOSSES for how in REDUCTIONS},
}
CASES |= functions("", OTHERS, **{make.__name__: make for make in MAKERS})


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
    written = {id(x) for x in written_values(func, args, kwargs)}
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
