"""Programs with loops and branches in every way that they run, and what they print."""

import torch
from _support import wait_for
from torch.utils import _pytree as pytree

import torchpmap as tp

GRAPH = {"backend": "eager"}


def same_everywhere(program, *inputs, expected, fullgraph=True):
    """Check ``program(*inputs)`` outside of a mapped function, and inside one: traced, and
    uncompiled.
    """
    given = [x.clone() for x in inputs]
    check(program(*given), expected)
    check(given, inputs)  # a loop writes to none of them
    for mode in (GRAPH, False):
        mapped = tp.pmap(
            program,
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
