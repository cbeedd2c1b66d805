"""The runtime of this process: started by ``init`` or by first use, ended by ``shutdown`` or at
exit.

Asking for the devices only starts the fork server, in the background; workers start with the first
value or call.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torchpmap._base import ending
from torchpmap._base.boundary import boundary
from torchpmap._base.config import Config, config
from torchpmap._base.deadline import Deadline
from torchpmap._base.devices import (
    CUDA,
    PLATFORMS,
    Device,
    default_platform,
    enumerate_devices,
)
from torchpmap._base.errors import RuntimeClosed
from torchpmap._layout import axis_stack
from torchpmap._runtime import inline_mode
from torchpmap._runtime.base import JobRuntime, PoolRuntime, Runtime
from torchpmap._runtime.local.reentry import refuse_to_wait
from torchpmap._runtime.torchrun.place import JobPlace, devices_of, found_place
from torchpmap._trace import saved_code
from torchpmap._trace.compile import EAGER, Backend

_LOCK_S = 0.5
_CALLS_S = 1.0
"""How long exit waits for the calls of other threads."""

_CHOOSES = ("num_devices", "device_type", "runtime")
_READ_AT_START = frozenset({*_CHOOSES, "warm", "shared_memory"})
"""Settings that devices read when they start; the first choose which devices there are."""

_lock = threading.RLock()  # guards _runtime and _planned
steady = threading.RLock()  # taken before all others; no pool gives way to another meanwhile
_runtime: Runtime | None = None
_leaving: PoolRuntime | None = None
"""The pool whose values ``change`` moves; there is no other meanwhile, so other threads wait."""
unfinished: list[Callable[[], None]] = []
"""Each waits for what workers do in the background, before they are ended by ``change``."""
_planned: tuple[Device, ...] | None = None
_place: JobPlace | None = None  # of this process, if _planned are the devices of several


@boundary
def init(num_devices: int | None = None, device_type: str | None = None) -> None:
    """Choose the devices; a running pool of another size or kind is ended first.  Workers start
    with the first value or call.

    Calling it is optional: the first use of torchpmap does the same with defaults.  Values of an
    ended pool are gone; ``resize`` keeps them.

    Args:
        num_devices: number of devices; default: ``TORCHPMAP_NUM_DEVICES``, else all GPUs, else one
            per usable CPU core (at most 8).  CPU devices are processes, so more of them than cores
            is allowed.
        device_type: ``"cpu"`` or ``"cuda"``; default: ``TORCHPMAP_DEVICE_TYPE``, else ``"cuda"`` if
            there is a GPU.

    Raises:
        ValueError: an illegal number or kind, or fewer GPUs than asked for.

    Example:
        >>> import torchpmap as tp
        >>> tp.init(num_devices=4)
        >>> tp.device_count()
        4
    """
    global _runtime, _planned
    refuse_inside("init")
    settings = config.snapshot()
    wanted = _enumerate(
        replace(
            settings,
            num_devices=num_devices if num_devices is not None else settings.num_devices,
            device_type=device_type if device_type is not None else settings.device_type,
        )
    )
    with _lock:
        if _runtime is not None and not _runtime.closed and _runtime.devices == wanted:
            return
        shutdown()
        _planned = wanted
        if not inline_mode.active():
            _start(wanted)


@boundary
def shutdown() -> None:
    """End the workers; idempotent, and done at exit if it is not called.  The next use starts a new
    pool.

    Values that lived on the workers are gone: using one raises ``RuntimeClosed``.  Takes 5 s at
    most, whatever state the workers are in.  Under a launcher it first waits for all calls.

    Raises:
        Under a launcher, what a call raised on its device, if nothing has raised that yet.
    """
    global _runtime, _planned
    refuse_inside("shutdown")
    ended = _runtime or _leaving
    try:
        if ended is not None:
            ended.close()
    finally:
        if _lock.acquire(timeout=_LOCK_S):  # else another thread starts a pool, and must end it
            try:
                if _runtime is not None and _runtime is not ended:
                    _runtime.close()
                _runtime = _planned = None
            finally:
                _lock.release()


def refuse_inside(name: str) -> None:
    """Raise inside a mapped function: there the call would start more devices."""
    if any(part.group is not None for parts in axis_stack.bound() for part in parts):
        raise RuntimeError(
            f"torchpmap.{name} was called inside a mapped function, which runs on one device and "
            "has its values there. Call it outside, and pass values as arguments (in_axes=None: "
            "the same value for all devices)."
        )


def _end() -> None:
    """At exit."""
    ending.begin()
    shutdown()
    ending.wait_for_calls(Deadline(_CALLS_S))


def runtime() -> Runtime:
    """The running pool, started if need be."""
    current = _runtime
    if current is not None and not current.closed:
        return current
    if ending.has_begun():
        ending.sleep_if_ending()
        raise RuntimeClosed("the script is ending, and its devices have been shut down")
    _refuse_to_wait()
    with _lock:
        if _leaving is not None:  # a finalizer, in the thread that moves values
            return _leaving
        if _runtime is None or (_runtime.closed and _planned is None):
            _start(tuple(devices()))
        elif _runtime.closed:
            _restart_or_raise(_runtime)
        assert _runtime is not None
        return _runtime


def _refuse_to_wait() -> None:
    """Raise in a thread of the pool itself, for which ``change`` waits."""
    if _leaving is not None:
        refuse_to_wait()


def refuse_to_wait_for(*locks: Any) -> None:
    """Raise in code that has interrupted its thread while that had one of ``locks``, or sent or
    started something: another thread may wait for it, and this would wait for that thread.
    """
    running = _runtime or _leaving
    refuse_to_wait(*locks, _lock, *(() if running is None else (running.send_lock,)))


def job_runtime() -> JobRuntime:
    """The running runtime, where a launcher started several processes."""
    running = runtime()
    assert isinstance(running, JobRuntime)  # with several processes there is no other kind
    return running


def _restart_or_raise(ended: Runtime) -> None:
    """Replace a pool that could not be repaired.  Raise instead in a forked child, and in one of
    several processes of a job.
    """
    if ended.forked or _place is not None:
        ended.raise_if_closed()
    ended.close()
    _start(ended.devices)


def _start(wanted: tuple[Device, ...]) -> None:
    global _runtime
    atexit.unregister(_end)
    _runtime = _made(wanted)
    atexit.register(_end)


def _made(wanted: tuple[Device, ...]) -> Runtime:
    # the runtimes import multiprocessing's and torch's process machinery: not needed before the
    # first start
    if _place is not None:
        from torchpmap._runtime.torchrun.runtime import TorchrunRuntime

        return TorchrunRuntime(_place, wanted[0].platform, config.snapshot())
    from torchpmap._runtime.local.process import preload
    from torchpmap._runtime.local.runtime import LocalRuntime

    preload()
    return LocalRuntime(len(wanted), wanted[0].platform, config.snapshot())


def is_running() -> bool:
    """Whether there is a pool that works."""
    return _runtime is not None and not _runtime.closed


def has_values() -> bool:
    """Whether there is a pool whose workers have not ended."""
    return isinstance(_runtime, PoolRuntime) and not _runtime.ended


def change(
    num_devices: int, carry: Callable[[PoolRuntime, PoolRuntime], Callable[[bool], None]]
) -> None:
    """Put a new pool in the place of the old one.

    ``carry(old, new)`` copies values and returns a function: called with True, it gives them to
    their owners; with False it takes them back.  If something raises, the new pool is ended and the
    old one goes on.
    """
    global _runtime, _planned, _leaving
    for finish in unfinished:
        finish()
    with steady, _lock:
        old = _runtime
        assert isinstance(old, PoolRuntime)  # the caller knows
        settings = replace(
            config.snapshot(), num_devices=num_devices, device_type=old.devices[0].platform
        )
        wanted = _enumerate(settings)
        new: Runtime | None = None
        switch: Callable[[bool], None] | None = None

        def settle() -> None:
            """Let one of the two pools be in use, and end the other."""
            global _runtime, _leaving
            if new is not None and _runtime is new:
                old.close()
                return
            if switch is not None:
                switch(False)
            _runtime, _leaving = old, None
            if new is not None:
                new.close()

        try:
            _runtime, _leaving = None, old
            new = _made(wanted)
            assert isinstance(new, PoolRuntime)
            with old.readable():
                switch = carry(old, new)
            switch(True)
            _runtime, _planned, _leaving = new, new.devices, None
        finally:  # Ctrl-C may come anywhere
            ending.surely(settle)


def _begin_anew() -> None:
    """In a forked child: the thread that held the locks is the parent's."""
    global _lock, steady, _runtime, _leaving
    _lock, steady = threading.RLock(), threading.RLock()
    _runtime, _leaving = _runtime or _leaving, None
    if _runtime is not None and _place is not None:
        _runtime.in_forked_child()


os.register_at_fork(after_in_child=_begin_anew)


def _limit() -> None:
    """A setting has changed: the running pool has its timeout from now on."""
    running = _runtime
    if running is not None and not running.closed:
        running.limit(config.snapshot())


def _refuse(name: str, value: object) -> None:
    """Raise if the running devices would ignore an assignment; those that are only planned are
    planned again.
    """
    global _planned
    running = _runtime
    if name == "runtime":
        is_new = value in ("local", "torchrun") and value != config.runtime
    else:
        is_new = name in _READ_AT_START and value != getattr(config, name)
    if not is_new:
        return
    if running is None or running.closed:
        if name in _CHOOSES:
            _planned = None
        return
    if name == "runtime" and (value == "torchrun") == (_place is not None):
        return
    instead = f", or give it to torchpmap.init({name}=...)" if name in _CHOOSES[:2] else ""
    raise RuntimeError(
        f"torchpmap.config.{name} = {value!r}: the devices run, and have read this setting when "
        "they started. Assign it before torchpmap is first used, or after torchpmap.shutdown()"
        f"{instead}."
    )


config.listen(_refuse, _limit)


def expect_compiling(backend: Backend | None) -> None:
    """Let workers have the compiler in memory before they need it.  Those that are started from now
    on have it at once: that takes longer, but once for all of them.
    """
    if backend in (None, EAGER) or inline_mode.active() or saved_code.is_expected():
        return
    from torchpmap._runtime.local.forkserver import server

    if not server.is_compiler_wanted:
        server.expect_compiling()
        running = _runtime
        if isinstance(running, PoolRuntime):
            running.expect_compiling()


def _preload() -> None:
    """Let the fork server's imports begin, unless no workers will be needed."""
    if _place is None and not inline_mode.active():
        from torchpmap._runtime.local.process import preload

        preload()


def _enumerate(settings: Config) -> tuple[Device, ...]:
    global _place
    platform = PLATFORMS[settings.device_type] if settings.device_type else default_platform()
    kind = platform.name
    _place = _wanted_place(settings)
    if _place is not None:
        if settings.num_devices not in (None, _place.size):
            raise ValueError(
                f"{settings.num_devices} devices were asked for, but {_place.launcher} started "
                f"{_place.size} processes, and each has one. Start that many processes, or leave "
                "num_devices out."
            )
        return devices_of(_place, platform)
    return enumerate_devices(settings.num_devices or max(platform.count(), 1), kind)


def _wanted_place(settings: Config) -> JobPlace | None:
    if settings.runtime not in ("auto", "torchrun"):
        return None
    place = found_place()
    if place is None and settings.runtime == "torchrun":
        raise ValueError(
            "the runtime 'torchrun' needs a launcher: no RANK and WORLD_SIZE (nor the variables of "
            "srun or mpirun) are set. Start the script with torchrun, or use the runtime 'local'."
        )
    return place


@boundary
def devices(backend: str | None = None) -> list[Device]:
    """Return all devices, in the order in which axis indices are given to them.

    Args:
        backend: ``"cpu"``, ``"cuda"`` (or ``"gpu"``, as in JAX); default: the kind in use.

    Raises:
        RuntimeError: there are no devices of that kind.

    Example:
        >>> import torchpmap as tp
        >>> tp.devices()
        [Device(cpu:0), Device(cpu:1), Device(cpu:2), Device(cpu:3)]

    Source: ``jax.devices``.
    """
    global _planned
    _refuse_to_wait()
    with _lock:
        if _planned is None:
            _planned = _enumerate(config.snapshot())
            _preload()
        found = list(_planned)
    kind = CUDA.name if backend == "gpu" else backend
    if kind is not None and kind != found[0].platform:
        known = ", ".join(map(repr, PLATFORMS))
        advice = (
            f"Call torchpmap.init(device_type={kind!r}) first."
            if kind in PLATFORMS
            else f"There are devices of the kinds {known}."
        )
        raise RuntimeError(
            f"Unknown backend: {backend!r} requested, but the devices in use are of type "
            f"{found[0].platform!r}. {advice}"
        )
    return found


def check_devices(chosen: Iterable[Device]) -> None:
    """Raise ``ValueError`` for a device that is not in use, such as one of an earlier pool."""
    known = devices()
    for device in chosen:
        if device not in known:
            raise ValueError(
                f"{device!r} is not in use; the devices in use are {known[0]} to {known[-1]}. "
                "Choose from torchpmap.devices(), or call torchpmap.init() first."
            )


@boundary
def local_devices(process_index: int | None = None, backend: str | None = None) -> list[Device]:
    """Return the devices of one controller process (this one by default); with one controller, all
    of them.

    Raises:
        ValueError: there is no such process.

    Source: ``jax.local_devices``.
    """
    found = devices(backend)
    if process_index is None:
        process_index = _own_index()
    if process_index not in {device.process_index for device in found}:
        raise ValueError(f"Unknown process_index {process_index}")
    return [device for device in found if device.process_index == process_index]


def is_launched() -> bool:
    """Whether a launcher started this process, so that it owns one device."""
    devices()
    return _place is not None


def _own_index() -> int:
    return 0 if _place is None else _place.rank


@boundary
def device_count(backend: str | None = None) -> int:
    """Return the number of devices.

    Source: ``jax.device_count``.
    """
    return len(devices(backend))


@boundary
def local_device_count(backend: str | None = None) -> int:
    """Return the number of devices of this controller process.

    Source: ``jax.local_device_count``.
    """
    return len(local_devices(None, backend))


@boundary
def process_index(backend: str | None = None) -> int:
    """Return the number of this controller process: its rank, if a launcher started several; else
    0.

    Source: ``jax.process_index``.
    """
    devices(backend)
    return _own_index()


@boundary
def process_count(backend: str | None = None) -> int:
    """Return the number of controller processes: 1, unless a launcher started several.

    Source: ``jax.process_count``.
    """
    return len({device.process_index for device in devices(backend)})


@boundary
def default_backend() -> str:
    """Return the kind of the devices in use, ``"cpu"`` or ``"cuda"``.

    Source: ``jax.default_backend``.
    """
    return devices()[0].platform
