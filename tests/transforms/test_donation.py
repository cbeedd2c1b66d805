"""Covers: donation, as the memory of the worker processes shows it."""

from __future__ import annotations

import pytest
import torch
from _support import EAGER, LAGS, rss_bytes, worker_pids

import torchpmap as tp

NUM_DEVICES = 2
ROW_BYTES = 4 * 2**20
NUM_CALLS = 128
"""Many small rows: the allocator leaves up to ten gaps of a row, however many calls there are."""

SETTLING = 14
"""Calls until the allocator has found the gaps that it uses again and again."""

MODES = {"graph": EAGER, "inductor": True, "uncompiled": False}


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
@pytest.mark.parametrize("compile", MODES.values(), ids=MODES)
def test_donated_memory_is_used_again(compile):
    assert max(growth(compile, donate_argnums=0)) < NUM_CALLS // 4 * ROW_BYTES


@pytest.mark.parametrize("compile", [EAGER, False], ids=["graph", "uncompiled"])
def test_the_measurement_sees_what_is_not_donated(compile):
    assert min(growth(compile, donate_argnums=())) > NUM_CALLS * 3 // 4 * ROW_BYTES
