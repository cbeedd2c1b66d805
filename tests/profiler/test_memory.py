"""Covers: profiler/_memory.py, and profiler/_local.py through it."""

import gc
import os
import re
import signal

import pytest
import torch
from _support import DEVICE, EAGER, rss_bytes, running_pool, wait_for, worker_pids

import torchpmap as tp
from torchpmap._runtime.local.staging import STAGED_BYTES

pytestmark = pytest.mark.usefixtures("pool")

LARGE = STAGED_BYTES // 4
"""Elements of a block that travels through shared memory."""


def values():
    gc.collect()  # a traced function may keep a result in a circle of references
    return [each.value_bytes for each in tp.memory_stats().values()]


@pytest.fixture
def before():
    return values()


def more(before):
    return [now - then for now, then in zip(values(), before, strict=True)]


def test_one_entry_per_device():
    stats = tp.memory_stats()
    assert list(stats) == tp.devices()
    assert [each.device for each in stats.values()] == tp.devices()
    text = str(stats[tp.devices()[0]])
    assert re.match(rf"{DEVICE}:0: [\d.]+ k?B in values, ", text)  # of other tests, too


def test_values_count_on_their_devices(before):
    rows = tp.device_put(torch.zeros(4, 10), tp.devices())
    assert more(before) == [40] * 4
    whole = tp.replicate(torch.zeros(6, dtype=torch.float64))
    alone = tp.device_put(torch.zeros(3, dtype=torch.int8), tp.devices()[2])
    assert more(before) == [88, 88, 91, 88]
    del whole, alone
    results = tp.pmap(lambda x: (x * 2, x.sum()), compile=EAGER)(rows)
    twin = rows.clone()  # values are immutable: it is the same one
    assert more(before) == [40 + 40 + 4] * 4
    rows.delete()
    assert more(before) == [84] * 4
    del twin, results
    assert more(before) == [0] * 4


def test_views_on_a_device_count_once_and_donated_arguments_are_gone(before):
    halves = tp.pmap(lambda x: x.chunk(2), compile=False)(torch.zeros(4, 10))
    assert more(before) == [40] * 4
    del halves
    x = tp.device_put(torch.zeros(4, 10), tp.devices())
    y = tp.pmap(lambda x: x.sum(), compile=EAGER, donate_argnums=0)(x)
    assert more(before) == [4] * 4
    del y


@pytest.mark.cpu_only("the host's memory is all there is")
def test_the_process(before):
    for each, pid in zip(tp.memory_stats().values(), worker_pids(), strict=True):
        assert each.process_bytes == pytest.approx(rss_bytes(pid), rel=0.1)
        assert each.reserved_bytes == 0


def test_shared_memory():
    tp.shutdown()
    tp.init(2)
    assert [each.shared_bytes for each in tp.memory_stats().values()] == [0, 0]
    x = tp.device_put(torch.zeros(2, LARGE), tp.devices())
    for each in tp.memory_stats().values():
        assert STAGED_BYTES <= each.shared_bytes < 2 * STAGED_BYTES
    del x


def test_after_a_worker_has_died():
    x = tp.device_put(torch.zeros(4, 10), tp.devices())
    base = values()
    os.kill(worker_pids()[1], signal.SIGKILL)
    assert wait_for(lambda: running_pool().broken)
    now = values()
    assert now[1] <= base[1] - 40
    assert [now[k] for k in (0, 2, 3)] == [base[k] for k in (0, 2, 3)]
    del x


def test_where_there_are_no_devices():
    with tp.debug.fake_pmap():
        assert tp.memory_stats() == {}
    with pytest.raises(RuntimeError, match="memory_stats was called inside a mapped function"):
        tp.pmap(lambda x: (tp.memory_stats(), x)[1], compile=EAGER)(torch.zeros(4))
