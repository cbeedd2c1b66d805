"""``prefetch``: the next batches are loaded and on their way to the devices while a step runs.

One thread per loop loads batches, places them, and hands them over:

    loader --next--> thread --put--> _Feed (at most ``size`` batches wait) --take--> loop

The thread knows the feed, but not the iterator that the loop has.  So the iterator is collected
when the loop has dropped it, and then stops the thread.  At exit the thread is stopped too.

Under a launcher all processes must place values in the same order as they make calls, and when a
thread is done with a batch depends on its speed.  There the thread only loads, and the loop places.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload

import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.errors import RuntimeClosed
from torchpmap._modules.batch import shard_batch
from torchpmap._runtime import inline_mode
from torchpmap._runtime.base import Runtime
from torchpmap._runtime.current import is_launched, refuse_inside, runtime

T = TypeVar("T")
R = TypeVar("R")

_END_S = 1.0
"""How long the end of a loop waits for the batch that its thread is loading."""


@overload
def prefetch(loader: Iterable[T], size: int = 2) -> Prefetch[T]: ...
@overload
def prefetch(
    loader: Iterable[T], size: int = 2, *, stacked: Literal[True], **options: Any
) -> Prefetch[tuple[T, torch.Tensor]]: ...
@overload
def prefetch(
    loader: Iterable[T], size: int = 2, *, put: Callable[..., R], **options: Any
) -> Prefetch[R]: ...
@overload
def prefetch(loader: Iterable[T], size: int = 2, **options: Any) -> Prefetch[T]: ...
@boundary
def prefetch(
    loader: Iterable[Any], size: int = 2, *, put: Callable[..., Any] = shard_batch, **options: Any
) -> Prefetch[Any]:
    """Return the batches of a loader, on the devices; the next ones are loaded while a step runs.

    prefetch: (iterable of batches) -> iterable of what ``put`` returns for each

    A thread loads batches, cuts them over the devices and sends them, as ``shard_batch`` does,
    until ``size`` of them wait. Each ``for`` loop over the result goes through the loader once
    more. Batches come in the loader's order, and an exception of the loader comes out where its
    batch would. The thread ends with the loop, however that ends; a batch that it is loading then
    is dropped, and so are the batches that wait.

    The first batch is loaded by the thread of the loop. So the order in which a ``DataLoader``
    shuffles is what it is without ``prefetch``. Other random numbers that a loader draws in this
    process (transforms, with ``num_workers=0``) mix with those that the loop draws: give such a
    loader a generator of its own.

    Under a launcher batches are only loaded ahead: each is placed when the loop takes it, because
    all processes must place values in one order.

    Args:
        loader: any iterable, such as a ``torch.utils.data.DataLoader``.
        size: how many batches wait at most.
        put: what places a batch; under a launcher where each process loads its own rows,
            ``global_view``.
        options: passed on to ``put``: ``stacked=True`` gives pairs of a batch and its mask, for
            ``pmap``.

    Returns:
        An iterable, with a length if ``loader`` has one.

    Raises:
        TypeError: ``loader`` is no iterable.
        ValueError: ``size`` is not an int of at least 1.
        RuntimeClosed: (the loop) the devices were shut down after the loop began.

    Example:
        >>> import torch, torchpmap as tp
        >>> for x in tp.prefetch([torch.arange(4), torch.arange(6)]):
        ...     print(x)
        ShardedTensor([0, 1, 2, 3], rows of dim 0 on cpu:0 cpu:1 cpu:2 cpu:3)
        ShardedTensor([0, 1, 2, 3, 4, 5], replicated on cpu:0 cpu:1 cpu:2 cpu:3)
        >>> [mask.sum().item() for x, mask in tp.prefetch([torch.arange(6)], stacked=True)]
        [6]

    Source: ``flax.jax_utils.prefetch_to_device``.
    """
    refuse_inside("prefetch")
    if not isinstance(loader, Iterable) and not callable(getattr(loader, "__getitem__", None)):
        raise TypeError(
            f"prefetch takes an iterable of batches, but got a {type(loader).__name__}."
        )
    if type(size) is not int or size < 1:
        raise ValueError(f"prefetch: size must be an int of at least 1, not {size!r}.")

    return Prefetch(loader, size, partial(put, **options))


class Prefetch(Generic[R]):
    """Batches of a loader, on the devices; made by ``torchpmap.prefetch``."""

    def __init__(self, loader: Iterable[Any], size: int, put: Callable[[Any], R]) -> None:
        self._loader = loader
        self._size = size
        self._put = put
        self._last: _Feed | None = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    @boundary
    def __iter__(self) -> Iterator[R]:
        """Go through the loader once more; waits until a loop that was left has its last batch."""
        refuse_inside("prefetch")
        if self._last is not None and self._last.stopped and self._last.thread is not None:
            self._last.thread.join()
        self._last = _Feed(self._size)
        return _Batches(self._last, iter(self._loader), self._put)


class _Batches(Iterator[R]):
    """One loop over the batches."""

    def __init__(self, feed: _Feed, loader: Iterator[Any], put: Callable[[Any], R]) -> None:
        self._feed = feed
        self._loader: Iterator[Any] | None = loader
        """None once the thread has it."""
        self._put = put
        self._places_here = is_launched() or inline_mode.active()
        weakref.finalize(self, feed.stop).atexit = False  # ``start`` sees to that

    @boundary
    def __next__(self) -> R:
        if self._feed.is_forked():
            raise RuntimeError(
                "a loop over torchpmap.prefetch cannot go on in a forked process. Begin it there."
            )
        if self._feed.stopped:
            raise StopIteration
        try:
            if self._loader is not None:
                return self._first(self._loader)
            batch = self._feed.take()
            return _placed(self._put, batch) if self._places_here else batch
        except BaseException:  # the loop is over, also by Ctrl-C, as a generator would be
            self._loader = None
            self._feed.stop()
            raise

    def _first(self, loader: Iterator[Any]) -> R:
        """The first batch; starts the thread that loads the others."""
        batch = _placed(self._put, next(loader))
        self._loader = None
        if self._places_here:
            self._feed.start(loader, None)
        else:
            self._feed.start(loader, _Placing(self._put, runtime()))
        return batch


class _Last(NamedTuple):
    """Comes after the last batch."""

    error: BaseException
    """What the loader raised: ``StopIteration``, if all went well."""


class _Feed:
    """The batches that wait for a loop, and the thread that loads them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()  # its lock is reentrant: finalizers may call stop
        self._ready: deque[Any] = deque()  # guarded by _changed
        self.stopped = False  # set once, under _changed
        self.thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self, loader: Iterator[Any], place: Callable[[Any], Any] | None) -> None:
        self.thread = threading.Thread(
            target=self._run,
            args=(loader, place, torch.is_grad_enabled()),
            name="torchpmap-prefetch",
            daemon=True,  # a loader that hangs must not keep Python from ending
        )
        self.thread.start()
        # later than the pool's own, so it runs before the devices are shut down
        atexit.register(self.stop)

    def is_forked(self) -> bool:
        """Whether this is a copy in a forked process, where the thread does not run."""
        return os.getpid() != self._pid

    def take(self) -> Any:
        """The next batch; raises what the loader raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
            batch = self._ready.popleft()
            self._changed.notify()
        if not isinstance(batch, _Last):
            return batch
        try:
            raise batch.error
        finally:
            del batch  # its traceback has this frame

    def stop(self) -> None:
        """Drop all batches, and end the thread, which is not waited for if it takes long to load
        one.
        """
        if self.is_forked():
            return  # the thread is not here, and may have held the lock
        atexit.unregister(self.stop)
        with self._changed:
            self.stopped = True
            self._ready.clear()
            self._changed.notify_all()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_END_S)

    def _run(
        self, loader: Iterator[Any], place: Callable[[Any], Any] | None, grad_enabled: bool
    ) -> None:
        with torch.set_grad_enabled(grad_enabled):  # each thread has a setting of its own
            try:
                while self._has_room():
                    self._hand_over(next(loader), place)
            except StopIteration:
                self._add(_Last(StopIteration()))  # the traceback would keep the loader
            except BaseException as error:
                self._add(_Last(error))

    def _has_room(self) -> bool:
        """Waits for it; False if the loop has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or len(self._ready) < self._size)
            return not self.stopped

    def _hand_over(self, batch: Any, place: Callable[[Any], Any] | None) -> None:
        """A function of its own: no variable keeps the batch while the thread waits."""
        if not self.stopped:
            self._add(batch if place is None else place(batch))

    def _add(self, batch: Any) -> None:
        with self._changed:
            if not self.stopped:
                self._ready.append(batch)
                self._changed.notify()


@dataclass(frozen=True)
class _Placing:
    """Puts batches on the devices that were there when the loop began."""

    put: Callable[[Any], Any]
    pool: Runtime

    def __call__(self, batch: Any) -> Any:
        if self.pool.closed:  # ``put`` would start new devices
            raise RuntimeClosed("its devices were shut down while prefetch loaded batches for them")
        return _placed(self.put, batch)


def _placed(put: Callable[[Any], R], batch: Any) -> R:
    try:
        return put(batch)
    except StopIteration as error:  # it would end the loop
        raise RuntimeError("prefetch: put raised StopIteration") from error
