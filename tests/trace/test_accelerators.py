"""Covers: what is traced, compiled and run for an accelerator, on a machine that has none."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _traced import F32, traced
from torch._subclasses import fake_tensor

import torchpmap as tp
from torchpmap._base.devices import CUDA, usable_cores
from torchpmap._base.torch_internals import FakeTensorMode
from torchpmap._plan.cost import propagated
from torchpmap._runtime.torchrun.calls import described
from torchpmap._sharded.transfer import store_on
from torchpmap._trace import compile as _compile
from torchpmap._trace.compile import Definition, compile_definition, parse_compile
from torchpmap._trace.constants import place
from torchpmap._trace.graph_mode import graph_of
from torchpmap._trace.transform_rules import TransformRules
from torchpmap.random._streams import refuse_draw

W = torch.ones(4)


def definition(function, device, compile=True):
    made = traced(function, (4,), size=2, device=device)
    kinds = tuple(zip(made.shapes, made.dtypes, strict=True))
    return Definition(1, "f", made.graph, False, (0, 1), made.inputs, kinds, parse_compile(compile))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.arange(4.0),
        lambda x: x + torch.full((4,), 2.0),
        lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda x: x * W,
        lambda x: sum(tp.psum([x * 2, x.sin(), x.sum()], "i")),
    ],
    ids=["arange", "full", "constant", "closure", "sums"],
)
def test_processes_compare_plans_without_their_device_numbers(function):
    texts = [
        described(definition(function, device), torch.device(device))
        for device in ("cuda:0", "cuda:1")
    ]
    assert texts[0] == texts[1]
    assert "cuda:" not in texts[0]


@pytest.mark.parametrize(
    "make",
    [
        torch.arange,
        lambda start, end: torch.tensor([start, end, 0.0, 0.0]),
        lambda start, end: torch.tensor([[0.0] * 4] * 100 + [[end] * 4]).sum(0),
    ],
    ids=["operation", "constant", "large constant"],
)
def test_different_plans_differ(make):
    device = torch.device("cuda:0")
    one, other = (definition(lambda x, k=k: x + make(k, k + 4.0), device) for k in (0, 1))
    assert described(one, device) != described(other, device)


class Touched(Exception):
    """The device was to be initialised."""


@pytest.fixture
def untouchable(monkeypatch):
    """This host seems to have a GPU, which must not be initialised."""

    def touch(*args, **kwargs):
        raise Touched

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", touch)
    monkeypatch.setattr(fake_tensor, "init_gpu_context", touch)


FUNCTIONS = {
    "vector": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "scalar": lambda x: x * torch.tensor(2.0) + torch.tensor(3),
    "computed": lambda x: x + torch.tensor(2.0).mul(3),
    "dtype": lambda x: x + torch.tensor([1, 2, 3, 4], dtype=torch.int32),
    "array": lambda x: x + torch.as_tensor(np.arange(4.0), dtype=F32),
    "written": lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]).add_(x),
    "moved": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device="cpu").to(x.device),
    "factory": lambda x: x + torch.ones(4) + torch.zeros_like(x) + torch.scalar_tensor(2.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_constants_move_to_the_device_once(untouchable, name):
    """... and tracing initialises no device."""
    graph = definition(FUNCTIONS[name], "cuda:0").graph
    assert all(value.device.type == "cpu" for value in graph.buffers())
    place(graph, torch.device("meta"))
    assert not [n for n in graph.graph.nodes if n.kwargs.get("device") and "copy" in str(n.target)]
    assert all(value.device.type == "meta" for value in graph.buffers())


def test_a_plan_is_loaded_with_its_constants_on_the_device():
    made = definition(FUNCTIONS["vector"], "cuda:0", {"backend": "eager"})
    compile_definition(made, torch.zeros((), dtype=torch.int64, device="meta"))
    assert [value.device.type for value in made.graph.buffers()] == ["meta"]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "factory"])
def test_a_graph_with_placed_constants_computes_the_function(name):
    graph = definition(FUNCTIONS[name], "cuda:0").graph
    place(graph, torch.device("cpu"))
    assert "cuda" not in str(graph.graph)
    x = torch.rand(4)
    for _ in range(2):  # what it writes to its constant is gone in the next call
        assert torch.equal(graph(x)[0], FUNCTIONS[name](x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what Inductor imports
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_cuda_graphs_on_accelerators(monkeypatch, mode, device):
    given = {}

    def compile(graph, examples, dynamic_shapes, options):
        given.update(options["config_patches"])
        raise InterruptedError

    monkeypatch.setattr(torch._inductor, "standalone_compile", compile)
    made = definition(lambda x: x * 2, "cpu", {"mode": mode})
    with pytest.raises(InterruptedError):
        _compile._inductor(made.graph, made.inputs, torch.device(device), made.backend)
    assert given["triton.cudagraphs"] is (device == "cpu")
    assert given["compile_threads"] == min(8, usable_cores())


@pytest.mark.parametrize(("dropout", "draws"), [(0.0, False), (0.5, True)])
@pytest.mark.parametrize("name", ["_cudnn_rnn", "miopen_rnn"])
def test_an_rnn_draws_only_for_its_dropout(name, dropout, draws):
    target = getattr(torch.ops.aten, name).default
    given = [
        dropout if argument.name == "dropout" else None for argument in target._schema.arguments
    ]
    with pytest.raises(NotImplementedError, match=name) if draws else nullcontext():
        refuse_draw(target, given, {})


class Host:
    """Stands for a tensor of the host; torch lets only a GPU's take its place."""

    def to(self, device):
        return f"on {device}"


def test_what_an_uncompiled_function_closes_over_is_moved():
    parameter = SimpleNamespace(data=Host(), grad=Host())
    buffer = SimpleNamespace(data=Host(), grad=None)
    CUDA.move([parameter, buffer], torch.device("cuda:1"))
    assert (parameter.data, parameter.grad) == ("on cuda:1", "on cuda:1")
    assert (buffer.data, buffer.grad) == ("on cuda:1", None)


def test_a_tensor_on_the_device_does_not_visit_the_host():
    stored = []
    runtime = SimpleNamespace(runs_here=True, put=lambda team, blocks: stored.extend(blocks))
    value = torch.empty(4, device="meta")  # to copy it to the host raises
    layout = SimpleNamespace(shape=value.shape, dtype=F32, is_replicated=True, ranks=(0,))
    store_on(SimpleNamespace(runtime=runtime), layout, value)
    assert stored[0].device.type == "meta"


def names(graph):
    return [getattr(node.target, "_name", "") for node in graph.graph.nodes]


def test_the_batch_norm_of_cudnn_writes_where_the_graph_sees_it():
    """Its schema does not say that it writes the running statistics, which are arguments."""
    aten = torch.ops.aten

    def step(x, weight, mean, var, grad):
        y, *kept, reserve = aten.cudnn_batch_norm(x, weight, weight, mean, var, True, 0.1, 1e-5)
        given = x, grad, weight, mean, var, *kept, 1e-5, reserve
        return y, *aten.cudnn_batch_norm_backward(*given), mean

    with FakeTensorMode():
        x, weight = torch.empty(4, 3, 2), torch.empty(3)  # wherever they are
        graph = graph_of(step, [x, weight, weight.clone(), weight.clone(), x.clone()])
    found = names(graph)
    assert "aten::_native_batch_norm_legit" in found
    assert "aten::native_batch_norm_backward" in found
    assert not any("cudnn" in name for name in found)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_a_recurrent_layer_becomes_plain_operations(kind):
    """That of cuDNN keeps all weights in one buffer, which no graph can hold."""
    layer = kind(3, 2)
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}

    def f(x):
        with TransformRules():
            return torch.func.functional_call(layer, weights, (x,))[0]

    made = traced(f, (4, 1, 3), size=2, device="cuda:0")
    assert not [name for name in names(made.graph) if "cudnn" in name or "_thnn" in name]
    assert "aten::addmm" in names(made.graph)


def test_the_cost_of_a_graph_that_makes_tensors_on_its_device():
    made = definition(lambda x: x + torch.arange(4.0), "cuda:0")
    graph = propagated(SimpleNamespace(definition=made))
    kinds = {str(n.meta["val"].device) for n in graph.nodes if n.op == "call_function"}
    assert kinds == {"cuda:0"}


class Misleading(Exception):
    @property
    def __class__(self):
        raise ValueError("mine")


def test_an_exception_of_the_user_does_not_decide_what_its_class_is(monkeypatch):
    monkeypatch.setattr(CUDA, "synchronize", lambda: None)
    assert CUDA.recover(Misleading())
