"""Covers: workers whose device is asynchronous (``TORCHPMAP_TEST_LAG=1``): the order of what they
do, what is known when, and late errors.
"""

import threading

import pytest
import torch
from _rig import N, rows, sharded, total, worker_pids
from _support import DEVICE, EAGER, LAGS, beside

import torchpmap as tp

pytestmark = [
    pytest.mark.skipif(not LAGS, reason="TORCHPMAP_TEST_LAG=1 runs it"),
    pytest.mark.usefixtures("pool"),
]


@torch.library.custom_op("lagging::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    threading.Event().wait(0.3)
    return x + 1


@slow.register_fake
def _(x):
    return torch.empty_like(x)


step = tp.pmap(slow, compile=EAGER)


def test_a_call_is_a_launch_only():
    y = step(rows)
    for _ in range(4):
        y = step(y)
    assert not y.is_ready()
    z = tp.pmap(lambda x: x * 2, compile=EAGER)(y)
    assert y.block_until_ready().is_ready()
    assert z.tolist() == [2 * (x + 5) for x in rows.tolist()]


def test_an_assert_in_a_kernel_replaces_the_worker():
    table = torch.arange(20.0).reshape(N, 5)
    pick = tp.pmap(lambda x, k: x.index_select(0, k), compile=EAGER)
    value, pids = sharded().block_until_ready(), worker_pids()
    with pytest.raises(IndexError, match="out of range") as caught:
        pick(table, torch.tensor([[0], [1], [99], [2]])).cpu()
    assert "CUDA_LAUNCH_BLOCKING=1" in caught.value.__notes__[0]
    assert total(rows).tolist() == [rows.sum()] * N
    with pytest.raises(tp.ShardLost, match=f"device {DEVICE}:2"):
        value.cpu()
    assert value.addressable_data(0) == 0  # the others have theirs
    same = [old == new for old, new in zip(pids, worker_pids(), strict=True)]
    assert same == [True, True, False, True]


def test_an_error_of_an_operation_comes_late_and_keeps_the_workers():
    pids = worker_pids()
    value = sharded().block_until_ready()
    late = tp.pmap(lambda x: torch.linalg.cholesky(slow(x).reshape(1, 1)), compile=EAGER)
    y = late(-2 - rows)
    z = total(rows)  # behind it
    with pytest.raises(torch.linalg.LinAlgError):
        y.cpu()
    with pytest.raises(torch.linalg.LinAlgError):
        z.cpu()
    assert value.tolist() == [0, 10, 20, 30]
    assert worker_pids() == pids


class SlowToSend(IndexError):
    def __reduce__(self):
        threading.Event().wait(0.3)
        return super().__reduce__()


@torch.library.custom_op("lagging::broken", mutates_args=())
def broken(x: torch.Tensor) -> torch.Tensor:
    threading.Event().wait(0.6 if x.max() == 1 else 0.2)
    if x.max() == 2:
        raise SlowToSend("index out of range")
    return x + 1


@broken.register_fake
def _(x):
    return torch.empty_like(x)


def test_the_cause_is_sent_before_the_worker_ends_because_of_a_consequence():
    """The main thread meets rank 1 for a new group when its device breaks."""
    failing = tp.pmap(broken, compile=EAGER)
    failing(-rows).block_until_ready()
    pairs = [[0, 3], [1, 2]]
    meet = tp.pmap(lambda x: tp.psum(x, "i", axis_index_groups=pairs), "i", compile=EAGER)
    value = failing(rows)

    def fetch():
        with pytest.raises(IndexError, match="out of range"):
            value[1].cpu()

    with beside(fetch), pytest.raises(IndexError, match="out of range"):  # rank 1 comes late
        meet(rows).cpu()
