"""Covers: what the tools say about programs with a fault in each; docs/debugging.md shows it.

A fault is a program, the tool that finds it, and lines that the tool prints, in order (``...``
stands for anything).  The table of the page is made from them: this file, run, prints it.
"""

import doctest
import io
import logging
import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from _support import kill, worker_pids

import torchpmap as tp

pytestmark = pytest.mark.cpu_only("the page names the CPU devices that it runs on")

PAGE = Path(__file__).parents[2] / "docs" / "debugging.md"
X = torch.arange(4.0)


class Fault(NamedTuple):
    planted: str
    tool: str
    printed: tuple[str, ...]
    program: Callable[[], Any]

    @property
    def row(self) -> str:
        ticks = [("`` ", " ``") if "`" in line else ("`", "`") for line in self.printed]
        lines = zip(ticks, self.printed, strict=True)
        printed = "<br>".join(line.join(around) for around, line in lines)
        return f"| {self.planted} | {self.tool} | {printed} |"


FAULTS: list[Fault] = []


def fault(planted, tool, *printed):
    def add(program):
        FAULTS.append(Fault(planted, tool, printed, program))
        return program

    return add


@fault(
    "each device takes its own step, `w = w - 0.1 * w * x`",
    '[`tp.debug.assert_replicated(w, "i")`](#equal-on-all-devices)',
    "ValueError: assert_replicated: x differs between devices of axis 'i' (largest difference "
    "0.3). Reduce it over the axis, for example with pmean.",
)
def drifting_values():
    def step(w, x):
        w = w - 0.1 * w * x
        tp.debug.assert_replicated(w, "i")
        return w

    tp.pmap(step, "i", in_axes=(None, 0))(torch.tensor(1.0), X).block_until_ready()


@fault(
    '`tp.grad(loss)(w, x)` without `mean_over="i"`, and `out_axes=None`',
    "`pmap(..., check_replicated=True)`",
    "ValueError: pmap(step, ...)(<inputs>): out_axes is None for the output of step, but its value "
    "differs between devices (largest difference 1.8). Reduce it over the axis (for example with "
    "pmean), or give it an out axis.",
)
def gradient_not_reduced():
    def step(w, x):
        return w - 0.1 * tp.grad(lambda w, x: (w * x) ** 2)(w, x)

    f = tp.pmap(step, "i", in_axes=(None, 0), out_axes=None, check_replicated=True)
    f(torch.tensor(1.0), X).block_until_ready()


@fault(
    "the `backward` of an `autograd.Function` lacks the `psum` over the devices",
    "[`tp.debug.check_pmap`](#checking)",
    "AssertionError: check_pmap(loss): the gradient to argument w differs: serial gives 1.46... "
    "and vmapped gives 4.43... (difference 2.97..., allowed ...); 1 of 1 elements differ.",
)
def backward_not_reduced():
    class Total(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return tp.psum(x, "i")

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    def loss(w, x):
        return Total.apply(w * x)

    tp.debug.check_pmap(loss, torch.tensor(2.0), X, axis_name="i", in_axes=(None, 0))


@fault(
    "one number of the batch is negative, and the loss takes its root",
    "[`tp.debug.find_nan`](#where-does-the-nan-come-from)",
    "FloatingPointError: aten.sqrt.default gave NaN in 1 of 1 numbers of float32[], and its inputs "
    "hold none",
    "at ... `return x.sqrt()`",
    "input 0: float32[], from -1 to -1",
    "in row 2 of 4, axis 'i'",
)
def nan_in_one_row():
    def root(x):
        return x.sqrt()

    tp.debug.find_nan(tp.pmap(lambda x: tp.pmean(root(x), "i"), "i"), torch.tensor([4.0, 1, -1, 9]))


@fault(
    "the gradient of a norm, at 0, in a loss that is finite",
    "the same",
    "FloatingPointError: aten.mul.Tensor gave NaN in 2 of 2 numbers of float32[2], and its inputs "
    "hold none",
    "in the backward pass: MulBackward0, of the operation at ... `return (x * x).sum().sqrt()`",
    "input 0: float32[2], 2 infinity",
    "in row 3 of 4, axis 'i'",
)
def nan_in_a_backward_pass():
    def norm(x):
        return (x * x).sum().sqrt()

    rows = torch.tensor([[1.0, 2], [3, 4], [5, 6], [0, 0]])
    tp.debug.find_nan(tp.pmap(lambda x: tp.grad(norm)(x), "i"), rows)


@fault(
    "step 731 of a `tp.scan` divides 0 by 0",
    "`tp.config.debug_nans = True`",
    "FloatingPointError: aten.div.Tensor gave NaN in 1 of 1 numbers of float32[], and its inputs "
    "hold none",
    "at ... `return c - 1, (c - 731) / (c - 731)`",
    "in step 731 of a loop, counted from 0",
    "in row 1 of 4, axis None",
)
def nan_in_step_731():
    def step(c, _):
        return c - 1, (c - 731) / (c - 731)

    f = tp.pmap(lambda c: tp.scan(step, c, torch.arange(1000.0))[1])
    tp.config.debug_nans = True
    try:
        f(torch.tensor([-1.0, 1462, -2, -3]))
    finally:
        tp.config.debug_nans = False


@fault(
    "one weight of a model is NaN from the start",
    "the same",
    "FloatingPointError: a tensor that the function closes over ('model', 1.bias) holds NaN in 1 "
    "of 2 numbers of float32[2] before the call",
    "first used by aten.addmm.default",
)
def nan_in_a_weight():
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 2))
    with torch.no_grad():
        model[1].bias[0] = float("nan")
    tp.config.debug_nans = True
    try:
        tp.pmap(lambda x: model(x))(X[:, None, None])
    finally:
        tp.config.debug_nans = False


def recorded(f, *args):
    with tempfile.TemporaryDirectory() as folder, tp.debug.record(folder):
        f(*args)
        return tp.debug.replay(tp.debug.dump()[-1])


@fault(
    "dropout may drop all numbers of a row, whose sum is then the divisor; there is no seed",
    "[`tp.debug.record`, `replay`](#a-call-again)",
    "first NaN: aten.div.Tensor at ... `return kept.sum() / kept.sum()`, rank ...",
)
def once():
    def share(x):
        kept = torch.nn.functional.dropout(x, 0.9)
        return kept.sum() / kept.sum()

    mapped = tp.pmap(share, "i")
    found = (recorded(mapped, torch.ones(4, 20)) for _ in range(1000))
    print(next(each for each in found if each.first_nan is not None))


@fault(
    "`(x + 1e8) - 1e8` in float32",
    "[`replay(file).bisect(dtype=torch.float64)`](#a-call-again)",
    "aten.sub.Tensor (sub) at ... `return (x + 1e8) - 1e8`, rank 0: they differ by 0.25, and what "
    "it takes by 0.25",
)
def cancellation():
    def f(x):
        return (x + 1e8) - 1e8

    print(recorded(tp.pmap(f, "i"), torch.full((4,), 0.25)).bisect(dtype=torch.float64))


@fault(
    "two devices send to device 1: `[(0, 1), (1, 2), (2, 1)]`",
    "tracing the call",
    "ValueError: ppermute sources and destinations must be unique, got ((0, 1), (1, 2), (2, 1)).",
)
def two_senders():
    tp.pmap(lambda x: tp.ppermute(x, "i", [(0, 1), (1, 2), (2, 1)]), "i")(X)


@fault(
    "a ring without its last pair, `(3, 0)`",
    "[`f.lower(x).certificate()`](#will-my-collectives-agree)",
    "0  ppermute over i, 4 B: 0->1 1->2 2->3; zeros on 0",
)
def open_ring():
    f = tp.pmap(lambda x: tp.ppermute(x, "i", [(0, 1), (1, 2), (2, 3)]), "i")
    print(f.lower(X).certificate())


@fault(
    "`tp.cond(x > 1, ...)`, with a `psum` in one branch",
    "tracing the call",
    "ValueError: at ...: cond: the predicate may differ along axis 'i', but the loop or branch "
    "that it decides on contains a collective over that axis: some devices would wait for others "
    "that never come. Make the predicate the same on all of them (reduce it with psum, pmax or "
    "pmin over the axis), or take the collective out.",
)
def branch_around_psum():
    def f(x):
        return tp.cond(x > 1, lambda x: tp.psum(x, "i"), lambda x: x + 0, x)

    tp.pmap(f, "i")(X)


@fault(
    "the same with `torch.cond`",
    "tracing the call",
    "UncapturedHigherOrderOpError: ...",
    "torch's cond, while_loop and scan cannot hold a collective of torchpmap; torchpmap.cond, "
    "while_loop and scan can.",
)
def torchs_branch_around_psum():
    def f(x):
        return torch.cond(x > 1, lambda x: tp.psum(x, "i"), lambda x: x + 0, (x,))

    tp.pmap(f, "i")(X)


@fault(
    "`if x > 1:` around a `psum`, `compile=False`",
    "[comparing collectives](errors.md#collectivemismatch), always on",
    "CollectiveMismatch: f: devices run different collectives, so the result would be wrong:",
    "rank 0: return",
    "rank 2: all_reduce sum () torch.float32 for psum('i') of float32[] at ... in f (collective 1)",
)
def python_branch_around_psum():
    def f(x):
        return tp.psum(x, "i") if x > 1 else x

    tp.pmap(f, "i", compile=False)(X).block_until_ready()


@fault(
    "device 0 runs the same two `psum` in the other order, `compile=False`",
    "the same",
    "rank 0: all_reduce sum () torch.float32 for psum('i') of float32[] at ... in f (collective 1)",
    "Every device must run the same collectives in the same order, from the same lines of the "
    "script: do not put one under a condition on a device's own values or axis index.",
)
def other_order():
    def f(a, b):
        if tp.axis_index("i") == 0:
            total = tp.psum(a, "i")
            return total - tp.psum(b, "i")
        total = tp.psum(b, "i")
        return tp.psum(a, "i") - total

    tp.pmap(f, "i", compile=False)(X, torch.ones(4)).block_until_ready()


@fault(
    "SIGKILL to device 2, while the others wait for it in a `psum`",
    "[`WorkerDied`](errors.md#workerdied)",
    "WorkerDied: the worker of device cpu:2 (rank 2, pid ...) died: SIGKILL",
)
def killed_in_a_step():
    def step(x):
        if x == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return tp.psum(x, "i")

    tp.pmap(step, "i", compile=False)(X).block_until_ready()


@fault(
    "the same, between two steps; device 2 must not come back",
    "[`tp.resize` without it](faults.md#going-on-with-fewer-devices)",
    "ShardedTensor([1., 2.], replicated on cpu:0 cpu:1 cpu:2)",
    "ShardLost: the shard on device cpu:2 is lost: the worker of device cpu:2 (rank 2, pid ...) "
    "died: SIGKILL. Values that do not live on that device are intact; compute or load this one "
    "again.",
)
def gone_for_good():
    weights = tp.replicate(torch.tensor([1.0, 2.0]))
    rows = tp.shard_batch(X).block_until_ready()
    kill(worker_pids()[2])
    tp.resize([device for device in tp.devices() if device.id != 2])
    print(weights)
    rows.cpu()


@fault(
    "device 2 loops for ever before a `psum`",
    "[`timeout=1`](errors.md#calltimeout)",
    "CallTimeout: step did not end within its timeout of 1 s:",
    "cpu:0 (rank 0, pid ...) waits for rank 2 in a collective with compile=False at ...",
    "cpu:2 (rank 2, pid ...) runs step at ...",
)
def hanging_rank():
    def step(x):
        while x == 2:
            pass
        return tp.psum(x, "i")

    f = tp.pmap(step, "i", compile=False, timeout=1)
    f(X + 4).block_until_ready()  # the workers have the function: a second is enough to reach psum
    f(X).block_until_ready()


@fault(
    "one leaf of a tree of parameters has 3 rows, the others 4",
    "checking the arguments",
    "* most axes (3 of them) had size 4, e.g. axis 0 of argument params['a'] of type float32[4,2];",
    "* one axis had size 3: axis 0 of argument params['w'] of type float32[3]",
)
def wrong_size():
    params = {"a": torch.ones(4, 2), "b": torch.ones(4), "w": torch.ones(3)}
    tp.pmap(lambda params, x: x)(params, X)


@fault(
    "a tensor is used after `donate_argnums` gave it away",
    "using it",
    "RuntimeError: this ShardedTensor of type float32[4] has been deleted by pmap(double, "
    "...)(<inputs>), which it was donated to; its memory on the devices is gone. Use the result of "
    "that call, or do not donate the argument.",
)
def donated_and_used():
    def double(x):
        return x * 2

    f = tp.pmap(double, donate_argnums=0)
    x = tp.device_put(X, tp.devices())
    f(x)
    x + 1


@fault(
    "both operands of `x @ w` in `tp.jit` are cut along dim 0",
    '[`tp.config.gathers = "raise"`](sharded_tensors.md#what-gathers-and-how-to-see-it)',
    "RuntimeError: jit(f): operands are resharded: aten.mm.default: float32[8, 8] from "
    "PartitionSpec('d',) to PartitionSpec() (256 B) at ...; tp.config.gathers is 'raise'. Change "
    "the layout beforehand (torchpmap.device_put), or set it to 'allow' if this is meant.",
)
def needless_gather():
    def f(x, w):
        return x @ w

    mesh = tp.make_mesh((4,), ("d",), devices=tp.devices())
    rows = tp.device_put(torch.ones(8, 8), tp.NamedSharding(mesh, tp.P("d")))
    tp.config.gathers = "raise"
    tp.jit(f)(rows, rows)


@fault(
    "each batch has another length",
    "[`tp.config.log_compiles`](#what-is-compiled-and-why-again)",
    "tracing `f` (argument x float32[3]): first trace",
    "tracing `f` (argument x float32[4]): argument x is float32[4, 4], and was float32[4, 3]",
)
def traced_every_call():
    def f(x):
        return x.sum()

    tp.config.log_compiles = True
    mapped = tp.pmap(f)
    for length in (3, 4):
        mapped(torch.ones(4, length))


def printed_by(program, monkeypatch):
    """What reaches the terminal: output, the log, and the error with its notes."""
    for name in ("gathers", "log_compiles"):
        monkeypatch.setattr(tp.config, name, getattr(tp.config, name))  # put back afterwards
    printed = io.StringIO()
    log, handler = logging.getLogger("torchpmap"), logging.StreamHandler(printed)
    log.addHandler(handler)
    try:
        with redirect_stdout(printed):
            program()
    except Exception as error:
        lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
        printed.write("\n".join(lines))
    finally:
        log.removeHandler(handler)
    return printed.getvalue()


def shows(printed, lines):
    """Whether the lines are there, in this order."""
    same = doctest.OutputChecker().check_output
    left = iter(printed.splitlines())
    return all(any(same(line, found.strip(), doctest.ELLIPSIS) for found in left) for line in lines)


@pytest.mark.parametrize("planted", FAULTS, ids=[each.program.__name__ for each in FAULTS])
def test_the_tool_prints_what_the_page_says(planted, monkeypatch):
    tp.init(num_devices=4)
    printed = printed_by(planted.program, monkeypatch)
    assert shows(printed, planted.printed), printed


def test_the_page_has_these_rows():
    section = PAGE.read_text().split("## Planted faults\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert rows[2:] == [each.row for each in FAULTS]
    assert not any("|" in part for each in FAULTS for part in (*each[:2], *each.printed))


if __name__ == "__main__":
    print("\n".join(each.row for each in FAULTS))
