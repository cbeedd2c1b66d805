"""Covers: _runtime/groups/kernel: C++ beside Python, on processes that no runtime started."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _spmd import GROUP, Run, spmd

from torchpmap._base.torch_groups import group_named
from torchpmap._runtime.groups import kernel
from torchpmap._trace.toolchain import _own_folder, cpp_compiler

pytestmark = [
    pytest.mark.cpu_only("GPUs do not exchange data through shared memory"),
    pytest.mark.skipif(not cpp_compiler(), reason="no C++ compiler"),
]

SLOT = 1 << 20
COUNTS = (0, 1, 7, 1000, SLOT // 8 + 3)
LARGE = (SLOT // 8 * 3 + 5, 9000)
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
    for thread in threading.enumerate():
        if thread.name == "torchpmap-kernel":
            thread.join()
    if not hasattr(kernel, "found"):
        kernel.found = kernel.library()  # type: ignore[attr-defined]
    assert kernel.found is not None  # type: ignore[attr-defined]
    kernel._Shelf.library = kernel.found if compiled else None  # type: ignore[attr-defined]


def given(rank: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Any bits: sums overflow, or round in another way in another order."""
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 1e3
        return x.to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, generator=generator, dtype=dtype)


def everything(compiled: list[bool], dtype: torch.dtype, counts: Any) -> list[bytes]:
    """All collectives, for each count, bit by bit."""
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
    return [bytes(_c10d.wait_tensor(y).view(torch.uint8).numpy()) for y in results]


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


def one_does_not_come(compiled: bool, why: str) -> str:
    """``why``: it lets go, is late, or a signal's handler raises in the one that waits."""
    group: Any = group_named(GROUP)
    use(compiled)
    if group.rank() == 1:
        if why == "lets go":
            group.meeting.abort()
        return ""
    group.meeting.limit_s = 0.1 if why == "late" else 60

    def interrupt(*_: Any) -> None:
        raise InterruptedError("a signal came")

    if why == "signal":
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the text is what counts
        group.all_reduced(torch.zeros(4), "sum")
    return str(caught.value)


def one_gives_too_much(compiled: list[bool]) -> None:
    group: Any = group_named(GROUP)
    use(compiled[group.rank()])
    rows = [3, 3] if group.rank() else [1, 1]
    _c10d.all_to_all_single(torch.zeros(sum(rows), 2), [1, 1], rows, GROUP)


def one_permutes(compiled: list[bool]) -> None:
    group: Any = group_named(GROUP)
    use(compiled[group.rank()])
    group.permute(torch.zeros(4), 0) if group.rank() else group.all_reduced(torch.zeros(4), "sum")


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
@pytest.mark.parametrize("compiled", [(True, True, True), (True, False, True)], ids=str)
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
def test_waiting_ends(compiled, why, said):
    with spmd(2) as run:
        assert run(one_does_not_come, compiled, why) == [said, ""]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (one_permutes, "rank 0 runs sum of torch.float32 x 4, but rank 1 permute of"),
        (
            one_gives_too_much,
            "rank 1 gives 24 bytes to rank 0 in all_to_all, but that one expects",
        ),
    ],
)
@pytest.mark.parametrize("compiled", [(True, True), (False, True), (True, False)], ids=str)
def test_mismatches_are_found(compiled, function, said):
    with spmd(2) as run, pytest.raises(RuntimeError) as caught:
        run(function, compiled)
    assert f"CollectiveMismatch: {said}" in str(caught.value)


# --- where it comes from --------------------------------------------------------------------------

PROGRAM = """
import threading
from torchpmap._runtime.groups import kernel
kernel.seek()
was_there = kernel.library() is not None
for thread in threading.enumerate():
    if thread.name == "torchpmap-kernel":
        thread.join()
print(was_there, kernel.library() is not None)
"""


def found(folder: Any, **more: str) -> str:
    """Whether the library was there at once, and whether it was in the end."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), **more}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def test_it_is_compiled_once(tmp_path):
    assert found(tmp_path) == "False True"
    (library,) = (tmp_path / "torchpmap").iterdir()
    assert found(tmp_path, CXX="none") == "True True"
    library.write_bytes(b"damaged")
    assert found(tmp_path) == "False False"  # Python goes on


@pytest.mark.parametrize("compiler", ["none", "false"])
def test_without_a_compiler_that_works(tmp_path, compiler):
    assert found(tmp_path, CXX=compiler) == "False False"
    assert not list(tmp_path.glob("torchpmap/*"))


def test_it_lies_in_the_folder_of_inductor():
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert _own_folder() == default_cache_dir()
