"""Covers: _trace/effects.py, through debug.print and debug.assert_replicated, in every mode."""

import pytest
import torch
from _support import DEVICE, TRACED, WAYS

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(4.0)


@pytest.fixture(params=WAYS)
def run(request, capsys):
    """Map, call and wait, in one way; what was printed, with the results."""
    compile, around = WAYS[request.param]

    def run(fun, *args, **options):
        with around():
            result = tp.pmap(fun, compile=compile, **options)(*args)
            tp.block_until_ready(result)
        printed = capsys.readouterr()
        assert printed.err == ""
        return result, printed.out

    return run


# print -------------------------------------------------------------------------------------------


def test_one_line_per_index_in_order(run):
    def f(x):
        tp.debug.print("x={} and {twice:.2f}", x, twice=x * 2)
        return tp.psum(x, "i")

    result, printed = run(f, X, axis_name="i")
    assert result.tolist() == [6.0] * 4
    assert printed == "".join(f"[i={k}] x={k}.0 and {2 * k}.00\n" for k in range(4))


def show(text, **options):
    return lambda x: (tp.debug.print(text, x, **options), x)[1]


def in_order_and_alive(x):
    """Nothing that a print shows is used otherwise."""
    tp.debug.print("first")
    tp.debug.print("second {}", tp.psum(x.sin() * 0, "i"))
    tp.debug.print("third {}", x)
    return x + 1


def of_trees(x):
    tp.debug.print("{0} {1!r} {2:>4} {{}} {t} {s!s}", 7, "text", "r", t={"a": (x, 2)}, s=x)
    return x


def along_inner_axes(x):
    tp.vmap(lambda y: tp.debug.print("{}", y) or y, axis_name="j")(x)
    torch.func.vmap(lambda y: tp.debug.print("row {}", y) or y)(x)
    return x


MATRIX = """\
[i=0] tensor([[1., 0., 0., 0.],
              [0., 1., 0., 0.]])
[i=1] tensor([[0., 0., 1., 0.],
              [0., 0., 0., 1.]])"""
# name: function, argument, name of the axis, lines
PRINTS = {
    "more rows than devices": (
        show("{}"), torch.arange(8), None, [f"[{k}] {k}" for k in range(8)]),
    "in order and alive": (
        in_order_and_alive, torch.arange(2), "i",
        ["[i=0] first", "[i=1] first", "[i=0] second 0.0", "[i=1] second 0.0",
         "[i=0] third 0", "[i=1] third 1"]),
    "trees, conversions and constants": (
        of_trees, torch.arange(2), None,
        [f"[{k}] 7 'text'    r {{}} {{'a': (tensor({k}), 2)}} tensor({k})" for k in range(2)]),
    "lines of a matrix stay together": (
        show("{}"), torch.eye(4).reshape(2, 2, 4), "i", [MATRIX]),
    "inner axes have indices too": (
        along_inner_axes, torch.arange(6).reshape(2, 3), "i",
        [f"[i={k // 3}, j={k % 3}] {k}" for k in range(6)]
        + [f"[i={k // 3}] row {k}" for k in range(6)]),
    "no order": (
        show("{}", ordered=False), X, "i", [f"[i={k}] {k}.0" for k in range(4)]),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTS)
def test_lines(run, name):
    function, x, axis_name, lines = PRINTS[name]
    _, printed = run(function, x, axis_name=axis_name)
    if name == "no order":
        printed = "".join(sorted(printed.splitlines(keepends=True)))
    assert printed == "\n".join(lines) + "\n"


def test_every_call_prints_its_values(run):
    w = torch.tensor(1.0)

    def total(x):
        return tp.debug.print("{} and {}", x.sum(), w) or x

    for start in (0, 10):
        w.fill_(start)
        _, printed = run(total, torch.arange(start, start + 4), axis_name="i")
        assert printed == "".join(f"[i={k}] {start + k} and {start}.0\n" for k in range(4))


def test_values_once_under_derivatives(run):
    def square(x):
        tp.debug.print("x={}", x)
        return tp.psum(x**2, "i")

    def f(x):
        slope = tp.grad(square)(x)
        tangent = torch.func.jvp(square, (x,), (x,))[1]
        curvature = torch.func.hessian(square)(x)
        return slope, tangent, curvature

    (slope, tangent, curvature), printed = run(f, torch.arange(2.0), axis_name="i")
    assert slope.tolist() == [0.0, 4.0]
    assert tangent.tolist() == [2.0, 2.0]
    assert curvature.tolist() == [4.0, 4.0]
    assert printed == "[i=0] x=0.0\n[i=1] x=1.0\n" * 3


@pytest.mark.parametrize("compile", TRACED)
def test_derivatives_from_outside_print_once_and_keep_checks(capsys, compile):
    def f(x):
        tp.debug.print("x={}", x)
        tp.debug.assert_replicated(x > 9, "i")
        return tp.psum(x**2, "i")

    mapped = tp.pmap(f, "i", compile=compile)
    x = X.clone().requires_grad_()
    mapped(x).sum().backward()
    assert x.grad.tolist() == [0.0, 8.0, 16.0, 24.0]
    assert capsys.readouterr().out == "".join(f"[i={k}] x={k}.0\n" for k in range(4))
    with pytest.raises(ValueError, match="assert_replicated: x differs"):
        mapped(x * 4).sum().backward()


def test_other_prints(capsys):
    def f(x):
        print("mine", flush=True)
        tp.debug.print("ours")
        return x

    def some(x):
        if x > 1:
            tp.debug.print("{}", x)
        return x

    tp.pmap(f, compile=False)(torch.zeros(2)).block_until_ready()
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["[0] ours", "[1] ours", f"[{DEVICE}:0] mine", f"[{DEVICE}:1] mine"]
    tp.debug.print("x={}", torch.tensor(3.0))  # outside a mapped function
    tp.vmap(lambda x: tp.debug.print("{}", x) or x, axis_name="j")(torch.arange(2))
    assert capsys.readouterr().out == "x=3.0\n[j=0] 0\n[j=1] 1\n"
    with pytest.raises(tp.CollectiveMismatch, match="rank 2: print"):
        tp.pmap(some, compile=False)(X)


@pytest.mark.inductor
def test_compiled(capfd):
    def f(x):
        def loss(x):
            tp.debug.print("loss of {}", x)
            return (x * x).sum()

        tp.debug.print("sum {}", tp.psum(x.sum(), "i"))
        y = tp.grad(loss)(x)
        tp.debug.assert_replicated(tp.pmax(y, "i"), "i")
        return y

    x = torch.arange(8.0).reshape(4, 2)
    assert tp.pmap(f, "i")(x).tolist() == (2 * x).tolist()
    printed = capfd.readouterr()
    there = "" if DEVICE == "cpu" else f", device='{DEVICE}:0'"  # which prints all lines
    sums = [f"[i={k}] sum 28.0" for k in range(4)]
    losses = [f"[i={k}] loss of tensor([{2 * k}., {2 * k + 1}.]{there})" for k in range(4)]
    # nothing says which of two prints comes first
    assert printed.out.splitlines() in (sums + losses, losses + sums)
    assert printed.err == ""


MISUSE = {
    "the first argument is a format string, but got": (lambda x: tp.debug.print(x), TypeError),
    r"does not use argument 0. Write \{\}": (lambda x: tp.debug.print("x", x), ValueError),
    "does not use argument y": (lambda x: tp.debug.print("x", y=x), ValueError),
    "asks for argument 1, but the arguments are 0": (
        lambda x: tp.debug.print("{} {}", x), IndexError),
    "asks for argument 'y', but .* are none": (lambda x: tp.debug.print("{y}"), KeyError),
    r"the format '.2f' is for a number, but the value has shape \[3\]": (
        lambda x: tp.debug.print("{:.2f}", x), TypeError),
    "unbound axis name: j": (lambda x: tp.debug.assert_replicated(x, "j"), NameError),
}  # fmt: skip


@pytest.mark.parametrize("text", MISUSE)
def test_misuse(run, text):
    call, kind = MISUSE[text]
    with pytest.raises(kind, match=text):
        run(call, torch.ones(4, 3), axis_name="i")


# assert_replicated -------------------------------------------------------------------------------


def test_replicated_values_pass(run):
    def f(w, x):
        nan = tp.psum(x, "i") * float("nan")
        state = {"w": w, "n": 3, "none": None, "nan": nan, "flag": w > 0, "empty": w.new_zeros(0)}
        tp.debug.assert_replicated(state, "i")
        return x

    result, _ = run(f, torch.ones(3), X, axis_name="i", in_axes=(None, 0))
    assert result.tolist() == X.tolist()


def test_different_values_raise(run):
    def f(x):
        tp.debug.assert_replicated({"w": tp.psum(x, "i"), "b": [x]}, "i")
        return x

    with pytest.raises(ValueError, match="assert_replicated") as info:
        run(f, X, axis_name="i")
    assert str(info.value) == (
        "assert_replicated: x['b'][0] differs between devices of axis 'i' (largest difference 3). "
        "Reduce it over the axis, for example with pmean."
    )


def test_checks_inside_derivatives_and_batches(run):
    def loss(x, k):
        tp.debug.assert_replicated(x * k, "i")
        return x**2

    def f(x):
        return tp.vmap(lambda k: tp.grad(loss)(x, k))(torch.tensor([0.0, 1.0, 2.0]))

    for _ in range(2):  # the pool goes on after a check has failed
        result, _ = run(f, torch.ones(4), axis_name="i")
        assert result.tolist() == [[2.0] * 3] * 4
        with pytest.raises(ValueError, match="largest difference 6"):
            run(f, X, axis_name="i")


def test_copies_on_the_devices():
    w = tp.replicate({"w": torch.ones(3)})
    tp.debug.assert_replicated((w, 3, torch.zeros(2)))
    cut = tp.pmap(lambda x: x, "i", compile=False)(X)
    with pytest.raises(ValueError, match=r"x\['y'\] is PartitionSpec\('i',\), so devices hold"):
        tp.debug.assert_replicated({"y": cut})
    one, other = torch.ones(3), torch.tensor([1.0, 1.5, 1.0])
    layout = tp.replicate(one)._alive()[0]
    team = tp._runtime.current.runtime().team(layout.ranks)
    broken = tp._sharded.tensor.make_sharded(layout, team.runtime.put(team, [one, one, other, one]))
    with pytest.raises(ValueError, match=r"x differs between devices \(largest difference 0.5\)"):
        tp.debug.assert_replicated(broken)
