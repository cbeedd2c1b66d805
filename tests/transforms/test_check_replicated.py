"""Covers: ``pmap(check_replicated=True)`` compares only what tracing does not prove to be equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

W = torch.tensor([2.0, 3.0])


def checked(f: Callable[..., Any], compile: Any = EAGER, **options: Any) -> Any:
    return tp.pmap(f, "i", out_axes=None, check_replicated=True, compile=compile, **options)


PROVED: dict[str, Callable[[torch.Tensor], Any]] = {
    "psum": lambda x: tp.psum(x, "i"),
    "a tree": lambda x: {"mean": tp.pmean(x, "i"), "max": [tp.pmax(x, "i") * 2]},
    "all_gather": lambda x: tp.all_gather(x, "i"),
    "a closure": lambda x: W,
    "a closure and a sum": lambda x: W * tp.psum(x, "i"),
    "a constant": lambda x: torch.ones(3),
    "the size": lambda x: tp.axis_size("i"),
    "no part of the index": lambda x: tp.axis_index("i") * 0 + tp.psum(x, "i"),
    "a gradient": lambda x: tp.pmean(tp.grad(lambda w: (w * x).sum())(W), "i"),
    "a scan": lambda x: tp.scan(lambda c, _: (tp.psum(c + x, "i"), c), torch.zeros(()), length=3),
}
UNPROVED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a row": lambda x: x,
    "half of the rows": lambda x: tp.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]]),
    "the index": lambda x: tp.axis_index("i"),
    "a random number": lambda x: torch.rand(2),
    "ppermute": lambda x: tp.ppermute(x, "i", [(0, 1), (1, 0)]),
    "equal by arithmetic": lambda x: tp.psum(x, "i") + (x - x),
    "a scan": lambda x: tp.scan(lambda c, _: (c + x, tp.psum(c, "i")), x, length=3)[0],
}


@pytest.mark.parametrize("name", PROVED)
@pytest.mark.parametrize("num_rows", [4, 8, 1])
def test_what_is_proved_is_not_compared(name: str, num_rows: int) -> None:
    f, x = PROVED[name], torch.arange(float(num_rows))
    lowered = checked(f).lower(x)
    if name != "no part of the index" or num_rows == 1:
        assert lowered.compared == ()
        plain = tp.pmap(f, "i", out_axes=None, compile=EAGER).lower(x)
        assert lowered.as_text() == plain.as_text()
    expected = tp.pmap(f, "i", out_axes=None, compile=False)(x)
    torch.testing.assert_close(values(checked(f)(x)), values(expected))


def values(tree: Any) -> list[torch.Tensor]:
    return [torch.as_tensor(leaf).cpu() for leaf in torch.utils._pytree.tree_leaves(tree)]


@pytest.mark.parametrize("name", UNPROVED)
def test_what_is_not_proved_is_compared(name: str) -> None:
    f, x = UNPROVED[name], torch.arange(4.0)
    lowered = checked(f).lower(x)
    (claim,) = lowered.compared
    assert claim == "out_axes is None for the output of <lambda>"
    assert lowered.as_text().endswith(f"\n# compared in each call: {claim}")
    if name == "equal by arithmetic":
        assert checked(f)(x).item() == 6
        return
    with pytest.raises(ValueError, match=f"{claim}, but its value differs between devices"):
        checked(f)(x)


def test_only_the_leaf_that_is_not_proved_is_compared() -> None:
    f = checked(lambda x: {"loss": tp.pmean(x, "i"), "own": [x, W]})
    lowered = f.lower(torch.ones(4))
    assert lowered.compared == ("out_axes is None for the output of <lambda>['own'][0]",)
    assert len(lowered.out_layouts) == 3
    found = f(torch.ones(4))
    assert (found["loss"].item(), found["own"][0].item()) == (1, 1)
    with pytest.raises(ValueError, match=r"\['own'\]\[0\], but its value differs"):
        f(torch.arange(4.0))


def test_nested_maps_compare_along_their_own_axis() -> None:
    x = torch.arange(4.0).reshape(2, 2)

    def both(f: Any, **inner: Any) -> Any:
        within = tp.pmap(f, "j", compile=EAGER, **inner)
        return tp.pmap(within, "i", out_axes=None, check_replicated=True, compile=EAGER)

    replicated = {"out_axes": None, "check_replicated": True}
    assert both(lambda x: tp.psum(x, "i")).lower(x).compared == ()
    assert both(lambda x: tp.psum(x, ("i", "j")), **replicated).lower(x).compared == ()
    over_rows = both(lambda x: tp.psum(x, "i"), **replicated).lower(x).compared
    assert over_rows == ("out_axes is None for the output of <lambda>",)
    with pytest.raises(ValueError, match="out_axes is None for the output of <lambda>, but"):
        both(lambda x: tp.psum(x, "i"), **replicated)(x)
    with pytest.raises(ValueError, match="out_axes is None for the output of <lambda>, but"):
        both(lambda x: tp.psum(x, "j"))(x)


def test_derivatives_of_what_is_proved() -> None:
    x = torch.arange(4.0)
    f = checked(lambda x: tp.psum(x * x, "i"))
    assert torch.func.grad(f)(x).tolist() == (2 * x).tolist()
    found = torch.func.vmap(f)(torch.stack([x, x + 1]))
    assert found.tolist() == [14, 30]


def test_a_row_that_is_batched_from_outside_is_still_compared() -> None:
    f = checked(lambda x: x)
    with pytest.raises(ValueError, match="differs between devices"):
        f(torch.arange(8.0))
    assert f(torch.ones(8)).item() == 1
