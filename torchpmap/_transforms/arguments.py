"""From the arguments of a call to leaves with axes: statics, prefixes, names, the axis size (pure;
all misuse is reported here).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import torch

from torchpmap._base.axis_spec import (
    IN_AXES_HINT,
    KWARGS_HINT,
    argument_names,
    broadcast_axes,
    check_axis_spec,
    mapped_axis_size,
)
from torchpmap._base.config import check_timeout
from torchpmap._base.devices import Device
from torchpmap._base.errors import call_prefix
from torchpmap._base.pytree import flatten_call
from torchpmap._layout.grid import cut_at
from torchpmap._trace.compile import parse_compile
from torchpmap._trace.escaped import Escaped
from torchpmap._transforms.call import (
    CallArguments,
    MapOptions,
    Static,
    as_tuple,
    check_randomness,
    describe,
    donated,
)

_T = TypeVar("_T")


class PmapOptions(TypedDict, total=False):
    """The keyword arguments of ``pmap``, for its overloads; its docstring explains them."""

    in_axes: Any
    out_axes: Any
    static_broadcasted_argnums: int | Iterable[int]
    static_broadcasted_argnames: str | Iterable[str]
    devices: Sequence[Device] | None
    backend: str | None
    axis_size: int | None
    donate_argnums: int | Iterable[int]
    donate_argnames: str | Iterable[str]
    compile: bool | dict[str, Any]
    fullgraph: bool
    randomness: str
    check_replicated: bool
    timeout: float | None


@dataclass(frozen=True)
class Options(MapOptions):
    """The arguments of ``pmap``, checked."""

    axis_name: Hashable
    in_axes: Any
    out_axes: Any
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    donate_argnames: tuple[str, ...]
    devices: tuple[Device, ...] | None
    platform: str | None
    axis_size: int | None
    check_replicated: bool

    @property
    def prefix(self) -> str:
        return call_prefix("pmap", self.name, self.in_axes, self.axis_name)


def split_statics(
    options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Wrap static arguments, so that they are hashable leaves of the call."""
    if not options.static_argnums and not options.static_argnames:
        return args, kwargs
    positional = list(args)
    for number in options.static_argnums:
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"pmapped function has static_broadcasted_argnums={options.static_argnums} but was "
                f"called with only {len(args)} positional argument{'s' * (len(args) != 1)}. All "
                "static broadcasted arguments must be passed positionally (or be named in "
                "static_broadcasted_argnames)."
            )
        positional[number] = _static(args[number], f"index {number % len(args)}", options)
    keywords = {
        key: _static(value, f"name {key!r}", options) if key in options.static_argnames else value
        for key, value in kwargs.items()
    }
    return tuple(positional), keywords


def _static(value: Any, which: str, options: Options) -> Static:
    leaves = flatten_call((value,), {})[0]
    for leaf in leaves:
        if isinstance(leaf, Escaped):
            leaf.refuse(f"static argument ({which}) for function {options.name}")
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise ValueError(
            f"Static argument ({which}) of type {type(value)} for function {options.name} has a "
            "tensor in it, but static arguments are compared by value, once per call. Pass it as "
            "an argument that is not static, or close over it."
        )
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            "Non-hashable static arguments are not supported, as this can lead to unexpected "
            f"cache-misses. Static argument ({which}) of type {type(value)} for function "
            f"{options.name} is non-hashable."
        ) from None
    return Static(value)


def take_apart(
    fun: Callable[..., Any],
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_devices: int | None,
    spans: bool = False,
) -> CallArguments:
    """Check a call (statics already wrapped) against the options; raises before anything is traced
    or sent.
    """
    names = argument_names(fun, len(args))
    leaves, structure = flatten_call(args, kwargs)
    paths = structure.call_paths(names)
    axes = [*_positional_axes(options, names, args, kwargs), *_keyword_axes(options, kwargs)]
    infos = [describe(leaf, path, options) for path, leaf in zip(paths, leaves, strict=True)]
    size = mapped_axis_size(infos, axes, what="pmap", axis_size=options.axis_size)
    if size is None:
        size = num_devices if options.devices is not None else None
    if size is None:
        raise ValueError(
            f"{options.prefix}: pmap requires at least one argument with a mapped axis. Map an "
            "argument (in_axes), or give axis_size or devices."
        )
    if size == 0:
        raise ValueError(
            f"{options.prefix}: the mapped axis has size 0, but it needs at least one row."
        )
    cuts = tuple(
        None if shape is None else cut_at(None if axis is None else axis % len(shape))
        for axis, (_, shape, _) in zip(axes, infos, strict=True)
    )
    flags = donated(args, kwargs, options.donate_argnums, options.donate_argnames)
    return CallArguments(leaves, structure, tuple(paths), flags, cuts, (size,), spans)


def _positional_axes(
    options: Options, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[int | None]:
    spec = options.in_axes
    if isinstance(spec, Mapping):
        unknown = sorted(set(spec) - set(names) - set(kwargs))
        if unknown:
            raise ValueError(
                f"{options.prefix}: in_axes names {unknown[0]!r}, but the arguments of this call "
                f"are {', '.join([*names, *kwargs])}."
            )
        spec = tuple(spec.get(name, 0) for name in names)
    if isinstance(spec, tuple) and len(spec) == len(args):
        # the entry of a static argument is a placeholder
        spec = tuple(
            None if isinstance(arg, Static) else entry
            for entry, arg in zip(spec, args, strict=True)
        )
    hint = IN_AXES_HINT + (KWARGS_HINT if kwargs else "")
    return broadcast_axes(spec, args, what="pmap in_axes", hint=hint, root="[0]" if kwargs else "")


def _keyword_axes(options: Options, kwargs: dict[str, Any]) -> list[int | None]:
    named = options.in_axes if isinstance(options.in_axes, Mapping) else {}
    axes: list[int | None] = []
    for key, value in sorted(kwargs.items()):  # leaves of dicts are in the order of their keys
        axes += broadcast_axes(named.get(key, 0), value, what=f"pmap in_axes[{key!r}]")
    return axes


# -- checks at wrap time ---------------------------------------------------------------------------


def check_axis_name(axis_name: Any) -> None:
    if axis_name is None or isinstance(axis_name, str):
        return
    if not isinstance(axis_name, Hashable) or isinstance(
        axis_name, int | tuple | list | torch.Tensor
    ):
        raise TypeError(
            "pmap: axis_name must be a string or another hashable object that is not an int, "
            "tuple or list (ints mean positional dims and tuples several axes in the "
            f"collectives), but got {axis_name!r}."
        )


def check_in_axes(in_axes: Any) -> None:
    if isinstance(in_axes, list):
        raise ValueError(
            "pytree structure error: different types at key path\n    pmap in_axes\nAt that key "
            "path, the prefix pytree pmap in_axes has a subtree of type\n    <class 'list'>\nbut "
            "at the same key path the full pytree has a subtree of different type\n    <class "
            f"'tuple'>.{IN_AXES_HINT}"
        )
    if isinstance(in_axes, Mapping):
        for entry in in_axes.values():
            check_axis_spec(entry, "pmap in_axes")
    else:
        check_axis_spec(in_axes, "pmap in_axes")


def make_options(
    name: str,
    *,
    static_broadcasted_argnums: Any,
    static_broadcasted_argnames: Any,
    donate_argnums: Any,
    donate_argnames: Any,
    devices: Sequence[Device] | None,
    backend: str | None,
    compile: Any,
    timeout: float | None,
    **others: Any,
) -> Options:
    """The settings of ``pmap``, checked; ``others``: those that stay as they are."""
    check_axis_name(others["axis_name"])
    check_in_axes(others["in_axes"])
    check_axis_spec(others["out_axes"], "pmap out_axes")
    static = as_tuple(static_broadcasted_argnums, "pmap: static_broadcasted_argnums", int)
    donate = as_tuple(donate_argnums, "pmap: donate_argnums", int)
    static_names = as_tuple(static_broadcasted_argnames, "pmap: static_broadcasted_argnames", str)
    donate_names = as_tuple(donate_argnames, "pmap: donate_argnames", str)
    if set(static) & set(donate) or set(static_names) & set(donate_names):
        raise ValueError(
            f"pmap: static_broadcasted_argnums {list(static or static_names)} and donate_argnums "
            f"{list(donate or donate_names)} cannot intersect."
        )
    check_randomness("pmap", others["randomness"])
    axis_size = others["axis_size"]
    if axis_size is not None and (type(axis_size) is not int or axis_size < 1):
        raise ValueError(f"pmap: axis_size must be a positive int, but got {axis_size!r}.")
    return Options(
        name=name,
        static_argnums=static,
        static_argnames=static_names,
        donate_argnums=donate,
        donate_argnames=donate_names,
        devices=_device_list(devices),
        platform=backend,
        backend=parse_compile(compile),
        timeout=None if timeout is None else check_timeout("pmap: timeout", timeout),
        **others,
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
