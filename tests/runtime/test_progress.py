"""Covers: the memory in which workers say how far they are, and the bell that wakes who waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from _support import EAGER, in_threads, running_pool, wait_for

import torchpmap as tp
from torchpmap._runtime.local.progress import Progress, WorkerProgress

LONG_MS = 60_000


@pytest.fixture
def progress() -> Iterator[Progress]:
    progress = Progress(3)
    yield progress
    progress.close()


def worker(progress: Progress, rank: int) -> WorkerProgress:
    return WorkerProgress(rank, *progress.inherited())


def test_what_workers_note_is_read_by_rank(progress):
    worker(progress, 0).note(5)
    worker(progress, 2).note(2**40)
    assert [progress[rank] for rank in range(3)] == [5, 0, 2**40]
    assert progress.reached(5, (0, 2))
    assert not progress.reached(6, (0, 2))
    assert not progress.reached(1, (0, 1))


def test_a_wait_for_what_is_there_does_not_sleep(progress):
    worker(progress, 1).note(5)
    assert progress.wait(5, (1,), LONG_MS)


def test_a_wait_ends_when_the_last_of_the_ranks_is_done(progress):
    woken = []
    waiter = threading.Thread(target=lambda: woken.append(progress.wait(7, (0, 2), LONG_MS)))
    waiter.start()
    worker(progress, 1).note(9)  # not one of them
    worker(progress, 2).note(7)
    worker(progress, 0).note(6)  # not yet
    assert not woken
    worker(progress, 0).note(7)
    waiter.join(LONG_MS / 1000)
    assert woken == [True]


def test_a_ring_without_progress_wakes_too(progress):
    progress.ring()
    assert not progress.wait(1, (0,), LONG_MS)
    worker(progress, 1).ring()
    assert not progress.wait(1, (0,), LONG_MS)


def test_a_wait_ends_with_its_patience(progress):
    assert not progress.wait(1, (0,), 1)


def test_no_bell_is_rung_when_no_thread_waits(progress):
    worker(progress, 0).note(1)
    assert not progress.wait(2, (0,), 1)  # would not have slept, with a ring left over
    worker(progress, 0).note(3)
    assert not progress._poll.poll(0)


def test_the_numbers_stay_after_close():
    progress = Progress(2)
    worker(progress, 1).note(3)
    progress.close()
    assert progress.reached(3, (1,))
    assert progress[0] == 0


def test_many_threads_wait_at_once(pool):
    mapped = tp.pmap(lambda x: (x @ x).sum(), compile=EAGER)
    x = torch.ones(4, 200, 200)
    in_threads(6, lambda k: [mapped(x).block_until_ready() for _ in range(30)])


def test_a_value_that_is_there_needs_no_message(pool, monkeypatch):
    monkeypatch.setattr(running_pool(), "_tick", lambda: None)  # would tell of what is released
    mapped = tp.pmap(lambda x: x + 1, compile=EAGER)
    y = mapped(torch.ones(4)).block_until_ready()
    sent = running_pool().seq
    assert wait_for(y.is_ready)
    y.block_until_ready()
    assert running_pool().seq == sent
