"""Covers: _plan/roofline.py and debug.calibrate: seconds and bytes worked out by hand."""

import pytest
import torch
from _support import EAGER

import torchpmap as tp
from torchpmap._plan.cost import propagated
from torchpmap._plan.roofline import keep, moved_bytes

pytestmark = pytest.mark.usefixtures("pool")

MACHINE = tp.debug.Machine(
    flops=1e9, memory_bytes=1e8, collective_s=0.5, collective_bytes=1e3, call_s=100.0
)


def lowered(f, *shapes):
    """For one row on each of four devices."""
    args = [torch.empty(4, *shape, device="meta") for shape in shapes]
    return tp.pmap(f, "i", compile=EAGER).lower(*args)


# bytes that move ----------------------------------------------------------------------------------

KIB = 1024


def repeated(x):
    return tp.scan(lambda c, _: (c.sin(), None), x, None, length=700)[0]


def one_or_two(x):
    return tp.cond(x[0, 0] > 0, lambda x: x.sin().cos(), torch.sin, x)


MOVED = {  # of an argument of 1 KiB: each operation by itself, and fused
    "one operation": (torch.sin, 2 * KIB, 2 * KIB),
    "a chain": (lambda x: x.sin().cos().tan(), 6 * KIB, 2 * KIB),
    "through a view": (lambda x: x.sin().view(1, 256).cos(), 4 * KIB, 2 * KIB),
    "two results": (lambda x: (x.sin(), x.cos()), 4 * KIB, 3 * KIB),
    "a product": (lambda x: x @ x, 2 * KIB, 2 * KIB),
    "a product of what is computed": (lambda x: x @ x.sin(), 5 * KIB, 5 * KIB),
    "a collective": (lambda x: tp.pmax(x, "i"), 0, 0),
}


@pytest.mark.parametrize("name", MOVED)
def test_moved_bytes(name):
    f, alone, fused = MOVED[name]
    if name == "a collective":  # of whole numbers, which need nothing around it
        plan = tp.pmap(f, "i", compile=EAGER).lower(torch.ones(4, 8, dtype=torch.int32))._plan
    else:
        plan = lowered(f, (16, 16))._plan
    graph = propagated(plan)
    found = [moved_bytes(graph, is_fused=False), moved_bytes(graph, is_fused=True)]
    assert found == [alone, fused]


@pytest.mark.parametrize(("f", "steps"), [(repeated, 700), (one_or_two, 2)])
def test_moved_bytes_inside_loops_and_branches(f, steps):
    """2 KiB a step, or for each operation of the longer branch, and a little around them."""
    moved = lowered(f, (16, 16)).cost().moved_bytes
    assert steps * 2 * KIB <= moved <= (steps + 3) * 2 * KIB


# seconds ------------------------------------------------------------------------------------------


def test_seconds():
    cost = lowered(lambda w, x: tp.psum(x @ w, "i"), (100, 50), (10, 100)).cost(MACHINE)
    flops, moved, sent = 2 * 10 * 100 * 50, 4 * (100 * 50 + 10 * 100 + 10 * 50), 4 * 10 * 50
    assert cost.moved_bytes == moved
    expected = 100 + flops / 1e9 + moved / 1e8 + 0.5 + sent / 1e3
    assert cost.seconds == pytest.approx(expected, rel=1e-12)


def test_seconds_of_collectives_in_a_loop():
    """A device receives as much from each of the four."""

    def f(x):
        step = lambda c, _: (tp.all_gather(c, "i").sum(0), None)  # noqa: E731
        return tp.scan(step, x, None, length=700)[0]

    cost = lowered(f, (8,)).cost(MACHINE)
    expected = 100 + cost.moved_bytes / 1e8 + 700 * (0.5 + 4 * 8 * 4 / 1e3)
    assert cost.seconds == pytest.approx(expected, rel=1e-12)


def test_what_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    f = lowered(torch.sin, (16, 16))
    assert f.cost().seconds is None
    keep(MACHINE, tp.devices())
    expected = 100 + 2 * KIB / 1e8
    assert f.cost().seconds == pytest.approx(expected, rel=1e-12)
    [kept] = (tmp_path / "torchpmap").iterdir()
    good = kept.read_text()
    for broken in ("", "{}", "[1]", '{"flops": "many"}', good.replace("0.5", "NaN")):
        kept.write_text(broken)
        assert f.cost().seconds is None
    tp.init(num_devices=2)
    keep(MACHINE, tp.devices())
    assert len(list((tmp_path / "torchpmap").iterdir())) == 2  # four devices share the machine


@pytest.mark.long
def test_calibrate(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = tp.debug.calibrate()
    x = torch.empty(4, 16, 16, device="meta")
    lower = tp.pmap(torch.sin, compile=EAGER).lower
    assert lower(x).cost() == lower(x).cost(machine)
    assert lower(x).cost().seconds > machine.call_s > 0
