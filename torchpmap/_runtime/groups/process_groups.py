"""Process groups of one worker, by name: made, aborted from another thread, dropped, made again in
the next epoch.

Groups are plain ``c10d`` groups registered under a *name* that is equal on all ranks, so that
compiled graphs (which hold only the name) survive a rebuilt group.  They are made directly instead
of with ``torch.distributed.new_group``, which sorts its ranks, chooses its own names, and needs a
default group.

CPU processes of one host share memory (see ``_runtime/groups/shared_memory_group``); those of
several hosts talk through Gloo, GPUs through NCCL.

A rank that waits in a Gloo collective for a rank that will not come can be freed neither by
``abort()`` nor by a signal (torch 2.13: Gloo overrides neither abort nor shutdown).  What works is
shutting down the group's *connected* sockets, found as the descriptors that appeared while the
group was made; the listening socket must be left alone (closing it aborts the process).
"""

from __future__ import annotations

import contextlib
import datetime
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from torchpmap._base.config import Config
from torchpmap._base.deadline import Deadline
from torchpmap._base.devices import PLATFORMS
from torchpmap._base.errors import GroupLost
from torchpmap._base.torch_groups import (
    add_backend,
    is_raised_by_collective,
    make_gloo,
    register_group,
    unregister_group,
)
from torchpmap._base.tracebacks import CAUSE, CONTEXT, MEMBERS, TRACE
from torchpmap._runtime.groups.shared_memory import Meeting, Occasion, Peers, connect
from torchpmap._runtime.groups.shared_memory_group import SharedMemoryGroup, described
from torchpmap._runtime.sockets import connected, open_sockets

RankTuple = tuple[int, ...]
RankPartition = tuple[RankTuple, ...]
"""Disjoint tuples of ranks; a rank's group is the tuple that holds it, its place there is its rank
in the group.
"""


_CONNECT_TIMEOUT = datetime.timedelta(seconds=10)
"""How long Gloo waits for a peer that has come, but died before it was connected."""


class Groups:
    """Named process groups of this process. The main thread writes; any thread may ``abort``."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        store: dist.Store | None,
        config: Config,
        address: str | None = None,
    ) -> None:
        """``store``: where members meet; None: ``renew`` sets one for each epoch.  ``address``:
        where other hosts reach this one; None if all ranks are on this host."""
        self._rank = rank
        self._device = device
        self._platform = PLATFORMS[device.type]
        self._store = store
        self._address = address
        self._shares_memory = config.shared_memory
        self._timeout = datetime.timedelta(seconds=config.patience)
        # guards _connections, _meetings, _backends, epoch, _aborted_epoch and _aborted
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, RankTuple] = {}
        """Of Gloo, with the members of the group."""
        self._meetings: list[Meeting] = []
        self._backends: list[Any] = []
        self._peers = Peers()  # written by the main thread, and closed under the lock
        self.occasion = Occasion()
        """The call in progress, if every process is a controller (written by the runtime)."""
        self.calls: dict[int, str] = {}
        """Names of calls, by the number of their occasion (written by the runtime)."""
        self._aborted_epoch = 0  # the latest; the order to abort an epoch may come before its start
        self._aborted = threading.Event()
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        self._times: Counter[str] = Counter()
        """How often a group was released in this epoch: a store remembers what it has read."""
        self.epoch = 0
        self._is_forked = False

    def ensure(self, name: str, partition: RankPartition) -> None:
        """Make this rank's group of ``partition`` under ``name``; every member must do the same."""
        if name in self._groups:
            return
        if self._is_forked:  # else this process would wait for the members forever
            raise GroupLost("process group: this process was forked, and is no rank of any group")
        members = next((part for part in partition if self._rank in part), None)
        if members is None:
            self._groups[name] = None
            return
        assert self._store is not None
        prefix = f"{self.epoch}/{name}/{self._times[name]}/{members[0]}"
        store = dist.PrefixStore(prefix, self._store)
        group = self._share(store, members) or self._connected_group(store, members)
        register_group(name, group)
        with self._lock:
            self._groups[name] = group  # from here on ``abort`` finds it
            if self._aborted.is_set():  # meanwhile
                self._platform.abort([group])
        self.refuse_if_aborted()

    def _share(self, store: dist.Store, members: RankTuple) -> SharedMemoryGroup | None:
        if self._device.type != "cpu":
            return None
        place, limit_s = members.index(self._rank), self._timeout.total_seconds()
        meeting = connect(
            store,
            members,
            place,
            limit_s,
            self.occasion,
            self._peers,
            lambda keys: self._wait(lambda: store.check(list(keys)), members),
            willing=self._shares_memory,
        )
        if meeting is None:
            return None
        with self._lock:
            self._meetings.append(meeting)
            if self._aborted.is_set():  # meanwhile
                meeting.abort()
        return SharedMemoryGroup(meeting, self.calls)

    def _connected_group(self, store: dist.Store, members: RankTuple) -> dist.ProcessGroup:
        """A thread makes it: Gloo and NCCL cannot be stopped."""
        store.set(f"here/{self._rank}", "")
        here = [f"here/{member}" for member in members]
        self._wait(lambda: store.check(here), members)  # Gloo waits without end for a peer
        result: list[dist.ProcessGroup | Exception] = []

        def make() -> None:
            try:
                result.append(self._make(store, members))
            except Exception as error:
                result.append(error)

        thread = threading.Thread(target=make, name="torchpmap-connect", daemon=True)
        thread.start()
        # NCCL waits without end for a rank that has died meanwhile
        self._wait(lambda: not thread.is_alive(), members)
        (group,) = result
        if isinstance(group, Exception):
            raise GroupLost(f"process group of the ranks {list(members)}: {group}") from group
        return group

    def _wait(self, is_over: Callable[[], bool], members: RankTuple) -> None:
        """Wait for the members, until ``abort``."""
        self.refuse_if_aborted()
        for pause in Deadline(self._timeout.total_seconds()).pauses():
            if is_over():
                return
            self._aborted.wait(pause)
            self.refuse_if_aborted()
        raise GroupLost(
            f"process group of the ranks {list(members)}: not all came, and were connected, within "
            f"{self._timeout}"
        )

    def refuse_if_aborted(self) -> None:
        """Raise if collectives of this epoch may have been aborted half-way."""
        if self._aborted.is_set():
            raise GroupLost(
                f"the process groups of epoch {self.epoch} are gone: another device failed"
            )

    def _make(self, store: dist.Store, members: RankTuple) -> dist.ProcessGroup:
        rank, size = members.index(self._rank), len(members)
        group = dist.ProcessGroup(store, rank, size)
        gloo_store = dist.PrefixStore("gloo", store)
        connecting = min(self._timeout, _CONNECT_TIMEOUT)
        epoch, before = self.epoch, open_sockets()
        gloo = make_gloo(gloo_store, rank, size, self._address, connecting, self._timeout)
        with self._lock:
            # of Gloo alone: NCCL closes connections of its own while all is well
            new = [fd for link, fd in open_sockets().items() if link not in before]
            if self.epoch == epoch:
                self._connections |= dict.fromkeys(connected(new), members)
            if self._aborted.is_set():  # meanwhile
                self._shut_down()
        device = self._platform.communicator(store, rank, size, self._timeout)
        with self._lock:
            self._backends += [gloo] if device is None else [gloo, device]
        add_backend(group, "cpu", "GLOO", gloo, is_default=device is None)
        if self._device.type != "cpu":
            kind = self._platform.collectives
            add_backend(group, self._device.type, kind, device or gloo, is_default=True)
        return self._platform.through(group)

    def abort(self, epoch: int) -> None:
        """Free this rank from any collective up to ``epoch``; a late order for an older epoch does
        nothing.
        """
        with self._lock:
            self._aborted_epoch = max(self._aborted_epoch, epoch)
            if epoch < self.epoch:
                return
            self._aborted.set()
            self._shut_down()
            self._platform.abort([group for group in tuple(self._groups.values()) if group])

    def release(self, names: Iterable[str]) -> None:
        """Let go of groups that nothing uses now; every member must do the same.  What shares
        memory gives it back.  Groups with connections stay: a peer would take the end of one for
        the end of this process.
        """
        for name in names:
            group = self._groups.get(name)
            if isinstance(group, SharedMemoryGroup):
                del self._groups[name]
                self._times[name] += 1
                unregister_group(name)
                with self._lock:
                    self._meetings.remove(group.meeting)

    @property
    def is_aborted(self) -> bool:
        """Whether collectives of this epoch may have been aborted half-way."""
        return self._aborted.is_set()

    def _shut_down(self) -> None:
        for meeting in self._meetings:
            meeting.abort()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Drop all groups: peers that wait for this rank fail within milliseconds instead of at
        their timeout.
        """
        with self._lock:
            was_aborted = self._aborted.is_set()
            self._aborted.set()
            self._shut_down()
            for connection in self._connections:
                connection.close()
            self._connections.clear()
            self._meetings.clear()
            self._backends.clear()
            self._peers.close()
        held = {name: group for name, group in self._groups.items() if group is not None}
        for name in held:
            unregister_group(name)
        if not was_aborted:
            self._platform.abort(list(held.values()))
        self._groups.clear()
        self._times.clear()

    def sends_plain_data(self, names: Iterable[str]) -> bool:
        """Whether collectives of one of these groups run at once, but do not compare the calls that
        they belong to.
        """
        groups = [self._groups[name] for name in names]
        others = [group for group in groups if not isinstance(group, SharedMemoryGroup)]
        is_used = any(group is not None and group.size() > 1 for group in others)
        return is_used and not self._platform.is_asynchronous

    def limit(self, seconds: float) -> None:
        """From now on wait only so long for the other members."""
        self._timeout = datetime.timedelta(seconds=seconds)
        with self._lock:
            for meeting in self._meetings:
                meeting.limit_s = seconds
            for backend in self._backends:
                backend._set_default_timeout(self._timeout)

    def waits(self) -> str | None:
        """What this rank waits for in a collective, if it does (from any thread)."""
        with self._lock:
            waits = [meeting.waits for meeting in self._meetings]
        for purpose, rank in filter(None, waits):
            return f"rank {rank} in {described(purpose)}"
        return None

    def lost_peers(self) -> list[RankTuple]:
        """For each process that is in a group with this one and has ended, the ranks of which it
        is one (from any thread).

        A collective on a device need not notice it: NCCL does not, within a host.
        """
        poll = select.poll()
        with self._lock:
            members = {each.fileno(): ranks for each, ranks in self._connections.items()}
            for connection in members:
                poll.register(connection, select.POLLRDHUP)
            found = [members[connection] for connection, _ in poll.poll(0)]
            return [*found, *((rank,) for rank in self._peers.lost())]

    def in_forked_child(self) -> None:
        """In a forked child: collectives find no group, and make none.  All groups are the
        parent's.
        """
        self._is_forked = True
        for meeting in self._meetings:
            meeting.in_forked_child()
        for name, group in self._groups.items():
            if group is not None:
                unregister_group(name)
        self._groups.clear()

    def renew(self, epoch: int, store: dist.Store) -> None:
        """Drop all groups and start ``epoch`` without any; new ones connect through ``store``."""
        self.drop()
        with self._lock:
            self.epoch, self._store = epoch, store
            if epoch > self._aborted_epoch:
                self._aborted.clear()


_PACKAGE = __name__.partition(".")[0]


def is_communication(error: BaseException) -> bool:
    """Whether an exception comes from a collective, or was raised because of one that does, so that
    another rank may be the cause.

    Only the place counts where it was raised, not its text: the user's code may raise any text.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        # type(), not __class__, which a user's class may redefine
        if issubclass(type(one), GroupLost) or (
            issubclass(type(one), RuntimeError) and _is_raised_by_group(one)
        ):
            return True
        pending += (CAUSE.__get__(one), CONTEXT.__get__(one))
        if issubclass(type(one), BaseExceptionGroup):
            pending += MEMBERS.__get__(one)
    return False


def _is_raised_by_group(error: BaseException) -> bool:
    """Whether C++ raised it: waiting for a collective, or reaching other ranks for torchpmap."""
    trace: TracebackType | None = TRACE.__get__(error)
    frame: FrameType | None = None
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
    if frame is None:
        return False
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return is_raised_by_collective(error, frame) or (
        issubclass(type(error), dist.DistError) and package == _PACKAGE
    )
