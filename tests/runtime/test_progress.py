"""Covers: the memory in which workers say how far they are, and the bell that wakes who waits."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from _support import EAGER, LAGS, beside, eagerly, gated, in_threads, running_pool, wait_for

import torchpmap as tp
from torchpmap._runtime.local.progress import Progress, WorkerProgress


def never():
    return False


@pytest.fixture
def progress() -> Iterator[Progress]:
    progress = Progress(3)
    yield progress
    progress.close()


def worker(progress: Progress, rank: int) -> WorkerProgress:
    return WorkerProgress(rank, *progress.inherited())


def test_what_workers_note_is_read_by_rank(progress):
    for rank, seq in ((0, 3), (0, 5), (2, 2**40)):
        worker(progress, rank).note(seq)
    assert [progress[rank] for rank in range(3)] == [5, 0, 2**40]
    assert progress.reached(5, (0, 2))
    assert not progress.reached(6, (0, 2))
    assert not progress.reached(1, (0, 1))
    assert not progress._poll.poll(0)  # no thread waits, so no bell is rung
    assert progress.wait(5, (0,), never)  # it is there, so this does not sleep


def test_a_wait_ends_when_the_last_of_the_ranks_is_done(progress):
    with beside(progress.wait, 7, (0, 2), never) as woken:
        worker(progress, 1).note(9)  # not one of them
        worker(progress, 2).note(7)
        worker(progress, 0).note(6)  # not yet
        assert not woken.done()
        worker(progress, 0).note(7)
    assert woken.result()


def test_a_wait_that_is_in_vain_ends_with_a_ring(progress):
    for ring in (progress.ring, worker(progress, 1).ring):
        answers = iter([False, False, False])
        ring()
        assert not progress.wait(1, (0,), lambda answers=answers: next(answers, True))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 128, 256])
def test_any_number_of_ranks_is_waited_for(size):
    progress = Progress(size)
    ranks = range(size)
    with beside(progress.wait, 7, ranks, never) as woken:
        assert wait_for(lambda: len(progress.awaited()) == size)
        for rank in ranks[:-1]:
            worker(progress, rank).note(7)
        assert wait_for(lambda: progress.awaited() == [size - 1])
        assert not woken.done()
        worker(progress, size - 1).note(7)
    assert progress.reached(7, ranks)
    assert not progress.awaited()
    progress.close()


def test_several_threads_wait_at_once(progress):
    """For different commands of different ranks."""

    def act(k):
        if k:
            return progress.wait(k, (k % 3,), never)
        for seq in range(1, 9):
            worker(progress, seq % 3).note(seq)
        return True

    assert all(in_threads(9, act))


def test_close_while_another_thread_reads_and_waits():
    progress, over = Progress(2), threading.Event()

    def read():
        while not over.is_set():
            progress.reached(1, (0, 1))
            progress.awaited()
            progress.begun()

    with beside(progress.wait, 1, (0,), over.is_set), beside(read):
        assert wait_for(lambda: progress.awaited() == [0])
        progress.close()
        over.set()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(progress._fd)
    assert progress[0] == 0  # the numbers stay


def test_a_value_that_is_there_needs_no_message(pool, monkeypatch):
    monkeypatch.setattr(running_pool(), "_tick", lambda: None)  # would tell of what is released
    mapped = tp.pmap(lambda x: x + 1, compile=EAGER)
    y = mapped(torch.ones(4)).block_until_ready()
    sent = running_pool().seq
    assert wait_for(y.is_ready)
    y.block_until_ready()
    assert running_pool().seq == sent


def test_a_wait_for_an_old_value_waits_for_nothing_behind_it(pool, tmp_path):
    gate = tmp_path / "open"
    held = tp.pmap(lambda x: x + 1, compile=EAGER)
    held(torch.ones(4)).block_until_ready()
    old = held(torch.ones(4))
    with beside(eagerly(gated(gate)), torch.ones(4)) as ended:
        assert wait_for(lambda: running_pool().monitor.pending)
        old.block_until_ready()
        assert not ended.done()
        gate.touch()


@pytest.mark.skipif(not LAGS, reason="a worker of the CPU is at one command until it is done")
def test_an_old_value_is_fetched_while_the_device_is_at_later_calls(pool, tmp_path):
    gate = tmp_path / "open"

    def waiting(graph, examples):
        def run(*inputs):
            while not gate.exists():
                pass
            return graph.forward(*inputs)

        return run

    step = tp.pmap(lambda x: x + 1, compile=EAGER)
    late = tp.pmap(lambda x: x + 2, compile={"backend": waiting})
    gate.touch()
    late(torch.ones(4)).block_until_ready()
    gate.unlink()
    old = step(torch.ones(4, 3))
    large = step(torch.ones(4, 300_000))
    new = late(old[:, 0])
    assert old.tolist() == [[2.0] * 3] * 4
    assert tp.device_get(large)[1, -1] == 2
    assert not new.is_ready()
    gate.touch()
    assert new.tolist() == [4.0] * 4
