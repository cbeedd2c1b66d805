"""Time limits of calls.

The time of a call counts from when it is sent, or, if it is queued behind others, from when a rank
begins it.  Compiling, on any rank, does not count.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchpmap._base.devices import Device
from torchpmap._base.errors import CallTimeout, pack_exception
from torchpmap._runtime.local.process import WorkerProcess
from torchpmap._runtime.local.reentry import LIMIT
from torchpmap._runtime.local.supervise import Failed
from torchpmap._runtime.local.triage import Sight, ask, described, look

_LOOK_AGAIN_S = 0.5
_STACKS_CHARS = 1 << 17
"""Length of the stacks of all ranks together in an error."""


@dataclass
class _Limit:
    seq: int
    epoch: int
    ranks: Sequence[int]
    seconds: float
    name: str
    since: float
    look_at: float
    is_queued: bool = False
    """Whether no rank had begun the call at the last look."""


class Limits:
    """``add``: send lock held; ``on_tick`` and ``clear``: one thread at a time each; ``begin``
    and ``close``: any thread.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        workers: Mapping[int, WorkerProcess],
        reached: Callable[[int, Sequence[int]], bool],
        withhold: Callable[[int], None],
        on_overdue: Callable[[Failed, int], None],
        epoch: Callable[[], int],
    ) -> None:
        """``reached``: whether ranks are at no command up to this one.  A thread of its own calls
        ``withhold`` as soon as a command has failed, and then ``on_overdue`` with the reason and
        the ``epoch`` in which it was sent.
        """
        self._devices = devices
        self._workers = workers
        self._reached = reached
        self._withhold = withhold
        self._on_overdue = on_overdue
        self._epoch = epoch
        self._limits: dict[int, _Limit] = {}
        self._to_judge: queue.SimpleQueue[_Limit | None] = queue.SimpleQueue()
        self._is_judging = False
        self.thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self) -> None:
        """Start the thread, if it was not done (the caller holds a lock).

        Raises:
            RuntimeError: there are too many threads; the next caller tries again.
        """
        if self.thread is None:
            thread = threading.Thread(target=self._run, name=LIMIT, daemon=True)
            thread.start()
            self.thread = thread

    def close(self) -> None:
        """Let the thread end; does not wait for it."""
        self._is_closed = True
        self._to_judge.put(None)

    def add(self, seq: int, ranks: Sequence[int], seconds: float, name: str) -> None:
        epoch = self._epoch()
        now = time.monotonic()
        self._limits[seq] = _Limit(seq, epoch, ranks, seconds, name, now, now + seconds)

    def clear(self) -> None:
        self._limits.clear()

    def on_tick(self, now: float) -> None:
        """Look at calls whose time may be up; never waits."""
        for limit in tuple(self._limits.values()):
            if self._reached(limit.seq, limit.ranks):
                self._limits.pop(limit.seq, None)
            elif now >= limit.look_at and not self._is_judging:
                self._is_judging = True
                self._to_judge.put(limit)

    def _run(self) -> None:
        while (limit := self._to_judge.get()) is not None and not self._is_closed:
            try:
                self._judge(limit)
            except (OSError, ValueError):  # the sockets are closed
                if not self._is_closed:
                    raise
            finally:
                self._is_judging = False

    def _judge(self, limit: _Limit) -> None:
        late = [rank for rank in limit.ranks if not self._reached(limit.seq, (rank,))]
        answers = ask({rank: self._workers[rank] for rank in late})
        late = [rank for rank in late if not self._reached(limit.seq, (rank,))]
        if not late or limit.seq not in self._limits:
            return
        now = time.monotonic()
        begun = any(answers[rank].has_begun(limit.seq) for rank in late)
        begun = begun and not any(answers[rank].is_compiling for rank in late)
        was_queued, limit.is_queued = limit.is_queued, not begun
        if not begun:
            limit.look_at = now + _LOOK_AGAIN_S
        elif was_queued:
            limit.look_at = now + limit.seconds
        else:
            self._limits.pop(limit.seq, None)
            self._withhold(limit.seq)
            sights = look({rank: self._workers[rank] for rank in late}, answers)
            self._on_overdue(self._failed(limit, late, sights), limit.epoch)

    def _failed(self, limit: _Limit, late: Sequence[int], sights: Mapping[int, Sight]) -> Failed:
        lines, stacks = [], []
        for rank in limit.ranks:
            where = f"{self._devices[rank]} (rank {rank}, pid {self._workers[rank].pid})"
            sight = sights[rank] if rank in late else None
            what = "has finished it" if sight is None else described(sight, limit.seq)
            lines.append(f"  {where} {what}")
            if sight is not None:
                shown = sight.stack[: _STACKS_CHARS // len(late)] or "  (no Python stack)"
                stacks.append(f"{where}, innermost frame first:\n{shown}")
        error = CallTimeout(
            f"{limit.name} did not end within its timeout of {limit.seconds:g} s:\n"
            + "\n".join(lines)
        )
        packed = pack_exception(error, limit=2 * _STACKS_CHARS, trace="\n".join(stacks))
        return Failed(late[0], limit.seq, False, packed, f"while running {limit.name}")
