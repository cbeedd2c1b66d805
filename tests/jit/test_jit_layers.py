"""Covers: layers whose rows and channels are independent keep them where they are, in both passes.

What is right is what plain torch gives for the whole values.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from _support import EAGER, autocast, close, gradients
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchpmap as tp
from torchpmap import P

pytestmark = pytest.mark.usefixtures("pool")

LINES, PICTURES, VOLUMES = (4, 4, 6), (4, 4, 6, 6), (4, 4, 4, 4, 4)
LAYERS = {
    "avg_pool1d": (LINES, lambda x: F.avg_pool1d(x, 2)),
    "max_pool1d": (LINES, lambda x: F.max_pool1d(x, 2)),
    "reflection_pad1d": (LINES, lambda x: F.pad(x, (1, 1), "reflect")),
    "replication_pad1d": (LINES, lambda x: F.pad(x, (1, 1), "replicate")),
    "nearest1d": (LINES, lambda x: F.interpolate(x, scale_factor=2)),
    "linear1d": (LINES, lambda x: F.interpolate(x, size=9, mode="linear")),
    "nearest2d": (PICTURES, lambda x: F.interpolate(x, scale_factor=2)),
    "nearest_exact2d": (PICTURES, lambda x: F.interpolate(x, size=5, mode="nearest-exact")),
    "bilinear2d": (PICTURES, lambda x: F.interpolate(x, size=9, mode="bilinear")),
    "bicubic2d": (PICTURES, lambda x: F.interpolate(x, size=9, mode="bicubic")),
    "bilinear2d_aa": (
        PICTURES,
        lambda x: F.interpolate(x, size=4, mode="bilinear", antialias=True),
    ),
    "pixel_shuffle": (PICTURES, lambda x: F.pixel_shuffle(x, 2)),
    "pixel_unshuffle": (PICTURES, lambda x: F.pixel_unshuffle(x, 2)),
    "unfold": (PICTURES, lambda x: F.unfold(x, 3, padding=1)),
    "fold": ((4, 12, 9), lambda x: F.fold(x, 4, 2)),
    "grid_sample": (
        PICTURES,
        lambda x: F.grid_sample(x, x.tanh().view(4, 3, 24, 2), align_corners=False),
    ),
    "avg_pool3d": (VOLUMES, lambda x: F.avg_pool3d(x, 2)),
    "max_pool3d": (VOLUMES, lambda x: F.max_pool3d(x, 2)),
    "adaptive_avg_pool3d": (VOLUMES, lambda x: F.adaptive_avg_pool3d(x, 2)),
    "adaptive_max_pool3d": (VOLUMES, lambda x: F.adaptive_max_pool3d(x, 2)),
    "reflection_pad3d": (VOLUMES, lambda x: F.pad(x, (1,) * 6, "reflect")),
    "replication_pad3d": (VOLUMES, lambda x: F.pad(x, (1,) * 6, "replicate")),
    "nearest3d": (VOLUMES, lambda x: F.interpolate(x, scale_factor=2)),
    "trilinear3d": (VOLUMES, lambda x: F.interpolate(x, size=5, mode="trilinear")),
}
ROWS_ONLY = {"pixel_shuffle", "pixel_unshuffle", "unfold", "fold", "grid_sample"}
"""Their channels are not independent, or their rule does not say so."""


def both(layer):
    """(x, weights of the result) -> the result and a gradient."""

    def f(x, w):
        x = x.detach().requires_grad_()
        y = layer(x)
        (y * w).sum().backward()
        return y.detach(), x.grad

    return f


@pytest.mark.parametrize("name", LAYERS)
def test_rows_and_channels_stay_where_they_are(name):
    shape, layer = LAYERS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    w = torch.randn(layer(x).shape, generator=generator, dtype=torch.float64)
    expected = both(layer)(x, w)
    mesh = tp.make_mesh((2, 2), ("x", "y"))
    spec = P("x") if name in ROWS_ONLY else P("x", "y")
    there = [tp.device_put(value, tp.NamedSharding(mesh, spec)) for value in (x, w)]
    step = tp.jit(both(layer), compile=EAGER, fullgraph=True)
    assert not step.lower(*there).resharded
    close(step(*there), expected, atol=1e-12, rtol=0)


NORMS = {"layer": nn.LayerNorm(6), "group": nn.GroupNorm(2, 4), "batch": nn.BatchNorm1d(4)}


@pytest.mark.cpu_only("norms of GPUs want weights in the dtype of the values")
@pytest.mark.parametrize("kind", NORMS)
def test_norms_under_autocast_stay_where_they_are(kind):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), copy.deepcopy(NORMS[kind]), nn.GELU(), nn.Linear(6, 6))
    model = tp.replicate(copy.deepcopy(plain))
    x = torch.randn(8, 4, 6)

    def step_of(model):
        def step(x):
            model.zero_grad()
            with autocast(torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            return loss.detach()

        return step

    step, there = tp.jit(step_of(model), compile=EAGER, fullgraph=True), tp.shard_batch(x)
    torch.testing.assert_close(step(there).cpu(), step_of(plain)(x), atol=1e-3, rtol=1e-3)
    close(gradients(model), gradients(plain), atol=2e-3, rtol=2e-2)
    assert not step.lower(there).resharded


HEADS_CUT = {"out_proj.weight": P(None, "y")}
TOKENS_FIRST = {
    "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
}
"""Modules that put tokens before rows, and then flatten both."""
TOKENS = [(name, spec, {}) for name in TOKENS_FIRST for spec in (P("x"), P("x", "y"), P())]
TOKENS.append(("attention", P("x"), HEADS_CUT))
"""Modules that put tokens before rows, and then flatten both."""


@pytest.mark.parametrize(("name", "spec", "specs"), TOKENS)
def test_rows_that_are_flattened_after_tokens_stay_where_they_are(name, spec, specs):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(8, 6, 8, generator=generator, dtype=torch.float64)
    mesh = tp.make_mesh((2, 2), ("x", "y"))
    torch.manual_seed(1)
    plain = TOKENS_FIRST[name]().double()
    model = tp.shard_module(copy.deepcopy(plain), specs, mesh)

    def step_of(model):
        def f(x):
            model.zero_grad()
            y = model(x, x, x, need_weights=False)[0] if name == "attention" else model(x)
            loss = y.sin().mean() + y.abs().amax(0).mean()
            loss.backward()
            return loss.detach()

        return f

    step = tp.jit(step_of(model), compile=EAGER, fullgraph=True)
    x = tp.device_put(data, tp.NamedSharding(mesh, spec))
    torch.testing.assert_close(step(x).cpu(), step_of(plain)(data), atol=1e-12, rtol=0)
    close(gradients(model), gradients(plain), atol=1e-12, rtol=1e-9)
    if spec == P("x") and not specs:
        assert not step.lower(x).resharded


def attention_by_plain_operations(x):
    """As GPUs compute it in float64."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True)


W, V = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
MASK = torch.arange(24.0, dtype=torch.float64)[:, None]
FLATTENED = {
    # of [4, 6, 6], cut along the second dim: [24, 6]
    "products": lambda x: (x.view(24, 6) @ W).relu().mul(2).add(V[0]).matmul(V).view(4, 6, 6),
    "with a bias": lambda x: torch.addmm(V[0], x.view(24, 6), W).view(4, 6, 2, 3),
    "second": lambda x: (W @ x.view(24, 6).t()).t().view(4, 6, 6),
    "sums": lambda x: [(lambda y: [y.t() @ y, y.sum(0), y.sum(0, keepdim=True)])(x.view(24, 6))],
    "the rest too": lambda x: (x.view(4, 6, 2, 3).flatten(2).flatten(0, 1) @ W).view(4, 6, 6),
    "matrices": lambda x: (lambda y: (y @ y.transpose(1, 2)).relu() @ y)(x.view(24, 2, 3)).view(
        4, 6, 6
    ),
    "attention": lambda x: attention_by_plain_operations(x.view(4, 6, 2, 3)),
    "along the other dims": lambda x: (
        (x.view(24, 6).softmax(1) @ W).unsqueeze(1).cumsum(2).view(4, 6, 6)
    ),
    "a result": lambda x: x.view(24, 6),
    "a result of a product": lambda x: x.view(24, 6) @ W,
    "a loop": lambda x: tp.scan(lambda c, _: (c @ W / 4, c), x.view(24, 6), None, length=2)[0],
    "the order matters": lambda x: [
        *(lambda y: [y.cumsum(0), y[3:9], y.flip(0), y.softmax(1), y, y.t()])(x.view(24, 6) @ W),
        (x.view(24, 6) @ W * MASK).view(4, 6, 6),
        torch.addmm(MASK, x.view(24, 6), W).view(4, 6, 6),
        torch.addmm(MASK[:, 0], W, x.view(24, 6).t()).t().view(4, 6, 6),
        torch.addmm(x.view(24, 6) @ W, x.new_ones(24, 6), V).view(4, 6, 6),
        (x.view(24, 6) @ W).view(6, 4, 6),
        (x.view(24, 6) @ W).sort(0)[0],
        (x.view(24, 6) @ W).tril().roll(1, 0),
        x.view(24, 6).gather(0, x.detach().view(24, 6).long().abs()),
        x.view(24, 6).slice_scatter(x[0, :2], 0, 2, 4),
        x.view(24, 6).where(MASK > 7, 0.0).view(4, 6, 6),
        x.view(24, 6).sin().view(144).roll(1).view(4, 6, 6),
        (x.view(24, 6) @ W).view(8, 3, 6),
        x.view(24, 6).t() @ x.transpose(0, 1).reshape(24, 6),
        x.view(24, 6) @ W + x.transpose(0, 1).reshape(24, 6),
        (x.view(24, 6) @ W).sum(),
        (x.view(24, 6) @ W).sum(None),
        torch.sum(x.view(24, 6), dim=None),
        torch.frexp(x.detach().view(24, 6))[0].view(4, 6, 6) * x,
        (x.sum(2).view(24).t() * 2).t().view(4, 6),
        x[:1].view(6, 6).t() @ x[0],
        (x.view(24, 2, 3) @ x.transpose(0, 1).reshape(24, 3, 2)).view(4, 6, 2, 2),
        (x.view(24, 2, 3) @ MASK.view(24, 1, 1).expand(24, 3, 2)).view(4, 6, 2, 2),
        (lambda y: (y @ y.transpose(1, 2))[0])(x.view(24, 2, 3).transpose(0, 1)),
        (lambda y: y.mT @ y)(x.view(24, 2, 3).permute(2, 0, 1))[1],
        torch.baddbmm(MASK.view(24, 1, 1), x.view(24, 2, 3), x.view(24, 3, 2)).view(4, 6, 2, 2),
        (x.view(24, 2, 3) @ x.view(24, 2, 3).mT).sum(0),
    ],
}
STAYS = {"products", "with a bias", "second", "the rest too", "matrices", "attention"}
STAYS |= {"along the other dims"}


@pytest.mark.parametrize("spec", [P(None, "x"), P("y", "x"), P("x", None, "y")])
@pytest.mark.parametrize("name", FLATTENED)
def test_rows_may_be_in_any_order_where_it_does_not_matter(name, spec):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(4, 6, 6, generator=generator, dtype=torch.float64)
    mesh = tp.make_mesh((2, 2), ("x", "y"))

    def f(x):
        x = x.detach().requires_grad_()
        results = torch.utils._pytree.tree_leaves(FLATTENED[name](x))
        sum(y.sin().sum() for y in results).backward()
        return [*(y.detach() for y in results), x.grad]

    x = tp.device_put(data, tp.NamedSharding(mesh, spec))
    g = tp.jit(f, compile=EAGER, fullgraph=True)
    close(g(x), f(data), atol=1e-11, rtol=1e-12)
    if name in STAYS and spec == P(None, "x"):
        assert not g.lower(x).resharded
