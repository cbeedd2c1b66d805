"""The same faults where processes do not share memory: collectives go through Gloo."""

import pytest
import test_compiled
import test_deaths
import test_disagreement
import test_exceptions
from _rig import N, eagerly, rows
from _support import pool_with

import torchpmap as tp

pytestmark = [pytest.mark.usefixtures("over_gloo"), pytest.mark.cpu_only("GPUs share no memory")]


def shares_memory(x):
    x = tp.psum(x, "i")
    with open("/proc/self/maps") as maps:
        return x * 0 + ("memfd:torchpmap-group" in maps.read())


@pytest.fixture
def over_gloo(pool):
    assert eagerly(shares_memory)(rows).tolist() == [1.0] * N
    with pool_with(N, shared_memory=False):
        assert eagerly(shares_memory)(rows).tolist() == [0.0] * N
        yield


def test_row_02_death():
    test_deaths.test_row_02_killed_while_the_others_wait_in_a_collective(1)


def test_row_02_death_in_a_compiled_call():
    test_compiled.test_killed_in_a_compiled_call()


def test_row_08_exception():
    test_exceptions.test_row_08_exception_on_one_rank("between")


def test_row_13_disagreement():
    test_disagreement.test_a_value_is_never_returned("row_13_operation", 1)
