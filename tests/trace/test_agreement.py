"""Covers: _trace/agreement.py, where devices that run Python compare their collectives."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from contextvars import copy_context

import cloudpickle
import pytest
import torch
from _support import eagerly

import torchpmap as tp
from torchpmap._layout import axis_stack
from torchpmap._trace.agreement import Fingerprint

N = 2
X = torch.arange(1.0, N + 1)


@pytest.fixture
def pool():
    tp.init(N)


def total(x):
    return tp.psum(x, "i")


# -- programs that differ between devices, and would exchange equal shapes -------------------------


def swapped(x, odd):
    if odd:
        b = tp.psum(10 * x, "i")
        return tp.psum(x, "i") + 0 * b
    a = tp.psum(x, "i")
    return a + 0 * tp.psum(10 * x, "i")


def swapped_calls_of_a_helper(x, odd):
    if odd:
        b = total(10 * x)
        return total(x) + 0 * b
    a = total(x)
    return a + 0 * total(10 * x)


def swapped_on_one_line(x, odd):
    pair = [lambda: tp.psum(x, "i"), lambda: tp.psum(10 * x, "i")]
    results = [run() for run in (reversed(pair) if odd else pair)]
    return results[1 if odd else 0]


def other_operand_of_one_expression(x, odd):
    return (odd and tp.psum(x, "i")) or (not odd and tp.psum(10 * x, "i"))


def once_more_in_a_loop(x, odd):
    for _ in range(3 if odd else 2):
        x = tp.psum(x, "i")
    return tp.psum(x, "i")


def before_or_after_a_recursion(x, odd):
    def descend(depth, early):
        mine = tp.psum(depth * x, "i") if early else None
        if depth:
            descend(depth - 1, early)
        return mine if early else tp.psum(depth * x, "i")

    return descend(2, odd)


def sum_or_mean(x, odd):
    reduce = tp.pmean if odd else tp.psum
    return reduce(x, "i")


def other_source(x, odd):
    return tp.pbroadcast(x, "i", 1 if odd else 0)


def other_dim(x, odd):
    square = x * torch.arange(4.0).reshape(2, 2)
    return tp.psum_scatter(square, "i", scatter_dimension=1 if odd else 0)


def other_positional_axis(x, odd):
    return tp.psum(x * torch.arange(4.0).reshape(2, 2), ("i", 1 if odd else 0))


def other_order_of_leaves(x, odd):
    short, long = x.expand(2), x.expand(3)
    return tp.psum((long, short) if odd else (short, long), "i")[0].sum()


def other_leaf_is_none(x, odd):
    found = tp.psum({"a": None, "b": x} if odd else {"a": x, "b": None}, "i")
    return found["b"] if odd else found["a"]


def other_keys(x, odd):
    (found,) = tp.psum({"b" if odd else "a": x}, "i").values()
    return found


def backward_of_another(x, odd):
    x = x.clone().requires_grad_()
    a, b = tp.psum(2 * x, "i"), tp.psum(3 * x, "i")
    (b if odd else a).backward()
    return x.grad


def backward_of_another_leaf(x, odd):
    x = x.clone().requires_grad_()
    a, b = tp.psum((2 * x, 3 * x), "i")
    (b if odd else a).backward()
    return x.grad


def gradient_of_another_extreme(x, odd):
    x = x.clone().requires_grad_()
    a, b = tp.pmax(2 * x, "i"), tp.pmax(3 * x, "i")
    (b if odd else a).backward()
    return x.grad


def in_text(x, odd):
    first = "a = tp.psum(x, 'i'); b = tp.psum(10 * x, 'i')"
    second = "b = tp.psum(10 * x, 'i'); a = tp.psum(x, 'i')"
    names = {"tp": tp, "x": x}
    exec(second if odd else first, names)
    return names["a"]


def under_grad(x, odd):
    return tp.grad(lambda x: swapped(x, odd) ** 2)(x)


DIVERGING = [
    *(swapped, swapped_calls_of_a_helper, swapped_on_one_line, other_operand_of_one_expression),
    *(once_more_in_a_loop, before_or_after_a_recursion, sum_or_mean, other_source, other_dim),
    *(other_positional_axis, other_order_of_leaves, other_leaf_is_none, other_keys),
    *(backward_of_another, backward_of_another_leaf, gradient_of_another_extreme, in_text),
    under_grad,
]


@pytest.mark.parametrize("function", DIVERGING, ids=lambda f: f.__name__)
def test_no_value_of_programs_that_differ(function, pool):
    with pytest.raises(tp.CollectiveMismatch, match="devices run different collectives"):
        eagerly(lambda x: function(x, int(tp.axis_index("i")) == 1))(X)
    assert eagerly(total)(X).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("function", [swapped_calls_of_a_helper, backward_of_another])
def test_rows_that_differ(function, pool):
    with tp.debug.fake_pmap(serial=True), pytest.raises(tp.CollectiveMismatch):
        tp.pmap(lambda x: function(x, x > 1), "i")(X)


def over_other_axes(x):
    first = bool(tp.axis_index("rows") == 0)
    return tp.psum(x, "rows" if first else "columns")


def swapped_over_lanes(x):
    odd = bool(tp.axis_index("rows") == 1)
    inner = tp.vmap(lambda v: total_over_both(v, odd), axis_name="columns")
    return inner(x)


def total_over_both(x, odd):
    both = ("rows", "columns")
    if odd:
        b = tp.psum(10 * x, both)
        return tp.psum(x, both) + 0 * b
    a = tp.psum(x, both)
    return a + 0 * tp.psum(10 * x, both)


def test_axes_of_a_mesh_that_differ():
    tp.init(4)
    nested = tp.pmap(tp.pmap(over_other_axes, "columns"), "rows", compile=False)
    with pytest.raises(tp.CollectiveMismatch, match=r"rank 1: .*psum\('rows'\)"):
        nested(torch.arange(4.0).reshape(2, 2))


def test_lanes_on_devices_that_differ(pool):
    with pytest.raises(tp.CollectiveMismatch, match="devices run different collectives"):
        eagerly(swapped_over_lanes, "rows")(torch.arange(6.0).reshape(2, 3))


# -- programs that do not differ -------------------------------------------------------------------


def says_something_on_one_device(x, odd):
    if odd:
        print("odd", end="")
    return tp.psum(x, "i")


def other_order_of_keys(x, odd):
    tree = {"b": 10 * x, "a": x} if odd else {"a": x, "b": 10 * x}
    return tp.psum(tree, "i")["a"]


def other_values_in_the_same_line(x, odd):
    values = [10 * x, x] if odd else [x, 10 * x]
    first, _ = [tp.psum(value, "i") for value in values]
    return first


def gradient(x, odd):
    return tp.grad(lambda x: tp.psum(x**2, "i") / 2)(x)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (says_something_on_one_device, [3.0, 3.0]),
        (other_order_of_keys, [3.0, 3.0]),
        (other_values_in_the_same_line, [21.0, 21.0]),
        (gradient, [2.0, 4.0]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_programs_that_do_not_differ(function, expected, pool):
    def step(x):
        return function(x, int(tp.axis_index("i")) == 1)

    assert eagerly(step)(X).tolist() == expected


# -- fingerprints ----------------------------------------------------------------------------------


def fingerprints(source, filename="user.py"):
    """Those that ``look()`` takes in a program."""
    found = []

    def look():
        found.append(Fingerprint("sum", within=fingerprints.__code__))

    exec(compile(source, filename, "exec"), {"look": look})
    return found


def test_one_program_has_one_fingerprint_per_call():
    source = "def f():\n    look(); look()\n\nfor _ in range(2):\n    f()\nf()"
    keys = [fingerprint.key for fingerprint in fingerprints(source)]
    assert keys[:2] == keys[2:4]
    assert len(set(keys)) == 4  # of f() in the loop two, and of the other f() two
    assert keys == [fingerprint.key for fingerprint in fingerprints(source)]


def test_lambdas_of_one_line_differ():
    first, second = fingerprints("for f in (lambda: look(), lambda: look()): f()")
    assert first != second


def test_folders_and_numbered_sources_do_not_count():
    source = "look()"
    assert fingerprints(source, "/a/user.py") == fingerprints(source, "/b/user.py")
    assert fingerprints(source, "/a/user.py") != fingerprints(source, "/a/other.py")
    assert fingerprints(source, "<eval_with_key>.1") == fingerprints(source, "<eval_with_key>.2")


def test_text_has_the_way_to_the_call():
    def outer():
        return inner()

    def inner():
        return 1, str(Fingerprint("sum", within=test_text_has_the_way_to_the_call.__code__))

    first, second = (function.__code__.co_firstlineno + 1 for function in (outer, inner))
    assert outer()[1] == (
        f"sum at test_agreement.py:{second}:19 in inner, called at "
        f"test_agreement.py:{first}:16 in outer (collective {axis_stack.ordinal()})"
    )


FROM_A_PICKLE = """
import pickle, sys
sys.stdout.write(pickle.loads(sys.stdin.buffer.read())())
"""


def test_fingerprint_is_the_same_in_another_process():
    def key():
        return (lambda: Fingerprint("sum").key.split("|")[3])()

    shipped = cloudpickle.dumps(pickle.loads(cloudpickle.dumps(key)))
    command = [sys.executable, "-c", FROM_A_PICKLE]
    other = subprocess.run(command, input=shipped, capture_output=True, check=True, timeout=60)
    assert other.stdout.decode() == key()


# -- threads ---------------------------------------------------------------------------------------


def on_a_thread(x):
    results = []
    run = copy_context().run
    thread = threading.Thread(target=lambda: results.append(run(failing, x)))
    thread.start()
    thread.join()
    raise results[0]


def failing(x):
    try:
        return tp.psum(x, "i")
    except RuntimeError as error:
        return error


def test_collective_on_a_thread_of_the_functions(pool):
    with pytest.raises(RuntimeError, match="ran on a thread that the function has started"):
        eagerly(on_a_thread)(X)


def test_one_device(pool):
    assert eagerly(total)(torch.ones(1)).tolist() == [1.0]
