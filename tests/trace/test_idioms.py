"""Covers: what warnings of untraceable functions and of attributes of JAX's arrays say to write."""

import pytest
import torch
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

X = torch.tensor([[1.0, 2.0, 3.0]] * 4)


def branch(x):
    return x if x[0] > 0 else -x


CASES = {
    "a condition": (branch, "Use torch.where, torch.cond or a static argument"),
    "item": (lambda x: x * x[0].item(), "Use torch.where, torch.cond or a static argument"),
    "an open slice": (lambda x: x[x[0].long() :], r"Use x\[i : i \+ 8\].*torchpmap.dynamic_slice"),
    "a mask": (lambda x: x[x > 0], r"torch.where\(mask, x, 0\) instead of x\[mask\]"),
    "nonzero": (lambda x: x.nonzero(), r"Use torch.where\(mask, x, 0\)"),
    "repeat": (lambda x: x.repeat_interleave(x.long()), "Use output_size= as a Python number"),
    "one_hot": (lambda x: torch.nn.functional.one_hot(x.long()), "Use num_classes as a Python num"),
    "roll": (lambda x: x.roll(x[0].long()), r"Use x\[\(torch.arange\(n\) - shift\) % n\]"),
    "full": (lambda x: torch.full((2,), x[0]), "Use x.expand"),
    "a distribution": (  # torch.compile turns the check off for the rest of the process
        lambda x: torch.distributions.Normal(x, x.exp(), validate_args=True).mean,
        "Use validate_args=False",
    ),
    "equal": (lambda x: x * torch.equal(x, x), r"Use \(x == y\).all\(\)"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_warning_names_the_idiom(name):
    f, text = CASES[name]
    with pytest.warns(UserWarning, match=text):
        tp.pmap(f, compile=EAGER)(X)
    with pytest.raises(tp.TraceError, match=text):
        tp.pmap(f, compile=EAGER, fullgraph=True)(X)


def test_the_idioms_compile():
    def f(x):
        shift = x[0].long()
        return (
            x[(torch.arange(3) - shift) % 3],
            x.repeat_interleave(x.long(), output_size=6),
            x[0].expand(2).clone(),
            torch.zeros(4).scatter_add(0, x.long(), torch.ones(3)),
            x * (x == x).all(),
            x.index_put((torch.tensor([0]),), x[2]),
        )

    want = f(X[0])
    assert torch.equal(want[0], X[0].roll(1))
    for got, expected in zip(tp.pmap(f, compile=EAGER, fullgraph=True)(X), want, strict=True):
        assert torch.equal(got[3].cpu(), expected)


def test_attributes_of_jax(mode):
    with pytest.raises(AttributeError, match=r"no attribute 'at'; torch: x\[k\] = y writes in pla"):
        tp.pmap(lambda x: x.at[0].set(1), compile=mode)(X)
    with pytest.raises(AttributeError, match=r"no attribute 'astype'; torch: x.to\(dtype\)"):
        tp.pmap(lambda x: x.astype(int), compile=mode)(X)
    with pytest.raises(AttributeError, match="object has no attribute 'foo'"):
        tp.pmap(lambda x: x.foo, compile=mode)(X)


def test_a_pair_without_has_aux():
    def loss(x):
        return (x**2).sum(), x

    text = r"Output was \(float32\[\], float32\[3\]\). Did you mean has_aux=True"
    for f in (tp.grad(loss), tp.value_and_grad(loss)):
        with pytest.raises(TypeError, match=text):
            tp.pmap(f, compile=EAGER)(X)
        with pytest.raises(TypeError, match=text):
            f(X[0])
