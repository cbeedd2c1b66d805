"""The other controllers that take part in a checkpoint; a controller of workers has none.

They exchange data through the store of the job (see ``Rendezvous``): a collective in the background
thread that saves would mix with collectives of the main script.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torchpmap._base.config import config
from torchpmap._base.data import packed, unpacked
from torchpmap._base.deadline import Deadline
from torchpmap._base.errors import CallTimeout, CheckpointError
from torchpmap._runtime import inline_mode
from torchpmap._runtime.base import JobRuntime
from torchpmap._runtime.current import job_runtime, process_count

_T = TypeVar("_T")


class Peers(Protocol):
    """This process and the other controllers."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def size(self) -> int:
        """The number of controllers."""

    def exchange(self, mine: Any, what: str) -> list[Any]:
        """The data of all processes, by rank; must be called in the main script."""

    def settle(self, mine: Any, decide: Callable[[list[Any]], str | None], what: str) -> str | None:
        """Rank 0 decides from the data of all processes, and all get its answer: what went wrong,
        or None.  May be called in any thread, but only one call at a time.
        """


class _Alone:
    rank = 0
    size = 1

    def exchange(self, mine: Any, what: str) -> list[Any]:
        return [mine]

    def settle(self, mine: Any, decide: Callable[[list[Any]], str | None], what: str) -> str | None:
        return decide([mine])


class _Beside:
    """One of several controllers."""

    def __init__(self, runtime: JobRuntime) -> None:
        self._runtime = runtime
        self._rendezvous = rendezvous = runtime.rendezvous
        self._turn = 0
        self.rank, self.size = rendezvous.place.rank, rendezvous.place.size

    def exchange(self, mine: Any, what: str) -> list[Any]:
        given = self._runtime.exchange(range(self.size), packed(mine), what)
        return [unpacked(each) for each in given]

    def settle(self, mine: Any, decide: Callable[[list[Any]], str | None], what: str) -> str | None:
        turn = f"checkpoint/{self._turn}"
        self._turn += 1
        store = self._rendezvous.store
        if self.rank > 0:
            store.set(f"{turn}/{self.rank}", packed(mine))
            self._wait([f"{turn}/answer"], what)
            answer: str | None = unpacked(store.get(f"{turn}/answer"))
            return answer
        answer = "rank 0 failed"
        try:
            answer = decide(self._collected(turn, mine, what))
        finally:
            store.set(f"{turn}/answer", packed(answer))
        # all processes are in this turn, so all have read the answer of the last one
        store.delete_key(f"checkpoint/{self._turn - 2}/answer")
        return answer

    def _collected(self, turn: str, mine: Any, what: str) -> list[Any]:
        keys = [f"{turn}/{rank}" for rank in range(1, self.size)]
        self._wait(keys, what)
        given = [mine, *(unpacked(self._rendezvous.store.get(key)) for key in keys)]
        for key in keys:
            self._rendezvous.store.delete_key(key)
        return given

    def _wait(self, keys: list[str], what: str) -> None:
        # the main script's way to wait also posts what it waits for, to detect deadlocks
        patience = config.snapshot().patience
        for pause in Deadline(patience).pauses():
            if self._rendezvous.store.check(keys):
                return
            self._rendezvous.raise_cause()
            time.sleep(pause)
        raise CallTimeout(
            f"{what}: the other processes did not write their parts within "
            f"torchpmap.config.timeout ({patience:g} s)."
        )


_known: tuple[Any, _Beside] | None = None


def peers() -> Peers:
    """The controllers of the running job."""
    global _known
    if inline_mode.active() or process_count() == 1:
        return _Alone()
    runtime = job_runtime()
    if _known is None or _known[0] is not runtime:
        _known = runtime, _Beside(runtime)
    return _known[1]


def together(others: Peers, what: str, work: Callable[[], _T]) -> _T:
    """Do ``work`` in all processes; if it fails in one process, all raise."""
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    failures = others.exchange(None if error is None else f"{type(error).__name__}: {error}", what)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise CheckpointError(f"{what}: rank {rank} failed: {failure}")
    return result
