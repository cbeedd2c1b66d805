"""What failures cost: which calls are poisoned, which shards are gone, and the exception for each.

Values are numbered by the command (``seq``) that made them.  A failure poisons all commands from
the earliest one that failed to the last one sent before the repair; a death loses everything the
rank held.  What was complete elsewhere stays valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchpmap._devices import Device
from torchpmap._errors import (
    CallTimeout,
    CollectiveMismatch,
    PmapError,
    ShardLost,
    WorkerDied,
    exit_reason,
    unpack_exception,
)
from torchpmap._runtimes._supervise import Exited, Verdict

__all__ = ["Losses", "exception_of"]


@dataclass(frozen=True)
class _Death:
    completed: int
    """The last command that the rank had answered."""
    last: int
    """The last command sent before its successor started."""
    verdict: Verdict


class Losses:
    """Written by the repairing thread, read by any."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._poisoned: list[tuple[int, int, Verdict]] = []  # (first seq, last seq, why)
        self._deaths: dict[int, _Death] = {}  # by rank; the latest covers the earlier ones

    def note(self, verdict: Verdict, last: int, completed: dict[int, int]) -> None:
        """Remember an incident: ``last`` command before the repair, ``completed`` per dead rank."""
        if verdict.first_seq is not None:
            self._poisoned.append((verdict.first_seq, last, verdict))
        for death in verdict.deaths:
            self._deaths[death.rank] = _Death(completed[death.rank], last, verdict)

    def __bool__(self) -> bool:
        return bool(self._poisoned or self._deaths)

    def of_value(self, seq: int, ranks: Sequence[int]) -> BaseException | None:
        """Why the value of command ``seq`` on ``ranks`` cannot be used, as a new exception."""
        for first, last, verdict in self._poisoned:
            if first <= seq <= last:
                return exception_of(verdict, self._devices)
        for rank in ranks:
            death = self._deaths.get(rank)
            if death is not None and seq <= death.last:
                cause = exception_of(death.verdict, self._devices)
                return cause if seq > death.completed else self._lost(rank, cause)
        return None

    def of_command(self, seq: int) -> BaseException | None:
        """What command ``seq`` itself raised (not: what it stood behind)."""
        for _, _, verdict in self._poisoned:
            if any(failure.seq == seq for failure in verdict.failures):
                return exception_of(verdict, self._devices)
        return None

    def died_in(self, seq: int, rank: int) -> bool:
        """Whether ``rank`` died before it had answered command ``seq``."""
        death = self._deaths.get(rank)
        return death is not None and death.completed < seq <= death.last

    def _lost(self, rank: int, cause: BaseException) -> ShardLost:
        lost = ShardLost(
            f"the shard on device {self._devices[rank]} is lost: {cause}. Values that do not live "
            "on that device are intact; compute or load this one again."
        )
        lost.__cause__ = cause
        return lost


def exception_of(verdict: Verdict, devices: Sequence[Device]) -> BaseException:
    """The first cause as an exception; what happened besides is in its notes."""
    cause = verdict.cause
    error: BaseException
    if isinstance(cause, Exited):
        text = _obituary(devices[cause.rank], cause)
        error = WorkerDied(text, rank=cause.rank, exitcode=cause.exitcode)
    elif cause.communication:
        error = _failed_collective(unpack_exception(cause.packed, where=cause.where))
    else:
        error = unpack_exception(cause.packed, where=cause.where)
    for other in verdict.consequences:
        if isinstance(other, Exited):
            error.add_note(_obituary(devices[other.rank], other))
        elif not other.communication:
            error.add_note(f"also {other.where}: {unpack_exception(other.packed, where='')!r}")
    return error


def _failed_collective(error: BaseException) -> PmapError:
    """A collective failed and nobody is to blame: no exception of the function's, no death."""
    text = str(error)
    if "imeout" in text or "imed out" in text:
        failed: PmapError = CallTimeout(
            "a collective waited longer than torchpmap.config.timeout for the other devices; "
            "either one of them is very slow, or (compile=False) it does not run the same "
            f"collectives: {text}"
        )
    else:
        failed = CollectiveMismatch(
            "a collective failed without a cause on any device, as it does when devices do not run "
            f"the same collectives on tensors of the same shape (compile=False): {text}"
        )
    failed.__cause__ = error
    return failed


def _obituary(device: Device, death: Exited) -> str:
    what = (
        f"the worker of device {device} (rank {death.rank}, pid {death.pid}) died: "
        f"{exit_reason(death.exitcode)}"
    )
    words = death.last_words.strip()
    return f"{what}\nIts last words on stderr:\n{words}" if words else what
