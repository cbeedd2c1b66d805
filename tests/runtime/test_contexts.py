"""The same code from every place Python runs, with no ``__main__`` guard, and nothing left behind
(however it ends: tests/faults/test_controller.py).

Covers: _runtime/local/process.py, _runtime/current.py (exit).
"""

import json
import re

import pytest
from _launched import Program
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


PLACES = {
    "a script without a guard": (["script.py"], ""),
    "standard input": (["-"], PROGRAM),
    "a package run as a module": (["-m", "somepackage"], ""),
    "the read-eval-print loop": (["-q", "-i"], PROGRAM),
    "a thread that is not the main one": (["-c", IN_A_THREAD], ""),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PLACES)
def test_place(tmp_path, name):
    arguments, stdin = PLACES[name]
    (tmp_path / "somepackage").mkdir()
    (tmp_path / "somepackage" / "__init__.py").write_text("")
    for path in ("script.py", "somepackage/__main__.py"):
        (tmp_path / path).write_text(PROGRAM)
    output = Program(*FLAGS, *arguments, stdin=stdin, cwd=tmp_path).wait().clean()
    assert output.replace(">>> ", "").replace("... ", "").strip() == PRINTED.strip()


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
    if text:
        shown.set()
busy._Cell.show = noticed

def step(x):
    shown.wait(60)
    return x

print(tp.pmap(step, compile=graph)(torch.ones(2, 3)).shape)
print([t.name for t in threading.enumerate() if t.name == "torchpmap-busy"])
"""


CELLS = ["from torchpmap._base import busy\nbusy._DELAY_S = 0.0", PROGRAM, WAITS]


@pytest.mark.long
def test_notebook():
    """Also the line that says why the user waits (_base/busy.py), which comes and goes away.

    What cells show and raise: tests/programs/test_notebook_session.py.
    """
    for package in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(package)
    ended = Program("-c", NOTEBOOK, stdin=json.dumps(CELLS)).wait(100, patience=5)
    assert (ended.code, ended.left) == (0, []), ended.output
    # multiprocessing's folder for the socket of its fork server too: nbclient kills its kernel
    assert all(name.startswith(("pymp-", "ipykernel")) for name in ended.files)
    seen, cells = json.loads(ended.output.splitlines()[-1])
    texts = ["".join(output.get("text", "") for output in outputs) for outputs in cells]
    assert texts == ["", PRINTED, "torch.Size([2, 3])\n[]\n"]
    assert any(re.fullmatch(LINE, text or "") for text in seen)
    lines = [output["data"] for output in cells[1] + cells[2] if "data" in output]
    assert lines
    assert all(line == {"text/plain": "", "text/html": ""} for line in lines)
