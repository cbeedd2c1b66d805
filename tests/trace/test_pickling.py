"""Covers: _trace/pickling.py: what travels to the workers."""

import array
import operator
import pickle
import threading

import numpy as np
import pytest
import torch
from torch.fx import Graph, GraphModule

from torchpmap._trace.pickling import pickled
from torchpmap._trace.pickling import pickled_function as pickled_by

ops = torch.ops


def pickled_function(function, what, **options):
    """With the tensors that it closes over."""
    return pickled_by(lambda *both: both, function, what, **options)


def there_and_back(value):
    return pickle.loads(pickled(value))


@pytest.mark.parametrize(
    "op",
    [
        torch.ops.aten.add.Tensor,
        torch.ops.aten.add,
        torch.ops.aten,
        torch.ops,
        torch.ops.higher_order.cond,
        torch.ops._c10d_functional.all_reduce.default,
        torch.sin,
        torch.float32,
        torch.Size([1, 2]),
    ],
    ids=lambda op: getattr(op, "__name__", str(op)),  # no address in it
)
def test_operators_travel_by_name(op):
    assert there_and_back(op) is op or there_and_back(op) == op


def test_an_operation_that_nothing_defines_is_named():
    packed = pickled(torch.ops.aten.sin.default).replace(b"aten::sin", b"atem::sin")
    with pytest.raises(RuntimeError, match=r"atem::sin is not known on the devices.*load_library"):
        pickle.loads(packed)


def test_operations_of_this_process_are_themselves_in_it():
    @torch.library.custom_op("torchpmap_tests_shipping::same", mutates_args=())
    def same(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    kernel = same._backend_fns[None]
    by_name = torch.ops.torchpmap_tests_shipping.same.default
    packed = pickled_function(lambda x: (same, by_name), "f()", here=True)
    again, _ = pickle.loads(packed)
    assert again(0)[0] is same
    assert again(0)[1] is by_name
    assert same._backend_fns[None] is kernel


def test_captured_tensors_are_listed_and_are_the_same_objects():
    w, module = torch.ones(2), torch.nn.Linear(2, 1)
    f, tensors = pickle.loads(pickled_function(lambda x: module(x * w) + w.sum(), "f()"))
    (inner,) = [
        cell.cell_contents for cell in f.__closure__ if type(cell.cell_contents) is torch.Tensor
    ]
    assert any(inner is t for t in tensors)
    assert sum(isinstance(t, torch.nn.Parameter) for t in tensors) == 2


class Interrupted(Exception):
    """What the handler of a signal may raise."""


class Slow:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


ERRORS = [
    *((error, type(error), None) for error in (Interrupted(), TimeoutError(), KeyboardInterrupt())),
    (RuntimeError(), TypeError, r"cannot be pickled: RuntimeError\."),
    (None, TypeError, r"(?s)runs step\(\) on the workers.*cannot pickle '_thread\.lock'.*"
     "or use compile=True"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "kind", "text"), ERRORS)
def test_what_cannot_travel_is_named_and_other_errors_are_left_alone(error, kind, text):
    value = threading.Lock() if error is None else Slow(error)
    with pytest.raises(kind, match=text) as raised:
        pickled_function(lambda x: value, "step()")
    if kind is TypeError:
        assert raised.value.__cause__ is not None
    else:
        assert raised.value is error


def test_memoryviews_keep_their_items():
    numbers = array.array("d", [1.0, 2.0, 3.0, 4.0])
    whole = memoryview(numbers)
    matrix = whole.cast("B").cast("d", (2, 2))
    (again, _) = pickle.loads(pickled_function(lambda: (whole[::2], matrix, whole[:0]), "f()"))
    parts = again()
    assert [part.tolist() for part in parts[:2]] == [[1.0, 3.0], [[1.0, 2.0], [3.0, 4.0]]]
    parts[1][0, 0] = 7.0
    assert memoryview(b"ab").readonly == there_and_back_of(memoryview(b"ab")).readonly
    odd = memoryview(np.zeros(2, dtype=">f8"))
    with pytest.raises(TypeError, match=r"a memoryview of format '>d' does not travel; use a te"):
        pickled_function(lambda: odd, "f()")


def there_and_back_of(value):
    return pickle.loads(pickled_function(lambda: value, "f()"))[0]()


@pytest.mark.parametrize(
    "dtype",
    [torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2, torch.float8_e4m3fn, torch.int16],
)
def test_tensors_of_every_dtype_travel(dtype):
    whole = torch.arange(6).to(torch.int16).to(dtype)
    odd, part, empty = whole[1::2], whole[2:], whole[:0].clone()
    values = there_and_back_of((whole, odd, part, empty))
    for got, expected in zip(values, (whole, odd, part, empty), strict=True):
        assert (got.dtype, got.stride()) == (expected.dtype, expected.stride())
        assert got.double().tolist() == expected.double().tolist()


def some_graph():
    graph = Graph()
    x = graph.placeholder("x")
    w = graph.get_attr("w")
    parts = graph.call_function(torch.ops.aten.split.Tensor, (x, 1))
    first = graph.call_function(operator.getitem, (parts, 0))
    joined = graph.call_function(torch.ops.aten.cat.default, ([first, w, first],), {"dim": 0})
    sliced = graph.call_function(operator.getitem, (joined, slice(None, None, 2)))
    graph.output((sliced, [joined, None], {"a": first}))
    return GraphModule({"w": torch.tensor([5.0])}, graph)


def test_graphs_travel_as_nodes():
    module = some_graph()
    again = there_and_back(module)
    assert [(n.op, n.target, n.name) for n in again.graph.nodes] == [
        (n.op, n.target, n.name) for n in module.graph.nodes
    ]
    again.graph.lint()
    x = torch.tensor([1.0, 2.0])
    assert again(x)[0].tolist() == module(x)[0].tolist() == [1.0, 1.0]
    assert again(x)[1][0].tolist() == [1.0, 5.0, 1.0]
    assert again(x)[2]["a"].tolist() == [1.0]


def test_loading_a_graph_runs_nothing():
    graph = Graph()
    total = graph.call_function(
        torch.ops._c10d_functional.all_reduce.default, (1, "sum", "no such group")
    )
    graph.output((total,))
    again = there_and_back(GraphModule({}, graph))
    assert len(list(again.graph.nodes)) == 2
