"""Tools that show what a mapped function does, and check its results (``torchpmap.debug``)."""

from __future__ import annotations

import builtins
import os
import pdb
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any

import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.config import config
from torchpmap._base.devices import Device
from torchpmap._base.errors import kind_of
from torchpmap._base.fingerprint import digest
from torchpmap._base.jax_names import missing_in as _missing_in
from torchpmap._base.notebook import display_in_cell
from torchpmap._base.pytree import flatten
from torchpmap._layout import axis_stack
from torchpmap._layout.picture import picture
from torchpmap._plan.certificate import Certificate, Claim
from torchpmap._plan.collectives import Collective, Inside
from torchpmap._plan.cost import Cost
from torchpmap._plan.roofline import Machine, keep
from torchpmap._runtime import inline_mode
from torchpmap._runtime.current import devices, is_running, job_runtime, process_index, runtime
from torchpmap._sharded.gather_report import Gather, report_gathers
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap._trace import effects
from torchpmap._transforms import nans
from torchpmap._transforms.mapped import Mapped
from torchpmap._transforms.pmap import Pmapped, pmap
from torchpmap.debug._bisect import Difference
from torchpmap.debug._calibrate import measured
from torchpmap.debug._check import CheckReport, check
from torchpmap.debug._record import Recording, dump, record
from torchpmap.debug._replay import Replay, replay

__all__ = [
    "Certificate",
    "CheckReport",
    "Claim",
    "Collective",
    "Cost",
    "Difference",
    "Gather",
    "Inside",
    "Machine",
    "Recording",
    "Replay",
    "assert_replicated",
    "breakpoint",
    "calibrate",
    "check_pmap",
    "cost",
    "dump",
    "fake_pmap",
    "find_nan",
    "print",
    "record",
    "replay",
    "report_gathers",
    "stacks",
    "visualize_sharding",
]

if not _TYPE_CHECKING:  # a type checker that saw it would accept every name
    __getattr__ = _missing_in(__name__)


@contextmanager
def fake_pmap(*, serial: bool = False) -> Iterator[None]:
    """Run every mapped call of the ``with`` block in the calling process, with the true results of
    collectives; also a decorator.

    All rows run at once under ``torch.func.vmap``; nothing is traced, compiled or sent, and no
    worker is started.  Every exception has its ordinary traceback, results are plain tensors, and
    ``.backward()``, ``torch.func.grad`` and ``vmap`` around a mapped function work.  Calls are
    checked, and misuse raises, as on the devices.  Donated arguments stay usable.  Only the calling
    thread is affected; ``tp.config.runtime = "inline"`` or ``TORCHPMAP_RUNTIME=inline`` does the
    same for the whole script.  Under a launcher the rows are those of the calling process, and
    collectives have no others.

    Inside the mapped function, ``.backward()`` and the Python value of one row (``.item()``,
    ``if x > 0``) raise, with a note that says what to do.  With ``serial=True`` they work.

    Args:
        serial: run the rows (of a ``shard_map``: the devices) one after the other, as plain Python
            (one thread per row, only one runs at a time; rows wait for each other at collectives).
            Then all of Python works inside, but the call cannot be differentiated from outside.

    Returns:
        A context manager.

    Example:
        >>> import torch, torchpmap as tp
        >>> normalize = tp.pmap(lambda x: x / tp.psum(x, "i"), axis_name="i")
        >>> with tp.debug.fake_pmap():
        ...     print(normalize(torch.tensor([1.0, 2.0, 3.0, 4.0])))
        tensor([0.1000, 0.2000, 0.3000, 0.4000])
        >>> with tp.debug.fake_pmap(serial=True):
        ...     y = tp.pmap(lambda x: print("row", x.item()))(torch.arange(2.0))
        row 0.0
        row 1.0

    Source: ``chex.fake_pmap``; checked in tests/debug/test_debug.py and, with the programs whose
        results are known from JAX, in tests/programs/test_jax_parity.py.
    """
    with inline_mode.chosen(True, serial=serial):
        yield


@boundary
def find_nan(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Return None if ``fun(*args, **kwargs)`` makes no NaN; else raise, and name the operation.

    The call runs in this process, uncompiled and with every operation looked at, which is slow.  A
    mapped function runs as under ``fake_pmap(serial=True)``; a jitted one runs operation by
    operation.  What ``fun`` writes (parameters, ``.grad``), it writes.  A NaN counts even if a
    later operation drops it, as ``torch.where`` may; with ``tp.config.debug_infs`` infinity counts
    too.  All processes that have blocks of an argument must make the call.

    Args:
        fun: any function: mapped, jitted, or one that calls such functions.
        args, kwargs: what it is called with.

    Raises:
        FloatingPointError: an operation gave NaN, and none of its inputs holds one.  The text has
            the operation, your line, its inputs with their ranges, and the row; in a backward pass
            the line of the forward operation, in a loop the step.  If there is no such operation,
            but arguments or captured tensors hold NaN, it names these.  So it does before a NaN
            from outside is written to what is there after the call.

    Example:
        >>> import torch, torchpmap as tp
        >>> f = tp.pmap(lambda x: tp.psum(x.sqrt(), "i"), axis_name="i")
        >>> tp.debug.find_nan(f, torch.tensor([1.0, 4.0]))
        >>> try:
        ...     tp.debug.find_nan(f, torch.tensor([1.0, -4.0]))
        ... except FloatingPointError as error:
        ...     print(str(error).splitlines()[0])
        aten.sqrt.default gave NaN in 1 of 1 numbers of float32[], and its inputs hold none

    Source: what ``jax_debug_nans`` does after a NaN: the function again, operation by operation.
    """
    nans.find(fun, args, kwargs, ("NaN", "infinity") if config.debug_infs else ("NaN",))


@boundary
def check_pmap(
    fun: Callable[..., Any],
    *args: Any,
    axis_name: Hashable | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    rtol: float | None = None,
    atol: float | None = None,
    gradients: bool = True,
    **options: Any,
) -> CheckReport:
    """Compute ``pmap(fun)(*args)`` in three ways and compare the values and the gradients.

    *serial*: row by row in plain Python, where rows wait for each other at collectives; *vmapped*:
    as under ``fake_pmap``; *pmapped*: on the devices, compiled.  The gradients are those of a fixed
    random weighted sum of all floating-point outputs, to all floating-point tensors among the
    arguments.  The report lists what a way cannot do (such as vmapped with ``.item()``).  Under a
    launcher the first two have the rows of this process: check collectives in a single process.

    Args:
        fun: the function of one row, or a mapped function (then without further options).
        args: the arguments of the mapped function.
        axis_name, in_axes, out_axes, options: as for ``pmap``.
        rtol: relative tolerance of floats, 0 or more; default: by dtype, 1e-4 for float32.
        atol: absolute tolerance, 0 or more; default: by dtype, 1e-5 for float32.
        gradients: whether to compare gradients too.

    Returns:
        A report; ``print`` it.

    Raises:
        AssertionError: two ways differ; the text names the first leaf that differs, the way, the
            index of the worst element and both numbers.  Else what ``fun`` or ``pmap`` raises.

    Example:
        >>> import torch, torchpmap as tp
        >>> def center(w, x):
        ...     return w * (x - tp.pmean(x, "i"))
        >>> w, x = torch.tensor(2.0), torch.arange(4.0)
        >>> print(tp.debug.check_pmap(center, w, x, axis_name="i", in_axes=(None, 0)))
        check_pmap(center): equal, largest difference ...
          values (1): serial, vmapped, pmapped
          gradients (2): serial, vmapped, pmapped

    Source: checked in tests/debug/test_check_pmap.py.
    """
    mapped: Any = fun
    if not isinstance(fun, Mapped):
        mapped = pmap(fun, axis_name, in_axes=in_axes, out_axes=out_axes, **options)
    elif not isinstance(fun, Pmapped):
        raise TypeError(
            f"check_pmap compares the ways to compute a pmap, but got {fun!r}. Compare a shard_map "
            "with the same function on whole tensors."
        )
    elif options or axis_name is not None or in_axes != 0 or out_axes != 0:
        raise TypeError(
            "check_pmap: a function that is mapped already brings its own options; pass the plain "
            "function with options, or the mapped one without."
        )
    return check(mapped._fun, mapped._options, args, (rtol, atol), gradients)


@boundary
def print(fmt: str, *args: Any, ordered: bool = True, **kwargs: Any) -> None:
    """Print ``fmt.format(*args, **kwargs)`` once for every index of the mapped axis, with the
    values of the call, also in compiled code.

    A line starts with the index of its device, ``[i=2]``; under a ``vmap`` inside the function
    there is a line for every row.  Under ``grad`` the values are printed once.

    Args:
        fmt: a format string as for ``str.format``; every argument must be used.
        args, kwargs: tensors, pytrees of them, or anything else, which is formatted immediately.
        ordered: print in the order of the index: all lines are sent to the first device, so every
            device must reach this print.  Otherwise each device prints as soon as it gets there.

    Raises:
        TypeError, ValueError, IndexError, KeyError: the format does not fit its arguments.

    Example:
        >>> import torch, torchpmap as tp
        >>> @tp.pmap(axis_name="i")
        ... def f(x):
        ...     tp.debug.print("x = {}, square {square:.2f}", x, square=x**2)
        ...     return tp.psum(x, "i")
        >>> with tp.debug.fake_pmap():
        ...     y = f(torch.arange(3.0))
        [i=0] x = 0.0, square 0.00
        [i=1] x = 1.0, square 1.00
        [i=2] x = 2.0, square 4.00

    Source: ``jax.debug.print``; checked in tests/trace/test_effects.py.
    """
    if not isinstance(fmt, str):
        raise TypeError(f"debug.print: the first argument is a format string, but got {fmt!r}.")
    effects.show(fmt, args, kwargs, ordered=ordered)


@boundary
def assert_replicated(x: Any, axis_name: Hashable | None = None) -> None:
    """Raise on all devices if a value differs between the devices of an axis.

    Inside a mapped function it compares the values of the call, also in compiled code: the error
    comes with the results of the call.  Outside, it compares the devices' copies of replicated
    ShardedTensors (under a launcher bit by bit: all processes that have one must call it).  NaN
    equals NaN.

    Args:
        x: tensor or pytree of tensors; Python values are the same everywhere.
        axis_name: name of the axis, or several; None outside a mapped function.

    Raises:
        ValueError: a leaf differs; names it and the largest difference.
        NameError: the axis is not bound.

    Example:
        >>> import torch, torchpmap as tp
        >>> @tp.pmap(axis_name="i")
        ... def step(w, x):
        ...     w = w - tp.pmean(w * x, "i")
        ...     tp.debug.assert_replicated({"w": w}, "i")
        ...     return w
        >>> step(torch.ones(4), torch.arange(4.0)).tolist()
        [-0.5, -0.5, -0.5, -0.5]

    Source: checked in tests/trace/test_effects.py.
    """
    leaves, structure = flatten(x)
    for leaf, path in zip(leaves, structure.paths("x"), strict=True):
        if not isinstance(leaf, torch.Tensor):
            continue
        if axis_name is None:
            _assert_equal_copies(leaf, path)
            continue
        message = (
            f"assert_replicated: {path} differs between devices of axis {axis_name!r} (largest "
            "difference {distance}). Reduce it over the axis, for example with pmean."
        )
        effects.check_equal(effects.difference(leaf.detach(), axis_name), message)


def _assert_equal_copies(leaf: torch.Tensor, path: str) -> None:
    if not isinstance(leaf, ShardedTensor):
        return
    if not leaf.is_fully_replicated:
        raise ValueError(
            f"assert_replicated: {path} is {leaf._alive()[0].sharding.spec}, so devices hold "
            "different parts of it. Pass a replicated value, or give the name of the axis inside "
            "the mapped function."
        )
    first, *others = (shard.data for shard in leaf.addressable_shards)
    ranks = sorted({device.process_index for device in leaf.devices()})
    if len(ranks) > 1:
        found = job_runtime().exchange(ranks, digest(first), f"assert_replicated of {path}")
        if len(set(found)) > 1:
            raise ValueError(f"assert_replicated: {path} differs between processes.")
    for copy in others:
        distance = effects.distance(copy, first)
        if float(distance) != 0:
            raise ValueError(
                f"assert_replicated: {path} differs between devices (largest difference "
                f"{float(distance):g})."
            )


def breakpoint(index: int = 0) -> None:
    """Stop in the debugger inside a mapped function, for one index of its axis.

    It needs ``fake_pmap``: elsewhere the function is traced, or runs in another process.  With
    ``fake_pmap(serial=True)`` it stops only in the row ``index``, where tensors are plain ones.
    With ``fake_pmap()`` all rows run at once, so it stops once, and tensors show all rows.
    ``PYTHONBREAKPOINT`` chooses the debugger, as for Python's own ``breakpoint()``.

    Args:
        index: index along the axis of the row to stop in.

    Raises:
        RuntimeError: not under ``fake_pmap``, or not inside a mapped function.

    Source: ``jax.debug.breakpoint``; checked in tests/debug/test_debug.py.
    """
    axes = axis_stack.bound()
    if not axes or not inline_mode.active():
        where = "outside a mapped function; use Python's breakpoint()"
        if axes:
            where = (
                "in a function that runs on the devices, out of a debugger's reach; run it under "
                "torchpmap.debug.fake_pmap(serial=True)"
            )
        raise RuntimeError(f"torchpmap.debug.breakpoint was called {where}.")
    rows = [axis for parts in axes for axis in parts if axis.group is not None]
    if any(int(axis.index) != index for axis in rows):
        return
    if not rows:
        names = ", ".join(f"{parts[0].name!r} (size {parts[0].size})" for parts in axes)
        builtins.print(
            f"All rows of {names} run at once: tensors show all of them. "
            "fake_pmap(serial=True) stops in one row."
        )
    if os.environ.get("PYTHONBREAKPOINT") or sys.breakpointhook is not sys.__breakpointhook__:
        sys.breakpointhook()
    else:
        pdb.Pdb().set_trace(sys._getframe(1))


@boundary
def cost(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Cost:
    """Return what a call ``f(*args, **kwargs)`` computes, sends and holds on one device.

    It is counted from the graph of the call: nothing is compiled or run.

    Args:
        f: a mapped function.
        args, kwargs: as for the call; tensors on the meta device will do.

    Returns:
        A ``Cost``; ``print`` it.

    Raises:
        TypeError, ValueError: as the call itself, or ``f`` is not mapped.
        TraceError: the function cannot be traced, or is never traced (``compile=False``).

    Example:
        >>> import torch, torchpmap as tp
        >>> f = tp.pmap(lambda w, x: tp.pmean(w @ x, "i"), "i", in_axes=(None, 0))
        >>> print(tp.debug.cost(f, torch.zeros(8, 3), torch.zeros(4, 3)))
        48 flops on each device
        all_reduce over i: 32 B
        memory: 108 B arguments, 32 B results, at most 64 B temporaries

    Source: ``jax.stages.Lowered.cost_analysis``; checked in tests/plan/test_cost.py.
    """
    if not isinstance(f, Mapped):
        raise TypeError(
            f"debug.cost takes a function that is mapped, but got {f!r}. Map it first: "
            "debug.cost(torchpmap.pmap(f, ...), x)."
        )
    return f.lower(*args, **kwargs).cost()


@boundary
def calibrate() -> Machine:
    """Measure how fast the devices of this process are, for ``Cost.seconds``; some ten seconds, in
    which nothing else should run.

    The numbers are kept in the user's cache folder (``~/.cache/torchpmap``, or that of
    ``XDG_CACHE_HOME``) for later programs on as many devices.

    Returns:
        The ``Machine``, which ``f.lower(x).cost(machine)`` takes too.

    Source: the roofline model (Williams, Waterman and Patterson, 2009); compared with times by
    ``benchmarks/roofline.py``.
    """
    machine = measured()
    if process_index() == 0:
        keep(machine, devices())
    return machine


@boundary
def stacks() -> dict[Device, str]:
    """Return what each device of this process does now, and the stack of its Python code.

    For a call that does not end: call it in another thread.  It waits for half a second at most and
    disturbs nothing, so of a device that is in C code which holds the interpreter's lock it says
    only that it does not answer.  (A `timeout=` says more, as the call fails then.)

    Returns:
        By device, a line and the stack, innermost frame first; empty if no devices run.  Under a
        launcher: the main thread of this process, as Python prints it.

    Example:
        >>> import torch, torchpmap as tp
        >>> x = tp.replicate(torch.zeros(2)).block_until_ready()
        >>> [doing.splitlines()[0] for doing in tp.debug.stacks().values()]
        ['waits for a command', 'waits for a command', 'waits for a command', 'waits for a command']
    """
    known = devices()
    return {known[rank]: text for rank, text in runtime().stacks().items()} if is_running() else {}


@boundary
def visualize_sharding(x: torch.Tensor) -> None:
    """Print which device holds what part of a tensor; a notebook shows it in colours.

    Args:
        x: a ShardedTensor; of any other tensor it prints where it is.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.debug.visualize_sharding(tp.pmap(lambda x: x)(torch.zeros(4, 2)))
        float32[4, 2], cut along dim 0
          +-------+
        0 | cpu:0 |
          +-------+
        1 | cpu:1 |
          +-------+
        2 | cpu:2 |
          +-------+
        3 | cpu:3 |
          +-------+
        >>> tp.debug.visualize_sharding(tp.replicate(torch.zeros(2)))
        float32[2], replicated
        +-------------------------+
        | cpu:0 cpu:1 cpu:2 cpu:3 |
        +-------------------------+

    Source: ``jax.debug.visualize_array_sharding``; checked in tests/layout/test_picture.py.
    """
    if isinstance(x, ShardedTensor):
        drawn = picture(x._alive()[0])
        (display_in_cell() or builtins.print)(drawn)
    else:
        builtins.print(f"{kind_of(x.shape, x.dtype)}, in this process ({x.device})")
