"""Covers: _runtime/groups/shared_memory_group.py and _runtime/groups/process_groups.py, on
processes that no runtime started.
"""

import fcntl
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _spmd import GROUP, Run, spmd
from _support import in_threads
from torch._C._distributed_c10d import _resolve_process_group

from torchpmap._runtime.groups.shared_memory import (
    _SEALS,
    Occasion,
    Peers,
    _extent,
    _found,
    _Memory,
    connect,
)

pytestmark = pytest.mark.cpu_only("GPUs do not exchange data through shared memory")

SLOT = 1 << 19
"""Bytes that a rank hands over at once."""
SIZES = (0, 1, 7, SLOT // 8, SLOT // 8 + 1, 3 * SLOT // 8 + 5)
SHAPES = (*SIZES, (3, 2), (90, 100), (600, 700))
REDUCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum}
DTYPES = (torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8)

_c10d = torch.ops._c10d_functional


@pytest.fixture(scope="module", params=[1, 2, 3])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with spmd(request.param) as run:
        yield run


def given(rank: int, shape: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers that differ from rank to rank, and whose sums are exact."""
    numbers = np.random.default_rng(rank).integers(0, 25, shape)
    return torch.from_numpy(numbers).to(dtype)


def stacked(size: int, shape: Any, dtype: torch.dtype = torch.float64) -> np.ndarray:
    return np.stack([given(rank, shape, dtype).numpy() for rank in range(size)])


def me() -> tuple[int, int]:
    group = _resolve_process_group(GROUP)
    return group.rank(), group.size()


# --- what the processes do ------------------------------------------------------------------------


def kind_of_group() -> str:
    return type(_resolve_process_group(GROUP)).__name__


def all_reduces(dtype: torch.dtype, operation: str, sizes: Any) -> list[torch.Tensor]:
    rank, _ = me()
    xs = [given(rank, size, dtype) for size in sizes]
    return [_c10d.wait_tensor(_c10d.all_reduce(x, operation, GROUP)) for x in xs]


def all_reduce_of_a_transposed() -> torch.Tensor:
    x = given(me()[0], (3, 5)).T
    return _c10d.wait_tensor(_c10d.all_reduce_(x, "sum", GROUP))


EXCHANGES: dict[str, Any] = {
    "all_gather": (
        lambda x, size: _c10d.all_gather_into_tensor(x, size, GROUP),
        lambda size, shape: shape, SHAPES, lambda everything, rank: np.concatenate(everything)),
    "reduce_scatter": (
        lambda x, size: _c10d.reduce_scatter_tensor(x, "sum", size, GROUP),
        lambda size, count: (size * count,), SIZES,
        lambda everything, rank: np.split(everything.sum(0), len(everything))[rank]),
    "all_to_all": (
        lambda x, size: _c10d.all_to_all_single(x, [1] * size, [1] * size, GROUP),
        lambda size, count: (size, count), SIZES, lambda everything, rank: everything[:, rank]),
    "broadcast": (
        lambda x, size: _c10d.broadcast(x, size - 1, GROUP),
        lambda size, shape: shape, SHAPES, lambda everything, rank: everything[-1]),
}  # fmt: skip
"""What a rank does, the shape of what it gives, for which sizes, and what a rank gets."""


def exchanges(name: str) -> list[torch.Tensor]:
    rank, size = me()
    operation, shape, sizes, _ = EXCHANGES[name]
    xs = [given(rank, shape(size, each)) for each in sizes]
    return [_c10d.wait_tensor(operation(x, size)) for x in xs]


def single_elements_of_a_wider_tensor() -> torch.Tensor:
    """Which are contiguous whatever their stride."""
    rank, size = me()
    x = torch.arange(2.0 * size)[2 * rank :: 2 * size]
    rows = [1] + [0] * (size - 1)
    taken = [1] * size if rank == 0 else [0] * size
    return _c10d.wait_tensor(_c10d.all_to_all_single(x, taken, rows, GROUP))


def uneven(width: int) -> torch.Tensor:
    """Rank r gives 2 r + k rows to rank k."""
    rank, size = me()
    sent = [2 * rank + k for k in range(size)]
    taken = [2 * k + rank for k in range(size)]
    x = given(rank, (sum(sent), width))
    return _c10d.wait_tensor(_c10d.all_to_all_single(x, taken, sent, GROUP))


def permutes(sizes: Any) -> list[torch.Tensor]:
    """Rank r gives to rank r + 1; the last gives to none, and the first gets nothing."""
    rank, size = me()
    ranks = list(range(size))
    xs = [given(rank, (count, 2)).T for count in sizes]
    return [torch.ops.torchpmap.ppermute(x, ranks[:-1], ranks[1:], GROUP) for x in xs]


def sum_in_a_derivative() -> bool:
    """Whether a sum needs a gradient because one before it, through the same memory, did."""
    group = _resolve_process_group(GROUP)
    options = dist.AllreduceOptions()
    weighted = torch.ones(3, requires_grad=True) * 2
    with torch.enable_grad():
        group.allreduce([weighted], options).wait()
        for _ in range(2):  # there are two sets of slots
            total = torch.ones(3)
            group.allreduce([total], options).wait()
    return total.requires_grad


def disagreements(rounds: int) -> list[bool]:
    """Of numbers of which one in three differs, each followed by an exchange as messages are."""
    rank, size = me()
    group: Any = _resolve_process_group(GROUP)
    agreed = []
    for _ in range(rounds):
        agreed += [group.agree(1), group.agree(2), group.agree(3 + (rank >= size // 2))]
        mine = torch.full((1, 4), rank)
        theirs = _c10d.wait_tensor(_c10d.all_gather_into_tensor(mine, size, GROUP))
        assert theirs[:, 0].tolist() == list(range(size))
    return agreed


def comparisons_of_two_calls() -> None:
    rank, _ = me()
    group: Any = _resolve_process_group(GROUP)
    group.meeting._occasion.number = 5 + rank
    group._calls[5 + rank] = f"call {rank}"
    group.agree(1)


def product() -> None:
    _c10d.all_reduce(torch.zeros(4), "product", GROUP)


# --- against NumPy --------------------------------------------------------------------------------


def test_processes_of_a_host_share_memory(run):
    assert set(run(kind_of_group)) == {"SharedMemoryGroup"}


@pytest.mark.parametrize("operation", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce(run, dtype, operation):
    sizes = SHAPES if dtype == torch.float64 else (7, (200, 300), SLOT // dtype.itemsize + 1)
    results = run(all_reduces, dtype, operation, sizes)
    for count, *found in zip(sizes, *results, strict=True):
        expected = REDUCTIONS[operation].reduce(
            stacked(len(results), count, dtype), axis=0, dtype=found[0].numpy().dtype
        )
        for each in found:
            np.testing.assert_array_equal(each.numpy(), expected)


def test_all_reduce_rounds_alike_on_all_ranks(run):
    """0.1 and its like add up differently in another order."""
    first, *others = run(all_reduces, torch.float32, "sum", (5, 3 * SLOT))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_all_reduce_of_a_transposed(run):
    results = run(all_reduce_of_a_transposed)
    for each in results:
        np.testing.assert_array_equal(each, stacked(len(results), (3, 5)).sum(0).T)


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchange(run, name):
    results = run(exchanges, name)
    _, shape, sizes, expected = EXCHANGES[name]
    for each, *found in zip(sizes, *results, strict=True):
        everything = stacked(len(results), shape(len(results), each))
        for rank, got in enumerate(found):
            np.testing.assert_array_equal(got, expected(everything, rank))


def test_all_to_all_of_single_elements(run):
    first, *others = run(single_elements_of_a_wider_tensor)
    assert first.tolist() == [2.0 * k for k in range(len(others) + 1)]
    assert all(other.numel() == 0 for other in others)


@pytest.mark.parametrize("width", [3, SLOT // 20])
def test_uneven_all_to_all(run, width):
    results = run(uneven, width)
    size = len(results)
    for rank, found in enumerate(results):
        parts = []
        for k in range(size):
            sent = [2 * k + j for j in range(size)]
            begin = sum(sent[:rank])
            parts.append(given(k, (sum(sent), width))[begin : begin + sent[rank]])
        np.testing.assert_array_equal(found, torch.cat(parts))


@pytest.mark.parametrize("willing", [range(3), ()], ids=["shared", "connected"])
def test_permute(willing):
    with spmd(3, share_memory=willing) as run:
        results = run(permutes, SIZES)
    for count, *found in zip(SIZES, *results, strict=True):
        np.testing.assert_array_equal(found[0], np.zeros((2, count)))
        for rank in (1, 2):
            np.testing.assert_array_equal(found[rank], given(rank - 1, (count, 2)).T)


def test_shapes_without_end(run):
    """Views of its memory are kept for some of them only."""
    shapes = [(k, 2) for k in range(1, 400)] * 2
    results = run(all_reduces, torch.float32, "sum", shapes)
    for shape, *found in zip(shapes, *results, strict=True):
        for each in found:
            np.testing.assert_array_equal(each, stacked(len(results), shape).sum(0))


def test_memory_is_of_no_graph(run):
    assert not any(run(sum_in_a_derivative))


@pytest.mark.parametrize("willing", [(), (0,), (1,)], ids=str)
def test_without_shared_memory(willing):
    with spmd(2, share_memory=willing) as run:
        assert set(run(kind_of_group)) == {"ProcessGroup"}
        assert all((a == b).all() for a, b in zip(*run(exchanges, "all_gather"), strict=True))


# --- what goes wrong (with C++ and Python: test_kernel.py) ----------------------------------------


def test_reductions_it_does_not_know(run):
    with pytest.raises(RuntimeError, match="this one cannot reduce with"):
        run(product)


def test_comparisons_of_two_calls():
    text = (
        r"rank (\d) runs call \1, but rank \d a comparison in a call that this process has not made"
    )
    with spmd(2) as run, pytest.raises(RuntimeError, match=text):
        run(comparisons_of_two_calls)


def test_ranks_that_disagree_go_on():
    with spmd(6) as run:
        assert run(disagreements, 50) == [[True, True, False] * 50] * 6


# --- the parts ------------------------------------------------------------------------------------


def test_several_threads_look_for_lost_peers_at_once():
    """The main thread, in a collective, and the one that watches the job."""
    peers = Peers()
    with subprocess.Popen(["sleep", "60"]) as process:
        peers.add({1: process.pid, 0: os.getpid()})
        peers.add({1: process.pid})
        assert len(peers._pidfds) == 1  # one descriptor for a process
        looks = in_threads(4, lambda _: [peers.lost() for _ in range(3000)])
        assert not any(map(any, looks))
        process.kill()
    assert peers.lost() == peers.lost([0, 1]) == [1]
    assert peers.lost([0]) == []
    peers.close()
    assert peers.lost() == []
    with pytest.raises(ProcessLookupError):
        peers.add({1: process.pid})


class Shop(dict):
    """A store for one process."""

    def set(self, key, value):
        self[key] = value.encode() if isinstance(value, str) else value

    def get(self, key):
        return self[key]


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW], ids=["no seals", "it may shrink"])
def test_memory_that_may_shrink_is_not_shared(seals):
    """Reading what a file has lost ends a process."""
    size = 2
    fd = os.memfd_create("group", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, _extent(size)[1])
        _Memory(fd, size).numbers[_Memory(fd, size).token] = 5
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        assert _found(os.getpid(), fd, 5, size) is None
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        assert _found(os.getpid(), fd, 5, size) is not None
        assert _found(os.getpid(), fd, 6, size) is None
    finally:
        os.close(fd)


def test_the_memory_of_a_group_cannot_shrink():
    store = Shop({"member/1": f"{os.getpid()} -1 0".encode(), "shares/1": b"1"})
    sealed = []

    def wait(keys):
        if keys[0] == "member/0":
            fd = int(store["member/0"].split()[1])
            sealed.append(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS)
            with pytest.raises(PermissionError):
                os.truncate(fd, 0)

    meeting = connect(store, [0, 1], 0, 1.0, Occasion(), Peers(), wait, willing=True)
    assert meeting is not None
    assert sealed == [_SEALS]
