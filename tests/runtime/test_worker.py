"""Covers: _runtime/local/worker.py: what the user's code, and a lack of memory, can do to a worker.

Its stream stays in order, its errors stay what they are, values are what tracing promised, and no
process that the code makes outlives its worker (nor the controller: test_contexts.py).
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import struct
import subprocess
import threading
import time
import warnings
import weakref

import pytest
import torch
from _support import (
    DEVICE,
    EAGER,
    TRACED,
    eagerly,
    is_running,
    pool_with,
    running_pool,
    wait_for,
    worker_pids,
)
from torch.utils.data import DataLoader, TensorDataset

import torchpmap as tp
from torchpmap._runtime import current, wire

pytestmark = [
    pytest.mark.usefixtures("pool"),
    pytest.mark.parametrize("pool", [2], indirect=True),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

rows = torch.arange(2.0)
total = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)


@pytest.fixture
def unharmed():
    """A value lives on, on workers that do."""
    value, pids = tp.pmap(lambda x: x + 1, compile=EAGER)(rows).block_until_ready(), worker_pids(2)
    yield
    assert value.tolist() == [1, 2]
    assert worker_pids(2) == pids
    assert total(rows).tolist() == [1, 1]


@pytest.fixture(params=[False, True], ids=["socket", "shared"])
def shares(request):
    """Whether collectives use shared memory."""
    with pool_with(2, shared_memory=request.param):
        yield request.param


def test_warnings_as_errors_stay_in_the_call(unharmed):
    def step(x):
        warnings.simplefilter("error")
        warnings.warn("raised", stacklevel=1)
        return x

    with pytest.raises(UserWarning, match="raised"):
        eagerly(step)(rows)


@torch.library.custom_op("torchpmap_tests::trip", mutates_args=())
def trip(x: torch.Tensor, rank: torch.Tensor, dies: bool) -> torch.Tensor:
    if int(rank) == 1:
        if dies:
            os._exit(3)
        raise ValueError("tripped")
    return x.clone()


@trip.register_fake
def _(x, rank, dies):
    return torch.empty_like(x)


IN_CPP = {"options": {"cpp_wrapper": True}}
COMPILERS = [
    *TRACED,
    pytest.param(False, id="uncompiled"),
    pytest.param({"backend": "aot_eager"}, id="aot", marks=pytest.mark.long),
    pytest.param(
        IN_CPP,
        id="inductor in C++",
        marks=[
            pytest.mark.inductor,
            pytest.mark.skipif(DEVICE != "cpu", reason="torch 2.11 aborts where a kernel raises"),
        ],
    ),
]


def step_that_trips(x, dies):
    return tp.psum(torch.ops.torchpmap_tests.trip(x, tp.axis_index("i"), dies), "i")


@pytest.mark.parametrize("compile", COMPILERS)
def test_the_other_rank_has_the_consequence(compile, shares):
    """Rank 0, whose collective breaks off, is not taken for the cause."""
    step = tp.pmap(step_that_trips, "i", static_broadcasted_argnums=1, compile=compile)
    # this compiler keeps neither type nor text
    in_cpp = (RuntimeError, "torchpmap_tests::trip")
    kind, text = in_cpp if compile == IN_CPP else (ValueError, "tripped")
    with pytest.raises(kind, match=text) as caught:
        step(rows, False).tolist()
    (note,) = caught.value.__notes__
    assert f"on device {DEVICE}:1" in note
    with pytest.raises(tp.WorkerDied, match="exit code 3"):
        step(rows, True).tolist()


def this_worker():
    """The worker that runs the mapped function which asks."""
    (worker,) = (o for o in gc.get_objects() if type(o).__name__ == "_Worker")
    return worker


BAD_FRAMES = {
    "unknown kind": lambda seq: wire.HEADER.pack(0, 99, seq),
    "an answer without a request": lambda seq: wire.frame(wire.REPLY, 3, b"12345"),
    "an answer too large for any memory": lambda seq: wire.HEADER.pack(1 << 60, wire.REPLY, seq),
}


@pytest.mark.parametrize("make", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_frames_of_a_worker_gone_mad(make):
    """Nothing hangs, and the next call is right."""
    seq = running_pool().seq + 2

    def step(x):
        if int(tp.axis_index("i")) == 1:
            this_worker().stream.send([make(seq)])
        return x

    with contextlib.suppress(tp.PmapError):
        assert eagerly(step)(rows).tolist() == [0, 1]
    tp.shutdown()
    assert total(rows).tolist() == [1, 1]


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("<5q", 5, -1, 0, 999, 0),
        struct.pack("<6q", 5, -1, 0, 0, 1 << 40, 0),
        struct.pack("<6q", 5, -1, 0, 0, 1, -1),
        struct.pack("<6q", 5, -1, 0, 0, 1, 3) + bytes(100),
    ],
    ids=["dtype", "dims", "shape", "length"],
)
def test_block_unlike_its_header_ends_the_worker(body):
    value = tp.pmap(lambda x: x + 1, compile=EAGER)(rows).block_until_ready()
    pool = running_pool()
    pool.in_order(pool.tell, [1], wire.PUT, body)
    assert wait_for(lambda: pool.broken)
    with pytest.raises(tp.ShardLost, match=rf"{DEVICE}:1(.|\n)*broken frame"):
        value.tolist()
    assert total(rows).tolist() == [1, 1]


def uses_processes(x):
    readable, writable = os.pipe()
    if os.fork() == 0:
        os.write(writable, b"41")
        os._exit(0)
    said = subprocess.run(["echo", "1"], capture_output=True, check=True).stdout
    return tp.psum(x * 0 + float(os.read(readable, 2)) + float(said), "i")


def test_thread_left_behind_does_not_keep_the_worker():
    def step(x):
        threading.Thread(target=threading.Event().wait).start()
        return x

    assert eagerly(step)(rows).tolist() == [0, 1]
    tp.shutdown()


def loaded(x):
    data = TensorDataset(torch.arange(8.0) + x)
    return torch.stack([batch.sum() for (batch,) in DataLoader(data, batch_size=4, num_workers=1)])


def pooled(x):
    with multiprocessing.Pool(2) as pool:
        return x + sum(pool.map(abs, [-1, -2, -3]))


NO_GPU = pytest.mark.skipif(DEVICE != "cpu", reason="a forked process cannot use a GPU")


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (uses_processes, [84, 84]),
        (pooled, [6, 7]),
        pytest.param(loaded, [[6, 22], [10, 26]], marks=NO_GPU),
    ],
)
def test_processes_of_the_function(fun, expected, unharmed):
    for _ in range(2):
        assert eagerly(fun)(rows).tolist() == expected


def leaves_a_child(method, daemon):
    def fun(x):
        context = multiprocessing.get_context(method)
        child = context.Process(target=time.sleep, args=(1000,), daemon=daemon)
        child.start()
        return x.long() * 0 + child.pid

    return fun


def leaves_a_child_of_a_child(x):
    taken, given = multiprocessing.Pipe()
    multiprocessing.Process(target=has_a_child, args=(given,)).start()
    return x.long() * 0 + taken.recv()


def has_a_child(given):
    child = multiprocessing.Process(target=time.sleep, args=(1000,))
    child.start()
    given.send(child.pid)
    child.join()


LEAVING = {
    f"{method}-{daemon}": leaves_a_child(method, daemon)
    for method in ("fork", "spawn")
    for daemon in (False, True)
} | {"child of a child": leaves_a_child_of_a_child}


@pytest.mark.parametrize("fun", LEAVING.values(), ids=LEAVING)
def test_a_child_ends_with_the_pool(fun):
    children = eagerly(fun)(rows).tolist()
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


def backend(change):
    """One whose graphs give what this makes of their outputs."""
    return lambda graph, examples: lambda *xs: change(graph(*xs))


WRONG = {
    "dtype": (lambda ys: [y.double() for y in ys], "float64[1, 2], float64[1, 2]"),
    "one output": (lambda ys: ys[:1], "float32[1, 2]"),
    "no tensors": (lambda ys: [y.tolist() for y in ys], "list, list"),
}


@pytest.mark.parametrize(("change", "gave"), WRONG.values(), ids=WRONG)
def test_plan_that_gives_something_else(change, gave, unharmed):
    f = tp.pmap(lambda x: (x + 1, x + 2), compile={"backend": backend(change)})
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            f(torch.zeros(2, 2))[0].tolist()
        assert str(caught.value) == (
            f"<lambda>: it gives other values than it was traced to give. It gave {gave} on device "
            f"{DEVICE}:0, but tracing promised float32[1, 2], float32[1, 2]. Either it depends on "
            "a setting that the devices do not have, or the backend compiles it wrong; "
            "compile=False runs it without such a promise."
        )


def test_outputs_are_contiguous_whatever_the_backend_gives():
    x = torch.arange(12.0).reshape(2, 2, 3)
    transposed = backend(lambda ys: [y.mT.contiguous().mT for y in ys])
    f = tp.pmap(lambda x: x + 1, compile={"backend": transposed})
    strides = eagerly(lambda x: torch.tensor(x.stride()))
    for _ in range(3):
        y = f(x)
        assert strides(y).tolist() == [[3, 1]] * 2
        assert torch.equal(y.cpu(), x + 1)


def lie(name, real, fake=torch.empty_like):
    name, schema = f"torchpmap_tests::{name}", "(Tensor x) -> Tensor"
    operation = torch.library.custom_op(name, real, mutates_args=(), schema=schema)
    operation.register_fake(fake)
    return operation


LIES = {
    "dtype": (lie("as_double", lambda x: x.double()), "float64[4]", "float32[4]"),
    "shape": (lie("shorter", lambda x: x[:2].clone()), "float32[2]", "float32[4]"),
}


@pytest.mark.parametrize(("operation", "gives", "promises"), LIES.values(), ids=LIES)
@pytest.mark.parametrize("compile", [EAGER, {"backend": "aot_eager"}], ids=["graph", "aot"])
def test_fake_kernel_that_lies(operation, gives, promises, compile, unharmed):
    f = tp.pmap(lambda x: (operation(x) + 1).sum(), compile=compile)  # hides it in the outputs
    name = operation._qualname
    for _ in range(2):
        with pytest.raises(RuntimeError, match="register_fake") as caught:
            f(torch.ones(2, 4)).tolist()
        text = str(caught.value)
        assert text.startswith(f"<lambda>: the operation {name} gives {gives} ({DEVICE}")
        assert f"promises {promises} ({DEVICE}" in text


def shift(x):
    return x + 1


honest = lie("shift", shift)
in_columns = lie(
    "columns", lambda x: torch.stack([x, x], 1).t(), lambda x: x.new_empty(2, *x.shape)
)
LOOPS = {
    "scan": lambda f, x: tp.scan(lambda c, _: (c, f(c)), x, None, length=2)[1][1],
    "while": lambda f, x: tp.while_loop(lambda c: c.sum() < 5, lambda c: c + f(c)[0], x),
    "cond": lambda f, x: tp.cond(x.sum() > 0, f, lambda x: x + 1, x),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_fake_kernel_in_a_loop(loop, unharmed):
    """Of the graphs in a graph the operations are compared too."""
    f = tp.pmap(
        lambda operation, x: loop(operation, x), static_broadcasted_argnums=0, compile=EAGER
    )
    x = torch.ones(2, 4)
    assert torch.equal(f(honest, x).cpu(), tp.vmap(lambda x: loop(shift, x))(x))
    with pytest.raises(RuntimeError, match=r"gives float32.*but its fake kernel .* promises"):
        f(LIES["shape"][0], x).tolist()


@pytest.mark.parametrize(
    "compile", [{"backend": "aot_eager"}, pytest.param(True, marks=pytest.mark.inductor)]
)
def test_fake_kernel_that_lies_about_strides(compile):
    """Only compiled code relies on them."""
    x = torch.arange(8.0).reshape(2, 4)
    expected = torch.stack([x, x], 1) + 1
    assert torch.equal(tp.pmap(lambda x: in_columns(x) + 1, compile=EAGER)(x).cpu(), expected)
    with pytest.raises(RuntimeError, match=r"strides \[1, 2\].*promises .*strides \[4, 1\]"):
        tp.pmap(lambda x: in_columns(x) + 1, compile=compile)(x).tolist()


def test_fetch_of_another_kind_is_refused(unharmed):
    value = tp.pmap(lambda x: x + 1, compile=EAGER)(rows)
    runtime = current.runtime()
    for target in (torch.empty(1, dtype=torch.float64), torch.empty(2), torch.empty(1, 1)):
        found = rf"on device {DEVICE}:0 is float32\[1\], but .* expected"
        with pytest.raises(RuntimeError, match=found):
            runtime.fetch(value._handle, [(0, -1, 0, target)])


def test_a_stored_value_keeps_nothing_of_the_pass_that_made_it():
    """The devices would hold every activation as long as the value."""
    w = torch.ones(1, requires_grad=True)

    def step(x):
        inner = x * w
        this_worker.inner = weakref.ref(inner)
        return inner.sin()

    kept = eagerly(step)(rows)
    assert eagerly(lambda x: torch.tensor(this_worker.inner() is None))(rows).all()
    assert kept.requires_grad


def test_an_uncompiled_call_fails_if_an_abort_may_have_cut_its_last_collective(pool):
    """A device tells nothing of a collective that was aborted."""

    def cut_at_the_end(x):
        worker = this_worker()

        def synchronize():
            del worker.platform.synchronize
            worker.groups.abort(worker.groups.epoch)

        worker.platform.synchronize = synchronize
        return x + 1

    with pytest.raises(tp.CollectiveMismatch, match="without a cause"):
        eagerly(cut_at_the_end)(rows)
    assert total(rows).tolist() == [1, 1]
