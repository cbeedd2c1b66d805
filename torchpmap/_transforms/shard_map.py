"""``shard_map``: every device of a mesh runs a function on a block of each argument."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from torchpmap._base.boundary import boundary
from torchpmap._base.pytree import flatten
from torchpmap._layout.current_mesh import current_mesh
from torchpmap._layout.grid import Grid
from torchpmap._layout.mesh import Mesh, PartitionSpec
from torchpmap._runtime.current import check_devices
from torchpmap._trace.block_program import BlockProgram, surrounding
from torchpmap._transforms.call import CallArguments, leaf_kind
from torchpmap._transforms.inline import run_here, run_inline
from torchpmap._transforms.mapped import Mapped, map_with
from torchpmap._transforms.preparation import Decided, Preparation
from torchpmap._transforms.specs import (
    INFERRED,
    BlockOptions,
    ShardMapOptions,
    check_names,
    make_block_options,
    split_static_leaves,
    take_blocks,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")


class BlockPreparation(Preparation):
    """The plans of a function that gets blocks."""

    options: BlockOptions

    def arguments_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        return take_blocks(self._fun, self.options, args, kwargs)

    def whole_program(self, call: CallArguments) -> BlockProgram:
        options, mesh = self.options, self.options.the_mesh
        return BlockProgram(
            self._fun,
            options.name,
            options.prefix,
            call.structure,
            call.template,
            mesh.axis_names,
            tuple(mesh.devices.shape),
            options.out_specs,
            options.randomness,
            self._seed,
            mesh,
            options.manual,
            options.check_vma,
        )

    def decide(self, call: CallArguments) -> Decided:
        mesh = self.options.the_mesh
        devices = tuple(mesh.devices.flat)
        check_devices(devices)
        grid = Grid(devices, devices, call.sizes, mesh.axis_names)
        leaves = call.travelling(call.leaves)
        layouts = tuple(
            grid.layout(shape, dtype, cut or ())
            for (shape, dtype), cut in zip(
                map(leaf_kind, leaves), call.travelling(call.cuts), strict=True
            )
        )
        return Decided(self.whole_program(call), grid, layouts, call.cuts, is_whole=True)


class ShardMapped(Mapped[_P, _R]):
    """A function mapped over blocks; made by ``shard_map``, called like the function."""

    _options: BlockOptions
    _preparation: BlockPreparation

    def __init__(self, fun: Callable[_P, _R], options: BlockOptions) -> None:
        super().__init__(fun, options, BlockPreparation(fun, options))
        self._split = functools.partial(split_static_leaves, options)
        specs = options.in_specs
        self._has_statics = specs is not INFERRED and None in flatten(specs)[0]
        self._by_mesh: dict[Mesh, ShardMapped[_P, _R]] = {}
        """If the mesh is that of ``set_mesh``."""

    def __repr__(self) -> str:
        mesh = self._options.mesh
        return f"<shard_map of {self._options.name} over {mesh or 'the mesh of set_mesh'}>"

    @boundary
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        mine = self._options.mesh
        if mine is None:
            return self._on_current_mesh()(*args, **kwargs)
        if current_mesh() not in (None, mine):
            raise ValueError(
                f"{self._options.prefix}: its mesh is {mine}, but set_mesh has chosen "
                f"{current_mesh()} around the call. Leave out one of the two, or make them equal."
            )
        return super().__call__(*args, **kwargs)

    @boundary
    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        if self._options.mesh is None:
            return self._on_current_mesh().lower(*args, **kwargs)
        return super().lower(*args, **kwargs)

    def _on_current_mesh(self) -> ShardMapped[_P, _R]:
        outer = surrounding()
        mesh = current_mesh() if outer is None else outer.mesh
        if mesh is None:
            raise ValueError(
                f"{self._options.prefix}: there is no mesh. Pass mesh=..., or choose one for a "
                "block of code with torchpmap.set_mesh(mesh)."
            )
        found = self._by_mesh.get(mesh)
        if found is None:
            options = replace(self._options, mesh=mesh)
            check_names(options)
            found = self._by_mesh[mesh] = ShardMapped(self._fun, options)
        return found

    def _run_here(self, args: tuple[Any, ...], kwargs: dict[str, Any], inside: bool) -> Any:
        outer = surrounding()
        if outer is not None and outer.mesh != self._options.mesh:
            raise ValueError(
                f"{self._options.prefix}: its mesh is {self._options.mesh}, but the shard_map "
                f"around it runs on {outer.mesh}. A shard_map inside another takes axes of the "
                "same mesh: leave mesh out, or make the two equal."
            )
        call = self._preparation.arguments_of(args, kwargs)
        if outer is not None:
            manual, free = self._options.manual, outer.free
            taken = [n for n in outer.mesh.axis_names if n in manual and n not in free]
            if taken:
                raise ValueError(
                    f"{self._options.prefix}: the axis {taken[0]!r} is already mapped by the "
                    "shard_map around this one. Give axis_names here, without it, and in the outer "
                    "shard_map, without those of this one."
                )
        return (run_here if inside else run_inline)(self._preparation, call)


@overload
def shard_map(
    f: Callable[_P, _R], /, **options: Unpack[ShardMapOptions]
) -> ShardMapped[_P, _R]: ...
@overload
def shard_map(
    f: None = None, /, **options: Unpack[ShardMapOptions]
) -> Callable[[Callable[_P, _R]], ShardMapped[_P, _R]]: ...
@boundary
def shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | None = None,
    in_specs: Any = INFERRED,
    out_specs: Any,
    axis_names: Iterable[Hashable] = frozenset(),
    check_vma: bool = True,
    compile: bool | dict[str, Any] = True,
    fullgraph: bool = False,
    donate_argnums: int | Iterable[int] = (),
    randomness: str = "different",
) -> Any:
    """Return ``f`` mapped over the devices of a mesh: each of them runs it on its blocks of the
    arguments, all at once.

    (f: blocks -> blocks) -> (whole tensors -> ShardedTensors)
    Backward: the true derivatives of the whole, as for any other function; an argument that
    devices share gets the sum of their gradients.

    A spec says, dim by dim, over which axes of the mesh a tensor is cut; blocks keep all dims.  An
    axis that the spec of an argument does not mention gives all devices along it the same block.
    Results are put together as ``out_specs`` says; an axis that it does not mention means that the
    devices along it return the same, of which one copy counts.

    Gradients taken *inside* are the sum over the devices, for a value that they share, and each
    device's own part, for a value that is cut (see docs/shard_map.md).

    Args:
        f: function of tensors, numpy arrays, numbers and pytrees of them, passed by position.  Left
            out, ``shard_map(...)`` is a decorator.
        mesh: the devices, as an array with named axes.  Default: the mesh of ``set_mesh``.
        in_specs: a tree prefix of the tuple of arguments, of ``P(...)``.  None in place of a spec
            passes an object as it is, traced anew for each value; devices share tensors under it.
            Left out: the arguments are ShardedTensors, which stay where they are.
        out_specs: a tree prefix of the result, of ``P(...)``.
        axis_names: the axes that ``f`` is mapped over, if not all.  Devices along the others
            compute the same.
        check_vma: raise, while tracing, if an output may differ along an axis that its spec does
            not mention.  False: the first device's value is returned, and gradients taken inside
            are each device's own, as in ``pmap``.
        compile: as in ``pmap``.
        fullgraph: as in ``pmap``.
        donate_argnums: positions of arguments whose memory on the devices the call gives up.
        randomness: as in ``pmap``, for devices.

    Returns:
        The mapped function; ``__wrapped__`` is ``f``.

    Raises:
        TypeError, ValueError: misuse, before anything is sent.  What ``f`` raises is raised with
        its own type.

    Example:
        >>> import torch, torchpmap as tp
        >>> mesh = tp.make_mesh((2, 2), ("x", "y"))
        >>> total = tp.shard_map(lambda a: tp.psum(a, "y"), mesh=mesh, in_specs=tp.P("x", "y"),
        ...                      out_specs=tp.P("x"))
        >>> total(torch.arange(8.0).reshape(2, 4)).tolist()  # [2, 4] -> [2, 2]
        [[2.0, 4.0], [10.0, 12.0]]

    Source: ``jax.shard_map``; differences are listed in docs/from_jax.md.
    """
    settings: dict[str, Any] = dict(locals())
    return map_with(ShardMapped, make_block_options, settings, settings.pop("f"), "f of shard_map")


@overload
def smap(
    f: Callable[_P, _R],
    /,
    *,
    in_axes: Any = ...,
    out_axes: Any,
    axis_name: Hashable,
    **options: Any,
) -> ShardMapped[_P, _R]: ...
@overload
def smap(
    f: None = None, /, *, in_axes: Any = ..., out_axes: Any, axis_name: Hashable, **options: Any
) -> Callable[[Callable[_P, _R]], ShardMapped[_P, _R]]: ...
@boundary
def smap(
    f: Callable[..., Any] | None = None,
    /,
    *,
    in_axes: Any = INFERRED,
    out_axes: Any,
    axis_name: Hashable,
    **options: Any,
) -> Any:
    """Return ``f`` mapped over one axis of the mesh of ``set_mesh``, with dims instead of specs.

    Args:
        f: as for ``shard_map``.
        in_axes: a tree prefix of the tuple of arguments: the dim that is cut over the axis, counted
            from the front; None for an argument that devices share.
        out_axes: the same for the result.
        axis_name: an axis of the mesh.
        **options: the other options of ``shard_map``.

    Raises:
        TypeError, ValueError: as ``shard_map``; a dim is negative.

    Example:
        >>> import torch, torchpmap as tp
        >>> with tp.set_mesh(tp.make_mesh((4,), ("x",))):
        ...     tp.smap(lambda a: a - tp.pmean(a, "x"), in_axes=1, out_axes=1, axis_name="x")(
        ...         torch.tensor([[0.0, 2.0, 4.0, 6.0]])).tolist()
        [[-3.0, -1.0, 1.0, 3.0]]

    Source: ``jax.smap``.
    """

    def specs(axes: Any, what: str) -> Any:
        leaves, structure = flatten(axes)
        return structure.unflatten([_spec_of(leaf, axis_name, what) for leaf in leaves])

    return shard_map(
        f,
        in_specs=in_axes if in_axes is INFERRED else specs(in_axes, "in_axes"),
        out_specs=specs(out_axes, "out_axes"),
        axis_names={axis_name},
        **options,
    )


def _spec_of(axis: Any, axis_name: Hashable, what: str) -> PartitionSpec:
    if axis is None:
        return PartitionSpec()
    if type(axis) is not int:
        raise TypeError(f"smap: {what} has ints and None, but got {axis!r}.")
    if axis < 0:
        raise ValueError(f"smap: {what} has the dim {axis}; count it from the front.")
    return PartitionSpec(*[None] * axis, axis_name)
