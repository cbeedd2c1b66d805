"""Covers: the code of a graph that is run as it is: values, order, and what it keeps."""

import gc
import operator
import weakref

import pytest
import torch
from torch.fx import Graph

from torchpmap._base.torch_internals import LazyGraphModule
from torchpmap._trace.graph_code import boxed_code


def module_of(build, **attributes):
    """A graph: what ``build(graph, x, y)`` returns, of two inputs."""
    graph = Graph()
    graph.output(build(graph, graph.placeholder("x"), graph.placeholder("y")))
    return LazyGraphModule(attributes, graph)


def seen(*args, **kwargs):
    return args, kwargs


ARGUMENTS = {
    "a number that has no name in Python": (float("inf"), float("nan"), -0.0, 1e300, 2j),
    "texts and truths": ("a'b\n", True, False, None, -(2**62)),
    "torch's words": (torch.float32, torch.device("cpu"), torch.strided, torch.contiguous_format),
    "trees": ([1, (2, [3]), ()], {"a": [1], "b": ()}, (4,), []),
    "slices": (slice(None), slice(1, None, 2), (slice(0, 3), None, Ellipsis)),
}


@pytest.mark.parametrize("args", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_arrive_as_they_are(args):
    module = module_of(
        lambda graph, x, y: graph.call_function(seen, (x, *args), {"out": [y, args]})
    )
    x, y = torch.ones(2), torch.zeros(3)
    found = boxed_code(module, {})([x, y])
    assert repr(found) == repr(module(x, y))
    assert found[0][0] is x
    assert found[1]["out"][0] is y


def test_nodes_in_trees_and_slices():
    def build(graph, x, y):
        n = graph.call_function(operator.add, (y, 1))
        part = graph.call_function(operator.getitem, (x, (slice(n, None), None)))
        return (part, {"n": [n, (y,)]}, x)

    module = module_of(build)
    x = torch.arange(5.0)
    part, tree, same = boxed_code(module, {})([x, 1])
    assert part.tolist() == [[2.0], [3.0], [4.0]]
    assert (tree, same is x) == ({"n": [2, (1,)]}, True)


def test_attributes_are_those_of_the_module_and_of_modules_inside():
    def build(graph, x, y):
        c = graph.create_node("get_attr", "inside.c")
        return graph.call_function(torch.mul, (graph.call_function(torch.add, (x, y)), c))

    module = module_of(build, **{"inside.c": torch.tensor(3.0)})
    assert boxed_code(module, {})([torch.ones(()), 1]).item() == 6


def test_an_argument_that_is_called_as_a_word_of_python():
    def build(graph, x, y):
        return graph.call_function(torch.ops.aten.uniform_.default, (x,), {"from": y, "to": y})

    assert boxed_code(module_of(build), {})([torch.zeros(2), 3.0]).tolist() == [3, 3]


def test_another_operation_in_place_of_one():
    module = module_of(lambda graph, x, y: graph.call_function(torch.add, (x, y)))
    assert boxed_code(module, {torch.add: torch.sub})([torch.tensor(5), 2]).item() == 3
    assert boxed_code(module, {})([torch.tensor(5), 2]).item() == 7


def test_a_graph_without_inputs_or_operations():
    graph = Graph()
    graph.output([1, None])
    assert boxed_code(LazyGraphModule({}, graph), {})([]) == [1, None]


def test_values_live_until_their_last_use():
    """As a call of the list's owner sees it: the list is empty, and memory that has no use is free
    when the next operation runs.
    """
    alive = {}
    refs = {}

    def keep(name, value):
        refs[name] = weakref.ref(value)
        return value

    def look(name, *values):
        alive[name] = [key for key, ref in refs.items() if ref() is not None]
        return keep(name, torch.ones(2) + len(values))

    def build(graph, x, y):
        a = graph.call_function(look, ("a", x))
        graph.call_function(look, ("no use", a))
        b = graph.call_function(look, ("b", a))
        c = graph.call_function(look, ("c", b))
        return (graph.call_function(look, ("d", c)), b)

    run = boxed_code(module_of(build), {})
    blocks = [keep("x", torch.ones(2)), keep("y", torch.ones(2))]
    gc.disable()
    try:
        results = run(blocks)
    finally:
        gc.enable()
    assert blocks == []
    assert alive == {"a": ["x"], "no use": ["a"], "b": ["a"], "c": ["b"], "d": ["b", "c"]}
    assert [value.tolist() for value in results] == [[2.0, 2.0], [2.0, 2.0]]


def test_the_code_of_a_plan_that_is_gone_keeps_nothing():
    constant = torch.ones(3)
    module = module_of(lambda graph, x, y: graph.create_node("get_attr", "c"), c=constant)
    run, gone = boxed_code(module, {}), weakref.ref(constant)
    assert run([1, 2]) is constant
    del module, constant
    gc.collect()  # a module and its graph keep each other
    gc.disable()
    try:
        assert gone() is not None
        del run
        assert gone() is None
    finally:
        gc.enable()
