"""Covers: _modules/prefetch.py: batches that are loaded while the loop works."""

import gc
import os
import re
import signal
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from _launched import answers, launch, run_program
from _support import EAGER, SCALE, wait_for
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchpmap as tp
from torchpmap._runtime import current

pytestmark = pytest.mark.usefixtures("pool")

WAIT_S = 20 * SCALE


def threads():
    return [t for t in threading.enumerate() if t.name == "torchpmap-prefetch"]


def numbered(count):
    return [torch.full((4,), float(k)) for k in range(count)]


class Loader:
    """Notes how many batches were asked for; ``gate`` opens the way for one each."""

    def __init__(self, count, gate=None):
        self.count, self.gate, self.asked = count, gate, 0

    def __iter__(self):
        for batch in numbered(self.count):
            self.asked += 1
            if self.gate is not None:
                assert self.gate.acquire(timeout=WAIT_S)
            yield batch


class Placed(list):
    """Puts batches on the devices, and notes them."""

    def put(self, x):
        result = tp.shard_batch(x)
        self.append(weakref.ref(result))
        return result


def loading(count):
    """A loop that took a batch, and the gate before which its loader waits with the next."""
    gate = threading.Semaphore(1)
    loader = Loader(count, gate)
    batches = iter(tp.prefetch(loader))
    next(batches)
    assert wait_for(lambda: loader.asked == 2, WAIT_S)
    return batches, gate


# Order and placement ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_batches_come_in_order_in_every_epoch(count, size):
    batches = tp.prefetch(numbered(count), size)
    assert len(batches) == count
    for _ in range(3):
        loop = iter(batches)
        assert [x.tolist() for x in loop] == [x.tolist() for x in numbered(count)]
        assert [next(loop, "over"), next(loop, "over")] == ["over", "over"]  # and stays so
        assert threads() == []


def test_placement_is_that_of_shard_batch():
    loader = [{"x": torch.arange(8), "none": None}, {"x": torch.arange(6), "none": None}]
    cut, uneven = tp.prefetch(loader)
    assert not cut["x"].is_fully_replicated
    assert uneven["x"].is_fully_replicated
    assert uneven["none"] is None
    (_, _), (rows, mask) = tp.prefetch(loader, stacked=True, devices=tp.devices()[:2])
    assert rows["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert mask.tolist() == [[True] * 3] * 2
    (total,) = tp.prefetch([torch.arange(3)], put=lambda x: x.sum())
    assert total.item() == 3
    with tp.debug.fake_pmap():
        (rows, mask), *_ = tp.prefetch([torch.arange(6), torch.arange(4)], stacked=True)
    assert type(rows) is type(mask) is torch.Tensor


@pytest.mark.parametrize("size", [1, 3])
def test_so_many_batches_wait(size):
    loader = Loader(10)
    batches = iter(tp.prefetch(loader, size))
    assert loader.asked == 0
    for taken in range(1, 10):
        next(batches)
        expected = min(10, taken + size)
        assert wait_for(lambda expected=expected: loader.asked == expected, WAIT_S)
        alive = threads()
        assert len(alive) <= 1
    assert loader.asked == 10


def test_batches_wait_on_the_devices_while_the_loop_works():
    gate = threading.Semaphore(2)
    placed = []

    def put(x):
        placed.append(threading.current_thread())
        return tp.shard_batch(x)

    batches = iter(tp.prefetch(Loader(4, gate), put=put))
    assert next(batches).tolist() == [0.0] * 4
    assert wait_for(lambda: len(placed) == 2, WAIT_S)  # the second, before the loop asks for it
    assert placed[0] is threading.current_thread() is not placed[1]
    gate.release(2)
    assert [x[0].item() for x in batches] == [1.0, 2.0, 3.0]


def test_two_loops_at_once():
    batches = tp.prefetch(numbered(3), 1)
    pairs = [(a[0].item(), b[0].item()) for a in batches for b in batches]
    assert pairs == [(a, b) for a in range(3) for b in range(3)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_training_is_that_without_prefetch(num_workers):
    data = TensorDataset(torch.randn(22, 3), torch.arange(22) % 4)

    def losses(wrap):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        loader = wrap(DataLoader(data, batch_size=8, shuffle=True, num_workers=num_workers))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            for x, y in loader:
                loss = F.cross_entropy(module(x), y)  # dropout draws from the shared generator
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield loss.item()

    expected = list(losses(lambda loader: loader))
    assert list(losses(lambda loader: tp.prefetch(loader, put=lambda batch: batch))) == expected


def test_batches_are_placed_while_others_are_traced(pool):
    lengths = [4 * k for k in (*range(1, 9), *range(1, 9))]
    step = tp.pmap(lambda x: tp.psum(x.sum(), "i"), "i", compile=EAGER)
    loader = [torch.arange(float(length)) for length in lengths]
    totals = [step(x)[0].item() for x, _ in tp.prefetch(loader, 4, stacked=True)]
    assert totals == [length * (length - 1) / 2 for length in lengths]


def test_grad_mode_of_the_loop():
    w = torch.ones(4, requires_grad=True)
    loader = (2 * w for _ in range(3))
    with torch.no_grad():
        assert not any(x.requires_grad for x in tp.prefetch(loader))


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("size", [2, 5])
def test_errors_of_the_loader_come_in_their_place(size, place, kind):
    def load():
        yield from numbered(place)
        raise kind("the disk is full")

    seen, batches = [], iter(tp.prefetch(load(), size))
    with pytest.raises(kind, match=r"^the disk is full$") as raised:
        seen.extend(x[0].item() for x in batches)
    assert [entry.name for entry in raised.traceback][-1] == "load"
    with pytest.raises(StopIteration):
        next(batches)
    assert threads() == []
    taken = [x[0].item() for x in numbered(place)]
    assert seen == (taken if kind is ValueError else taken[: len(seen)])


def ends_at(place):
    return lambda x: next(iter([])) if x[0] == place else x


def with_a_number(place):
    return [*numbered(place), torch.tensor(1.0)]


MISUSE = [
    (lambda: tp.prefetch(3), TypeError, "prefetch takes an iterable of batches, but got a int."),
    (lambda: tp.prefetch([], 0), ValueError, "prefetch: size must be an int of at least 1, not 0."),
    (lambda: tp.prefetch([], 2.0), ValueError,
     "prefetch: size must be an int of at least 1, not 2.0."),
    *((lambda place=place: list(tp.prefetch(with_a_number(place))), ValueError,
       "shard_batch: batch is a number (no dims)") for place in (0, 2)),
    *((lambda place=place: list(tp.prefetch(numbered(4), put=ends_at(place))), RuntimeError,
       "prefetch: put raised StopIteration") for place in (0, 2)),
    (lambda: tp.pmap(lambda x: list(tp.prefetch([x])), compile=EAGER)(torch.ones(4)), RuntimeError,
     "prefetch was called inside a mapped function"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), MISUSE)
def test_misuse(call, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        call()


# Ends ---------------------------------------------------------------------------------------------


def test_leaving_a_loop_ends_its_thread_and_drops_its_batches():
    placed = Placed()

    def train():
        for _ in tp.prefetch(Loader(10), put=placed.put):
            assert wait_for(lambda: len(placed) == 3, WAIT_S)
            raise ValueError("loss is NaN")

    with pytest.raises(ValueError, match="loss is NaN") as raised:
        train()
    del raised
    assert threads() == []
    gc.collect()
    assert [ref() for ref in placed] == [None] * 3


def test_a_batch_that_was_taken_is_not_kept():
    placed = Placed()
    batches = iter(tp.prefetch(numbered(10), 1, put=placed.put))
    for _ in range(3):
        next(batches)
    assert wait_for(lambda: len(placed) == 4, WAIT_S)
    assert [ref() is None for ref in placed] == [True, True, True, False]


def test_a_collected_iterator_ends_its_thread():
    batches = iter(tp.prefetch(numbered(10)))
    next(batches)
    circle = [batches]
    circle.append(circle)
    del batches, circle
    assert len(threads()) == 1
    gc.collect()
    assert threads() == []


def test_a_loader_that_hangs_holds_up_no_end():
    gate = threading.Semaphore(1)
    loader = Loader(10, gate)
    batches = tp.prefetch(loader)
    for _ in batches:
        assert wait_for(lambda: loader.asked == 2, WAIT_S)
        break
    assert len(threads()) == 1  # it loads
    gate.release(11)
    assert [x[0].item() for x in batches] == list(range(10))
    assert threads() == []


def test_a_loop_waits_until_the_one_before_left_the_loader():
    gate = threading.Semaphore(1)
    inside, together = [], []

    class Exclusive(Loader):
        def __iter__(self):
            together.append(len(inside))
            inside.append(1)
            try:
                yield from super().__iter__()
            finally:
                inside.pop()

    loader = Exclusive(3, gate)
    batches = tp.prefetch(loader)
    for _ in batches:
        assert wait_for(lambda: loader.asked == 2, WAIT_S)
        break
    threading.Timer(0.0, gate.release, (10,)).start()
    assert len(list(batches)) == 3
    assert together == [0, 0]


def test_ctrl_c_while_the_loop_waits():
    batches, gate = loading(3)

    def innermost_frame():
        return sys._current_frames()[threading.main_thread().ident].f_code.co_name

    def press():
        assert wait_for(lambda: innermost_frame() == "take", WAIT_S)  # the loop waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    presser.join()
    assert list(batches) == []  # as a generator that was interrupted
    gate.release(5)
    assert wait_for(lambda: threads() == [], WAIT_S)


def test_devices_that_are_shut_down_meanwhile():
    batches, gate = loading(5)
    tp.shutdown()
    gate.release(5)
    with pytest.raises(tp.RuntimeClosed, match="its devices were shut down while prefetch loaded"):
        next(batches)
    assert current._runtime is None  # nothing started others
    assert threads() == []


def test_batches_of_devices_that_were_shut_down():
    placed = Placed()
    batches = iter(tp.prefetch(numbered(3), put=placed.put))
    next(batches)
    assert wait_for(lambda: len(placed) == 3, WAIT_S)
    tp.shutdown()
    with pytest.raises(tp.RuntimeClosed):
        next(batches).tolist()


def test_a_forked_process_gets_no_batches():
    batches = iter(tp.prefetch(numbered(3)))
    next(batches)
    pid = os.fork()
    if not pid:
        try:
            next(batches)
        except RuntimeError as error:
            os._exit(7 if "cannot go on in a forked process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert len(list(batches)) == 2


EXIT = """
import itertools, threading, torch, torchpmap as tp
tp.init(2)
hangs = threading.Event()
def load():
    try:
        for k in itertools.count():
            if {hangs} and k == 2:
                hangs.set()
                threading.Event().wait()
            yield torch.full((4,), float(k))
    finally:
        print("the loader is closed")
batches = iter(tp.prefetch(load()))
print(next(batches).tolist(), next(batches).tolist())
if {hangs}:
    hangs.wait()
{end}
"""


@pytest.mark.long
@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("raise SystemExit(3)", 3), ("tp.shutdown()", 0)]
)
def test_the_script_ends_in_the_middle_of_a_loop(hangs, end, code):
    source = EXIT.format(hangs=hangs, end=end)
    done = run_program("-c", source, fails=code != 0, limit_s=60 * SCALE)
    assert (done.returncode, done.stderr) == (code, "")
    first, *rest = done.stdout.splitlines()
    assert first == "[0.0, 0.0, 0.0, 0.0] [1.0, 1.0, 1.0, 1.0]"
    assert rest == ([] if hangs else ["the loader is closed"])


# Several processes --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.cpu_only("processes of one host")
def test_under_torchrun(tmp_path):
    finished = launch(2, __file__, str(tmp_path))
    assert finished.code == 0, finished.output
    for found in answers(2, tmp_path):
        assert found["train"] == [[3.0], [7.0]] * 3
        assert found["threads"] == {"MainThread"}
        assert found["own rows"] == [(2, 1.0)] * 2
        assert found["differ"] == ("ValueError", True)


def torchrun_cases():
    """Loops, and the names of the threads that placed their batches."""
    placers = set()

    def put(x):
        placers.add(threading.current_thread().name)
        return tp.shard_batch(x, stacked=True)[0]

    def load():
        for k in range(6):
            yield torch.tensor([1.0, 2.0]) if k % 2 == 0 else torch.tensor([3.0, 4.0])

    total = tp.pmap(lambda x: tp.psum(x.sum(), "i"), "i", compile={"backend": "eager"})

    def train():
        return [tp.local_view(total(x)).tolist() for x in tp.prefetch(load(), put=put)]

    def own_rows():
        mine = [torch.tensor([float(tp.process_index())])] * 2
        return [(len(x), x.sum().item()) for x in tp.prefetch(mine, put=tp.global_view)]

    def differ():
        batches = tp.prefetch([torch.ones(2), torch.full((2,), float(tp.process_index()))])
        try:
            list(batches)
        except ValueError as error:
            return type(error).__name__, "batch" in str(error)
        return None

    return {"train": train, "threads": lambda: placers, "own rows": own_rows, "differ": differ}


if __name__ == "__main__":
    from _launched import run_cases

    run_cases(torchrun_cases(), sys.argv[1])
