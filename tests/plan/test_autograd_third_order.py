"""Covers: _plan/autograd.py: derivatives of derivatives of derivatives, against torch's own."""

import pytest
import torch
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

ROWS = "rows"
POLYNOMIALS = {
    "no collective": lambda x: (x**4).sum(),
    "psum": lambda x: tp.psum(x.sin() * x, ROWS).prod() * x.sum(),
    "ppermute": lambda x: (x**3 * tp.ppermute(x, ROWS, [(k, (k + 1) % 4) for k in range(4)])).sum(),
    "all_gather": lambda x: (tp.all_gather(x, ROWS).sin().prod(0) * x).sum(),
    "pmax": lambda x: (tp.pmax(x, ROWS) ** 3 * x.cos()).sum(),
}
JACOBIANS = {"F": torch.func.jacfwd, "R": torch.func.jacrev}


def derivative(word, function):
    """``word``: the transforms from the outside in, G for the gradient of the sum, V for vmap."""
    if not word:
        return function
    inner = derivative(word[1:], function)
    if word[0] == "V":
        return lambda x: torch.func.vmap(inner)(torch.stack([x, x + 0.5]))
    if word[0] == "G":
        return torch.func.grad(lambda x: inner(x).sum())
    return JACOBIANS[word[0]](inner)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("pool", [2], indirect=True)  # two rows per device
@pytest.mark.parametrize("name", POLYNOMIALS)
@pytest.mark.parametrize(
    "word",
    ["FFG", "FRG", "RFG", "RRG", "VFFG", "VFRG", "VRFG", "VRRG", "FFF", "VFFF", "RFF", "GGG"],
)
def test_third_order(word, name, pool):
    row = POLYNOMIALS[name]
    x = torch.tensor([[0.3], [-0.7], [1.1], [0.6]])
    expected = derivative(word, tp.vmap(row, axis_name=ROWS))(x)
    got = derivative(word, tp.pmap(row, ROWS, compile=EAGER))(x)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


LINEAR = {
    "affine": lambda x: x * 2 + 1,
    "constant": lambda x: x * 0 + 1,
    "flipped": lambda x: x.flip(0),
    "expanded sum": lambda x: x.sum().expand(3),
}


@pytest.mark.parametrize("word", ["FRR", "FRF", "FFR", "RFR", "FF"])
@pytest.mark.parametrize("name", LINEAR)
def test_third_order_of_linear_functions_of_vectors(word, name, mode):
    row = LINEAR[name]
    x = torch.tensor([[0.3, 0.1], [-0.7, 0.5]])
    expected = derivative(word, torch.func.vmap(row))(x)
    got = derivative(word, tp.pmap(row, compile=mode))(x)
    torch.testing.assert_close(got.cpu(), expected)
