"""``pmap``: every device runs a function on a row of each argument."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import torch

from torchpmap._base.arrays import for_torch
from torchpmap._base.boundary import boundary
from torchpmap._base.devices import Device
from torchpmap._layout import axis_stack
from torchpmap._transforms import nans
from torchpmap._transforms.arguments import Options, PmapOptions, make_options, split_statics
from torchpmap._transforms.call import Static
from torchpmap._transforms.inline import run_here, run_inline
from torchpmap._transforms.mapped import Mapped, map_with
from torchpmap._transforms.row_preparation import RowPreparation

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Pmapped(Mapped[_P, _R]):
    """A function mapped over devices; made by ``pmap``, called like the function.

    For a type checker it takes and returns what the function does, with a row more in every tensor:
    a result of type ``Tensor`` is a ShardedTensor, or under ``debug.fake_pmap`` a plain one.
    """

    _options: Options
    _preparation: RowPreparation

    def __init__(self, fun: Callable[_P, _R], options: Options) -> None:
        inner = fun._preparation if isinstance(fun, Pmapped) else None
        super().__init__(fun, options, RowPreparation(fun, options, inner))
        self._split = functools.partial(split_statics, options)
        self._has_statics = bool(options.static_argnums or options.static_argnames)
        self._counts_self = 0 in options.static_argnums  # the caller counts self, as in JAX

    def __repr__(self) -> str:
        return f"<pmap of {self._options.name} over axis {self._options.axis_name!r}>"

    def _gathered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        call = self._preparation.arguments_of(*self._split(args, kwargs))
        if call.spans:
            return super()._gathered(args, kwargs)
        leaves = [
            (x.value if isinstance(x, Static) else x)
            if axis is None
            else nans.whole(torch.as_tensor(for_torch(x)), axis)
            for x, axis in zip(call.leaves, call.axes, strict=True)
        ]
        found: tuple[Any, Any] = call.structure.unflatten(leaves)
        return found

    def _run_here(self, args: tuple[Any, ...], kwargs: dict[str, Any], inside: bool) -> Any:
        options = self._options
        if inside and options.devices is not None and axis_stack.bound():
            raise ValueError(
                f"{options.prefix}: a pmap inside a mapped function runs on the device of its "
                "caller, and cannot have devices. Leave them out, or give them to the outer pmap."
            )
        call = self._preparation.arguments_of(args, kwargs, has_all_rows=inside)
        return (run_here if inside else run_inline)(self._preparation, call)


@overload
def pmap(
    fun: Callable[_P, _R], axis_name: Hashable = None, **options: Unpack[PmapOptions]
) -> Pmapped[_P, _R]: ...
@overload
def pmap(
    fun: None = None, axis_name: Hashable = None, **options: Unpack[PmapOptions]
) -> Callable[[Callable[_P, _R]], Pmapped[_P, _R]]: ...
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
        check_replicated: raise if an output with out axis None differs between devices.  Only what
            tracing does not prove to be equal is compared, which makes the call wait.
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
    return map_with(Pmapped, make_options, settings, settings.pop("fun"), "fun of pmap")
