"""Covers: _runtime/local/store.py, where the workers of a pool meet."""

import os
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from _support import in_threads

from torchpmap._runtime.local.store import WorkerStore


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "store"
    file.touch()
    return file


def test_what_one_sets_the_other_gets(path):
    one, other = WorkerStore(str(path)), WorkerStore(str(path))
    one.set("a", "1")
    dist.PrefixStore("p", other).set("\u00e9", b"\x00\xff")
    assert other.get("a") == b"1"
    assert dist.PrefixStore("p", one).get("\u00e9") == b"\x00\xff"
    one.set("a", "")
    assert other.get("a") == b""
    assert other.check(["a", "p/\u00e9"])
    assert not other.check(["a", "b"])
    assert WorkerStore(str(path)).check(["a"])


def test_sums_of_many_threads_and_views(path):
    stores = [WorkerStore(str(path)) for _ in range(3)]
    in_threads(9, lambda k: [stores[k % 3].add("n", k) for _ in range(20)])
    assert [store.add("n", 0) for store in stores] == [20 * 36] * 3


def test_a_value_is_waited_for(path):
    one, other = WorkerStore(str(path)), WorkerStore(str(path))
    later = threading.Thread(target=lambda: [one.set("a", "1"), one.set("b", "2")])
    later.start()
    other.wait(["a", "b"])
    assert other.get("b") == b"2"
    later.join()
    with pytest.raises(dist.DistStoreError, match="a, c: not all were set within 0:00:00"):
        other.wait(["a", "c"], timedelta())


@pytest.mark.parametrize("left", range(24))
def test_a_record_that_a_killed_process_has_cut(path, left):
    """torch's FileStore waits for the rest without end."""
    first = WorkerStore(str(path))
    first.set("a", "1")
    begin = path.stat().st_size
    WorkerStore(str(path)).set("killed", "x" * 10)
    assert path.stat().st_size == begin + 24
    os.truncate(path, begin + left)
    assert not first.check(["killed"])
    assert first.get("a") == b"1"
    WorkerStore(str(path)).set("b", "2")
    for store in (first, WorkerStore(str(path))):
        assert store.get("b") == b"2"
        assert not store.check(["killed"])


def test_a_store_of_an_epoch_that_is_over(path):
    old = WorkerStore(str(path))
    old.set("a", "1")
    os.truncate(path, 0)
    with pytest.raises(dist.DistStoreError, match="an epoch that is over"):
        old.set("a", "2")
    assert path.stat().st_size == 0
