"""Covers: _base/busy.py, _runtime/local/plans.py: the line that says why the user waits (in a
notebook: test_contexts.py).
"""

import os
import re
import threading

import pytest
from _launched import Program
from _support import DEVICE, beside
from _terminal import Terminal, screen

from torchpmap._base import busy
from torchpmap._base.config import config

SETUP = """
import os, sys, threading, torch, torchpmap as tp
from torchpmap._base import busy
busy._DELAY_S = 0.0
tp.init(num_devices=2)
tp.replicate(torch.ones(2))
tp.pmap(lambda x: x, compile={"backend": "eager"})(torch.ones(2)).tolist()

def wait():
    # until the test opens the gate; + because there is no end of file then, after which what is
    # written before the next open is lost
    if os.path.exists(os.environ["GATE"]):
        with open(os.environ["GATE"], "rb+", buffering=0) as gate:
            gate.read(1)

def leave():
    print([t.name for t in threading.enumerate() if t.name == "torchpmap-busy"])

"""
TRACES = (
    SETUP
    + """
def step(x):
    wait()
    print("traced")
    return x * 2

print("step 1: ", end="", flush=True)
print(tp.pmap(step, compile={"backend": "eager"})(torch.ones(2, 3)).shape)
leave()
"""
)
LINE = r"torchpmap: tracing `step` \(argument x float32\[3\]\), \d s"


@pytest.fixture
def gate(tmp_path):
    """A pipe at which programs wait until it is opened."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return str(path)


def open_gate(path):
    with open(path, "wb", buffering=0) as gate:  # waits until the program is there
        gate.write(b"x")  # for one to pass: the next may come before this is closed


@pytest.mark.long
@pytest.mark.parametrize(
    "environment", [{"TORCHPMAP_PROGRESS": "0"}, {"TERM": "dumb"}], ids=["setting", "TERM=dumb"]
)
def test_it_is_off(environment, gate):
    with Terminal(TRACES, GATE=gate, **environment) as program:
        program.until(lambda lines: lines[-1] == "step 1:")
        open_gate(gate)
        program.rest()
        assert "torchpmap" not in program.output
        assert "\x1b" not in program.output


@pytest.mark.long
def test_nothing_where_stderr_is_no_terminal():
    output = Program("-c", TRACES, GATE="/there/is/none").wait().clean()
    assert output == "step 1: traced\ntorch.Size([2, 3])\n[]\n"


SESSION = (
    TRACES
    + """
print("step 2: ", end="", flush=True)
try:
    tp.pmap(lambda x: step(x), compile={"backend": "eager"})(torch.ones(2, 3))
except KeyboardInterrupt:
    print("interrupted")
    leave()

def slowly(graph, examples):
    wait()
    return graph

def increase(x):
    return x + 1

print(tp.pmap(increase, compile={"backend": slowly})(torch.ones(2, 3)).tolist())
leave()

import logging
logging.basicConfig(format="%(message)s")

def step(x):
    wait()
    logging.warning("of the user")
    sys.stderr.write("half a line, ")
    sys.stderr.flush()
    wait()
    sys.stderr.write("and the rest\\n")
    return x

tp.pmap(step, compile={"backend": "eager"})(torch.ones(2, 3))

def dies(graph, examples):
    wait()
    if os.path.exists(os.environ["GATE"]):
        os.remove(os.environ["GATE"])
    os._exit(3)

try:
    print(tp.pmap(increase, compile={"backend": dies})(torch.ones(2, 3)).tolist())
except tp.WorkerDied:
    print("died")
leave()
"""
)
COMPILING = r"torchpmap: compiling `increase` {}on {}:{}, \d s"


@pytest.mark.long
def test_a_session(gate):
    """The line stands behind the user's output, and goes away, whatever ends the wait."""
    with Terminal(SESSION, GATE=gate) as program:
        program.until(lambda lines: re.fullmatch(f"step 1: {LINE}", lines[-1]))
        assert "torchpmap: starting the workers, " in program.output
        open_gate(gate)
        in_lambda = LINE.replace("step", "<lambda>")
        program.until(lambda lines: re.fullmatch(f"step 2: {in_lambda}", lines[-1]))
        program.type("\x03")
        # compiling in one worker and then in the others
        what = COMPILING.format(r"\(argument x float32\[3\]\) ", DEVICE, 0)
        program.until(lambda lines: re.fullmatch(what, lines[-1]))
        open_gate(gate)
        later = COMPILING.format("", DEVICE, 1)
        program.until(lambda lines: re.fullmatch(later, lines[-1]))
        open_gate(gate)
        # what others write is not mixed with it
        program.until(lambda lines: re.fullmatch(LINE, lines[-1]))
        open_gate(gate)
        program.until(lambda lines: re.search(LINE, lines[-1]) and "of the user" in lines)
        open_gate(gate)
        # a worker that dies removes it
        program.until(lambda lines: "compiling `increase`" in lines[-1])
        open_gate(gate)
        lines = program.rest()
    assert lines[:7] == [
        *("step 1: traced", "torch.Size([2, 3])", "[]", "step 2: ^Cinterrupted", "[]"),
        *("[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]", "[]"),
    ]
    others = [line for line in lines[7:] if line]
    assert others == ["of the user", "half a line, and the rest", "died", "[]"]
    assert lines[-3:] == ["died", "[]", ""]


# In this process ----------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.shown, self.seen = [], threading.Event()

    def show(self, text):
        self.shown.append(text)
        if text:
            self.seen.set()


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(busy, "_DELAY_S", 0.0)
    monkeypatch.setattr(busy, "_PERIOD_S", 0.01)
    recorder = Recorder()
    monkeypatch.setattr(busy, "_new_line", lambda: busy._Line(lambda text: recorder.show(text)))
    return recorder


def is_running() -> bool:
    return any(thread.name == "torchpmap-busy" for thread in threading.enumerate())


def test_the_innermost_is_shown_and_the_thread_ends(recorder):
    with busy.waiting(None):
        assert is_running()
        with busy.waiting("outer\n\tthing"), busy.waiting(lambda: "inner"):
            recorder.seen.wait(10)
    assert not is_running()
    assert set(recorder.shown) <= {"", "torchpmap: outer thing, 0 s", "torchpmap: inner, 0 s"}
    assert "torchpmap: inner, 0 s" in recorder.shown
    assert recorder.shown[-1] == ""


def test_another_thread_shows_nothing_meanwhile(recorder):
    with busy.waiting("mine"):
        recorder.seen.wait(10)

        def other():
            with busy.waiting("other"):
                pass

        with beside(other):
            pass
    assert set(recorder.shown) == {"", "torchpmap: mine, 0 s"}


def test_a_block_that_was_never_left_ends(recorder):
    """As when Ctrl-C comes between ``__enter__`` and the block."""
    busy.waiting("lost").__enter__()
    assert not is_running()
    with busy.waiting("next"):
        recorder.seen.wait(10)
    assert not is_running()


def test_a_finalizer_may_wait_while_the_line_is_made(recorder, monkeypatch):
    """Python runs it wherever it collects garbage."""
    make, interrupted = busy._new_line, []

    def interrupted_make():
        if not interrupted:
            interrupted.append(True)
            assert not busy._lock.locked()  # else the block would wait for ever
            with busy.waiting("in a finalizer"):
                pass
        return make()

    monkeypatch.setattr(busy, "_new_line", interrupted_make)
    with busy.waiting("outer"):
        recorder.seen.wait(10)
        assert is_running()
    assert interrupted
    assert not is_running()
    assert "torchpmap: outer, 0 s" in recorder.shown


def test_a_display_that_fails_does_no_harm(recorder):
    recorder.show = lambda text: 1 / 0
    with busy.waiting("something"):
        busy._line.join(10)
    assert not is_running()


def test_a_wrong_variable_is_not_reported_here(monkeypatch):
    monkeypatch.setenv("TORCHPMAP_PROGRESS", "maybe")
    with busy.waiting("something"):
        assert not is_running()
    with pytest.raises(ValueError, match="TORCHPMAP_PROGRESS must be 0 or 1"):
        config.snapshot()


def test_the_screen_of_these_tests():
    assert screen("ab\x1b7\x1b[?7l\x1b[Kcd\x1b[?7h\x1b8\x1b[Ke\r\nf") == ["abe", "f"]
