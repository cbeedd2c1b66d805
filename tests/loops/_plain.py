"""Loops and branches as plain Python: what ``tp.scan`` and the others must equal."""

from types import SimpleNamespace

import torch
from _support import wait_for
from torch.utils import _pytree as pytree

import torchpmap as tp

GRAPH = {"backend": "eager"}


def scan(f, init, xs=None, length=None, reverse=False):
    steps = range(pytree.tree_leaves(xs)[0].shape[0] if length is None else length)
    carry, ys = init, {}
    for k in reversed(steps) if reverse else steps:
        row = None if xs is None else pytree.tree_map(lambda x, k=k: x[k], xs)
        carry, ys[k] = f(carry, row)
    stacked = [ys[k] for k in steps]
    if stacked[0] is None:
        return carry, None
    return carry, pytree.tree_map(lambda *rows: torch.stack(rows), *stacked)


def while_loop(test, body, value):
    while test(value):
        value = body(value)
    return value


def fori_loop(lower, upper, body, value):
    for k in range(int(lower), int(upper)):
        value = body(torch.tensor(k, dtype=torch.int32), value)
    return value


def cond(pred, yes, no, *operands):
    return (yes if pred else no)(*operands)


PLAIN = SimpleNamespace(scan=scan, while_loop=while_loop, fori_loop=fori_loop, cond=cond)


def same_everywhere(program, *inputs, expected=None, fullgraph=True):
    """Check ``program(loops, *inputs)`` outside of a mapped function, and inside one: traced, and
    uncompiled.
    """
    if expected is None:
        expected = program(PLAIN, *inputs)
    given = [x.clone() for x in inputs]
    check(program(tp, *given), expected)
    check(given, inputs)  # a loop writes to none of them
    for mode in (GRAPH, False):
        mapped = tp.pmap(
            lambda *xs: program(tp, *xs),
            in_axes=None,
            out_axes=None,
            axis_size=1,
            compile=mode,
            fullgraph=fullgraph and mode is not False,
        )
        check(mapped(*inputs), expected)


def check(found, expected):
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    for x, y in pairs:
        if y is None:
            assert x is None
        else:
            torch.testing.assert_close(x.detach().cpu(), torch.as_tensor(y).detach())


def printed(capfd, is_last):
    """The lines up to the last one: another thread passes on what a worker prints."""
    lines = []

    def has_come():
        lines.extend(capfd.readouterr().out.splitlines())
        return is_last(lines)

    wait_for(has_come, 10)
    return lines
