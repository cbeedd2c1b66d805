"""What tests, programs and failures leave behind: processes, threads, descriptors, ports."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from _support import is_running, known_pids, stat

from torchpmap._runtime import current
from torchpmap._runtime.local.forkserver import server

MARK = "TORCHPMAP_TEST_MARK"
"""A variable of the environment that all processes of one program inherit, also orphans."""


def marked(value: str) -> list[int]:
    """The running processes that began with ``MARK`` set to ``value``."""
    return [int(pid) for pid in _processes() if _bears(pid, value) and is_running(int(pid))]


def _bears(pid: str, value: str) -> bool:
    entry = f"{MARK}={value}".encode()
    try:
        return entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it just ended
        return False


@dataclass
class Inventory:
    """What is there of the things that a test could leave behind."""

    runtime: Any
    processes: set[str]
    threads: set[threading.Thread]
    fds: dict[str, str]
    helpers: tuple[int | None, int | None]

    @classmethod
    def take(cls) -> Inventory:
        fds = _descriptors(os.getpid())
        return cls(current._runtime, _processes(), _our_threads(), fds, _helpers())

    def left_behind(self) -> list[str]:
        """What is new, apart from a pool and its helpers."""
        found = [f"process {pid}" for pid in _processes() - self.processes if _is_ours(pid)]
        threads = [thread for thread in _our_threads() - self.threads if thread.is_alive()]
        found += [f"thread {thread.name}" for thread in threads if thread not in _pool_threads()]
        fds = _descriptors(os.getpid())
        found += [f"port {address}" for address in _ports({*fds.values()} - {*self.fds.values()})]
        is_comparable = (
            current._runtime is self.runtime
            and _helpers() == self.helpers
            and _num_of_driver(fds) <= _num_of_driver(self.fds)
        )
        if is_comparable and len(fds) > len(self.fds):
            found += [f"descriptor {fd}: {fds[fd]}" for fd in fds.keys() - self.fds.keys()]
        return found


def _processes() -> set[str]:
    return {name for name in os.listdir("/proc") if name.isdigit()}


def _our_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("torchpmap-")}


def _pool_threads() -> tuple[threading.Thread, ...]:
    """Of the present pool."""
    pool = getattr(current._runtime, "_pool", None)
    return () if pool is None else pool.monitor.threads


def _is_ours(pid: str) -> bool:
    """Whether a process is a child of this one or the fork server, or has its mark, but is not of
    the present pool.
    """
    forks, tracker = _helpers()
    found, mark = stat(pid), os.environ.get(MARK)
    return (
        found is not None
        and int(pid) not in (forks, tracker, *known_pids())
        and (
            found[1] == os.getpid()
            or (found[1] == forks and _command(pid) == _command(str(forks)))
            or (mark is not None and _bears(pid, mark))
        )
    )


def _command(pid: str) -> bytes:
    """By which a process was started; a worker's is the fork server's.  Other children of the fork
    server are those with which Inductor tries what the CPU can, for seconds in torch 2.11.
    """
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it just ended
        return b""


def _helpers() -> tuple[int | None, int | None]:
    """Process ids of the fork server, and of the resource tracker of multiprocessing."""
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    return server.pid, tracker


def listening(pids: Iterable[int]) -> set[str]:
    """``address:port`` of the TCP sockets that listen in these processes, as /proc writes them."""
    return _ports({link for pid in pids for link in _descriptors(pid).values()})


def _descriptors(pid: int) -> dict[str, str]:
    """What each open descriptor of a process is, as /proc writes it."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            found[fd] = os.readlink(f"/proc/{pid}/fd/{fd}")
    return found


def _num_of_driver(fds: Mapping[str, str]) -> int:
    """How many descriptors are files of NVIDIA's driver.  It opens them, and eventfds, pipes and
    sockets with them, when a process first needs it, and keeps them all.
    """
    return sum(link.startswith("/dev/nvidia") for link in fds.values())


def _ports(links: Set[str]) -> set[str]:
    """Where those of these descriptors listen that do; to ask the kernel takes 10 ms."""
    inodes = {link[8:-1] for link in links if link.startswith("socket:")}
    if not inodes:
        return set()
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {fields[1] for fields in lines if fields[3] == "0A" and fields[9] in inodes}
