"""Covers: _trace/agreement.py, where devices that run Python compare their collectives."""

import functools
import pickle
import subprocess
import sys
from contextvars import copy_context

import pytest
import torch
import torch.distributed as dist
from _support import eagerly, in_threads, wait_for

import torchpmap as tp
from torchpmap._base.deadline import Deadline
from torchpmap._base.torch_groups import register_group, unregister_group
from torchpmap._layout import axis_stack
from torchpmap._trace import agreement
from torchpmap._trace.agreement import Fingerprint
from torchpmap._trace.pickling import pickled

N = 2
X = torch.arange(1.0, N + 1)


@pytest.fixture
def pool():
    tp.init(N)


def total(x):
    return tp.psum(x, "i")


DIRECT = functools.partial(tp.psum, axis_name="i")


def swapped(reduce):
    """The sums of two values, on odd devices the other way round."""

    def run(x, odd):
        if odd:
            b = reduce(10 * x)
            return reduce(x) + 0 * b
        a = reduce(x)
        return a + 0 * reduce(10 * x)

    return run


def swapped_on_one_line(x, odd):
    pair = [lambda: tp.psum(x, "i"), lambda: tp.psum(10 * x, "i")]
    results = [run() for run in (reversed(pair) if odd else pair)]
    return results[1 if odd else 0]


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


def backward_of_another(pair):
    def run(x, odd):
        x = x.clone().requires_grad_()
        pair(x)[int(odd)].backward()
        return x.grad

    return run


one_by_one = backward_of_another(lambda x: (tp.psum(2 * x, "i"), tp.psum(3 * x, "i")))


def under_grad(x, odd):
    return tp.grad(lambda x: swapped(DIRECT)(x, odd) ** 2)(x)


IN_TEXT = [
    "a = tp.psum(x, 'i'); b = tp.psum(10 * x, 'i')",
    "b = tp.psum(10 * x, 'i'); a = tp.psum(x, 'i')",
]
SQUARE = torch.arange(4.0).reshape(2, 2)
DIVERGING = {
    "swapped": swapped(DIRECT),
    "swapped calls of a helper": swapped(total),
    "swapped on one line": swapped_on_one_line,
    "once more in a loop": once_more_in_a_loop,
    "before or after a recursion": before_or_after_a_recursion,
    "backward of another": one_by_one,
    "backward of another leaf": backward_of_another(lambda x: tp.psum((2 * x, 3 * x), "i")),
    "gradient of another extreme": backward_of_another(
        lambda x: (tp.pmax(2 * x, "i"), tp.pmax(3 * x, "i"))
    ),
    "under grad": under_grad,
    "in text": lambda x, odd: exec(IN_TEXT[odd], {"tp": tp, "x": x}),
    "other operand": lambda x, odd: (odd and tp.psum(x, "i")) or (not odd and tp.psum(2 * x, "i")),
    "sum or mean": lambda x, odd: (tp.pmean if odd else tp.psum)(x, "i"),
    "other source": lambda x, odd: tp.pbroadcast(x, "i", 1 if odd else 0),
    "other dim": lambda x, odd: tp.psum_scatter(x * SQUARE, "i", scatter_dimension=int(odd)),
    "other positional axis": lambda x, odd: tp.psum(x * SQUARE, ("i", 1 if odd else 0)),
    "other order of leaves": lambda x, odd: tp.psum((x.expand(2 + odd), x.expand(3 - odd)), "i"),
    "other leaf is None": lambda x, odd: tp.psum(
        {"a": None, "b": x} if odd else {"a": x, "b": None}, "i"
    ),
    "other keys": lambda x, odd: tp.psum({"b" if odd else "a": x}, "i"),
}


@pytest.mark.parametrize("name", DIVERGING)
def test_no_value_of_programs_that_differ(name, pool):
    with pytest.raises(tp.CollectiveMismatch, match="devices run different collectives"):
        eagerly(lambda x: DIVERGING[name](x, int(tp.axis_index("i")) == 1))(X)
    assert eagerly(total)(X).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("function", [swapped(total), one_by_one])
def test_rows_that_differ(function, pool):
    with tp.debug.fake_pmap(serial=True), pytest.raises(tp.CollectiveMismatch):
        tp.pmap(lambda x: function(x, x > 1), "i")(X)


def test_axes_of_a_mesh_that_differ():
    def over_other_axes(x):
        return tp.psum(x, "rows" if bool(tp.axis_index("rows") == 0) else "columns")

    tp.init(4)
    nested = tp.pmap(tp.pmap(over_other_axes, "columns"), "rows", compile=False)
    with pytest.raises(tp.CollectiveMismatch, match=r"rank 1: .*psum\('rows'\)"):
        nested(torch.arange(4.0).reshape(2, 2))


def test_lanes_on_devices_that_differ(pool):
    def swapped_over_lanes(x):
        odd = bool(tp.axis_index("rows") == 1)
        both = swapped(functools.partial(tp.psum, axis_name=("rows", "columns")))
        return tp.vmap(lambda v: both(v, odd), axis_name="columns")(x)

    with pytest.raises(tp.CollectiveMismatch, match="devices run different collectives"):
        eagerly(swapped_over_lanes, "rows")(torch.arange(6.0).reshape(2, 3))


def other_values_in_the_same_line(x, odd):
    values = [10 * x, x] if odd else [x, 10 * x]
    first, _ = [tp.psum(value, "i") for value in values]
    return first


SAME = {
    "a print": (lambda x, odd: (odd and print("odd", end=""), tp.psum(x, "i"))[1], [3.0, 3.0]),
    "other order of keys": (
        lambda x, odd: tp.psum({"b": x, "a": -x} if odd else {"a": -x, "b": x}, "i")["b"],
        [3.0, 3.0],
    ),
    "other values": (other_values_in_the_same_line, [21.0, 21.0]),
    "a gradient": (lambda x, odd: tp.grad(lambda x: tp.psum(x**2, "i") / 2)(x), [2.0, 4.0]),
    "one device": (lambda x, odd: total(x), [1.0]),
}


@pytest.mark.parametrize("name", SAME)
def test_programs_that_do_not_differ(name, pool):
    function, expected = SAME[name]
    step = eagerly(lambda x: function(x, int(tp.axis_index("i")) == 1))
    assert step(X[: len(expected)]).tolist() == expected


def fingerprints(source, filename="user.py"):
    """Those that ``look()`` takes in a program."""
    found = []

    def look():
        found.append(Fingerprint("sum", within=fingerprints.__code__))

    exec(compile(source, filename, "exec"), {"look": look})
    return found


def test_programs_and_their_fingerprints():
    source = "def f():\n    look(); look()\n\nfor _ in range(2):\n    f()\nf()"
    keys = [fingerprint.key for fingerprint in fingerprints(source)]
    assert keys[:2] == keys[2:4]
    assert len(set(keys)) == 4  # of f() in the loop two, and of the other f() two
    assert keys == [fingerprint.key for fingerprint in fingerprints(source)]
    first, second = fingerprints("for f in (lambda: look(), lambda: look()): f()")
    assert first != second  # lambdas of one line
    assert fingerprints("look()", "/a/user.py") == fingerprints("look()", "/b/user.py")
    assert fingerprints("look()", "/a/user.py") != fingerprints("look()", "/a/other.py")
    numbered = "<eval_with_key>.1", "<eval_with_key>.2"
    assert fingerprints("look()", numbered[0]) == fingerprints("look()", numbered[1])


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

    shipped = pickled(pickle.loads(pickled(key)))
    command = [sys.executable, "-c", FROM_A_PICKLE]
    other = subprocess.run(command, input=shipped, capture_output=True, check=True, timeout=60)
    assert other.stdout.decode() == key()


def test_collective_on_a_thread_of_the_functions(pool):
    def on_a_thread(x):
        context = copy_context()
        return in_threads(1, lambda _: context.run(tp.psum, x, "i"))[0]

    with pytest.raises(RuntimeError, match="ran on a thread that the function has started"):
        eagerly(on_a_thread)(X)


def test_none_raises_while_another_still_sends(monkeypatch):
    """Or that one may wait for Gloo without end; at most a second, as it may have died."""
    monkeypatch.setattr(agreement, "Deadline", lambda _: Deadline(60))
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 3)  # held here: the registry does not
    register_group("test_agreement", group)
    left = []

    def member(k):
        wait_for(lambda: store.add("here", 0) % 3 == k)  # one after the other
        assert not left[len(left) // 3 * 3 :]
        agreement._await_all(3, "test_agreement")
        left.append(k)

    try:
        for times in (1, 2):
            in_threads(3, member)
            assert len(left) == 3 * times
    finally:
        unregister_group("test_agreement")
