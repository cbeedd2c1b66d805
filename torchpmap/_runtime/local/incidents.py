"""What failures cost: which calls are poisoned, which shards are lost, and the exception for each.

Values are numbered by the command (``seq``) that made them.  A failure poisons all commands from
the earliest one that failed to the last one sent before the repair; a death loses everything the
rank held.  Values that were complete elsewhere stay valid.

A value refers to its era, the time between two repairs.  The era records what has happened to its
values.  So an incident is remembered as long as a value that it concerns is alive, and a look-up
costs the same after a thousand incidents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from torchpmap._base.devices import Device
from torchpmap._base.errors import (
    CallTimeout,
    CollectiveMismatch,
    PmapError,
    ShardLost,
    WorkerDied,
    exit_reason,
    pack_exception,
    unpack_exception,
)
from torchpmap._base.torch_errors import is_timeout
from torchpmap._runtime.local.supervise import Exited, Failed, GivenUp, Verdict


@dataclass(frozen=True)
class _Death:
    completed: int
    """The last command that the rank had answered."""
    verdict: Verdict


class Era:
    """What has happened to the values that were made between two repairs."""

    def __init__(self, lossy: set[int]) -> None:
        self._lossy = lossy
        self.has_losses = False
        self.failure: Verdict | None = None
        self.deaths: dict[int, _Death] = {}  # by rank; the first of a rank, which lost the values

    def note_loss(self) -> None:
        self.has_losses = True
        self._lossy.add(id(self))

    def __del__(self) -> None:
        self._lossy.discard(id(self))


class Incidents:
    """Written by the repairing thread, read by any."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self.lossy: set[int] = set()
        """Not empty as long as values that may be lost are alive."""
        self.era = Era(self.lossy)
        """The era of the commands that are sent now."""
        self._eras = WeakSet([self.era])

    def note(self, verdict: Verdict, completed: dict[int, int]) -> None:
        """Record an incident, which ends the era; ``completed``: the last command per dead rank."""
        if verdict.first_seq is not None:
            self.era.failure = verdict
            self.era.note_loss()
        for death in verdict.deaths:
            for era in self._eras:
                era.deaths.setdefault(death.rank, _Death(completed[death.rank], verdict))
                era.note_loss()
        self.era = Era(self.lossy)
        self._eras.add(self.era)

    def of_value(self, era: Era, seq: int, ranks: Sequence[int]) -> BaseException | None:
        """Why the value of command ``seq`` on ``ranks`` cannot be used, as a new exception."""
        failure = era.failure
        if failure is not None and failure.first_seq is not None and failure.first_seq <= seq:
            return exception_of(failure, self._devices)
        for rank in ranks:
            death = era.deaths.get(rank)
            if death is not None:
                cause = exception_of(death.verdict, self._devices)
                return cause if seq > death.completed else self._lost(rank, cause)
        return None

    def refuse(self, era: Era, seq: int, ranks: Sequence[int]) -> None:
        """Raise if the value of command ``seq`` is lost; a worker without it would fail, and all
        others with it (send lock held).
        """
        error = self.of_value(era, seq, ranks)
        if error is not None:
            raise error

    def of_command(self, era: Era, seq: int) -> BaseException | None:
        """What command ``seq`` itself raised; not what a command before it raised."""
        failure = era.failure
        if failure is not None and any(each.seq == seq for each in failure.failures):
            return exception_of(failure, self._devices)
        return None

    def era_of(self, error: BaseException) -> Era:
        """An era of values that were lost before there were these devices."""
        era = Era(self.lossy)
        failed = Failed(0, 0, False, pack_exception(error), "as torchpmap.resize found it")
        era.failure = Verdict((failed,), ())
        era.note_loss()
        return era

    def died_in(self, era: Era, seq: int, rank: int) -> bool:
        """Whether ``rank`` died before it had answered command ``seq``."""
        death = era.deaths.get(rank)
        return death is not None and death.completed < seq

    def _lost(self, rank: int, cause: BaseException) -> ShardLost:
        lost = ShardLost(
            f"the shard on device {self._devices[rank]} is lost: {cause}. Values that do not live "
            "on that device are intact; compute or load this one again."
        )
        lost.__cause__ = cause
        return lost


def exception_of(verdict: Verdict, devices: Sequence[Device]) -> BaseException:
    """The first cause as an exception, with the other failures in its notes."""
    cause = verdict.cause
    error: BaseException
    if isinstance(cause, Exited):
        text = _death_text(devices[cause.rank], cause)
        error = WorkerDied(text, rank=cause.rank, exitcode=cause.exitcode)
    elif cause.communication:
        error = _failed_collective(unpack_exception(cause.packed, where=cause.where))
    else:
        error = unpack_exception(cause.packed, where=cause.where)
    text = repr(error)
    same: list[int] = []
    for other in verdict.consequences:
        if isinstance(other, Exited):
            error.add_note(_death_text(devices[other.rank], other))
        elif not other.communication:
            theirs = repr(unpack_exception(other.packed, where=""))
            if theirs == text:
                same.append(other.rank)
            else:
                error.add_note(f"also {other.where}: {theirs}")
    if same:
        error.add_note(f"the same on {', '.join(str(devices[rank]) for rank in sorted(same))}")
    return error


def given_up(seq: int, rank: int, name: str) -> GivenUp:
    """The caller of ``name`` was interrupted and has its exception; this one is for later calls."""
    error = PmapError(f"{name} did not end: it was interrupted in the calling process")
    return GivenUp(Failed(rank, seq, False, pack_exception(error), f"while running {name}"))


def _failed_collective(error: BaseException) -> PmapError:
    """The error for a collective that failed without a user's exception or a death."""
    text = str(error)
    if is_timeout(error):
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


def _death_text(device: Device, death: Exited) -> str:
    what = (
        f"the worker of device {device} (rank {death.rank}, pid {death.pid}) died: "
        f"{exit_reason(death.exitcode)}{f' ({death.why})' if death.why else ''}"
    )
    words = death.last_words.strip()
    return f"{what}\nIts last words on stderr:\n{words}" if words else what
