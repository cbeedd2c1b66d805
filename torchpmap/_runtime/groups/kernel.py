"""The collectives of shared memory in C++: compiled once for a user, in the background.

The first process that needs the library compiles it to torch's folder of compiled code, which takes
a second; the others wait for its lock, each in a thread.  Until it is there, and where there is no
compiler, Python does the same in the same memory.  ``kernel.cpp`` includes nothing of torch's, so
this needs neither its headers nor Inductor, whose import takes seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import threading
from pathlib import Path

import torch

from torchpmap._base.errors import PmapError
from torchpmap._trace.toolchain import make_cache_private, own_cache

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC")
DONE, LATE, ODD = range(3)
"""What a step of a collective answers, as in ``kernel.cpp``."""
REDUCE, SCATTER, GATHER, MOVE, EXCHANGE = range(5)

_Number, _Address = ctypes.c_int64, ctypes.c_void_p


class State(ctypes.Structure):
    """One rank's part of a meeting: ``Meeting`` in ``kernel.cpp``, which explains the fields."""

    _fields_ = (
        ("numbers", _Address),
        ("slots", _Address * 2),
        ("bounds", _Address * 2),
        *((name, _Number) for name in ("slot_bytes", "place", "size", "sleep_ns")),
        *((name, _Number) for name in ("purpose", "occasion", "history")),
        *((name, _Number) for name in ("met", "awaited", "has_slept", "odd")),
    )


class Task(ctypes.Structure):
    """A collective: ``Task`` in ``kernel.cpp``, which explains the fields."""

    _fields_ = (
        ("kind", _Number),
        ("x", _Address),
        ("out", _Address),
        *((name, _Number) for name in ("bytes", "item", "whole_bytes", "source")),
        ("reduce", _Address),
        ("given", _Address),
        ("taken", _Address),
        *((name, _Number) for name in ("begin", "phase", "longest", "wrong")),
    )


class Library:
    """The compiled ``kernel.cpp``."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.run, self.meet = library.run, library.meet
        self.run.restype = self.meet.restype = _Number
        self.run.argtypes = (_Address, _Address)
        self.meet.argtypes = (_Address, _Number)
        self._library = library

    @functools.cache  # noqa: B019 - there is one library
    def reduction(self, name: str, dtype: torch.dtype) -> int | None:
        """Address of a function; None of a dtype that only Python reduces."""
        function = getattr(self._library, f"{name}_{str(dtype).removeprefix('torch.')}", None)
        return None if function is None else ctypes.cast(function, _Address).value


class _Shelf:
    """What this process knows of the library."""

    library: Library | None = None
    is_sought = False


def library() -> Library | None:
    """The library, if it is there."""
    return _Shelf.library


def seek() -> None:
    """Load the library, or have a thread make it, if this process has not tried yet."""
    if _Shelf.is_sought:
        return
    _Shelf.is_sought = True
    try:
        make_cache_private()
        path = _path()
        is_there = path.exists()  # raises where the user may not look
    except (PmapError, OSError):
        return
    if is_there:
        _load(path)
    elif compiler := shutil.which(os.environ.get("CXX") or "g++"):  # as Inductor does
        threading.Thread(
            target=_make, args=(compiler, path), name="torchpmap-kernel", daemon=True
        ).start()


def _path() -> Path:
    said = (_SOURCE.read_bytes(), repr((_FLAGS, platform.machine())).encode())
    return own_cache() / (hashlib.sha256(b"\n".join(said)).hexdigest() + ".so")


def _load(path: Path) -> None:
    with contextlib.suppress(OSError):  # of another C library, or damaged: Python does it
        _Shelf.library = Library(path)


def _make(compiler: str, path: Path) -> None:
    """Compile, if no other process does or has done so, and load (a thread)."""
    with contextlib.suppress(OSError, subprocess.SubprocessError), contextlib.ExitStack() as undo:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.parent, os.O_RDONLY)
        undo.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the process has ended, at the latest
        undo.callback(fcntl.flock, lock, fcntl.LOCK_UN)  # a process forked meanwhile has it open
        if not path.exists():
            # first to memory: a process that is killed meanwhile leaves no file
            fd = os.memfd_create("torchpmap-kernel", os.MFD_CLOEXEC)
            undo.callback(os.close, fd)
            command = ["nice", compiler, *_FLAGS, str(_SOURCE), "-o", f"/proc/self/fd/{fd}"]
            subprocess.run(command, check=True, capture_output=True, timeout=120, pass_fds=(fd,))
            part = path.with_suffix(".part")
            part.write_bytes(Path(f"/proc/self/fd/{fd}").read_bytes())
            part.replace(path)  # whole, or not at all
        _load(path)
