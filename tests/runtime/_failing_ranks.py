"""Jobs that go wrong, each a few processes as ``mpirun`` would start them.

Run as a script this file imports everything once and forks the processes of one job after the
other from itself, because importing torch takes longer than all of them.  Each process writes what
it printed, and how it ended, to the folder that is given.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._decomp
import torch._dynamo
import torch._refs
import torch.fx.experimental.proxy_tensor
from _launched import free_port
from _support import SCALE

import torchpmap as tp
from torchpmap._base.devices import PLATFORMS
from torchpmap._base.platform import Platform

GRAPH = {"backend": "eager"}
LIMIT_S = 40.0
JOBS: dict[str, tuple[int, Callable[[int], None], dict[str, str]]] = {}


class Ended(NamedTuple):
    """One process of a job."""

    code: int | None
    """As of ``subprocess``: negative for a signal; None if it hung and was killed."""
    output: str


def job(num_ranks: int, **environment: str) -> Callable[[Callable[[int], None]], None]:
    def add(function: Callable[[int], None]) -> None:
        JOBS[function.__name__] = num_ranks, function, environment

    return add


def total(x: torch.Tensor) -> torch.Tensor:
    return tp.psum(x, "i")


def largest(x: torch.Tensor) -> torch.Tensor:
    return tp.pmax(x, "i")


def warmed_up() -> Callable[..., torch.Tensor]:
    """A mapped sum that every process has called once."""
    mapped = tp.pmap(total, "i", compile=GRAPH)
    mapped(torch.ones(1))
    return mapped


# -- different programs ----------------------------------------------------------------------------


@job(3)
def other_function(rank: int) -> None:
    tp.pmap(largest if rank == 1 else total, "i", compile=GRAPH)(torch.ones(1))


@job(3)
def other_body(rank: int) -> None:
    scale = 1.0 + (rank == 2)
    tp.pmap(lambda x: tp.psum(scale * x, "i"), "i", compile=GRAPH)(torch.ones(1))


@job(2)
def other_shape(rank: int) -> None:
    tp.pmap(total, "i", compile=GRAPH)(torch.ones(1, 2 + rank))


@job(2)
def other_shape_later(rank: int) -> None:
    mapped = warmed_up()
    mapped(torch.ones(1, 2) if rank == 1 else torch.ones(1))


@job(2)
def other_number_of_rows(rank: int) -> None:
    tp.pmap(total, "i", compile=GRAPH)(torch.ones(1 + rank))


@job(2)
def other_devices(rank: int) -> None:
    devices = tp.devices() if rank == 0 else tp.devices()[::-1]
    tp.pmap(total, "i", compile=GRAPH, devices=devices)(torch.ones(1))


@job(2)
def one_untraced(rank: int) -> None:
    tp.pmap(total, "i", compile=GRAPH if rank == 0 else False)(torch.ones(1))


@job(2)
def one_untraced_later(rank: int) -> None:
    mapped = warmed_up()
    tp.pmap(total, "i", compile=False)(torch.ones(1)) if rank == 1 else mapped(torch.ones(1))


@job(3)
def other_order(rank: int) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * tp.psum(x, "i")

    calls = [warmed_up(), tp.pmap(doubled, "i", compile=GRAPH)]
    calls[1](torch.ones(1))
    for call in reversed(calls) if rank == 1 else calls:
        call(torch.ones(1))


def twin() -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        return tp.psum(x, "i")

    return tp.pmap(step, "i", compile=GRAPH)


def skip_a_call(rank: int) -> None:
    first, second = twin(), twin()
    first(torch.ones(1))
    second(torch.ones(1))
    if rank == 0:
        first(torch.ones(1))
    second(5 * torch.ones(1))
    print("a value")


@job(2)
def skipped_call(rank: int) -> None:
    skip_a_call(rank)


@job(2, TORCHPMAP_SHARED_MEMORY="0")
def skipped_call_over_gloo(rank: int) -> None:
    skip_a_call(rank)


@job(2)
def skipped_call_untraced(rank: int) -> None:
    def make() -> Callable[..., torch.Tensor]:
        return tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=False)

    first, second = make(), make()
    first(torch.ones(1))
    second(torch.ones(1))
    if rank == 0:
        first(torch.ones(1))
    second(5 * torch.ones(1))
    print("a value")


def drift(rank: int) -> Callable[..., torch.Tensor]:
    """Known operations with known numbers, the last of which differs."""
    mapped, weights = warmed_up(), tp.replicate(torch.ones(2))
    for number in (2.0, 3.0, 3.0 if rank == 1 else 2.0):
        weights.mul_(number)
    return mapped


@job(2)
def drifted_before_a_sum(rank: int) -> None:
    drift(rank)(torch.ones(1))
    print("a value")


@job(2, TORCHPMAP_SHARED_MEMORY="0")
def drifted_before_a_sum_over_gloo(rank: int) -> None:
    drift(rank)(torch.ones(1))
    print("a value")


@job(2)
def drifted_before_a_barrier(rank: int) -> None:
    drift(rank)
    tp.multihost.barrier("saved")
    print("a value")


@job(3)
def left_an_operation_out(rank: int) -> None:
    weights = tp.replicate(torch.ones(2))
    for _ in range(2 - (rank == 1)):
        weights.mul_(2.0)
    tp.multihost.barrier("saved")
    print("a value")


@job(2)
def other_numbers_of_foreach(rank: int) -> None:
    torch._foreach_mul_([tp.replicate(torch.ones(2))], 2.0 + rank)
    print("a value")


@job(2)
def one_at_a_barrier(rank: int) -> None:
    mapped = tp.pmap(total, "i", compile=GRAPH)
    mapped(torch.ones(1)) if rank == 0 else tp.multihost.barrier("loaded")


@job(3)
def other_barriers(rank: int) -> None:
    tp.multihost.barrier("saved" if rank == 1 else "loaded")


@job(2)
def other_collective_untraced(rank: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return tp.psum(x, "i") if rank == 0 else tp.pmax(x, "i")

    tp.pmap(function, "i", compile=False)(torch.ones(1))


@job(2)
def other_order_untraced(rank: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if rank:
            second = total(10 * x)
            return total(x) + second
        first = total(x)
        return first + total(10 * x)

    tp.pmap(function, "i", compile=False)(torch.ones(1))
    print("a value")


@job(2)
def other_shapes_gathered(rank: int) -> None:
    tp.multihost.all_gather({"x": torch.ones(1 + rank)})


# -- devices ---------------------------------------------------------------------------------------


class OneDevice(Platform):
    """A host with devices for two processes, whose script puts both on the first one."""

    is_hardware = True

    def count(self) -> int:
        return 2

    def hardware(self, number: int) -> str:
        return "GPU-7"


@job(2)
def both_on_one_device(rank: int) -> None:
    PLATFORMS["cpu"] = OneDevice()
    tp.init()


# -- processes that are gone -----------------------------------------------------------------------


@job(2)
def ended_before_a_new_plan(rank: int) -> None:
    if rank == 0:
        tp.pmap(total, "i", compile=GRAPH)(torch.ones(1))
    else:
        tp.init()


@job(2)
def ended_before_a_sum(rank: int) -> None:
    mapped = warmed_up()
    if rank == 0:
        mapped(torch.ones(1))


@job(2)
def raised_while_others_sum(rank: int) -> None:
    mapped = warmed_up()
    if rank == 1:
        raise ValueError("boom in the script")
    mapped(torch.ones(1))


@job(2)
def first_raised_while_others_sum(rank: int) -> None:  # it keeps the store
    mapped = warmed_up()
    if rank == 0:
        raise ValueError("boom in the script")
    mapped(torch.ones(1))


@job(3)
def raised_while_others_agree(rank: int) -> None:
    tp.init()
    if rank == 2:
        raise ValueError("boom in the script")
    tp.pmap(total, "i", compile=GRAPH)(torch.ones(1))


@job(3)
def raised_while_others_wait(rank: int) -> None:
    tp.init()
    if rank == 2:
        raise ValueError("boom in the script")
    tp.multihost.barrier("loaded")


@job(2)
def raised_in_the_function(rank: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if tp.process_index() == 1:
            raise ValueError("boom in the function")
        return tp.psum(x, "i")

    tp.pmap(function, "i", compile=False)(torch.ones(1))


@job(3)
def killed_while_others_sum(rank: int) -> None:
    mapped = warmed_up()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mapped(torch.ones(1))


@job(3)
def first_killed_while_others_sum(rank: int) -> None:
    mapped = warmed_up()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    mapped(torch.ones(1))


@job(2, TORCHPMAP_TIMEOUT="3")
def killed_while_others_agree(rank: int) -> None:
    tp.init()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tp.pmap(total, "i", compile=GRAPH)(torch.ones(1))


@job(2)
def killed_while_others_wait(rank: int) -> None:
    tp.init()
    tp.config.timeout = 3  # the runtime has started with 60
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tp.multihost.barrier("loaded")


@job(2)
def caught_and_ended(rank: int) -> None:
    with contextlib.suppress(tp.CollectiveMismatch):
        tp.multihost.barrier(f"of rank {rank}")
    print("the end")


@job(2)
def used_after_a_failure(rank: int) -> None:
    mapped = warmed_up()
    try:
        tp.multihost.barrier(f"of rank {rank}")
    except tp.CollectiveMismatch:
        mapped(torch.ones(1))


# -- strangers -------------------------------------------------------------------------------------


class Runs:
    """Unpickling it prints."""

    def __reduce__(self) -> Any:
        return print, ("EXECUTED",)


def forge(key: str) -> None:
    """Write to the store what a stranger may, and wait for the other process to read it."""
    rendezvous = tp._runtime.current.runtime().rendezvous
    rendezvous.store.set(key, pickle.dumps(Runs()))
    while True:
        rendezvous.raise_cause()
        time.sleep(0.01)


@job(2)
def forged_message(rank: int) -> None:
    tp.init()
    tp.multihost.barrier("loaded") if rank == 0 else forge("turn/0,1/0/1")


@job(2)
def forged_cause(rank: int) -> None:
    tp.init()
    if rank == 0:
        tp.multihost.barrier("loaded")
    tp._runtime.current.runtime().rendezvous.store.set("cause", pickle.dumps(Runs()))
    tp.multihost.barrier("loaded")


@job(2)
def forged_posting(rank: int) -> None:
    tp.init()
    tp.multihost.barrier("loaded") if rank == 0 else forge("waiting/1")


@job(2)
def forged_tree(rank: int) -> None:
    tp.init()
    if rank == 0:
        tp.multihost.broadcast(None, source=1)
    what = "torchpmap.multihost.broadcast(source=1)"
    tp._runtime.current.runtime().exchange((0, 1), b"+" + pickle.dumps(Runs()), what)
    raise ValueError("forged")


@job(2)
def forged_report(rank: int) -> None:
    call = tp.pmap(total, "i", compile=False)
    if rank == 0:
        call(torch.ones(1))
    runtime = tp._runtime.current.runtime()
    real = runtime._rendezvous.exchange

    def exchange(ranks: Any, mine: bytes, what: str, *where: str) -> Any:
        return real(ranks, pickle.dumps(Runs()) if what == "total" else mine, what, *where)

    runtime._rendezvous.exchange = exchange
    call(torch.ones(1))


# -- driver ----------------------------------------------------------------------------------------


def _process(function: Callable[[int], None], rank: int, path: Path) -> int:
    """Fork a process that ends as a script does; its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 0
    output = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        function(rank)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(name: str, folder: Path) -> list[Ended]:
    num_ranks, function, environment = JOBS[name]
    paths = [folder / f"{name}{rank}" for rank in range(num_ranks)]
    pids: list[int] = []
    with patch.dict(os.environ, MASTER_PORT=str(free_port()), TORCHPMAP_TIMEOUT="60"):
        os.environ.update(environment)
        for rank, path in enumerate(paths):
            os.environ["OMPI_COMM_WORLD_RANK"] = str(rank)
            os.environ["OMPI_COMM_WORLD_SIZE"] = str(num_ranks)
            pids.append(_process(function, rank, path))
    codes = _codes(pids)
    return [Ended(codes.get(pid), path.read_text()) for pid, path in zip(pids, paths, strict=True)]


def _codes(pids: list[int]) -> dict[int, int]:
    """Wait for all; those that hang are killed, and missing."""
    codes: dict[int, int] = {}
    end = time.monotonic() + LIMIT_S * SCALE
    while len(codes) < len(pids) and time.monotonic() < end:
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes


def run_all(folder: Path, names: list[str]) -> None:
    """Run jobs, by default all, and write down how their processes ended."""
    torch.set_num_threads(1)
    ended = {name: _run(name, folder) for name in names or JOBS}
    (folder / "ended").write_bytes(pickle.dumps(ended))


if __name__ == "__main__":
    import _failing_ranks  # what is pickled must be found there, not in this script

    _failing_ranks.run_all(Path(sys.argv[1]), sys.argv[2:])
