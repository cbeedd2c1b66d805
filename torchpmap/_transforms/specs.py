"""From the arguments of a call of ``shard_map`` to leaves with cuts: statics, prefixes, dims that
must divide (pure; all misuse is reported here).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Required, TypedDict

import numpy as np
import torch

from torchpmap._base.axis_spec import argument_names, broadcast_axes, in_a_list
from torchpmap._base.pytree import flatten, flatten_call
from torchpmap._layout.grid import Cut
from torchpmap._layout.mesh import Mesh, PartitionSpec, names_of
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap._trace.block_program import cut_of_spec
from torchpmap._trace.compile import parse_compile
from torchpmap._transforms.call import (
    CallArguments,
    MapOptions,
    Static,
    as_tuple,
    check_randomness,
    describe,
    donated,
)

_IN_SPECS_HINT = (
    "\n\nThe full pytree is the tuple of the positional arguments, and `in_specs` must be a tree "
    "prefix of it: one PartitionSpec for all arguments, or a tuple with an entry for each."
)


class _Inferred:
    def __repr__(self) -> str:
        return "<those of the arguments>"

    def __reduce__(self) -> str:
        return "INFERRED"


INFERRED = _Inferred()
"""``in_specs`` that are taken from the arguments."""


class ShardMapOptions(TypedDict, total=False):
    """The keyword arguments of ``shard_map``, for its overloads; its docstring explains them."""

    mesh: Mesh | None
    in_specs: Any
    out_specs: Required[Any]
    axis_names: Iterable[Hashable]
    check_vma: bool
    compile: bool | dict[str, Any]
    fullgraph: bool
    donate_argnums: int | Iterable[int]
    randomness: str


@dataclass(frozen=True)
class BlockOptions(MapOptions):
    """The arguments of ``shard_map``, checked."""

    mesh: Mesh | None
    """None: the one of ``set_mesh``, at every call."""
    in_specs: Any
    out_specs: Any
    axis_names: frozenset[Hashable]
    """Empty: all axes of the mesh."""
    check_vma: bool
    donate_argnums: tuple[int, ...]
    static_advice: ClassVar[str] = "Make it static (None in its place in in_specs)"

    @property
    def prefix(self) -> str:
        short = reprlib.Repr()
        short.maxdict = short.maxlist = short.maxtuple = 8
        specs = f"in_specs={short.repr(self.in_specs)}, out_specs={short.repr(self.out_specs)}"
        return f"shard_map({self.name}, {specs})(<inputs>)"

    @property
    def the_mesh(self) -> Mesh:
        """The mesh, once it is known."""
        assert self.mesh is not None
        return self.mesh

    @property
    def manual(self) -> frozenset[Hashable]:
        """The axes that are bound inside."""
        return self.axis_names or frozenset(self.the_mesh.axis_names)


def make_block_options(
    name: str, *, compile: Any, axis_names: Any, donate_argnums: Any, **others: Any
) -> BlockOptions:
    """The settings of ``shard_map``, checked; ``others``: those that stay as they are."""
    mesh, in_specs = others["mesh"], others["in_specs"]
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"shard_map: mesh must be a torchpmap.Mesh, but got {mesh!r} of type "
            f"{type(mesh).__name__}. A torch DeviceMesh becomes one by Mesh.from_device_mesh."
        )
    if in_specs is not INFERRED:
        _check_leaves(in_specs, "in_specs")
    _check_leaves(others["out_specs"], "out_specs")
    if isinstance(axis_names, str) or not isinstance(axis_names, Iterable):
        raise TypeError(f"shard_map: axis_names must be a set of names, but got {axis_names!r}.")
    check_randomness("shard_map", others["randomness"])
    options = BlockOptions(
        name=name,
        backend=parse_compile(compile),
        timeout=None,
        axis_names=frozenset(axis_names),
        donate_argnums=as_tuple(donate_argnums, "shard_map: donate_argnums", int),
        **others,
    )
    if mesh is not None:
        check_names(options)
    return options


def _check_leaves(specs: Any, what: str) -> None:
    for leaf in flatten(specs)[0]:
        if leaf is not None and not isinstance(leaf, PartitionSpec):
            raise TypeError(
                f"shard_map: {what} must be a pytree of PartitionSpec (torchpmap.P) and None, but "
                f"{'it is' if leaf is specs else 'it has'} {leaf!r} of type {type(leaf).__name__}."
            )


def check_names(options: BlockOptions) -> None:
    """Raise unless all names are axes of the mesh, which is known, and each spec has them once."""
    mesh = options.the_mesh
    for name in options.axis_names:
        if name not in mesh.axis_names:
            raise ValueError(
                f"shard_map: axis_names has {name!r}, but the axes of the mesh are "
                f"{list(mesh.axis_names)}."
            )
    for what, specs in (("in_specs", options.in_specs), ("out_specs", options.out_specs)):
        if specs is not INFERRED:
            for spec in flatten(specs)[0]:
                _check_spec(spec or (), what, options)


def _check_spec(spec: Iterable[Any], what: str, options: BlockOptions) -> None:
    mesh, seen = options.the_mesh, set()
    for name in (name for entry in spec for name in names_of(entry)):
        if name not in options.manual:
            where = "the mesh" if name not in mesh.axis_names else "axis_names"
            raise ValueError(
                f"shard_map: {what} has {spec}, but {name!r} is not an axis of {where}: "
                f"{sorted(map(str, options.manual))}."
            )
        if name in seen:
            raise ValueError(
                f"shard_map: {what} has {spec}, which has the axis {name!r} twice. A mesh axis can "
                "cut one dim."
            )
        seen.add(name)


def split_static_leaves(
    options: BlockOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Wrap what None stands for in ``in_specs``; tensors and arrays stay: devices share them."""
    if kwargs:  # which ``take_blocks`` refuses
        return args, kwargs
    specs = _specs_of(options, args)
    leaves, structure = flatten(args)
    wrapped = [
        leaf if leaf is None or isinstance(spec, PartitionSpec) or _is_array(leaf) else Static(leaf)
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    return structure.unflatten(wrapped), kwargs


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray | np.generic)


def _specs_of(options: BlockOptions, args: tuple[Any, ...]) -> list[Any]:
    given = options.in_specs
    if type(given) is tuple and len(given) != len(args):
        one = len(args) == 1
        raise ValueError(
            f"{options.prefix}: in_specs has {len(given)} entr{'y' if len(given) == 1 else 'ies'}, "
            f"but the call has {len(args)} positional argument{'' if one else 's'}. Give a tuple "
            "with a spec for each (of a method: without self), or one spec for all."
        )
    specs: list[Any] = broadcast_axes(given, args, what="shard_map in_specs", hint=_IN_SPECS_HINT)
    return specs


def take_blocks(
    fun: Callable[..., Any], options: BlockOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallArguments:
    """Check a call (statics already wrapped) against the options; raises before anything is traced
    or sent.
    """
    if kwargs:
        raise TypeError(
            f"{options.prefix}: shard_map takes positional arguments only, but got the keyword "
            f"argument {next(iter(kwargs))!r}: in_specs has one entry per position. Pass it by "
            "position, or bind it with functools.partial."
        )
    mesh = options.the_mesh
    leaves, structure = flatten_call(args, kwargs)
    paths = structure.call_paths(argument_names(fun, len(args)))
    infos = [describe(leaf, path, options) for path, leaf in zip(paths, leaves, strict=True)]
    if options.in_specs is INFERRED:
        specs = [_found_spec(leaf, path, options) for path, leaf in zip(paths, leaves, strict=True)]
    else:
        specs = _specs_of(options, args)
    cuts: list[Cut | None] = []
    for spec, (path, shape, dtype) in zip(specs, infos, strict=True):
        if shape is None:
            cuts.append(None)
            continue
        chosen = PartitionSpec() if spec is None else spec
        _check_shape(options, path, chosen, shape, dtype)
        cuts.append(cut_of_spec(chosen, mesh.axis_names))
    flags, sizes = donated(args, {}, options.donate_argnums, ()), tuple(mesh.devices.shape)
    return CallArguments(leaves, structure, tuple(paths), flags, tuple(cuts), sizes)


def _found_spec(leaf: Any, path: str, options: BlockOptions) -> PartitionSpec | None:
    if leaf is None or isinstance(leaf, Static):
        return None
    if isinstance(leaf, ShardedTensor):
        sharding, mesh = leaf.sharding, options.the_mesh
        of_mesh = sharding.mesh == mesh or (
            sharding.is_fully_replicated and leaf.devices() == set(mesh.devices.flat)
        )
        if of_mesh:
            return sharding.spec
        where = f"lies on {sharding.mesh}"
        if leaf.devices() != set(mesh.devices.flat):
            where += f" of the devices {' '.join(map(str, sharding.mesh.devices.flat))}"
    else:
        where = "is not on the devices"
    raise ValueError(
        f"{options.prefix}: in_specs was left out, so each argument must be a ShardedTensor on the "
        f"mesh of the call, {options.the_mesh}, but {path} {where}. Give in_specs, or place the "
        "argument: torchpmap.device_put(x, P(...))."
    )


def _check_shape(
    options: BlockOptions, path: str, spec: PartitionSpec, shape: tuple[int, ...], dtype: str
) -> None:
    mesh = options.the_mesh.shape
    if len(spec) > len(shape):
        advice = "" if shape else in_a_list(path, dtype).lstrip(".") or " A number takes P()."
        raise ValueError(
            f"{options.prefix}: in_specs has {spec} for argument {path}, which is of rank "
            f"{len(shape)} (its shape is {list(shape)}), fewer than the {len(spec)} entries of the "
            f"spec.{advice}"
        )
    for dim, entry in enumerate(spec):
        names = names_of(entry)
        parts = math.prod(mesh[name] for name in names)
        if shape[dim] % parts:
            over = ", ".join(f"{name!r} ({mesh[name]})" for name in names)
            raise ValueError(
                f"{options.prefix}: dim {dim} of argument {path} has size {shape[dim]}, which is "
                f"not divisible by {parts}, the number of blocks over the mesh axes {over}: "
                f"in_specs has {spec} for it, and its shape is {list(shape)}. Pad the dim to "
                f"{math.ceil(shape[dim] / parts) * parts}."
            )
