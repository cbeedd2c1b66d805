"""Covers: _transforms/grad.py."""

import numpy as np
import pytest
import torch

import torchpmap as tp
from torchpmap._transforms.grad import grad, value_and_grad

X = torch.tensor([1.0, 2.0, 3.0])


def product(a, b, scale=1.0):
    return (a * b).sum() * scale


@pytest.mark.parametrize(
    ("argnums", "expected"),
    [
        (0, [4.0, 5.0, 6.0]),
        (1, [1.0, 2.0, 3.0]),
        (-1, [1.0, 2.0, 3.0]),
        ((1, 0), ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])),
        ([0], ([4.0, 5.0, 6.0],)),
    ],
)
def test_argnums(argnums, expected):
    got = torch.utils._pytree.tree_map(torch.Tensor.tolist, grad(product, argnums)(X, X + 3))
    assert got == expected


def test_has_aux():
    def f(x):
        return (x**2).sum(), {"twice": x * 2, "note": "text", "none": None, "count": 3}

    gradient, aux = grad(f, has_aux=True)(X)
    (value, same), again = value_and_grad(f, has_aux=True)(X)
    assert gradient.tolist() == again.tolist() == [2.0, 4.0, 6.0]
    assert value.item() == 14.0
    for found in (aux, same):
        assert found["twice"].tolist() == [2.0, 4.0, 6.0]
        assert not found["twice"].requires_grad
        assert (found["note"], found["none"], found["count"]) == ("text", None, 3)


def test_pytree_arguments_with_empty_leaves():
    gradient = grad(lambda p: p["w"] * p["b"][0])({"b": [torch.tensor(3.0), None], "w": 2.0})
    assert gradient["w"].item() == 3.0
    assert gradient["b"][0].item() == 2.0
    assert gradient["b"][1] is None


def test_complex_gradients_are_those_of_torch():
    """Of the real part u of f(z) = 3i z * z: du/dx + i du/dy, and f'(z) is its conjugate."""
    z = torch.tensor(1 + 2j)
    got = grad(lambda z: (3j * z * z).real)(z)
    assert got.item() == -12 - 6j
    assert got.conj().item() == (6j * z).item()


def test_keyword_arguments_pass_through_and_the_name_is_kept():
    seen = {}

    @grad
    def f(x, *, mode, y):
        """Doc."""
        seen["mode"] = mode
        return (x * y).sum()

    assert f(X, mode="fast", y=X).tolist() == X.tolist()
    assert seen == {"mode": "fast"}
    assert (f.__name__, f.__doc__) == ("f", "Doc.")


def test_python_floats_and_numpy_arrays():
    gradient = grad(lambda x: x**2)(3.0)
    assert (gradient.item(), gradient.dtype) == (6.0, torch.get_default_dtype())
    assert grad(lambda x: 3.0)(X).tolist() == [0.0, 0.0, 0.0]
    gradient = grad(lambda x: (x * x).sum())(np.ones(2))
    assert (gradient.tolist(), gradient.dtype) == ([2.0, 2.0], torch.float64)


ERRORS = [
    (lambda: grad(lambda x: x * 1.0)(3),
     r"grad requires real- or complex-valued inputs .* but got int64\."),
    (lambda: grad(lambda x: x * 1.0)(True), "but got bool"),
    (lambda: grad(lambda x: x.sum())(torch.arange(3)), "but got int64"),
    (lambda: grad(lambda x: x)("text"),
     "grad requires tensors, numpy arrays or Python numbers, but got"),
    (lambda: grad(lambda x: x)(X), r"scalar-output functions\. Output had shape: \(3,\)\."),
    (lambda: grad(lambda x: [x.sum()])(X), r"scalar-output functions\. Output was \["),
    (lambda: grad(lambda x: x.sum() * 1j)(X),
     "grad requires real-valued outputs .* but got complex64"),
    (lambda: grad(lambda x: x.argmax())(X), "grad requires real-valued outputs .* but got int64"),
    (lambda: grad(lambda x: x, argnums=2)(1.0),
     r"argnums=2 requires at least 3 positional arguments to be passed by the caller, but got only "
     r"1 positional arguments\."),
    (lambda: grad(product, argnums=(0, -2))(X, X),
     r"argnums=\[0, -2\] must name each of 2 arguments once"),
    (lambda: grad(lambda x: x, argnums="x"), "cannot be interpreted as an integer"),
    (lambda: grad(lambda x: x.sum(), has_aux=True)(X),
     "expected function with aux output to return a two-element"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), ERRORS)
def test_type_errors(call, text):
    with pytest.raises(TypeError, match=text):
        call()


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("reduce", [lambda v: v, lambda v: tp.pmean(v, "i")], ids=["own", "mean"])
def test_mean_over_gives_the_gradient_of_the_mean(reduce):
    w, x = torch.tensor([1.0, 2.0]), torch.arange(8.0).reshape(4, 2)

    def loss(w, x):
        return reduce((w * x).sum() ** 2), x.sum()

    f = tp.value_and_grad(loss, has_aux=True, mean_over="i")
    mapped = tp.pmap(f, "i", in_axes=(None, 0), out_axes=0, compile={"backend": "eager"})
    (value, aux), gradient = mapped(w, x)
    losses = (x @ w) ** 2
    torch.testing.assert_close(value.cpu(), losses.mean().expand(4))
    torch.testing.assert_close(gradient.cpu(), (2 * (x @ w)[:, None] * x).mean(0).expand(4, 2))
    torch.testing.assert_close(aux.cpu(), x.sum(1))
    with pytest.raises(NameError, match="unbound axis name: i"):
        f(w, x[0])
