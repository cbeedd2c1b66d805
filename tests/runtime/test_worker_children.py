"""Covers: _runtime/local/worker.py: processes that user code makes with ``multiprocessing``, and
that none of them outlives its worker.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from _support import EAGER, eagerly, is_running, running_pool, wait_for, worker_pids
from torch.utils.data import DataLoader, TensorDataset

import torchpmap as tp

pytestmark = [
    pytest.mark.usefixtures("pool"),
    pytest.mark.parametrize("pool", [2], indirect=True),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

rows = torch.arange(2.0)
total = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)


def loaded(x):
    data = TensorDataset(torch.arange(8.0) + x)
    return torch.stack([batch.sum() for (batch,) in DataLoader(data, batch_size=4, num_workers=1)])


def test_a_data_loader_with_processes():
    expected = torch.stack([loaded(x) for x in rows])
    for _ in range(2):
        assert eagerly(loaded)(rows).cpu().equal(expected)
    assert total(rows).tolist() == [1, 1]


def pooled(x):
    with multiprocessing.Pool(2) as pool:
        return x + sum(pool.map(abs, [-1, -2, -3]))


def test_a_pool_of_processes():
    assert eagerly(pooled)(rows).tolist() == [6, 7]


def leaves_a_child(method, daemon):
    def fun(x):
        context = multiprocessing.get_context(method)
        child = context.Process(target=time.sleep, args=(1000,), daemon=daemon)
        child.start()
        return x.long() * 0 + child.pid

    return fun


@pytest.mark.parametrize("daemon", [False, True])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_ends_with_the_pool(method, daemon):
    children = eagerly(leaves_a_child(method, daemon))(rows).tolist()
    assert all(map(is_running, children))
    assert total(rows).tolist() == [1, 1]
    start = time.monotonic()
    tp.shutdown()
    assert time.monotonic() - start < 2, "it waited for the children"
    assert wait_for(lambda: not any(map(is_running, children)))


def test_a_child_ends_with_its_worker():
    mine, other = eagerly(leaves_a_child("fork", False))(rows).tolist()
    os.kill(worker_pids(2)[0], signal.SIGKILL)
    assert wait_for(lambda: running_pool().broken)
    assert total(rows).tolist() == [1, 1]
    assert wait_for(lambda: not is_running(mine))
    assert is_running(other)


def test_a_child_of_a_child_ends_too():
    def fun(x):
        taken, given = multiprocessing.Pipe()
        multiprocessing.Process(target=has_a_child, args=(given,)).start()
        return x.long() * 0 + taken.recv()

    children = eagerly(fun)(rows).tolist()
    tp.shutdown()
    assert wait_for(lambda: not any(map(is_running, children)))


def has_a_child(given):
    child = multiprocessing.Process(target=time.sleep, args=(1000,))
    child.start()
    given.send(child.pid)
    child.join()


SCRIPT = """
import multiprocessing, os, signal, time
import torch, torchpmap as tp

def fun(x):
    child = multiprocessing.Process(target=time.sleep, args=(1000,))
    child.start()
    return x * 0 + child.pid

tp.init(num_devices=2)
print(*tp.pmap(fun, compile=False)(torch.zeros(2, dtype=torch.int64)).tolist(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_ends_with_the_controller():
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TORCHPMAP_WARM": "0"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    children = list(map(int, ended.stdout.split()))
    assert len(children) == 2
    assert wait_for(lambda: not any(map(is_running, children)))
