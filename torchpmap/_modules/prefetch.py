"""``prefetch``: the next batches are loaded and on their way to the devices while a step runs.

One thread per loop loads batches, places them, and hands them over:

    loader --next--> thread --place--> _Feed._ready --> loop
                       ^                              |
                       +--------- _Feed._room <-------+      permits, ``size`` in all

The loop is a generator, which the thread does not know: left in whatever way, or collected, it
stops the thread.  At exit the thread is stopped too.  A garbage collection may close the generator
anywhere, also in the middle of a ``put``, which only a ``SimpleQueue`` allows.

Under a launcher all processes must place values in the same order as they make calls, and when a
thread is done with a batch depends on its speed.  There the thread only loads, and the loop places.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Generic, Literal, TypeVar, overload

import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.errors import RuntimeClosed
from torchpmap._modules.batch import shard_batch
from torchpmap._runtime import current, inline_mode
from torchpmap._runtime.current import is_launched, is_running, refuse_inside

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
        self._last: threading.Thread | None = None
        """Of the loop that ended last; it may still load a batch."""

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    @boundary
    def __iter__(self) -> Iterator[R]:
        """Go through the loader once more; waits until a loop that was left has its last batch."""
        refuse_inside("prefetch")
        if self._last is not None and self._last.is_alive():
            self._last.join()
        return _Batches(self._batches(iter(self._loader)))

    def _batches(self, loader: Iterator[Any]) -> Generator[R]:
        """A batch is in a list that it leaves: no variable keeps one that was taken."""
        places_here = is_launched() or inline_mode.active()
        batch = [self._place(each) for each in islice(loader, 1)]
        if not batch:
            return
        feed = _Feed(
            self._size, loader, (lambda batch: batch) if places_here else self._place_ahead
        )
        del loader
        try:
            feed.start()
            yield batch.pop()
            while batch := feed.take():
                yield self._place(batch.pop()) if places_here else batch.pop()
        finally:
            self._last = feed.thread
            feed.stop()

    def _place_ahead(self, batch: Any) -> R:
        with current.steady:  # ``resize`` would miss what is made while it moves the values
            if not is_running():  # ``put`` would start new devices
                raise RuntimeClosed(
                    "its devices were shut down while prefetch loaded batches for them"
                )
            return self._place(batch)

    def _place(self, batch: Any) -> R:
        try:
            return self._put(batch)
        except StopIteration as error:  # it would end the loop
            raise RuntimeError("prefetch: put raised StopIteration") from error


class _Batches(Iterator[R]):
    """One loop over the batches."""

    def __init__(self, batches: Generator[R]) -> None:
        self._batches = batches

    @boundary
    def __next__(self) -> R:
        return next(self._batches)


class _Feed:
    """The batches that wait for a loop, and the thread that loads them."""

    def __init__(self, size: int, loader: Iterator[Any], place: Callable[[Any], Any]) -> None:
        self._ready: SimpleQueue[list[Any] | BaseException] = SimpleQueue()  # [batch]; []: the end
        self._room: SimpleQueue[bool] = SimpleQueue()  # permits to load one; False: not to go on
        for _ in range(size):
            self._room.put(True)
        self._pid = os.getpid()
        self.thread = threading.Thread(
            target=self._run,
            args=(loader, place, torch.is_grad_enabled()),
            name="torchpmap-prefetch",
            daemon=True,  # a loader that hangs must not keep Python from ending
        )

    def start(self) -> None:
        self.thread.start()
        # later than the pool's own, so it runs before the devices are shut down
        atexit.register(self.stop)

    def take(self) -> list[Any]:
        """The next batch; raises what the loader raised."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "a loop over torchpmap.prefetch cannot go on in a forked process. Begin it there."
            )
        found = self._ready.get()
        self._room.put(True)
        if isinstance(found, list):
            return found
        try:
            raise found
        finally:
            del found  # its traceback has this frame

    def stop(self) -> None:
        """Drop all batches, and end the thread, which is not waited for if it takes long to load
        one.
        """
        if os.getpid() != self._pid:
            return  # the thread is not here
        atexit.unregister(self.stop)
        _empty(self._room)
        self._room.put(False)
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(_END_S)
        _empty(self._ready)

    def _run(self, loader: Iterator[Any], place: Callable[[Any], Any], grad_enabled: bool) -> None:
        with torch.set_grad_enabled(grad_enabled):  # each thread has a setting of its own
            try:
                while self._room.get():
                    self._ready.put([place(next(loader))])  # no variable keeps the batch
            except StopIteration:
                self._ready.put([])
            except BaseException as error:
                self._ready.put(error)


def _empty(queue: SimpleQueue[Any]) -> None:
    with contextlib.suppress(Empty):
        while True:
            queue.get_nowait()
