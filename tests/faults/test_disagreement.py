"""Rows 13 to 17 of the matrix: ranks run different collectives.  See docs/faults.md."""

import contextlib

import pytest
import torch
from _rig import EAGER, N, assert_pool_works, eagerly, failure, rows, within
from _support import beside, pool_with, wait_for

import torchpmap as tp
from torchpmap._runtime import current

pytestmark = pytest.mark.usefixtures("pool")


def orders(x, odd):
    if odd:
        b = tp.pmax(x + 1, "i")
        return b + tp.psum(x, "i")
    a = tp.psum(x, "i")
    return a + tp.pmax(x + 1, "i")


def returns_early(x, odd):
    x = tp.psum(x, "i")
    return x if odd else tp.psum(x, "i")


def in_groups(x, groups):
    return tp.psum(x, "i", axis_index_groups=groups)


def shifted(x, step):
    return tp.ppermute(x, "i", [(k, (k + step) % N) for k in range(N)])


PROGRAMS = {
    "row_13_operation": lambda x, odd: tp.all_gather(x, "i").sum() if odd else tp.psum(x, "i"),
    "row_13_reduction": lambda x, odd: tp.pmax(x, "i") if odd else tp.psum(x, "i"),
    "row_14_shape": lambda x, odd: tp.psum(torch.ones(3 if odd else 2), "i").sum(),
    "row_14_number_of_dims": lambda x, odd: tp.psum(torch.ones((2, 2) if odd else (4,)), "i").sum(),
    "row_15_dtype": lambda x, odd: tp.psum(
        torch.ones(2, dtype=torch.int32 if odd else torch.float32), "i"
    ).sum(),
    "row_15_order": orders,
    "row_15_permutation": lambda x, odd: shifted(x, 2 if odd else 1),
    "row_15_groups": lambda x, odd: in_groups(x, [[0, 1], [2, 3]] if odd else [[0, 2], [1, 3]]),
    "row_16_a_rank_returns_early": returns_early,
    "row_16_a_rank_does_one_more": lambda x, odd: returns_early(x, not odd),
}
"""What a rank does; one is the odd one.  If only an argument differs, it is that of one line.

Programs that would exchange equal values are in tests/trace/test_agreement.py.
"""


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("odd_rank", [0, 1, N - 1])
def test_a_value_is_never_returned(program, odd_rank):
    run = PROGRAMS[program]

    def step(x):
        return run(x, int(tp.axis_index("i")) == odd_rank)

    failure(step, tp.CollectiveMismatch, 1.5)


def shares_memory(x):
    x = tp.psum(x, "i")
    with open("/proc/self/maps") as maps:
        return x * 0 + ("memfd:torchpmap-group" in maps.read())


@pytest.mark.cpu_only("GPUs share no memory")
def test_row_13_over_gloo():
    """More of what goes wrong without shared memory: runtime/test_worker.py."""
    assert eagerly(shares_memory)(rows).tolist() == [1.0] * N
    with pool_with(N, shared_memory=False):
        assert eagerly(shares_memory)(rows).tolist() == [0.0] * N
        test_a_value_is_never_returned("row_13_operation", 1)


@pytest.mark.parametrize("then", ["returns", "runs the same collective", "runs it twice"])
def test_row_12_a_mismatch_that_the_function_catches(then):
    """The call fails in any case: what differed must not be lost."""

    def step(x):
        try:
            x = tp.psum(x, "i") if int(tp.axis_index("i")) == 1 else tp.pmax(x, "i")
        except Exception:
            for _ in range({"returns": 0, "runs the same collective": 1, "runs it twice": 2}[then]):
                with contextlib.suppress(Exception):
                    x = tp.psum(x, "i")
        return x

    error = failure(step, tp.CollectiveMismatch, 1.5)
    assert "all_reduce max" in str(error)


def test_row_17_unbound_axes_and_foreign_threads():
    runtime = current.runtime()
    pool = runtime._pool
    # what an earlier test has dropped is told to the workers when no call comes
    assert wait_for(lambda: not any(team.released for team in runtime._teams.values()), 5)
    seq = pool.seq

    def unbound():
        tp.pmap(lambda x: tp.psum(x, "j"), "i", compile=EAGER)(rows)

    error = within(1, unbound).error
    assert isinstance(error, NameError)
    assert "unbound axis name: j. Bound here: 'i' (size 4)" in str(error)
    error = within(0.1, lambda: tp.psum(rows, "i")).error
    assert isinstance(error, NameError)
    assert pool.seq == seq, "something was sent"

    def in_a_thread(x):
        with beside(tp.psum, x, "i") as found:
            return found.result()

    outcome = within(1, lambda: eagerly(in_a_thread)(rows).tolist())
    assert isinstance(outcome.error, NameError) or outcome.value == [6.0] * N
    assert_pool_works()
