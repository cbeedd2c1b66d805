"""How the processes of one job meet, agree on what comes next, and learn who failed first.

All of it goes through the store of ``torch.distributed``'s default process group, which torchrun's
agent keeps where it can, so that it outlives any of the processes.  Nothing here is on the path of
a call that was made before.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from torchpmap._errors import (
    CallTimeout,
    CollectiveMismatch,
    PmapError,
    RemoteTraceback,
    WorkerError,
)
from torchpmap._launcher import Place

__all__ = ["Rendezvous"]

_LONGEST_PAUSE_S = 0.01
_LEAVING_S = 60.0
"""How long the process that keeps the store waits at its end for the others."""
_SIOCGIFADDR = 0x8915


class Rendezvous:
    """This process among those of its job (one thread at a time uses it)."""

    def __init__(self, place: Place, device_type: str, timeout_s: float) -> None:
        self.place = place
        self._timeout_s = timeout_s
        self.address = None if place.local_size == place.size else _route_to(place.host)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            _join(place, device_type, timeout_s, self.address)
        store = dist.distributed_c10d._get_default_store()
        # a restarted job must not read what the one before left in the agent's store
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store: dist.Store = dist.PrefixStore(f"torchpmap/{attempt}", store)
        self._turns: Counter[tuple[int, ...]] = Counter()

    # -- agreement ---------------------------------------------------------------------------------

    def exchange(self, ranks: Sequence[int], mine: bytes, what: str) -> list[bytes]:
        """What every one of ``ranks`` gives, in their order; all must come, for the same turn.

        Raises:
            WorkerError: another process failed.
            CallTimeout: somebody did not come; ``what`` says for what.
        """
        ranks = tuple(ranks)
        turn = self._turns[ranks]
        self._turns[ranks] += 1
        name = ",".join(map(str, ranks))
        keys = [f"turn/{name}/{turn}/{rank}" for rank in ranks]
        with self._store_failures():
            self.store.set(f"turn/{name}/{turn}/{self.place.rank}", mine)  # type: ignore[arg-type]
            self.wait(keys, ranks, what)
            found = [self.store.get(key) for key in keys]
            # whoever is in this turn has read the one before
            self.store.delete_key(f"turn/{name}/{turn - 1}/{self.place.rank}")
        return found

    def agree(self, ranks: Sequence[int], digest: bytes, text: str, what: str) -> None:
        """Raise on all of ``ranks`` unless they have the same ``digest``; ``text`` says what it is
        of.
        """
        digests = self.exchange(ranks, digest, what)
        if len(set(digests)) == 1:
            return
        texts = [text.decode() for text in self.exchange(ranks, text.encode(), what)]
        raise CollectiveMismatch(_disagreement(ranks, texts, what))

    def wait(self, keys: Sequence[str], ranks: Sequence[int], what: str) -> None:
        """Wait for keys, one by each of ``ranks``."""
        deadline = time.monotonic() + self._timeout_s
        pause = 0.0002
        while not self.store.check(list(keys)):
            self.raise_cause()
            missing = [
                rank for rank, key in zip(ranks, keys, strict=True) if not self.store.check([key])
            ]
            gone = [rank for rank in missing if self.store.check([f"left/{rank}"])]
            if gone:
                raise CollectiveMismatch(
                    f"{what}: rank {gone[0]} has ended its program and will not come. All "
                    "processes must make the same mapped calls in the same order."
                )
            if time.monotonic() > deadline:
                raise CallTimeout(
                    f"{what}: rank {', '.join(map(str, missing))} did not come within "
                    f"torchpmap.config.timeout ({self._timeout_s:g} s). All processes must make "
                    "the same mapped calls in the same order."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    # -- failure -----------------------------------------------------------------------------------

    def report_cause(self, text: str) -> None:
        """Tell the others why this process fails, unless somebody failed before."""
        with contextlib.suppress(Exception):  # they may be gone, and the store with them
            if self.store.add("failures", 1) == 1:
                self.store.set("cause", f"{self.place.rank}\n{text}")

    def raise_cause(self) -> None:
        """Raise ``WorkerError`` if another process has reported a cause."""
        if not self.store.check(["cause"]):
            return
        rank, text = self.store.get("cause").decode().split("\n", 1)
        if int(rank) == self.place.rank:
            return
        last = text.strip().rsplit("\n", 1)[-1]
        error = WorkerError(f"rank {rank} failed first: {last}")
        error.__cause__ = RemoteTraceback(f"on rank {rank}:\n{text}")
        raise error

    @contextlib.contextmanager
    def _store_failures(self):  # type: ignore[no-untyped-def]
        try:
            yield
        except dist.DistError as error:
            raise PmapError(
                "the store of torch.distributed is gone: the process that keeps it (rank 0, or "
                f"torchrun's agent) has ended: {error}"
            ) from error

    # -- end ---------------------------------------------------------------------------------------

    def leave(self, *, failed: bool) -> None:
        """Say that this process makes no more calls; whoever keeps the store stays until all
        have said so.
        """
        with contextlib.suppress(Exception):
            self.store.set(f"left/{self.place.rank}", "")
            keeps_store = self.place.rank == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
            if keeps_store and self._owns_group and not failed:
                keys = [f"left/{rank}" for rank in range(self.place.size)]
                self.store.wait(keys, datetime.timedelta(seconds=_LEAVING_S))
        if self._owns_group and dist.is_initialized() and not failed:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def _join(place: Place, device_type: str, timeout_s: float, address: str | None) -> None:
    for name, value in place.environment().items():
        os.environ.setdefault(name, value)
    interface = "lo" if address is None else _interface_of(address)
    if interface is not None:  # else Gloo advertises what the host's name stands for: 127.0.0.1
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def _route_to(host: str) -> str:
    """The address of this host on the way to another one; nothing is sent."""
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


def _disagreement(ranks: Sequence[int], texts: Sequence[str], what: str) -> str:
    """Who has what, and the first line in which they differ."""
    by_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        by_text.setdefault(text, []).append(rank)
    lines = [text.splitlines() for text in by_text]
    longest = max(map(len, lines))
    padded = [[*text, *["(nothing)"] * (longest - len(text))] for text in lines]
    place = next(k for k in range(longest) if len({text[k] for text in padded}) > 1)
    rows = [
        f"  rank {', '.join(map(str, who))}: {text[0]}" + (f": {text[place]}" if place else "")
        for who, text in zip(by_text.values(), padded, strict=True)
    ]
    return (
        f"{what}: the processes are about to run different programs, which would hang or give "
        "wrong numbers:\n" + "\n".join(rows) + "\nAll processes must make the same mapped calls, "
        "with arguments of the same shapes and dtypes, in the same order."
    )
