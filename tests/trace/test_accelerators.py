"""Covers: what is traced, compiled and run for an accelerator, on a machine that has none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torchpmap._base.devices import CUDA
from torchpmap._runtime.torchrun.runtime import _described
from torchpmap._sharded.transfer import store_on
from torchpmap._trace import compile as _compile
from torchpmap._trace.compile import Definition, parse_compile
from torchpmap._trace.replication import is_random
from torchpmap._trace.trace import TracedInput, trace

F32 = torch.float32
W = torch.ones(4)


def definition(function, device, compile=True):
    def body(blocks, axis):
        return [(function(*blocks), (axis,))]

    traced = trace(
        body,
        [TracedInput((4,), F32, True)],
        axis_name="i",
        axis_size=2,
        group="g",
        device=torch.device(device),
    )
    kinds = tuple(zip(traced.shapes, traced.dtypes, strict=True))
    backend = parse_compile(compile)
    return Definition(1, "f", traced.graph, False, (0, 1), traced.inputs, kinds, backend)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.arange(4.0),
        lambda x: x + torch.full((4,), 2.0),
        lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda x: x + torch.rand(4),
        lambda x: x * W,
    ],
    ids=["arange", "full", "constant", "random", "closure"],
)
def test_processes_compare_plans_without_their_device_numbers(function):
    texts = [
        _described(definition(function, device), torch.device(device))
        for device in ("cuda:0", "cuda:1")
    ]
    assert texts[0] == texts[1]
    assert "cuda:" not in texts[0]


def test_different_plans_differ():
    device = torch.device("cuda:0")
    one, other = (definition(lambda x, k=k: x + torch.arange(k, k + 4.0), device) for k in (0, 1))
    assert _described(one, device) != _described(other, device)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what Inductor imports
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_cuda_graphs_on_accelerators(monkeypatch, mode, device):
    given = {}

    def compile(graph, examples, dynamic_shapes, options):
        given.update(options["config_patches"])
        raise InterruptedError

    monkeypatch.setattr(torch._inductor, "standalone_compile", compile)
    made = definition(lambda x: x * 2, "cpu", {"mode": mode})
    with pytest.raises(InterruptedError):
        _compile._inductor(made.graph, [torch.empty(4, device=device)], made.backend)
    assert given["triton.cudagraphs"] is (device == "cpu")


@pytest.mark.parametrize(("dropout", "draws"), [(0.0, False), (0.5, True)])
@pytest.mark.parametrize("name", ["_cudnn_rnn", "miopen_rnn"])
def test_an_rnn_draws_only_for_its_dropout(name, dropout, draws):
    target = getattr(torch.ops.aten, name).default
    given = [
        dropout if argument.name == "dropout" else None for argument in target._schema.arguments
    ]
    graph = torch.fx.Graph()
    assert is_random(graph.call_function(target, tuple(given))) is draws


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
