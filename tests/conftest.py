"""Settings of all tests: a cheap pool, reproducible cases, and no test leaves anything behind."""

import contextlib
import gc
import importlib.util
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHPMAP_WARM", "0")  # of the programs that tests run few compile
os.environ.update(
    ("TORCHPMAP_TEST_PLATFORM", f"_platforms:{name}")
    for switch, name in (("LAG", "Lagging"), ("SHARE", "SharedCuda"))
    if os.environ.get(f"TORCHPMAP_TEST_{switch}") == "1"
)
if "TORCHPMAP_TEST_PLATFORM" in os.environ:  # the programs that tests run import it too
    _FOLDERS = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(_FOLDERS)

import pytest
import torch
from _leftovers import Inventory
from _support import DEVICE, EAGER, SCALE, TEST_ALL, sample, wait_for

import torchpmap as tp
from torchpmap._base.devices import usable_cores
from torchpmap._runtime.local import forkserver
from torchpmap._runtime.local.forkserver import server
from torchpmap._runtime.local.process import preload
from torchpmap._trace import compile as _compile

os.environ["TORCHPMAP_DEVICE_TYPE"] = DEVICE  # read when a pool starts

with contextlib.suppress(ModuleNotFoundError):  # tests/gpu.py does without it
    import hypothesis

    hypothesis.settings.register_profile(
        "reproducible", derandomize=True, deadline=None, database=None, print_blob=True
    )
    hypothesis.settings.load_profile("reproducible")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the cores have test processes, whose threads would wait for another

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what is in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until the tests are collected: what is made by then stays


MANY = 20
"""Tests of a session for which all workers have the compiler in memory."""
MAX_PROCESSES = 4
"""Each of them has a pool of workers too, and 2 GB."""

LONGEST = (
    "test_examples.py",
    "test_real_programs.py",
    "test_contexts.py",
    "test_notebook_session.py",
    "test_streams.py",
    "test_jax_parity.py",
    "test_docs.py",
    "test_nested_mesh.py",
    "test_collectives_axes.py",
    "test_autograd.py",
    "test_hangs.py",
    "test_fuzz.py",
    "test_loops_in_loops.py",
    "test_torchrun.py",
    "test_waits.py",
    "test_nested_mesh_calls.py",
    "test_branches.py",
    "test_timeouts.py",
    "test_collectives.py",
    "test_jax_ported.py",
    "test_worker.py",
    "test_check_replicated.py",
    "test_captured.py",
    "test_repetition.py",
    "test_traced_views.py",
    "test_remat.py",
    "test_shard_map_gradients.py",
)
"""Files that take long in ``make test-all`` or ``make test``. They come first, so that no process
is left with one."""


HAS_TIMEOUTS = importlib.util.find_spec("pytest_timeout") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    if not HAS_TIMEOUTS:
        parser.addini("timeout", "seconds per test, of pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    if not HAS_TIMEOUTS:
        config.addinivalue_line("markers", "timeout(seconds): of one test")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Test processes by default: one more than cores, since each waits at times, and only this one
    if part of the suite is asked for.

    A file is all one process's, so that its tests share a pool.
    """
    whole = all(Path(argument).is_dir() for argument in config.args)
    if not whole or config.option.keyword or config.option.capture == "no":
        return 0
    return min(usable_cores() + 1, MAX_PROCESSES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what ``sample`` does, unless everything is wanted or a test was asked for.

    The files that take longest are put first.
    """
    asked_for = config.option.keyword or any("::" in argument for argument in config.args)
    if not TEST_ALL and not asked_for:
        kept = sample(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:
        only = item.get_closest_marker("cpu_only")
        if only is not None and DEVICE != "cpu":
            item.add_marker(pytest.mark.skip(reason=f"CPU devices only: {only.args[0]}"))


@pytest.fixture(scope="session", autouse=True)
def garbage() -> Iterator[None]:
    gc.freeze()  # torch's modules and 6,000 tests need not be looked through again and again
    gc.set_threshold(10_000)  # 700 new objects are one traced operation
    gc.enable()
    yield
    gc.unfreeze()  # Triton's bindings report what is left when Python ends (torch 2.15)


@pytest.fixture(scope="session")
def compiles(request: pytest.FixtureRequest) -> bool:
    """Whether there are many tests, or tests that compile."""
    items = request.session.items
    return len(items) > MANY or any(item.get_closest_marker("inductor") for item in items)


@pytest.fixture(scope="session", autouse=True)
def workers_know_pytest() -> Iterator[None]:
    """Workers begin with pytest in memory: to import a module of tests takes each 0.2 s else."""
    own = forkserver.command
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "command", lambda code: own(f"import pytest; {code}"))
        yield


@pytest.fixture(autouse=True)
def fork_server(compiles: bool) -> None:
    """The process from which workers are forked imports Inductor, and with it what a derivative
    needs; also the one that comes after a test has killed it.

    Every worker of every pool would do it else, in 1 to 3 s of computing each.
    """
    if compiles:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHPMAP_WARM", "1")
            server.expect_compiling()
            preload()


@pytest.fixture(autouse=True)
def compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """In a test without the mark ``inductor``, ``compile=True`` means the traced graph as it is.

    g++ would take half of the time of all tests.
    """
    inductor = _compile.INDUCTOR
    if request.node.get_closest_marker("inductor") is None:
        _compile.INDUCTOR = _compile.EAGER
    yield
    _compile.INDUCTOR = inductor


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> int:
    """A running pool, kept between tests; its size: ``parametrize("pool", [2], indirect=True)``."""
    num_devices: int = getattr(request, "param", 4)
    tp.init(num_devices)
    return num_devices


@pytest.fixture(params=[EAGER, False], ids=["graph", "python"])
def mode(request: pytest.FixtureRequest) -> Any:
    """``compile=``: the traced graph as it is, and the function itself."""
    return request.param


@pytest.fixture(autouse=True)
def nothing_left_behind(fork_server: None) -> Iterator[None]:
    """Fail a test after which there are more processes, threads or descriptors than before."""
    before = Inventory.take()
    yield
    if before.left_behind():
        gc.collect()
        if not wait_for(lambda: not before.left_behind(), 2):
            pytest.fail(f"left behind: {', '.join(before.left_behind())}")


@pytest.fixture(scope="session", autouse=True)
def pool_ends_with_the_session() -> Iterator[None]:
    yield
    tp.shutdown()
    running = [t for t in threading.enumerate() if t.is_alive()]  # some may never have begun
    left = [t.name for t in running if t.name.startswith("torchpmap-")]
    assert not left, f"threads after shutdown: {left} (time scale {SCALE})"
