"""Random small programs of collectives over random trees and axes, against whole-array torch.

Covers: pmap on the workers and in the calling process, values and gradients from outside.

The model of a program works on all rows at once, with sums, rolls and indexing along dim 0, and
knows nothing of devices or axes.
"""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

EAGER = {"backend": "eager"}
AXIS = "i"
Op = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]


def halves(n: int) -> list[list[int]]:
    return [list(range(0, n, 2)), list(range(1, n, 2))] if n > 1 else [[0]]


def per_group(rows: torch.Tensor, take: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    out = list(rows)
    for members in halves(len(rows)):
        for member in members:
            out[member] = take(rows[members])
    return torch.stack(out)


def operations(n: int) -> dict[str, Op]:
    """Name -> (what a row does, what happens to all rows)."""
    ring = [(k, (k + 1) % n) for k in range(n)]
    line = ring[:-1]
    groups = halves(n)
    return {
        "sin": (torch.sin, torch.sin),
        "psum": (lambda x: tp.psum(x, AXIS), lambda r: r.sum(0, keepdim=True).expand_as(r)),
        "pmean": (lambda x: x - tp.pmean(x, AXIS), lambda r: r - r.mean(0, keepdim=True)),
        "pmax": (lambda x: x * tp.pmax(x, AXIS), lambda r: r * r.amax(0, keepdim=True)),
        "ring": (lambda x: x + tp.ppermute(x, AXIS, ring), lambda r: r + r.roll(1, 0)),
        "line": (lambda x: x * 2 + tp.ppermute(x, AXIS, line),
            lambda r: r * 2 + torch.cat([torch.zeros_like(r[:1]), r[:-1]])),
        "gather": (lambda x: x * tp.all_gather(x, AXIS).cos().sum(0),
            lambda r: r * r.cos().sum(0, keepdim=True)),
        "groups": (lambda x: tp.psum(x, AXIS, axis_index_groups=groups) - x,
            lambda r: per_group(r, lambda rows: rows.sum(0)) - r),
        "index": (lambda x: x * (1 + tp.axis_index(AXIS)),
            lambda r: r * torch.arange(1, n + 1).view(-1, *(1,) * (r.dim() - 1))),
        "scatter": (lambda x: tp.psum_scatter(torch.stack([x * k for k in range(n)]), AXIS),
            lambda r: torch.stack([r.sum(0) * k for k in range(n)])),
    }  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[str], list[tuple[int, ...]], list[int], str]:
    n = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    names = draw(st.lists(st.sampled_from(sorted(operations(n))), min_size=1, max_size=3))
    shapes = draw(st.lists(st.sampled_from([(), (2,), (3, 2)]), min_size=1, max_size=3))
    axes = [draw(st.integers(-len(shape) - 1, len(shape))) for shape in shapes]
    return n, names, shapes, axes, draw(st.sampled_from(["list", "tuple", "dict"]))


def tree_of(kind: str, leaves: list[Any]) -> Any:
    if kind == "dict":
        return {f"k{k}": leaf for k, leaf in enumerate(leaves)}
    return list(leaves) if kind == "list" else tuple(leaves)


def leaves_of(tree: Any) -> list[Any]:
    return list(tree.values()) if isinstance(tree, dict) else list(tree)


@pytest.mark.parametrize("where", ["workers", "here"])
@settings(max_examples=20)
@given(program=programs())
def test_programs(where: str, program: Any) -> None:
    n, names, shapes, axes, kind = program
    table = operations(n)
    torch.manual_seed(0)
    stacked = [torch.randn(n, *shape, dtype=torch.float64) for shape in shapes]
    given_leaves = [x.movedim(0, axis) for x, axis in zip(stacked, axes, strict=True)]

    def row(tree: Any) -> Any:
        leaves = leaves_of(tree)
        for name in names:
            leaves = [table[name][0](leaf) for leaf in leaves]
        return tree_of(kind, leaves)

    def whole(*leaves: torch.Tensor) -> list[torch.Tensor]:
        outputs = []
        for leaf, axis in zip(leaves, axes, strict=True):
            rows = leaf.movedim(axis, 0)
            for name in names:
                rows = table[name][1](rows)
            outputs.append(rows.movedim(0, axis))
        return outputs

    specs = tree_of(kind, axes)
    mapped = tp.pmap(row, AXIS, in_axes=(specs,), out_axes=specs, compile=EAGER)

    def loss(function: Callable[..., Any], *leaves: torch.Tensor) -> torch.Tensor:
        return torch.stack([(out.cos() * out).sum() for out in function(*leaves)]).sum()

    def through(*leaves: torch.Tensor) -> list[torch.Tensor]:
        return leaves_of(mapped(tree_of(kind, list(leaves))))

    with tp.debug.fake_pmap() if where == "here" else torch.enable_grad():
        got = through(*given_leaves)
        positions = tuple(range(len(shapes)))
        gradients = torch.func.grad(lambda *xs: loss(through, *xs), positions)(*given_leaves)
    expected = torch.func.grad(lambda *xs: loss(whole, *xs), positions)(*given_leaves)
    for value, wanted in zip(got, whole(*given_leaves), strict=True):
        torch.testing.assert_close(value.cpu(), wanted)
    for value, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(value, wanted)
