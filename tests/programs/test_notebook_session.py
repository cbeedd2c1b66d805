"""Covers: a session in a notebook, as a curious newcomer may have one, in a real kernel.

The kernel runs all cells once, one after the other, before the first test; each test looks at what
one cell showed. What a misuse says is tested where it is found (base/test_tracebacks.py has a line
for each, transforms/test_short_tracebacks.py whole tracebacks), and here only how errors look.
"""

import os
import re
import uuid
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from _leftovers import MARK, marked
from _support import DEVICE, SCALE, wait_for

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.cpu_only("the texts of some errors are those of CPU kernels"),
]

MOST_LINES = 24
"""Of the traceback of a mistake."""
BEGUN = "begun, and never done"
"""When a cell prints this, it is interrupted."""


class Shows(NamedTuple):
    """What a cell prints and displays, as a regular expression."""

    text: str = ""


class Raises(NamedTuple):
    """An exception: its type, its text as a regular expression, and the lines that it points at."""

    kind: str
    text: str
    lines: tuple[str, ...]


FIRST = f"""
import os, signal
import torch
import torchpmap as tp

tp.init(num_devices=2, device_type="{DEVICE}")
eager = {{"backend": "eager"}}  # in most cells: compiling takes seconds

@tp.pmap(compile=eager)
def double(x):
    return x * 2

y = double(torch.arange(8.0).reshape(2, 4))
y.tolist()
"""
FIRST_SHOWS = Shows(r"\[\[0.0, 2.0, 4.0, 6.0\], \[8.0, 10.0, 12.0, 14.0\]\]")
ROWS = rf"rows of dim 0 on {DEVICE}:0 {DEVICE}:1"
TABLE = rf"\s*\+-+\+\n0 \| {DEVICE}:0 \|\n\s*\+-+\+\n1 \| {DEVICE}:1 \|\n\s*\+-+\+"
ON = rf"on device {DEVICE}:1 \(rank 1, pid \d+\) while running {{}}"
DIED = rf"the worker of device {DEVICE}:1 \(rank 1, pid \d+\) died: SIGKILL"

CELLS: dict[str, tuple[str, Shows | Raises]] = {
    "first": (FIRST, FIRST_SHOWS),
    "a result": ("y", Shows(rf"ShardedTensor\(\[\[ 0\.,  2.*14\.\]\], {ROWS}\)")),
    "its layout": ("tp.debug.visualize_sharding(y)",
        Shows(rf"float32\[2, 4\], cut along dim 0\n{TABLE}")),
    "psum, compiled": (
        "share = tp.pmap(lambda x: x / tp.psum(x, 'i'), axis_name='i')\n"
        "share(torch.tensor([1.0, 3.0])).tolist()",
        Shows(r"\[0.25, 0.75\]")),
    "shapes that do not fit": ("""
def model(w, x):
    h = torch.tanh(x)
    return h @ w

def loss(w, x):
    return model(w, x).sum()

step = tp.pmap(tp.grad(loss), "i", in_axes=(None, 0))
step(torch.ones(5, 3), torch.ones(2, 4, 6))
""",
        Raises("RuntimeError",
            r"a and b must have same reduction dim, but got \[4, 6\] X \[5, 3\]\.\n"
            r"while tracing `loss`: arguments w float32\[5, 3\], x float32\[4, 6\]",
            ("step(torch.ones(5, 3)", "return model(w, x)", "return h @ w"))),
    "print": ("""
@tp.pmap(axis_name="i", compile=eager)
def talks(x):
    print("traced with shape", list(x.shape))
    tp.debug.print("x = {}, of {}", x.sum(), tp.psum(x.sum(), "i"))
    return x + 1

talks(torch.arange(4.0).reshape(2, 2)).tolist()
""",
        Shows(
            r"traced with shape \[2\]\n\[i=0\] x = 1\.0, of 6\.0\n\[i=1\] x = 5\.0, of 6\.0\n"
            r"\[\[1\.0, 2\.0\], \[3\.0, 4\.0\]\]")),
    "the user's exception on one device": ("""
class TooBig(Exception):
    pass

def check(x):
    if x.item() > 1:
        raise TooBig(f"{x.item()} is above 1")
    return x

tp.pmap(check, compile=False)(torch.tensor([1.0, 2.0]))
""",
        Raises("TooBig", rf"2\.0 is above 1\n{ON.format('check')}",
            ("tp.pmap(check, compile=False)",))),
    "an error on one device, late": ("""
rows = tp.pmap(lambda table, k: table.index_select(0, k), in_axes=(None, 0), compile=eager)
picked = rows(torch.arange(3.0), torch.tensor([[0], [7]]))
picked.tolist()
""",
        Raises("IndexError", rf"index out of range in self\n{ON.format('<lambda>')}",
            ("picked.",))),
    "an interrupt": (f"""
def endless(x):
    print("{BEGUN}", flush=True)
    while True:
        pass

tp.pmap(endless, compile=False)(torch.ones(2))
""",
        Raises("KeyboardInterrupt", "", ("tp.pmap(endless, compile=False)",))),
    "after the interrupt": ("double(torch.ones(2)).tolist()", Shows(r"\[2\.0, 2\.0\]")),
    "shutdown": ("tp.shutdown()\ny",
        Shows(rf"ShardedTensor\(shape=\[2, 4\], .* {ROWS}, which were shut down: .*\)")),
    "a value that is gone": ("y.tolist()",
        Raises("RuntimeClosed", "the pool of devices was shut down, .*", ("y.tolist()",))),
    "a restart by the next call": ("double(torch.ones(2)).tolist()", Shows(r"\[2\.0, 2\.0\]")),
    "other devices": (
        "tp.init(num_devices=3)\ntp.device_count(), double(torch.arange(3.0)).tolist()",
        Shows(r"\(3, \[0\.0, 2\.0, 4\.0\]\)")),
    "redefined": (
        "before = double(torch.ones(2)).tolist()\n"
        "@tp.pmap(compile=eager)\ndef double(x):\n    return x + x + 1\n\n"
        "before, double(torch.ones(2)).tolist()",
        Shows(r"\(\[2\.0, 2\.0\], \[3\.0, 3\.0\]\)")),
    "in this process": (
        "with tp.debug.fake_pmap():\n    here = share(torch.tensor([1.0, 3.0]))\n"
        "type(here).__name__, here.tolist()",
        Shows(r"\('Tensor', \[0\.25, 0\.75\]\)")),
    "a killed worker": (
        "ask = tp.pmap(lambda x: torch.tensor(os.getpid()), compile=False)\n"
        "os.kill(ask(torch.ones(2))[1].item(), signal.SIGKILL)\n"
        "double(torch.ones(2)).tolist()",
        Raises("WorkerDied", DIED, ("double(torch.ones(2))",))),
    "after the kill": ("double(torch.ones(2)).tolist()", Shows(r"\[3\.0, 3\.0\]")),
    "all workers": (
        "tp.pmap(lambda x: torch.tensor(os.getpid()), compile=False)(torch.ones(2)).tolist()",
        Shows(r"\[\d+, \d+\]")),
}  # fmt: skip
AFTER_THE_RESTART: dict[str, tuple[str, Shows | Raises]] = {
    "a name before the restart": (
        "double",
        Raises("NameError", "name 'double' is not defined", ("double",)),
    ),
    "first again": (FIRST, FIRST_SHOWS),
}


@dataclass
class Output:
    """What a cell showed."""

    text: str = ""
    html: str = ""
    kind: str = ""
    """Of the exception."""
    value: str = ""
    traceback: list[str] = field(default_factory=list)


@dataclass
class Session:
    """The outputs of all cells, and the processes that were there later."""

    outputs: dict[str, Output] = field(default_factory=dict)
    after_the_restart: list[int] = field(default_factory=list)
    after_the_end: list[int] = field(default_factory=list)


def run(kernel: Any, client: Any, source: str) -> Output:
    shown = Output()
    has_interrupted = False

    def hear(message: dict[str, Any]) -> None:
        nonlocal has_interrupted
        content = message["content"]
        if message["msg_type"] == "stream":
            shown.text += content["text"]
            if BEGUN in content["text"] and not has_interrupted:
                has_interrupted = True
                kernel.interrupt_kernel()
        elif message["msg_type"] == "error":
            shown.kind, shown.value = content["ename"], content["evalue"]
            trace = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
            shown.traceback = trace.splitlines()
        elif message["msg_type"] in ("execute_result", "display_data"):
            text = content["data"]["text/plain"]
            shown.text += "" if text.startswith("torchpmap: ") else text  # why the user waits
            shown.html += content["data"].get("text/html", "")

    client.execute_interactive(source, timeout=120 * SCALE, output_hook=hear, stop_on_error=False)
    return shown


@pytest.fixture(scope="module")
def session() -> Session:
    for package in ("jupyter_client", "ipykernel"):
        pytest.importorskip(package)
    from jupyter_client import KernelManager

    name, found = uuid.uuid4().hex, Session()
    kernel = KernelManager(kernel_name="python3")
    environment = {key: os.environ[key] for key in os.environ if key != "TORCHPMAP_TRACEBACK"}
    kernel.start_kernel(env=environment | {MARK: name})
    client = kernel.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60 * SCALE)
        for cell, (source, _) in CELLS.items():
            found.outputs[cell] = run(kernel, client, source)
        workers = {int(pid) for pid in re.findall(r"\d+", found.outputs["all workers"].text)}
        assert workers < set(marked(name))
        kernel.restart_kernel()
        client.wait_for_ready(timeout=60 * SCALE)
        wait_for(lambda: not workers & set(marked(name)), 5)
        found.after_the_restart = sorted(workers & set(marked(name)))
        for cell, (source, _) in AFTER_THE_RESTART.items():
            found.outputs[cell] = run(kernel, client, source)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel()
    wait_for(lambda: not marked(name), 5)
    found.after_the_end = marked(name)
    return found


ALL = CELLS | AFTER_THE_RESTART
SHOWING = [cell for cell, (_, expected) in ALL.items() if isinstance(expected, Shows)]
RAISING = [cell for cell, (_, expected) in ALL.items() if isinstance(expected, Raises)]


@pytest.mark.parametrize("cell", SHOWING)
def test_what_a_cell_shows(cell, session):
    output, (_, expected) = session.outputs[cell], ALL[cell]
    assert output.traceback == []
    assert re.fullmatch(expected.text, output.text, re.DOTALL), output.text


@pytest.mark.parametrize("cell", RAISING)
def test_what_a_cell_raises(cell, session):
    output, (_, expected) = session.outputs[cell], ALL[cell]
    assert (output.kind, bool(output.traceback)) == (expected.kind, True), output.text
    shown = "\n".join(output.traceback)
    assert re.search(rf"^{expected.kind}: {expected.text}\Z", shown, re.M | re.S), shown
    pointed = [line for line in output.traceback if re.match(r"-+> \d+ ", line)]
    assert len(pointed) == len(expected.lines), shown
    for line, part in zip(pointed, expected.lines, strict=True):
        assert part in line
    assert len(output.traceback) <= MOST_LINES, shown
    assert "site-packages" not in shown


def test_blocks_are_shown_as_a_table(session):
    shown, layout = session.outputs["a result"].html, session.outputs["its layout"].html
    assert [shown.count("<table"), layout.count("<table")] == [1, 1]
    for html in (shown, layout):
        assert [html.count(f"{DEVICE}:{k}") for k in range(3)] == [1, 1, 0]
    assert ["14." in html for html in (shown, layout)] == [True, False]
    assert "<script" not in shown + layout


def test_a_restart_ends_the_workers(session):
    assert session.after_the_restart == []


def test_a_kernel_that_ends_leaves_nothing(session):
    assert session.after_the_end == []
