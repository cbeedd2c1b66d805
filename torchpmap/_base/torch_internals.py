"""Undocumented parts of torch that this package needs: check them first with a new torch.

Everything here was checked with torch 2.13.0.  A few more private names are used elsewhere, each in
one place: those of Inductor (``_trace/compile``), of torch's own operations
(``_trace/custom_ops``, ``_trace/pickling``), of what a trace has to replace (``_trace/capture``,
``_trace/remat``), of the settings (``_base/ambient``), and of files that ``torch.save`` writes
(``checkpoint/_pickles``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

Class = TypeVar("Class", bound=type)


# -- function transforms ---------------------------------------------------------------------------

functorch: Any = torch._C._functorch
"""Each active transform has a level, the outermost 1."""

has_transforms = torch._C._are_functorch_transforms_active
is_wrapped = functorch.is_functorch_wrapped_tensor
"""Whether a transform has wrapped a tensor, even if the transform is over by now."""


def depth() -> int:
    """How many function transforms are active."""
    top = functorch.peek_interpreter_stack()
    return 0 if top is None else int(top.level())


def transforms() -> list[Any]:
    """The active function transforms, the outermost first."""
    return functorch.get_interpreter_stack() or []


def is_vmap(transform: Any) -> bool:
    return bool(transform.key() == functorch.TransformType.Vmap)


def is_grad(transform: Any) -> bool:
    return bool(transform.key() == functorch.TransformType.Grad)


def layers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor, then the tensor that each transform wraps, down to one that none wraps."""
    yield tensor
    while is_wrapped(tensor):
        tensor = functorch.get_unwrapped(tensor)
        yield tensor


def innermost(value: Any) -> Any:
    """The value below all function transforms that wrap it."""
    while isinstance(value, torch.Tensor) and is_wrapped(value):
        value = functorch.get_unwrapped(value)
    return value


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether the innermost transform is a vmap that batches this tensor."""
    same = functorch.maybe_get_level(tensor) == functorch.maybe_current_level()
    return bool(same and functorch.is_batchedtensor(tensor))


def outside_transforms() -> AbstractContextManager[Any]:
    """Hide what happens in the block from all active function transforms."""
    if functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


# -- modes and autograd ----------------------------------------------------------------------------

num_modes = torch._C._len_torch_dispatch_stack


def is_traced() -> bool:
    """Whether the caller's operations become nodes of a graph, or run on fake tensors."""
    kinds = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(kind) for kind in (kinds.PROXY, kinds.FAKE))


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


# -- schemas ---------------------------------------------------------------------------------------


def written_names(arguments: Sequence[Any]) -> list[str]:
    """Names of those arguments of a schema that the operation writes to."""
    return [a.name for a in arguments if a.alias_info and a.alias_info.is_write]


def written_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a call of ``func`` writes to; for a list, its members."""
    found: list[Any] = []
    if func._schema.is_mutable:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                found += value if isinstance(value, list | tuple) else [value]
    return found


# -- errors that only their text tells apart -------------------------------------------------------

_LIMIT_OF_VMAP = re.compile(
    r"vmap|functorch|function transform|does not have a grad_fn|doesn't match the broadcast shape"
    r"|[Cc]annot access (storage|data pointer)|[Bb]atch norm got a batched tensor"
)
_NEEDS_A_VALUE = re.compile(
    r"trying to get value out of a tracing tensor|data-dependent|[Cc]annot access data pointer of "
    r"Tensor|numpy\(\) is not supported for tensor subclasses|\.tolist\(\) is not supported for "
    r"tensor subclasses"
)


def is_timeout(error: BaseException) -> bool:
    """Whether torch raised this because a collective took too long."""
    return bool(re.search(r"[Tt]imeout|[Tt]imed out", str(error)))


def is_limit_of_vmap(error: BaseException) -> bool:
    """Whether torch raised this because all rows run at once."""
    return isinstance(error, RuntimeError | TypeError) and bool(_LIMIT_OF_VMAP.search(str(error)))


def needs_a_value(error: BaseException) -> bool:
    """Whether torch raised this because Python asked for the value of a traced tensor."""
    return isinstance(error, RuntimeError | TypeError) and bool(_NEEDS_A_VALUE.search(str(error)))


# -- Dynamo ----------------------------------------------------------------------------------------


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
                _skip(function.__code__)
                function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cls


def _accessors(value: object) -> tuple[object, ...]:
    return (value.fget, value.fset) if isinstance(value, property) else ()


def _skip(code: CodeType) -> None:
    frames = torch._C._dynamo.eval_frame
    action = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action, action))
