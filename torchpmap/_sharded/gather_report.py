"""Reports of the operations on sharded tensors that gather, and of arguments that are moved."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.fx import GraphModule
from torch.nn.modules import module

from torchpmap._base.config import config
from torchpmap._base.errors import size_text, warn
from torchpmap._base.sources import users_frames
from torchpmap._sharded.memory import Remote

_reports: ContextVar[tuple[list[Gather], ...]] = ContextVar("torchpmap_gathers", default=())


@dataclass(frozen=True)
class Gather:
    """One operation that gathered its operands, or one argument that was moved."""

    where: str
    """``file:line`` of the caller; an operation of a backward pass names the line that started it.
    """
    name: str
    """The ATen operation; ``"move"`` for an argument of a mapped function that lay in another
    layout than the function takes.
    """
    num_bytes: int
    """Of the operands that were gathered, or of what was moved."""


MOVE = "move"


@contextlib.contextmanager
def report_gathers() -> Iterator[list[Gather]]:
    """List the operations on ShardedTensors that gather their operands, on the devices or in this
    process, and the arguments of mapped functions that are moved because they lie in another
    layout.

    In a ``with`` block, the list grows by one ``Gather`` each.  Asking for the numbers
    (``numpy()``, ``item()``, ``print``) or for another layout (``device_put``) is not listed.

    Returns:
        A context manager that gives the list.

    Example:
        >>> import torch, torchpmap as tp
        >>> x = tp.device_put(torch.arange(4.0), tp.devices()[:4])
        >>> with tp.debug.report_gathers() as gathers:
        ...     y = (x * 2).sum()  # stays on the devices
        ...     z = x.cumsum(0)  # needs all rows at once
        >>> [(gather.name, gather.num_bytes) for gather in gathers]
        [('aten.cumsum.default', 16)]

    Source: torchpmap's own; counted by the tests in tests/sharded/test_blocks.py.
    """
    gathers: list[Gather] = []
    token = _reports.set((*_reports.get(), gathers))
    try:
        yield gathers
    finally:
        _reports.reset(token)


def note_gather(func: Any, num_bytes: int) -> None:
    """Add an operation, or ``MOVE``, to the reports that are being collected; warn, once for each
    operation of each class of modules, if it is part of a module that is on the devices.
    """
    if func is not MOVE:
        _warn_of_module(str(func))
    if config.gathers != "allow":
        what = "an argument is moved to another layout" if func is MOVE else f"{func} gathers"
        tell_of_gather(f"{what} ({size_text(num_bytes)}), at {_call_site()}")
    reports = _reports.get()
    if reports:
        gather = Gather(_call_site(), str(func), num_bytes)
        for report in reports:
            report.append(gather)


def tell_of_gather(text: str) -> None:
    """Warn, or raise ``RuntimeError``, if ``tp.config.gathers`` says so."""
    if config.gathers == "raise":
        raise RuntimeError(
            f"{text}; tp.config.gathers is 'raise'. Change the layout beforehand "
            "(torchpmap.device_put), or set it to 'allow' if this is meant."
        )
    if config.gathers == "warn":
        warn(f"{text}.")


_warned: set[tuple[type, str]] = set()


def _warn_of_module(name: str) -> None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not _calls_a_module(frame):
        frame = frame.f_back
    if frame is None:
        return
    called = frame.f_locals["self"]
    kind = type(called)
    tensors = itertools.chain(called.parameters(), called.buffers())
    if (kind, name) in _warned or not any(isinstance(x, Remote) for x in tensors):
        return
    _warned.add((kind, name))
    warn(
        f"{kind.__name__} is on the devices, but its operation {name} gathers its operands, "
        "because it cannot run block by block (see torchpmap.debug.report_gathers). Cut another "
        "dim of the input, or call the module in a mapped function: torchpmap.functional(module), "
        "torchpmap.pmap."
    )


def _calls_a_module(frame: FrameType) -> bool:
    """Whether it calls a module of the user's; torch makes graphs, as in ``linearize``."""
    code = frame.f_code
    calls = code.co_name == "_call_impl" and code.co_filename == module.__file__
    return calls and not isinstance(frame.f_locals["self"], GraphModule)


def _call_site() -> str:
    for frame in users_frames():
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "<unknown line>"
