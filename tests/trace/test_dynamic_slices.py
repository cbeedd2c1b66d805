"""Covers: ``dynamic_slice`` and relatives.  The expected values are those of JAX (0.10.2)."""

import itertools

import numpy as np
import pytest
import torch
from _support import EAGER, check_rows, close

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

# start -> (first element of a part of 3, first place of an update of 2) in 10 elements, by JAX
STARTS = {
    -20: (0, 0),
    -11: (0, 0),
    -10: (0, 0),
    -3: (7, 7),
    -1: (7, 8),
    0: (0, 0),
    5: (5, 5),
    8: (7, 8),
    20: (7, 8),
}
X = torch.arange(10.0)
UPDATE = tp.dynamic_update_slice


def updated(x, first, value):
    x = x.clone()
    x[first : first + len(value)] = value
    return x


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", [int, torch.tensor, np.int32, "int16"])
def test_starts(start, kind):
    given = torch.tensor(start, dtype=torch.int16) if kind == "int16" else kind(start)
    first, place = STARTS[start]
    assert torch.equal(tp.dynamic_slice(X, (given,), (3,)), X[first : first + 3])
    assert torch.equal(tp.dynamic_slice_in_dim(X, given, 3, axis=-1), X[first : first + 3])
    ones = -torch.ones(2)
    assert torch.equal(tp.dynamic_update_slice(X, ones, (given,)), updated(X, place, ones))
    assert torch.equal(tp.dynamic_update_slice_in_dim(X, ones, given, 0), updated(X, place, ones))


def test_in_mapped_functions():
    def f(x, i):
        return tp.dynamic_slice(x, (i,), (3,)), tp.dynamic_update_slice(x, x[:2] * 0 - 1, (i,))

    def expected(x, i):
        first, place = STARTS[int(i)]
        return x[first : first + 3], updated(x, place, -torch.ones(2))

    starts = torch.tensor([-20, -3, -1, 0, 5, 8, 20, -11])
    check_rows(f, torch.arange(80.0).reshape(8, 10), starts, expected=expected)


def reference(x, i, j):
    """Of ``slices`` below, with starts that are in range."""
    i, j = int(i), int(j)
    part = x[i : i + 2, j : j + 3]
    mask = torch.zeros_like(x)
    mask[i : i + 2, j : j + 3] = 1
    padded = torch.nn.functional.pad(part * part, (j, 2 - j, i, 2 - i))
    return part, x * (1 - mask) + padded, x[i], part.sum()


def slices(x, i, j):
    part = tp.dynamic_slice(x, (i, j), (2, 3))
    whole = tp.dynamic_update_slice(x, part * part, torch.stack([i, j]))
    return part, whole, tp.dynamic_index_in_dim(x, i, keepdims=False), part.sum()


M = torch.arange(80.0).reshape(4, 4, 5) / 10
I, J = torch.tensor([0, 1, 2, 0]), torch.tensor([2, 1, 0, 1])  # noqa: E741


def loss(f):
    return lambda x, i, j: sum((leaf**3).sum() for leaf in f(x, i, j))


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, lambda f: torch.func.grad(loss(f)), lambda f: torch.func.hessian(loss(f))],
)
def test_several_dims_and_derivatives(transform):
    check_rows(transform(slices), M, I, J, expected=transform(reference))


def update(x, values, start):
    return (tp.dynamic_update_slice(x, values, (start,)),)


def updated_row(x, values, start):
    return (updated(x, {0: 0, 2: 2, 9: 7, -3: 7}[int(start)], values),)


IN_DIMS = [(0, 0, 0), (None, 0, None), (0, None, 0), (None, None, 0)]
STACKS = {
    slices: (reference, M, I, J),
    update: (
        updated_row,
        torch.stack([X + k for k in range(4)]),
        -torch.arange(1.0, 13.0).reshape(4, 3),
        torch.tensor([0, 2, 9, -3]),
    ),
}


@pytest.mark.parametrize(("f", "in_dims"), [*itertools.product(STACKS, IN_DIMS)])
def test_vmaps(f, in_dims):
    expected, *stacks = STACKS[f]
    dims = list(zip(stacks, in_dims, strict=True))
    rows = [[v[k] if dim == 0 else v[0] for v, dim in dims] for k in range(4)]
    given = [v if dim == 0 else v[0] for v, dim in dims]
    want = [torch.stack(each) for each in zip(*(expected(*row) for row in rows), strict=True)]
    plain = torch.func.vmap(f, in_dims)
    for got in (
        plain(*given),
        [v[0] for v in tp.pmap(plain, compile=EAGER)(*(v[None] for v in given))],
        [v[5] for v in tp.pmap(plain, compile=EAGER)(*(torch.stack([v] * 8) for v in given))],
    ):
        close(got, want)


def test_in_a_loop():
    def f(x):
        def body(i, y):
            part = tp.dynamic_slice_in_dim(y, i, 2)
            return tp.dynamic_update_slice_in_dim(y, part * 2, i + 1, 0)

        return tp.fori_loop(0, 6, body, x)

    want = X.clone()
    for i in range(6):
        want[i + 1 : i + 3] = want[i : i + 2].clone() * 2
    got = tp.pmap(f, in_axes=None, axis_size=4, out_axes=None, compile=EAGER)(X)
    assert torch.equal(got.cpu(), want)


def test_other_forms():
    x = torch.arange(6).reshape(2, 3)
    assert tp.dynamic_index_in_dim(x, 7).tolist() == [[3, 4, 5]]
    assert tp.dynamic_index_in_dim(x, torch.tensor(-1), 1, keepdims=False).tolist() == [2, 5]
    assert tp.dynamic_slice(x, torch.tensor([1, 1], dtype=torch.uint8), (1, 2)).tolist() == [[4, 5]]
    assert tp.dynamic_slice(x, [0, 0], [2, 0]).shape == (2, 0)
    assert tp.dynamic_slice(torch.tensor(3), (), ()).item() == 3
    new = tp.dynamic_slice(X, (0,), (10,)), tp.dynamic_slice(X, (2,), (3,)), UPDATE(X, X, (3,))
    for result in new:
        result.zero_()
    assert X.sum() == 45


TYPE_ERRORS = {
    r"between 0 and .* \[10\], but are \[11": lambda: tp.dynamic_slice(X, (1,), (11,)),
    "between 0 and the shape of operand": lambda: tp.dynamic_slice(X, (1,), (-1,)),
    r"start_indices\[0\] .* is 1.5": lambda: tp.dynamic_slice(X, (1.5,), (1,)),
    r"start_indices\[0\] .* is True": lambda: tp.dynamic_slice(X, (True,), (1,)),
    r"a tensor of shape \[1\], ": lambda: tp.dynamic_slice(X, torch.tensor(1), (1,)),
    r"integer tensor .* float32\[1\]": lambda: tp.dynamic_slice(X, (X[:1],), (1,)),
    "operand must be a tensor": lambda: tp.dynamic_slice([1.0], (0,), (1,)),
    "as many dims": lambda: UPDATE(X, X[:2, None], (0,)),
    "none of them larger": lambda: UPDATE(X, torch.ones(11), (0,)),
    "the same dtype": lambda: UPDATE(X, X[:2].int(), (0,)),
}
OTHER_ERRORS = {
    "for each of the 1 dims .* has 2": (lambda: tp.dynamic_slice(X, (1, 2), (3,)), ValueError),
    "slice_sizes must have a size for": (lambda: tp.dynamic_slice(X, (1,), (3, 1)), ValueError),
    "start_indices must have": (lambda: UPDATE(X, X[:2], (0, 1)), ValueError),
    "axis is 1, but operand has": (lambda: tp.dynamic_slice_in_dim(X, 3, 2, axis=1), IndexError),
}
ERRORS = OTHER_ERRORS | {text: (call, TypeError) for text, call in TYPE_ERRORS.items()}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    call, error = ERRORS[message]
    with pytest.raises(error, match=message):
        call()
