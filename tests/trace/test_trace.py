"""Covers: _trace/trace.py, _trace/replication.py: from a function to a graph, without a pool."""

import threading

import pytest
import torch
from _traced import F32, traced
from torch.fx import Graph

import torchpmap as tp
from torchpmap._trace.replication import Along, varying_nodes

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def ops(result):
    return [
        str(node.target).removesuffix(".default")
        for node in result.graph.graph.nodes
        if node.op == "call_function"
    ]


def placeholders(result):
    return [node for node in result.graph.graph.nodes if node.op == "placeholder"]


def test_a_graph_computes_the_function_which_runs_once_on_one_thread():
    threads = []

    def body(unused, x, y):
        threads.append(threading.current_thread())
        return x @ y, torch.func.grad(lambda x: (x**2).sum())(x).sum()

    result = traced(body, (5,), (2, 3), (3, 2))
    assert threads == [threading.current_thread()]
    assert (result.shapes, result.dtypes) == (((2, 2), ()), (F32, F32))
    assert not result.uses_index
    assert len(placeholders(result)) == 3
    x, y = torch.rand(2, 3), torch.rand(3, 2)
    product, total = result.graph(torch.ones(5), x, y)
    torch.testing.assert_close(product, x @ y)
    torch.testing.assert_close(total, 2 * x.sum())


def test_the_axis_index_is_an_input_only_where_it_is_used():
    used = traced(lambda x: x + tp.axis_index("i"), (2,))
    assert used.uses_index
    assert len(placeholders(used)) == 2
    (out,) = used.graph(torch.tensor(3), torch.zeros(2))
    assert out.tolist() == [3.0, 3.0]
    unused = traced(lambda x: x + tp.axis_size("i"), (2,))
    assert not unused.uses_index
    assert len(placeholders(unused)) == 1
    assert unused.graph(torch.zeros(2))[0].tolist() == [4.0, 4.0]


def test_dead_code_and_detaches_are_dropped():
    def body(x):
        x.exp()
        return x.detach().sin().detach()

    assert ops(traced(body, (2,))) == ["aten.sin"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            lambda x, w: (x.squeeze(0) * 2 + w).sin().unsqueeze(0),
            ["aten.mul.Tensor", "aten.add.Tensor", "aten.sin"],
        ),
        (lambda x, w: (x.squeeze(0)[0] * w).unsqueeze(0), None),  # the result has no such row
        (lambda x, w: x.squeeze(0).sum(0), None),  # no operation on each number
        (lambda x, w: (x.squeeze(0) + w.double()).unsqueeze(0), None),  # promotes by dims
        (lambda x, w: (x.squeeze(0) * x.squeeze(0)).view(-1, 1) + x, None),  # also otherwise used
        (lambda x, w: (w + x.squeeze(0)).squeeze(0).unsqueeze(0), None),
        (lambda x, w: torch.frexp(x.squeeze(0))[0].unsqueeze(0), None),  # it gives two
        (lambda x, w: x.squeeze(0).clone().add_(w).unsqueeze(0), None),  # it writes
        (  # its kernel for CPUs does not broadcast
            lambda x, w: torch.ops.aten.gelu_backward(w.bfloat16(), x.bfloat16().squeeze(0)),
            None,
        ),
    ],
)
def test_operations_on_each_number_keep_the_row_of_a_block(body, expected):
    result = traced(body, (1, 3), (3,))
    assert expected in (None, ops(result))
    x, w = torch.rand(1, 3), torch.rand(3)
    (found,) = result.graph(x, w)
    torch.testing.assert_close(found, body(x, w), rtol=0, atol=0)
    scalar = traced(body, (1, 1), (1,)).graph(x[:, :1], w[:1])
    torch.testing.assert_close(scalar[0], body(x[:, :1], w[:1]), rtol=0, atol=0)


def test_captured_tensors_become_inputs():
    """... but not those made inside, nor those of which Python has read the values."""
    w, b, read = torch.ones(2, 3), torch.nn.Parameter(torch.ones(3)), torch.tensor(3.0)

    def body(x):
        made = torch.tensor([1.0, 2.0, 3.0]) + torch.ones(3)
        return x @ w + b + w.sum() + tp.axis_index("i") * made * float(read)

    result = traced(body, (4, 2))
    assert result.uses_index
    assert [id(t) for t in result.captured] == [id(w), id(b)]
    assert [id(t) for t in result.pinned] == [id(read)]
    names = [node.name for node in placeholders(result)]
    assert names[1:3] == ["captured_0", "captured_1"]
    x = torch.rand(4, 2)
    (out,) = result.graph(torch.tensor(2), w * 2, b.detach() * 3, x)
    torch.testing.assert_close(out, x @ w * 2 + 3 + 12 + torch.tensor([12.0, 18.0, 24.0]))


def test_gradients_of_captured_parameters_are_put_back():
    w = torch.nn.Parameter(torch.ones(2))
    w.grad = before = torch.full((2,), 7.0)

    def body(x):
        (w * x).sum().backward()
        return w.grad

    result = traced(body, (2,))
    assert w.grad is before
    assert result.graph(w.detach(), torch.tensor([2.0, 3.0]))[0].tolist() == [2.0, 3.0]
    with pytest.raises(ZeroDivisionError):
        traced(lambda x: (w * x).sum().backward() or 1 / 0, (2,))
    assert w.grad is before


def broadcasts(result):
    return sum("torchpmap" in op or "_c10d_functional" in op for op in ops(result))


def test_only_what_may_differ_is_broadcast():
    w = torch.ones(2)
    assert broadcasts(traced(lambda x: x * 2, (2,), same=True)) > 0
    assert broadcasts(traced(lambda x: x * 2, (2,), same=True, varying=False)) == 0
    assert broadcasts(traced(lambda x: w * 2, (2,), same=True)) == 0
    assert broadcasts(traced(lambda x: torch.ones(2), (2,), same=True)) == 0
    assert broadcasts(traced(lambda x: tp.axis_index("i"), (2,), same=True)) > 0
    reduced = traced(lambda x: tp.psum(x, "i") * w, (2,), same=True)
    assert ops(reduced)[:1] == ["_c10d_functional.all_reduce"]
    assert broadcasts(reduced) == 2  # the reduction and its wait
    assert broadcasts(traced(lambda x: tp.axis_size("i") * x, (2,))) == 0


def test_what_depends_on_a_varying_input_varies():
    graph = Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    only_w = graph.call_function(aten.sin.default, (w,))
    both = graph.call_function(aten.add.Tensor, (only_w, x))
    listed = graph.call_function(aten.cat.default, ([w, both],))
    named = graph.call_function(aten.mul.Tensor, (w,), {"other": x})
    assert varying_nodes(graph, {x}, Along(("g",))) == {x, both, listed, named}
    assert varying_nodes(graph, set(), Along(("g",))) == set()


def test_nothing_is_left_bound_after_an_error():
    with pytest.raises(ZeroDivisionError):
        traced(lambda x: 1 / 0, (2,))
    with pytest.raises(NameError, match="Bound here: nothing"):
        tp.psum(torch.ones(2), "i")
    assert type(torch.ones(2) + 1) is torch.Tensor


@pytest.mark.parametrize("draw", [torch.rand_like, torch.nn.functional.dropout])
def test_a_draw_without_streams_is_refused(draw):
    with pytest.raises(NotImplementedError, match="draws random numbers from torch's generator"):
        traced(lambda x: draw(x) + x, (2,))
