"""What differs between torch 2.11 and torch 2.15: all versions of torch that are told apart.

Each part says what which version does, and ends with what is used elsewhere.  ``docs/versions.md``
says with which versions the tests were run.  Delete a part when no supported version needs it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

# torch loads these itself
from torch._functorch import utils as functorch_utils
from torch._library import custom_ops
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad, function
from torch.fx import _symbolic_trace
from torch.utils import checkpoint

_functorch: Any = torch._C._functorch


# -- a missing batching rule -----------------------------------------------------------------------

# torch 2.11 cannot vmap ``tensor.view(dtype)``; the rule came with
# https://github.com/pytorch/pytorch/pull/180728.

_VIEW = "aten::view.dtype"


def _view_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    level = _functorch.maybe_current_level()
    rows, dim = _functorch._unwrap_batched(x, level)
    batched = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
    with torch._C._ExcludeDispatchKeyGuard(batched):
        if dim is None:
            return rows.view(dtype)
        if rows.dim() == 1 and rows.dtype.itemsize != dtype.itemsize:
            raise RuntimeError(
                f"self.dim() cannot be 0 to view {rows.dtype} as {dtype} (different element sizes)"
            )
        return _functorch._add_batch_dim(rows.movedim(dim, 0).view(dtype), 0, level)


if not torch._C._dispatch_has_kernel_for_dispatch_key(_VIEW, "FuncTorchBatched"):
    _rules = torch.library.Library("aten", "IMPL")
    _rules.impl("view.dtype", _view_rows, "FuncTorchBatched")


# -- the mark of a trace ---------------------------------------------------------------------------

# A global until torch 2.13, of a thread in torch 2.15.


def fx_tracing() -> AbstractContextManager[Any]:
    """A block in which ``torch.compile`` knows of a trace, and runs functions as they are."""
    if hasattr(_symbolic_trace, "_is_fx_tracing_context"):
        marked: AbstractContextManager[Any] = _symbolic_trace._is_fx_tracing_context(True)
        return marked
    return patch.object(_symbolic_trace, "_is_fx_tracing_flag", True)


# -- checks that raise -----------------------------------------------------------------------------

# torch 2.11 takes this operation, which returns nothing, for dead code: a compiled ``cholesky``
# would return a wrong result (https://github.com/pytorch/pytorch/issues/182965).  Torch 2.13 knows
# that it has an effect.
torch.fx.has_side_effect(torch.ops.aten._linalg_check_errors.default)


# -- warnings that are torch's own affair ----------------------------------------------------------

# At the first jvp of a process torch makes rules with ``torch.jit.script``, which warns that it is
# deprecated: up to torch 2.13 with a DeprecationWarning, which Python shows only to tests; torch
# 2.15 with a FutureWarning, which every user sees, from every worker.

_make_forward_rules = forward_ad._maybe_load_decompositions
_making = threading.Lock()


def _make_forward_rules_quietly() -> None:
    if torch.compiler.is_dynamo_compiling():  # which makes them itself
        _make_forward_rules()
        return
    with _making, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is")
        _make_forward_rules()
    forward_ad._maybe_load_decompositions = _make_forward_rules


forward_ad._maybe_load_decompositions = _make_forward_rules_quietly


# -- fake tensors ----------------------------------------------------------------------------------


@contextmanager
def no_device_init() -> Iterator[None]:
    """A block in which fake tensors initialise no device, as each would in torch 2.11: constants
    stay on the host.

    A subclass of ``FakeTensorMode`` would not do: ``torch.cond`` knows the class alone.
    """
    no_context = patch.object(fake_tensor, "init_gpu_context", lambda device: None)
    with no_context, patch.object(fake_tensor.FakeTensorMode, "avoid_device_init", True):
        yield


# -- autograd.Function -----------------------------------------------------------------------------


def function_entry(found: Callable[[Any], Any]) -> tuple[Any, str, Any]:
    """(module, name, replacement) of a function to replace, so that every ``autograd.Function``
    gets ``found(argument)`` instead of an argument.

    In torch 2.15 ``apply`` is in C++.  For functions with a ``setup_context`` it calls Python
    first; derivatives refuse the others.
    """
    if hasattr(function, "_bind_default_args"):
        bind = function._bind_default_args

        def bound(forward: Any, args: Any, kwargs: Any) -> Any:
            args, kwargs = bind(forward, args, kwargs)
            return tuple(map(found, args)), kwargs

        return function, "_bind_default_args", bound
    unwrap = functorch_utils.unwrap_dead_wrappers
    entry = functorch_utils, "unwrap_dead_wrappers"
    return *entry, lambda args: unwrap(tuple(map(found, args)))


@classmethod  # type: ignore[misc]
def _inherited(cls: Any, *args: Any, **kwargs: Any) -> Any:
    base: Any = super(torch.autograd.Function, cls)
    return base.apply(*args, **kwargs)


class _Applying:
    """Where ``autograd.Function`` has its ``apply``, as an attribute that can be replaced."""

    @property
    def apply(self) -> Any:
        return vars(torch.autograd.Function).get("apply", _inherited)

    @apply.setter
    def apply(self, value: Any) -> None:
        if value is _inherited:
            del torch.autograd.Function.apply
        else:
            setattr(torch.autograd.Function, "apply", value)  # noqa: B010 (a class, to mypy)


def apply_entry(
    arguments: Callable[[Any, Any], Iterable[Any]],
) -> tuple[Any, str, Callable[[Any], Any]]:
    """(owner, name, what makes the replacement) of what is replaced, so that ``apply`` of every
    ``autograd.Function`` gets ``arguments(class, args)``.
    """

    def make(own: Any) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return own.__get__(None, cls)(*arguments(cls, args), **kwargs)

        return classmethod(apply)

    return _Applying(), "apply", make


def applying(found: Callable[[Any], Any]) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """What is replaced, so that functions without a ``setup_context`` get ``found(argument)`` too;
    empty where ``function_entry`` does it.
    """
    is_entered = not hasattr(function, "_bind_default_args")
    return [] if is_entered else [apply_entry(lambda cls, args: map(found, args))]


# -- torch.utils.checkpoint ------------------------------------------------------------------------

# ``checkpoint`` runs a function in a generator.  In torch 2.15 that is another one than up to torch
# 2.13, and gets its settings by name.


def checkpoint_bracket(
    replacement: Callable[[Callable[..., Any], Callable[[], Any]], Any],
) -> tuple[str, Any]:
    """(name, function): the generator's name in its module, and what takes its place.  It calls
    ``replacement(own, context_fn)``, where ``own(**settings)`` is the generator with these settings
    changed.
    """
    name = "_checkpoint_without_reentrant_generator_impl"
    if hasattr(checkpoint, name):
        generator = getattr(checkpoint, name)

        def by_name(fn: Any, args: Any, kwargs: Any, **settings: Any) -> Any:
            def own(**changes: Any) -> Any:
                return generator(fn, args, kwargs, **(settings | changes))

            return replacement(own, settings.get("context_fn", checkpoint.noop_context_fn))

        return name, by_name

    earlier = checkpoint._checkpoint_without_reentrant_generator

    def by_position(
        fn: Any,
        preserve_rng_state: bool = True,
        context_fn: Any = checkpoint.noop_context_fn,
        determinism_check: str = "default",
        debug: bool = False,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        def own(context_fn: Any = context_fn, debug: bool = debug) -> Any:
            settings = preserve_rng_state, context_fn, determinism_check, debug
            return earlier(fn, *settings, *rest, **kwargs)

        return replacement(own, context_fn)

    return earlier.__name__, by_position


# -- imports that initialise CUDA ------------------------------------------------------------------


@contextmanager
def no_cuda_probe() -> Iterator[None]:
    """A block in which ``torch.cuda.is_available()`` does not ask CUDA, but only whether torch was
    built with it.

    In torch 2.11 Inductor asks when it is imported.  A process that has asked cannot be forked.
    """
    with patch.object(torch.cuda, "is_available", torch.backends.cuda.is_built):
        yield


# -- operations of the user's ----------------------------------------------------------------------


def autocast_dtypes(definition: custom_ops.CustomOpDef) -> dict[str, torch.dtype]:
    """Of what ``torch.library.custom_op`` returns: device type -> the dtype that
    ``register_autocast`` was given.
    """
    found: dict[str, torch.dtype] | None = getattr(definition, "_autocast_dtype", None)
    if found is not None:
        return found
    # torch 2.11 has an attribute for each type (https://github.com/pytorch/pytorch/pull/183689)
    return {
        name[len("_autocast_") : -len("_dtype")]: dtype
        for name, dtype in vars(definition).items()
        if name.startswith("_autocast_") and dtype is not None
    }
