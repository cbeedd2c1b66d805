"""The same code from every place Python runs, with no ``__main__`` guard, and nothing left behind.

Covers: _runtime/local/process.py, _runtime/local/worker.py (lifeline), _runtime/current.py (exit).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _support import DEVICE, SCALE, is_running, wait_for

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


def run(
    environment: dict[str, str], *arguments: str, stdin: str | None = None, cwd: Path | None = None
) -> str:
    done = subprocess.run(
        [sys.executable, *FLAGS, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=90 * SCALE,
        cwd=cwd,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.replace(">>> ", "").replace("... ", "").strip() == "", done.stderr
    return done.stdout


def test_script_without_a_guard(environment, tmp_path):
    (tmp_path / "script.py").write_text(PROGRAM)
    assert run(environment, "script.py", cwd=tmp_path) == PRINTED


def test_standard_input(environment):
    assert run(environment, "-", stdin=PROGRAM) == PRINTED


def test_package_run_as_a_module(environment, tmp_path):
    package = tmp_path / "somepackage"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(PROGRAM)
    assert run(environment, "-m", "somepackage", cwd=tmp_path) == PRINTED


def test_read_eval_print_loop(environment):
    assert run(environment, "-q", "-i", stdin=PROGRAM) == PRINTED


def test_thread_that_is_not_the_main_one(environment):
    program = (
        f"import threading\nthread = threading.Thread(target=exec, args=({PROGRAM!r}, {{}}))\n"
    )
    assert run(environment, "-c", program + "thread.start()\nthread.join()") == PRINTED


NOTEBOOK = """
import json, nbclient, nbformat, sys

notebook = nbformat.v4.new_notebook()
notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)]
nbclient.NotebookClient(notebook, timeout=90, kernel_name="python3").execute()
def text(output):
    return output.get("text", "") + output.get("data", {}).get("text/html", "")

json.dump(["".join(map(text, cell.outputs)) for cell in notebook.cells], sys.stdout)
"""


def test_notebook(environment):
    for package in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(package)
    cells = [
        PROGRAM,
        "class Custom(Exception):\n    pass",
        "def bad(x):\n    print('here')\n    raise Custom('in a cell')",
        "try:\n    tp.pmap(bad, compile=False)(x)\nexcept Custom as error:\n"
        "    print(error, 'raise Custom' in str(error.__cause__))",
        "tp.debug.visualize_sharding(tp.replicate(x))\ntp.replicate(x)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        timeout=100 * SCALE,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    texts = json.loads(done.stdout)
    assert texts[0] == PRINTED
    assert f"[{DEVICE}:0] here\n" in texts[3]
    assert f"[{DEVICE}:1] here\n" in texts[3]
    assert "in a cell True\n" in texts[3]
    assert (texts[4].count("<table"), texts[4].count("<pre")) == (2, 1)  # one with the numbers


def test_command_line_that_exits_with_an_exception_and_a_pending_call(environment):
    program = PROGRAM + "y = tp.pmap(double, compile=graph)(torch.ones(2, 1000))\n"
    done = subprocess.run(
        [sys.executable, *FLAGS, "-c", program + "raise SystemExit(7)"],
        capture_output=True,
        text=True,
        timeout=90 * SCALE,
        env=environment,
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, PRINTED, "")


BUSY = {
    "idle": "tp.pmap(double, compile=False)(torch.arange(2.0))",
    "python": "tp.pmap(endless, compile=False)(torch.arange(2.0))",
    "collective": "tp.pmap(alone, 'i', compile=False)(torch.arange(2.0))",
    "interpreter lock": "tp.pmap(locked, compile=False)(torch.arange(2.0))",
}
BUSY_PROGRAM = """
import ctypes, os, threading, time
import torch, torchpmap as tp

tp.init(num_devices=2)
def double(x): return x * 2
def endless(x):
    while True: pass
def alone(x):
    while tp.axis_index("i") == 0: time.sleep(0.1)
    return tp.psum(x, "i")
def locked(x): ctypes.PyDLL(None).sleep(1000)

pids = tp.pmap(lambda x: os.getpid() + 0 * x.long(), compile=False)(torch.arange(2.0)).tolist()
print(*pids, flush=True)
threading.Thread(target=lambda: {call}, daemon=True).start()
time.sleep(1000)
"""


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
    workers = [int(pid) for pid in controller.stdout.readline().split()]
    assert len(workers) == 2
    if state != "idle":
        assert wait_for(lambda: all(_is_in(state, pid) for pid in workers[1:]), 10)
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    controller.stdout.close()
    assert wait_for(lambda: not any(is_running(pid) for pid in workers), 2)


def _is_in(state: str, pid: int) -> bool:
    """Whether the worker has begun: it burns time in Python, else it sleeps in something new."""
    if state == "python":
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    where = Path(f"/proc/{pid}/wchan").read_text()
    return "nanosleep" in where if state == "interpreter lock" else "futex" in where
