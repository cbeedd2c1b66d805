"""Covers: profiler.trace: tracks, names and clocks of its file, and how it ends."""

import json
import os
import signal
import threading

import pytest
import torch
from _support import DEVICE, EAGER, LAGS, eagerly, running_pool, wait_for, worker_pids

import torchpmap as tp
from torchpmap._plan import lower
from torchpmap._runtime.local.runtime import LocalRuntime
from torchpmap._transforms.pmap import Pmapped
from torchpmap.profiler._trace import ahead_of, moved

pytestmark = [
    pytest.mark.usefixtures("pool"),
    pytest.mark.skipif(LAGS, reason="operations run on another thread than calls"),
]

ROUNDED_US = 0.002
"""How much the end of an event may be wrong: times have 3 digits."""
CLOCKS_US = 1000.0
"""How far clocks may be apart on a busy machine."""


def read(path):
    """Track -> its events, in the order of the file; each is well formed."""
    tracks = {}
    names = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        assert event["ph"] in "MXisf"
        tracks.setdefault(event["pid"], []).append(event)
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= 0
    assert list(tracks) == list(range(len(tracks)))
    spans = [event for events in tracks.values() for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == 0
    assert len({event["tid"] for event in spans}) == len({(e["pid"], e["tid"]) for e in spans})
    for pid, events in tracks.items():
        used = {event["tid"] for event in events if event["ph"] == "X"}
        named = {
            event["tid"]: event["args"]["name"] for event in events if "thread" in event["name"]
        }
        assert used == set(named), names[pid]
        if "calls" in named.values():
            assert named[pid] == "calls"  # viewers show this thread first
        for tid in used:
            check_nesting([event for event in spans if event["tid"] == tid])
    return {names[pid]: events for pid, events in tracks.items()}


def check_nesting(spans):
    """Of two events on one thread, one is part of the other, or they are apart."""
    ends = []
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        begin, end = event["ts"], event["ts"] + event["dur"]
        while ends and ends[-1] <= begin + ROUNDED_US:
            ends.pop()
        assert not ends or end <= ends[-1] + ROUNDED_US, event
        ends.append(end)


def named(events, name):
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def collectives(events):
    return [event["name"] for event in events if event.get("cat") == "collective"]


def step(w, x):
    return w - tp.pmean(w * x, "i"), tp.ppermute(x[:2], "i", [(0, 1)])


W, X = torch.ones(10), torch.ones(4, 10)
DEVICES = [f"{DEVICE}:{k}" for k in range(4)]


@pytest.fixture
def mapped():
    return tp.pmap(step, "i", in_axes=(None, 0), out_axes=(None, 0), compile=EAGER)


@pytest.fixture
def traced(tmp_path):
    """The tracks of a trace of a call."""

    def run(f, *args):
        with tp.profiler.trace(tmp_path) as path:
            f(*args)
        return read(path)

    return run


def test_tracks_and_names(mapped, tmp_path, capfd):
    with tp.profiler.trace(tmp_path / "new") as path:
        for _ in range(2):
            w, _ = mapped(W, X)
        (w + 1).block_until_ready()
        X @ X.T  # in this process
        w.cpu()
    tracks = read(path)
    assert list(tracks) == ["controller", *DEVICES]
    controller = tracks["controller"]
    for name in ("tracing step", "compiling step", "waiting", "fetching a value", "aten::mm"):
        assert named(controller, name), name
    assert len(named(controller, "call step")) == 2
    assert len(named(controller, "sending a call")) == 3
    assert collectives(controller) == []  # those of tracing are not real
    for device in DEVICES:
        events = tracks[device]
        assert len(named(events, "running step")) == 2
        assert len(named(events, "running aten.add.Tensor")) == 1
        assert named(events, "aten::mul")
        assert collectives(events) == ["all_reduce over i, 40 B", "ppermute over i, 8 B"] * 2
    assert named(tracks[DEVICES[0]], "sending a value")
    printed = capfd.readouterr()
    # torch prints these if something else has used its profiler in this process before
    others = [line for line in printed.err.splitlines() if not line.startswith("USDT:")]
    assert (printed.out, others) == ("", [])


@pytest.mark.inductor
def test_compiled_in_the_block(traced):
    """What a compiler does on fake tensors is not shown as operations."""
    f = tp.pmap(step, "i", in_axes=(None, 0), out_axes=(None, 0))
    tracks = traced(lambda: f(W, X)[0].block_until_ready())
    for device in DEVICES:
        assert named(tracks[device], "compiling step")
        assert named(tracks[device], "compiled code")
        sent = ["all_reduce over i, 40 B", "ppermute over i, 8 B"]
        assert collectives(tracks[device]) == sent


def test_ranges_that_torch_ends_late(traced):
    """``read`` checks the nesting; torch's optimizers record ranges, which are in the graph too."""
    optimizer = tp.optim.functional(torch.optim.Adam, lr=0.01)

    def train(w, state, x):
        return optimizer.update(tp.pmean(w * x, "i"), state, w)

    f = tp.pmap(train, "i", in_axes=(None, None, 0), out_axes=None, compile=EAGER)
    tracks = traced(lambda: f(W, optimizer.init(W), X)[0].block_until_ready())
    assert named(tracks[DEVICES[0]], "Optimizer.step#Adam.step")


def test_other_threads_have_lines_of_their_own(mapped, traced):
    def beside():
        thread = threading.Thread(target=lambda: mapped(W, X)[0].block_until_ready())
        thread.start()
        thread.join()

    tracks = traced(beside)
    (call,) = named(tracks["controller"], "call step")
    lines = {e["tid"]: e["args"]["name"] for e in tracks["controller"] if "thread" in e["name"]}
    assert lines[call["tid"]].startswith("thread ")
    assert len(named(tracks[DEVICES[0]], "running step")) == 1


def on_a_grid(f):
    grid = tp.pmap(tp.pmap(f, "cols", compile=EAGER), "rows", compile=EAGER)
    return lambda: grid(torch.ones(2, 2, 10))


EITHER = "all_reduce over cols or rows, 40 B"
COLLECTIVES = {
    "of a function that is gone": (
        lambda: tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)(X),
        ["all_reduce over i, 40 B"]),
    "of several axes": (
        on_a_grid(lambda x: (
            tp.psum(x, "rows"), tp.psum(x[:5], "cols"), tp.pmax(x[:3], ("rows", "cols")))),
        ["all_reduce over cols, 20 B", "all_reduce over rows, 40 B",
         "all_reduce over rows, cols, 12 B"]),
    "equal ones": (  # which is which cannot be told, so both are named
        on_a_grid(lambda x: (tp.psum(x, "rows"), tp.psum(x * 2, "cols"))), [EITHER, EITHER]),
}  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_names_of_collectives(traced, name):
    call, expected = COLLECTIVES[name]
    assert sorted(collectives(traced(call)[DEVICES[3]])) == expected


def test_details_of_collectives(mapped, traced):
    mapped(W, X)  # the plan may be older than the trace
    (event, _) = (e for e in traced(mapped, W, X)[DEVICES[1]] if e.get("cat") == "collective")
    assert (event["args"]["axis"], event["args"]["bytes"]) == ("i", 40)
    assert event["args"]["Input Dims"][0] == [10]


def test_uncompiled_calls(traced):
    tracks = traced(eagerly(lambda x: tp.psum(x, "i")), X)
    assert len(named(tracks["controller"], "uncompiled <lambda>")) == 1
    assert named(tracks[DEVICES[0]], "running <lambda>")
    # what devices run is compared through the memory that they share, or by messages
    messages = [] if DEVICE == "cpu" else ["all_gather_into_tensor, 16 B"]
    assert collectives(tracks[DEVICES[0]]) == [*messages, "all_reduce, 40 B", *messages]


def test_clocks_agree(mapped, tmp_path):
    """A call begins on the devices after it was sent, and its operations are within it."""
    with tp.profiler.trace(tmp_path) as path:
        for _ in range(3):
            mapped(W, X)
    tracks = read(path)
    sent = {event["id"]: event["ts"] for event in tracks["controller"] if event["ph"] == "s"}
    assert len(sent) == 3
    for device in DEVICES:
        begun = {event["id"]: event["ts"] for event in tracks[device] if event["ph"] == "f"}
        assert begun.keys() == sent.keys()
        assert all(begun[seq] >= sent[seq] - CLOCKS_US for seq in sent)
        calls = named(tracks[device], "running step")
        sums = named(tracks[device], "all_reduce over i, 40 B")
        for call, inside in zip(calls, sums, strict=True):
            assert call["ts"] - CLOCKS_US <= inside["ts"]
            assert inside["ts"] + inside["dur"] <= call["ts"] + call["dur"] + CLOCKS_US


def test_what_is_replaced_comes_back(mapped, tmp_path):
    mapped(W, X)
    owners = (Pmapped, LocalRuntime, lower)
    before = [dict(vars(owner)) for owner in owners]
    for _ in range(2):
        with tp.profiler.trace(tmp_path) as path:
            assert dict(vars(LocalRuntime)) != before[1]
            mapped(W, X)
        assert [dict(vars(owner)) for owner in owners] == before
        assert len(named(read(path)[DEVICES[2]], "running step")) == 1  # not recorded twice
    is_on = eagerly(lambda x: torch.tensor(torch.autograd._profiler_enabled()))
    assert not is_on(torch.zeros(4)).any()
    assert not torch.autograd._profiler_enabled()


def test_files_stay(tmp_path):
    paths = []
    for _ in range(3):
        with tp.profiler.trace(tmp_path) as path:
            pass
        paths.append(path.name)
    assert paths == ["trace.json", "trace-2.json", "trace-3.json"]
    assert sorted(os.listdir(tmp_path)) == sorted(paths)


@pytest.mark.parametrize(
    ("kind", "run"),
    [(ValueError, lambda f: f(X)), (KeyboardInterrupt, lambda f: f(X)),
     (ValueError, lambda f: eagerly(f)(X))],
    ids=["an error", "an interrupt", "a call that fails"],
)  # fmt: skip
def test_the_block_raises(kind, run, mapped, traced, tmp_path):
    def bad(x):
        raise kind("mine")

    def mapped_and_bad():
        mapped(W, X)
        run(bad)

    with pytest.raises(kind, match="mine"):
        traced(mapped_and_bad)
    assert named(read(tmp_path / "trace.json")[DEVICES[0]], "running step")


def test_a_call_fails_that_nobody_waits_for(mapped, tmp_path):
    def bad(x):
        tp.debug.assert_replicated(x, "i")
        return x

    with tp.profiler.trace(tmp_path) as path:
        mapped(W, X)
        failed = tp.pmap(bad, "i", compile=EAGER)(torch.arange(4.0))
    assert named(read(path)[DEVICES[0]], "running step")
    with pytest.raises(ValueError, match="assert_replicated: x differs"):
        failed.cpu()


def test_a_worker_dies(mapped, traced, tmp_path):
    with tp.profiler.trace(tmp_path) as path:
        mapped(W, X)[0].block_until_ready()
        os.kill(worker_pids()[1], signal.SIGKILL)
        assert wait_for(lambda: running_pool().broken)
    tracks = read(path)
    lost = "its worker ended in the block: the record is lost"
    assert [e["name"] for e in tracks[DEVICES[1]] if e["ph"] != "M"] == [lost]
    for k in (0, 2, 3):
        assert named(tracks[DEVICES[k]], "running step")
    assert named(traced(mapped, W, X)[DEVICES[1]], "running step")


def test_the_pool_is_shut_down_in_the_block(mapped, tmp_path):
    with tp.profiler.trace(tmp_path) as path:
        mapped(W, X)
        tp.shutdown()
    tracks = read(path)
    assert list(tracks) == ["controller", *DEVICES]
    assert named(tracks["controller"], "call step")
    assert not any(event["ph"] == "X" for event in tracks[DEVICES[0]])


def test_one_at_a_time(mapped, tmp_path):
    with tp.profiler.trace(tmp_path) as path:
        with (
            pytest.raises(RuntimeError, match="a trace is being recorded already"),
            tp.profiler.trace(tmp_path),
        ):
            pass
        mapped(W, X)
    assert named(read(path)[DEVICES[0]], "running step")


def test_inside_of_torchs_profiler(mapped, traced, tmp_path):
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=kinds, acc_events=True) as outer,
        pytest.raises(RuntimeError, match="is recording this thread already"),
        tp.profiler.trace(tmp_path),
    ):
        pass
    outer.events()
    assert named(traced(mapped, W, X)[DEVICES[0]], "running step")


def test_torchs_profiler_inside_of_a_trace(mapped, traced, tmp_path):
    """The export of the record that is gone would end Python."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with (
        pytest.raises(RuntimeError, match="was used inside of the block"),
        tp.profiler.trace(tmp_path),
        torch.profiler.profile(activities=kinds, acc_events=True),
    ):
        mapped(W, X)
    assert named(traced(mapped, W, X)[DEVICES[0]], "running step")


def test_without_devices(traced):
    with tp.debug.fake_pmap():
        tracks = traced(tp.pmap(lambda x: tp.psum(x, "i"), "i"), X)
    assert list(tracks) == ["controller"]
    assert named(tracks["controller"], "aten::sum")


def test_double_quotes_in_names(traced):
    """torch alone writes no JSON then."""

    def step(x):
        with torch.profiler.record_function('the "first" half'):
            return x + 1

    tracks = traced(tp.pmap(step, compile=False), X)
    assert named(tracks[DEVICES[0]], 'the "first" half')

    def range_of_the_caller():
        with torch.profiler.record_function('a "second"'):
            pass

    assert named(traced(range_of_the_caller)["controller"], 'a "second"')


def test_inside_a_mapped_function(traced):
    with pytest.raises(RuntimeError, match=r"profiler.trace was called inside a mapped function"):
        tp.pmap(lambda x: traced(torch.sin, x), compile=EAGER)(X)


def test_clocks_of_hosts():
    assert ahead_of([1_000_500, 2_000_490, 3_900_000], [1_000_000, 2_000_000, 3_000_000]) == 500
    events = [{"ph": "M", "name": "x"}, {"ph": "X", "ts": 7000}]
    assert moved(events, -500) == [{"ph": "M", "name": "x"}, {"ph": "X", "ts": 6500}]
