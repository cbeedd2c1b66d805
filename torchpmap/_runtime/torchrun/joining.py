"""How a process becomes a member of its job, and how it leaves.

The processes meet in the store of ``torch.distributed``'s default process group.  If torchrun's
agent keeps it, it outlives the processes, and still has the keys from before a restart.
``TORCHELASTIC_RESTART_COUNT`` does not tell the attempts apart: only the agent whose own process
failed counts up (pytorch #108158).  So the processes of one attempt agree on a name for it.

Torchrun starts every process in a session of its own.  If the agent is killed, nothing else ends
these processes: they would keep their GPUs, and wait for each other.  So each of them watches it.
``PR_SET_PDEATHSIG`` does not help: it reacts to the end of the parent's *thread* that forked, and
this process may be a grandchild.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import fcntl
import os
import secrets
import select
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from torchpmap._base.deadline import Deadline
from torchpmap._base.devices import PLATFORMS
from torchpmap._base.errors import CallTimeout
from torchpmap._base.torch_groups import default_store
from torchpmap._runtime.torchrun.place import JobPlace
from torchpmap._runtime.torchrun.store import JobStore

_LEAVING_S = 60.0
"""How long the process that keeps the store waits at its end for the others."""
_LEAVING_FAILED_S = 2.0
"""The same when it has failed: the others still read why."""
_GRACE_S = 30.0
"""How long the script's handler for SIGTERM may take after the agent's end; torchrun allows the
same.
"""
_STDERR = 2
_TEXT = b"torchpmap: the agent of torchrun that started this process has ended, so it ends, too.\n"
_SIOCGIFADDR = 0x8915

_is_watched = False
_attempt: str | None = None
_store: JobStore | None = None
_failed = False
_failed_because: str | None = None


def join(place: JobPlace, device_type: str, timeout_s: float, address: str | None) -> JobStore:
    """The store of this attempt of the job; makes the default process group if there is none (it is
    kept until the process ends).

    Raises:
        CallTimeout: not all processes came.
    """
    global _attempt, _store
    deadline = Deadline(timeout_s)
    end_with_agent()
    atexit.unregister(_exit)
    atexit.register(_exit)  # before _end, and so called after it
    if not dist.is_initialized():
        for name, value in place.environment().items():
            os.environ.setdefault(name, value)
        interface = "lo" if address is None else _interface_of(address)
        if interface is not None:  # else Gloo advertises the address of the host name: 127.0.0.1
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        timeout = datetime.timedelta(seconds=timeout_s)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        _store = JobStore(store, timeout_s)
        _attempt = _attempt_of(_store, place, deadline, timeout_s)
        dist.init_process_group(
            PLATFORMS[device_type].backends,
            timeout=timeout,
            # torch itself (2.13) uses no prefix, so that a process of a restarted job may read the
            # address of a killed one
            store=dist.PrefixStore(_attempt, store),
            rank=rank,
            world_size=size,
        )
        atexit.register(_end, place)
    if _store is None:  # the script made the group
        _store = JobStore(default_store(), timeout_s)
    if _attempt is None:
        _attempt = _attempt_of(_store, place, deadline, timeout_s)
    _store.limit(timeout_s)
    return _store.prefixed(f"torchpmap/{_attempt}")


def attempt() -> str:
    """The name of this attempt of the job, the same in all its processes; empty without a job."""
    return _attempt or ""


def _attempt_of(store: JobStore, place: JobPlace, deadline: Deadline, timeout_s: float) -> str:
    """A name for this attempt of the job, which all its processes agree on.

    Every process stores a name of its own, and rank 0 a list of all names.  A process that finds
    its name on the list knows that the list is of this attempt, and confirms it.  Rank 0 makes new
    lists until all processes have confirmed one.
    """
    store = store.prefixed("torchpmap/attempt")
    mine = secrets.token_hex(8)
    store.set(f"name/{place.rank}", mine.encode())
    names = [f"name/{rank}" for rank in range(place.size)]
    listed: list[str] = []
    for pause in deadline.pauses():
        if place.rank == 0 and store.check(names):
            found = [store.get(name).decode() for name in names]
            if found != listed:
                listed = found
                store.set("list", " ".join(listed).encode())
            # the keys name this process: those of an earlier attempt do not count
            if store.check([f"seen/{mine}/{name}" for name in listed[1:]]):
                return mine
        elif place.rank > 0 and store.check(["list"]):
            listed = store.get("list").decode().split()
            if mine in listed:
                store.set(f"seen/{listed[0]}/{mine}", b"")
                return listed[0]
        time.sleep(pause)
    raise CallTimeout(
        f"not all {place.size} processes of the job came within torchpmap.config.timeout "
        f"({timeout_s:g} s)."
    )


def _in_forked_child() -> None:
    """The child's end is not that of this process."""
    atexit.unregister(_exit)
    atexit.unregister(_end)


os.register_at_fork(after_in_child=_in_forked_child)


def end_with_agent() -> None:
    """From now on this process ends when the agent of torchrun that started it does."""
    global _is_watched
    if _is_watched or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    _is_watched = True
    try:
        agent = os.pidfd_open(_agent())
    except OSError:  # the agent is another user's, or this is an old kernel
        return
    threading.Thread(target=_end_after, args=(agent,), name="torchpmap-agent", daemon=True).start()


def _agent() -> int:
    """The process that started the session of this one; a script may stand between the two."""
    leader = os.getsid(0)
    if leader == os.getpid():
        return os.getppid()
    after_name = Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2]
    return int(after_name.split()[1])


def _end_after(agent: int) -> None:
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    poll.poll()
    with contextlib.suppress(OSError):  # the reader of stderr may have been the agent
        if select.select([], [_STDERR], [], 0)[1]:  # else it is full, and writing would wait
            os.write(_STDERR, _TEXT)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)  # a handler in Python never runs while the main thread is in C++
    os.kill(os.getpid(), signal.SIGKILL)


def leave_at_once() -> None:
    """This process has failed: at its end it does not wait for the others."""
    global _failed
    _failed = True


def exit_with_failure(because: str | None) -> None:
    """At the end of its script this process exits with code 1, as it has failed, and says why if it
    has not been said; None: it no longer does.
    """
    global _failed_because
    _failed_because = because


def _exit() -> None:
    if _failed_because is not None:
        sys.stdout.flush()
        if _failed_because:
            text = f"torchpmap: exit code 1, as a call has failed: {_failed_because}"
            print(text, file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # a handler cannot give Python another exit code


def _end(place: JobPlace) -> None:
    """The process that keeps the store stays until the others no longer need it."""
    if not dist.is_initialized():
        return
    deadline = Deadline(_LEAVING_FAILED_S if _failed else _LEAVING_S)
    with contextlib.suppress(Exception):
        assert _store is not None
        store = _store.prefixed(f"torchpmap/{_attempt}/ended")
        store.limit(deadline.left())
        store.set(f"{place.rank}", b"")
        if place.rank == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
            keys = [f"{rank}" for rank in range(place.size)]
            for pause in deadline.pauses():
                if store.check(keys):
                    break
                time.sleep(pause)
        if not _failed:
            dist.destroy_process_group()


def route_to(host: str) -> str:
    """The address that this host uses to reach ``host``; nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
