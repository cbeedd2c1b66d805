"""A function of fake tensors -> its graph.

``make_fx`` of torch does the same in three times the time: most of it looks for what is seldom
there, such as known values, sizes that are symbols, and tensors of other classes.  ``GraphMode``
does what most operations need (a node, and a fake result) and leaves every other operation to
torch.  It asks a ``Closure`` for what is none of the graph.

Imported with torch's tracing machinery, at the first trace.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
    new_fake,
    node_of,
    track,
    without_fake_cache,
)
from torchpmap._base.torch_versions import fx_tracing
from torchpmap._collectives.backend import NAMESPACES
from torchpmap._trace.custom_ops import NATIVE, expand, is_hidden
from torchpmap._trace.graphs import Closure

_aten = torch.ops.aten


def graph_of(
    fun: Callable[..., Sequence[torch.Tensor]],
    examples: Sequence[torch.Tensor],
    closure: Closure | None = None,
) -> GraphModule:
    """The graph of what ``fun`` does with fake tensors like ``examples``; it returns a tuple.

    ``closure``: gets what it closes over; None: that is part of the graph.
    """
    tracer = PythonKeyTracer()
    tracer.root = torch.nn.Module()
    tracer.graph = Graph(tracer_cls=PythonKeyTracer)
    tracer.tensor_attrs = {}
    for k, example in enumerate(examples):
        track(tracer, example, tracer.graph.placeholder(f"arg{k}_1"))
    if closure is not None:
        closure.tracer = tracer
    with fx_tracing(), disable_autocast_cache(), GraphMode(tracer, closure):
        results = [tracer.unwrap_proxy(x) for x in fun(*examples)]
    tracer.graph.output(tracer.create_arg(tuple(results)))
    return LazyGraphModule(tracer.root, tracer.graph)


class _Unusual(Exception):
    """An argument is not a fake tensor of the graph whose value is unknown."""


class GraphMode(ProxyTorchDispatchMode):
    """In its block, operations become nodes of a graph."""

    supports_higher_order_operators = True

    def __init__(self, tracer: PythonKeyTracer, closure: Closure | None) -> None:
        super().__init__(tracer, "real")
        self.closure = closure
        self._capture = None if closure is None else closure.capture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # autograd asks for it more often than it computes
        capture = self._capture
        if capture is None or capture.is_over:
            return self._add(func, types, args, kwargs)
        capture.before(func, args, kwargs)
        graph = self.tracer.graph
        in_region = capture.record.operation(graph) if capture.record.regions else nullcontext()
        is_forgotten = func is _aten._new_zeros_with_same_feature_meta.default
        anew = without_fake_cache(capture.fake_mode) if is_forgotten else nullcontext()
        with in_region, anew:  # torch 2.13 forgets where in its memory such a tangent begins
            result = self._add(func, types, args, kwargs)
        capture.executions.note(graph)
        return result

    def _add(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        nodes = self._nodes_of(args, kwargs) if _is_quick(func) and "device" not in kwargs else None
        if nodes is None:
            args, kwargs = self._from_outside(func, args, kwargs)
            if isinstance(func, HigherOrderOperator):
                return self._with_bodies(func, args, kwargs)
            if self._capture is not None and is_hidden(func):
                with self:
                    return expand(func, self._capture.device.type, args, kwargs)
            if func in _DECOMPOSED:
                with self:
                    result = _DECOMPOSED[func](*args, **kwargs)
                if result is not NotImplemented:
                    return result
            nodes = self._nodes_of(args, kwargs) if _is_usual(func) else None
        if nodes is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        (positional, named), result = nodes, func(*args, **kwargs)
        name = func.overloadpacket.__name__
        graph: Graph = self.tracer.graph
        node = graph.create_node("call_function", func, positional, named, name)
        if result is not None:
            track(self.tracer, result, node)
        return result

    def _nodes_of(self, args: Any, kwargs: Any) -> Any:
        """The arguments with nodes for the tensors; None if one is not usual."""
        try:
            return None if has_preserved_node_meta() else map_tensors(self._node_of, (args, kwargs))
        except _Unusual:
            return None

    def _from_outside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The arguments with what stands in the graph for tensors that are none of it."""
        if func is _aten._local_scalar_dense.default:
            if self._capture is not None and not isinstance(args[0], FakeTensor):
                self._capture.pinned.append(args[0])
            return args, kwargs
        if self.closure is not None and func not in _LIFTING:
            args, kwargs = map_tensors(self.closure.substitute, (args, kwargs))
        if func.namespace in NAMESPACES or _goes_to_a_device(kwargs.get("device")):
            args = map_tensors(self._without_value, args)
        return args, kwargs

    def _without_value(self, value: Any) -> Any:
        """Hide that a value is known: torch would run the operation now, in this process alone."""
        if not isinstance(value, FakeTensor) or value.constant is None or self._capture is None:
            return value
        unknown = new_fake(value.fake_mode, value.shape, value.dtype, value.device)
        node = node_of(self.tracer, value)
        assert node is not None
        track(self.tracer, unknown, node)
        return unknown

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


def _goes_to_a_device(device: Any) -> bool:
    return device is not None and torch.device(device).type not in ("cpu", "meta")


def _is_quick(func: Any) -> bool:
    """Whether an operation on tensors of the graph is a node, whatever their values are."""
    return func.namespace in _QUICK and func not in _DECOMPOSED and _is_usual(func)


_QUICK = NATIVE.difference(NAMESPACES)


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

_DEVICE = torch.ops.prim.device.default
_LIFTING = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default}
_UNUSUAL = {*_LIFTING, _aten.is_nonzero.default, _DEVICE}


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


def _update_statistics(
    x: torch.Tensor, mean: torch.Tensor | None, var: torch.Tensor | None, momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = [dim for dim in range(x.dim()) if dim != 1]
    for running, statistic in ((mean, torch.mean), (var, torch.var)):
        if running is not None:
            running.lerp_(statistic(x, dims).to(running.dtype), momentum)
    own_var, own_mean = torch.var_mean(x, dims, correction=0)
    return own_mean, own_var


def _cudnn_batch_norm(x: torch.Tensor, *rest: Any) -> Any:
    reserve = x.new_empty(0, dtype=torch.uint8)
    return *_aten.native_batch_norm.default(x, *rest), reserve


def _cudnn_batch_norm_backward(
    x: torch.Tensor, grad: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    *kept, eps, _ = rest
    operation: Any = _aten.native_batch_norm_backward.default
    return tuple(operation(grad, x, *kept, True, eps, [True, True, True]))


def _unscale(
    grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    num_bad = torch.stack([(~grad.isfinite()).sum() for grad in grads])
    found_inf.copy_(torch.where(num_bad.any(), 1.0, found_inf))
    for grad in grads:
        grad.mul_(inv_scale)


def _update_scale(
    scale: torch.Tensor,
    tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth: float,
    backoff: float,
    interval: int,
) -> torch.Tensor:
    is_bad, count, grown = found_inf != 0, tracker + 1, scale * growth
    is_due = count == interval
    grown = torch.where(is_due & grown.isfinite(), grown, scale)
    tracker.copy_(torch.where(is_bad | is_due, 0, count))
    return scale.copy_(torch.where(is_bad, scale * backoff, grown))


_DECOMPOSED: dict[Any, Callable[..., Any]] = {
    # of a GradScaler: so that the devices send one message for all gradients
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    _aten._amp_update_scale_.default: _update_scale,
    # torch 2.13: for fake tensors it puts a meta device into the graph; seen in vmap(hessian(x**3))
    _aten._efficientzerotensor.default: _zeros,
    # its schema does not say that it writes the running statistics, so they would get lost with an
    # output of no use
    _aten.native_batch_norm.default: _batch_norm,
    # nor do these
    _aten.batch_norm_update_stats.default: _update_statistics,
    _aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    _aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
}
