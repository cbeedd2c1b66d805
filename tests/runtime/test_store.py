"""Covers: _runtime/torchrun/store.py, _base/data.py, _base/deadline.py, and of
_runtime/torchrun/rendezvous.py what needs no job.
"""

import collections
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _launched import Runs, free_port
from _support import beside, wait_for
from hypothesis import given, settings
from hypothesis import strategies as st

import torchpmap as tp
from torchpmap._base.config import Config
from torchpmap._base.data import packed, unpacked
from torchpmap._base.deadline import Deadline
from torchpmap._runtime.groups.process_groups import Groups
from torchpmap._runtime.torchrun import watch
from torchpmap._runtime.torchrun.place import JobPlace
from torchpmap._runtime.torchrun.rendezvous import Rendezvous, Waiting
from torchpmap._runtime.torchrun.store import JobStore

# -- a store that does not answer ------------------------------------------------------------------

KEEPER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def keeper() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that keeps a store, and the store's port."""
    port = free_port()
    command = [sys.executable, "-c", KEEPER, str(port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process, port
        finally:
            process.kill()


@pytest.fixture(scope="module")
def stopped_store() -> Iterator[JobStore]:
    """One that was used, and whose process was stopped then."""
    with keeper() as (process, port):
        raw = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store = JobStore(raw, 60.0).prefixed("of the job")
        store.set("key", b"value")
        assert store.get("key") == b"value"
        assert store.check(["key"])
        assert not store.check(["key", "other"])
        assert store.add("count", 2) == 2
        store.delete_key("key")
        os.kill(process.pid, signal.SIGSTOP)
        store.limit(0.2)
        yield store


def test_a_store_that_is_stopped_is_waited_for_until_the_limit(stopped_store):
    """All that ``JobStore`` asks would hang without it; the first one finds out."""

    def ask_beside() -> None:
        with pytest.raises(dist.DistNetworkError):
            stopped_store.get("key")

    with beside(ask_beside), pytest.raises(dist.DistNetworkError):
        stopped_store.check(["key"])
    for ask in (
        lambda: stopped_store.check(["key"]),
        lambda: stopped_store.get("key"),
        lambda: stopped_store.set("key", b""),
        lambda: stopped_store.add("count", 1),
        lambda: stopped_store.delete_key("key"),
        lambda: stopped_store.prefixed("part").check(["key"]),
    ):
        with pytest.raises(dist.DistNetworkError, match="the connection to it broke off before"):
            ask()


def test_the_watch_stops_although_the_store_does_not_answer_it(monkeypatch):
    monkeypatch.setattr(watch, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(watch, "_STOPPING_S", 0.1)
    with keeper() as (process, port):
        raw = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        rendezvous = Rendezvous.__new__(Rendezvous)  # it would meet the others
        rendezvous.place = JobPlace(0, 2, 0, 2, "127.0.0.1", port, "torchrun")
        rendezvous.store = store = JobStore(raw, 1000.0)
        rendezvous.calls = rendezvous._turns = collections.Counter()
        rendezvous._gone = set()
        os.kill(process.pid, signal.SIGSTOP)
        groups = Groups(0, torch.device("cpu"), raw, Config())
        running = watch.Watch(rendezvous, groups, SimpleNamespace(verdict=None))
        running.begin(running.announced((0, 1), "total", None))
        assert wait_for(store._connection.in_use.locked)
        running.stop()
        assert not running._thread.is_alive()


def test_a_store_without_a_socket():
    store = JobStore(dist.HashStore(), 1.0)
    store.set("key", b"value")
    assert store.get("key") == b"value"


def test_deadline():
    assert Deadline(0).passed
    assert Deadline(0).left() == 0
    assert Deadline(-1).left() == 0
    assert list(Deadline(0).pauses()) == [0.0]  # one look
    assert not Deadline(1000).passed
    assert 0 < Deadline(1000).left() <= 1000


# -- data ------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "left right")

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float32, torch.bfloat16, torch.Size([2, 3])]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.booleans()), inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4).map(collections.OrderedDict)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.binary())
    ),
    max_leaves=20,
)


def types(value):
    """The types in a value, in order."""
    if isinstance(value, dict):
        return [type(value), *map(types, value), *map(types, value.values())]
    if isinstance(value, list | tuple):
        return [type(value), *map(types, value)]
    return type(value)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(value=VALUES)
def test_what_is_packed_comes_back(value):
    found = unpacked(packed(value))
    assert found == value
    assert types(found) == types(value)


def test_odd_numbers_come_back():
    for value in (np.float16(2.5), np.int64(-3), np.bool_(True), np.complex64(1j)):
        found = unpacked(packed(value))
        assert type(found) is type(value)
        assert found == value
    assert math.isnan(unpacked(packed(float("nan"))))
    assert unpacked(packed(10**5000)) == 10**5000
    assert unpacked(packed([-0.0, math.inf, -math.inf])) == [-0.0, math.inf, -math.inf]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(data=st.binary() | st.text(alphabet='[]{}",:0123456789.eE-tupleaside \\u').map(str.encode))
def test_any_other_bytes_are_refused(data):
    try:
        found = unpacked(data)
    except tp.PmapError:
        return
    assert unpacked(packed(found)) == found


@pytest.mark.parametrize(
    "data",
    [
        *(pickle.dumps(Runs()), b"", b"{}", b"[" * 100_000, b'{"tuple":' * 100_000),
        *(b"NaN", b"1.5", b"1e999", b"9" * 5000, "\ud800".encode(errors="surrogatepass")),
        *(b'{"dict": 3}', b'{"dict": [[[], 1]]}', b'{"dict": [1]}'),
        *(b'{"bytes": "*"}', b'{"bytes": 1}', b'{"int": 5}', b'{"float": []}', b'{"complex": []}'),
        *(b'{"dtype": "load"}', b'{"dtype": []}', b'{"Size": [1.5]}', b'{"Size": "12"}'),
        *(b'{"numpy": ["O", "AAAAAAAAAAA="]}', b'{"numpy": ["f8", ""]}'),
        *(b'{"namedtuple": ["os", "system", ["true"]]}', b'{"namedtuple": ["os", 3, []]}'),
        *(b'{"namedtuple": [[], "x", []]}', b'{"namedtuple": ["os", "terminal_size", [1]]}'),
        *(b'{"aside": [1]}', b'{"eval": "1"}', b'{"set": [[]]}'),
        *(b'{"float": "0x1p99999"}', b'{"numpy": ["%s", ""]}' % (b"1" * 5000)),
    ],
)
def test_hostile_data(data, capfd):
    with pytest.raises(tp.PmapError, match=r"is not in torchpmap's format: .*see docs/security.md"):
        unpacked(data)
    assert "EXECUTED" not in capfd.readouterr().out


class Loud(tuple):
    """A named tuple of the program whose own code must not run."""

    _fields = ("x",)
    __slots__ = ()

    def __new__(cls, x):
        raise AssertionError("it was called")


def test_a_named_tuple_is_made_without_its_code():
    found = unpacked(packed(tuple.__new__(Loud, [1])))
    assert type(found) is Loud
    assert list(found) == [1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"x": [object()]}, r"value\['x'\]\[0\] has type builtins.object, but only data"),
        ({"f": print}, r"value\['f'\] has type builtins.builtin_function_or_method"),
        (Pair(1, Runs), r"value.right has type builtins.type"),
        ({print: 1}, r"value key <built-in function print> has type"),
        (collections.namedtuple("Local", "x")(1), r"value has type test_store.Local"),
        (np.array(["a"])[0], r"value has type numpy.str_"),
        (bytearray(b"x"), r"value has type builtins.bytearray"),
    ],
)
def test_what_is_no_data(value, text):
    with pytest.raises(TypeError, match=text):
        packed(value)


def test_what_is_posted_comes_back():
    posted = Waiting((0, 1), 3, "total", {(0, 1): 2, (): 0})
    assert Waiting.unpacked(posted.packed()) == posted


@pytest.mark.parametrize(
    "value",
    [
        *(None, (), ((0, 1), 3, "total"), ((0, "1"), 3, "total", {}), ([0], 3, "total", {})),
        *(((0,), True, "total", {}), ((0,), 3, "total", {(0,): "2"}), ((0,), 3, "total", {5: 2})),
    ],
)
def test_a_posting_of_other_types(value):
    with pytest.raises(tp.PmapError, match="is not in torchpmap's format"):
        Waiting.unpacked(packed(value))
