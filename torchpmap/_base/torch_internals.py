"""Undocumented parts of torch that this package needs: check them first with a new torch.

Everything here was checked with torch 2.11.0, 2.13.0 and 2.15.0; ``_base/torch_versions`` has what
differs between them.  ``tests/test_layers.py`` refuses private names of torch in other files,
except in these, which were checked with the same versions:

    _base/ambient          getters and setters of torch's settings; the caller's modes and hooks
    _base/pytree           torch.utils._pytree: what is a node of a tree
    _base/torch_groups     process groups and their back ends
    _base/torch_versions   what differs between versions
    _collectives/backend   torch.ops._c10d_functional: the collectives
    _trace/boxed           graphs and artifacts of Inductor whose arguments are a list
    _trace/compile         Inductor, the list of Dynamo's back ends, keys of the dispatcher
    _trace/custom_ops      what the dispatcher and torch.library know about the user's operations
    _trace/inductor_gaps   passes of Inductor, where its code would be wrong
    _trace/promises        keys of the dispatcher
    _trace/replay          what Inductor's code of a graph calls
    _trace/toolchain       Inductor's choice of a compiler and of a folder
    _trace/trace           what tracing sets in Dynamo, and errors of fake tensors

The test cannot see private attributes of objects.  Besides ``operator._schema``, which many files
read, these are used elsewhere: attributes of ``CustomOpDef`` (``_trace/custom_ops``,
``_trace/transform_rules``), parts of an operator's name (``_trace/pickling``, ``_trace/compile``,
``_trace/transform_rules``, ``_sharded/rules/table``), ``storage._cdata`` (``_base/storages``,
``_base/refuse_writes``, ``_trace/graphs``, ``_trace/passes``, ``_trace/trace``,
``_transforms/jit_program``), ``tensor._version`` (``_base/contents``), ``graph._root``
(``_loops/emit``, ``_loops/surroundings``, ``_trace/graphs``, ``_trace/repetition``),
``node._sequence_nr()`` (``_trace/remat``), ``_get_dict`` and ``_config`` of torch's modules of
settings (``_trace/saved_code``), ``_torchdynamo_orig_callable`` (``_trace/pickling``) and
``optimizer._init_group`` (``_base/optimizers``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import CodeType, FunctionType
from typing import Any, TypeVar
from unittest.mock import patch

import torch

# torch loads these itself; functions import the modules that it does not (Dynamo, Inductor)
from torch import _decomp, _ops
from torch._functorch import autograd_function, eager_transforms, pyfunctorch
from torch._functorch import vmap as functorch_vmap
from torch._library import custom_ops, effects
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad
from torch.fx import _lazy_graph_module
from torch.utils import _python_dispatch

Class = TypeVar("Class", bound=type)


# -- function transforms ---------------------------------------------------------------------------

_functorch: Any = torch._C._functorch

has_transforms = torch._C._are_functorch_transforms_active
is_wrapped = _functorch.is_functorch_wrapped_tensor
"""Whether a transform has wrapped a tensor, even if the transform is over by now."""

is_vmap_wrapper = _functorch.is_batchedtensor
"""Whether it was a vmap that has wrapped a tensor."""


def with_memory(func: Any) -> Any:
    """The operation itself, or what makes zeros, not torch's short form of zeros, which have no
    memory: in a dispatch mode torch (2.13) reads it (``sub_`` with ``alpha``), and crashes.
    """
    is_short = func is torch.ops.aten._efficientzerotensor.default
    return torch.ops.aten.zeros.default if is_short else func


is_zeros: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Whether a tensor is torch's short form of zeros, which has no memory to read."""

level_of = _functorch.maybe_get_level
"""The level of the transform that has wrapped a tensor (the outermost transform has level 1)."""

add_batch_dim = _functorch._add_batch_dim
"""(tensor, dim, level) -> the tensor as the vmap of that level hands it to its function."""

ENTRIES = ((eager_transforms, "_wrap_for_grad"), (functorch_vmap, "_add_batch_dim"))
EXITS = ((eager_transforms, "_unwrap_for_grad"), (functorch_vmap, "_remove_batch_dim"))
"""(module, function) where tensors enter or leave a transform; ``_trace/capture`` replaces it."""
VMAP = (functorch_vmap, "_flat_vmap")
VMAPIFY = (autograd_function, "vmapify_autograd_function")


def depth() -> int:
    """How many function transforms are active."""
    top = _functorch.peek_interpreter_stack()
    return 0 if top is None else int(top.level())


def transforms() -> list[Any]:
    """The active function transforms, the outermost first."""
    return _functorch.get_interpreter_stack() or []


def is_vmap(transform: Any) -> bool:
    return bool(transform.key() == _functorch.TransformType.Vmap)


def is_grad(transform: Any) -> bool:
    return bool(transform.key() == _functorch.TransformType.Grad)


def was_recording(transform: Any) -> bool:
    """Whether gradients are recorded around a grad."""
    return bool(_functorch.CGradInterpreterPtr(transform).prevGradMode())


def size_and_randomness(transform: Any) -> tuple[int, str]:
    """Of a vmap: the number of its rows, and its argument ``randomness``."""
    vmapped = _functorch.CVmapInterpreterPtr(transform)
    return vmapped.batchSize(), vmapped.randomness().name.lower()


def row_numbers(transform: Any, device: Any) -> torch.Tensor:
    """Of a vmap, as its function sees them."""
    size, _ = size_and_randomness(transform)
    return add_batch_dim(innermost(torch.arange(size, device=device)), 0, transform.level())


def layers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor, then the tensor that each transform wraps, down to one that none wraps."""
    yield tensor
    while is_wrapped(tensor):
        tensor = _functorch.get_unwrapped(tensor)
        yield tensor


def batched_levels(tensor: torch.Tensor) -> frozenset[int]:
    """The levels of the vmaps along which a tensor differs from row to row."""
    return frozenset(level_of(x) for x in layers(tensor) if is_vmap_wrapper(x))


def innermost(value: Any) -> Any:
    """The value below all function transforms that wrap it."""
    while isinstance(value, torch.Tensor) and is_wrapped(value):
        value = _functorch.get_unwrapped(value)
    return value


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether the innermost transform is a vmap that batches this tensor."""
    same = _functorch.maybe_get_level(tensor) == _functorch.maybe_current_level()
    return bool(same and _functorch.is_batchedtensor(tensor))


def outside_transforms() -> AbstractContextManager[Any]:
    """Hide what happens in the block from all active function transforms."""
    if _functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return pyfunctorch.temporarily_clear_interpreter_stack()


@contextmanager
def at_depth(wanted: int) -> Iterator[None]:
    """Hide what happens in the block from all transforms but the ``wanted`` outermost ones."""
    with ExitStack() as stack:
        for _ in range(depth() - wanted):
            stack.enter_context(pyfunctorch.temporarily_pop_interpreter_stack())
        yield


# -- forward-mode derivatives ----------------------------------------------------------------------

# torch has one level of them per process, opened by the outermost jvp or dual_level.  It keeps the
# number of the level in a global variable, which must be read anew each time.

LEVEL = "_current_level"
forward_state = vars(forward_ad)
"""``forward_state[LEVEL]`` is ``forward_level()``, but 20 ns quicker: for what runs often."""

set_forward_grad = forward_ad._set_fwd_grad_enabled
"""``with set_forward_grad(True)``: for ``jvp`` of an ``autograd.Function``: torch turns it off."""

jvp_level = eager_transforms.jvp_increment_nesting
"""A block in which ``torch.func.jvp`` counts as nested in another, and opens no level itself."""


def forward_level() -> int:
    """The level of forward-mode derivatives; -1 if none are taken."""
    return forward_ad._current_level


def is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is around the caller."""
    return has_transforms() or forward_ad._current_level >= 0


@contextmanager
def nested_jvp() -> Iterator[None]:
    """As ``jvp_level``, without a new level among the function transforms."""
    eager_transforms.JVP_NESTING += 1  # as torch does, so that threads may end in any order
    try:
        yield
    finally:
        eager_transforms.JVP_NESTING -= 1


# -- modes -----------------------------------------------------------------------------------------

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Its subclasses get every operation below autograd, while they are active."""

function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
"""The active modes with ``__torch_function__``, the outermost first."""

outside_modes = _python_dispatch._disable_current_modes
"""A block that no dispatch mode sees."""

num_modes = torch._C._len_torch_dispatch_stack
_mode_of: Any = torch._C._get_dispatch_mode
_modes = torch._C._TorchDispatchModeKey


def tracing_mode() -> Any:
    """The mode that makes the caller's operations nodes of a graph, or None."""
    return _mode_of(_modes.PROXY)


def fake_mode() -> Any:
    """The ``FakeTensorMode`` that is active, or None."""
    return _mode_of(_modes.FAKE)


def node_of(tracer: Any, tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node of a tensor, below all transforms, in the graph of a ``tracing_mode().tracer``."""
    slot = tracer.tensor_tracker.get(tensor)
    node: torch.fx.Node | None = None if slot is None else slot.proxy.node
    return node


def track_as(tracer: Any, tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let the node of another tensor, whose numbers torch may know, stand for this one too."""
    tracer.tensor_tracker[tensor] = tracer.tensor_tracker[other]


def track(tracer: Any, value: Any, node: torch.fx.Node) -> None:
    """Let a node stand for a fake tensor whose numbers are not known, and for each of several one
    that picks it.
    """
    from torch.fx.experimental import proxy_tensor

    node.meta["val"] = proxy_tensor.extract_val(value)
    if isinstance(value, torch.Tensor):
        slot = proxy_tensor._ProxyTensor(torch.fx.Proxy(node, tracer), None)
        tracer.tensor_tracker[value] = slot
        return
    for k, each in enumerate(value):
        if each is not None:
            track(tracer, each, node.graph.call_function(operator.getitem, (node, k)))


LazyGraphModule = _lazy_graph_module._LazyGraphModule
"""A graph module that writes and compiles its Python code when it is first called or shown.  Others
do it whenever they are made or changed, which takes longer than making them.
"""


def is_traced() -> bool:
    """Whether the caller's operations become nodes of a graph, or run on fake tensors."""
    return any(_mode_of(kind) for kind in (_modes.PROXY, _modes.FAKE))


# -- autograd --------------------------------------------------------------------------------------

any_requires_grad = torch._C._any_requires_grad
"""Whether one of the arguments requires grad; those that are no tensors are ignored."""

autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node whose backward this thread runs, or None."""

next_node_number = torch.autograd._get_sequence_nr
"""The number that the next node will have; it grows with every node."""

is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether ``torch.profiler`` records this thread; another one would end it without an error."""


def is_profiler_on() -> bool:
    """Whether ``torch.profiler`` records any thread of this process."""
    return torch.autograd.profiler._is_profiler_enabled


ALL_THREADS: Any = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
"""For ``torch.profiler.profile``."""


def has_record(profile: torch.profiler.profile) -> bool:
    """Whether a profile that was stopped has its record, without which an export ends Python with
    a segmentation fault: a second profile that stops takes that of one of all threads.
    """
    results: Any = profile.profiler and profile.profiler.kineto_results
    return results is not None and bool(results.trace_start_ns())


profiled_range: Callable[[str], AbstractContextManager[None]] = (
    torch._C._profiler._RecordFunctionFast
)
"""``record_function`` that is no operation, which modes and transforms would see."""


AUTOGRAD: Any = torch.autograd
BACKWARD = "_engine_run_backward"
"""Name in ``AUTOGRAD`` of what runs every backward pass: (outputs, cotangents, retain_graph,
create_graph, inputs, ...) -> gradients of the inputs.
"""


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


# -- tensors ---------------------------------------------------------------------------------------

FakeTensor = fake_tensor.FakeTensor
"""A tensor with a shape and a device, but no values."""

FakeTensorMode = fake_tensor.FakeTensorMode

without_fake_cache = fake_tensor.disable_fake_tensor_cache
"""A block in which a ``FakeTensorMode`` does not look up what operations have given before."""


def new_fake(
    mode: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """A ``FakeTensor`` of a mode, contiguous if no strides are given, which no other mode sees."""
    with outside_modes(), torch_function_off():
        if strides is None:
            made = torch.empty(shape, dtype=dtype, device="meta")
        else:
            made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return FakeTensor(mode, made, device)


new_wrapper = torch.Tensor._make_wrapper_subclass
"""Makes a tensor without memory; call it with positional arguments, as keywords cost 0.15 us."""

guard_memory: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""After it, code that still takes the address (``torch.utils.dlpack.to_dlpack``) raises."""

no_torch_dispatch = torch._C._disabled_torch_dispatch_impl
"""``__torch_dispatch__`` of a class of tensors that has none of its own."""

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""``__torch_function__`` for a class that needs none; torch's default would convert results."""

HOOKS_OF_ALL_MODULES: tuple[dict[int, Any], ...] = (
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
)


def hooks_of(tensor: torch.Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Those that get its gradient, and those that run when that is in ``.grad``, by numbers."""
    return tensor._backward_hooks or {}, tensor._post_accumulate_grad_hooks or {}


torch_function_off = torch._C.DisableTorchFunction
"""A block in which no ``__torch_function__`` is called, neither of a class nor of a mode."""

subclass_function_off = torch._C.DisableTorchFunctionSubclass
"""A block in which only modes get ``__torch_function__``."""

below_dispatch = torch._C._DisableTorchDispatch
"""A block in which no ``__torch_dispatch__`` is called: an operation changes the tensor itself."""


# -- operations and their schemas ------------------------------------------------------------------

custom_function_call: Any = autograd_function.custom_function_call
"""What ``torch.autograd.Function.apply`` becomes under function transforms."""

OpOverload = _ops.OpOverload
"""``torch.ops.aten.add.Tensor``"""

OpOverloadPacket = _ops.OpOverloadPacket
"""``torch.ops.aten.add``"""

OpNamespace = _ops._OpNamespace
"""``torch.ops.aten``"""

HigherOrderOperator = _ops.HigherOrderOperator
"""``torch.ops.higher_order.cond``"""

CustomOpDef = custom_ops.CustomOpDef
"""What ``torch.library.custom_op`` returns."""

OPDEFS = custom_ops.OPDEFS
"""All of these that exist, by the names of their operations."""

DispatchKey = torch._C.DispatchKey


@contextmanager
def lazy_bits() -> Iterator[None]:
    """A block whose operations conjugate what is to be; those in ``__torch_dispatch__`` do not."""
    excluded = torch._C._SetExcludeDispatchKeyGuard
    with excluded(DispatchKey.Conjugate, False), excluded(DispatchKey.Negative, False):
        yield


VF: Any = torch._VF
"""Has the functions behind torch's recurrent layers."""

decompositions: Any = _decomp.decompositions
"""Has functions that do as operations do, written with other operations."""


def is_composite(func: Any) -> bool:
    """Whether an operation only calls others: above ``__torch_dispatch__`` it is never seen."""
    composite = DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite)


def keep_in_order(library: Any, operation: str) -> None:
    """Register an operation as an effect, so that graphs keep its calls, in order."""
    library._register_effectful_op(operation, effects.EffectType.ORDERED)


@contextmanager
def without_onednn() -> Iterator[None]:
    """Compute without oneDNN in the block."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def gives_views(func: Any) -> bool:
    """Whether an operation returns a view of an argument (not the argument that it writes to)."""
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in aliases)


# -- Dynamo ----------------------------------------------------------------------------------------


def as_if_compiling() -> AbstractContextManager[Any]:
    """A block in which ``torch.compiler.is_compiling()`` is true."""
    return patch.object(torch.compiler, "_is_compiling_flag", True)


def break_graph(reason: str) -> None:
    """End the graph that ``torch.compile`` is making; with ``fullgraph=True``, raise ``reason``."""
    torch._dynamo.graph_break(msg=reason)


def untraced(cls: Class) -> Class:
    """Mark the methods of a class: under ``torch.compile`` they run as plain Python, with all that
    they call.

    Dynamo does not trace an operation on a tensor of a class that it does not know, but it would
    compile the methods behind the operation.  ``torch.compiler.disable`` does the same as the mark,
    but imports Dynamo and costs a microsecond in every call.
    """
    for value in vars(cls).values():
        for function in (getattr(value, "__func__", value), *_accessors(value)):
            if isinstance(function, FunctionType):
                skipped(function.__code__)
                function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cls


def _accessors(value: object) -> tuple[object, ...]:
    return (value.fget, value.fset) if isinstance(value, property) else ()


def skipped(code: CodeType) -> CodeType:
    """``code``, which Dynamo leaves alone from now on, with all that it calls."""
    frames = torch._C._dynamo.eval_frame
    action = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action, action))
    return code


# -- Inductor --------------------------------------------------------------------------------------

_guards: Any = torch._C._dynamo.guards
tensor_data_pointer: int = _guards._torchinductor_pyobject_tensor_data_ptr
"""Where the functions of Inductor's libraries find how to read the address of a tensor."""
