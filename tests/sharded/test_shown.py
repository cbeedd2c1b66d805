"""Covers: _sharded/shown.py: the view of a ShardedTensor in a notebook."""

import os
import signal

import pytest
import torch
from _spies import asked
from _support import DEVICE, EAGER, running_pool, wait_for, worker_pids

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


def test_numbers_and_blocks(y):
    html = y._repr_html_()
    assert "float32[4, 2], cut along dim 0; 32 B, 8 B per device" in html
    assert "[[0., 1.],\n [2., 3.],\n [4., 5.],\n [6., 7.]]" in html
    assert [html.count(f">{DEVICE}:{k}</td>") for k in range(4)] == [1] * 4


def test_a_large_value_is_not_waited_for(monkeypatch):
    large = tp.device_put(torch.zeros(4, 300, dtype=torch.int16), tp.devices())
    calls = asked(monkeypatch)
    where = f"rows of dim 0 on {DEVICE}:0 {DEVICE}:1 {DEVICE}:2 {DEVICE}:3"
    assert repr(large) == f"ShardedTensor(shape=[4, 300], dtype=torch.int16, {where})"
    html = large._repr_html_()
    assert "int16[4, 300], cut along dim 0; 2.4 kB, 600 B per device" in html
    assert "<pre" not in html
    assert calls == []


def test_what_is_gone_is_left_to_repr(y):
    y.delete()
    assert y._repr_html_() is None
    assert "deleted" in repr(y)
    x = tp.replicate(torch.zeros(2))
    tp.shutdown()
    assert x._repr_html_() is None
    assert "shut down" in repr(x)


def test_a_lost_value_is_left_to_repr(y):
    large = tp.device_put(torch.zeros(4, 300), tp.devices())
    os.kill(worker_pids()[2], signal.SIGKILL)
    assert wait_for(lambda: running_pool().broken)
    assert y._repr_html_() is None
    with pytest.raises(tp.ShardLost, match=rf"shard on device {DEVICE}:2 is lost"):
        repr(y)
    assert f"{DEVICE}:2" in large._repr_html_()  # as its text: where it is, without asking


def test_an_error_of_the_computation_is_left_to_repr():
    def step(x):
        tp.debug.assert_replicated(x, "i")
        return x

    failed = tp.pmap(step, "i", compile=EAGER)(torch.arange(4.0))
    assert failed._repr_html_() is None
    with pytest.raises(ValueError, match="assert_replicated: x differs"):
        repr(failed)


def test_of_a_tensor_that_is_differentiated():
    x = tp.replicate(torch.ones(2)).requires_grad_()
    assert "[1., 1.]" in (x * 1)._repr_html_()


def test_ipython_shows_both():
    formatter = pytest.importorskip("IPython.core.formatters").DisplayFormatter()
    data, _ = formatter.format(tp.replicate(torch.arange(2)))
    assert data["text/plain"].startswith("ShardedTensor([0, 1], replicated")
    assert "<table" in data["text/html"]
