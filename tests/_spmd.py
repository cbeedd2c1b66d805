"""Run one function on several real processes that form a group, without the runtime.

    with spmd(4) as run:
        results = run(function, *args)     # one result per rank

The processes are started once and run any number of functions, which must be importable. They meet
in a ``WorkerStore``, and their groups are those that workers make.
"""

import io
import pickle
import tempfile
import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from torchpmap._base.config import Config
from torchpmap._runtime.groups.process_groups import Groups
from torchpmap._runtime.local.store import WorkerStore

GROUP = "axis"
TIMEOUT_S = 60
Run = Callable[..., list[Any]]


@contextmanager
def spmd(size: int, share_memory: Container[int] = range(256)) -> Iterator[Run]:
    """Start ``size`` processes; yields ``run(function, *args)``, which calls it on all of them.

    ``share_memory``: the ranks that are willing to; unless all are, collectives go over Gloo.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torchpmap._api", "pytest"])  # four processes need 8 s else
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (rank, size, rank in share_memory, str(Path(folder) / "store"), theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)

        def run(function: Callable[..., Any], *args: Any) -> list[Any]:
            for end in ends:
                end.send_bytes(pickle.dumps((function, args)))
            answers = [_answer(rank, end) for rank, end in enumerate(ends)]
            failures = [
                f"rank {k}:\n{answer}" for k, (failed, answer) in enumerate(answers) if failed
            ]
            if failures:
                raise RuntimeError("\n".join(failures))
            return [answer for _, answer in answers]

        try:
            yield run
        finally:
            for end in ends:
                end.close()
            for process in processes:
                process.kill()  # nothing is left to do, and a clean exit takes seconds
                process.join()
                process.close()


def _answer(rank: int, end: Connection) -> tuple[bool, Any]:
    if not end.poll(TIMEOUT_S):
        raise TimeoutError(f"rank {rank} did not answer within {TIMEOUT_S} s")
    try:
        answer: tuple[bool, Any] = torch.load(io.BytesIO(end.recv_bytes()), weights_only=False)
    except EOFError:
        return True, "the process has ended"
    return answer


def _serve(rank: int, size: int, shares_memory: bool, path: str, end: Connection) -> None:
    torch.set_num_threads(1)
    Path(path).touch()
    store = WorkerStore(path)
    config = Config(timeout=TIMEOUT_S / 3, shared_memory=shares_memory)
    groups = Groups(rank, torch.device("cpu"), store, config)
    groups.ensure(GROUP, (tuple(range(size)),))
    with suppress(EOFError, BrokenPipeError):  # the test is over
        while True:
            function, args = pickle.loads(end.recv_bytes())
            try:
                answer = False, function(*args)
            except Exception:
                answer = True, traceback.format_exc()
            buffer = io.BytesIO()
            torch.save(answer, buffer)  # plain pickle knows neither uint16 nor float8
            end.send_bytes(buffer.getvalue())
