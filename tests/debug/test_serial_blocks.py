"""Covers: ``fake_pmap(serial=True)`` with ``shard_map``: the devices one after the other, as plain
Python; and the comparison of copies that ``check_vma`` makes without a trace.
"""

from contextlib import nullcontext

import pytest
import torch
from _support import WAYS
from torch.utils import _pytree as pytree

import torchpmap as tp
from torchpmap import P

X = torch.arange(16.0).reshape(4, 4)
XY = P("x", "y")


@pytest.fixture
def mesh(pool):
    return tp.make_mesh((2, 2), ("x", "y"))


@pytest.fixture
def serial():
    with tp.debug.fake_pmap(serial=True):
        yield


def mapped(f, mesh, in_specs, out_specs, **options):
    return tp.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def test_blocks_are_plain_python(mesh, serial):
    w = torch.tensor(2.0, requires_grad=True)

    def f(a):
        (w * a).sum().backward()
        if a[0, 0].item() > 5:  # the lower two
            a = a * 10
        assert w.grad is not None
        return tp.psum(a, "y"), w.grad.reshape(1, 1), w.grad.clone()

    rows, slopes, total = mapped(f, mesh, XY, (P("x"), XY, P()))(X)
    left, right = X.chunk(2, 1)
    assert rows.tolist() == torch.cat([(left + right)[:2], 10 * (left + right)[2:]]).tolist()
    assert slopes.tolist() == [[X.sum()] * 2] * 2  # w is one value, which all devices share
    assert total.item() == X.sum()
    assert w.grad is None


def test_devices_run_in_order_between_collectives(mesh, serial):
    events = []

    def f(a):
        place = int(tp.axis_index("x")), int(tp.axis_index("y"))
        events.append(place)
        a = tp.psum(a, "y")
        events.append(place)
        return a

    mapped(f, mesh, XY, P("x"))(X)
    assert events == [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 1), (1, 0), (1, 1)]


def test_errors_name_the_device(mesh, serial):
    def fails(a):
        if a[0, 0].item() == 10:
            raise KeyError("ten")
        return a

    with pytest.raises(KeyError) as caught:
        mapped(fails, mesh, XY, XY)(X)
    assert "on the device at x=1, y=1" in caught.value.__notes__
    text = r"devices returned different kinds of results: device 0 .*float32\[2, 2\].*device 1 ret"
    with pytest.raises(ValueError, match=text):
        mapped(lambda a: a if a[0, 0].item() == 0 else a[:1], mesh, XY, XY)(X)


class Shown:
    """Its text is about its tensor."""

    def __init__(self, x):
        self.x = x

    def __repr__(self):
        return f"Shown({list(self.x.shape)})"


pytree.register_pytree_node(Shown, lambda each: ([each.x], None), lambda xs, _: Shown(*xs))


@pytest.mark.parametrize("serially", [True, False])
def test_a_container_that_shows_its_tensors(serially, pool):
    with tp.debug.fake_pmap(serial=True) if serially else nullcontext():
        found = tp.pmap(lambda x: Shown(x * 2), compile=False)(X)
    assert torch.equal(found.x.cpu(), X * 2)


def only_below(a):
    """Copies along "y" differ, but only in the lower half."""
    return torch.where(tp.axis_index("x") == 1, a, 0.0)


@pytest.mark.parametrize("way", ["python", "lanes", "serial"])
def test_copies_are_compared_on_all_lines_of_the_mesh(mesh, way):
    text = (
        r"out_specs does not mention axis 'y' for .*differs between devices .*with pmean\), or "
        r"mention the axis in its entry of out_specs; or pass check_vma=False, and the value of"
    )
    compile, around = WAYS[way]
    with around(), pytest.raises(ValueError, match=text):
        mapped(only_below, mesh, XY, P("x"), compile=compile)(X)
