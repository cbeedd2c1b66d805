"""Covers: _trace/remat.py: torch.utils.checkpoint inside mapped functions, against plain torch."""

from functools import partial
from itertools import accumulate

import pytest
import torch
from _support import EAGER, WAYS
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import torchpmap as tp
from torchpmap._trace.compile import compile_definition
from torchpmap._trace.graphs import SCAN, kind_of_node

pytestmark = [
    pytest.mark.usefixtures("pool"),
    pytest.mark.filterwarnings("error:None of the inputs"),
]

SIZE, LAYERS = 16, 5

remat = partial(checkpoint, use_reentrant=False)


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def keep_products(*_):
    def policy(ctx, op, *args, **kwargs):
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def nested(function, *args):
    return remat(lambda *xs: remat(function, *xs), *args)


CHECKPOINTS = {
    "not reentrant": remat,
    "reentrant": partial(checkpoint, use_reentrant=True),
    "nested": nested,
    "selective": partial(remat, context_fn=keep_products),
    "without states": partial(remat, preserve_rng_state=False),
    "no early stop": partial(remat, early_stop=False),
}


def layer(w, x):
    hidden = torch.relu_((x @ w).sin())  # in place, as in nn.ReLU(inplace=True)
    return x + torch.tanh(hidden) * tp.pmean(hidden, "i")


def model(ws, x, wrap):
    for w in ws.unbind(0):
        x = wrap(layer, w, x)
    return (x**2).sum()


torch.manual_seed(0)
WS = torch.randn(LAYERS, SIZE, SIZE) / 8
X = torch.randn(4, 32, SIZE)


def whole(ws, x):
    f = tp.vmap(lambda ws, x: model(ws, x, plain), (None, 0), axis_name="i")
    value = f(ws, x)
    return value.sum()


@pytest.mark.parametrize("pool", [4, 2], indirect=True)
@pytest.mark.parametrize("wrap", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("way", ["graph", "python", "lanes"])
@pytest.mark.long("nested")
def test_the_same_gradients(wrap, way, pool):
    expected = torch.func.grad(whole, argnums=(0, 1))(WS, X)
    compile, around = WAYS[way]

    def inside(ws, x):
        return tp.grad(lambda ws: model(ws, x, wrap))(ws)

    with around():
        got = tp.pmap(inside, "i", in_axes=(None, 0), compile=compile)(WS, X)
        torch.testing.assert_close(got.cpu().sum(0), expected[0])

        mapped = tp.pmap(lambda ws, x: model(ws, x, wrap), "i", in_axes=(None, 0), compile=compile)
        ws, x = WS.clone().requires_grad_(), X.clone().requires_grad_()
        mapped(ws, x).sum().backward()
        torch.testing.assert_close((ws.grad, x.grad), expected)


TRANSFORMS = {
    "jacfwd": torch.func.jacfwd,
    "jacrev": torch.func.jacrev,
    "hessian": torch.func.hessian,
    "grad of grad": lambda f: torch.func.grad(
        lambda x: torch.func.grad(lambda x: f(x).sum())(x).sin().sum()
    ),
    "vmap": lambda f: (
        lambda x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([x, x + 1]))
    ),
}


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("outside", [True, False], ids=["outside", "inside"])
def test_transforms(transform, outside, pool):
    w, x = WS[0, :3, :3], X[:, :2, :3]

    def row(wrap):
        f = lambda x: torch.tanh(torch.exp(x @ w).sin()) * tp.psum(x, "i")  # noqa: E731
        return lambda x: wrap(f, x).sum(-1)

    mapped, rows = partial(tp.pmap, axis_name="i", compile=EAGER), partial(tp.vmap, axis_name="i")
    ours, theirs = row(remat), row(plain)
    f, g = (
        (transform(mapped(ours)), transform(rows(theirs)))
        if outside
        else (mapped(transform(ours)), rows(transform(theirs)))
    )
    torch.testing.assert_close(f(x).cpu(), g(x), rtol=1e-4, atol=1e-4)


BODIES = {
    "scan": lambda f, x: tp.scan(lambda c, row: (f(c) * row, f(row)), x[0], x),
    "fori_loop": lambda f, x: tp.fori_loop(0, 3, lambda _, c: f(c) + x, x),
    "map": lambda f, x: tp.map(f, x, batch_size=2),
    "cond": lambda f, x: tp.cond(x.sum() > 0, f, torch.neg, x),
    "switch": lambda f, x: tp.switch((x[0, 0] > 0).int(), [torch.neg, f, f], x),
}


@pytest.mark.parametrize("pool", [4, 2], indirect=True)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_in_bodies_of_loops_from_outside(body, reentrant, pool):
    def row(wrap):
        f = lambda x: torch.tanh(x.sin()) * x  # noqa: E731
        return lambda x: sum(y.square().sum() for y in pytree.tree_leaves(body(wrap(f), x)))

    x = X[:, :2, :3]
    ours = tp.pmap(row(lambda f: partial(checkpoint, f, use_reentrant=reentrant)), compile=EAGER)
    got = torch.func.grad(lambda x: ours(x).sum())(x)
    expected = [torch.func.grad(row(lambda f: f))(each) for each in x]
    torch.testing.assert_close(got, torch.stack(expected))


def test_indices_that_only_the_gradient_reads_beside_a_checkpoint(pool):
    w = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def f(x):
        return remat(torch.sin, x), w.topk(2, 0).values * x

    x = torch.randn(2, 2, 3, dtype=torch.float64)
    _, largest = tp.pmap(f, compile=EAGER)(x)
    (got,) = torch.autograd.grad(largest.square().sum(), w)
    (expected,) = torch.autograd.grad(sum(f(row)[1].square().sum() for row in x), w)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("compile", [EAGER, False], ids=["graph", "uncompiled"])
def test_writes_in_place_under_a_jvp_around_the_call(compile):
    def f(x):
        y = x.cos()
        y[0].add_(y[1])
        return y.mul_(x)

    x = X[:, :2, :3]
    mapped = tp.pmap(partial(remat, f), compile=compile)
    got = torch.func.jvp(mapped, (x,), (x.sin(),))
    torch.testing.assert_close(got, torch.func.jvp(torch.func.vmap(f), (x,), (x.sin(),)))


# Random numbers, modules, arguments --------------------------------------------------------------


@pytest.mark.parametrize("pool", [4, 2], indirect=True)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_has_the_same_mask_again(use_reentrant, mode, pool):
    """The derivative of a product with a mask is the mask, wherever the value is not zero."""

    def f(x):
        torch.rand(3)  # the numbers of the checkpoint are not the first
        masked = checkpoint(
            lambda x: nn.functional.dropout(x, 0.5).exp(), x, use_reentrant=use_reentrant
        )
        return masked.sum(), masked

    x = torch.ones(4, 64)
    gradient, masked = tp.pmap(tp.grad(f, has_aux=True), compile=mode)(x)
    expected = torch.where(masked.cpu() > 1.5, 2 * torch.e**2, 0.0)
    torch.testing.assert_close(gradient.cpu(), expected)

    x.requires_grad_()
    masked = tp.pmap(lambda x: f(x)[1], compile=mode)(x)
    masked.sum().backward()
    expected = torch.where(masked.detach().cpu() > 1.5, 2 * torch.e**2, 0.0)
    torch.testing.assert_close(x.grad, expected)


def test_backward_inside(mode):
    def f(x):
        x = x.clone().requires_grad_()
        y = remat(lambda x: nn.functional.dropout(x, 0.5).exp() * tp.psum(x, "i"), x)
        y.sum().backward()
        return x.grad, y.detach()

    x = torch.ones(4, 64)
    gradient, y = tp.pmap(f, "i", compile=mode)(x)
    # y = exp(m x) s, with s = 4 the sum over devices of x; dy/dx = m exp(m x) s + the sum of exp
    dropped = y.cpu() / 4
    expected = torch.where(dropped > 1.5, 2 * y.cpu(), 0.0) + dropped.sum(0)
    torch.testing.assert_close(gradient.cpu(), expected)


def test_modules_and_keyword_arguments(mode):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.ReLU(inplace=True))
    x = torch.randn(4, 5, 3, requires_grad=True)

    def f(x):
        y = checkpoint_sequential(module, 2, x, use_reentrant=False)
        return remat(lambda y, *, scale: (y * scale).sin(), y, scale=torch.tensor(3.0))

    tp.pmap(f, compile=mode)(x).sum().backward()
    got = [x.grad, *(p.grad for p in module.parameters())]
    x.grad = None
    module.zero_grad()
    (module(x) * 3).sin().sum().backward()
    torch.testing.assert_close(got, [x.grad, *(p.grad for p in module.parameters())])


def test_errors_inside_are_the_functions_own_and_torch_is_itself_outside():
    with pytest.raises(KeyError, match="mine"):
        tp.pmap(lambda x: remat(lambda x: {}["mine"], x), compile=EAGER)(torch.ones(4))
    runs = []

    def f(x):
        runs.append(1)
        return x.sin().exp()

    for use_reentrant in (False, True):
        x = torch.ones(3, requires_grad=True)
        checkpoint(f, x, use_reentrant=use_reentrant).sum().backward()
        torch.testing.assert_close(x.grad, x.cos().detach() * x.sin().exp().detach())
    assert len(runs) == 4


def test_a_loop_that_prints_is_not_run_again():
    def layer(w, x):
        def body(carry, _):
            tp.debug.print("{}", carry)
            return torch.sin(carry * w), None

        return tp.scan(body, x, length=3)[0]

    def loops(wrap):
        gradient = tp.grad(lambda w, x: wrap(layer, w, x).sum())
        mapped = tp.pmap(gradient, in_axes=(None, 0), compile=EAGER)
        graph = mapped.lower(torch.tensor(2.0), torch.ones(1, 2)).graph.graph
        return sum(kind_of_node(node) == SCAN for node in graph.nodes)

    assert loops(remat) == loops(plain) == 2  # forward and backward


# Less memory -------------------------------------------------------------------------------------


def residual_bytes(wrap):
    """Bytes per device that the forward plan leaves for the backward plan."""
    mapped = tp.pmap(lambda ws, x: model(ws, x, wrap), "i", in_axes=(None, 0), compile=EAGER)
    ws = WS.clone().requires_grad_()
    mapped(ws, X).sum().backward()
    (differentiable,) = mapped._preparation._differentiables.values()
    ((pair,),) = [differentiable._pairs.values()]
    assert pair is not None
    residuals = pair.backward.definition.inputs[: pair.forward.definition.num_residuals]
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in residuals)


def peak_bytes(wrap):
    f = tp.pmap(tp.grad(lambda ws, x: model(ws, x, wrap)), "i", in_axes=(None, 0), compile=EAGER)
    return f.lower(WS, X).cost().peak_bytes


BLOCK = 32 * SIZE * 4


def test_only_inputs_of_checkpoints_are_kept_and_the_peak_is_lower():
    # the parameters, the input of each layer and of the sum of squares
    assert residual_bytes(remat) <= WS.nbytes + (LAYERS + 1) * BLOCK
    assert residual_bytes(plain) > WS.nbytes + 3 * LAYERS * BLOCK
    assert peak_bytes(remat) <= peak_bytes(plain) - 2 * (LAYERS - 1) * BLOCK


def test_what_a_policy_saves_is_not_computed_again():
    def products(wrap):
        f = tp.pmap(tp.grad(lambda ws, x: model(ws, x, wrap)), "i", in_axes=(None, 0))
        return f.lower(WS, X).as_text().count("aten.mm.default]")

    once = 3 * LAYERS - 1  # values, gradients of weights, of inputs but the first
    assert products(plain) == once
    assert products(remat) == once + LAYERS
    assert products(CHECKPOINTS["selective"]) == once


def compiled_peak(wrap):
    """Most bytes that code of Inductor holds at once, its arguments not counted."""

    def loss(ws, x):
        for w in ws.unbind(0):
            x = wrap(
                lambda w, x: torch.tanh((nn.functional.layer_norm(x, (SIZE,)) @ w).sin()), w, x
            )
        return (x**2).sum()

    ws, x = WS[:3], torch.randn(1, 512, SIZE)
    definition = tp.pmap(tp.grad(loss), in_axes=(None, 0)).lower(ws, x)._plan.definition
    with torch.no_grad():
        run = compile_definition(definition, torch.tensor(0))
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            run([ws, x])
    changes = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(changes, key=lambda e: e.start_ns())))


@pytest.mark.inductor
@pytest.mark.cpu_only("it compiles here what it traces for the devices")
@pytest.mark.parametrize("pool", [1], indirect=True)
def test_the_peak_of_compiled_code_is_lower(pool):
    # by the size of 4 layers in torch 2.13, by 1.2 in 2.11, whose plain code holds less
    assert compiled_peak(remat) <= compiled_peak(plain) - 512 * SIZE * 4
