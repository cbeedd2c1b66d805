"""Views at traced positions, such as ``x[i]`` where ``i`` is the step of a loop.

torch gives a view of ``x`` there: a write to one is seen through the other.  A graph has no views
at positions that are known only when it runs, and a vmap none that differ by row, so ``x[i]`` is a
copy in it.  ``TracedViews`` keeps such a copy and its base equal: a write to the copy is written to
the base after the call that wrote, and a copy whose base was written to is read again before the
call that uses it.

Writes are counted where operations are dispatched, by storage, so it does not matter through which
view a tensor is written.  The copies are made where functions are called, so that derivatives and
vmaps go through them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.context import assigned
from torchpmap._base.pytree import tree_leaves
from torchpmap._base.sources import users_line
from torchpmap._base.storages import storage_number
from torchpmap._base.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    at_depth,
    depth,
    innermost,
    is_batched,
    is_vmap,
    torch_function_off,
    tracing_mode,
    transforms,
    written_values,
)
from torchpmap._trace.windows import Entries, put, take

_current: ContextVar[TracedViews | None] = ContextVar("torchpmap_traced_views", default=None)


@dataclass(eq=False)
class _View:
    """A copy that stands for a view."""

    copy: torch.Tensor
    base: torch.Tensor
    entries: Entries
    """Where it is in ``base``."""
    key: Any
    """What stood in ``[]``."""
    versions: list[int]
    """How often the tensors in ``key`` had been written to."""
    seen: int
    """How often its base had been written to when they were last equal."""
    depth: int
    """How many transforms were active where it was made."""
    tracer: Any
    line: str


class TracedViews:
    """The views of one trace."""

    def __init__(self) -> None:
        self._views: dict[int, _View] = {}
        """By the storage of the copy.  (The storages stay alive with it, so no number comes again.)
        """
        self._writes: dict[int, int] = {}
        """How often a storage was written to: those of copies and their bases."""
        self._written: dict[int, None] = {}
        """Storages written to by the call that is running."""
        self._is_busy = False
        """Whether what is called now is called from here."""

    def entered(self) -> AbstractContextManager[None]:
        """Use these views in the block; ``note`` is called by a mode around it."""
        return assigned(_current, self)

    def view(self, base: torch.Tensor, entries: Entries, key: Any) -> torch.Tensor:
        """The part of ``base``; ``key``: what stands in ``[]``, or None."""
        copy = take(base, entries)
        storage, under = _storage(copy), _storage(base)
        if storage and under:
            writes = self._writes.setdefault(under, 0)
            self._writes[storage] = 0
            self._views[storage] = _View(
                *(copy, base, entries, key, _versions(key)),
                *(writes, depth(), _tracer(), users_line()),
            )
        return copy

    def forget(self, rows: Any) -> None:
        """Let copies stand for themselves: a vmap stacks its rows, so its results are no views."""
        for value in tree_leaves(rows):
            if isinstance(value, torch.Tensor) and is_batched(value):
                self._views.pop(_storage(value), None)

    def has(self, base: torch.Tensor, key: Any, value: Any) -> bool:
        """Whether ``value`` is ``base[key]`` itself, as in ``base[key] += 1``."""
        view = self._views.get(_storage(value))
        return (
            view is not None
            and (view.copy is value and view.base is base and view.key is key)
            and view.versions == _versions(key)
        )

    # -- where operations are dispatched

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """Hear of an operation below all transforms."""
        if not self._views or not isinstance(func, OpOverload):
            return
        for value in written_values(func, args, kwargs):
            storage = _storage(value)
            if storage in self._writes:
                self._writes[storage] += 1
                self._written[storage] = None

    # -- where functions are called

    def before_call(self, arguments: Any) -> None:
        """Bring up to date the copies that a call is given."""
        if not self._views or self._is_busy:
            return
        for value in tree_leaves(arguments):
            view = self._views.get(_storage(value))
            if view is not None:
                self._refresh(view)

    def after_call(self) -> None:
        """Write to the bases what a call wrote to copies of their parts."""
        if not self._written or self._is_busy:
            return
        written, self._written = list(self._written), {}
        roots = [self._root(storage) for storage in written]
        views = [self._views[storage] for storage in written if storage in self._views]
        for view in views:
            if roots.count(self._root(_storage(view.copy))) > 1:
                raise NotImplementedError(
                    f"at {users_line()}: one call writes to several parts of a tensor, of which "
                    f"{view.line} is at a traced position, so the parts may be the same. Write to "
                    "each part in a call of its own."
                )
            with self._busy():
                self._write_back(view)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        before = self._is_busy, self._written
        self._is_busy, self._written = True, {}
        try:
            yield
        finally:
            self._is_busy, self._written = before

    def refresh_all(self) -> None:
        """Bring up to date all copies that can be: what follows may read them elsewhere."""
        for view in list(self._views.values()):
            if self._is_stale(view) and self._is_here(view):
                self._refresh(view)

    def _root(self, storage: int) -> int:
        while storage in self._views:
            storage = _storage(self._views[storage].base)
        return storage

    def _write_back(self, view: _View) -> None:
        put(view.base, view.entries, view.copy)
        under = _storage(view.base)
        view.seen = self._writes[under]
        if under in self._views:
            self._write_back(self._views[under])

    def _is_stale(self, view: _View) -> bool:
        under = _storage(view.base)
        return view.seen != self._writes[under] or (
            under in self._views and self._is_stale(self._views[under])
        )

    def _is_here(self, view: _View) -> bool:
        """Whether the copy can be written to: not in the graph of another loop, nor after the
        transform in which it was made.
        """
        return view.depth <= depth() and view.tracer is _tracer()

    def _refresh(self, view: _View) -> None:
        if not self._is_stale(view):
            return
        if not self._is_here(view):
            raise NotImplementedError(
                f"at {users_line()}: this uses {view.line}, a view at a traced position, outside "
                "of the transform or loop in which it was made, and after a write to the tensor "
                "that it is a part of. Index that tensor again (or .clone() the view before the "
                "write, to keep the old values)."
            )
        under = self._views.get(_storage(view.base))
        if under is not None:
            self._refresh(under)
        with self._busy(), at_depth(view.depth), torch.enable_grad():
            view.copy.copy_(take(view.base, view.entries))
        view.seen = self._writes[_storage(view.base)]


class _CountWrites(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, views: TracedViews) -> None:
        super().__init__()
        self._views = views

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._views.note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def in_lanes() -> Iterator[None]:
    """Keep views at positions that differ by row equal to their bases, where nothing is traced."""
    if _current.get() is not None or not any(map(is_vmap, transforms())):
        yield
        return
    with _followed():
        yield


def kept_equal(own: Callable[..., Any], is_active: Callable[[], bool]) -> Callable[..., Any]:
    """What replaces torch's vmap of flat arguments: views at positions that differ by row are equal
    to their bases in it, and when it ends.  ``is_active``: whether code of a mapped function calls
    it.
    """

    @functools.wraps(own)
    def flat_vmap(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not is_active():
            return own(func, *args, **kwargs)

        def kept_rows(*rows: Any, **more: Any) -> Any:
            found = func(*rows, **more)
            views = settle(found)
            if views is not None:
                views.forget(found)
            return found

        with nullcontext() if _current.get() is not None else _followed():
            return own(kept_rows, *args, **kwargs)

    return flat_vmap


@contextlib.contextmanager
def _followed() -> Iterator[None]:
    views = TracedViews()
    with views.entered(), _CountWrites(views):
        yield


def settle(values: Any) -> TracedViews | None:
    """Bring up to date what a function returns, or takes without a function of torch."""
    views = _current.get()
    if views is not None:
        views.before_call(values)
    return views


def traced_views() -> TracedViews | None:
    """Those of the function that runs in this thread, if it is traced or runs in lanes."""
    return _current.get()


def _tracer() -> Any:
    mode = tracing_mode()
    return None if mode is None else mode.tracer


def _versions(key: Any) -> list[int]:
    with torch_function_off():
        tensors = [innermost(x) for x in tree_leaves(key) if isinstance(x, torch.Tensor)]
        return [x._version for x in tensors]


def _storage(value: Any) -> int:
    """The number of its storage; 0 for a value without one."""
    return (storage_number(value) or 0) if isinstance(value, torch.Tensor) else 0
