"""Function + shapes -> one rank-independent graph.

``trace`` runs a program once on fake tensors under ``make_fx``.  functorch levels, autograd,
``.backward()`` and the collectives dissolve into one flat ATen + collective-op graph in which the
axis index is an input and process groups are names, so every device can run the same graph.

Real tensors the program closes over (parameters, buffers, globals) are met by ``_Capture``, which
turns each into a further input of the graph: a baked-in value would go stale when the caller
changes it.

Errors of the user's code leave ``trace`` untouched.  What cannot be expressed as a graph (control
flow on values, shapes that depend on values) leaves it as ``Untraceable``, which names the user's
line.

torch's tracing machinery (and with it Dynamo and SymPy, 1.5 s of imports) is imported at the first
trace, not with the package.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torchpmap._axes import Axis, Partition, bind, subgroup_name
from torchpmap._collectives import pbroadcast
from torchpmap._errors import lost_write
from torchpmap._replication import is_random, varying_nodes

__all__ = ["Traced", "TracedInput", "Untraceable", "trace"]

_lock = threading.RLock()  # make_fx keeps its state in globals: one trace at a time
_aten = torch.ops.aten
_COLLECTIVE_NAMESPACES = ("_c10d_functional", "torchpmap")


def _zeros(size: Sequence[int], **kwargs: Any) -> torch.Tensor:
    return _aten.zeros.default(size, **kwargs)


# torch 2.13: on fake tensors it puts a meta device into the graph; seen in vmap(hessian(x ** 3))
_DECOMPOSED = {_aten._efficientzerotensor.default: _zeros}

Body = Callable[[Sequence[torch.Tensor], Axis], Sequence[tuple[torch.Tensor, bool]]]
"""Takes one block per input, and the axis of the devices; returns the output blocks, each with
whether it must be the same on all devices.
"""

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


class Untraceable(Exception):  # a verdict, not an error: the front end decides what it means
    """The program cannot become a graph: ``reason``, met at ``where`` (``file:line``) in the user's
    code.
    """

    def __init__(self, reason: str, where: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.reason = reason
        self.where = where


@dataclass(frozen=True)
class Traced:
    """What tracing found out about a program."""

    graph: torch.fx.GraphModule
    """Placeholders: [index], captured..., inputs...; returns one flat tuple of tensors."""
    uses_index: bool
    """Whether the first placeholder is the axis index."""
    captured: tuple[torch.Tensor, ...]
    """Real tensors met in closures, in placeholder order."""
    pinned: tuple[torch.Tensor, ...]
    """Real tensors whose *value* the Python code read (``.item()``): the graph holds only while
    they stay unchanged.
    """
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    groups: dict[str, Partition]
    """Process groups the collectives name besides the axis' own: group name -> partition of axis
    indices.
    """
    is_random: bool


class _Capture(TorchDispatchMode):
    """Gives every real tensor that meets a traced operation a placeholder of its own."""

    supports_higher_order_operators = True

    def __init__(self, make_fake: Callable[[Sequence[int], torch.dtype], torch.Tensor]) -> None:
        super().__init__()
        self._make_fake = make_fake
        self.captured: list[torch.Tensor] = []
        self.nodes: list[torch.fx.Node] = []
        self.pinned: list[torch.Tensor] = []
        self.stand_ins: dict[int, torch.Tensor] = {}
        self.grads_before: dict[int, torch.Tensor | None] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.cond and friends run Dynamo on their branches

    def substitute(self, value: Any) -> Any:
        """The stand-in of a real tensor; anything else is left alone."""
        if not _is_real(value):
            return value
        stand_in = self.stand_ins.get(id(value))
        return self._add(value) if stand_in is None else stand_in

    def _add(self, real: torch.Tensor) -> torch.Tensor:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

        mode = get_proxy_mode()
        assert mode is not None
        stand_in = self._make_fake(tuple(real.shape), real.dtype)
        proxy = mode.tracer.create_proxy("placeholder", f"captured_{len(self.nodes)}", (), {})
        track_tensor_tree(stand_in, proxy, constant=None, tracer=mode.tracer)
        proxy.node.meta["val"] = stand_in
        self.nodes.append(proxy.node)
        self.captured.append(real)  # also keeps id(real) from being reused
        self.stand_ins[id(real)] = stand_in
        if real.is_leaf and real.requires_grad:
            self.grads_before[id(real)] = real.grad
            real.grad = None  # .backward() in the traced function starts from no gradient
        return stand_in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            if _is_real(args[0]):
                self.pinned.append(args[0])
            return func(*args, **kwargs)
        if func not in (_aten.lift_fresh.default, _aten.lift_fresh_copy.default):
            args, kwargs = pytree.tree_map(self.substitute, (args, kwargs))
        if func.namespace in _COLLECTIVE_NAMESPACES:
            args = pytree.tree_map(self._without_value, args)
        return func(*args, **kwargs)

    def _without_value(self, value: Any) -> Any:
        """Hide that a number is known: torch would run the operation now, here, alone."""
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.fx.experimental.proxy_tensor import (
            get_proxy_mode,
            get_proxy_slot,
            track_tensor_tree,
        )

        mode = get_proxy_mode()
        if not isinstance(value, FakeTensor) or value.constant is None or mode is None:
            return value
        unknown = self._make_fake(tuple(value.shape), value.dtype)
        proxy = get_proxy_slot(value, mode.tracer).proxy
        track_tensor_tree(unknown, proxy, constant=None, tracer=mode.tracer)
        return unknown


class _KeepData(TorchFunctionMode):
    """``tensor.data = ...`` is no operation that a dispatch mode sees: it would leave the caller's
    tensor without its data.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        setter = func.__name__ == "__set__" and func.__self__ is torch.Tensor.data
        if setter and _is_real(args[0]):
            raise RuntimeError(lost_write(args[0], " (.data)"))
        return func(*args, **(kwargs or {}))


def _is_real(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


@dataclass(frozen=True)
class TracedInput:
    """A block that goes into the graph."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    varying: bool
    """Whether devices hold different blocks."""


def trace(
    body: Body,
    inputs: Sequence[TracedInput],
    *,
    axis_name: Any,
    axis_size: int,
    group: str,
    device: torch.device,
) -> Traced:
    """Trace ``body`` over fake blocks; nothing runs or is sent."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    groups: dict[str, Partition] = {}

    def subgroup(partition: Partition) -> str:
        name = subgroup_name(group, partition)
        groups[name] = partition
        return name

    capture = _Capture(lambda shape, dtype: _fake(fake_mode, shape, dtype, device))

    def flat(index: torch.Tensor, *blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        axis = Axis(axis_name, axis_size, index, group, subgroup)
        with capture, _KeepData(), torch.enable_grad():
            results = [(capture.substitute(block), same) for block, same in body(blocks, axis)]
            if axis_size > 1 and any(same for _, same in results):
                results = _replicated(results, [True, *(i.varying for i in inputs)], axis)
        given = {t.untyped_storage()._cdata for t in (index, *blocks, *capture.stand_ins.values())}
        return tuple(_finish(block, given) for block, _ in results)

    arguments = [_fake(fake_mode, (), torch.int64, device)]
    arguments += [_fake(fake_mode, i.shape, i.dtype, device) for i in inputs]
    with _lock, fake_mode, _ambient(device), _clean_grads(capture) as leftover:
        try:
            graph = make_fx(flat, decomposition_table=_DECOMPOSED)(*arguments)
        except Exception as error:
            verdict = _untraceable(error)
            if verdict is None:
                raise
            raise verdict from error
    graph.graph.eliminate_dead_code()
    _refuse_lost_gradients(graph, leftover)
    _refuse_lost_writes(graph, capture)
    _order_placeholders(graph, capture.nodes)
    _protect_inputs(graph)
    _drop_detaches(graph)
    uses_index = _drop_unused_index(graph)
    outputs = [node.meta["val"] for node in _output_nodes(graph)]
    traced = Traced(
        graph=graph,
        uses_index=uses_index,
        captured=tuple(capture.captured),
        pinned=tuple(capture.pinned),
        shapes=tuple(tuple(output.shape) for output in outputs),
        dtypes=tuple(output.dtype for output in outputs),
        groups=groups,
        is_random=any(is_random(node) for node in graph.graph.nodes),
    )
    for node in graph.graph.nodes:
        node.meta.clear()  # fake tensors do not travel
    graph.graph.lint()
    graph.recompile()
    return traced


def _fake(
    mode: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensor

    with _disable_current_modes():
        meta = torch.empty(shape, dtype=dtype, device="meta")
        return FakeTensor(mode, meta, device)


def _replicated(
    results: Sequence[tuple[torch.Tensor, bool]], varying_arguments: Sequence[bool], axis: Axis
) -> list[tuple[torch.Tensor, bool]]:
    """Broadcast from the first device what must be the same everywhere and may not be."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    assert mode is not None
    tracer = mode.tracer
    arguments = [node for node in tracer.graph.nodes if node.op == "placeholder"]
    inputs = {node for node, varies in zip(arguments, varying_arguments, strict=False) if varies}
    varying = varying_nodes(tracer.graph, inputs, axis.group or "")

    def settle(block: torch.Tensor) -> torch.Tensor:
        slot: Any = get_proxy_slot(block, tracer, None)
        if slot is None or slot.proxy.node not in varying:  # None: no traced input was touched
            return block
        with bind(axis):
            return pbroadcast(block.detach(), axis.name, 0)

    return [(settle(block) if same else block, same) for block, same in results]


def _finish(block: torch.Tensor, given: set[int]) -> torch.Tensor:
    """A stored value is contiguous, detached and shares no memory with an input (inputs may be
    freed or donated).
    """
    block = block.detach().contiguous()
    return block.clone() if block.untyped_storage()._cdata in given else block


# -- ambient state ---------------------------------------------------------------------------------


def _drop(record: logging.LogRecord) -> bool:
    return False


@contextlib.contextmanager
def _ambient(device: torch.device) -> Iterator[None]:
    """Single-threaded autograd (modes are per thread), ``torch.compile``d inner functions inlined,
    factory calls on ``device``.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        # torch logs, with a traceback on stderr, the shape errors that it then raises
        log = logging.getLogger("torch._subclasses.fake_tensor")
        log.addFilter(_drop)
        stack.callback(log.removeFilter, _drop)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch._dynamo.config.patch(error_on_nested_fx_trace=False))
        if device.type != "cpu":
            stack.enter_context(device)
        yield


@contextlib.contextmanager
def _clean_grads(capture: _Capture) -> Iterator[list[torch.Tensor]]:
    """``loss.backward()`` inside the program sets ``.grad`` of captured parameters to traced
    tensors: take them off again.

    Yields a list that holds, afterwards, every gradient that was left on a captured leaf.
    """
    leftover: list[torch.Tensor] = []
    try:
        yield leftover
    finally:
        for real in capture.captured:
            if id(real) in capture.grads_before:
                if real.grad is not None:
                    leftover.append(real.grad)
                real.grad = capture.grads_before[id(real)]


# -- what cannot be traced -------------------------------------------------------------------------

_UNTRACEABLE = re.compile(
    r"trying to get value out of a tracing tensor|data-dependent|[Cc]annot access data pointer of "
    r"Tensor"
    r"|numpy\(\) is not supported for tensor subclasses|\.tolist\(\) is not supported for tensor "
    r"subclasses"
)


def _untraceable(error: BaseException) -> Untraceable | None:
    from torch._subclasses import fake_tensor

    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )
    text = str(error)
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        reason = f"the shape of the result of {text} depends on the values of its input"
    elif isinstance(error, kinds):
        reason = f"the value of a traced tensor is needed ({text})"
    elif isinstance(error, RuntimeError | TypeError) and _UNTRACEABLE.search(text):
        reason = (
            "the value of a traced tensor is needed (a Python `if`, `while`, `int()`, `.item()` or "
            "`.numpy()` on it)"
        )
    else:
        return None
    return Untraceable(reason, _users_line(error))


def _users_line(error: BaseException) -> str:
    """The innermost frame that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_HERE, _TORCH)) and not frame.filename.startswith(
            "<eval"
        ):
            line = f" `{frame.line}`" if frame.line else ""
            return f"{frame.filename}:{frame.lineno}{line}"
    return "<unknown line>"


# -- graph passes ----------------------------------------------------------------------------------


def _output_nodes(graph: torch.fx.GraphModule) -> Sequence[torch.fx.Node]:
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    return output.args[0]


def _placeholders(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _order_placeholders(graph: torch.fx.GraphModule, captured: Sequence[torch.fx.Node]) -> None:
    """Captured placeholders were created where they were met: put them behind the index, before the
    inputs.
    """
    index = _placeholders(graph)[0]
    for node in reversed(captured):
        index.append(node)


def _written_storages(graph: torch.fx.GraphModule) -> dict[int, torch.fx.Node]:
    """Storage -> first node that writes to it."""
    written: dict[int, torch.fx.Node] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        schema = node.target._schema
        if not schema.is_mutable:
            continue
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = (
                node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            )
            for target in value if isinstance(value, list | tuple) else (value,):
                if isinstance(target, torch.fx.Node):
                    written.setdefault(target.meta["val"].untyped_storage()._cdata, node)
    return written


def _refuse_lost_writes(graph: torch.fx.GraphModule, capture: _Capture) -> None:
    written = _written_storages(graph)
    for node, real in zip(capture.nodes, capture.captured, strict=True):
        writer = written.get(node.meta["val"].untyped_storage()._cdata)
        if writer is not None:
            raise RuntimeError(lost_write(real, f" ({writer.target})"))


def _refuse_lost_gradients(graph: torch.fx.GraphModule, leftover: Sequence[torch.Tensor]) -> None:
    """A gradient that nothing in the (dead-code-free) graph computes any more was neither returned
    nor used.
    """
    alive = {
        value.untyped_storage()._cdata
        for node in graph.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor)
    }
    if any(grad.untyped_storage()._cdata not in alive for grad in leftover):
        raise RuntimeError(
            "the function calls .backward() and leaves a gradient on a captured parameter without "
            "using it; the devices work on copies of the caller's parameters, so the gradient "
            "would be lost. Return the .grad tensors, or use torchpmap.value_and_grad."
        )


def _protect_inputs(graph: torch.fx.GraphModule) -> None:
    """An in-place write to an input works on a copy: the stored value may be used again."""
    written = _written_storages(graph)
    placeholders = _placeholders(graph)
    last = placeholders[-1]
    for node in placeholders:
        if node.meta["val"].untyped_storage()._cdata in written:
            with graph.graph.inserting_after(last):
                copy = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(copy)
            copy.replace_input_with(copy, node)


def _drop_detaches(graph: torch.fx.GraphModule) -> None:
    """Nothing in the graph records gradients any more, so a detach is only time spent per call."""
    for node in graph.graph.nodes:
        if node.target is _aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def _drop_unused_index(graph: torch.fx.GraphModule) -> bool:
    index = _placeholders(graph)[0]
    if index.users:
        return True
    graph.graph.erase_node(index)
    return False
