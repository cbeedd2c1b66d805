"""Covers: _runtime/current.py and _runtime/local/ as long as nothing fails (tests/faults has the
rest).
"""

import gc
import linecache
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from _launched import Program
from _support import (
    DEVICE,
    EAGER,
    beside,
    in_threads,
    live_tensors,
    rss_bytes,
    stat,
    wait_for,
    worker_pids,
)

import torchpmap as tp
from torchpmap._runtime import current

TWO = pytest.mark.parametrize("pool", [2], indirect=True)
pytestmark = pytest.mark.usefixtures("pool")


@TWO
def test_value_is_freed_with_its_last_reference(pool):
    """... although no call follows."""
    before = live_tensors(12345, pool)
    y = tp.pmap(lambda x: x.expand(12345) + 1, compile=EAGER)(torch.zeros(2))
    same = y.detach()
    team = y._handle.team
    assert live_tensors(12345, pool) == [n + 1 for n in before]
    del y
    assert live_tensors(12345, pool) == [n + 1 for n in before]
    del same
    assert team.released
    assert wait_for(lambda: not team.released, 3)
    assert wait_for(lambda: live_tensors(12345, pool) == before)


@TWO
def test_values_do_not_pile_up_between_compiled_calls(pool):
    """Neither uncompiled calls nor transfers alone may keep values without references."""
    f = tp.pmap(lambda x: x.expand(12345) + 1, compile=False)
    for _ in range(50):
        f(torch.zeros(2))
    assert max(live_tensors(12345, pool)) < 10
    for _ in range(50):
        tp.replicate(torch.zeros(12345))
    assert max(live_tensors(12345, pool)) < 10


@TWO
def test_plan_of_a_dropped_function_is_forgotten(pool):
    captured = torch.ones(12345)

    def use():
        f = tp.pmap(lambda x: (x + captured).sum(), compile=EAGER)
        return f(torch.zeros(2)).tolist()

    runtime = current.runtime()
    gc.collect()
    assert wait_for(lambda: not runtime._plans.retired, 3)
    plans = set(runtime._plans.defined)  # of tests before, of which some may still go
    before = live_tensors(12345, pool)
    assert use() == [12345, 12345]
    gc.collect()
    assert wait_for(lambda: live_tensors(12345, pool) == before, 3)
    assert wait_for(lambda: plans.issuperset(runtime._plans.defined), 3)


@pytest.mark.cpu_only("the workers' memory is not that of their processes")
@TWO
def test_uncompiled_functions_do_not_pile_up(pool):
    def call(tensor):
        return tp.pmap(lambda x: x + tensor.sum(), compile=False)(torch.zeros(2)).tolist()

    pids = worker_pids(pool)
    for k in range(60):
        if k == 20:
            before = [rss_bytes(pid) for pid in pids]
        assert call(torch.full((1 << 18,), k)) == [k << 18] * 2
    growth = [rss_bytes(pid) - b for pid, b in zip(pids, before, strict=True)]
    assert max(growth) < 20 << 20, "of 40 MB that were sent"


@TWO
def test_output_arrives_whole_before_the_call_returns(pool, capsys):
    def speak(x):
        print("I have", int(x))
        print("oh", file=sys.stderr)
        os.write(1, b"from C\n")
        for k in range(20_000):
            print(k)
        print("no newline", end="")
        return x

    tp.pmap(speak, compile=False)(torch.tensor([7, 8]))
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert len(lines) == 2 * 20_003
    for k in range(2):
        device = f"[{DEVICE}:{k}] "
        first, second, *rest = [
            line.removeprefix(device) for line in lines if line.startswith(device)
        ]
        assert sorted([first, second]) == [f"I have {7 + k}", "from C"]
        assert rest == [*map(str, range(20_000)), "no newline"]
    assert sorted(captured.err.splitlines()) == [f"[{DEVICE}:0] oh", f"[{DEVICE}:1] oh"]


@TWO
def test_a_device_can_print_any_text(pool, capsys):
    """As Python itself can to stderr."""
    speak = tp.pmap(lambda x: print("\udc80 \N{EURO SIGN}", file=sys.stderr) or x, compile=False)
    assert speak(torch.arange(2)).tolist() == [0, 1]
    lines = [f"[{DEVICE}:{k}] \\udc80 \N{EURO SIGN}" for k in range(2)]
    assert sorted(capsys.readouterr().err.splitlines()) == lines


class Broken:
    def write(self, *text):
        raise ArithmeticError("no")

    flush = write


@TWO
@pytest.mark.parametrize("stream", [Broken(), None])
def test_output_survives_a_broken_stdout(pool, monkeypatch, stream):
    speak = tp.pmap(lambda x: print("lost") or x, compile=False)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        speak(torch.zeros(2))
    assert speak(torch.ones(2)).tolist() == [1, 1]


@TWO
def test_sources_that_another_thread_adds_while_they_are_looked_through(pool, monkeypatch):
    class Entry(tuple):
        def __len__(self):  # is asked for each entry: here the other thread gets its turn
            linecache.cache[f"<added {len(linecache.cache)}>"] = (0, 1.0, [], "")
            return super().__len__()

    monkeypatch.setattr(linecache, "cache", {"<entry>": Entry((0, 1.0, [], "")), **linecache.cache})
    double = tp.pmap(lambda x: x * 2, compile=False)
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]


@TWO
def test_big_transfers_in_both_directions_at_once(pool):
    """Neither side may wait for the other to read: 8 MB in and out, from four threads."""
    double = tp.pmap(lambda x: x * 2, compile=EAGER)

    def work(k):
        for _ in range(3):
            x = torch.full((2, 1 << 20), float(k))
            assert torch.equal(double(x).cpu(), 2 * x)

    in_threads(4, work)


# those with four devices come last: another number is another pool
def test_calls_run_in_the_order_they_were_made():
    def step(x, k):
        return x * 3 + k + tp.psum(x, "i")

    append = tp.pmap(step, "i", in_axes=(0, None), compile=EAGER)
    x = expected = torch.arange(4)
    for k in range(1000):
        x = append(x, torch.tensor(k % 5))
        expected = expected * 3 + k % 5 + expected.sum()
    assert torch.equal(x.cpu(), expected)


@pytest.mark.long
@pytest.mark.cpu_only("a group on GPUs has no memory of its own")
@pytest.mark.usefixtures("pool")
def test_groups_go_with_the_last_plan():
    def shared():
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in worker_pids()]
        return [text.count("memfd:torchpmap-group") for text in maps]

    def mapped(groups):
        f = tp.pmap(lambda x: tp.psum(x, "i", axis_index_groups=groups), "i", compile=EAGER)
        sums = {k: x[list(group)].sum() for group in groups or [range(4)] for k in group}
        assert f(x).tolist() == [sums[k] for k in range(4)]
        return f

    x = torch.arange(4.0)
    held = mapped(None)
    gc.collect()
    runtime = current.runtime()
    assert wait_for(lambda: not runtime._plans.retired, 3)
    before = shared()
    one_more = [n + 1 for n in before]
    for groups in 3 * ([[0, 1], [2, 3]], [[0, 3], [1, 2]]):  # again, under the same names
        first, second = mapped(groups), mapped(groups)
        assert shared() == one_more
        del first
        gc.collect()
        assert wait_for(lambda: not runtime._plans.retired, 3)
        assert shared() == one_more  # the other plan needs them
        second(x)
        del second
        gc.collect()
        assert wait_for(lambda: shared() == before, 3)
    assert held(x).tolist() == [6] * 4


def test_init_with_the_same_devices_keeps_the_pool():
    before = worker_pids()
    x = tp.device_put_sharded([torch.tensor(k) for k in range(4)], tp.devices())
    tp.init(num_devices=4)
    assert worker_pids() == before
    assert x.tolist() == [0, 1, 2, 3]


def test_init_with_other_devices_starts_a_new_pool():
    f = tp.pmap(lambda x: x + 1, compile=EAGER)
    old = f(torch.zeros(4))
    pids = worker_pids()
    tp.init(num_devices=2)
    assert wait_for(lambda: not any(map(stat, pids)))
    assert tp.device_count() == 2
    for use in (
        lambda: old.cpu(),
        lambda: f(old),
        lambda: old[0],
        lambda: old.block_until_ready(),
        lambda: tp.pmap(lambda x: x, compile=False)(old),
        lambda: old + 1,
    ):
        with pytest.raises(tp.RuntimeClosed, match=r"shut down"):
            use()
    assert old.shape == (4,)
    assert f(torch.zeros(2)).tolist() == [1, 1]
    assert f(torch.zeros(4)).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "use",
    [
        lambda x: tp.replicate(torch.ones(1)),
        lambda x: tp.device_put(x),
        lambda x: tp.device_put_sharded([x], tp.devices()[:1]),
        lambda x: tp.device_put_replicated(x, tp.devices()[:1]),
        lambda x: tp.init(3),
        lambda x: tp.resize(3),
        lambda x: tp.shutdown(),
    ],
    ids=["replicate", "device_put", "sharded", "replicated", "init", "resize", "shutdown"],
)
def test_devices_are_chosen_outside_of_mapped_functions(use, mode):
    tp.init(2)
    with pytest.raises(RuntimeError, match="was called inside a mapped function"):
        tp.pmap(lambda x: [use(x), x][1], compile=mode)(torch.arange(2.0))
    assert tp.device_count() == 2


def test_another_pool_is_there_when_a_call_has_been_traced():
    """Another thread has started it: the devices of the call are gone."""
    tp.init(4)

    def f(x):
        with beside(lambda: (tp.shutdown(), tp.init(2))):
            return x + 1

    with pytest.raises(tp.RuntimeClosed, match="the pool of devices was shut down"):
        tp.pmap(f, compile=EAGER)(torch.arange(4.0))
    assert tp.pmap(lambda x: x + 1, compile=EAGER)(torch.arange(2.0)).tolist() == [1, 2]


def in_a_forked_child(function):
    """(exit status, what ``function`` returned or raised) in an ``os.fork`` child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = repr(function())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        answer = stream.read()
    return os.waitpid(pid, 0)[1], answer


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_child_is_told_and_the_parent_goes_on():
    f = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)
    y, x = f(torch.ones(4)), torch.ones(4)
    pids = worker_pids()
    uses = {
        "call": lambda: f(x),
        "new function": lambda: tp.pmap(lambda x: x * 2, compile=EAGER)(x),
        "uncompiled": lambda: tp.pmap(lambda x: x * 2, compile=False)(x),
        "old value": lambda: y.cpu(),
        "place": lambda: tp.replicate(x),
    }
    for name, use in uses.items():
        status, answer = in_a_forked_child(use)
        assert status == 0
        assert answer.startswith("RuntimeClosed: this process was forked from the one that"), name
    assert in_a_forked_child(lambda: tp.shutdown() or tp.shutdown()) == (0, "None")
    assert y.tolist() == [4, 4, 4, 4]
    assert f(y).tolist() == [16, 16, 16, 16]
    assert worker_pids() == pids


def test_import_starts_and_opens_nothing():
    code = """
import gc, os, sys, threading
import torch, numpy, cloudpickle
before = len(os.listdir("/proc/self/fd")), threading.active_count(), set(sys.modules)
import torchpmap
import multiprocessing.resource_tracker
from torchpmap._runtime.local.forkserver import server
assert before[:2] == (len(os.listdir("/proc/self/fd")), threading.active_count())
assert server.pid is None
assert multiprocessing.resource_tracker._resource_tracker._pid is None
heavy = {"torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "sympy", "jax"}
print(sorted(heavy & set(sys.modules)))
assert gc.isenabled()
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no children")
"""
    assert Program("-c", code).wait().clean() == "[]\nno children\n"


def test_devices_have_the_environment_of_when_they_start():
    """As they have its folder and arguments; not of when the process began that forks them."""
    code = """
import os, torch, torchpmap as tp
from torchpmap._runtime.local.forkserver import server
os.environ |= {"CHANGED": "1", "GONE": "1"}
tp.config.shared_memory = False  # for which they would compile something
ask = tp.pmap(lambda x: print(*map(os.environ.get, ("CHANGED", "GONE", "NEW"))) or x, compile=False)
for number in 2, 3:
    tp.init(1, "cpu")
    forks = server.pid
    os.environ |= {"CHANGED": str(number), "NEW": "yes"}
    os.environ.pop("GONE", None)
    ask(torch.zeros(1))
    tp.shutdown()
    assert server.pid == forks
"""
    assert Program("-c", code).wait().clean() == "[cpu:0] 2 None yes\n[cpu:0] 3 None yes\n"


def test_devices_have_the_limit_of_descriptors_of_when_they_start():
    """An error about it says to raise it: that helps although the process that forks them runs."""
    code = """
import resource, torch, torchpmap as tp
from torchpmap._runtime.local.forkserver import server
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (12, hard))
server.ensure_running()
tp.config.shared_memory = False  # for which they would compile something
for soft in 12, 150:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        tp.init(1, "cpu")
        ask = lambda x: print(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) or x
        tp.pmap(ask, compile=False)(torch.zeros(1))
    except OSError as error:
        print(error.errno)
"""
    assert Program("-c", code).wait().clean() == "24\n[cpu:0] 150\n"


@TWO
def test_workers_are_started_by_the_next_caller_if_there_were_too_many_threads(monkeypatch):
    tp.shutdown()
    tp.init(2, DEVICE)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            tp.replicate(torch.ones(2))
    assert tp.replicate(torch.ones(2)).tolist() == [1, 1]
