"""Row 22 of the matrix: Ctrl-C in the controller.  See docs/faults.md."""

import collections
import itertools
import threading

import pytest
import torch
from _interrupts import interrupted_at
from _rig import (
    EAGER,
    N,
    assert_pool_works,
    busy,
    eagerly,
    endless_loop,
    interrupted_after,
    long_sleep,
    loop_of_c,
    on_rank,
    press,
    quarter,
    rows,
    sharded,
    survivors,
    total,
    until_interrupted,
    within,
)
from _support import DEVICE, beside, kill, mostly_long, running_pool, wait_for, worker_pids

import torchpmap as tp

HANGS = mostly_long([loop_of_c, endless_loop, long_sleep], endless_loop, long_sleep)

pytestmark = [
    pytest.mark.usefixtures("pool"),
    # Python drops Ctrl-C in a finalizer, and says so
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def call_until_interrupted(call, meanwhile=lambda: None):
    """How many calls end before one for which there is no room, which Ctrl-C ends.  ``meanwhile``:
    another thread calls it while that one waits.
    """
    calls, pool = 0, running_pool()
    seen = collections.deque(maxlen=8)

    def is_stuck():
        seen.append((calls, pool.outbox.unsent is None))
        return seen.count((calls, False)) == seen.maxlen

    def presser(over):
        pause = 0.0
        while not over.wait(pause):
            assert wait_for(is_stuck, seconds=20)
            meanwhile()
            press()
            pause = 0.5

    def counted():
        nonlocal calls
        call()
        calls += 1

    until_interrupted(presser, counted)
    return calls


def chain_until_interrupted():
    """The last result of such calls, of which each takes that of the one before."""
    x = rows

    def call():
        nonlocal x
        x = quarter(x)

    call_until_interrupted(call)
    return x


@pytest.mark.parametrize("ranks", [range(N), [2]], ids=["no rank has it", "some ranks have it"])
def test_row_22_ctrl_c_while_a_call_is_sent(ranks, tmp_path):
    """The next one must not meet the half of this one."""
    with busy(tmp_path / "open", ranks):
        x = chain_until_interrupted()
    assert within(5, lambda: total(rows * 2).tolist()).value == [12.0] * N
    assert within(5, lambda: x.tolist()).value == [1.5] * N
    assert_pool_works()


def test_row_22_what_ctrl_c_left_unsent_is_sent_although_no_call_follows(tmp_path):
    """Others wait for it in a collective."""
    pool = running_pool()
    with busy(tmp_path / "open", [2]):
        x = chain_until_interrupted()
        assert pool.outbox.unsent is not None
    assert wait_for(lambda: pool.outbox.unsent is None)
    assert wait_for(x.is_ready)


def test_row_22_ctrl_c_while_a_jitted_step_is_sent(tmp_path):
    """It has its effects: else a model would be gone that a training loop was stepping."""
    weight = tp.replicate(torch.nn.Parameter(torch.zeros(3)))
    count = tp.replicate(torch.zeros((), dtype=torch.int64))

    @tp.jit(compile=EAGER)
    def step():
        weight.grad = None
        (weight * torch.arange(3.0)).sum().backward()
        count.add_(1)
        return count + 0

    step()
    are_there = []
    with busy(tmp_path / "open", [2]):
        calls = call_until_interrupted(step, lambda: are_there.append(count._handle is not None))
    assert set(are_there) == {True}, "other threads can use it all the time"
    assert within(5, lambda: int(count)).value == calls + 2
    assert weight.grad.tolist() == [0, 1, 2]
    assert int(step()) == calls + 3
    assert_pool_works()


PARTS = "_start", "change", "_change", "give_up", "_send_call", "_post_call", "post", "advance"


def sends_a_step(code):
    """Whether code sends a step or has its effects."""
    return code.co_name in PARTS and "torchpmap" in code.co_filename


def test_row_22_ctrl_c_at_any_line_of_a_jitted_step():
    """All that the step writes is as it was before it, or as it is after it."""
    weight = tp.replicate(torch.nn.Parameter(torch.zeros(3)))
    count = tp.replicate(torch.zeros((), dtype=torch.int64))
    optimizer = torch.optim.Adam([weight], lr=0.5)

    @tp.jit(compile=EAGER)
    def step():
        optimizer.zero_grad()
        (weight * torch.arange(3.0)).sum().backward()
        optimizer.step()
        count.add_(1)

    step()
    found, calls = set(), 1
    for number in itertools.count(1):
        if not interrupted_at(number, step, sends_a_step):
            break
        found.add(int(count) - calls)
        calls = int(count)
        assert weight.grad.tolist() == [0, 1, 2]
        assert optimizer.state[weight]["step"] == calls
        # Adam's steps are as long as the rate where the gradient stays the same
        assert weight.tolist() == pytest.approx([0, -calls / 2, -calls / 2], rel=1e-3)
    assert found == {0, 1}
    assert_pool_works()


@pytest.mark.parametrize("number", mostly_long(range(1, 6), 4))
def test_row_22_ctrl_c_while_a_repair_begins(number):
    pid = worker_pids()[1]
    kill(pid)
    assert wait_for(lambda: running_pool().broken)
    start = threading.Thread.start.__code__
    interrupted_at(number, lambda: total(rows).tolist(), lambda code: code is start)
    within(20, lambda: total(rows).tolist())
    assert worker_pids()[1] != pid
    assert_pool_works()


def test_row_22_ctrl_c_at_any_moment():
    """Also while a large block is sent; after each, everything works and nothing is lost."""
    large = torch.ones(N, 300_000)
    value = quarter(large).block_until_ready()

    def calls():
        quarter(large)
        quarter(value)
        quarter(value)

    step = eagerly(lambda x: tp.psum(x, "i") / N)
    step(rows).block_until_ready()
    with survivors():
        for microseconds in range(10, 4000, 80):
            interrupted_after(microseconds * 1e-6, calls)
            interrupted_after(microseconds * 1e-6, lambda: step(rows))
        assert within(5, lambda: step(rows).tolist()).value == [1.5] * N
    assert within(20, lambda: quarter(value)[0, 0].item()).value == 1
    assert within(20, lambda: quarter(large)[1, -1].item()).value == 1
    assert_pool_works()


def test_row_22_ctrl_c_during_a_repair():
    quarter(rows).block_until_ready()
    for milliseconds in (1, 2, 4, 8, 16, 32, 64):
        pool = running_pool()
        kill(worker_pids()[1])
        assert wait_for(lambda pool=pool: pool.broken)
        interrupted_after(milliseconds * 1e-3, lambda: quarter(rows))
        assert within(5, lambda: quarter(rows).tolist()).value == [1.5] * N
    assert_pool_works()


@pytest.mark.parametrize("others", ["alone", "others wait"])
@pytest.mark.parametrize("hang", HANGS, ids=lambda f: f.__name__)
def test_row_22_the_call_that_ctrl_c_ends_does_not_go_on(hang, others):
    """There is no timeout; a rank that Ctrl-C cannot reach is replaced."""
    dead, bound = ([2], 13) if hang is loop_of_c else ([], 1)
    with survivors(*dead):
        interrupted_after(0.5, lambda: eagerly(on_rank(2, hang, others))(rows))
        assert within(bound, lambda: total(rows).tolist()).value == [6.0] * N


def raised_first(x):
    if int(tp.axis_index("i")) == 0:
        raise ValueError("first")
    return on_rank(2, loop_of_c, "alone")(x)


@pytest.mark.long
def test_row_22_a_rank_that_no_failure_reaches_is_replaced_after_ctrl_c():
    """A caller that waits for it is interrupted, not the one that has made it hang."""
    value = sharded()
    with pytest.raises(ValueError, match="first"):
        eagerly(raised_first)(rows)
    interrupted_after(0.5, lambda: total(rows))
    assert within(13, lambda: total(rows).tolist()).value == [6.0] * N
    with pytest.raises(tp.ShardLost, match=f"{DEVICE}:2") as caught:
        value[2].item()
    note = "it went on after its call had failed or was interrupted"
    assert any(note in each for each in caught.value.__cause__.__notes__)


@pytest.mark.parametrize("hang", HANGS, ids=lambda f: f.__name__)
def test_row_22_ctrl_c_ends_a_compilation(hang, tmp_path):
    begun = tmp_path / "begun"

    def compile(graph, examples):
        begun.touch()
        hang()
        return graph.forward

    def press_then():
        wait_for(begun.exists, 100)
        press()

    loaded = tp.pmap(lambda x: x + 1, compile={"backend": lambda graph, _: graph.forward})
    loaded(rows).block_until_ready()  # the workers import the compiler
    step = tp.pmap(lambda x: x + 1, compile={"backend": compile})
    with survivors(*([0] if hang is loop_of_c else [])):
        with beside(press_then), pytest.raises(KeyboardInterrupt):
            step(rows)
        bound = 13 if hang is loop_of_c else 1
        assert within(bound, lambda: total(rows).tolist()).value == [6.0] * N


@pytest.mark.inductor
def test_row_22_a_compilation_works_after_ctrl_c_at_any_moment():
    step = tp.pmap(lambda x: (x.sin() * 3).cumsum(0) @ torch.ones(7))
    x = torch.linspace(0, 1, 4 * 7).reshape(4, 7)
    with survivors():
        for seconds in (0.05, 0.2, 0.4, 0.8, 1.6):
            interrupted_after(seconds, lambda: step(x))
        expected = (x.sin() * 3).sum(1) * 0 + (x.sin() * 3).cumsum(1).sum(1)
        torch.testing.assert_close(
            within(60, lambda: tp.device_get(step(x))).value, expected.numpy()
        )


def test_row_22_what_stands_behind_an_interrupted_call_says_so():
    behind = []

    def call_behind():
        assert wait_for(lambda: running_pool().monitor.pending)
        behind.append(total(rows))

    with survivors():
        total(rows).block_until_ready()
        with beside(call_behind):
            interrupted_after(1, lambda: eagerly(on_rank(2, endless_loop, "alone"))(rows))
        with pytest.raises(tp.PmapError, match="step did not end: it was interrupted in the call"):
            behind[0].tolist()
