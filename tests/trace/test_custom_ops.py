"""Covers: _trace/custom_ops.py: operations that users add to torch travel with what uses them."""

import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from _launched import run_program
from _support import COMPILED, DEVICE, EAGER, WAYS
from torch import Tensor

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def make_cube(name):
    """``x ** 3`` by numpy, out of the sight of torch, with all its rules."""

    @torch.library.custom_op(f"{name}::square", mutates_args=())
    def square(x: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(x.numpy(force=True) ** 2)).to(x.device)

    @torch.library.custom_op(f"{name}::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(x.numpy(force=True) ** 3)).to(x.device)

    for operation in (square, cube):
        operation.register_fake(torch.empty_like)
        operation.register_vmap(lambda info, dims, x, operation=operation: (operation(x), dims[0]))
    square.register_autograd(lambda ctx, g: 2 * g * ctx.saved_tensors[0], setup_context=save)
    cube.register_autograd(lambda ctx, g: 3 * g * square(*ctx.saved_tensors), setup_context=save)
    return cube


cube = make_cube("torchpmap_tests_local")


@torch.library.custom_op("torchpmap_tests_module::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    return x / 2


halve.register_fake(torch.empty_like)

library = torch.library.Library("torchpmap_tests_library", "FRAGMENT")
library.define("treble(Tensor x) -> Tensor")
library.impl("treble", lambda x: 3 * x, "CompositeExplicitAutograd")
torch.library.register_fake("torchpmap_tests_library::treble", torch.empty_like, lib=library)


def slope_of_the_cube(x):
    with torch.enable_grad():
        held = x.detach().requires_grad_()
        return torch.autograd.grad((held**3).sum(), held)[0]


library.define("slope(Tensor x) -> Tensor")
for _key in ("CPU", "CUDA"):
    library.impl("slope", slope_of_the_cube, _key)
torch.library.register_fake("torchpmap_tests_library::slope", torch.empty_like, lib=library)


X, ROWS = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.arange(8.0)


def test_transforms_from_outside(mode):
    f = tp.pmap(lambda x: cube(x), compile=mode)
    x = X.clone().requires_grad_()
    f(x).sum().backward()
    torch.testing.assert_close(x.grad, 3 * X**2)
    torch.testing.assert_close(torch.func.grad(lambda x: f(x).sum())(X), 3 * X**2)
    second = torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).sum())(x).sum())(X)
    torch.testing.assert_close(second, 6 * X)
    batch = torch.stack([X, 2 * X])
    torch.testing.assert_close(torch.func.vmap(f)(batch).cpu(), batch**3)


@pytest.mark.inductor
def test_compiled_by_inductor():
    f = tp.pmap(lambda x: tp.psum(cube(x) * 2, "i"), "i")
    x = X.clone().requires_grad_()
    y = f(x)
    assert y.tolist() == [200.0] * 4
    y.sum().backward()
    torch.testing.assert_close(x.grad, 4 * 6 * X**2)


def test_forward_mode_is_an_error_not_zero(mode):
    push = tp.pmap(lambda x: torch.func.jvp(cube, (x,), (x,))[1], compile=mode)
    with pytest.raises(NotImplementedError, match="forward-mode derivative of torchpmap_tests_loc"):
        push(X)


@torch.library.custom_op("torchpmap_tests_local::blend", mutates_args=())
def blend(tensors: list[Tensor], weights: list[float], *, shift: float = 1.0) -> Tensor:
    return sum(t * w for t, w in zip(tensors, weights, strict=True)) + shift


blend.register_fake(lambda tensors, weights, *, shift=1.0: torch.empty_like(tensors[0]))


def save_weights(ctx, inputs, keyword_only_inputs, output):
    assert keyword_only_inputs == {"shift": 10.0}
    ctx.weights = inputs[1]


def spread(ctx, g):
    assert len(ctx.needs_input_grad) == 2
    return [g * w for w in ctx.weights], None


blend.register_autograd(spread, setup_context=save_weights)


@torch.library.custom_op("torchpmap_tests_local::parts", mutates_args=())
def parts(x: Tensor, at: float = 0.0) -> tuple[Tensor, Tensor]:
    return x.clamp(min=at), x.clamp(max=at)


parts.register_fake(lambda x, at=0.0: (torch.empty_like(x), torch.empty_like(x)))


def save_sides(ctx, inputs, output):
    ctx.above = inputs[0] > inputs[1]


parts.register_autograd(
    lambda ctx, up, down: (torch.where(ctx.above, up, down), None), setup_context=save_sides
)


@torch.library.custom_op("torchpmap_tests_local::bump", mutates_args={"x"})
def bump(x: Tensor) -> None:
    x += 1


library_ops = torch.ops.torchpmap_tests_library
SQUARE = X.reshape(2, 2)
PROGRAMS = {
    "alone": (lambda x: cube(x), X, X**3),
    "by name": (lambda x: torch.ops.torchpmap_tests_local.cube(x), X, X**3),
    "with a collective": (lambda x: tp.psum(cube(x), "i"), X, torch.full((4,), 100.0)),
    "gradient": (tp.grad(lambda x: cube(x) * x), X, 4 * X**3),
    "second derivative": (tp.grad(tp.grad(lambda x: cube(x) * x)), X, 12 * X**2),
    "gradient through a collective": (tp.grad(lambda x: tp.psum(cube(x), "i")), X, 4 * 3 * X**2),
    "more rows than devices": (lambda x: cube(x), ROWS, ROWS**3),
    "their gradients": (tp.grad(lambda x: cube(x)), ROWS, 3 * ROWS**2),
    "batch": (torch.func.vmap(lambda x: cube(x)), SQUARE, SQUARE**3),
    "gradients of a batch": (torch.func.vmap(tp.grad(lambda x: cube(x))), SQUARE, 3 * SQUARE**2),
    "jacobian": (
        torch.func.jacrev(lambda x: cube(x)), SQUARE,
        torch.stack([torch.diag(3 * row**2) for row in SQUARE])),
    "in a scan": (lambda x: tp.scan(lambda c, _: (halve(c), None), x, None, length=3)[0], X, X / 8),
    "of importable modules": (lambda x: halve(x) + library_ops.treble(x), X, 3.5 * X),
    "lists and keywords": (
        tp.grad(lambda x: blend([x * x, x.detach()], [2.0, 3.0], shift=10.0)), X, 4 * X),
    "a gradient by keyword": (
        tp.grad(lambda x: parts(x=x - 2)[1]), X, torch.tensor([1.0, 1.0, 0.0, 0.0])),
    "tuples and defaults": (
        lambda x: torch.stack(parts(x - 2)), X,
        torch.tensor([[0.0, -1.0], [0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])),
}  # fmt: skip


# Torch runs one without a rule row by row, and says so; up to 2.13 on stderr.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_inside_a_mapped_function(program, way):
    f, x, expected = PROGRAMS[program]
    compile, around = WAYS[way]
    with around():
        torch.testing.assert_close(tp.pmap(f, "i", compile=compile)(x).cpu(), expected)


def test_in_place(mode):
    def f(x):
        y = x * 2
        bump(y)
        bump(x)
        return x * 10 + y

    stored = tp.device_put(X, tp.devices())
    assert tp.pmap(f, compile=mode)(stored).tolist() == [23.0, 35.0, 47.0, 59.0]
    assert stored.tolist() == X.tolist()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_without_rules(mode):
    @torch.library.custom_op("torchpmap_tests_local::bare", mutates_args=())
    def bare(x: Tensor) -> Tensor:
        return x + 1

    f = tp.pmap(lambda x: bare(x), compile=mode)
    if mode:
        with pytest.raises(RuntimeError, match=r"use `bare\.register_fake`"):
            f(X)
    else:
        assert f(X).tolist() == (X + 1).tolist()
    bare.register_fake(torch.empty_like)
    assert tp.pmap(lambda x: bare(x), compile=mode)(ROWS).tolist() == (ROWS + 1).tolist()
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        tp.pmap(tp.grad(lambda x: bare(x)), compile=mode)(X)


SCRIPT = """
import torch, torchpmap as tp

@torch.library.custom_op("script::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, g: twice(g))
tp.init(2)
x = torch.tensor([1.0, 2.0])
for compile in ({"backend": "eager"}, False):
    print(tp.pmap(lambda x: twice(x) + tp.grad(twice)(x), compile=compile)(x).tolist())
"""


@pytest.mark.long
def test_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert run_program(str(script)).stdout.splitlines() == ["[4.0, 6.0]"] * 2


def test_a_module_that_cannot_be_imported(mode):
    module = types.ModuleType("only_here")
    exec(
        "import torch\n@torch.library.custom_op('only_here::same', mutates_args=())\n"
        "def same(x: torch.Tensor) -> torch.Tensor:\n    return x.clone()\n"
        "same.register_fake(torch.empty_like)\n",
        vars(module),
    )
    sys.modules["only_here"] = module
    try:
        with pytest.raises(ImportError, match="only_here::same is defined in the module 'only_he"):
            tp.pmap(lambda x: torch.ops.only_here.same(x), compile=mode)(X)
    finally:
        del sys.modules["only_here"]


@pytest.fixture
def hidden():
    """An operation whose functions only torch's dispatcher has, and a tensor that it reads."""
    scale = torch.tensor(2.0)
    code = """
library = torch.library.Library("torchpmap_tests_hidden", "FRAGMENT")
library.define("scaled(Tensor x) -> Tensor")
library.define("shifted(Tensor x) -> Tensor")
library.impl("scaled", lambda x: x * scale, "CompositeExplicitAutograd")
library.impl("shifted", lambda x: x + scale, "CompositeImplicitAutograd")
torch.library.register_fake("torchpmap_tests_hidden::scaled", torch.empty_like, lib=library)
"""
    names = {"torch": torch, "scale": scale}
    exec(code, names)
    yield scale
    names["library"]._destroy()


def test_hidden_operations_become_part_of_the_graph(hidden):
    operations = torch.ops.torchpmap_tests_hidden
    f = tp.pmap(lambda x: operations.scaled(x) - operations.shifted(x), compile=EAGER)
    assert f(X).tolist() == (2 * X - (X + 2)).tolist()
    hidden.fill_(5.0)
    assert f(X).tolist() == (5 * X - (X + 5)).tolist()
    assert "scaled" not in f.lower(X).as_text()


@pytest.mark.usefixtures("hidden")
def test_hidden_operations_cannot_be_sent():
    f = tp.pmap(lambda x: torch.ops.torchpmap_tests_hidden.scaled(x), compile=False)
    with pytest.raises(TypeError, match=r"^compile=False runs.*scaled cannot be sent") as caught:
        f(X)
    assert "Define it with torch.library.custom_op" in str(caught.value)


offset = 1.0


def test_changes_of_what_an_operation_reads(mode, monkeypatch):
    weight = torch.tensor(1.0)

    @torch.library.custom_op("torchpmap_tests_local::reads", mutates_args=())
    def reads(x: Tensor) -> Tensor:
        return x * weight + offset

    reads.register_fake(torch.empty_like)
    f = tp.pmap(lambda x: torch.ops.torchpmap_tests_local.reads(x), compile=mode)
    assert f(X).tolist() == (X + 1).tolist()
    weight.fill_(3.0)
    assert f(X).tolist() == (3 * X + 1).tolist()
    monkeypatch.setattr(sys.modules[__name__], "offset", 2.0)
    assert f(X).tolist() == (3 * X + 2).tolist()


def test_an_operation_defined_anew(mode):
    def define(factor):
        @torch.library.custom_op("torchpmap_tests_local::again", mutates_args=())
        def again(x: Tensor) -> Tensor:
            return x * factor

        again.register_fake(torch.empty_like)
        return again

    kept = define(2)
    f = tp.pmap(lambda x: torch.ops.torchpmap_tests_local.again(x), compile=mode)
    assert f(X).tolist() == (2 * X).tolist()
    kept.register_kernel(DEVICE)(lambda x: x * 7)
    assert f(X).tolist() == (7 * X).tolist()
    kept = define(3)
    assert f(X).tolist() == (3 * X).tolist()


def test_functions_that_cannot_travel(mode):
    lock = threading.Lock()

    @torch.library.custom_op("torchpmap_tests_local::locked", mutates_args=())
    def locked(x: Tensor) -> Tensor:
        with lock:
            return x.clone()

    locked.register_fake(torch.empty_like)
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock'") as caught:
        tp.pmap(lambda x: locked(x), compile=mode)(X)
    if mode:
        assert "the Python functions of torchpmap_tests_local::locked" in str(caught.value)


CPP = """
#include <ATen/core/Tensor.h>
#include <torch/library.h>
static at::Tensor plus(const at::Tensor& x, double by) {
  at::Tensor result = x.clone();
  result.add_(by);
  return result;
}
TORCH_LIBRARY(torchpmap_tests_cpp, m) { m.def("plus(Tensor x, float by) -> Tensor"); }
TORCH_LIBRARY_IMPL(torchpmap_tests_cpp, CompositeExplicitAutograd, m) { m.impl("plus", &plus); }
"""


@pytest.fixture(scope="module")
def plus(tmp_path_factory):
    """An operation of a shared library that this process has loaded and no worker has."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "plus.cpp").write_text(CPP)
    torch_folder = Path(torch.__file__).parent
    flags = [
        *("-shared", "-fPIC", "-std=c++20", f"-I{torch_folder}/include", f"-L{torch_folder}/lib"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    built = folder / "plus.so"
    command = ["g++", *flags, folder / "plus.cpp", "-o", built, "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True, timeout=100)
    torch.ops.load_library(built)
    yield torch.ops.torchpmap_tests_cpp.plus
    torch.ops.loaded_libraries.discard(str(built))


@pytest.mark.long
@pytest.mark.parametrize("compile", [EAGER, False, COMPILED])
def test_a_shared_library(plus, compile):
    torch.library.register_fake(
        "torchpmap_tests_cpp::plus", lambda x, by: torch.empty_like(x), allow_override=True
    )
    f = tp.pmap(lambda x: torch.ops.torchpmap_tests_cpp.plus(x, 2.0) * 10, compile=compile)
    assert f(X).tolist() == [30.0, 40.0, 50.0, 60.0]


def test_an_operation_that_differentiates_inside():
    """Collectives are kept off autograd, but not so the user's code beside them."""

    def total(x):
        return tp.psum(torch.ops.torchpmap_tests_library.slope(x), "i")

    f = tp.pmap(total, axis_name="i", compile=EAGER)
    np.testing.assert_allclose(f(X[:2]), [15.0, 15.0])
