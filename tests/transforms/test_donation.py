"""Covers: donation, as the memory of the worker processes shows it."""

import gc

import pytest
import torch
from _support import EAGER, LAGS, TRACED, rss_bytes, worker_pids

import torchpmap as tp

pytestmark = pytest.mark.cpu_only("it reads the memory of processes")

NUM_DEVICES = 2
ROW_BYTES = 4 * 2**20
NUM_CALLS = 128
"""Many small rows: the allocator leaves up to ten gaps of a row, however many calls there are."""

SETTLING = 14
"""Calls until the allocator has found the gaps that it uses again and again."""

MODES = [*TRACED, pytest.param(False, id="uncompiled")]


def growth(compile, donate_argnums):
    """Bytes that each worker grew by in a loop whose results are all kept, but donated."""
    tp.shutdown()  # memory that a worker keeps from before would hide what it needs
    tp.init(NUM_DEVICES)
    pids = worker_pids(NUM_DEVICES)
    step = tp.pmap(lambda x: x + 1, donate_argnums=donate_argnums, compile=compile)
    row = tp.pmap(lambda x: x.expand(ROW_BYTES // 4) + 0, compile=EAGER)(torch.zeros(2))
    for _ in range(SETTLING):
        row = step(row)
    row.block_until_ready()
    before = [rss_bytes(pid) for pid in pids]
    kept = [row]
    for _ in range(NUM_CALLS):
        kept.append(step(kept[-1]))
    assert kept[-1][:, 0].tolist() == [SETTLING + NUM_CALLS] * 2
    assert [x.is_deleted() for x in kept[:-1]] == [donate_argnums != ()] * NUM_CALLS
    after = [rss_bytes(pid) for pid in pids]
    return [later - earlier for earlier, later in zip(before, after, strict=True)]


@pytest.mark.skipif(LAGS, reason="results are allocated at the launch, not in order of the stream")
@pytest.mark.parametrize("compile", MODES)
def test_donated_memory_is_used_again(compile):
    assert max(growth(compile, donate_argnums=0)) < NUM_CALLS // 4 * ROW_BYTES


@pytest.mark.parametrize("compile", [EAGER, False], ids=["graph", "uncompiled"])
@pytest.mark.long("uncompiled")
def test_the_measurement_sees_what_is_not_donated(compile):
    assert min(growth(compile, donate_argnums=())) > NUM_CALLS * 3 // 4 * ROW_BYTES


NUM_ELEMENTS = 12_345


@torch.library.custom_op("test_donation::count", mutates_args=())
def count_live(x: torch.Tensor) -> torch.Tensor:
    """How many tensors of as many elements the process holds."""
    tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.numel() == x.numel()]
    return torch.tensor(len({o.untyped_storage().data_ptr() for o in tensors}))


@count_live.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


def held_in_the_call(compile, donate_argnums):
    """How many values a worker holds when a call has used its argument for the last time."""
    tp.init(NUM_DEVICES)

    def step(x):
        doubled = x * 2
        return doubled, count_live(doubled)

    mapped = tp.pmap(step, donate_argnums=donate_argnums, compile=compile)
    x = tp.device_put(torch.zeros(NUM_DEVICES, NUM_ELEMENTS), tp.devices())
    x, _ = mapped(x)  # the first call checks what the operation promised
    counts = mapped(x)[1]
    return counts.tolist()


@pytest.mark.skipif(LAGS, reason="results are allocated at the launch, not in order of the stream")
@pytest.mark.parametrize("compile", TRACED)
def test_a_donated_argument_is_freed_before_the_call_ends(compile):
    assert held_in_the_call(compile, donate_argnums=0) == [1, 1]
    assert held_in_the_call(compile, donate_argnums=()) == [2, 2]
