"""Function + shapes -> one rank-independent graph.

``trace`` runs a program once on fake tensors.  functorch levels, autograd,
``.backward()`` and the collectives dissolve into one flat ATen + collective-op graph in which the
axis index is an input and process groups are names, so every device can run the same graph.

``_trace/capture`` turns each real tensor that the program closes over (parameters, buffers,
globals) into a further input of the graph: a baked-in value would go stale when the caller changes
it.

``trace`` raises errors of the user's code as they are.  It raises ``Untraceable``, which names the
user's line, for what a graph cannot express (control flow on values, shapes that depend on values).

torch's tracing machinery (and with it Dynamo and SymPy, 1.5 s of imports) is imported at the first
trace, not with the package.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.ambient import callers_modes_off
from torchpmap._base.devices import PLATFORMS
from torchpmap._base.sources import is_users, line, users_line
from torchpmap._base.torch_errors import needs_a_value
from torchpmap._base.torch_internals import (
    depth,
    forward_level,
    innermost,
    is_wrapped,
    level_of,
    nested_jvp,
    new_fake,
    outside_transforms,
)
from torchpmap._base.torch_versions import no_device_init
from torchpmap._layout.axis_stack import Axis, Partition, peers, subgroup_name
from torchpmap._trace.buckets import bucketed
from torchpmap._trace.capture import (
    Capture,
    SettingChanged,
    TracedCalls,
    as_it_is,
    clean_grads,
    is_real,
)
from torchpmap._trace.chunks import unroll_short_scans
from torchpmap._trace.graphs import results_of, writes
from torchpmap._trace.idioms import idiom
from torchpmap._trace.leaves import CallsWithLeaves, Leaves, needs_leaves
from torchpmap._trace.partition import Halves, split
from torchpmap._trace.passes import (
    clean,
    drop_unused_index,
    finish_graph,
    input_kinds,
    keep_rows,
    names_in,
    protect_inputs,
    refuse_lost_gradients,
    refuse_lost_writes,
)
from torchpmap._trace.remat import rematerialize, without_writes
from torchpmap._trace.repetition import Repeated, repeated
from torchpmap._trace.replication import Demand, Replication
from torchpmap._trace.seeds import generator_kept
from torchpmap._trace.toolchain import import_dynamo
from torchpmap._trace.unread import drop_unread
from torchpmap._trace.untraceable import Untraceable
from torchpmap.random._threefry import whole

_lock = threading.RLock()  # torch keeps the state of a trace in globals: one at a time


TracedBody = Callable[[Sequence[torch.Tensor], Axis], Sequence[Demand]]
"""Takes one block per input, and the axis of the devices; returns the output blocks."""


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
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """Shape and dtype of the placeholders after the index."""
    held: tuple[tuple[int, ...], ...]
    """Per such placeholder: a number for every device, equal for devices that hold equal blocks."""
    halves: Halves | None
    """The graph in two, if ``trace`` got ``split_at``."""
    writes_inputs: bool
    """Whether the function writes in place to an argument, or to its copy of a closure."""
    seconds: float
    """How long the function took to trace, without what was done with the graph."""
    repeated: Repeated | None
    """A line that should be a loop."""


@dataclass(frozen=True)
class TracedInput:
    """A block that goes into the graph."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[int, ...]
    """A number for every device, equal for devices that hold equal blocks."""


def trace(
    body: TracedBody,
    inputs: Sequence[TracedInput],
    *,
    axis_name: Any,
    axis_size: int,
    group: str,
    device: torch.device,
    same_closures: bool = True,
    outside: Collection[int] = (),
    split_at: tuple[int, int] | None = None,
    ordered: bool = True,
) -> Traced:
    """Trace ``body`` over fake blocks; nothing runs or is sent.

    ``same_closures``: whether all devices are given the same values for what the function closes
    over.  ``outside``: ids of tensors the function closes over that transforms around the call are
    tracing.  ``split_at``: number of outputs of the forward half, and of trailing inputs that are
    cotangents.  ``ordered``: whether the graph runs as it is.
    """
    begin = time.monotonic()
    groups: dict[str, Partition] = {}

    def subgroup(partition: Partition) -> str:
        name = subgroup_name(group, partition)
        groups[name] = partition
        return name

    capture = Capture(device)
    record = capture.record

    def flat(index: torch.Tensor, *blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = run(index, blocks)
        sources = index, *blocks, *capture.stand_ins.values()
        given = {t.untyped_storage()._cdata for t in sources}
        with torch.no_grad():
            return tuple(_finish(block, given) for block in results)

    def run(index: torch.Tensor, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        axis = Axis(axis_name, axis_size, index, group, subgroup)
        with capture.views.entered(), calls, torch.enable_grad():
            known = capture.replication = Replication(
                capture.graph,
                [i.blocks for i in inputs],
                lambda: [] if same_closures else capture.nodes,
                ChainMap(groups, {group: peers(axis)}),
                capture.node_of,
            )
            demands = body(blocks, axis)
            demands = [d._replace(block=capture.substitute(d.block)) for d in demands]
            outputs = known.settle(demands)
            capture.end()
            return outputs

    enclosing_depth = depth()

    def find(tensor: torch.Tensor) -> torch.Tensor:
        if not _is_from_around(tensor, enclosing_depth, outside):
            return tensor
        return capture.from_enclosing_transform(tensor)

    def on_enter_transform(tensor: torch.Tensor) -> torch.Tensor:
        capture.views.before_call(tensor)
        if not enclosing_depth:
            return tensor
        # so that a wrapper of a real tensor comes from around the call
        return capture.on_enter_transform(find(tensor))

    leaves = Leaves(capture) if needs_leaves(device) else None
    mapped = find if enclosing_depth else as_it_is
    calls = (
        CallsWithLeaves(mapped, leaves)
        if leaves
        else TracedCalls(capture, mapped, on_enter_transform)
    )
    kinds = [((), torch.int64), *((i.shape, i.dtype) for i in inputs)]
    with _lock, clean_grads(capture) as leftover:
        graph = recorded(flat, kinds, capture)
    leftover += leaves.gradients() if leaves else []
    seconds = time.monotonic() - begin
    drop_unread(graph)
    often = repeated(graph)
    refuse_lost_gradients(graph, leftover)
    capture.refuse_writes_by_python()
    refuse_lost_writes(capture)
    capture.place(1)
    writes_inputs = protect_inputs(graph)
    clean(graph)
    uses_index = drop_unused_index(graph)
    if (record.regions or split_at is not None) and writes(graph.graph):
        with _no_transforms():
            graph = without_writes(graph, record)
    again = rematerialize(graph, record, ordered=ordered, split=split_at is not None)
    outputs = [node.meta["val"] for node in results_of(graph.graph)]
    closure = (0,) * axis_size if same_closures else tuple(range(axis_size))
    halves = None if split_at is None else split(graph, *split_at, again)
    traced = Traced(
        graph=graph,
        uses_index=uses_index,
        captured=tuple(capture.tensors),
        pinned=(*capture.pinned, *(tensor for tensor, *_ in capture.read)),
        shapes=tuple(tuple(output.shape) for output in outputs),
        dtypes=tuple(output.dtype for output in outputs),
        groups={name: groups[name] for name in names_in(graph) if name in groups},
        inputs=input_kinds(graph)[uses_index:],
        held=(*[closure] * len(capture.nodes), *(each.blocks for each in inputs)),
        halves=halves,
        writes_inputs=writes_inputs,
        seconds=seconds,
        repeated=often,
    )
    limit = PLATFORMS[device.type].bucket_bytes
    for module in (graph, *((halves.forward, halves.backward) if halves else ())):
        if not ordered:
            unroll_short_scans(module)
        keep_rows(module)
        if limit is not None:
            bucketed(module, limit)
        finish_graph(module)
    return traced


def recorded(
    fun: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[tuple[Any, ...]],
    capture: Capture,
) -> torch.fx.GraphModule:
    """The graph of a function of fake tensors of these shapes, dtypes and, if they are given,
    strides; raises ``Untraceable`` if it cannot become one.
    """
    device, fake_mode = capture.device, capture.fake_mode
    import_dynamo()
    from torchpmap._trace.graph_mode import graph_of

    with _lock, generator_kept(), _no_transforms(), _ambient(device):
        arguments = [
            new_fake(fake_mode, shape, dtype, device, *strides) for shape, dtype, *strides in inputs
        ]
        with fake_mode, whole():
            try:
                return graph_of(fun, arguments, capture)
            except Exception as error:
                verdict = _untraceable(error)
                if verdict is None:
                    raise
                raise verdict from error


def _finish(block: torch.Tensor, given: set[int]) -> torch.Tensor:
    """The block as it is stored: contiguous, and sharing no memory with an input (inputs may be
    freed or donated).
    """
    block = block.contiguous()
    return block.clone() if block.untyped_storage()._cdata in given else block


# -- transforms around the call --------------------------------------------------------------------


@contextlib.contextmanager
def _no_transforms() -> Iterator[None]:
    """Trace the function without the transforms around the call: ``_plan/autograd`` serves them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(outside_transforms())
        if forward_level() >= 0:
            # torch.func.jvp would enter a second level of forward_ad, which torch forbids; if it
            # counts as nested in another jvp, it uses the first level
            stack.enter_context(nested_jvp())
        yield


def _is_from_around(tensor: torch.Tensor, enclosing_depth: int, outside: Collection[int]) -> bool:
    """Whether a transform around the call, and not one inside the function, is tracing this
    tensor.
    """
    if not enclosing_depth or not is_wrapped(tensor):
        return False
    level = level_of(tensor)
    if id(tensor) in outside or level > depth():
        return True
    if level <= enclosing_depth and is_real(innermost(tensor)):
        raise NotImplementedError(
            f"at {users_line()}: a tensor of shape {list(tensor.shape)} that the mapped function "
            "closes over meets function transforms both around the call and inside the function; "
            "pass it to the function as an argument (in_axes=None)."
        )
    return False


# -- ambient state ---------------------------------------------------------------------------------


def _drop(record: logging.LogRecord) -> bool:
    return False


@contextlib.contextmanager
def _ambient(device: torch.device) -> Iterator[None]:
    """Single-threaded autograd (modes are per thread), ``torch.compile``d inner functions inlined,
    factory calls on ``device``; the caller's own modes are off.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(callers_modes_off())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        # torch logs, with a traceback on stderr, the shape errors that it then raises
        log = logging.getLogger("torch._subclasses.fake_tensor")
        log.addFilter(_drop)
        stack.callback(log.removeFilter, _drop)
        stack.enter_context(torch._dynamo.config.patch(error_on_nested_fx_trace=False))
        if device.type != "cpu":
            stack.enter_context(no_device_init())
            stack.enter_context(device)
        yield


# -- what cannot be traced -------------------------------------------------------------------------


def _untraceable(error: BaseException) -> Untraceable | None:
    from torch._subclasses import fake_tensor

    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )
    text = str(error)
    if isinstance(error, SettingChanged):
        reason = f"the function changes a setting of torch while it runs: {error}"
    elif isinstance(error, fake_tensor.DynamicOutputShapeException):
        reason = f"the shape of the result of {text} depends on the values of its input"
    elif isinstance(error, kinds):
        reason = f"the value of a traced tensor is needed ({text})"
    elif needs_a_value(error):
        reason = (
            "the value of a traced tensor is needed (a Python `if`, `while`, `int()`, `.item()` or "
            "`.numpy()` on it)"
        )
    else:
        return None
    return Untraceable(reason, _users_line(error), idiom(error))


def _users_line(error: BaseException) -> str:
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_users(frame):
            return line(frame.f_code.co_filename, number)
    return "<unknown line>"
