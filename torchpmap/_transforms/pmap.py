"""``pmap``: the front end.  A kind of call is prepared once, and then looked up.

__call__ --call--> run_here       all rows on the device of the caller, inside a mapped function
         --call--> run_inline     all rows in this process (``debug.fake_pmap``)
         --> _run_on_devices
               --key--> Prepared --> _run    the hot path
               --call-> prepare              the first call of a kind
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from torchpmap._base.ambient import keyed
from torchpmap._base.boundary import boundary, fold
from torchpmap._base.busy import waiting
from torchpmap._base.devices import Device
from torchpmap._base.errors import POOL_CLOSED, RuntimeClosed, TraceError
from torchpmap._base.pytree import flatten_call
from torchpmap._base.torch_internals import (
    any_requires_grad,
    break_graph,
    disable_dynamo,
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
from torchpmap._runtime.base import Handle, Runtime
from torchpmap._runtime.current import expect_compiling
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._sharded.device_put import handles_of
from torchpmap._sharded.tensor import ShardedTensor, make_all, make_sharded, spans_processes
from torchpmap._trace.compile import EAGER
from torchpmap._trace.environment import Environment
from torchpmap._trace.trace import Untraceable
from torchpmap._transforms.arguments import (
    Options,
    PmapOptions,
    Static,
    check_function,
    make_options,
    name_of,
    split_statics,
)
from torchpmap._transforms.inline import run_here, run_inline
from torchpmap._transforms.preparation import Preparation, Prepared, refuse_aliased_donation

_P = ParamSpec("_P")
_Rest = ParamSpec("_Rest")
_R = TypeVar("_R")
_Instance = TypeVar("_Instance")

_MAX_PREPARED = 4096
"""Prepared calls a function keeps; statics or shapes that never repeat would fill memory."""

_NO_PART_OF_A_GRAPH = (
    "a function mapped by torchpmap.pmap runs between the graphs of torch.compile, never inside "
    "one. Leave out fullgraph=True, or call the mapped function outside of what is compiled: it is "
    "compiled by itself."
)

_is_grad_enabled = torch.is_grad_enabled


@disable_dynamo
def _outside_dynamo(mapped: Pmapped[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call in a function that ``torch.compile`` compiles: between its graphs, untouched."""
    return mapped(*args, **kwargs)


class _Method:
    """A bound method that does not keep its instance alive."""

    def __init__(
        self, fun: Callable[..., Any], instance: Any, forget: Callable[[Any], Any]
    ) -> None:
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._instance = weakref.ref(instance, forget)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return types.MethodType(self._fun, self._instance())

    @__wrapped__.setter
    def __wrapped__(self, _: Any) -> None:
        """Ignore what update_wrapper sets: it is the unbound function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def __reduce__(self) -> Any:
        return types.MethodType, (self._fun, self._instance())


class Pmapped(Generic[_P, _R]):
    """A function mapped over devices; made by ``pmap``, called like the function.

    For a type checker it takes and returns what the function does, with a row more in every tensor:
    a result of type ``Tensor`` is a ShardedTensor, or under ``debug.fake_pmap`` a plain one.
    """

    __wrapped__: Callable[_P, _R]

    def __init__(self, fun: Callable[_P, _R], options: Options) -> None:
        functools.update_wrapper(self, fun, updated=())
        self.__wrapped__ = fun
        self._fun = fun
        self._options = options
        self._runtime: Runtime | None = None
        inner = fun._preparation if isinstance(fun, Pmapped) else None
        self._preparation: Preparation = Preparation(fun, options, inner)
        self._prepared: dict[Hashable, Prepared] = {}
        self._latest: tuple[Hashable, Prepared | None] = (None, None)
        self._environment = Environment(fun)
        if options.backend not in (None, EAGER):
            expect_compiling()
        self._bound_methods: dict[int, Pmapped[..., Any]] = {}
        """By id of the instance: equal instances need not be the same."""

    def __repr__(self) -> str:
        return f"<pmap of {self._options.name} over axis {self._options.axis_name!r}>"

    def __reduce__(self) -> Any:
        return Pmapped, (self._fun, self._options)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(
        self: Pmapped[Concatenate[_Instance, _Rest], _R], instance: _Instance, owner: Any = None
    ) -> Pmapped[_Rest, _R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        if 0 in self._options.static_argnums:  # the caller counts self, as in JAX
            return types.MethodType(self, instance)
        key = id(instance)
        bound = self._bound_methods.get(key)
        if bound is None:
            try:
                method = _Method(self._fun, instance, lambda _: self._bound_methods.pop(key, None))
            except TypeError:  # takes no weak references
                return Pmapped(types.MethodType(self._fun, instance), self._options)
            bound = self._bound_methods[key] = Pmapped(method, self._options)
        return bound

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if is_dynamo_compiling():
            break_graph(_NO_PART_OF_A_GRAPH)
            return _outside_dynamo(self, *args, **kwargs)
        try:
            options = self._options
            if options.static_argnums or options.static_argnames:
                args, kwargs = cast(Any, split_statics(options, args, kwargs))
            is_here = bool(axis_stack.bound() or (num_modes() and is_traced()))
            if not is_here and not inline_mode.active():
                return self._run_on_devices(args, kwargs)
            preparation = self._preparation
            call = preparation.arguments_of(args, kwargs, has_all_rows=is_here)
            return (run_here if is_here else run_inline)(preparation, call)
        except BaseException as error:
            fold(error)
            raise

    def _run_on_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = flatten_call(args, kwargs)
        key = (
            structure,
            keyed(),
            tuple(
                [
                    leaf._layout if type(leaf) is ShardedTensor else _leaf_key(leaf)
                    for leaf in leaves
                ]
            ),
        )
        runtime = current_runtime()
        if runtime is not self._runtime or self._environment.changed():
            self._forget(runtime, self._environment.change())
        # most calls are like the one before, and comparing two keys is quicker than hashing one
        latest, prepared = self._latest
        if key != latest:
            prepared = self._prepared.get(key)
            self._latest = key, prepared
        if prepared is not None and prepared.plan.holds():
            return self._run(prepared, leaves)
        if len(self._prepared) >= _MAX_PREPARED:
            self._forget(runtime, f"it was called in more than {_MAX_PREPARED} ways")
        call = self._preparation.arguments_of(args, kwargs)
        with waiting(None):  # for all that follows together, of which each part says what it is
            prepared = self._prepared[key] = self._preparation.prepare(call)
            self._latest = key, prepared
            # after tracing: what the function itself rebinds must not count as a change
            self._environment.refresh()
            result = self._run(prepared, leaves)
        self._environment.refresh()  # running may have traced gradients
        return result

    @boundary
    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> Lowered:
        """Trace the call, without compiling or running it; tensors on the meta device will do as
        arguments.

        Raises:
            TypeError, ValueError: as the call itself.
            TraceError: the function cannot be traced, or is never traced (``compile=False``).
        """
        options = self._options
        if options.static_argnums or options.static_argnames:
            args, kwargs = cast(Any, split_statics(options, args, kwargs))
        runtime = current_runtime()
        if runtime is not self._runtime:
            self._forget(runtime, "")
        call = self._preparation.arguments_of(args, kwargs)
        prepared = self._preparation.prepare(call, has_numbers=False)
        if isinstance(prepared.plan, UncompiledPlan):
            raise TraceError(f"{options.prefix}: it runs as Python code: there is no graph to show")
        return Lowered(
            prepared.plan, call.structure, prepared.positions, prepared.paths, prepared.layouts
        )

    def _forget(self, runtime: Runtime, because: str) -> None:
        self._prepared.clear()
        self._latest = None, None
        self._preparation.clear(because, in_new_pool=runtime is not self._runtime)
        self._runtime = runtime

    # -- the hot path ------------------------------------------------------------------------------

    def _run(self, prepared: Prepared, leaves: list[Any]) -> Any:
        plan = prepared.plan
        held: list[Handle]
        if len(leaves) != len(prepared.positions):
            leaves = [leaves[position] for position in prepared.positions]
        if prepared.donated:
            refuse_aliased_donation(self._options.prefix, prepared.paths, prepared.donated, leaves)
        if is_transformed() or (
            _is_grad_enabled() and (plan.requires_grad or any_requires_grad(*leaves))
        ):
            return self._run_differentiated(prepared, leaves)
        direct = prepared.direct
        if direct is None:
            return self._run_checked(prepared, leaves)
        if prepared.in_place:
            team = direct.team
            for leaf in leaves:
                if leaf._handle.team is not team:  # the team of the same ranks in another pool
                    raise RuntimeClosed(POOL_CLOSED)
            held = [leaf._handle for leaf in leaves]
        else:
            held = handles_of(leaves, prepared.layouts)
        handles = direct.run(held, None, self._giving_up(prepared, leaves))
        if prepared.is_lone:
            return make_sharded(direct.outputs[0], handles[0])
        return direct.tree(make_all(direct.outputs, handles))

    def _run_checked(self, prepared: Prepared, leaves: list[Any]) -> Any:
        """The call if the outputs need checks, or gradients of captured tensors may follow."""
        give_up = self._giving_up(prepared, leaves)
        called = _called(prepared, leaves, give_up)
        if called.requires_grad and torch.is_grad_enabled():
            return self._run_differentiated(prepared, leaves, called)
        if give_up is not None:
            give_up()
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
            if done is None:
                raise NotImplementedError(no_derivative(self._options.prefix, verdict)) from verdict
            return done.tree(
                without_derivative(done.outputs, self._options.prefix, verdict, leaves)
            )
        results = call_differentiable(differentiable, leaves, done)
        return (differentiable.plan.tree if done is None else done.tree)(results)

    def _giving_up(self, prepared: Prepared, leaves: list[Any]) -> Callable[[], None] | None:
        """What takes the donated arguments from the caller; None if there are none."""
        if not prepared.donated:
            return None

        def give_up() -> None:
            for position in prepared.donated:  # places among the leaves that travel
                if type(leaves[position]) is ShardedTensor:
                    leaves[position]._consume(f"{self._options.prefix}, which it was donated to")

        return give_up


def _called(
    prepared: Prepared, leaves: Sequence[Any], give_up: Callable[[], None] | None = None
) -> Called:
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
    if kind is Static:
        return leaf
    if hasattr(leaf, "__dlpack__"):
        return kind, tuple(leaf.shape), str(leaf.dtype)
    return kind


class _Decorator(Protocol):
    """``pmap(axis_name="i")``, without a function."""

    def __call__(self, fun: Callable[_P, _R], /) -> Pmapped[_P, _R]: ...


@overload
def pmap(
    fun: Callable[_P, _R], axis_name: Hashable = None, **options: Unpack[PmapOptions]
) -> Pmapped[_P, _R]: ...
@overload
def pmap(
    fun: None = None, axis_name: Hashable = None, **options: Unpack[PmapOptions]
) -> _Decorator: ...
@boundary
def pmap(
    fun: Callable[..., Any] | None = None,
    axis_name: Hashable | None = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    static_broadcasted_argnames: str | Iterable[str] = (),
    devices: Sequence[Device] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    compile: bool | dict[str, Any] = True,
    fullgraph: bool = False,
    randomness: str = "different",
    check_replicated: bool = False,
    timeout: float | None = None,
) -> Any:
    """Return ``fun`` mapped over devices: device k runs it on row k of the mapped arguments, all at
    once.

    (fun: rows -> results) -> (stacked rows -> ShardedTensors stacked the same way)
    Backward: ``torch.func`` and ``backward()`` reach through the mapped function, and run on the
    devices; shared arguments and closures get the sum over the rows.

    Calls return at once; a result waits when its numbers are needed.  ``fun`` is traced once per
    kind of arguments, compiled by Inductor on one device and loaded by the others.  It must be
    pure: in-place writes to arguments stay inside, and writes to captured tensors raise.
    Closed-over tensors and modules may change between calls; their current values are used.

    Args:
        fun: function of tensors, numpy arrays, numbers and pytrees of them.  Left out,
            ``pmap(...)`` is a decorator.
        axis_name: name of the mapped axis for the collectives; hashable, not an int, tuple or list.
        in_axes: an int or None per positional argument (or one for all): the dim that is mapped,
            negative counts from the back; None passes the whole value to every device.  Each entry
            may be a pytree prefix of its argument; a dict gives entries by parameter name.  Keyword
            arguments are mapped over dim 0 unless such a dict names them.
        out_axes: as in_axes, for the outputs: where the new dim of stacked results goes; None
            returns one unstacked value, that of the first device (made equal on all devices).
        static_broadcasted_argnums: positions of arguments that are plain hashable Python values;
            each new value traces again.
        static_broadcasted_argnames: the same for keyword arguments, by name.
        devices: the devices to run on, in axis order; exactly one per row (for a ``pmap`` of a
            ``pmap``: one per row, or one per row and column, row-major).  Default: the first of
            ``tp.devices()``, with several rows on each if there are more rows than devices.
        backend: ``"cpu"`` or ``"cuda"``.
        axis_size: size of the axis where no argument is mapped; otherwise it is checked.
        donate_argnums: positions of arguments whose memory on the devices the call gives up.
        donate_argnames: the same for keyword arguments, by name.
        compile: True (Inductor), False (run ``fun`` itself in Python on every device), or a dict of
            ``torch.compile``'s ``backend``, ``mode`` and ``options``; ``{"backend": "eager"}`` runs
            the traced graph uncompiled.
        fullgraph: raise instead of falling back to ``compile=False`` when ``fun`` cannot be traced.
        randomness: whether torch's random functions inside ``fun`` give every row "different"
            numbers or the "same", or are an "error".
        check_replicated: raise if an output with out axis None differs between devices (makes the
            call wait).
        timeout: most seconds that a call may take on the devices, not counting compilation; then it
            raises ``CallTimeout``, which tells what each device did.  Default:
            ``tp.config.timeout``.

    Returns:
        The mapped function; ``__wrapped__`` is ``fun``.

    Raises:
        TypeError, ValueError: misuse, before anything is sent.  What ``fun`` raises is raised with
        its own type.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.pmap(lambda x: x * 2)(torch.arange(4.0))  # [4] -> [4]
        ShardedTensor([0., 2., 4., 6.], rows of dim 0 on cpu:0 cpu:1 cpu:2 cpu:3)
        >>> normalize = tp.pmap(lambda x: x / tp.psum(x, "i"), axis_name="i")
        >>> normalize(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()
        [0.10000000149011612, 0.20000000298023224, 0.30000001192092896, 0.4000000059604645]

    Source: ``jax.pmap``; differences are listed in docs/from_jax.md.
    """
    settings: dict[str, Any] = dict(locals())
    del settings["fun"]
    if fun is None:
        make_options("<function>", **settings)  # misuse raises here, at the decorator's line
        return functools.partial(_mapped, settings)
    return _mapped(settings, fun)


@boundary
def _mapped(settings: dict[str, Any], fun: Callable[_P, _R]) -> Pmapped[_P, _R]:
    if is_dynamo_compiling():
        break_graph(_NO_PART_OF_A_GRAPH)
    return Pmapped(check_function(fun), make_options(name_of(fun), **settings))
