"""``jit``: ordinary code over tensors on the devices, as one program for all of them.

__call__ --key--> Program --run--> one plan, whose results go to the caller's tensors
         +------> trace_whole --> plan_of     the first call of a kind
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Hashable
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchpmap._base.ambient import keyed
from torchpmap._base.boundary import boundary, fold
from torchpmap._base.busy import waiting
from torchpmap._base.errors import TraceError, warn
from torchpmap._base.exact import exact
from torchpmap._base.pytree import flatten_call
from torchpmap._base.sources import defined_at
from torchpmap._base.torch_internals import (
    break_graph,
    disable_dynamo,
    is_traced,
    is_transformed,
    num_modes,
)
from torchpmap._layout import axis_stack
from torchpmap._runtime import inline_mode
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap._trace.compile import EAGER, parse_compile
from torchpmap._trace.environment import Environment
from torchpmap._trace.optimizers import NotYet
from torchpmap._trace.trace import Untraceable
from torchpmap._transforms.call import check_function, name_of
from torchpmap._transforms.jit_program import LoweredProgram, Options, Program
from torchpmap._transforms.mapped import NO_PART_OF_A_GRAPH

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MAX_PROGRAMS = 8
"""Of one kind of call, that differ in what they close over."""


@disable_dynamo
def _outside_dynamo(jitted: Jitted[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call in a function that ``torch.compile`` compiles: between its graphs, untouched."""
    return jitted(*args, **kwargs)


class Jitted(Generic[_P, _R]):
    """A function that ``jit`` has made, called like the function."""

    __wrapped__: Callable[_P, _R]

    def __init__(
        self, fun: Callable[_P, _R], compile: Any, fullgraph: bool, timeout: float | None
    ) -> None:
        functools.update_wrapper(self, fun, updated=())
        self.__wrapped__ = self._fun = fun
        backend = parse_compile(compile)
        self._is_traced = backend is not None
        self._options = Options(name_of(fun), defined_at(fun), backend or EAGER, timeout)
        self._fullgraph = fullgraph
        self._lock = threading.RLock()
        self._programs: dict[Hashable, list[Program]] = {}
        self._untraceable: set[Hashable] = set()
        self._environment = Environment(fun, by_name=(Optimizer, LRScheduler))
        self._runtime: Any = None
        self.num_traces = 0

    def __repr__(self) -> str:
        return f"<jit of {self._options.name}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if is_dynamo_compiling():
            break_graph(NO_PART_OF_A_GRAPH)
            return cast(_R, _outside_dynamo(self, *args, **kwargs))
        if self._runs_here():
            return self._fun(*args, **kwargs)
        try:
            return cast(_R, self._run(args, kwargs))
        except BaseException as error:
            fold(error)
            raise

    def _runs_here(self) -> bool:
        """Whether a call is no program of its own: in a mapped function, a trace or a transform."""
        is_part = axis_stack.bound() or is_transformed() or (num_modes() and is_traced())
        return bool(not self._is_traced or is_part or inline_mode.active())

    @boundary
    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> LoweredProgram:
        """Trace the call, without compiling or running it.

        Raises:
            TraceError: the function cannot be traced, or is never traced (``compile=False``).
        """
        program, _ = self._program(args, kwargs) if self._is_traced else (None, ())
        if program is None:
            prefix = self._options.prefix
            raise TraceError(f"{prefix}: it runs operation by operation: there is no graph to show")
        return LoweredProgram(program)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        program, tensors = self._program(args, kwargs)
        if program is None or program.refuses(tensors):
            return self._fun(*args, **kwargs)
        return program.run(tensors)

    def _program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Program | None, list[torch.Tensor]]:
        """What runs a call, and the tensors in it; None: the function itself, operation by
        operation.
        """
        leaves, structure = flatten_call(args, kwargs)
        leaves = [torch.as_tensor(x) if isinstance(x, np.ndarray) else x for x in leaves]
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        kinds = tuple([_leaf_key(leaf) for leaf in leaves])
        key = structure, structure.dict_order, keyed(), torch.is_grad_enabled(), kinds
        runtime = current_runtime()
        if runtime is not self._runtime or self._environment.changed():
            self._forget(runtime)
        for program in self._programs.get(key, ()):
            if program.holds(tensors):
                return program, tensors
        if key in self._untraceable:
            return None, tensors
        with self._lock, waiting(None):
            self.num_traces += 1
            try:
                with self._environment.tracing():
                    program = Program(self._fun, self._options, leaves, structure)
            except Untraceable as verdict:
                self._give_up(key, verdict)
                return None, tensors
            programs = self._programs.setdefault(key, [])
            programs.insert(0, program)
            del programs[_MAX_PROGRAMS:]
        return program, tensors

    def _give_up(self, key: Hashable, verdict: Untraceable) -> None:
        """Raise if the function must be traced; else warn that it runs operation by operation."""
        if isinstance(verdict, NotYet):
            return
        prefix = self._options.prefix
        because = f"{verdict.where}: {verdict.reason}. Use {verdict.instead}"
        if self._fullgraph:
            raise TraceError(
                f"{prefix}: fullgraph=True, but the function cannot be traced: at {because}, "
                "or drop fullgraph to run it operation by operation."
            ) from verdict.__cause__
        self._untraceable.add(key)
        warn(
            f"{prefix}: running operation by operation, which is slower, because of "
            f"{because}, or pass compile=False to silence this warning."
        )

    def _forget(self, runtime: Any) -> None:
        self._programs.clear()
        self._untraceable.clear()
        self._runtime = runtime


def _leaf_key(leaf: Any) -> Hashable:
    if type(leaf) is ShardedTensor:
        return leaf._alive()[0], leaf.requires_grad
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return exact(leaf)


@overload
def jit(
    fun: Callable[_P, _R],
    *,
    compile: bool | dict[str, Any] = True,
    fullgraph: bool = False,
    timeout: float | None = None,
) -> Jitted[_P, _R]: ...
@overload
def jit(
    fun: None = None,
    *,
    compile: bool | dict[str, Any] = True,
    fullgraph: bool = False,
    timeout: float | None = None,
) -> Callable[[Callable[_P, _R]], Jitted[_P, _R]]: ...
@boundary
def jit(
    fun: Callable[..., Any] | None = None,
    *,
    compile: bool | dict[str, Any] = True,
    fullgraph: bool = False,
    timeout: float | None = None,
) -> Any:
    """Return ``fun`` as one program for all devices; computation follows the data.

    (fun: tensors -> results) -> the same, with ShardedTensors

    The function is ordinary code over whole values: a model, ``loss.backward()``,
    ``optimizer.step()``.  Where its tensors lie (``replicate``, ``shard_batch``, ``device_put``)
    says how it runs: replicated parameters and a batch cut in rows are data-parallel training,
    parameters that are cut are fully sharded or tensor-parallel training.  A call sends one message
    to each device.  The first call of a kind traces the function on whole shapes; Python code runs
    then and not again.  What it writes (parameters, buffers, ``.grad``, state of optimizers) is
    written as by the same code without ``jit``, and rates of schedules may change between calls.

    Args:
        fun: a function of pytrees of tensors and other values, which are compared by value.  Left
            out, ``jit(...)`` is a decorator.
        compile: True (Inductor), False (run ``fun`` as it is, operation by operation), or a dict as
            for ``pmap``; ``{"backend": "eager"}`` runs the graph uncompiled.
        fullgraph: raise instead of running operation by operation when ``fun`` cannot be traced.
        timeout: most seconds that a call may take on the devices; see ``pmap``.

    Returns:
        The function; ``__wrapped__`` is ``fun``.  Results that are tensors are ShardedTensors.

    Raises:
        ValueError: the tensors are on different devices.
        TraceError: ``fullgraph=True``, and the function cannot be traced.  What ``fun`` raises is
            raised with its own type.

    Example:
        >>> import torch, torchpmap as tp
        >>> _ = torch.manual_seed(0)
        >>> model = tp.replicate(torch.nn.Linear(2, 1))
        >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> @tp.jit
        ... def step(x, y):
        ...     opt.zero_grad()
        ...     loss = (model(x) - y).square().mean()
        ...     loss.backward()
        ...     opt.step()
        ...     return loss
        >>> x = tp.shard_batch(torch.ones(8, 2))
        >>> losses = [float(step(x, 3.0)) for _ in range(30)]
        >>> losses[0] > 1, losses[-1] < 0.01
        (True, True)

    Source: ``jax.jit`` over sharded arrays; effects are those of torch.
    """
    make = functools.partial(_jitted, compile=compile, fullgraph=fullgraph, timeout=timeout)
    parse_compile(compile)  # misuse raises here, at the decorator's line
    return make if fun is None else make(fun)


@boundary
def _jitted(fun: Callable[..., Any], **options: Any) -> Jitted[..., Any]:
    return Jitted(check_function(fun), **options)
