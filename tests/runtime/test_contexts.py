"""The same code from every place Python runs, with no ``__main__`` guard, and nothing left behind.

Covers: _runtime/local/process.py, _runtime/local/worker.py (lifeline), _runtime/current.py (exit).
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _support import DEVICE, SCALE, is_running, wait_for
from test_busy import LINE

PROGRAM = """
import torch
import torchpmap as tp

tp.init(num_devices=2)
scale = 3.0

class Offset:
    def __init__(self, value): self.value = value

offset = Offset(1.0)

def double(x): return x * 2 + offset.value

def make(k): return lambda x: tp.psum(x * k, "i")

x = torch.arange(2.0)
graph = {"backend": "eager"}
print(tp.pmap(double, compile=graph)(x).tolist())
print(tp.pmap(make(scale), "i", compile=graph)(x).tolist())
print(tp.pmap(double, compile=False)(x).tolist())
print(tp.pmap(make(scale), "i", compile=False)(x).tolist())
"""
PRINTED = "[1.0, 3.0]\n[3.0, 3.0]\n[1.0, 3.0]\n[3.0, 3.0]\n"
IN_A_THREAD = f"""
import threading
thread = threading.Thread(target=exec, args=({PROGRAM!r}, {{}}))
thread.start()
thread.join()
"""
FLAGS = ("-W", "error::UserWarning", "-W", "error::ResourceWarning")


@pytest.fixture(autouse=True)
def environment(request, tmp_path_factory):
    """Give the programs an environment by which their processes and files are known."""
    marker = f"{os.getpid()}-{time.monotonic_ns()}"
    files = tmp_path_factory.mktemp("temporary")
    shared = set(os.listdir("/dev/shm"))
    yield os.environ | {"TORCHPMAP_WARM": "0", "MARKER": marker, "TMPDIR": str(files)}
    assert wait_for(lambda: not _marked(marker), 5), f"still running: {_marked(marker)}"
    left = [path.name for path in files.iterdir()]
    if any(word in request.node.name for word in ("killed", "notebook")):
        # multiprocessing's own folder for its fork server's socket; nbclient kills its kernel too
        left = [name for name in left if not name.startswith("pymp-")]
    assert [name for name in left if not name.startswith(("ipykernel", "torchinductor"))] == []
    new = set(os.listdir("/dev/shm")) - shared
    assert not {name for name in new if "torchpmap" in name}


def _marked(marker: str) -> list[str]:
    """Processes that inherited the environment of a program."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"MARKER={marker}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


def run(environment, *arguments, stdin=None, cwd=None, flags=FLAGS, seconds=90):
    return subprocess.run(
        [sys.executable, *flags, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=seconds * SCALE,
        cwd=cwd,
        env=environment,
    )


PLACES = {
    "a script without a guard": (["script.py"], None),
    "standard input": (["-"], PROGRAM),
    "a package run as a module": (["-m", "somepackage"], None),
    "the read-eval-print loop": (["-q", "-i"], PROGRAM),
    "a thread that is not the main one": (["-c", IN_A_THREAD], None),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PLACES)
def test_place(environment, tmp_path, name):
    arguments, stdin = PLACES[name]
    (tmp_path / "somepackage").mkdir()
    (tmp_path / "somepackage" / "__init__.py").write_text("")
    for path in ("script.py", "somepackage/__main__.py"):
        (tmp_path / path).write_text(PROGRAM)
    done = run(environment, *arguments, stdin=stdin, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.replace(">>> ", "").replace("... ", "").strip() == "", done.stderr
    assert done.stdout == PRINTED


NOTEBOOK = """
import json, nbclient, nbformat, sys

class Client(nbclient.NotebookClient):
    def output(self, outs, msg, display_id, cell_index):
        seen.append(msg["content"].get("data", {}).get("text/plain"))
        return super().output(outs, msg, display_id, cell_index)

seen = []
notebook = nbformat.v4.new_notebook()
notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)]
Client(notebook, timeout=90, kernel_name="python3").execute()
json.dump([seen, [cell.outputs for cell in notebook.cells]], sys.stdout)
"""
WAITS = """
import threading
shown = threading.Event()
show = busy._Cell.show
def noticed(cell, text):
    show(cell, text)
    shown.set()
busy._Cell.show = noticed

def step(x):
    shown.wait(60)
    return x

print(tp.pmap(step, compile=graph)(torch.ones(2, 3)).shape)
print([t.name for t in threading.enumerate() if t.name == "torchpmap-busy"])
"""
CELLS = [
    "from torchpmap._base import busy\nbusy._DELAY_S = 0.0",
    PROGRAM,
    "class Custom(Exception):\n    pass",
    "def bad(x):\n    print('here')\n    raise Custom('in a cell')",
    "try:\n    tp.pmap(bad, compile=False)(x)\nexcept Custom as error:\n"
    "    print(error, 'raise Custom' in str(error.__cause__))",
    "tp.debug.visualize_sharding(tp.replicate(x))\ntp.replicate(x)",
    WAITS,
]


@pytest.mark.long
def test_notebook(environment):
    """Also the line that says why the user waits (_base/busy.py), which comes and goes away."""
    for package in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(package)
    done = run(environment, "-c", NOTEBOOK, stdin=json.dumps(CELLS), flags=(), seconds=100)
    assert done.returncode == 0, done.stderr
    seen, cells = json.loads(done.stdout)
    texts = ["".join(map(_text, outputs)) for outputs in cells]
    assert texts[1] == PRINTED
    assert f"[{DEVICE}:0] here\n" in texts[4]
    assert f"[{DEVICE}:1] here\n" in texts[4]
    assert "in a cell True\n" in texts[4]
    assert (texts[5].count("<table"), texts[5].count("<pre")) == (2, 1)  # one with the numbers
    assert texts[6] == "torch.Size([2, 3])\n[]\n"
    assert any(re.fullmatch(LINE, text or "") for text in seen)
    lines = [output["data"] for output in cells[1] + cells[6] if "data" in output]
    assert lines
    assert all(line == {"text/plain": "", "text/html": ""} for line in lines)


def _text(output):
    return output.get("text", "") + output.get("data", {}).get("text/html", "")


@pytest.mark.long
def test_command_line_that_exits_with_an_exception_and_a_pending_call(environment):
    program = PROGRAM + "y = tp.pmap(double, compile=graph)(torch.ones(2, 1000))\n"
    done = run(environment, "-c", program + "raise SystemExit(7)")
    assert (done.returncode, done.stdout, done.stderr) == (7, PRINTED, "")


BUSY = {
    "idle": "tp.pmap(double, compile=False)(x)",
    "python": "tp.pmap(endless, compile=False)(x)",
    "collective": "tp.pmap(alone, 'i', compile=False)(x)",
    "interpreter lock": "tp.pmap(locked, compile=False)(x)",
    "children": "print(*tp.pmap(has_a_child, compile=False)(x).tolist(), flush=True)",
}
BUSY_PROGRAM = """
import ctypes, multiprocessing, os, threading, time
import torch, torchpmap as tp

tp.init(num_devices=2)
x = torch.arange(2.0)
def double(x): return x * 2
def endless(x):
    while True: pass
def alone(x):
    while tp.axis_index("i") == 0: time.sleep(0.1)
    return tp.psum(x, "i")
def locked(x): ctypes.PyDLL(None).sleep(1000)
def has_a_child(x):
    child = multiprocessing.Process(target=time.sleep, args=(1000,))
    child.start()
    return child.pid + 0 * x.long()

print(*tp.pmap(lambda x: os.getpid() + 0 * x.long(), compile=False)(x).tolist(), flush=True)
threading.Thread(target=lambda: {call}, daemon=True).start()
time.sleep(1000)
"""


@pytest.mark.long
@pytest.mark.parametrize("state", BUSY)
def test_nothing_survives_a_killed_controller(environment, state):
    controller = subprocess.Popen(
        [sys.executable, "-c", BUSY_PROGRAM.replace("{call}", BUSY[state])],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert controller.stdout is not None
    ours = [int(pid) for pid in controller.stdout.readline().split()]
    assert len(ours) == 2
    if state == "children":
        ours += [int(pid) for pid in controller.stdout.readline().split()]
        assert len(ours) == 4
    elif state != "idle":
        assert wait_for(lambda: all(_is_in(state, pid) for pid in ours[1:]), 10)
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    controller.stdout.close()
    assert wait_for(lambda: not any(is_running(pid) for pid in ours), 2)


def _is_in(state: str, pid: int) -> bool:
    """Whether the worker has begun: it burns time in Python, else it sleeps in something new."""
    if state == "python":
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    where = Path(f"/proc/{pid}/wchan").read_text()
    return "nanosleep" in where if state == "interpreter lock" else "futex" in where
