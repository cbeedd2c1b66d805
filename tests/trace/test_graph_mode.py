"""Covers: _trace/graph_mode.py: the graph of a function is that which torch's make_fx makes."""

import pytest
import torch
from _support import DEVICE, EAGER
from torch._higher_order_ops.scan import scan as torch_scan
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import torchpmap as tp
from torchpmap._base.torch_internals import FakeTensorMode

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def out_of_place(x):
    result = torch.empty(2, 2)
    torch.add(x, 1, out=result)
    return result.t_() * x


def of_no_tensors(x):
    torch._foreach_add_([x, y := x.clone()], 2)
    torch.ops.aten._assert_async.msg((x > 0).all(), "negative")
    return x + y


FUNCTIONS = {
    "elementwise": lambda x: torch.sin(x * 2) + 1,
    "in place": lambda x: x.clone().add_(1).mul_(x),
    "out=": out_of_place,
    "nothing returned": of_no_tensors,
    "a list": lambda x: torch.cat(x.unbind(1)[::-1]) + torch.stack(x.split(1)).flatten(),
    "a tuple with None": lambda x: torch.nn.functional.layer_norm(x, (2,)),
    "a known value": lambda x: x * (torch.tensor(2.0) * 3).item(),
    "a factory": lambda x: x + torch.arange(2, dtype=x.dtype),
    "other dtypes": lambda x: torch.view_as_complex(x).abs().to(torch.float64),
    "a gradient": lambda x: torch.func.grad(lambda y: (y @ y).tanh().sum())(x),
    "a batch": lambda x: torch.vmap(lambda row: row.softmax(0).cumsum(0))(x),
    "a dual": lambda x: torch.func.jvp(torch.exp, (x,), (x,))[1],
    "of inference": lambda x: torch.inference_mode()(lambda y: torch.matmul(y, y).relu())(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_graph_as_make_fx(name):
    from torchpmap._trace.graph_mode import graph_of

    def run(x):
        return (FUNCTIONS[name](x),)

    def operations(graph):
        nodes = [n for n in graph.graph.nodes if n.users or n.op != "placeholder"]
        number = {node: k for k, node in enumerate(nodes)}
        return [
            (node.op, node.target, str(torch.fx.map_arg((node.args, node.kwargs), number.get)))
            for node in nodes
            if node.op != "placeholder"
        ]

    graphs = []
    for make in (lambda f, x: make_fx(f)(x), lambda f, x: graph_of(f, (x,))):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            graphs.append(make(run, mode.from_tensor(X)))
    expected, found = map(operations, graphs)
    assert found == expected
    assert len(found) > 1


def assigned(x):
    t = torch.tensor(2.0)
    t.data = torch.tensor(5.0)
    return x * t.item() if t > 3 else x


@pytest.mark.skipif(DEVICE != "cpu", reason="the value is on the GPU")
def test_a_value_that_torch_knows_is_known_through_data():
    assert torch.equal(tp.pmap(assigned, compile=EAGER)(X).cpu(), X * 5)


def test_what_a_graph_cannot_hold_is_refused():
    def storage(x):
        return torch.empty(0).set_(x.untyped_storage(), 0, (2,), (1,)) * 2

    with pytest.raises(NotImplementedError, match=r"argument of type.*UntypedStorage"):
        tp.pmap(storage, compile=EAGER).lower(X)


class Name(torch.Tensor):
    """A class that is only a name."""


NAMED = torch.tensor([2.0, 3.0]).as_subclass(Name)


def test_a_tensor_with_the_name_of_a_class_in_the_backward_pass_of_a_loop():
    def f(x):
        v = x.clone().requires_grad_()
        tp.scan(lambda c, _: (c * NAMED, None), v, None, length=2)[0].sum().backward()
        return v.grad

    assert tp.pmap(f, compile=EAGER)(X).tolist() == [[4.0, 9.0]] * 2


def scanned(v):
    return torch_scan(lambda c, y: (c + y, c * y), v * 1, torch.stack([v, v * 2]))[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")  # Dynamo
@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 cannot differentiate its scan")
@pytest.mark.parametrize("order", ["after", "inside"])
def test_a_scan_of_torch_and_a_checkpoint(order):
    def recomputed(f, v):
        return checkpoint(f, v, use_reentrant=False)

    def before(v):
        return v.sin().exp() if order == "after" else v

    def gradient(x):
        v = x.clone().requires_grad_()
        y = scanned(recomputed(before, v)) if order == "after" else recomputed(scanned, v)
        y.sum().backward()
        return v.grad

    def plain(v):  # carry + y, of which the carry before has been multiplied with y
        v = before(v)
        return (v * v + (v + v) * (v * 2)).sum()

    found = tp.pmap(gradient, compile=EAGER)(X)
    torch.testing.assert_close(found.cpu(), torch.stack([torch.func.grad(plain)(x) for x in X]))


def test_a_checkpoint_where_no_mode_is_active():
    def f(x):
        with torch.utils._python_dispatch._disable_current_modes():
            y = checkpoint(torch.sin, torch.ones(2), use_reentrant=False)
        return x + y

    found = tp.pmap(f, compile=EAGER)(X)
    torch.testing.assert_close(found.cpu(), X + torch.ones(2).sin())
