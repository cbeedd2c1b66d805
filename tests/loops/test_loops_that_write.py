"""Covers: _loops/writes.py: bodies and branches that write in place to what they get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _plain import GRAPH, check
from torch.func import grad, vmap

import torchpmap as tp

X = torch.tensor([[2.0, -1.0, 2.5], [0.5, 20.0, -0.1]])


def everywhere(program: Any, x: torch.Tensor, expected: Any) -> None:
    check(program(x.clone()), expected)
    for mode in (GRAPH, False):
        mapped = tp.pmap(program, in_axes=None, out_axes=None, axis_size=1, compile=mode)
        check(mapped(x), expected)
    with tp.debug.fake_pmap():
        mapped = tp.pmap(program, in_axes=None, out_axes=None, axis_size=1)
        check(mapped(x), expected)


def test_an_output_that_is_the_carry_stays_as_it_was() -> None:
    def program(x: Any) -> Any:
        def step(c: Any, t: Any) -> Any:
            c += t
            return c, c

        return *tp.scan(step, x, torch.arange(3.0)), x

    everywhere(program, X, (X + 3, torch.stack([X, X + 1, X + 3]), X))


def test_the_first_carry_stays_as_it_was_beside_a_number() -> None:
    def program(x: Any) -> Any:
        return tp.scan(lambda c, _: ((c[0].mul_(2), c[1] + 1), None), (x, 0), length=3)[0], x

    everywhere(program, X, ((X * 8, torch.tensor(3)), X))


def test_rows_stay_as_they_were() -> None:
    def program(x: Any) -> Any:
        xs = x * 1

        def loss(xs: Any) -> Any:
            return tp.scan(lambda c, row: (c + row.mul_(2).sum(), None), xs.sum() * 0, xs)[0]

        return loss(xs), grad(loss)(xs), xs

    everywhere(program, X, (2 * X.sum(), torch.full_like(X, 2), X))


def test_rows_of_a_vmap_that_are_done_keep_their_value() -> None:
    def program(x: Any) -> Any:
        def double(v: Any) -> Any:
            return tp.while_loop(lambda c: c.abs() < 10, lambda c: c.mul_(2), v)

        return vmap(vmap(double))(x)

    steps = torch.log2(10 / X.abs()).ceil().clamp(0)
    everywhere(program, X, X * 2**steps)


def branches(x: Any) -> Any:
    return tp.cond(x.sum() > 10, lambda y: y.mul_(3) * y, lambda y: y.add_(1) * 5, x)


EXPECTED = torch.stack([5 * (X[0] + 1), 9 * X[1] ** 2])
GRADIENT = torch.stack([torch.full_like(X[0], 5), 18 * X[1]])


def test_branches() -> None:
    everywhere(
        lambda x: [(branches(row * 1), row) for row in x], X, list(zip(EXPECTED, X, strict=True))
    )


def test_branches_of_a_predicate_that_differs_by_row() -> None:
    """Both run: the second must not see what the first has written."""
    everywhere(vmap(branches), X, EXPECTED)


def test_gradients_of_branches() -> None:
    def each(row: Any) -> Any:
        return grad(lambda row: branches(row).sum())(row)

    everywhere(vmap(each), X, GRADIENT)
    everywhere(lambda x: torch.stack([each(row) for row in x]), X, GRADIENT)


@pytest.mark.parametrize("mode", [GRAPH, False])
def test_branches_on_devices(mode: Any) -> None:
    check(tp.pmap(branches, compile=mode)(X), EXPECTED)
    with tp.debug.fake_pmap():
        check(tp.pmap(branches)(X), EXPECTED)
