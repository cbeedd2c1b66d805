"""Covers: _trace/repetition.py: a warning about a Python loop that makes a long graph."""

import warnings

import pytest
import torch
from _support import EAGER

import torchpmap as tp
from torchpmap._trace.repetition import Executions

pytestmark = pytest.mark.usefixtures("pool")

X = torch.linspace(0.1, 0.4, 4)


def many(x, n):
    for _ in range(n):
        x = torch.sin(x)  # one of many steps
    return x


def lowered(f, *args):
    """What ``f.lower`` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tp.pmap(f, "i", compile=EAGER).lower(*(args or (X,)))
    return [str(warning.message) for warning in caught]


def test_past_200_repetitions_a_warning_points_to_scan():
    assert lowered(lambda x: many(x, 200)) == []
    (text,) = lowered(lambda x: many(x, 201))
    assert f"{__file__}:" in text
    assert "`x = torch.sin(x)  # one of many steps` runs 201 times" in text
    assert "(aten.sin.default)" in text
    assert "Write it as torchpmap.scan(body, init, xs)" in text
    f = tp.pmap(lambda x: many(x, 250), compile=EAGER)
    with pytest.warns(UserWarning, match="runs 250 times") as caught:
        f(X)
    assert [warning.filename for warning in caught] == [__file__]
    f(X.repeat(2))  # is traced anew, and any warning is an error


@pytest.mark.parametrize("steps", [150, 201])
def test_a_line_that_calls_the_same_twice_runs_once_for_both(steps):
    def two_calls(x):
        x, index = x.clone(), tp.axis_index("i") * 0
        for _ in range(steps):
            x[index] += torch.sin(torch.sin(x[0]))  # reads and writes x[index]
        return x

    texts = lowered(two_calls, torch.ones(4, 2))
    assert [f"runs {steps} times" in text for text in texts] == [True] * (steps > 200)


def layers(x):
    for weight in torch.eye(3).expand(250, 3, 3):
        x = torch.tanh(x @ weight)
    return x


def nested(x):
    def body(c, _):
        return many(c, 220), None

    return tp.scan(body, x, None, length=3)[0]


LOOPS = {
    "layers": layers,
    "a gradient": lambda x: tp.grad(lambda x: many(x, 210).sum())(x),
    "a sum of collectives": lambda x: sum(tp.psum(x * k, "i") for k in range(220)),
    "a comprehension": lambda x: torch.stack([x.exp() for _ in range(230)]),
    "in the body of a scan": nested,
    "in a vmap": lambda x: torch.func.vmap(lambda x: many(x, 205))(x),
}


def stepped(x):
    return tp.scan(lambda c, _: (torch.sin(c) * 2, None), x, None, length=1000)[0]


def other_shapes(x):
    return sum((x[:k] * 2).sum() for k in range(1, 240))


def twenty_lines(x):
    for _ in range(15):
        x = many(x, 10)
        x = torch.cos(torch.cos(x))
    return x


def every_step_asked_for(x):
    return tp.scan(lambda c, _: (c.sin(), None), x, None, length=250, unroll=True)[0]


MODEL = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(210)))
FINE = {
    "a scan": stepped,
    "derivatives of a scan": torch.func.hessian(lambda x: stepped(x).sum()),
    "a deep model, called once": lambda x: MODEL(x),
    "its gradient": lambda x: tp.grad(lambda x: MODEL(x).sum())(x),
    "unroll=True": every_step_asked_for,
    "few steps, many operations": twenty_lines,
}


@pytest.mark.parametrize("name", [*LOOPS, *FINE])
@pytest.mark.long("a sum of collectives", "its gradient", "a deep model, called once")
def test_only_loops_get_a_warning(name):
    assert len(lowered((LOOPS | FINE)[name], torch.ones(4, 3))) == (name in LOOPS)


def test_many_leaves_and_operations_of_other_shapes_are_no_loop():
    rows = [X] * 300
    assert lowered(lambda xs: sum(x * 2 for x in xs), rows) == []
    (text,) = lowered(lambda xs: many(sum(xs), 320), rows)
    assert "runs 320 times" in text
    texts = lowered(other_shapes, torch.ones(4, 240))
    assert not [text for text in texts if "aten.mul" in text]


def test_the_frames_of_a_trace_are_let_go():
    executions = Executions()

    def note():
        graph = torch.fx.Graph()
        graph.placeholder("x")
        executions.note(graph)

    note()
    assert executions._called is not None
    executions.end()
    assert executions._called is None
