"""Covers: _runtime/local/staging.py and _runtime/local/values.py, blocks in shared memory (what
they may hold: test_wire.py).
"""

import mmap
import os
import resource
import signal
import threading

import pytest
import torch
from _platforms import Lagging
from _support import EAGER, eagerly, pool_with, running_pool, wait_for, worker_pids

import torchpmap as tp
from torchpmap._runtime.completion import Completion
from torchpmap._runtime.local import staging
from torchpmap._runtime.local.staging import GONE, STAGED_BYTES, TAKEN, Staged, Staging

N = STAGED_BYTES // 4


class Pair:
    """The two sides, in one process."""

    def __init__(self):
        self.staging = Staging()
        self.fd = os.dup(self.staging.fd)
        self.pinned: set[int] = set()
        self.staged = Staged(self.fd, lambda address, _: self.pinned.add(address), self.unpin)

    def unpin(self, address):
        self.pinned.remove(address)

    def send(self, block):
        region = self.staging.store(block)
        return region, self.staged.tensor(region.offset, tuple(block.shape), block.dtype)

    def close(self):
        self.staging.close()
        os.close(self.fd)


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


def test_a_region_is_used_again_when_no_view_is_left(pair):
    first, arrived = pair.send(torch.ones(N))
    row = arrived.view(2, -1)[1]
    del arrived
    second, _ = pair.send(torch.full((N,), 2.0))
    assert second is not first
    assert row.eq(1).all()
    del row
    third, again = pair.send(torch.full((N - 9,), 3.0))  # about as large
    assert third is first
    assert again.eq(3).all()


def test_idle_regions_give_their_memory_back(pair, monkeypatch):
    region, arrived = pair.send(torch.ones(8 * N))
    monkeypatch.setattr(staging, "_IDLE_S", -1.0)
    pair.staging.trim()
    assert region.state == TAKEN  # it is used
    assert arrived.eq(1).all()
    del arrived
    pair.staging.trim()
    assert os.fstat(pair.fd).st_blocks == 0
    assert region.state == GONE
    other, arrived = pair.send(torch.ones(8 * N))
    assert other.offset != region.offset
    assert arrived.eq(1).all()
    assert len(pair.pinned) == 1  # the worker has let go of the first


def test_regions_that_are_gone_leave_no_page(pair, monkeypatch):
    """Also those that the worker has never seen."""
    monkeypatch.setattr(staging, "_IDLE_S", -1.0)
    for k in range(20):
        pair.send(torch.ones((k + 1) * N))
        unseen = pair.staging.lend(N * 4)
        unseen.free()
        pair.staging.trim()
    region, _ = pair.send(torch.ones(N))
    assert os.fstat(pair.fd).st_blocks * 512 == mmap.PAGESIZE + region.room
    assert len(pair.pinned) == 1


def test_without_memory_nothing_is_stored(pair):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (STAGED_BYTES, hard))
    try:
        assert pair.staging.store(torch.ones(N)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert pair.send(torch.ones(N))[1].eq(1).all()


def test_a_forked_child_frees_nothing(pair):
    region, arrived = pair.send(torch.ones(N))
    pair.staged.in_forked_child()
    del arrived
    assert region.state == TAKEN


def test_memory_is_not_used_again_before_the_device_has_read_it(pair):
    device = Lagging()
    pair.staged = Staged(pair.fd, device.pin, device.unpin)
    noted: list[int] = []
    completion = Completion(device, lambda: False, noted.append, lambda *_: None)
    gate = threading.Event()

    def slow(_):
        gate.wait()
        return []

    device.launch(slow, [], [])
    uploaded = []
    for k in range(3):
        _, arrived = pair.send(torch.full((N,), float(k)))
        uploaded.append(device.upload(arrived, torch.device("cpu")))
        completion.launched(k, "receiving a value", False, arrived)
        del arrived
    gate.set()
    assert completion.settle()
    assert [x.unique().tolist() for x in uploaded] == [[0.0], [1.0], [2.0]]
    first = min(pair.staged._regions.values(), key=lambda region: region.offset)
    assert pair.send(torch.ones(N))[0].offset == first.offset
    completion.close()
    device.close()


def test_only_so_much_is_on_the_way(pair, monkeypatch):
    monkeypatch.setattr(Staging, "most", STAGED_BYTES)
    pair.staging.store(torch.ones(4 * N)).free()  # a block that is larger goes alone
    monkeypatch.setattr(Staging, "most", 2 * STAGED_BYTES)
    first, second = (pair.staging.store(torch.ones(N)) for _ in range(2))
    assert pair.staging.store(torch.ones(N)) is None
    pair.staged.tensor(second.offset, (N,), torch.float32)
    pair.staged.tensor(first.offset, (N,), torch.float32)
    pair.staged.hold(first.offset)
    assert pair.staging.store(torch.ones(N)) is not None  # the first has arrived
    assert pair.staging.store(torch.ones(4 * N)) is None


def test_a_region_that_was_used_again_counts_once(pair, monkeypatch):
    monkeypatch.setattr(Staging, "most", 3 * STAGED_BYTES)
    first = pair.staging.store(torch.ones(N))
    for _ in range(5):
        again = pair.staging.store(torch.ones(N))
        again.free()  # it arrives, and the first does not
    assert first.state == TAKEN
    assert pair.staging.store(torch.ones(N)) is again
    assert pair.staging.store(torch.ones(N)) is not None
    assert pair.staging.store(torch.ones(N)) is None


# -- in workers ------------------------------------------------------------------------------------

add = tp.pmap(lambda x, y: x + y, compile=EAGER)


def batch(value):
    return torch.full((2, N), float(value))


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_batches_keep_their_numbers(pool):
    given = batch(0)
    totals = [add(given, batch(1))]
    for k in range(1, 10):  # the caller writes to what it has passed
        given.fill_(k)
        totals.append(add(given, totals[-1]))
    assert [total[1, 0].item() for total in totals] == [sum(range(k + 1)) + 1 for k in range(10)]


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_result_that_is_its_argument_lives_on(pool):
    same = eagerly(lambda x: x.view(2, -1))
    kept = [same(batch(k)) for k in range(4)]
    assert [x[0, 0, 0].item() for x in kept] == [0, 1, 2, 3]


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_new_worker_has_memory_of_its_own(pool):
    first = tp.device_put(batch(1), tp.devices())
    os.kill(worker_pids(2)[1], signal.SIGKILL)
    assert wait_for(lambda: not first.is_ready(), 5)
    second = tp.device_put(batch(2), tp.devices())
    third = tp.device_put(batch(3), tp.devices())
    assert (second + third)[:, 0].tolist() == [5, 5]
    assert first.addressable_data(0)[0, 0].item() == 1  # this worker lives


@pytest.fixture(params=[False, True], ids=["socket", "shared"])
def fresh_pool(request):
    with pool_with(2, shared_memory=request.param):
        yield


def test_large_blocks_come_and_go_with_and_without_shared_memory(fresh_pool):
    whole = torch.randn(2, N).mT  # its blocks are not contiguous
    y = tp.pmap(lambda x: x * 2, in_axes=1, out_axes=1, compile=EAGER)(whole)
    assert torch.equal(torch.as_tensor(y), whole * 2)
    assert torch.equal(y[:, 1], whole[:, 1] * 2)
    both = tp.replicate(whole)
    assert torch.equal(both.addressable_data(1), whole)


# What is fetched ----------------------------------------------------------------------------------

WHOLE = torch.arange(8.0 * N).view(8, -1)
CUTS = [tp.P("x"), tp.P(None, "x"), tp.P("x", "y"), tp.P("y", "x"), tp.P(None, ("y", "x")), tp.P()]


def on_square(spec):
    mesh = tp.make_mesh((2, 2), ("x", "y"))
    return tp.device_put(WHOLE, tp.NamedSharding(mesh, spec))


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int8])
@pytest.mark.parametrize("spec", CUTS, ids=str)
def test_each_device_writes_its_block_to_its_place(spec, dtype):
    value = on_square(spec).to(dtype)
    fetched = value.cpu()
    assert torch.equal(fetched, WHOLE.to(dtype))
    assert running_pool().landing.region_of(fetched) is not None
    assert torch.equal(value[3].cpu(), WHOLE[3].to(dtype))
    assert torch.equal(value.T.cpu(), WHOLE.to(dtype).T)
    fetched[:] = 0  # it is the user's
    assert torch.equal(value.cpu(), WHOLE.to(dtype))


@pytest.mark.usefixtures("pool")
def test_memory_is_given_back_with_the_last_view():
    landing = running_pool().landing
    row = on_square(tp.P("x")).cpu()[1]
    assert len(landing.taken()) == 1
    assert torch.equal(row, WHOLE[1])
    del row
    assert not landing.taken()
    size = landing._end
    again = on_square(tp.P("x", "y")).cpu()
    assert len(landing.taken()) == 1
    assert landing._end == size  # no new memory
    assert torch.equal(again, WHOLE)


@pytest.mark.usefixtures("pool")
def test_the_user_has_only_so_much_of_it(monkeypatch):
    landing = running_pool().landing
    monkeypatch.setattr(type(landing), "most", WHOLE.nbytes)
    kept = [on_square(spec).cpu() for spec in CUTS]
    assert [landing.region_of(x) is not None for x in kept] == [True, *[False] * (len(CUTS) - 1)]
    assert all(torch.equal(x, WHOLE) for x in kept)
    assert len(landing.taken()) == 1  # what the others passed through is free


def test_a_value_outlives_its_pool_and_its_writers(pool):
    pool_pids = worker_pids()
    fetched = on_square(tp.P("x", "y")).cpu()
    os.kill(pool_pids[1], signal.SIGKILL)
    assert wait_for(lambda: worker_pids_or_none() is not None, 10)
    assert torch.equal(fetched, WHOLE)
    more = on_square(tp.P("y")).cpu()  # also of a new worker
    tp.shutdown()
    assert torch.equal(fetched, WHOLE)
    assert torch.equal(more, WHOLE)


def worker_pids_or_none():
    try:
        return worker_pids()
    except tp.WorkerDied:
        return None


@pytest.mark.usefixtures("pool")
def test_after_a_fork_each_process_has_its_own():
    fetched = on_square(tp.P("x", "y")).cpu()
    other = on_square(tp.P("x", "y")) + 1
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(told, 1)
        seen = fetched.numpy()[5, 7]
        fetched.numpy()[0] = -1
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(int(fetched.numpy()[0, 0] != -1))
        ended = os.waitpid(grandchild, 0)[1]
        os._exit(int(seen != 5 * N + 7) + 2 * int(ended != 0))
    fetched[1] = 0  # in the parent
    assert not running_pool().landing.taken()
    fetched = other.cpu()  # would take the same memory
    os.write(tell, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(fetched, WHOLE + 1)
    os.close(told)
    os.close(tell)


@pytest.mark.usefixtures("pool")
def test_what_is_fetched_is_an_ordinary_tensor():
    weight = torch.ones((), requires_grad=True)
    with torch.no_grad():
        fetched = on_square(tp.P("x")).cpu()
    assert fetched._base is None
    fetched.mul_(weight)
    assert fetched.requires_grad


@pytest.mark.usefixtures("pool")
def test_memory_that_ctrl_c_has_lost_is_found(monkeypatch):
    landing, value = running_pool().landing, on_square(tp.P("x"))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(staging.Region, "tensor", interrupted)
        with pytest.raises(KeyboardInterrupt):
            value.cpu()
    assert len(landing.taken()) == 1
    monkeypatch.setattr(staging, "_IDLE_S", -1.0)
    landing.trim()
    assert not landing.taken()
