"""Covers: _runtime/groups/kernel: C++ beside Python, on processes that no runtime started."""

import contextlib
import fcntl
import functools
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _spmd import GROUP, Run, spmd

from torchpmap._base.errors import GroupLost
from torchpmap._base.torch_groups import group_named
from torchpmap._runtime.groups import kernel
from torchpmap._runtime.groups.shared_memory import Occasion, Peers, connect
from torchpmap._runtime.groups.shared_memory_group import SharedMemoryGroup
from torchpmap._trace.toolchain import _own_folder, cpp_compiler

pytestmark = [
    pytest.mark.cpu_only("GPUs do not exchange data through shared memory"),
    pytest.mark.skipif(not cpp_compiler(), reason="no C++ compiler"),
]

SLOT = 1 << 19
COUNTS = (0, 1, 7, 1000, SLOT // 8 + 3)
LARGE = (SLOT // 8 * 2 + 5, 9000)
"""Elements of float64 in several pieces, and in one that every rank reduces a share of."""
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
_c10d = torch.ops._c10d_functional


@pytest.fixture(scope="module", params=[2, 3])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with spmd(request.param) as run:
        yield run


# --- what the processes do ------------------------------------------------------------------------


def use(compiled: bool) -> None:
    """Let this process run collectives in C++ from now on, or in Python."""
    kernel.seek()
    join()
    if not hasattr(kernel, "found"):
        kernel.found = kernel.library()  # type: ignore[attr-defined]
    assert kernel.found is not None  # type: ignore[attr-defined]
    kernel._Shelf.library = kernel.found if compiled else None  # type: ignore[attr-defined]


def join() -> None:
    """Wait for the thread that compiles."""
    for thread in threading.enumerate():
        if thread.name == "torchpmap-kernel":
            thread.join()


def fresh_group(path: Path) -> SharedMemoryGroup:
    """A group of all processes, for a test to break."""
    rank, size = group_named(GROUP).rank(), group_named(GROUP).size()
    store = dist.FileStore(str(path / "store"), size)
    meeting = connect(store, range(size), rank, 60, Occasion(), Peers(), store.wait, willing=True)
    assert meeting is not None
    return SharedMemoryGroup(meeting, {})


def given(rank: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Any bits: sums overflow, or round in another way in another order."""
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 1e3
        return x.to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, generator=generator, dtype=dtype)


def everything(compiled: list[bool], dtype: torch.dtype, counts: Any) -> list[str]:
    """All collectives, for each count, bit by bit (digests)."""
    group: Any = group_named(GROUP)
    rank, size = group.rank(), group.size()
    use(compiled[rank % len(compiled)])
    results = []
    for count in counts:
        x, rows = given(rank, (count,), dtype), given(rank, (size, count), dtype)
        ones, uneven = [1] * size, [(rank + k) % 3 for k in range(size)]
        few = given(rank, (sum(uneven), count), dtype)
        following = [(k + 1) % size for k in range(size)]
        results += [
            *(_c10d.all_reduce(x, op, GROUP) for op in ("sum", "max", "min")),
            group.all_reduced(x, "sum"),
            _c10d.all_gather_into_tensor(x, size, GROUP),
            _c10d.reduce_scatter_tensor(rows, "sum", size, GROUP),
            _c10d.all_to_all_single(rows, ones, ones, GROUP),
            _c10d.all_to_all_single(few, uneven, uneven, GROUP),
            _c10d.broadcast(x, size - 1, GROUP),
            torch.ops.torchpmap.ppermute(x, list(range(size)), following, GROUP),
            torch.ops.torchpmap.ppermute(x, [0], [size - 1], GROUP),
        ]
        assert group.agree(count)
    results = [_c10d.wait_tensor(y).reshape(-1).view(torch.uint8).numpy() for y in results]
    return [hashlib.blake2b(y).hexdigest() for y in results]


def signs_and_strides(compiled: bool) -> list[list[Any]]:
    """Of tensors whose memory says something else than they do."""
    group: Any = group_named(GROUP)
    rank, size = group.rank(), group.size()
    use(compiled)
    x = torch.tensor([rank + 1j]).conj()  # its imaginary part is a minus that is still to come
    rows = torch.arange(6.0).view(2, 3) + 10 * rank
    y = rows.t() if rank else rows.t().contiguous()
    _c10d.broadcast_(y, size - 1, GROUP)
    permuted = group.permute(x, size - 1)
    return [group.all_reduced(x.imag, "sum").tolist(), permuted.tolist(), y.tolist()]


def one_is_killed(compiled: list[bool], piece: int) -> None:
    """In the middle: the others have taken some of its pieces."""
    group: Any = group_named(GROUP)
    rank, size = group.rank(), group.size()
    use(compiled[rank])
    x = torch.zeros(SLOT // 4 * 4)
    if rank == size - 1:
        for k in range(piece):
            group.meeting.slots(x.dtype)[rank] = k
            assert group.meeting.meet(_kind_of_sum(group, x)) is None
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduced(x, "sum")


def _kind_of_sum(group: Any, x: torch.Tensor) -> int:
    from torchpmap._runtime.groups.shared_memory_group import _kind

    return _kind("sum", x.dtype, x.numel())


def one_does_not_come(compiled: bool, why: str, path: Path) -> list[str]:
    """``why``: it lets go, is late, or a signal's handler raises in the one that waits."""
    group = fresh_group(path)
    use(compiled)
    if group.rank() == 1:
        if why == "lets go":
            group.meeting.abort()
        return []
    group.meeting.limit_s = 0.1 if why == "late" else 60

    def interrupt(*_: Any) -> None:
        raise InterruptedError("a signal came")

    if why == "signal" and group.rank() == 0:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    said = []
    for op in ("sum", "max") if group.rank() == 0 else ("sum",):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the text is what counts
            group.all_reduced(torch.zeros(4), op)
        said.append(str(caught.value))
    return said


def a_forked_child_reduces(compiled: bool, path: Path) -> float:
    """While this process has given its numbers: what they are then."""
    group = fresh_group(path)
    use(compiled)
    mine = group.meeting.slots(torch.float32)[group.rank(), :4].fill_(5)

    def reduce() -> bytes:
        group.meeting.in_forked_child()
        with pytest.raises(GroupLost):
            group.all_reduced(torch.full((4,), 99.0), "sum")
        return b"raised"

    assert forked(reduce) == b"raised"
    return mine.sum().item()


def one_gives_other_rows(compiled: list[bool], path: Path, rows: int, expected: int) -> None:
    """All but rank 0 give ``rows`` to each, which expects ``expected``; rank 0 gives one."""
    group = fresh_group(path)
    use(compiled[group.rank() % 2])
    size = group.size()
    each = rows if group.rank() else 1
    taken = [1] + [expected] * (size - 1)
    x, out = torch.zeros(each * size, 2), torch.zeros(sum(taken), 2)
    group.all_to_all_single(out, x, taken, [each] * size)


def one_permutes(compiled: list[bool], path: Path) -> None:
    group = fresh_group(path)
    use(compiled[group.rank() % 2])
    x = torch.zeros(4)
    group.permute(x, 0) if group.rank() else group.all_reduced(x, "sum")


# --- C++ and Python -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_give_the_same_bits(run, dtype):
    """And so do ranks of which some run one, and some the other."""
    counts = COUNTS + (LARGE if dtype in (torch.float64, torch.uint8) else ())
    python, *others = (
        run(everything, compiled, dtype, counts) for compiled in ([False], [True], [False, True])
    )
    assert all(other == python for other in others)


@pytest.mark.parametrize("piece", [0, 3])
@pytest.mark.parametrize(
    "compiled", [(True, True, True), (True, False, True), (False, False, False)], ids=str
)
def test_a_rank_that_is_killed_in_the_middle(compiled, piece):
    with spmd(3) as run, pytest.raises(RuntimeError) as caught:
        run(one_is_killed, compiled, piece)
    assert str(caught.value).count("GroupLost: process group: another process of it has ended") == 2


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("lets go", "process group: another process has left it, or it was cut"),
        ("late", "rank 1 did not come to a collective within torchpmap.config.timeout (0.1 s)"),
        ("signal", "a signal came"),
    ],
)
def test_waiting_ends(run, compiled, why, said, tmp_path):
    """And then there is no other collective: the one that is late would read its numbers."""
    first, second, *_ = run(one_does_not_come, compiled, why, tmp_path)
    assert first == [said, "process group: an exception ended an earlier collective half-way"]
    assert second == []


@pytest.mark.parametrize("compiled", [True, False])
def test_a_forked_child_leaves_the_memory_alone(run, compiled, tmp_path):
    assert set(run(a_forked_child_reduces, compiled, tmp_path)) == {20}


@pytest.mark.parametrize("compiled", [True, False])
def test_signs_and_strides(run, compiled):
    results = run(signs_and_strides, compiled)
    size = len(results)
    last = (torch.arange(6.0).view(2, 3) + 10 * (size - 1)).t().tolist()
    assert results == [[[-size], [size - 1 - 1j], last]] * size


MISMATCHES = {
    "other operations": (one_permutes,
        "rank 0 runs sum of torch.float32 x 4, but rank 1 permute of torch.float32 x 4. "
        "All devices must run the same collectives in the same order."),
    "too many rows": (functools.partial(one_gives_other_rows, rows=3, expected=1),
        "rank 1 gives 24 bytes to rank 0 in all_to_all, but that one expects 8"),
    "too few rows": (functools.partial(one_gives_other_rows, rows=1, expected=3),
        "rank 1 gives 8 bytes to rank 0 in all_to_all, but that one expects 24"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "said"), MISMATCHES.values(), ids=MISMATCHES)
@pytest.mark.parametrize(
    "compiled", [(True, True), (False, True), (True, False), (False, False)], ids=str
)
def test_mismatches_are_found(run, compiled, function, said, tmp_path):
    with pytest.raises(RuntimeError) as caught:
        run(function, compiled, tmp_path)
    assert f"CollectiveMismatch: {said}" in str(caught.value)


# --- where it comes from --------------------------------------------------------------------------


def forked(function: Callable[[], bytes]) -> bytes:
    """What a function returns in a process of its own; nothing if it raises."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(theirs, function())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as end:
        answer = end.read()
    os.waitpid(child, 0)
    return answer


def sought(folder: Path, environment: dict[str, str]) -> list[bool]:
    """In a new process: whether the library was there at once, and whether it was in the end."""

    def seek() -> bytes:
        begin_anew(folder, environment)
        was_there = kernel.library() is not None
        join()
        return bytes([was_there, kernel.library() is not None])

    return [bool(answer) for answer in forked(seek)]


def begin_anew(folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment, TORCHINDUCTOR_CACHE_DIR=str(folder))
    kernel._Shelf.library, kernel._Shelf.is_sought = None, False
    kernel.seek()


def close_all_but(kept: set[str]) -> None:
    """Close what a forked process has inherited, but for these files and ends for reading."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the list itself
            is_read = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if not is_read or os.readlink(f"/proc/self/fd/{fd}") not in kept:
                os.close(fd)


def compiles_beside_a_child(folder: Path, environment: dict[str, str]) -> bool:
    """Whether the lock is free when a process has compiled that forked another meanwhile (on one
    rank).
    """
    if group_named(GROUP).rank() > 0:
        return True

    def compile_it() -> bytes:
        begin_anew(folder, environment)
        with open(environment["FIFO"], "w") as fifo:  # the compiler reads it
            ours, _theirs = os.pipe()
            if not os.fork():
                # the thread that compiles may still wait for the end of the other pipes
                close_all_but({f"pipe:[{os.fstat(ours).st_ino}]", str(folder / "torchpmap")})
                os.read(ours, 1)  # as long as its parent lives
                os._exit(0)
            os.close(ours)
            fifo.write("\n")
        join()
        lock = os.open(folder / "torchpmap", os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return bytes([kernel.library() is not None])

    return forked(compile_it) == b"\1"


def a_compiler(folder: Path, line: str) -> str:
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\n{line}\nexec "{cpp_compiler()}" "$@"\n')
    path.chmod(0o700)
    return str(path)


def test_it_is_compiled_once(run, tmp_path):
    """By processes that begin at the same time."""
    compiler, log = a_compiler(tmp_path, 'echo >> "$LOG"'), tmp_path / "log"
    answers = run(sought, tmp_path, {"CXX": compiler, "LOG": str(log)})
    assert [False, True] in answers
    assert all(in_the_end for _, in_the_end in answers)
    assert log.read_text() == "\n"
    assert all(answer == [True, True] for answer in run(sought, tmp_path, {"CXX": "none"}))
    (library,) = (tmp_path / "torchpmap").iterdir()
    library.write_bytes(b"damaged")
    assert all(answer == [False, False] for answer in run(sought, tmp_path, {}))  # Python goes on


def test_a_forked_process_keeps_no_lock(run, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    environment = {"CXX": a_compiler(tmp_path, 'read _ < "$FIFO"'), "FIFO": str(fifo)}
    assert all(run(compiles_beside_a_child, tmp_path, environment))


@pytest.mark.parametrize("compiler", ["none", "false"])
def test_without_a_compiler_that_works(run, tmp_path, compiler):
    assert all(answer == [False, False] for answer in run(sought, tmp_path, {"CXX": compiler}))
    assert not list(tmp_path.glob("torchpmap/*"))


@pytest.mark.parametrize("folder", ["compiler/under a file", "a long name" * 500])
def test_a_folder_that_cannot_be(run, tmp_path, folder):
    compiler = a_compiler(tmp_path, "")
    answers = run(sought, tmp_path / folder, {"CXX": compiler})
    assert all(answer == [False, False] for answer in answers)


def test_it_lies_in_the_folder_of_inductor():
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert _own_folder() == default_cache_dir()
