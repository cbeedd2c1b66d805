"""Covers: how long the tracebacks of mistakes are, line by line.

Those in a notebook are looked at in tests/programs/test_notebook_session.py.
"""

import re
import traceback

import pytest
import torch
from _support import DEVICE, EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

W, X = torch.ones(5, 3), torch.ones(4, 2, 6)
ADAM = tp.optim.functional(torch.optim.Adam)
MAPPED = {"axis_name": "i", "in_axes": (None, 0)}


@pytest.fixture(autouse=True)
def _default(monkeypatch):
    monkeypatch.delenv("TORCHPMAP_TRACEBACK", raising=False)


def model(w, x):
    return x @ w


def loss(w, x):
    return model(w, x).sum()


def through_a_gradient_of_jit():
    x = tp.shard_batch(X[:, 0]).requires_grad_()
    tp.jit(lambda x, n: Fails.apply(x).sum() * n["n"], compile=EAGER)(x, {"n": 2}).backward()


def in_blocks(*specs):
    mesh = tp.make_mesh((4,), ("x",))
    return tp.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=tp.P(), compile=EAGER)


def on_another_mesh():
    with tp.set_mesh(tp.make_mesh((4,), ("y",))):
        in_blocks()()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Nothing is saved."""

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("on the way back")


def through_a_gradient():
    w = torch.ones(3, requires_grad=True)
    y = tp.pmap(lambda w, x: Fails.apply(w) * x, in_axes=(None, 0), compile=EAGER)(w, X[:, 0, :3])
    y.sum().backward()


ON_ALL = f"the same on {DEVICE}:1, {DEVICE}:2, {DEVICE}:3"
SHAPES = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x6 and 5x3)"
TRACING = "while tracing `loss`: arguments w float32[5, 3], x float32[2, 6]"
TRACED = "RuntimeError: a and b must have same reduction dim, but got [2, 6] X [5, 3]."
CASES = {
    "traced": (
        lambda: tp.pmap(loss, **MAPPED)(W, X),
        ["<lambda>", "loss", "model"],
        [TRACED, TRACING],
    ),
    "backward": (
        through_a_gradient,
        ["through_a_gradient", "backward"],
        ["ArithmeticError: on the way back",
         "while tracing a derivative of `<lambda>`: arguments w float32[3], x float32[3]"],
    ),
    "traced, blocks": (
        lambda: in_blocks(tp.P(), tp.P("x"))(W, X),
        ["<lambda>", "loss", "model"],
        ["RuntimeError: a and b must have same reduction dim, but got [2, 6] X [5, 3].",
         "while tracing `loss`: arguments w float32[5, 3], x float32[1, 2, 6]"],
    ),
    "misuse of blocks": (
        lambda: in_blocks(tp.P("x"))(W),
        ["<lambda>"],
        ["ValueError: shard_map(loss, in_specs=(PartitionSpec('x',),), out_specs=PartitionSpec())"
         "(<inputs>): dim 0 of argument w has size 5, which is not divisible by 4, the number of "
         "blocks over the mesh axes 'x' (4): in_specs has PartitionSpec('x',) for it, and its "
         "shape is [5, 3]. Pad the dim to 8."],
    ),
    "traced, whole": (
        lambda: tp.jit(loss, compile=EAGER)(W, tp.shard_batch(X[:, 0])),
        ["<lambda>", "loss", "model"],
        ["RuntimeError: a and b must have same reduction dim, but got [4, 6] X [5, 3].",
         "while tracing `loss`: arguments w float32[5, 3], x float32[4, 6]"],
    ),
    "backward, whole": (
        through_a_gradient_of_jit,
        ["through_a_gradient_of_jit", "backward"],
        ["ArithmeticError: on the way back",
         "while tracing `<lambda>`: arguments x float32[4, 6], n['n'] = 2"],
    ),
    "blocks of another mesh": (
        on_another_mesh,
        ["on_another_mesh"],
        ["ValueError: shard_map(loss, in_specs=(), out_specs=PartitionSpec())(<inputs>): its mesh "
         "is Mesh('x': 4), but set_mesh has chosen Mesh('y': 4) around the call. Leave out one of "
         "the two, or make them equal."],
    ),
    "blocks without a mesh": (
        lambda: tp.shard_map(loss, in_specs=tp.P(), out_specs=tp.P())(W, X),
        ["<lambda>"],
        ["ValueError: shard_map(loss, in_specs=PartitionSpec(), out_specs=PartitionSpec())"
         "(<inputs>): there is no mesh. Pass mesh=..., or choose one for a block of code with "
         "torchpmap.set_mesh(mesh)."],
    ),
    "in a worker": (
        lambda: tp.pmap(loss, compile=False, **MAPPED)(W, X),
        ["loss", "model", "<lambda>"],
        [SHAPES, f"on device {DEVICE}:0 (rank 0, pid N) while running loss", ON_ALL],
    ),
    "sharded": (
        lambda: tp.device_put(X[:, 0], tp.devices()) @ W,
        ["<lambda>"],
        ["RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x6 and 5x3)"],
    ),
    "sharded, on the host": (
        lambda: torch.cat([tp.device_put(X[:, 0], tp.devices()), W]),
        ["<lambda>"],
        ["RuntimeError: Sizes of tensors must match except in dimension 0. Expected size 6 but got "
         "size 3 for tensor number 1 in the list."],
    ),
    "an optimizer": (
        lambda: ADAM.update({"v": W}, ADAM.init({"w": W}), {"w": W}),
        ["<lambda>"],
        ["ValueError: grads is dict with ['v'], but params has a dict with ['w'] there. grads must "
         "have the structure of params."],
    ),
    "an optimizer that accumulates": (
        lambda: tp.optim.accumulate(ADAM, 2).init({"w": "a"}),
        ["<lambda>"],
        ["TypeError: params['w'] is of type str: only floating-point and complex tensors can be "
         "optimized. Keep it out of params, or put None in its place."],
    ),
    "misuse": (
        lambda: tp.pmap(loss)(W, X),
        ["<lambda>"],
        ["ValueError: pmap got inconsistent sizes for array axes to be mapped:",
         "  * one axis had size 5: axis 0 of argument w of type float32[5,3];",
         "  * one axis had size 4: axis 0 of argument x of type float32[4,2,6]"],
    ),
}  # fmt: skip


def frames(lines):
    """The functions that a traceback shows."""
    return re.findall(r'^  File ".*", line \d+, in (\S+)', "\n".join(lines), re.MULTILINE)


def test_an_escaped_tensor():
    kept = []
    tp.pmap(lambda x: kept.append(x) or x, compile=EAGER)(X)
    with pytest.raises(tp.TensorEscaped) as caught:
        kept[0] + 1
    assert frames(traceback.format_exception(caught.value)) == ["test_an_escaped_tensor"]


@pytest.mark.cpu_only("the texts are those of CPU kernels")
@pytest.mark.parametrize("case", CASES)
def test_tracebacks_are_short(case):
    call, functions, text = CASES[case]
    with pytest.raises(Exception) as caught:  # noqa: PT011 (the text follows)
        call()
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert len(lines) < 25
    found = frames(lines)
    found.remove("test_tracebacks_are_short")
    assert found == functions
    assert [re.sub(r"pid \d+", "pid N", line) for line in lines[-len(text) :]] == text


def test_the_note_names_statics_and_counts_what_it_leaves_out():
    def fails(x, n, more):
        raise LookupError

    mapped = tp.pmap(fails, in_axes=(1, 0, 0), static_broadcasted_argnums=1)
    with pytest.raises(LookupError) as caught:
        mapped(torch.ones(2, 4), "n" * 99, [None, *torch.ones(9, 4)])
    (note,) = caught.value.__notes__
    assert note == (
        "while tracing `fails`: arguments x float32[2], n = 'nnnnnnnnnnnn...nnnnnnnnnnnnn', "
        "more[0] = None, more[1] float32[], more[2] float32[], more[3] float32[], "
        "more[4] float32[], more[5] float32[] and 4 more"
    )
