"""The store in which the workers of a pool meet: a file in memory, which all of them have open.

It is not torch's ``FileStore`` (2.13).  If a process is killed there while it writes, the next one
that reads waits for the rest without end, in C++, and keeps the interpreter lock meanwhile.  Here
a record that is cut is not read, and the next process that writes removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from torchpmap._base.deadline import Deadline

_LENGTHS = struct.Struct("<II")  # of the key and the value, which follow
_WAIT = timedelta(minutes=5)


class WorkerStore(dist.Store):
    """One worker's view of the file (any thread; processes take turns by a lock of the file)."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._lock = threading.Lock()  # the file's lock does not separate threads
        self._read = 0
        """How many bytes of the file ``_values`` has."""
        self._values: dict[str, bytes] = {}

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it could not be opened
            os.close(self._fd)

    def set(self, key: str, value: str | bytes) -> None:
        with self._locked(fcntl.LOCK_EX):
            self._write(key, value.encode() if isinstance(value, str) else value)

    def add(self, key: str, amount: int) -> int:
        """The sum of all amounts so far."""
        with self._locked(fcntl.LOCK_EX):
            total = int(self._values.get(key, b"0")) + amount
            self._write(key, str(total).encode())
            return total

    def check(self, keys: Sequence[str]) -> bool:
        with self._locked(fcntl.LOCK_SH):
            return self._values.keys() >= set(keys)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta = _WAIT) -> None:
        for pause in Deadline(timeout.total_seconds()).pauses():
            if self.check(keys):
                return
            time.sleep(pause)
        raise dist.DistStoreError(f"{', '.join(keys)}: not all were set within {timeout}")

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Hold the locks, and know what others have written."""
        with self._lock:
            fcntl.flock(self._fd, kind)
            try:
                self._look()
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _look(self) -> None:
        size = os.fstat(self._fd).st_size
        if size < self._read:
            raise dist.DistStoreError("the store of an epoch that is over")
        new, at = os.pread(self._fd, size - self._read, self._read), 0
        while len(new) - at >= _LENGTHS.size:
            key_length, value_length = _LENGTHS.unpack_from(new, at)
            key_at = at + _LENGTHS.size
            value_at = key_at + key_length
            end = value_at + value_length
            if end > len(new):
                break
            self._values[new[key_at:value_at].decode()] = new[value_at:end]
            at = end
        self._read += at

    def _write(self, key: str, value: bytes) -> None:
        name = key.encode()
        record = _LENGTHS.pack(len(name), len(value)) + name + value
        os.truncate(self._fd, self._read)  # what a process that was killed has begun
        if os.pwrite(self._fd, record, self._read) < len(record):
            raise dist.DistStoreError("there is no memory for what the workers say to each other")
        self._read += len(record)
        self._values[key] = value
