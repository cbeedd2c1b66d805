"""``pmap``: the front end.  A call is looked up, or prepared once, and then only followed.

__call__ -> key -> _Prepared           the hot path
              \\-> _prepare             bind arguments, choose devices, trace, make the plan,
              compile
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchpmap import _axes
from torchpmap._arguments import (
    Bound,
    Options,
    Static,
    as_tuple,
    bind,
    check_axis_name,
    check_function,
    check_in_axes,
    split_statics,
)
from torchpmap._autodiff import not_yet_differentiable, refuse_transforms
from torchpmap._compile import EAGER, Backend, Definition, have_cpp_compiler, parse_compile
from torchpmap._current import check_devices
from torchpmap._current import devices as all_devices
from torchpmap._current import runtime as current_runtime
from torchpmap._devices import Device
from torchpmap._eager import EagerPlan
from torchpmap._environment import Environment
from torchpmap._errors import TraceError, warn
from torchpmap._layout import Layout, replicated_layout, row_layout, stacked_layout
from torchpmap._plan import Captured, Plan, host_tensor, place, version_of
from torchpmap._program import Constant, Input, Outcome, Program
from torchpmap._runtimes._base import Handle, Runtime
from torchpmap._sharded import ShardedTensor, check_open, closed_pool, make_sharded
from torchpmap._structure import flatten_call
from torchpmap._trace import TracedInput, Untraceable, trace
from torchpmap._tree import check_axis_spec

__all__ = ["Pmapped", "pmap"]

_MAX_PREPARED = 4096
"""Prepared calls a function keeps; statics or shapes that never repeat would fill memory."""

_DATA = (torch.Tensor, np.ndarray)
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_plan_ids = itertools.count(1)
_missing_compiler_warned = False


@dataclass(frozen=True, eq=False)
class _Prepared:
    """One key's answer: what to run and where each leaf of the call goes."""

    plan: Plan | EagerPlan
    positions: tuple[int, ...]
    """Leaves that travel as blocks."""
    layouts: tuple[Layout, ...]
    in_place: bool
    """Whether the key says that every block is where the plan wants it."""
    donated: tuple[int, ...]
    paths: tuple[str, ...]


class _Method:
    """A bound method that does not keep its instance alive (its plans live as long as the
    instance).
    """

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
        """What ``update_wrapper`` sets is the function without its instance."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def __reduce__(self) -> Any:
        return types.MethodType, (self._fun, self._instance())


class Pmapped:
    """A function mapped over devices; made by ``pmap``, called like the function."""

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, fun, updated=())
        self.__wrapped__ = fun
        self._fun = fun
        self._options = options
        self._runtime: Runtime | None = None
        self._prepared: dict[Hashable, _Prepared] = {}
        self._environment = Environment(fun)
        self._warned: set[str] = set()
        self._plans: dict[Hashable, Plan | EagerPlan] = {}
        self._bound_methods: dict[int, Pmapped] = {}
        """By id of the instance: equal instances need not be the same."""

    def __repr__(self) -> str:
        return f"<pmap of {self._options.name} over axis {self._options.axis_name!r}>"

    def __reduce__(self) -> Any:
        return Pmapped, (self._fun, self._options)

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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        options = self._options
        if options.static_argnums or options.static_argnames:
            args, kwargs = split_statics(options, args, kwargs)
        leaves, structure = flatten_call(args, kwargs)
        key = (
            structure,
            _ambient(),
            tuple(
                [
                    leaf._layout if type(leaf) is ShardedTensor else _leaf_key(leaf)
                    for leaf in leaves
                ]
            ),
        )
        runtime = current_runtime()
        if runtime is not self._runtime or self._environment.changed():
            self._forget(runtime)
        prepared = self._prepared.get(key)
        if prepared is None or not prepared.plan.holds():
            prepared = self._prepare(args, kwargs, key)
        return self._run(prepared, leaves, runtime)

    # -- the hot path ------------------------------------------------------------------------------

    def _run(self, prepared: _Prepared, leaves: list[Any], runtime: Runtime) -> Any:
        plan = prepared.plan
        held: list[Handle]
        if len(leaves) != len(prepared.positions):
            leaves = [leaves[position] for position in prepared.positions]
        if prepared.donated:
            self._refuse_aliased_donation(prepared.paths, prepared.donated, leaves)
        if prepared.in_place:
            held = [leaf._handle for leaf in leaves]
            for handle in held:
                if handle.team.runtime is not runtime:
                    raise closed_pool()
            wants_grad = torch.is_grad_enabled() and any(map(_requires_grad, leaves))
        else:
            held = [
                place(leaf, layout) for leaf, layout in zip(leaves, prepared.layouts, strict=True)
            ]
            wants_grad = torch.is_grad_enabled() and any(
                leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)
            )
        if runtime.scarred:
            for handle in held:
                runtime.check(handle)
        outputs, tree, depends_on_parameter = plan.call(held)
        if prepared.donated:
            self._consume(prepared, leaves)
        if wants_grad or (depends_on_parameter and torch.is_grad_enabled()):
            sources = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            sources += [captured.tensor for captured in plan.captured]
            return tree(not_yet_differentiable(outputs, self._options.prefix, sources))
        return tree([make_sharded(layout, handle) for layout, handle in outputs])

    def _consume(self, prepared: _Prepared, leaves: list[Any]) -> None:
        for position in prepared.donated:  # places among the leaves that travel
            if type(leaves[position]) is ShardedTensor:
                leaves[position]._consume(f"{self._options.prefix}, which it was donated to")

    # -- the first call of a kind ------------------------------------------------------------------

    def _forget(self, runtime: Runtime) -> None:
        self._prepared.clear()
        self._plans.clear()
        self._runtime = runtime

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable) -> _Prepared:
        options = self._options
        leaves, _ = flatten_call(args, kwargs)
        refuse_transforms(leaves, options.prefix)
        if _axes.bound():
            raise NotImplementedError(
                f"{options.prefix}: a pmap inside a mapped function is not supported yet. Use "
                "torchpmap.vmap for the inner map."
            )
        for leaf in leaves:
            if type(leaf) is ShardedTensor:
                check_open(leaf)
        chosen = options.devices
        bound = bind(self._fun, options, args, kwargs, None if chosen is None else len(chosen))
        devices = self._choose_devices(bound.size)
        prepared = self._plan_for(bound, devices)
        # after tracing: what the function itself rebinds must not count as a change
        self._environment.refresh()
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
            self._plans.clear()
        self._prepared[key] = prepared
        return prepared

    def _choose_devices(self, size: int) -> tuple[Device, ...]:
        options = self._options
        if options.devices is not None:
            if size != len(options.devices):
                raise ValueError(
                    f"{options.prefix}: Leading axis size of input to pmapped function must equal "
                    f"the number of local devices passed to pmap. Got axis_size={size}, "
                    f"num_local_devices={len(options.devices)} (devices={list(options.devices)})."
                )
            check_devices(options.devices)
            return options.devices
        available = all_devices(options.platform)
        if size > len(available):
            raise ValueError(
                f"{options.prefix}: compiling computation that requires {size} logical devices, "
                f"but only {len(available)} devices are available. Call "
                f"torchpmap.init(num_devices={size}), or map fewer rows and torchpmap.vmap over "
                "the rest."
            )
        return tuple(available[:size])

    def _plan_for(self, bound: Bound, devices: tuple[Device, ...]) -> _Prepared:
        options = self._options
        template: list[Input | Constant] = []
        kinds: list[Hashable] = []
        positions: list[int] = []
        layouts: list[Layout] = []
        for position, (leaf, axis) in enumerate(zip(bound.leaves, bound.axes, strict=True)):
            if leaf is None or isinstance(leaf, Static):
                template.append(Constant(leaf.value if isinstance(leaf, Static) else None))
                kinds.append(leaf)
                continue
            shape, dtype = _shape_and_dtype(leaf)
            positions.append(position)
            template.append(Input(axis))
            kinds.append(axis)
            layouts.append(
                replicated_layout(shape, dtype, devices)
                if axis is None
                else row_layout(shape, dtype, devices, axis, options.axis_name)
            )
        donated = tuple(k for k, position in enumerate(positions) if bound.donated[position])
        paths = tuple(bound.paths[position] for position in positions)
        travelling = [bound.leaves[position] for position in positions]
        self._refuse_aliased_donation(paths, donated, travelling)  # before anything is sent
        program = Program(
            self._fun,
            options.name,
            bound.structure,
            tuple(template),
            options.out_axes,
            options.axis_name,
            options.check_replicated,
        )
        in_place = all(
            type(leaf) is ShardedTensor and leaf._alive()[0].same_place(layout)
            for leaf, layout in zip(travelling, layouts, strict=True)
        )
        # arrays, tensors and ShardedTensors of one shape are different calls, but the same program
        kind = (bound.structure, _ambient(), tuple(kinds), tuple(layouts))
        plan = self._plans.get(kind)
        if plan is None or not plan.holds():
            plan = self._plans[kind] = self._make_plan(program, tuple(layouts), devices)
        return _Prepared(plan, tuple(positions), tuple(layouts), in_place, donated, paths)

    def _refuse_aliased_donation(
        self, paths: Sequence[str], donated: Sequence[int], leaves: Sequence[Any]
    ) -> None:
        for position in donated:
            for other, leaf in enumerate(leaves):
                if other != position and leaf is leaves[position] and isinstance(leaf, _DATA):
                    raise ValueError(
                        f"{self._options.prefix}: argument {paths[position]} is donated, but the "
                        f"same tensor is also argument {paths[other]}. Donate it once and pass it "
                        "once, or pass a copy."
                    )

    def _make_plan(
        self, program: Program, layouts: tuple[Layout, ...], devices: tuple[Device, ...]
    ) -> Plan | EagerPlan:
        options = self._options
        if options.backend is not None:
            try:
                return self._trace(program, layouts, devices)
            except Untraceable as verdict:
                if options.fullgraph:
                    raise TraceError(
                        f"{options.prefix}: fullgraph=True, but the function cannot be traced: at "
                        f"{verdict.where}: {verdict.reason}. Use torch.where, torch.cond or a "
                        "static argument, or drop fullgraph to run it without tracing."
                    ) from verdict.__cause__
                self._warn_once(
                    f"{options.prefix}: running without tracing (as compile=False), which is "
                    f"slower, because of {verdict.where}: {verdict.reason}. Use torch.where, "
                    "torch.cond or a static argument to compile it, or pass compile=False to "
                    "silence this warning."
                )
        return EagerPlan(program, devices, options.prefix)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn(text)

    def _trace(
        self, program: Program, layouts: tuple[Layout, ...], devices: tuple[Device, ...]
    ) -> Plan:
        options, runtime = self._options, current_runtime()
        outcomes: list[Outcome] = []

        def body(blocks: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, bool]]:
            outcomes.append(program.run(blocks))
            return outcomes[-1].demands()

        ranks = tuple(device.id for device in devices)
        group = f"ranks:{','.join(map(str, ranks))}"
        traced = trace(
            body,
            [
                TracedInput(layout.block_shape, layout.dtype, not layout.is_replicated)
                for layout in layouts
            ],
            axis_name=options.axis_name,
            axis_size=len(devices),
            group=group,
            device=devices[0].torch_device
            if devices[0].platform == "cpu"
            else torch.device("cuda", 0),
        )
        (outcome,) = outcomes
        self._refuse_randomness(traced.is_random)
        plan_id = next(_plan_ids)
        captured = tuple(
            Captured(tensor, replicated_layout(tensor.shape, tensor.dtype, devices))
            for tensor in traced.captured
        )
        inputs = (
            *((tuple(t.shape), t.dtype) for t in traced.captured),
            *((i.block_shape, i.dtype) for i in layouts),
        )
        backend = _usable(options.backend, devices)
        groups = {group: (ranks,)} | {
            name: tuple(tuple(ranks[k] for k in part) for part in partition)
            for name, partition in traced.groups.items()
        }
        team = runtime.team(ranks)
        definition = Definition(
            plan_id, options.name, traced.graph, traced.uses_index, ranks, inputs, backend
        )
        runtime.define(team, definition, groups)
        return Plan(
            id=plan_id,
            prefix=options.prefix,
            team=team,
            captured=captured,
            pinned=tuple((tensor, version_of(tensor)) for tensor in traced.pinned),
            outputs=_output_layouts(
                outcome, traced.shapes, traced.dtypes, devices, options.axis_name
            ),
            structure=outcome.structure,
            nones=tuple(k for k, block in enumerate(outcome.blocks) if block is None),
            requires_grad=outcome.requires_grad and any(t.requires_grad for t in traced.captured),
            num_checks=len(outcome.checks),
            checked=outcome.checked,
        )

    def _refuse_randomness(self, is_random: bool) -> None:
        if is_random:
            raise NotImplementedError(
                f"{self._options.prefix}: the function draws random numbers, and random streams "
                "per device are not supported yet. Draw them outside and pass them as an argument, "
                "for example torch.randn(num_devices, ...)."
            )


def _output_layouts(
    outcome: Outcome,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    devices: tuple[Device, ...],
    axis_name: Hashable,
) -> tuple[Layout, ...]:
    dims = [
        dim for block, dim in zip(outcome.blocks, outcome.dims, strict=True) if block is not None
    ]
    dims += [None] * len(outcome.checks)
    return tuple(
        stacked_layout(shape, dtype, dim, devices, axis_name)
        for shape, dtype, dim in zip(shapes, dtypes, dims, strict=True)
    )


def _ambient() -> Hashable:
    """Settings of the calling thread that change what a function computes."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        kinds = ("cpu", "cuda")
        autocast = tuple(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
        )
        return torch.get_default_dtype(), autocast
    return torch.get_default_dtype()


def _leaf_key(leaf: Any) -> Hashable:
    kind: Any = type(leaf)
    if isinstance(leaf, torch.Tensor):
        return kind, leaf.shape, leaf.dtype
    if isinstance(leaf, np.ndarray | np.generic):
        return kind, leaf.shape, leaf.dtype
    if kind is Static:
        return leaf
    if hasattr(leaf, "__dlpack__"):
        return kind, tuple(leaf.shape), str(leaf.dtype)
    return kind


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], torch.dtype]:
    tensor = leaf if isinstance(leaf, torch.Tensor) else host_tensor(leaf)
    return tuple(tensor.shape), tensor.dtype


def _usable(backend: Backend | None, devices: tuple[Device, ...]) -> Backend:
    global _missing_compiler_warned
    assert backend is not None
    if not backend.is_inductor or devices[0].platform != "cpu" or have_cpp_compiler():
        return backend
    if not _missing_compiler_warned:
        _missing_compiler_warned = True
        warn(
            "torchpmap: no C++ compiler was found (g++ or clang++, or the one named by CXX), so "
            "mapped functions run as traced graphs, without Inductor: right, but slower. Install "
            "one, or pass compile={'backend': 'eager'} to silence this.",
        )
    return EAGER


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
) -> Any:
    """Return ``fun`` mapped over devices: device k runs it on row k of the mapped arguments, all at
    once.

    (fun: rows -> results) -> (stacked rows -> ShardedTensors stacked the same way)
    Backward: inside ``fun`` use ``torchpmap.grad`` or ``torch.func``; differentiating through the
    mapped function from outside is not supported yet and raises.

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
        static_broadcasted_argnames: names of keyword arguments that are so.
        devices: the devices to run on, in axis order; exactly as many as rows.  Default: the first
            ones of ``tp.devices()``.
        backend: ``"cpu"`` or ``"cuda"``.
        axis_size: size of the axis where no argument is mapped; otherwise it is checked.
        donate_argnums: positions of arguments whose memory on the devices is given up with the
            call.
        donate_argnames: names of keyword arguments that are so.
        compile: True (Inductor), False (run ``fun`` itself in Python on every device), or a dict of
            ``torch.compile``'s ``backend``, ``mode`` and ``options``; ``{"backend": "eager"}`` runs
            the traced graph uncompiled.
        fullgraph: raise instead of falling back to ``compile=False`` when ``fun`` cannot be traced.
        randomness: reserved; random numbers inside ``fun`` raise for now.
        check_replicated: raise if an output with out axis None differs between devices (makes the
            call wait).

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
        _options("<function>", **settings)  # misuse is reported where it stands
        return lambda fun: Pmapped(_checked(fun), _options(_name_of(fun), **settings))
    return Pmapped(_checked(fun), _options(_name_of(fun), **settings))


def _checked(fun: Any) -> Callable[..., Any]:
    check_function(fun)
    return fun


def _name_of(fun: Any) -> str:
    if isinstance(fun, functools.partial):
        return _name_of(fun.func)
    return getattr(fun, "__name__", type(fun).__name__)


def _options(
    name: str,
    axis_name: Hashable | None,
    in_axes: Any,
    out_axes: Any,
    static_broadcasted_argnums: Any,
    static_broadcasted_argnames: Any,
    devices: Sequence[Device] | None,
    backend: str | None,
    axis_size: int | None,
    donate_argnums: Any,
    donate_argnames: Any,
    compile: Any,
    fullgraph: bool,
    randomness: str,
    check_replicated: bool,
) -> Options:
    check_axis_name(axis_name)
    check_in_axes(in_axes)
    check_axis_spec(out_axes, "pmap out_axes")
    static = as_tuple(static_broadcasted_argnums, "static_broadcasted_argnums", int)
    donate = as_tuple(donate_argnums, "donate_argnums", int)
    static_names = as_tuple(static_broadcasted_argnames, "static_broadcasted_argnames", str)
    donate_names = as_tuple(donate_argnames, "donate_argnames", str)
    if set(static) & set(donate) or set(static_names) & set(donate_names):
        raise ValueError(
            f"pmap: static_broadcasted_argnums {list(static or static_names)} and donate_argnums "
            f"{list(donate or donate_names)} cannot intersect."
        )
    if randomness not in ("different", "same", "error"):
        raise ValueError(
            f"pmap: randomness must be 'different', 'same' or 'error', but got {randomness!r}."
        )
    if axis_size is not None and (type(axis_size) is not int or axis_size < 1):
        raise ValueError(f"pmap: axis_size must be a positive int, but got {axis_size!r}.")
    return Options(
        name=name,
        axis_name=axis_name,
        in_axes=in_axes,
        out_axes=out_axes,
        static_argnums=static,
        static_argnames=static_names,
        donate_argnums=donate,
        donate_argnames=donate_names,
        devices=_device_list(devices),
        platform=backend,
        axis_size=axis_size,
        backend=parse_compile(compile),
        fullgraph=fullgraph,
        randomness=randomness,
        check_replicated=check_replicated,
    )


def _device_list(devices: Sequence[Device] | None) -> tuple[Device, ...] | None:
    if devices is None:
        return None
    if not isinstance(devices, Iterable):
        raise TypeError(
            "'devices' argument to pmap must be a sequence of torchpmap devices, but got "
            f"{devices!r}."
        )
    chosen = tuple(devices)
    if not chosen:
        raise ValueError("'devices' argument to pmap must be non-empty, or None.")
    for device in chosen:
        if not isinstance(device, Device):
            raise TypeError(
                "'devices' argument to pmap must hold torchpmap devices (torchpmap.devices()), "
                f"but got {device!r}."
            )
    if len(set(chosen)) != len(chosen):
        raise ValueError(
            f"'devices' argument to pmap must not repeat a device, but got {list(chosen)}."
        )
    return chosen
