"""Covers: that no process which user code makes outlives the controller (more: test_worker.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from _support import is_running, wait_for

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
