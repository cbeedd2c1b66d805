"""A mapped function: what ``pmap`` and ``shard_map`` return.  A kind of call is prepared once, and
then looked up.

__call__ --call--> _run_here      in the calling process, where there are no devices to choose
         --> _run_on_devices
               --key--> Prepared --> _run    the hot path
               --call-> prepare              the first call of a kind
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    cast,
    overload,
)

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from torchpmap._base.ambient import keyed
from torchpmap._base.boundary import boundary, fold, outside_graphs
from torchpmap._base.busy import waiting
from torchpmap._base.config import config
from torchpmap._base.errors import POOL_CLOSED, RuntimeClosed, TraceError
from torchpmap._base.pytree import flatten_call
from torchpmap._base.torch_internals import (
    any_requires_grad,
    break_graph,
    is_traced,
    is_transformed,
    num_modes,
)
from torchpmap._layout import axis_stack
from torchpmap._plan.autograd import (
    call_differentiable,
    no_derivative,
    without_derivative,
)
from torchpmap._plan.plan import Called
from torchpmap._plan.stages import Lowered
from torchpmap._plan.uncompiled import UncompiledPlan
from torchpmap._runtime import inline_mode
from torchpmap._runtime.base import GiveUp, Handle, Runtime
from torchpmap._runtime.current import expect_compiling
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._sharded.device_put import handles_of
from torchpmap._sharded.tensor import ShardedTensor, make_all, make_sharded, spans_processes
from torchpmap._trace import recording
from torchpmap._trace.pickling import Made
from torchpmap._trace.untraceable import Untraceable
from torchpmap._transforms import nans
from torchpmap._transforms.call import (
    CallArguments,
    CallOptions,
    MapOptions,
    Static,
    check_function,
    name_of,
    takes_keywords,
)
from torchpmap._transforms.preparation import Preparation, Prepared, refuse_aliased_donation

_P = ParamSpec("_P")
_Rest = ParamSpec("_Rest")
_R = TypeVar("_R")
_Instance = TypeVar("_Instance")

_MAX_PREPARED = 8192
"""What a function keeps prepared; a way to call it takes two places, by its key and its plan's."""

_MAX_INSTANCES = 64
"""Of a class, whose methods keep what was prepared for them; the oldest are forgotten."""

_MAX_TRACES = 3
"""Of a call, if other threads change what the function reads while it is traced."""

NO_PART_OF_A_GRAPH = (
    "a function mapped by torchpmap.pmap runs between the graphs of torch.compile, never inside "
    "one. Leave out fullgraph=True, or call the mapped function outside of what is compiled: it is "
    "compiled by itself."
)

_is_grad_enabled = torch.is_grad_enabled


def is_part() -> bool:
    """Whether a call is no program of its own: in a mapped function or a trace."""
    return bool(axis_stack.bound() or (num_modes() and is_traced()))


@outside_graphs
def outside_dynamo(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """A call in a function that ``torch.compile`` compiles: between its graphs, untouched."""
    return call(*args, **kwargs)


class Mapped(Made, Generic[_P, _R]):
    """A function mapped over devices, called like the function."""

    __wrapped__: Callable[_P, _R]
    _split: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    """The arguments, with the static ones wrapped."""
    _has_statics = True
    """Whether ``_split`` has something to do."""
    _counts_self = False
    """Whether a method's own arguments begin with ``self``: the instance is static."""

    def __init__(
        self, fun: Callable[_P, _R], options: MapOptions, preparation: Preparation
    ) -> None:
        functools.update_wrapper(self, fun, updated=())
        self.__wrapped__ = fun
        self._fun = fun
        self._options = options
        self._runtime: Runtime | None = None
        self._preparation = preparation
        self._prepared = preparation.prepared
        self._takes_keywords = takes_keywords(fun)
        """Whether the function may see the order of keyword arguments."""
        self._latest: tuple[Hashable, Prepared | None] = (None, None)
        self._environment = preparation.environment
        expect_compiling(options.backend)
        self._bound_methods: dict[int, Self] = {}
        """By id of the instance: equal instances need not be the same."""

    def __reduce__(self) -> Any:
        fun = self._fun
        if isinstance(fun, types.MethodType):
            found = getattr(fun.__self__, fun.__name__, None)
            if isinstance(found, Mapped) and found._fun == fun:
                return getattr, (fun.__self__, fun.__name__)
        return super().__reduce__()

    def made_of(self) -> tuple[Any, ...]:
        return type(self), (self._fun, self._options)

    def _made(self, fun: Callable[..., Any]) -> Any:
        """Another function, mapped as this one is."""
        return cast(Any, type(self))(fun, self._options)

    def _run_here(self, args: tuple[Any, ...], kwargs: dict[str, Any], inside: bool) -> Any:
        """Run a call in the calling process: inside a mapped function, or without devices."""
        raise NotImplementedError

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(
        self: Mapped[Concatenate[_Instance, _Rest], _R], instance: _Instance, owner: Any = None
    ) -> Mapped[_Rest, _R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        if self._counts_self:
            return types.MethodType(self, instance)
        bound = self._bound_methods.get(id(instance))
        if bound is None:
            bound = self._made(types.MethodType(self._fun, instance))
            if len(self._bound_methods) >= _MAX_INSTANCES:  # what a method reads keeps it alive
                self._bound_methods.pop(next(iter(self._bound_methods)), None)
            self._bound_methods[id(instance)] = bound
        return bound

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if is_dynamo_compiling():
            break_graph(NO_PART_OF_A_GRAPH)
            return outside_dynamo(self, *args, **kwargs)
        try:
            if config.sought and nans.is_due():
                again: dict[str, Any] = {"among": self._processes, "gathered": self._gathered}
                return cast(_R, nans.checked(self, args, kwargs, self._options.name, **again))
            if self._has_statics or len(kwargs) > 1:
                args, kwargs = cast(Any, self._ordered(args, kwargs))
            is_inside = is_part()
            if is_inside or inline_mode.active():
                if not is_inside:
                    recording.lacks(self._options.prefix, "in this process")
                return self._run_here(args, kwargs, is_inside)
            return self._run_on_devices(args, kwargs)
        except BaseException as error:
            fold(error)
            raise

    def _processes(self) -> Sequence[int]:
        """Those that have made the latest call."""
        _, prepared = self._latest
        devices = () if prepared is None else prepared.target.grid.axis_devices
        return sorted({device.process_index for device in devices})

    def _gathered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Arguments with the rows of all processes, which values that span these have."""
        return args, kwargs

    def _run_on_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = flatten_call(args, kwargs)
        key = (
            structure,
            structure.dict_order,
            keyed(),
            tuple(
                [
                    leaf._layout if type(leaf) is ShardedTensor else _leaf_key(leaf)
                    for leaf in leaves
                ]
            ),
        )
        if current_runtime() is not self._runtime or self._environment.changed():
            self._forget(self._environment.change())
        # most calls are like the one before, and comparing two keys is quicker than hashing one
        latest, prepared = self._latest
        if key != latest:
            prepared = self._prepared.get(key)
            self._latest = key, prepared
        if prepared is not None and prepared.plan.holds():
            return self._run(prepared, leaves)
        self._limit()
        call = self._preparation.arguments_of(args, kwargs)
        with waiting(None):  # for all that follows together, of which each part says what it is
            for _ in range(_MAX_TRACES):
                prepared = self._preparation.prepare(call)
                is_stale = prepared.surroundings.changed()
                if not is_stale:
                    break
                self._forget(self._environment.change())
            assert prepared is not None
            with prepared.surroundings.tracing():  # running may trace gradients
                self._preparation.check_equal(prepared, leaves)
                if not is_stale:
                    self._prepared[key] = prepared
                    self._latest = key, prepared
                return self._run(prepared, leaves)

    @boundary
    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> Lowered:
        """Trace the call, without compiling or running it; tensors on the meta device will do as
        arguments.

        Raises:
            TypeError, ValueError: as the call itself.
            TraceError: the function cannot be traced, or is never traced (``compile=False``).
        """
        given = cast(Any, self._ordered(args, kwargs))
        if current_runtime() is not self._runtime or self._environment.changed():
            self._forget(self._environment.change())
        self._limit()
        call = self._preparation.arguments_of(*given)
        prepared = self._preparation.prepare(call, has_numbers=False)
        plan = prepared.plan
        if isinstance(plan, UncompiledPlan):
            prefix = self._options.prefix
            raise TraceError(f"{prefix}: it runs as Python code: there is no graph to show")
        kept = replace(prepared, in_place=False, surroundings=prepared.surroundings.copy())
        run = functools.partial(self._run_compiled, kept, call.of_kinds())
        return Lowered(plan, prepared.paths, prepared.layouts, run)

    def _run_compiled(
        self, prepared: Prepared, known: CallArguments, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run what ``lower`` has prepared; ``known``: the kinds of the arguments."""
        if is_part():
            return self(*args, **kwargs)
        leaves, structure = flatten_call(*self._ordered(args, kwargs))
        known.check_same(leaves, structure, self._options)
        if not prepared.plan.holds() or prepared.surroundings.changed():
            raise RuntimeError(
                f"{self._options.prefix}: what the function reads from outside itself has changed "
                "since it was lowered. Lower it again, or call the function, which notices it."
            )
        if config.sought:  # a call that is looked at runs again
            return self(*args, **kwargs)
        self._preparation.check_equal(prepared, leaves)
        return self._run(prepared, leaves)

    def _ordered(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with the static ones wrapped, and those by name in the order that counts."""
        if self._has_statics:
            args, kwargs = self._split(args, kwargs)
        if len(kwargs) > 1 and not self._takes_keywords:
            kwargs = dict(sorted(kwargs.items()))
        return args, kwargs

    def _limit(self) -> None:
        """Forget all if there is too much: statics and shapes that never repeat, for example."""
        if len(self._prepared) >= _MAX_PREPARED:
            self._forget(f"it was called in more than {_MAX_PREPARED // 2} ways")

    def _forget(self, because: str) -> None:
        runtime = current_runtime()
        self._latest = None, None
        self._preparation.clear(because, in_new_pool=runtime is not self._runtime)
        self._runtime = runtime

    # -- the hot path ------------------------------------------------------------------------------

    def _run(self, prepared: Prepared, leaves: list[Any]) -> Any:
        plan = prepared.plan
        held: list[Handle]
        if len(leaves) != len(prepared.positions):
            leaves = [leaves[position] for position in prepared.positions]
        give_up = self._giving_up(prepared, leaves)
        if is_transformed() or (
            _is_grad_enabled() and (plan.requires_grad or any_requires_grad(*leaves))
        ):
            return self._run_differentiated(prepared, leaves)
        direct = prepared.direct
        if direct is None:
            return self._run_checked(prepared, leaves, give_up)
        if prepared.in_place:
            team = direct.team
            for leaf in leaves:
                own = leaf._handle.team  # more ranks may share an unmapped value than run the call
                if own is not team and own.runtime is not team.runtime:
                    raise RuntimeClosed(POOL_CLOSED)
            held = [leaf._handle for leaf in leaves]
        else:
            held = handles_of(leaves, prepared.layouts)
        handles = direct.run(held, None, give_up)
        if prepared.is_lone:
            return make_sharded(direct.outputs[0], handles[0])
        return direct.tree(make_all(direct.outputs, handles))

    def _run_checked(self, prepared: Prepared, leaves: list[Any], give_up: GiveUp | None) -> Any:
        """The call if the outputs need checks, or gradients of captured tensors may follow."""
        called = _called(prepared, leaves, give_up)
        if called.requires_grad and torch.is_grad_enabled():
            return self._run_differentiated(prepared, leaves, called)
        if give_up is not None:
            give_up(())
        return called.tree([make_sharded(layout, handle) for layout, handle in called.outputs])

    def _run_differentiated(
        self, prepared: Prepared, leaves: list[Any], done: Called | None = None
    ) -> Any:
        """The call as transforms or ``backward()`` differentiate it; nothing is donated, because
        derivatives need the arguments.
        """
        plan = prepared.plan
        if isinstance(plan, UncompiledPlan) and done is None and not is_transformed():
            done = _called(prepared, leaves)
        try:
            differentiable = self._preparation.differentiable(prepared)
        except Untraceable as verdict:
            text = no_derivative(self._options.prefix, verdict)
            if done is None:
                raise NotImplementedError(text) from verdict
            values = [make_sharded(*output) for output in done.outputs]
            return done.tree(without_derivative(values, NotImplementedError, text, leaves))
        results = call_differentiable(differentiable, leaves, done)
        return (differentiable.plan.tree if done is None else done.tree)(results)

    def _giving_up(self, prepared: Prepared, leaves: Sequence[Any]) -> GiveUp | None:
        """What takes the donated arguments from the caller; None if there are none."""
        if not prepared.donated:
            return None
        refuse_aliased_donation(self._options.prefix, prepared.paths, prepared.donated, leaves)

        def give_up(_: Sequence[Handle]) -> None:
            for position in prepared.donated:  # places among the leaves that travel
                if type(leaves[position]) is ShardedTensor:
                    leaves[position]._consume(f"{self._options.prefix}, which it was donated to")

        return give_up


def _called(prepared: Prepared, leaves: Sequence[Any], give_up: GiveUp | None = None) -> Called:
    plan, layouts = prepared.plan, prepared.layouts
    if isinstance(plan, UncompiledPlan):
        return plan.call(leaves, layouts)
    return plan.call(handles_of(leaves, layouts), None, give_up)


def _leaf_key(leaf: Any) -> Hashable:
    kind: Any = type(leaf)
    if isinstance(leaf, torch.Tensor):
        try:
            return kind, leaf.shape, leaf.dtype, leaf.layout, leaf.is_meta, spans_processes(leaf)
        except RuntimeError:  # it has no shape, or escaped; preparing the call raises the error
            return kind
    if isinstance(leaf, np.ndarray | np.generic):
        return kind, leaf.shape, leaf.dtype
    if issubclass(kind, Static):
        return leaf
    if hasattr(leaf, "__dlpack__"):
        return kind, tuple(leaf.shape), str(leaf.dtype)
    return kind


def map_with(
    kind: Callable[..., Any],
    check: Callable[..., CallOptions],
    settings: dict[str, Any],
    fun: Callable[..., Any] | None,
    what: str,
) -> Any:
    """``fun``, made to what a front end makes with these settings; without it, a decorator.

    ``what``: the argument, as messages name it.
    """

    @boundary
    def decorator(fun: Callable[..., Any]) -> Any:
        if is_dynamo_compiling():
            break_graph(NO_PART_OF_A_GRAPH)
        return kind(check_function(fun, what), check(name_of(fun), **settings))

    if fun is None:
        check("<function>", **settings)  # misuse raises here, at the decorator's line
        return decorator
    return decorator(fun)
