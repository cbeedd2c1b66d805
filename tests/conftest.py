"""Settings of all tests: a cheap pool, reproducible cases, and no test leaves anything behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHPMAP_WARM", "0")  # of the programs that tests run few compile

import hypothesis
import pytest
import torch
from _support import SCALE, TEST_ALL, known_pids, sample, stat, wait_for

import torchpmap as tp
from torchpmap import _current
from torchpmap._devices import usable_cores
from torchpmap._runtimes._process import preload

hypothesis.settings.register_profile(
    "reproducible", derandomize=True, deadline=None, database=None, print_blob=True
)
hypothesis.settings.load_profile("reproducible")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the cores have test processes, whose threads would wait for another

gc.disable()  # until the tests are collected: what is made by then stays


MAX_PROCESSES = 4
"""Each of them has a pool of workers too, and 2 GB."""

LONGEST = (
    "test_examples.py",
    "test_nested_mesh.py",
    "test_contexts.py",
    "test_jax_parity.py",
    "test_streams.py",
    "test_checkpoint.py",
    "test_random.py",
    "test_torchrun_failures.py",
    "test_collectives_axes.py",
    "test_faults.py",
    "test_debug.py",
    "test_docs.py",
    "test_two_hosts.py",
    "test_autodiff.py",
    "test_torchrun.py",
    "test_torchrun_parity.py",
    "test_runtime.py",
    "test_optim.py",
    "test_gradients_ported.py",
)
"""Test files that take more than 10 s. They come first, so that no process is left with one."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Test processes by default: one per core, and only this one if part of the suite is asked for.

    A file is all one process's, so that its tests share a pool.
    """
    whole = all(Path(argument).is_dir() for argument in config.args)
    if not whole or config.option.keyword or config.option.capture == "no":
        return 0
    return min(usable_cores(), MAX_PROCESSES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what ``sampled`` says, unless everything is wanted or a test was asked for.

    The files that take longest are put first.
    """
    asked_for = config.option.keyword or any("::" in argument for argument in config.args)
    if not TEST_ALL and not asked_for:
        kept = sample(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(scope="session", autouse=True)
def fork_server(request: pytest.FixtureRequest) -> None:
    """Where tests compile, the process from which workers are forked imports Inductor.

    Every worker of every pool would do it else, in some 3 s of computing each.
    """
    gc.freeze()  # torch's modules and 6,000 tests need not be looked through again and again
    gc.enable()
    if any(item.get_closest_marker("inductor") for item in request.session.items):
        before = os.environ["TORCHPMAP_WARM"]
        os.environ["TORCHPMAP_WARM"] = "1"
        preload()
        os.environ["TORCHPMAP_WARM"] = before


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> int:
    """A running pool, kept between tests; its size: ``parametrize("pool", [2], indirect=True)``."""
    num_devices: int = getattr(request, "param", 4)
    tp.init(num_devices)
    return num_devices


@dataclass
class _Inventory:
    """What is there of the things that a test could leave behind."""

    runtime: Any
    processes: set[str]
    threads: set[threading.Thread]
    fds: list[str]
    helpers: tuple[int | None, int | None]

    @classmethod
    def take(cls) -> _Inventory:
        fds = os.listdir("/proc/self/fd")
        return cls(_current._runtime, _processes(), _our_threads(), fds, _helpers())

    def left_behind(self) -> list[str]:
        """What is new, apart from a pool and its helpers."""
        found = [f"process {pid}" for pid in _processes() - self.processes if _is_ours(pid)]
        threads = [thread for thread in _our_threads() - self.threads if thread.is_alive()]
        found += [f"thread {thread.name}" for thread in threads if thread not in _pool_threads()]
        if _current._runtime is self.runtime and _helpers() == self.helpers:
            fds = os.listdir("/proc/self/fd")
            if len(fds) > len(self.fds):
                found += [_describe(fd) for fd in fds if fd not in self.fds]
        return found


def _processes() -> set[str]:
    return {name for name in os.listdir("/proc") if name.isdigit()}


def _our_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("torchpmap-")}


def _pool_threads() -> tuple[threading.Thread, ...]:
    """Of the present pool: its monitor, and its starter until the workers are there."""
    pool = getattr(_current._runtime, "_pool", None)
    return () if pool is None else (pool._monitor._thread, pool._starter)


def _is_ours(pid: str) -> bool:
    """Whether a process is a child of this one or the fork server, but not of the present pool."""
    server, tracker = _helpers()
    found = stat(pid)
    return (
        found is not None
        and found[1] in (os.getpid(), server)
        and int(pid) not in (server, tracker, *known_pids())
    )


def _helpers() -> tuple[int | None, int | None]:
    """Process ids of the fork server and the resource tracker of multiprocessing."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    return server, tracker


def _describe(fd: str) -> str:
    try:
        return f"descriptor {fd}: {os.readlink(f'/proc/self/fd/{fd}')}"
    except OSError:
        return f"descriptor {fd}: closed meanwhile"


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test after which there are more processes, threads or descriptors than before."""
    before = _Inventory.take()
    yield
    if before.left_behind():
        gc.collect()
        if not wait_for(lambda: not before.left_behind(), 2):
            pytest.fail(f"left behind: {', '.join(before.left_behind())}")


@pytest.fixture(scope="session", autouse=True)
def pool_ends_with_the_session() -> Iterator[None]:
    yield
    tp.shutdown()
    left = [t.name for t in threading.enumerate() if t.name.startswith("torchpmap-")]
    assert not left, f"threads after shutdown: {left} (time scale {SCALE})"
