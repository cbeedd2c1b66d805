"""The others that take part in a checkpoint: controllers of a job, or workers of this one.

Controllers exchange data through the store of the job (see ``Rendezvous``): a collective in the
background thread that saves would mix with collectives of the main script.  Workers answer through
pipes: if one dies, its pipe ends.  Only data goes through both.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from multiprocessing import util
from multiprocessing.connection import wait
from typing import Any, TypeVar

from torchpmap._base.config import config
from torchpmap._base.data import packed, unpacked
from torchpmap._base.deadline import Deadline
from torchpmap._base.errors import CallTimeout, CheckpointError, PmapError
from torchpmap._runtime import inline_mode
from torchpmap._runtime.current import job_runtime, process_count, process_index
from torchpmap._runtime.torchrun.rendezvous import store_failures
from torchpmap.checkpoint._folder import file_of

_T = TypeVar("_T")


class Peers:
    """This process and the other controllers, for ``what``: one save or load."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.size = 1 if inline_mode.active() else process_count()
        self.rank = process_index() if self.size > 1 else 0
        if self.size > 1:
            self._runtime = job_runtime()
            self._rendezvous = self._runtime.rendezvous
            # each save and load exchanges something, so no other has this number
            number = self._rendezvous.turn_of(range(self.size))
            self._keys = [f"checkpoint/{number}/{rank}" for rank in range(self.size)]

    def exchange(self, mine: Any) -> list[Any]:
        """The data of all processes, by rank; must be called in the main script."""
        if self.size == 1:
            return [mine]
        given = self._runtime.exchange(range(self.size), packed(mine), self.what)
        return [unpacked(each) for each in given]

    def together(self, work: Callable[[], _T]) -> _T:
        """Do ``work`` in all processes; if it fails in one process, all raise.  Must be called in
        the main script.
        """
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        text = None if error is None else f"{type(error).__name__}: {error}"
        failures = self.exchange(text)
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise CheckpointError(f"{self.what}: rank {rank} failed: {failure}")
        return result

    def decide(self, mine: Any, work: Callable[[list[Any]], None]) -> None:
        """Rank 0 does ``work`` with the data of all processes; if it fails, all raise.  May be
        called in any thread, once.
        """
        if self.size == 1:
            work([mine])
            return
        with store_failures():
            self._decide(packed(mine), work)

    def _decide(self, mine: bytes, work: Callable[[list[Any]], None]) -> None:
        store, answer = self._rendezvous.store, self._keys[0] + "!"
        store.set(self._keys[self.rank], mine)
        failure: str | None = "rank 0 was interrupted"
        try:
            if self.rank == 0:
                work(self._wait(dict(enumerate(self._keys))))
                failure = None
            else:
                (failure,) = self._wait({0: answer})
        except Exception as error:
            failure = str(error)
            raise
        finally:
            if self.rank == 0:
                store.set(answer, packed(failure))  # it stays: few bytes
                for key in self._keys:  # not by their processes, which may have given up meanwhile
                    store.delete_key(key)
        if failure is not None:
            raise CheckpointError(failure)

    def _wait(self, keys: dict[int, str]) -> list[Any]:
        """What is stored under keys, one of each rank."""
        # the main script's way to wait also posts what it waits for, to detect deadlocks
        rendezvous, patience = self._rendezvous, self._rendezvous.patience_s
        store = rendezvous.store
        for pause in Deadline(patience).pauses():
            lost_peers = rendezvous.lost_peers()
            if store.check([*keys.values()]):
                return [unpacked(store.get(key)) for key in keys.values()]
            rendezvous.raise_cause()
            if lost_peers:
                rendezvous.refuse_to_wait_for_lost(rendezvous.missing(keys), lost_peers)
            time.sleep(pause)
        raise CallTimeout(
            f"{self.what}: the other processes did not write their parts within "
            f"torchpmap.config.timeout ({patience:g} s)."
        )


class Pipes(ExitStack):
    """The controller's ends of the pipes from the workers that write, for one save."""

    def __init__(self) -> None:
        super().__init__()
        self.path = ""
        """Of the pipes, without the ranks of the writers."""
        self._ends: dict[int, int] = {}

    def open(self, writers: Iterable[int]) -> None:
        # in a folder that only this user can enter, and that is made when it is needed
        self.path = f"{util.get_temp_dir()}/checkpoint-{secrets.token_hex(8)}-"
        for writer in writers:
            name = f"{self.path}{writer}"
            os.mkfifo(name, 0o600)
            self.callback(os.unlink, name)
            self._ends[writer] = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self.callback(os.close, self._ends[writer])

    def answers(self) -> dict[int, Any]:
        """What the writers, which have opened their ends, answer; a text says what went wrong."""
        limit_s = config.snapshot().patience
        deadline, answers = Deadline(limit_s), dict[int, Any]()
        for writer, end in self._ends.items():
            data = b""
            while wait([end], deadline.left()) and (part := os.read(end, 2**16)):
                data += part
            try:
                answers |= unpacked(data)
            except PmapError:
                late = f"was not done within torchpmap.config.timeout ({limit_s:g} s)"
                what = late if deadline.passed else "has ended"
                answers[writer] = f"the worker that writes {file_of(writer)} {what}"
        return answers
