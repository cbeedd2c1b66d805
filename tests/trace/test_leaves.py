"""Covers: _trace/leaves.py, on CPUs: parameters of a function that is traced for a GPU."""

import pytest
import torch
from _support import EAGER
from torch import nn

import torchpmap as tp
from torchpmap._trace import trace

pytestmark = pytest.mark.usefixtures("pool", "as_on_a_gpu")

X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.5, 1.5], [2.0, 1.0]])


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(trace, "needs_leaves", lambda device: True)


def taken(*parameters):
    """Their gradients, which are taken away."""
    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


def by_backward(loss, parameters, x, **options):
    loss(x).backward(**options)
    return taken(*parameters)


def by_generator(layer, x):
    layer(x).square().sum().backward(inputs=layer.parameters())
    return taken(*layer.parameters())


def after_inference(w, x):
    with torch.inference_mode():
        kept = (w * x).sum()
    ((w * x).sum() - kept.clone() + 1).square().backward()
    return taken(w)


RIGHT = {
    "backward": lambda w, layer, x: by_backward(lambda x: (w * w * x).sum(), [w], x),
    "a module": lambda w, layer, x: by_backward(
        lambda x: layer(x).square().sum(), [*layer.parameters()], x
    ),
    "twice": lambda w, layer, x: [
        *by_backward(lambda x: (w * x).sum(), [w], x),
        *by_backward(lambda x: (w * w * x).sum(), [w], x),
    ],
    "autograd.grad": lambda w, layer, x: [
        *torch.autograd.grad((w.T @ x * w[0]).sum() + w.contiguous().sum(), [w])
    ],
    "a generator of inputs": lambda w, layer, x: by_generator(layer, x),
    "a penalty": lambda w, layer, x: by_backward(
        lambda x: torch.autograd.grad((w * w * x).sum(), w, create_graph=True)[0].square().sum(),
        [w],
        x,
    ),
    "after inference mode": lambda w, layer, x: after_inference(w, x),
    "what it is": lambda w, layer, x: [
        x * (isinstance(w.to(x.dtype), nn.Parameter) + 2 * (w.contiguous() is w)),
        x * len({each.data_ptr() for each in (w, layer.weight)}),
    ],
    "a module moved to where it is": lambda w, layer, x: [layer(x).detach(), w.detach() * x],
}


def made():
    torch.manual_seed(0)
    return nn.Parameter(torch.tensor([2.0, 3.0])), nn.Linear(2, 2)


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
@pytest.mark.parametrize("name", RIGHT)
def test_as_in_plain_torch(name):
    w, layer = made()
    rows = [RIGHT[name](w, layer, x) for x in X]
    found = tp.pmap(lambda x: RIGHT[name](w, layer, x), compile=EAGER, fullgraph=True)(X)
    for mine, right in zip(found, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(mine.cpu(), torch.stack(right))
    assert (w.grad, w.requires_grad, type(w)) == (None, True, nn.Parameter)


def with_a_hook(w):
    w.register_hook(lambda grad: grad * 100)
    return w


REFUSED = {
    "a hook": (with_a_hook, lambda w, v, x: by_backward(lambda x: (w * x).sum(), [w], x)),
    "a view": (lambda w: w.view(2), lambda w, v, x: torch.autograd.grad((v * w * x).sum(), w)),
    "a product": (lambda w: w * 2, lambda w, v, x: torch.autograd.grad((v * x).sum(), v)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_stand_in_cannot_do_raises(name):
    prepare, f = REFUSED[name]
    w, _ = made()
    v = prepare(w)
    with pytest.raises(
        NotImplementedError, match=r"a backward pass inside .* works on CPU devices only"
    ):
        tp.pmap(lambda x: f(w, v, x), compile=EAGER)(X)


def test_a_change_of_requires_grad_is_not_traced():
    w, _ = made()

    def f(x):
        y = (w * x).sum()
        w.requires_grad_(False)
        return y + (w * x).sum()

    with pytest.raises(tp.TraceError, match="it changes requires_grad of a parameter"):
        tp.pmap(f, compile=EAGER, fullgraph=True)(X)
