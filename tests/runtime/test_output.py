"""Covers: _runtime/local/output.py: lines of workers, and the thread that prints them."""

import io
import os
import sys
import threading
import types

import pytest
from _support import SCALE, wait_for

from torchpmap._runtime.local import output as _output
from torchpmap._runtime.local.output import Lines, Printer


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    os.close(reader)
    os.close(writer)


@pytest.fixture
def printer():
    room = threading.Event()
    printer = Printer(room.set)
    printer.room = room
    yield printer
    printer.stop(0)
    printer.thread.join(10)
    assert not printer.thread.is_alive()


READS = {
    "lines": ([b"a\nb\n"], ["> a\n> b\n"], ""),
    "a line in pieces": ([b"a", b"b\nc"], ["", "> ab\n"], "> c\n"),
    "nothing": ([b""], [""], ""),
    "an empty line": ([b"\n"], ["> \n"], ""),
    "not text": ([b"\xff\n"], ["> \N{REPLACEMENT CHARACTER}\n"], ""),
    "a line of our own": ([b"\x1eplain\n"], ["plain\n"], ""),
}


@pytest.mark.parametrize(("written", "read", "rest"), READS.values(), ids=READS)
def test_lines(pipe, written, read, rest):
    reader, writer = pipe
    lines = Lines(reader, "> ")
    for piece, text in zip(written, read, strict=True):
        os.write(writer, piece)
        assert lines.read() == text
    assert lines.rest() == rest
    assert lines.rest() == ""


def test_a_line_without_an_end_is_cut(pipe):
    reader, writer = pipe
    lines, found = Lines(reader, ""), ""
    for _ in range(100):
        os.write(writer, b"x" * 10_000)
        found += lines.read()
    assert found.replace("\n", "") == "x" * len(found.replace("\n", ""))
    assert len(found) > 900_000
    assert max(map(len, found.split("\n"))) < 100_000
    assert len(lines.tail) == 4000


def test_it_prints_in_order_and_then_acts(printer, monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    seen, done = [], threading.Event()
    for k in range(100):
        printer.write("stdout", f"{k}\n")
    printer.write("stderr", "oh\n")
    printer.then(lambda: seen.append((out.getvalue(), err.getvalue())))
    printer.then(done.set)
    assert done.wait(10 * SCALE)
    assert seen == [("".join(f"{k}\n" for k in range(100)), "oh\n")]


def test_a_stream_that_takes_nothing_holds_up_no_answer(printer, monkeypatch):
    """Answers come, what is kept is bounded, and what was not printed is when there is room."""
    monkeypatch.setattr(_output, "_STUCK_S", 0.0)
    reader, writer = os.pipe()
    with open(reader, "rb") as theirs, open(writer, "w") as ours:
        monkeypatch.setattr(sys, "stdout", ours)
        text = ("x" * 99 + "\n") * 1000
        while not printer.is_full:
            printer.write("stdout", text)
        acted = []
        printer.then(lambda: acted.append(1))
        assert wait_for(lambda: [act() for act in printer.overdue()] or acted)
        assert acted == [1]
        found = 0
        while not printer.room.is_set():
            found += len(theirs.read1(1 << 16))
        assert found > 100_000
        printer.stop(0)
        assert wait_for(lambda: not printer.thread.is_alive())


def test_a_full_printer_tells_when_there_is_room(monkeypatch):
    """... also if it was asked again meanwhile, for another pipe."""
    gate, room = threading.Semaphore(0), threading.Event()
    stream = types.SimpleNamespace(write=lambda _: gate.acquire(), flush=lambda: None)
    monkeypatch.setattr(sys, "slow", stream, raising=False)
    printer = Printer(on_room=room.set)
    printer.write("slow", "x" * 700_000)
    printer.write("slow", "x" * 700_000)
    assert printer.is_full
    gate.release()
    assert wait_for(lambda: not printer.is_full)
    assert not room.is_set()
    gate.release()
    assert room.wait(10)
    printer.stop(1)
