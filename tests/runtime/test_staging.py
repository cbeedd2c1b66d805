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
from _support import EAGER, eagerly, kill, pool_with, running_pool, wait_for, worker_pids

import torchpmap as tp
from torchpmap._runtime.completion import Completion
from torchpmap._runtime.local import staging
from torchpmap._runtime.local.blocks import free_blocks, store_blocks
from torchpmap._runtime.local.staging import FREE, GONE, HELD, STAGED_BYTES, TAKEN, Staged, Staging

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


# -- one block for several workers -----------------------------------------------------------------


class Several:
    """The controller and the workers of three ranks, in one process."""

    def __init__(self):
        self.common = Staging(num_workers=3)
        self.own = [Staging() for _ in range(3)]
        self.fds = [os.dup(self.common.fd) for _ in range(3)]
        self.workers = [Staged(fd, ignored, ignored, rank) for rank, fd in enumerate(self.fds)]

    def store(self, block):
        stored = []
        store_blocks([block] * 3, self.own, self.common, stored)
        return stored

    def send(self, block, ranks=(0, 1, 2)):
        stored = self.store(block)
        _, region = stored[0]
        for rank in ranks:
            region.change(rank, TAKEN)
        free_blocks(stored)
        arrived = []
        for rank in ranks:
            kind = tuple(block.shape), block.dtype
            arrived.append(self.workers[rank].tensor(region.offset, *kind))
            self.workers[rank].hold(region.offset)
        return region, arrived

    def close(self):
        for file in (self.common, *self.own):
            file.close()
        for fd in self.fds:
            os.close(fd)


def ignored(*_):
    pass


@pytest.fixture
def several():
    several = Several()
    yield several
    several.close()


def pages(fd):
    return os.fstat(fd).st_blocks * 512 // mmap.PAGESIZE


def test_several_workers_hold_the_same_pages(several):
    region, arrived = several.send(torch.arange(4.0 * N))
    assert all(torch.equal(x, torch.arange(4.0 * N)) for x in arrived)
    assert pages(several.common.fd) == 1 + 4 * N * 4 // mmap.PAGESIZE
    assert [pages(file.fd) for file in several.own] == [0, 0, 0]
    assert not any(each._has_copies() for w in several.workers for each in w._regions.values())
    assert region.state == HELD


@pytest.mark.parametrize("is_known", [True, False])
def test_what_a_worker_writes_is_its_own_until_it_frees_the_region(several, monkeypatch, is_known):
    if not is_known:  # a kernel that does not say which pages are copies

        def refuse(*_):
            raise OSError

        monkeypatch.setattr(os, "pread", refuse)
    region, arrived = several.send(torch.ones(N))
    arrived[1][5] = 7
    arrived[2].fill_(8)
    assert arrived[0].eq(1).all()
    assert arrived[1].sum() == N + 6
    assert region.tensor((N,), torch.float32).eq(1).all()
    del arrived
    again, arrived = several.send(torch.full((N,), 2.0))
    assert again is region
    assert all(x.eq(2).all() for x in arrived)


def test_a_region_is_used_again_when_no_worker_holds_it(several):
    first, (*others, last) = several.send(torch.ones(N))
    del others
    second, _ = several.send(torch.full((N,), 2.0))
    assert second is not first
    assert last.eq(1).all()
    del last
    assert several.send(torch.full((N,), 3.0), ranks=(2,))[0] is first


def test_a_region_is_not_used_again_before_it_is_sent(several):
    stored = several.store(torch.ones(N))
    several.common.forget(0)  # the worker is replaced meanwhile
    assert several.common.store(torch.ones(N)) is not stored[0][1]
    free_blocks(stored)
    assert stored[0][1].state == FREE


def test_a_worker_that_has_ended_holds_nothing(several):
    region, arrived = several.send(torch.ones(N))
    several.workers[1].in_forked_child()  # so that it frees nothing
    last = arrived.pop()
    del arrived
    several.common.forget(1)
    assert region.state == HELD
    assert last.eq(1).all()
    del last
    assert region.state == FREE


def test_a_forked_child_of_one_of_several_frees_nothing(several):
    region, arrived = several.send(torch.ones(N), ranks=(0, 2))
    for worker in several.workers:
        worker.in_forked_child()
    del arrived
    assert region.state == HELD


def test_a_block_is_on_the_way_until_the_last_worker_has_it(several, monkeypatch):
    monkeypatch.setattr(Staging, "most", STAGED_BYTES)
    region, _ = several.send(torch.ones(N), ranks=(0, 1))
    region.change(2, TAKEN)
    assert several.common.store(torch.ones(N)) is None
    _ = several.workers[2].tensor(region.offset, (N,), torch.float32)
    several.workers[2].hold(region.offset)
    assert several.common.store(torch.ones(N)) is not None


def test_regions_of_several_workers_leave_no_page(several, monkeypatch):
    monkeypatch.setattr(staging, "_IDLE_S", -1.0)
    for k in range(9):
        _, arrived = several.send(torch.ones((k + 1) * N))
        arrived[k % 3].zero_()
        del arrived
        several.common.trim()
    region, arrived = several.send(torch.ones(N))
    assert all(x.eq(1).all() for x in arrived)
    assert pages(several.common.fd) == 1 + region.room // mmap.PAGESIZE
    assert [len(worker._regions) for worker in several.workers] == [1, 1, 1]


def test_blocks_that_differ_go_to_each_worker_alone(several):
    whole = torch.ones(2, N)
    halves, stored = [whole[0], whole[0:1][0], whole[1]], []
    store_blocks(halves, several.own, several.common, stored)
    assert [file for file, _ in stored] == [several.common, several.common, several.own[2]]
    free_blocks(stored)
    stored.clear()
    turned = torch.ones(N // 2, dtype=torch.complex64)
    store_blocks([turned, turned.conj(), whole[1]], several.own, several.common, stored)
    assert [file for file, _ in stored] == several.own


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


def test_the_end_of_a_pool_frees_what_a_worker_was_still_to_write(pool, monkeypatch):
    running, value = running_pool(), on_square(tp.P("x"))

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "answered", interrupted)
    monkeypatch.setattr(running, "has_reached", lambda *_: False)
    with pytest.raises(KeyboardInterrupt):
        value.cpu()
    tp.shutdown()
    assert running.landing.fd == -1
    with pytest.raises(tp.RuntimeClosed):
        value.cpu()


# What several hold --------------------------------------------------------------------------------


@torch.library.custom_op("torchpmap_tests::writes", mutates_args=())
def writes(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Breaks its promise, and writes to its argument."""
    x.fill_(value)
    return x.sum()


writes.register_fake(lambda x, value: x.new_empty(()))
spoil = tp.pmap(
    lambda x: writes(x, tp.axis_index("i") + 2.0), "i", in_axes=None, axis_size=4, compile=EAGER
)
alone = pytest.mark.cpu_only("a GPU has a copy of its own")


def on_all(value):
    return tp.replicate(torch.full((N,), float(value)))


def held():
    return [region.room for region in running_pool().common.taken()]


@alone
@pytest.mark.usefixtures("pool")
def test_a_value_that_all_devices_hold_is_stored_once():
    common = running_pool().common
    assert wait_for(lambda: not held())
    kept = on_all(1), on_square(tp.P("x"))
    own = [worker.staging.taken() for worker in running_pool().workers.values()]
    assert sorted(held()) == [N * 4, 4 * N * 4, 4 * N * 4]
    assert own == [[]] * 4
    assert [kept[0].addressable_data(k).sum() for k in range(4)] == [N] * 4
    assert torch.equal(kept[1].cpu(), WHOLE)
    del kept
    assert wait_for(lambda: not common.taken())


@alone
@pytest.mark.usefixtures("pool")
def test_a_device_that_writes_to_its_memory_changes_no_other():
    x = on_all(1)
    assert spoil(x).tolist() == [2 * N, 3 * N, 4 * N, 5 * N]
    assert [x.addressable_data(k)[9].item() for k in range(4)] == [2, 3, 4, 5]
    del x
    assert wait_for(lambda: not held())
    for k in range(3):
        x = on_all(k)
        assert [x.addressable_data(k).unique().item() for _ in range(4)] == [k] * 4


@alone
@pytest.mark.usefixtures("pool")
def test_what_a_dead_worker_held_is_used_again():
    assert wait_for(lambda: not held())
    first = on_all(1)
    first.block_until_ready()
    end = running_pool().common._end
    kill(worker_pids()[1])
    second = on_all(2)  # while three workers still hold the first
    assert [second.addressable_data(k).unique().item() for k in range(4)] == [2] * 4
    assert first.addressable_data(0).eq(1).all()
    del first, second
    assert wait_for(lambda: not held())
    again = [on_all(k) for k in (3, 4)]
    assert running_pool().common._end == max(end, 2 * (N * 4 + mmap.PAGESIZE))
    assert [[x.addressable_data(k)[0].item() for k in range(4)] for x in again] == [
        [3] * 4,
        [4] * 4,
    ]


@alone
@pytest.mark.usefixtures("pool")
def test_ctrl_c_before_a_block_is_sent_frees_it(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    assert wait_for(lambda: not held())
    with monkeypatch.context() as patch:
        patch.setattr(running_pool(), "in_order", interrupted)
        with pytest.raises(KeyboardInterrupt):
            on_all(1)
    assert not held()
