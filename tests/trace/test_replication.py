"""Covers: _trace/replication.py."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from torchpmap._trace.replication import Along, varying_nodes

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@pytest.fixture
def graph():
    return Graph()


def test_what_depends_on_a_varying_input_varies(graph):
    x, w = graph.placeholder("x"), graph.placeholder("w")
    only_w = graph.call_function(aten.sin.default, (w,))
    both = graph.call_function(aten.add.Tensor, (only_w, x))
    listed = graph.call_function(aten.cat.default, ([w, both],))
    named = graph.call_function(aten.mul.Tensor, (w,), {"other": x})
    assert varying_nodes(graph, {x}, Along(("g",))) == {x, both, listed, named}
    assert varying_nodes(graph, set(), Along(("g",))) == set()


@pytest.mark.parametrize(
    ("target", "args"),
    [(c10d.all_reduce.default, ("sum", "g")), (c10d.all_gather_into_tensor.default, (4, "g"))],
)
def test_reductions_over_the_axis_make_equal(graph, target, args):
    x = graph.placeholder("x")
    reduced = graph.call_function(target, (x, *args))
    waited = graph.call_function(c10d.wait_tensor.default, (reduced,))
    again = graph.call_function(aten.add.Tensor, (waited, x))
    assert varying_nodes(graph, {x}, Along(("g",))) == {x, again}
    assert varying_nodes(graph, {x}, Along(("another group",))) == {x, reduced, waited, again}


def test_other_collectives_do_not(graph):
    x = graph.placeholder("x")
    scattered = graph.call_function(c10d.reduce_scatter_tensor.default, (x, "sum", 4, "g"))
    assert varying_nodes(graph, {x}, Along(("g",))) == {x, scattered}
