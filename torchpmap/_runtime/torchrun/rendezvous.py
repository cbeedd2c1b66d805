"""How the processes of one job meet, agree on what comes next, and learn which one failed first.

All of it goes through the store of ``torch.distributed``'s default process group.  If torchrun's
agent keeps this store, it outlives the processes.  A call that was made before uses nothing of
this.  Any program that reaches the store's port can write to it, so it is read as data (see
``_base/data``), never as pickles.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torchpmap._base.boundary import is_wanted
from torchpmap._base.data import not_ours, packed, unpacked
from torchpmap._base.deadline import Deadline
from torchpmap._base.errors import (
    CallTimeout,
    CollectiveMismatch,
    PmapError,
    RemoteTraceback,
    WorkerDied,
    WorkerError,
)
from torchpmap._base.tracebacks import printed_folded
from torchpmap._runtime.torchrun.joining import join, leave_at_once, route_to
from torchpmap._runtime.torchrun.place import JobPlace

_POSTED_AFTER_S = 1.0
"""How long a process waits before it posts that it waits."""
_LAST_WORDS_S = 5.0
"""How long the store may take to answer a process that has failed."""
_LEAVING_S = 2.0
"""The same for a process that ends."""
_RULE = (
    "All processes must make the same mapped calls, with arguments of the same shapes and dtypes, "
    "in the same order."
)

_POSTED = (str, str, bytes, dict, dict)
"""What a process posts for an exchange: what it is for, the place of the user's function, the
data, and the numbers of calls and of histories per axis.
"""

_Call = tuple[tuple[int, ...], int]
"""The ranks that a call's collectives wait for, and which of the calls over these it is."""
_ANY: _Call = (), sys.maxsize
"""A call to which no process comes (calls without collectives are over the ranks ``()``)."""

_starts = itertools.count()


@dataclass(frozen=True)
class Waiting:
    """What a process posts when it has waited for a while; it shows whether it waits in vain."""

    ranks: tuple[int, ...]
    turn: int
    what: str
    calls: dict[tuple[int, ...], int]
    """How many calls with collectives the process has begun, per axis."""

    def packed(self) -> bytes:
        return packed((self.ranks, self.turn, self.what, self.calls))

    @classmethod
    def unpacked(cls, data: bytes) -> Waiting:
        ranks, turn, what, calls = _checked(unpacked(data), (tuple, int, str, dict))
        _check_numbers(ranks)
        return cls(ranks, turn, what, _checked_numbers(calls))


class Rendezvous:
    """How this process reaches the others of its job (for one thread at a time)."""

    def __init__(self, place: JobPlace, device_type: str, timeout_s: float) -> None:
        self.place = place
        self._patience_s = timeout_s
        self.address = None if place.local_size == place.size else route_to(place.host)
        with store_failures():
            store = join(place, device_type, timeout_s, self.address)
        # the store still has the keys of the runtime before this one
        self.store = store.prefixed(str(next(_starts)))
        self.calls: Counter[tuple[int, ...]] = Counter()
        """Calls with collectives that were begun, per axis (written by the runtime)."""
        self.histories: dict[tuple[int, ...], int] = {}
        """A number for all operations on values that span an axis (written by ``History``)."""
        self.refuse_history: Callable[[tuple[int, ...], Sequence[int]], None]
        """Raises, on all of the given ranks, as their histories of an axis differ (``History``)."""
        self.raise_if_closed: Callable[[], None] = lambda: None
        """Raises if this process has failed in another thread (written by the runtime)."""
        self.lost_peers: Callable[[], list[tuple[int, ...]]] = list
        """For each process that has ended, ranks of which it is one (written by the runtime)."""
        self._turns: Counter[tuple[int, ...]] = Counter()
        self._gone: set[int] = set()
        """Ranks that are known to have ended their scripts."""

    @property
    def patience_s(self) -> float:
        """How long this process waits for the others, and for the store."""
        return self._patience_s

    @patience_s.setter
    def patience_s(self, seconds: float) -> None:
        self._patience_s = seconds
        self.store.limit(seconds)

    # -- agreement ---------------------------------------------------------------------------------

    def turn_of(self, ranks: Sequence[int]) -> int:
        """How often ``ranks`` have exchanged something: the same number in all of them."""
        return self._turns[tuple(sorted(ranks))]

    def exchange(
        self,
        ranks: Sequence[int],
        mine: bytes,
        what: str,
        where: str = "",
        *,
        compares_histories: bool = True,
    ) -> list[bytes]:
        """``mine`` of every process of ``ranks``, in that order; all must call it, for ``what``.
        ``where``: the place of the user's function, for messages.

        Raises:
            WorkerError: another process failed.
            CollectiveMismatch: another process does something else, or has ended its script.
            CallTimeout: a process did not come.
        """
        given = self._posted(ranks, mine, what, where, compares_histories)
        posted = zip(sorted(ranks), given, strict=True)
        found = {rank: theirs for rank, (_, _, theirs, *_) in posted}
        return [found[rank] for rank in ranks]

    def _posted(
        self,
        ranks: Sequence[int],
        mine: bytes,
        what: str,
        where: str,
        compares_histories: bool = True,
    ) -> list[tuple[str, str, bytes, Any, Any]]:
        """What the processes of ``exchange`` have posted, in the order of their ranks."""
        ranks = tuple(sorted(ranks))  # processes may disagree on the order
        turn = self._turns[ranks]
        self._turns[ranks] += 1
        prefix = f"turn/{','.join(map(str, ranks))}/{turn}"
        keys = [f"{prefix}/{rank}" for rank in ranks]
        with store_failures():
            posted = packed((what, where, mine, dict(self.calls), dict(self.histories)))
            self.store.set(f"{prefix}/{self.place.rank}", posted)
            self._wait(keys, Waiting(ranks, turn, shown(what, where), dict(self.calls)))
            given = [_checked(unpacked(self.store.get(key)), _POSTED) for key in keys]
            # all have begun this turn, so all have read the keys of the turn before
            self.store.delete_key(f"{prefix.rsplit('/', 1)[0]}/{turn - 1}/{self.place.rank}")
        if len({their for their, *_ in given}) > 1:
            raise mismatch(ranks, [their for their, *_ in given], [place for _, place, *_ in given])
        calls = {r: _checked_numbers(c) for r, (*_, c, _) in zip(ranks, given, strict=True)}
        _check_calls_before(shown(what, where), calls)
        histories = {r: _checked_numbers(h) for r, (*_, h) in zip(ranks, given, strict=True)}
        for axis in _differing(histories) if compares_histories else ():
            self.refuse_history(axis, ranks)
        return given

    def agree(self, ranks: Sequence[int], text: str, what: str, where: str = "") -> None:
        """Raise on all of ``ranks`` unless they have the same ``text``."""
        ranks = sorted(ranks)  # the error is the same everywhere
        found = self.differing(ranks, text, what, where)
        if found is not None:
            raise mismatch(ranks, *found)

    def differing(
        self, ranks: Sequence[int], text: str, what: str, where: str = ""
    ) -> tuple[list[str], list[str]] | None:
        """The ``text`` and the ``where`` of every process in the order of ranks, unless all of
        ``ranks`` have the same text.
        """
        mine = text.encode(errors="surrogatepass")
        digest = hashlib.blake2b(mine, digest_size=16).digest()
        if len(set(self.exchange(ranks, digest, what, where))) == 1:
            return None
        given = self._posted(ranks, mine, what, where)
        texts = [theirs.decode(errors="replace") for _, _, theirs, *_ in given]
        return texts, [where for _, where, *_ in given]

    @contextlib.contextmanager
    def in_turn(self, ranks: Sequence[int], what: str) -> Iterator[None]:
        """On every host the lowest of ``ranks`` runs the block before the others."""
        ranks = tuple(sorted(ranks))
        start = self.place.rank - self.place.local_rank
        here = [rank for rank in ranks if start <= rank < start + self.place.local_size]
        prefix = f"built/{','.join(map(str, ranks))}/{self._turns[ranks]}"
        with store_failures():
            # where hosts do not have consecutive ranks, some wait for a lower rank of another host
            if here and here[0] < self.place.rank:
                first = here[0]
                self._wait([f"{prefix}/{first}"], Waiting((first,), -1, what, dict(self.calls)))
            yield
            self.store.set(f"{prefix}/{self.place.rank}", b"")

    def _wait(self, keys: Sequence[str], waiting: Waiting) -> None:
        """Wait for keys, one of each rank of ``waiting``."""
        deadline, look = Deadline(self._patience_s), Deadline(_POSTED_AFTER_S)
        posted = False
        try:
            for pause in deadline.pauses():
                if self.store.check(keys):
                    return
                self.raise_if_closed()
                self.raise_cause()
                if look.passed:
                    if not posted:
                        self.store.set(f"waiting/{self.place.rank}", waiting.packed())
                        posted = True
                    self._refuse_to_wait_in_vain(keys, waiting, deadline)
                time.sleep(pause)
            self._refuse_to_wait_in_vain(keys, waiting, deadline)
        finally:
            if posted:
                with contextlib.suppress(dist.DistError):
                    # not deleted: ``get`` waits for a key that is gone
                    self.store.set(f"waiting/{self.place.rank}", b"")

    def _refuse_to_wait_in_vain(
        self, keys: Sequence[str], waiting: Waiting, deadline: Deadline
    ) -> None:
        lost_peers = self.lost_peers()  # first: who leaves or fails says so before
        missing = self.missing(dict(zip(waiting.ranks, keys, strict=True)))
        for rank in missing:
            self._raise_if_left(rank, f"{waiting.what}: ")
            if waiting.turn >= 0:
                self._raise_if_crossed(rank, waiting.what)
        self.refuse_to_wait_for_lost(missing, lost_peers)
        if missing and deadline.passed:
            raise CallTimeout(
                f"{waiting.what}: rank {', '.join(map(str, missing))} did not come within "
                f"torchpmap.config.timeout ({self._patience_s:g} s). {_RULE}"
            )

    def waiting_of(self, rank: int) -> Waiting | None:
        """What another process waits for, if it has waited for a while."""
        key = f"waiting/{rank}"
        posted = self.store.get(key) if self.store.check([key]) else b""
        return Waiting.unpacked(posted) if posted else None

    def _raise_if_crossed(self, rank: int, what: str, call: _Call = _ANY) -> None:
        """Raise if a process, before ``call``, waits for this one, which has not come yet."""
        other, here, (axis, number) = self.waiting_of(rank), self.place.rank, call
        if other is None or here not in other.ranks or other.turn < self._turns[other.ranks]:
            return
        if other.calls.get(axis, 0) < number:
            raise CollectiveMismatch(
                f"{what}: rank {here} runs it, but rank {rank} has not come to it, and waits for "
                f"rank {here} in another call: {other.what}. {_RULE}"
            )

    def raise_if_in_vain(self, call: _Call, what: str) -> None:
        """Raise if a call that runs never ends: a process has failed, has ended its script before
        the call, or waits for this one in another call before it.  It must be certain.
        """
        for rank in call[0]:
            if rank != self.place.rank:
                self.raise_cause()
                self._raise_if_left(rank, "", call)
                self._raise_if_crossed(rank, what, call)

    def have_left(self, ranks: Sequence[int]) -> bool:
        """Whether one of ``ranks`` has ended its script; what is known needs no store."""
        if self._gone.isdisjoint(ranks):
            self._gone.update(rank for rank in ranks if self.store.check([f"left/{rank}"]))
        return not self._gone.isdisjoint(ranks)

    def missing(self, keys: Mapping[int, str]) -> list[int]:
        """The ranks whose keys are not there."""
        return [rank for rank, key in keys.items() if not self.store.check([key])]

    def refuse_to_wait_for_lost(
        self, missing: Collection[int], lost_peers: Sequence[tuple[int, ...]]
    ) -> None:
        """Raise if one of the ``missing`` is among ``lost_peers``, as they were before these ranks
        were found missing, and has not said why.
        """
        for ranks in lost_peers:
            if not self.have_left(ranks) and not set(ranks).isdisjoint(missing):
                self.raise_cause()
                raise lost(None)

    # -- failure and end ---------------------------------------------------------------------------

    def report_cause(self, error: BaseException) -> None:
        """Tell the others why this process fails, unless another one failed before."""
        summary = traceback.format_exception_only(error)[0].partition("\n")[0]  # without notes
        text = "".join(traceback.format_exception(error))
        if is_wanted():
            text = printed_folded(error) or text  # it may have no frames of the user
        is_mismatch = isinstance(error, CollectiveMismatch)
        with contextlib.suppress(Exception):  # the others may be gone, and the store with them
            if self.store.add("failures", 1) == 1:
                summary = str(error) if is_mismatch else summary
                self.store.set("cause", packed((self.place.rank, is_mismatch, summary, text)))

    def raise_cause(self) -> None:
        """Raise if another process has reported a cause."""
        if not self.store.check(["cause"]):
            return
        cause = _checked(unpacked(self.store.get("cause")), (int, bool, str, str))
        rank, is_mismatch, summary, text = cause
        if rank == self.place.rank:
            return
        if is_mismatch:
            raise CollectiveMismatch(summary)
        error = WorkerError(f"rank {rank} failed first: {summary}")
        error.__cause__ = RemoteTraceback(f"on rank {rank}:\n{text}")
        raise error

    def raise_absence(self) -> None:
        """Raise if another process has ended its script."""
        for rank in range(self.place.size):
            if rank != self.place.rank:
                self._raise_if_left(rank)

    def _raise_if_left(self, rank: int, begin: str = "", call: _Call = _ANY) -> None:
        """Raise if a process has ended its script before ``call``."""
        key, (axis, number) = f"left/{rank}", call
        if not self.store.check([key]):
            return
        if _checked_numbers(unpacked(self.store.get(key))).get(axis, 0) < number:
            self.raise_cause()  # a failing process reports its cause just before it leaves
            raise CollectiveMismatch(
                f"{begin}rank {rank} has ended its script and will not come. {_RULE}"
            )

    def hurry(self, seconds: float = _LAST_WORDS_S) -> None:
        """From now on wait only so long for the store: the other processes may be gone."""
        self.store.limit(min(seconds, self._patience_s))

    def leave(self, *, failed: bool) -> None:
        """Post that this process makes no more calls."""
        self.hurry(_LEAVING_S)
        if failed:
            leave_at_once()
        with contextlib.suppress(Exception):
            self.store.set(f"left/{self.place.rank}", packed(dict(self.calls)))

    def wait_for_others(self) -> None:
        """Wait a little for the others to end too."""
        keys = [f"left/{rank}" for rank in range(self.place.size)]
        with contextlib.suppress(dist.DistError):
            for pause in Deadline(_LEAVING_S).pauses():
                if self.store.check(keys) or self.store.check(["cause"]):
                    return
                time.sleep(pause)


def lost(error: BaseException | None) -> WorkerDied:
    """The error to raise when a connection broke off and no process reported why."""
    lost = WorkerDied(
        "the connection to another process of this job broke off, and it did not say why: it was "
        "killed (perhaps for lack of memory), or its host is gone. The launcher's report names it."
    )
    lost.__cause__ = error
    return lost


def _checked(value: Any, kinds: tuple[type, ...]) -> Any:
    """A tuple of values of these types.

    Raises:
        PmapError: it is something else.
    """
    if type(value) is not tuple or tuple(map(type, value)) != kinds:
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise not_ours(f"{value!r:.100} instead of ({wanted})")
    return value


def _check_numbers(value: Any) -> None:
    _checked(value, (int,) * len(value) if type(value) is tuple else ())


def _checked_numbers(value: Any) -> dict[tuple[int, ...], int]:
    """A number per axis; raises as ``_checked`` does."""
    (calls,) = _checked((value,), (dict,))
    for numbers in (tuple(calls.values()), *calls):
        _check_numbers(numbers)
    checked: dict[tuple[int, ...], int] = calls
    return checked


def _differing(numbers: Mapping[int, Mapping[tuple[int, ...], int]]) -> list[tuple[int, ...]]:
    """The axes of which not all their ranks have the same number."""
    axes = sorted({axis for theirs in numbers.values() for axis in theirs})
    return [
        axis
        for axis in axes
        if len({numbers[rank].get(axis, 0) for rank in axis if rank in numbers}) > 1
    ]


def _check_calls_before(what: str, calls: Mapping[int, Mapping[tuple[int, ...], int]]) -> None:
    """Raise, on all of the ranks, unless they have begun the same calls before ``what``.

    Where a call waits for its collectives they could not have met; on asynchronous devices they do.
    """
    for axis in _differing(calls):
        ranks = [rank for rank in axis if rank in calls]
        counts = [calls[rank].get(axis, 0) for rank in ranks]
        raise mismatch(ranks, [f"{count} calls before {what}" for count in counts])


@contextlib.contextmanager
def store_failures() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise PmapError(
            "the store of torch.distributed is gone: the process that keeps it (rank 0, or "
            f"torchrun's agent) has ended, or does not answer: {error}"
        ) from error


def mismatch(
    ranks: Sequence[int], texts: Sequence[str], places: Sequence[str] = ()
) -> CollectiveMismatch:
    """The error for all of ``ranks`` when they are at different places of the script."""
    return CollectiveMismatch(
        "the processes are about to run different programs, which would hang or give wrong "
        f"numbers:\n{texts_by_rank(ranks, texts, places)}\n{_RULE}"
    )


def texts_by_rank(ranks: Sequence[int], texts: Sequence[str], places: Sequence[str] = ()) -> str:
    """One line per different text: its ranks, its first line with the place of the user's function,
    and the first line that differs.
    """
    by_text: dict[tuple[str, str], list[int]] = {}
    for rank, *text in zip(ranks, texts, places or [""] * len(texts), strict=True):
        by_text.setdefault((text[0], text[1]), []).append(rank)
    lines = [text.splitlines() for text, _ in by_text]
    longest = max(map(len, lines))
    padded = [[*text, *["(nothing)"] * (longest - len(text))] for text in lines]
    differing = (k for k in range(longest) if len({text[k] for text in padded}) > 1)
    line = next(differing, 0)
    return "\n".join(
        f"  rank {', '.join(map(str, ranks))}: {shown(text[0], place)}"
        + (f": {text[line]}" if line else "")
        for ((_, place), ranks), text in zip(by_text.items(), padded, strict=True)
    )


def shown(what: str, where: str) -> str:
    """What a process does, with the place of the user's function, as messages name it."""
    return f"{what}, defined at {where}" if where else what
