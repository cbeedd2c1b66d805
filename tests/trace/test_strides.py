"""Covers: _trace/partition.py, compile.py: blocks have the strides that were traced."""

import pytest
import torch
import torch.nn.functional as nnf
from _support import DEVICE, EAGER, TRACED

import torchpmap as tp

pytestmark = [
    pytest.mark.usefixtures("pool"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]

torch.manual_seed(0)
SQUARE, KERNEL = torch.randn(8, 8) / 3, torch.randn(6, 6, 3) / 5
FILTER = torch.randn(4, 4, 3, 3) / 5


def heads(x):
    return x.view(4, 6, 2, 4).transpose(1, 2)


# of a row of shape (4, 6, 8), to another
STEPS = {
    "attention by einsum": lambda x: torch.einsum(
        "qhk,khd->qhd", torch.einsum("qhd,khd->qhk", x, x).exp().clamp(max=3), x
    ),
    "attention": lambda x: (
        nnf.scaled_dot_product_attention(heads(x), heads(x), heads(x))
        .transpose(1, 2)
        .reshape(x.shape)
    ),
    "convolution of images": lambda x: nnf.conv2d(x[None], FILTER, padding=1)[0].sin(),
    "transposed reshape": lambda x: (
        x.transpose(0, 2).reshape(6, 4, 8).transpose(0, 1).contiguous().view(4, 6, 8)
    ),
    "last": lambda x: x * x.sin()[:, -1:].cos(),
    "as_strided": lambda x: x.sin().contiguous().as_strided((4, 6, 8), (1, 32, 4)) * x.cos(),
    "batch norm": lambda x: (
        nnf.batch_norm(x.transpose(0, 2), None, None, training=True)
        .view(8, 24)
        .sin()
        .t()
        .reshape(6, 4, 8)
        .transpose(0, 1)
    ),
    "written in place": lambda x: x.clone().transpose(0, 1).mul_(2).transpose(0, 1).add_(x).sin(),
    "psum": lambda x: x * tp.psum(x.transpose(0, 1), "i").transpose(0, 1).sin(),
}


def chain(names):
    def function(x):
        for name in names:
            x = STEPS[name](x)
        return x

    return function


def check(names, compile, *, inside=False):
    generator = torch.Generator().manual_seed(1)
    x, weights = (torch.randn(4, 4, 6, 8, generator=generator) / 2 for _ in range(2))
    f = chain(names)
    mapped = tp.pmap(f, "i", compile=compile)
    value, pull = torch.func.vjp(mapped, x.transpose(1, 3).contiguous().transpose(1, 3))
    expected, pull_expected = torch.func.vjp(tp.vmap(f, axis_name="i"), x)
    close = {"atol": 1e-3, "rtol": 1e-3}
    torch.testing.assert_close(value.cpu(), expected, **close)
    torch.testing.assert_close(pull(weights)[0].cpu(), pull_expected(weights)[0], **close)
    assert all(
        pair is not None
        for differentiable in mapped._preparation._differentiables.values()
        for pair in differentiable._pairs.values()
    )
    if inside:
        gradient = tp.pmap(
            lambda x, w: tp.grad(lambda x: (f(x) * w).sum())(x), "i", compile=compile
        )
        torch.testing.assert_close(gradient(x, weights).cpu(), pull_expected(weights)[0], **close)


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize("name", STEPS)
def test_operations(name, pool):
    if DEVICE != "cpu" and name == "attention":
        pytest.skip("plain torch.func raises as well: 'LSE is not correctly aligned', torch 2.11")
    check([name], EAGER, inside=True)


@pytest.mark.inductor
@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize("name", ["attention by einsum", "convolution of images", "last"])
def test_compiled(name, pool):
    check([name], True)


@torch.library.custom_op("strides::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t() * 2


turned.register_fake(torch.empty_like)


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize("compile", TRACED)
@pytest.mark.parametrize(
    "function",
    [
        # torch 2.13: the fake copysign has the strides of the second operand, not of the first
        lambda x: torch.copysign(x.t(), x.t().contiguous()),
        lambda x: torch.copysign(x.t(), x.t().contiguous()).view(-1).view(3, 4),
        lambda x: turned(x),
        lambda x: turned(x).view(-1),
    ],
    ids=["copysign", "and views of it", "of the user's", "and a view of it"],
)
def test_what_is_stored_is_contiguous(function, compile, pool):
    x = torch.randn(2, 4, 3)
    stored = tp.pmap(function, compile=EAGER)(x)
    read = tp.pmap(lambda y: y + 1, compile=compile)(stored)
    expected = {2: x * 2, 1: (x * 2).flatten(1)}.get(stored.dim() - 1)
    torch.testing.assert_close(read.cpu(), 1 + (x.mT if stored.shape == (2, 3, 4) else expected))
