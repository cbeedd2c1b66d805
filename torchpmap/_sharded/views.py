"""In-place writes and the tensors that must see them.

In torch, ``y = x.T`` and ``y = x.detach()`` share the memory of ``x``: a write to one is a write to
all.  Values on the devices are immutable, so here the tensors are linked instead, and a write
computes the new value of every tensor linked to the written one: its parent by the operation that
puts a part back (``select_scatter`` for ``select``), its views by taking them again.

    x  <--view-- y = x.T  <--view-- z = y[0]        z.add_(1): y from z, x from y
    x  --alias-- d = x.detach()                     d has the handle of x

A view keeps its parent alive, as in torch.  Aliases have weak references to each other: an alias
must not keep the autograd graph alive that it was detached from.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchpmap._base.torch_internals import autograd_node, in_backward
from torchpmap._layout.layout import Layout
from torchpmap._runtime.base import Handle
from torchpmap._runtime.current import refuse_to_wait_for
from torchpmap._sharded import operations
from torchpmap._sharded.transfer import store
from torchpmap._sharded.unforeseen import name_of

_aten = torch.ops.aten

_in_turn = threading.RLock()
"""Held by a thread that writes: it makes the new value of a whole from the old one and a part."""
_linking = threading.RLock()
"""Held for moments, while links change; a thread that has it never waits for the other one."""
for _lock in (_in_turn, _linking):
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


class Changed(Exception):
    """Another thread has changed what was read: a tensor that this was to write, what a program
    depends on, or the devices.  To be done again.
    """


@dataclass(frozen=True, eq=False)
class _View:
    """How a tensor was taken from another."""

    parent: Any
    func: Any
    args: tuple[Any, ...]
    """The arguments after the parent."""

    def take(self, parent: torch.Tensor) -> Any:
        return self.func(parent, *self.args)


def link_view(
    results: Sequence[Any], parent: Any, handle: Handle | None, func: Any, args: Sequence[Any]
) -> None:
    """Note that ``results`` are views of ``parent``, each by an operation with one result: of a cut
    dim, one with several gathers all.  ``handle``: the value of the parent that they were taken of.
    """
    end = 0
    for number, result in enumerate(results):
        view = func, tuple(args)
        if func is _aten.unbind.int:
            view = _aten.select.int, (args[0] if args else 0, number)
        elif func in (_aten.split.Tensor, _aten.split_with_sizes.default):
            dim = args[1] if len(args) > 1 else 0
            start, end = end, end + result.shape[dim]
            view = _aten.slice.Tensor, (dim, start, end)
        result._view = _View(parent, *view)
    with _linking:
        children = [child for child in getattr(parent, "_views", ()) if child() is not None]
        parent._views = [*children, *map(weakref.ref, results)]
    _catch_up(parent, handle)


def view_of(tensor: Any) -> _View | None:
    """How a tensor was taken from another, if that is there."""
    view: _View | None = getattr(tensor, "_view", None)
    return view if view is not None and view.parent._layout is not None else None


def is_row(value: Any, parent: Any, index: int) -> bool:
    """Whether a value is ``parent[index]``."""
    view = view_of(value)
    if view is None or view.parent is not parent:
        return False
    return view.func is _aten.select.int and view.args == (0, index)


def is_taken_as_grad() -> bool:
    """Whether torch is storing a gradient in ``tensor.grad``.

    torch does not copy it if nothing else refers to it.  But here it may be a view although it is
    none in torch, which copies an expanded gradient.
    """
    if not in_backward():
        return False
    node = autograd_node()
    return node is not None and node.name().endswith("AccumulateGrad")


def twin_of(tensor: Any) -> Any:
    """A tensor that shares its value, now and after every write."""
    twin = tensor._twin()
    link_alias(twin, tensor)
    return twin


def link_alias(twin: Any, original: Any) -> None:
    """Note that two tensors share one value, now and after every write.

    A twin of a view is a view of the parent's twin, because the parent itself may hold an autograd
    graph.
    """
    with _linking:
        _share(twin, original)
    _catch_up(original, twin._handle)


def _share(twin: Any, original: Any) -> None:
    view = view_of(original)
    if view is not None:
        parent = view.parent._twin()
        _share(parent, view.parent)
        twin._view = replace(view, parent=parent)
        parent._views = [weakref.ref(twin)]
    aliases = getattr(original, "_aliases", None)
    if aliases is None:
        aliases = original._aliases = [weakref.ref(original)]
    aliases[:] = [*(each for each in aliases if each() is not None), weakref.ref(twin)]
    twin._aliases = aliases


def unlink(tensor: Any, old: Any) -> None:
    """Take a tensor out of all links, before it gets another value; ``old``, a new tensor of its
    value, takes its place in them.
    """
    with _linking:
        for name in ("_aliases", "_view", "_views"):
            if hasattr(tensor, name):
                setattr(old, name, getattr(tensor, name))
                delattr(tensor, name)
        view = getattr(old, "_view", None)
        for kept in (getattr(old, "_aliases", None), view and view.parent._views):
            if kept is not None:
                kept[:] = [
                    *(reference for reference in kept if reference() is not tensor),
                    weakref.ref(old),
                ]
        for view in _views(old):
            view._view = replace(view._view, parent=old)


def aliases_of(tensor: Any) -> list[Any]:
    """The living tensors of one value, the given one first."""
    others = [alias() for alias in getattr(tensor, "_aliases", ())]
    return [tensor, *(o for o in others if o is not None and o is not tensor)]


def _views(tensor: Any) -> Iterator[Any]:
    for reference in getattr(tensor, "_views", ()):
        view = reference()
        if view is not None and view._layout is not None:
            yield view


def linked(tensor: Any) -> list[Any]:
    """All tensors that a write to ``tensor`` changes, itself first."""
    found = {id(tensor): tensor}
    waiting = [tensor]
    while waiting:
        here = waiting.pop()
        view = view_of(here)
        parents = () if view is None else (view.parent,)
        for other in (*aliases_of(here), *_views(here), *parents):
            if id(other) not in found:
                found[id(other)] = other
                waiting.append(other)
    return list(found.values())


def is_linked(tensor: Any) -> bool:
    """Whether a write to ``tensor`` changes others too."""
    has_links = hasattr(tensor, "_aliases") or hasattr(tensor, "_views") or hasattr(tensor, "_view")
    if not has_links:
        return False
    with _linking:
        if len(linked(tensor)) > 1:
            return True
        for name in ("_aliases", "_views"):  # the others are gone: nothing to ask the next time
            if hasattr(tensor, name):
                delattr(tensor, name)
    return False


def share_values(targets: Sequence[Any], operands: Sequence[Any]) -> bool:
    """Whether a write to one of ``targets`` changes another of ``operands`` (which lists a tensor
    as often as it is given).
    """
    present = Counter(map(id, operands))
    return any(sum(present[id(other)] for other in linked(target)) > 1 for target in targets)


def host_copies(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Copies on the host that share memory where a write to one of ``tensors`` changes another."""
    wholes: dict[int, torch.Tensor] = {}
    return [_host_copy(tensor, wholes) for tensor in tensors]


def _host_copy(tensor: Any, wholes: dict[int, torch.Tensor]) -> Any:
    view = view_of(tensor)
    if view is not None:
        return view.take(_host_copy(view.parent, wholes))
    key = id(getattr(tensor, "_aliases", tensor))
    if key not in wholes:
        wholes[key] = tensor.to_host()
    return wholes[key]


def check_writable(target: Any) -> None:
    """Raise ``RuntimeError`` if a write to ``target`` could not reach what it is a view of.

    Other views are only taken again, so they may be any.
    """
    found = {id(target)}
    waiting = [target]
    while waiting:
        for tensor in aliases_of(waiting.pop()):
            view = view_of(tensor)
            if view is not None and id(view.parent) not in found:
                found.add(id(view.parent))
                waiting.append(view.parent)
                _check_back(view, tensor)


def _check_back(view: _View, tensor: Any) -> None:
    if view.func not in _BACK:
        raise RuntimeError(
            f"a ShardedTensor that is a view made by {view.func} cannot be written to "
            "in place; .clone() the view first, or use an out-of-place operation."
        )
    if view.func is _aten.expand.default and view.parent.numel() < tensor.numel():
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to "
            "a single memory location. Please clone() the tensor before performing the "
            "operation."
        )


def write(target: Any, handle: Handle) -> None:
    """Give ``target`` a new value, and with it every tensor linked to it."""
    with _in_turn, torch.no_grad():
        _spread(target, handle, set())


def in_turn() -> AbstractContextManager[bool]:
    """The lock of a thread that writes; raises in a handler that has interrupted a write."""
    refuse_to_wait_for(_in_turn, _linking, operations._lock)
    return _in_turn


def write_all(
    targets: Sequence[Any], before: Sequence[Handle | None], handles: Sequence[Handle]
) -> None:
    """``write`` for several, whose new values were made when they had those ``before``.

    Raises:
        Changed: they have others now.
    """
    with in_turn():
        if any(x._handle is not was for x, was in zip(targets, before, strict=True)):
            raise Changed
        for target, handle in zip(targets, handles, strict=True):
            write(target, handle)


def _catch_up(tensor: Any, handle: Handle | None) -> None:
    """Let a new link of a tensor get what another thread has written since ``handle`` was read."""
    if tensor._handle is not handle:
        with _in_turn:
            now = tensor._handle
            if now is not handle and now is not None:
                write(tensor, now)


def _spread(tensor: Any, value: Handle, done: set[int]) -> None:
    alike: list[Any] = []
    # until no other thread has made another alias meanwhile
    while more := [x for x in aliases_of(tensor) if x._layout is not None and id(x) not in done]:
        for alias in more:
            alias._handle = value
            done.add(id(alias))
        alike += more
    for alias in alike:
        for view in _views(alias):
            if id(view) not in done:
                taken = view._view.take(alias._made(alias._layout, value))
                _spread(view, _laid_out(view._layout, taken), done)
        own = view_of(alias)
        if own is not None and id(own.parent) not in done:
            parent = own.parent
            whole = parent._made(parent._layout, parent._handle)
            back = _BACK[own.func](own, whole, alias._made(alias._layout, value))
            _spread(parent, _laid_out(parent._layout, back), done)


def _laid_out(layout: Layout, value: Any) -> Handle:
    """The handle of a value, a sharded or a plain tensor, in a given layout."""
    if hasattr(value, "_alive"):
        here, handle = value._alive()
        return operations.move(here, handle, layout)
    return store(layout, value)


# -- from a view back to its parent ----------------------------------------------------------------

Back = Callable[[_View, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes the view, the old whole and the new part; gives the new whole."""


def _scatter(view: _View, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    scatter = getattr(_aten, f"{name_of(view.func)}_scatter").default
    result: torch.Tensor = scatter(whole, part, *view.args)
    return result


def _permute(view: _View, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    order = [dim % whole.ndim for dim in view.args[0]]
    return part.permute([order.index(dim) for dim in range(whole.ndim)])


_RESHAPED = (
    *(_aten._reshape_alias.default, _aten.expand.default, _aten.unsqueeze.default),
    *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.view.default),
)
_OWN_INVERSE = (_aten._conj.default, _aten.t.default, _aten.transpose.int)
_PARTS = (_aten.as_strided.default, _aten.diagonal.default, _aten.select.int, _aten.slice.Tensor)
_BACK: dict[Any, Back] = {
    **dict.fromkeys(_RESHAPED, lambda view, whole, part: part.reshape(whole.shape)),
    **dict.fromkeys(_OWN_INVERSE, lambda view, whole, part: view.func(part, *view.args)),
    **dict.fromkeys(_PARTS, _scatter),
    _aten.permute.default: _permute,
    _aten.view.dtype: lambda view, whole, part: part.view(whole.dtype),
    _aten.view_as_complex.default: lambda view, whole, part: torch.view_as_real(part),
    _aten.view_as_real.default: lambda view, whole, part: torch.view_as_complex(part),
}
