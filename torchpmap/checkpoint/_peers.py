"""The other controllers that take part in a checkpoint; a controller of workers has none.

They exchange data through the store of the job (see ``Rendezvous``): a collective in the background
thread that saves would mix with collectives of the main script.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from torchpmap._base.config import config
from torchpmap._base.data import packed, unpacked
from torchpmap._base.deadline import Deadline
from torchpmap._base.errors import CallTimeout, CheckpointError
from torchpmap._runtime import inline_mode
from torchpmap._runtime.base import JobRuntime
from torchpmap._runtime.current import job_runtime, process_count

_T = TypeVar("_T")


class Peers:
    """This process and the other controllers."""

    def __init__(self, runtime: JobRuntime | None) -> None:
        """``runtime``: of the job; None if there are no others."""
        self._runtime = runtime
        self._turn = 0
        self.rank, self.size = 0, 1
        if runtime is not None:
            self._rendezvous = runtime.rendezvous
            self._store = self._rendezvous.store
            self.rank, self.size = self._rendezvous.place.rank, self._rendezvous.place.size

    def exchange(self, mine: Any, what: str) -> list[Any]:
        """The data of all processes, by rank; must be called in the main script."""
        if self._runtime is None:
            return [mine]
        given = self._runtime.exchange(range(self.size), packed(mine), what)
        return [unpacked(each) for each in given]

    def together(self, work: Callable[[], _T], what: str) -> _T:
        """Do ``work`` in all processes; if it fails in one process, all raise.  Must be called in
        the main script.
        """
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        text = None if error is None else f"{type(error).__name__}: {error}"
        failures = self.exchange(text, what)
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise CheckpointError(f"{what}: rank {rank} failed: {failure}")
        return result

    def decide(self, mine: Any, work: Callable[[list[Any]], None], what: str) -> None:
        """Rank 0 does ``work`` with the data of all processes; if it fails, all raise.  May be
        called in any thread, but only one call at a time.
        """
        if self._runtime is None:
            work([mine])
            return
        turn = f"checkpoint/{self._turn}"
        self._turn += 1
        if self.rank > 0:
            self._store.set(f"{turn}/{self.rank}", packed(mine))
            self._wait([f"{turn}/answer"], what)
            failure = unpacked(self._store.get(f"{turn}/answer"))
            if failure is not None:
                raise CheckpointError(failure)
            return
        failure = "rank 0 was interrupted"
        try:
            keys = [f"{turn}/{rank}" for rank in range(1, self.size)]
            self._wait(keys, what)
            given = [unpacked(self._store.get(key)) for key in keys]
            for key in keys:
                self._store.delete_key(key)
            work([mine, *given])
            failure = None
        except Exception as error:
            failure = str(error)
            raise
        finally:
            self._store.set(f"{turn}/answer", packed(failure))
            # all processes are in this turn, so all have read the answer of the last one
            self._store.delete_key(f"checkpoint/{self._turn - 2}/answer")

    def _wait(self, keys: list[str], what: str) -> None:
        # the main script's way to wait also posts what it waits for, to detect deadlocks
        patience = config.snapshot().patience
        for pause in Deadline(patience).pauses():
            if self._store.check(keys):
                return
            self._rendezvous.raise_cause()
            time.sleep(pause)
        raise CallTimeout(
            f"{what}: the other processes did not write their parts within "
            f"torchpmap.config.timeout ({patience:g} s)."
        )


_ALONE = Peers(None)
_known: tuple[JobRuntime, Peers] | None = None


def peers() -> Peers:
    """The controllers of the running job."""
    global _known
    if inline_mode.active() or process_count() == 1:
        return _ALONE
    runtime = job_runtime()
    if _known is None or _known[0] is not runtime:
        _known = runtime, Peers(runtime)
    return _known[1]
