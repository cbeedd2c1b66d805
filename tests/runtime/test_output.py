"""Covers: _runtime/local/output.py: lines of workers, and the thread that prints them."""

import contextlib
import io
import os
import sys
import threading
import types

import pytest
from _support import wait_for

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
    printer = Printer()
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


def test_what_was_printed_comes_before_a_flush_ends(printer, pipe, monkeypatch):
    """Also a line that has no end yet."""
    reader, writer = pipe
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    printer.flush([0])
    errors, end = os.pipe()
    os.close(end)
    printer.add(0, reader, errors, "> ")
    for k in range(100):
        printer.write("stdout", f"{k}\n")
        os.write(writer, f"a{k}\nb{k}".encode())
        printer.write("stderr", "oh\n")
        printer.flush([1])
        printer.flush([0])
        assert out.getvalue().endswith(f"{k}\n> a{k}\n> b{k}\n")
        assert err.getvalue() == "oh\n" * (k + 1)
    os.write(writer, b"last")
    assert printer.remove(0) == b""
    os.close(errors)
    os.write(writer, b"is not read")
    printer.flush([])
    assert out.getvalue().endswith("> b99\n> last\n")


def test_a_stream_that_takes_nothing_holds_up_no_answer(printer, pipe, monkeypatch):
    """... and what was not printed is when there is room."""
    monkeypatch.setattr(_output, "_STUCK_S", 0.0)
    reader, writer = os.pipe()
    with open(reader, "rb") as theirs, open(writer, "w") as ours:
        monkeypatch.setattr(sys, "stdout", ours)
        text = ("x" * 99 + "\n") * 1000
        for _ in range(10):
            printer.write("stdout", text)
        printer.flush([])
        assert printer._queue
        found = 0
        while found < 10 * len(text):
            found += len(theirs.read1(1 << 16))
        assert wait_for(lambda: not printer._queue)
        printer.stop(0)
        assert wait_for(lambda: not printer.thread.is_alive())


def test_what_is_not_printed_stays_in_its_pipe(printer, pipe, monkeypatch):
    """So the writer waits."""
    reader, writer = pipe
    os.set_blocking(writer, False)
    errors, end = os.pipe()
    gate = threading.Semaphore(0)
    stream = types.SimpleNamespace(write=lambda _: gate.acquire(), flush=lambda: None)
    monkeypatch.setattr(sys, "stdout", stream)
    printer.add(0, reader, errors, "")

    line = b"x" * 99 + b"\n"

    def fill():
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, line)

    fill()
    assert wait_for(lambda: printer._begun)
    fill()
    with pytest.raises(BlockingIOError):
        os.write(writer, line)
    gate.release(1000)
    assert wait_for(lambda: printer._begun is None)
    assert os.write(writer, line) == 100
    os.close(end)
    printer.remove(0)
    os.close(errors)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape", "replace"])
def test_characters_that_the_encoding_of_a_stream_lacks(printer, monkeypatch, errors):
    memory = io.BytesIO()
    with io.TextIOWrapper(memory, "ascii", errors) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        printer.write("stdout", "a\ngr\xfcn\nb\n")
        printer.flush([])
        shown = {"replace": b"?"}.get(errors, b"\\xfc")
        assert memory.getvalue() == b"a\ngr" + shown + b"n\nb\n"
