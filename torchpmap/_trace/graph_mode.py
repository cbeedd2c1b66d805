"""A function of fake tensors -> its graph.

``make_fx`` of torch does the same in three times the time: most of it looks for what is seldom
there, such as known values, sizes that are symbols, and tensors of other classes.  ``GraphMode``
does what most operations need (a node, and a fake result) and leaves every other operation to
torch.

Imported with torch's tracing machinery, at the first trace.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    disable_autocast_cache,
    disable_proxy_modes_tracing,
    make_fx,
)
from torch.fx.traceback import has_preserved_node_meta

from torchpmap._base.pytree import map_tensors
from torchpmap._base.torch_internals import (
    FakeTensor,
    HigherOrderOperator,
    LazyGraphModule,
    is_composite,
    track,
)
from torchpmap._base.torch_versions import fx_tracing

_aten = torch.ops.aten


def graph_of(
    fun: Callable[..., Sequence[torch.Tensor]], examples: Sequence[torch.Tensor]
) -> GraphModule:
    """The graph of what ``fun`` does with fake tensors like ``examples``; it returns a tuple."""
    tracer = PythonKeyTracer()
    tracer.root = torch.nn.Module()
    tracer.graph = Graph(tracer_cls=PythonKeyTracer)
    tracer.tensor_attrs = {}
    for k, example in enumerate(examples):
        track(tracer, example, tracer.graph.placeholder(f"arg{k}_1"))
    with fx_tracing(), disable_autocast_cache(), GraphMode(tracer):
        results = [tracer.unwrap_proxy(x) for x in fun(*examples)]
    tracer.graph.output(tracer.create_arg(tuple(results)))
    return LazyGraphModule(tracer.root, tracer.graph)


class _Unusual(Exception):
    """An argument is not a fake tensor of the graph whose value is unknown."""


class GraphMode(ProxyTorchDispatchMode):
    """In its block, operations become nodes of a graph."""

    supports_higher_order_operators = True

    def __init__(self, tracer: PythonKeyTracer) -> None:
        super().__init__(tracer, "real")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._with_bodies(func, args, kwargs)
        if func in _DECOMPOSED:
            with self:
                result = _DECOMPOSED[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if not _is_usual(func) or has_preserved_node_meta():
            return super().__torch_dispatch__(func, types, args, kwargs)
        try:
            nodes, named_nodes = map_tensors(self._node_of, (args, kwargs))
        except _Unusual:
            return super().__torch_dispatch__(func, types, args, kwargs)
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        graph: Graph = self.tracer.graph
        node = graph.create_node("call_function", func, nodes, named_nodes, name)
        if result is not None:
            track(self.tracer, result, node)
        return result

    def _node_of(self, tensor: torch.Tensor) -> Node:
        slot = self.tracer.tensor_tracker.get(tensor)
        if slot is None or slot.constant is not None or type(tensor) is not FakeTensor:
            raise _Unusual
        node: Node = slot.proxy.node
        return node

    def _with_bodies(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A loop or branch of torch's: its rule traces bodies only as parts of a ``make_fx``."""
        rule = func.python_key_table.get(ProxyTorchDispatchMode)
        if rule is None:
            raise NotImplementedError(f"torch has no rule that makes {func} part of a graph")
        results = []

        def run() -> tuple[()]:
            with disable_proxy_modes_tracing():
                results.append(rule(self, *args, **kwargs))
            return ()

        make_fx(run, _DECOMPOSED, _disable_torch_fn_metadata_mode=True)()
        return results[0]


@functools.cache
def _is_usual(func: Any) -> bool:
    """Whether an operation takes and returns only tensors and constants, is not made of other
    operations, and needs no values.
    """
    return (
        func not in _UNUSUAL
        and not is_composite(func)
        and torch.Tag.data_dependent_output not in func.tags
        and all(map(_is_plain, func._schema.arguments))
        and all("Tensor" in str(each.type) for each in func._schema.returns)
    )


def _is_plain(argument: Any) -> bool:
    """Whether it is a tensor, a constant that a graph can hold, or several of these."""
    return _PLAIN.issuperset(re.findall(r"[\w.]+", str(argument.type)))


_PLAIN = {"Optional", "List", "Tensor", "int", "float", "bool", "str", "number", "Device"}

_UNUSUAL = {
    _aten.lift_fresh.default,
    _aten.lift_fresh_copy.default,
    _aten.is_nonzero.default,
    torch.ops.prim.device.default,
}


def _zeros(size: Sequence[int], **kwargs: Any) -> torch.Tensor:
    return _aten.zeros.default(size, **kwargs)


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    training: bool,
    *rates: float,
) -> Any:
    if not training or mean is None or var is None:
        return NotImplemented
    return _aten._native_batch_norm_legit(x, weight, bias, mean, var, training, *rates)


def _cudnn_batch_norm(x: torch.Tensor, *rest: Any) -> Any:
    reserve = x.new_empty(0, dtype=torch.uint8)
    return *_aten.native_batch_norm.default(x, *rest), reserve


def _cudnn_batch_norm_backward(
    x: torch.Tensor, grad: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    *kept, eps, _ = rest
    operation: Any = _aten.native_batch_norm_backward.default
    return tuple(operation(grad, x, *kept, True, eps, [True, True, True]))


_DECOMPOSED: dict[Any, Callable[..., Any]] = {
    # torch 2.13: for fake tensors it puts a meta device into the graph; seen in vmap(hessian(x**3))
    _aten._efficientzerotensor.default: _zeros,
    # its schema does not say that it writes the running statistics, so they would get lost with an
    # output of no use
    _aten.native_batch_norm.default: _batch_norm,
    # that of cuDNN does not say so either
    _aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    _aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
}
