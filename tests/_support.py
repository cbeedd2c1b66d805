"""What the tests of the runtime share: waiting, processes, and the handles on a running pool."""

import contextlib
import functools
import gc
import importlib.util
import itertools
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import torchpmap as tp
from torchpmap._runtime import current

EAGER = {"backend": "eager"}
"""``compile=`` of tests that are not about compiling: the traced graph is run as it is."""
COMPILED = pytest.param(True, id="inductor", marks=pytest.mark.inductor)
"""``compile=`` of those that are."""
TRACED = [pytest.param(EAGER, id="graph"), COMPILED]
WAYS = {
    "graph": (EAGER, nullcontext),
    "python": (False, nullcontext),
    "lanes": (False, tp.debug.fake_pmap),
    "serial": (False, functools.partial(tp.debug.fake_pmap, serial=True)),
}
"""How a mapped function may run: ``compile=``, and what is around its call."""

SCALE = float(
    os.environ.get("TORCHPMAP_TEST_SCALE") or os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
)
"""Factor on all time bounds, for slow machines and for test processes that share one."""

DEVICE = os.environ.get("TORCHPMAP_TEST_DEVICE") or "cpu"
"""The kind of the devices of all tests, whatever the host has."""
OTHER = "cuda" if DEVICE == "cpu" else "cpu"
"""A kind of which no device is in use."""
LAGS = os.environ.get("TORCHPMAP_TEST_LAG") == "1"
"""Whether CPU devices behave like accelerators (``_platforms.py``)."""
TEST_ALL = os.environ.get("TORCHPMAP_TEST_ALL") == "1"
"""Whether every case of every test runs (``make test-all``), not those that ``sample`` chooses."""


def sample(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The cases that run by default: of every test some, with every value of every parameter.

    What takes seconds is none of them: a case that is marked ``long`` (where the mark names parts
    of ids, a case with such an id), or, on CPU devices, ``inductor`` and not ``always``. Names that
    are parametrized together have one value, their row. Where a test has several ``parametrize``,
    the cases that are chosen differ from each other as much as they can. They change only with the
    parameters themselves. A test marked ``product`` has one ``parametrize`` of a whole product,
    some cases of which have marks.
    """
    tables: dict[tuple[Any, str], list[pytest.Item]] = defaultdict(list)
    kept = set()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        compiles = "inductor" in marks and "always" not in marks and DEVICE == "cpu"
        if compiles or any(_is_long(item, mark.args) for mark in item.iter_markers("long")):
            continue
        if hasattr(item, "callspec"):
            tables[item.parent, item.originalname].append(item)  # type: ignore[attr-defined]
        else:
            kept.add(item)
    for cases in tables.values():
        kept.update(_covering({case: _values(case) for case in cases}))
    return kept


def _is_long(item: Any, parts: Sequence[str]) -> bool:
    """Whether a mark ``long`` is about a case; ``parts``: of the ids of such cases."""
    return not parts or any(f"-{part}-" in f"-{item.callspec.id}-" for part in parts)


def _values(case: pytest.Item) -> list[Any]:
    """What each ``parametrize`` and each fixture gives to a case."""
    params = case.callspec.params  # type: ignore[attr-defined]
    is_product = case.get_closest_marker("product") is not None
    rows = [] if is_product else [mark.args[0] for mark in case.iter_markers("parametrize")]
    together = [row.replace(",", " ").split() if isinstance(row, str) else row for row in rows]
    alone = [[name] for name in params.keys() - set(itertools.chain(*together))]
    return [tuple((name, id(params[name])) for name in row) for row in (*together, *alone)]


def _covering(values: Mapping[Any, Sequence[Any]]) -> list[Any]:
    """Some of the keys, with values that are those of all keys; rare ones are preferred."""
    cases_with = defaultdict(list)
    for case, row in values.items():
        for value in row:
            cases_with[value].append(case)
    times = dict.fromkeys(cases_with, 0)
    chosen = []
    for value, cases in cases_with.items():
        if times[value] == 0:
            best = min(cases, key=lambda case: sorted(times[other] for other in values[case]))
            chosen.append(best)
            for other in values[best]:
                times[other] += 1
    return chosen


def mostly_long(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Values for ``parametrize`` that are ``long``, except for some."""
    long = pytest.mark.long
    return [value if value in quick else pytest.param(value, marks=long) for value in values]


def entries(text: str) -> list[str]:
    """What a table in a text says: ``;`` is between the entries of a line, ``#`` before remarks."""
    lines = [line for line in text.splitlines() if not line.strip().startswith("#")]
    found = [part.strip() for line in lines for part in line.split(";") if part.strip()]
    assert len(found) == len(set(found))
    return found


def names_to_run(request: pytest.FixtureRequest, test: str) -> list[str]:
    """The ``name`` of every case of a test in this file that is to run, for a job that runs all."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    cases = [item for item in items if item.originalname == test]
    return list(dict.fromkeys(case.callspec.params["name"] for case in cases))


def imported(path: Path) -> Any:
    """A module that is no part of a package, by a name of its own."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def wait_for(predicate: Callable[[], object], seconds: float = 2.0) -> bool:
    """Poll until ``predicate`` is true; False if it is not after ``seconds`` (times SCALE)."""
    end = time.monotonic() + seconds * SCALE
    pause = 0.0005
    while not predicate():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def eagerly(function: Callable[..., Any], axis_name: Any = "i", **options: Any) -> Any:
    """The function mapped without tracing."""
    return tp.pmap(function, axis_name, compile=False, **options)


@contextlib.contextmanager
def autocast(dtype: torch.dtype | None = None, enabled: bool = True) -> Iterator[None]:
    """``torch.autocast`` of the devices, and of the host, on which expected values are computed."""
    with contextlib.ExitStack() as stack:
        for kind in {"cpu", DEVICE}:
            stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
        yield


def in_threads(count: int, function: Callable[[int], Any], seconds: float = 60.0) -> list[Any]:
    """What the function gives for 0, 1 and so on, each in a thread; or its first exception."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(k: int) -> None:
        try:
            results[k] = function(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds * SCALE)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return results


@contextlib.contextmanager
def beside(function: Callable[..., Any], *args: Any, seconds: float = 60.0) -> Iterator[Future]:
    """A thread that runs the function during the block, and must end soon after: what it gave."""
    ended: Future[Any] = Future()

    def run() -> None:
        try:
            ended.set_result(function(*args))
        except BaseException as error:
            ended.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield ended
    thread.join(seconds * SCALE)
    assert not thread.is_alive()
    ended.result()


def gated(gate: Path, ranks: Container[int] = range(256)) -> Callable[[Any], Any]:
    """A function that ends on these ranks when there is the file ``gate``."""

    def step(x: Any) -> Any:
        while int(tp.axis_index("i")) in ranks and not gate.exists():
            time.sleep(0.001)
        return x

    return step


def in_another_thread(
    change: Callable[[], Any], last: Callable[[], Any] = lambda: None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Have a thread, which is there before and after, call ``change``.

    Two functions: the first has it called and waits for that, the second ends the thread, which
    calls ``last`` before.
    """
    go, done, end = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        go.wait()
        try:
            change()
        finally:
            done.set()
        end.wait()
        last()

    thread = threading.Thread(target=wait)
    thread.start()

    def meanwhile() -> None:
        go.set()
        done.wait()

    def finish() -> None:
        end.set()
        thread.join()

    return meanwhile, finish


def by_rows(f: Callable[..., Any], *columns: torch.Tensor) -> list[torch.Tensor]:
    """The results of plain torch for a function of a row, stacked."""
    rows = [f(*(x.clone() for x in row)) for row in zip(*columns, strict=True)]
    rows = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [torch.stack(each) for each in zip(*rows, strict=True)]


def check_rows(
    f: Callable[..., Any],
    *columns: torch.Tensor,
    expected: Callable[..., Any] | None = None,
    modes: Iterable[Any] = (EAGER, False),
    most: int = 2,
) -> None:
    """A mapped function gives what plain torch gives row by row: with one row on each device, and
    with more of them (up to ``most``), traced and run by Python.

    ``expected``: the function for plain torch, if it is another.
    """
    want = by_rows(expected or f, *columns)
    for mode in modes:
        for count in range(1, most + 1):
            got = tp.pmap(f, compile=mode)(*(torch.cat([x] * count) for x in columns))
            got = got if isinstance(got, tuple) else (got,)
            for value, whole in zip(got, want, strict=True):
                torch.testing.assert_close(value.cpu(), torch.cat([whole] * count))


def close(found: Any, right: Any, **tolerance: Any) -> None:
    """Values, in trees and wherever they are, are nearly those that are right."""
    pairs = [tree_leaves([*x] if isinstance(x, Iterator) else x) for x in (found, right)]
    for mine, theirs in zip(*pairs, strict=True):
        if theirs is None:
            assert mine is None
        else:
            mine, theirs = mine.detach().cpu(), theirs.detach().cpu()
            torch.testing.assert_close(mine, theirs, equal_nan=True, **tolerance)


def gradients(module: torch.nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def live_tensors(num_elements: int, num_devices: int = 4) -> list[int]:
    """How many values of so many elements (views and their bases once) every device holds."""

    def count(x: torch.Tensor) -> torch.Tensor:
        tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor]
        marked = [x for x in tensors if x.numel() == num_elements]
        return torch.tensor(len({x.untyped_storage().data_ptr() for x in marked}))

    return eagerly(count)(torch.zeros(num_devices)).tolist()


@contextlib.contextmanager
def pool_with(num_devices: int, **settings: Any) -> Iterator[None]:
    """A pool that reads these settings of ``tp.config`` when it starts, and ends with the block."""
    tp.shutdown()
    try:
        for name, value in settings.items():
            setattr(tp.config, name, value)
        tp.init(num_devices)
        yield
    finally:
        tp.shutdown()
        tp.config.reset()


def running_pool() -> Any:
    """The pool of the local runtime: the one way by which tests reach inside of it."""
    return current.runtime()._pool


def worker_pids(num_devices: int = 4) -> list[int]:
    """Process id of the worker of every device, asked of the workers themselves."""
    ask = tp.pmap(lambda x: torch.tensor(os.getpid()), compile=False)
    return ask(torch.zeros(num_devices)).tolist()


def kill(pid: int) -> None:
    """End a worker and wait until the controller knows it."""
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: running_pool().broken)


def known_pids() -> list[int | None]:
    """Process ids of the current pool as the controller knows them; None: not running now."""
    runtime = current._runtime
    workers = {} if runtime is None or runtime.closed else runtime._pool.workers
    return [worker.pid for worker in workers.values()]


def stat(pid: int | str) -> tuple[str, int, int] | None:
    """(state, parent, session) of a process, or None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), int(fields[3])


def is_running(pid: int) -> bool:
    """Whether the process exists and is not merely waiting to be reaped."""
    found = stat(pid)
    return found is not None and found[0] not in "ZX"


def rss_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def anonymous_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process that is neither a file's nor shared."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def num_fds(pid: int | str = "self") -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))
