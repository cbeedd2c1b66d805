"""Covers: _runtime/local/waits.py, without a clock and without workers."""

import os
import subprocess
from unittest.mock import Mock

import pytest
from _support import wait_for
from hypothesis import given
from hypothesis import strategies as st

from torchpmap._runtime.local.forkserver import child_programs
from torchpmap._runtime.local.waits import Awaited, Limit, Rank, Waits, helped, notice

CALL = Awaited("it runs a call", 7)
NEXT = Awaited("it runs a call", 8)


def looks(*steps):
    """What a waits says at each of (time, who is awaited for what, states of the processes)."""
    waits = Waits()
    return [waits.look(now, awaited, states.__getitem__) for now, awaited, states in steps]


QUIET = ([], [])
CASES = {
    "as long as it is there": ([(0, {0: CALL}, "t"), (6, {0: CALL}, "t"), (7, {0: CALL}, "t")],
        [QUIET, ([0], []), ([0], [])]),
    "two of three": (
        [(0, dict.fromkeys(range(3), CALL), "TRt"), (5, dict.fromkeys(range(3), CALL), "TRt")],
        [QUIET, ([0, 2], [])]),
    "a slow one, told once": ([(0, {0: CALL}, "R"), (30, {0: CALL}, "S"), (60, {0: CALL}, "R")],
        [QUIET, ([], [(0, "S", 30)]), QUIET]),
    "many short waits are not a long one": (
        [(0, {0: CALL}, "R"), (20, {0: NEXT}, "R"), (40, {0: NEXT}, "R"), (50, {0: NEXT}, "R")],
        [QUIET, QUIET, QUIET, ([], [(0, "R", 30)])]),
    "a state that is not known": ([(0, {0: CALL}, [""]), (29, {0: CALL}, [""])], [QUIET] * 2),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "said"), CASES.values(), ids=CASES)
def test_look(steps, said):
    assert looks(*steps) == said


@given(st.lists(st.tuples(st.floats(0.1, 20), st.sampled_from("RSDTt"), st.booleans())))
def test_only_a_process_that_was_stopped_all_the_time_is_ended(steps):
    waits, now, stopped_for = Waits(), 0.0, 0.0
    was_stopped = False
    for pause, state, is_awaited in steps:
        now += pause
        is_stopped = is_awaited and state in "Tt"
        stopped_for = stopped_for + pause if is_stopped and was_stopped else 0.0
        was_stopped = is_stopped
        ended, _ = waits.look(now, {0: CALL} if is_awaited else {}, lambda _, state=state: state)
        if ended:
            assert stopped_for > 4.99
        if stopped_for > 5.01:
            assert ended == [0]


SENT = Rank(6, 6)
"""Done with all that was sent before call 8."""
BUSY, RUNS, DONE = Rank(6, 7), Rank(7, 8), Rank(8, 8)
COMPILES = Rank(6, 7, compiles=True)
AHEAD = Rank(6, 7, host=9)  # the device is at call 7
LIMITS = {  # (time, the two ranks), the last of which is over the limit of a second if that says so
    "it takes too long": ([(0.5, RUNS, RUNS), (1, RUNS, RUNS)], [0, 1]),
    "one rank does": ([(0.5, RUNS, DONE), (1, RUNS, DONE)], [0]),
    "it ends in time": ([(0.5, RUNS, RUNS), (1, DONE, DONE)], None),
    "it is queued": ([(5, BUSY, BUSY)], None),
    "its time begins when a rank begins it": ([(5, BUSY, BUSY), (6, RUNS, BUSY)], None),
    "and ends a second later": ([(5, BUSY, BUSY), (6, RUNS, BUSY), (7, RUNS, BUSY)], [0, 1]),
    "a rank is between two commands": ([(4, BUSY, BUSY), (5, SENT, BUSY)], None),
    "a rank does not begin it": ([(4, SENT, DONE), (5, SENT, DONE), (6, SENT, DONE)], [0]),
    "one compiles": ([(5, RUNS, COMPILES), (6, RUNS, RUNS), (6.9, RUNS, RUNS)], None),
    "its device is at another call": ([(5, AHEAD, AHEAD), (9, AHEAD, AHEAD)], None),
    "its process is at another call": ([(5, Rank(6, 6, 7), DONE), (9, Rank(6, 6, 7), DONE)], None),
}


@pytest.mark.parametrize(("steps", "late"), LIMITS.values(), ids=LIMITS)
def test_a_call_with_a_timeout(steps, late):
    waits = Waits()
    waits.limits[8] = limit = Limit(8, 0, (0, 1), 1.0, "step", 1.0)
    found = [waits.overdue(now, ranks.__getitem__, {}.get) for now, *ranks in steps]
    assert found == [None] * (len(steps) - 1) + [late and (limit, late)]


def test_a_rank_that_runs_nothing_is_not_late():
    waits = Waits()
    waits.limits[8] = Limit(8, 0, (0, 1), 1.0, "step", 1.0)
    assert waits.overdue(1.0, lambda rank: RUNS, lambda rank: True) is None
    assert not waits.limits


def test_a_look_reads_each_rank_once_whatever_the_number_of_calls():
    """The thread that looks reads the answers, too."""
    waits, read = Waits(), Mock(return_value=BUSY)
    for seq in range(8, 5008):
        waits.limits[seq] = Limit(seq, 0, (0, 1), 1.0, "step", 1.0)
    assert waits.overdue(5.0, read, Mock(return_value=False)) is None
    assert read.call_count == 2


@pytest.mark.parametrize(
    ("state", "programs", "said"),
    [
        ("S", [], "asleep, or waiting for another device"),
        ("S", ["g++"], "the C++ compiler is running"),
        ("S", ["sh", "cc1plus"], "the C++ compiler is running"),
        ("S", ["clang-17"], "the C++ compiler is running"),
        ("S", ["ptxas"], "ptxas is running"),
        ("R", ["g++"], "computing"),
        ("T", ["g++"], "stopped, by SIGSTOP"),
    ],
)
def test_a_process_that_waits_for_a_program(state, programs, said):
    line = notice([("cpu:0", "it compiles step", helped(state, programs))], 31)
    assert line == f"torchpmap: waiting for 31 s for cpu:0: it compiles step ({said})"


def test_the_programs_that_a_process_has_started():
    with subprocess.Popen(["sleep", "60"]) as child:
        assert wait_for(lambda: "sleep" in child_programs(os.getpid()))
        child.kill()
    assert "sleep" not in child_programs(os.getpid())
    assert child_programs(child.pid) == []


def test_notice():
    ranks = [
        (f"cpu:{k} (rank {k}, pid 7{k})", "it runs step", state) for k, state in enumerate("S")
    ]
    assert notice(ranks, 30.4) == (
        "torchpmap: waiting for 30 s for cpu:0 (rank 0, pid 70): it runs step "
        "(asleep, or waiting for another device)"
    )
    many = notice([(f"cpu:{k}", "it starts", "") for k in range(9)], 31)
    assert many.count("not known") == 4
    assert many.endswith("; and 5 more")
    assert "more" not in notice([(f"cpu:{k}", "it starts", "") for k in range(4)], 31)
