"""Covers: _runtime/local/forkserver.py, preload.py, plans.py: which workers have the compiler in
memory, and when.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAD = """
import sys, torch, torchpmap as tp

tp.init(2, "cpu")
EAGER = {"backend": "eager"}
rows = torch.arange(2.0)

def has_compiler(x):
    return x * 0 + ("torch._inductor.compile_fx" in sys.modules)

def ask():
    return tp.pmap(has_compiler, compile=False)(rows).tolist()

assert tp.pmap(lambda x: x + 1, compile=EAGER)(rows).tolist() == [1, 2]
print(ask())
"""

COMPILES_LATER = """
assert tp.pmap(lambda x: x * 2)(rows).tolist() == [0, 2]
print(ask())
"""

COMPILES_FIRST = "doubled = tp.pmap(lambda x: x * 2)\n"

REPLACES = """
import os, signal

def dies(x):
    if tp.axis_index("i") == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return x

try:
    tp.pmap(dies, "i", compile=False)(rows).tolist()
except tp.WorkerDied:
    print("died")
print(ask())
"""


@pytest.fixture(autouse=True)
def warm(monkeypatch):
    monkeypatch.setenv("TORCHPMAP_WARM", "1")


def lines(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_script_that_compiles_nothing_does_not_wait_for_the_compiler():
    assert lines(HEAD) == ["[0.0, 0.0]"]


def test_workers_import_it_when_a_graph_is_compiled():
    assert lines(HEAD + COMPILES_LATER) == ["[0.0, 0.0]", "[1.0, 1.0]"]


def test_workers_start_with_it_if_a_function_is_to_be_compiled():
    code = HEAD.replace("rows =", COMPILES_FIRST + "rows =")
    assert lines(code) == ["[1.0, 1.0]"]


def test_a_new_worker_has_it_if_a_graph_was_compiled():
    assert lines(HEAD + COMPILES_LATER + REPLACES)[2:] == ["died", "[1.0, 1.0]"]
