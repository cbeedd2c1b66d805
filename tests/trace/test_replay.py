"""Covers: _trace/replay.py: the kernels of a loop's body, repeated by C++."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchpmap._trace.boxed import boxed_body
from torchpmap._trace.replay import Replay, replay_of

pytestmark = [pytest.mark.inductor, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

# a step: (carry, rows, reads) -> (next carry, rows of outputs)

C = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
XS = torch.arange(40.0).reshape(10, 4) / 10


def compiled(step, carry, xs, reads):
    from torch._inductor import standalone_compile

    n, m = len(carry), len(carry) + len(xs)
    given = [*carry, *(x[0] for x in xs), *reads]

    def flat(*values):
        results, rows = step(list(values[:n]), list(values[n:m]), list(values[m:]))
        return (*results, *rows)

    graph = make_fx(flat)(*given)
    settings = {"config_patches": {"size_asserts": False, "cpp.vec_isa_ok": True}}
    artifact = standalone_compile(
        graph, given, dynamic_shapes="from_example_inputs", options=settings
    )
    return boxed_body(artifact, len(flat(*given)))


def noted(step, carry, xs, reads=()):
    return replay_of(compiled(step, carry, xs, reads), carry, xs, reads)


def by_hand(step, carry, xs, reads, steps):
    rows = []
    for k in range(steps):
        carry, ys = step(list(carry), [x[k] for x in xs], list(reads))
        rows.append(ys)
    return carry, [torch.stack(ys) for ys in zip(*rows, strict=True)]


def check(step, carry, xs, reads=(), steps=10):
    found = noted(step, carry, xs, reads)
    assert found is not None
    before = [x.clone() for x in (*carry, *xs, *reads)]
    for length in (1, 2, steps):
        last, rows = by_hand(step, carry, xs, reads, length)
        ys = [torch.empty_like(y) for y in rows]
        got = found.run(length, carry, [x[:length] for x in xs], reads, ys)
        torch.testing.assert_close([*got, *ys], [*last, *rows])
    assert all(torch.equal(a, b) for a, b in zip((*carry, *xs, *reads), before, strict=True))
    return found


def program(step, *carry, xs=(XS,), reads=()):
    """What ``check`` takes."""
    return step, [*(carry or [C])], [*xs], [*reads]


PROGRAMS = {
    "one kernel": program(lambda c, x, r: ([c[0] * 0.5 + x[0]], [])),
    "an output": program(lambda c, x, r: ([c[0] * 0.5], [c[0].sum(1)])),
    "two kernels": program(lambda c, x, r: ([c[0].sum(0)[None] + c[0]], [])),
    "the carry is the output": program(lambda c, x, r: ((y := [c[0] + x[0]]), y)),
    "the carry before is the output": program(lambda c, x, r: ([c[0] + x[0]], c)),
    "an input is the output": program(lambda c, x, r: ([c[0] * r[0]], [x[0], r[0]]), reads=[C + 1]),
    "two that change places": program(lambda c, x, r: ([c[1], c[0] + c[1]], []), C, C + 1),
    "three in a circle": program(lambda c, x, r: ([c[1], c[2], c[0]], [c[0] * 2]), C, C + 1, C * 2),
    "the carry is a row": program(lambda c, x, r: ([x[0]], [c[0] + x[0]]), C[0].clone()),
    "numbers of other kinds": program(
        lambda c, x, r: ([c[0] + x[0].to(torch.int64), ~c[1]], [c[1] & (c[0] > 3), c[0].double()]),
        torch.arange(4),
        torch.tensor(True),
    ),
    "half precision": program(
        lambda c, x, r: ([c[0] * x[0]], []), C.bfloat16(), xs=[XS.bfloat16()]
    ),
    "an index": program(lambda c, x, r: ([c[0][x[0]]], []), xs=[torch.tensor([[2, 0, 1]] * 10)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_the_steps_one_by_one(name):
    check(*PROGRAMS[name])


@pytest.mark.always
def test_an_output_is_written_where_it_stays():
    found = check(*PROGRAMS["an output"])
    assert all(call.kernel for call in found.calls)  # no copies


def test_many_steps_take_several_turns_of_cpp():
    """C++ returns after some 0.1 s, and goes on from where it was."""
    n = 1 << 16
    start, xs = [torch.zeros(4096)], [torch.ones(n, 1)]
    found = noted(lambda c, x, r: ([c[0] + x[0]], []), start, xs)
    assert found is not None
    (last,) = found.run(n, start, xs, [], [])
    assert last.equal(torch.full((4096,), float(n)))


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="kernels of older torch end the process by SIGFPE"
)
def test_an_error_in_a_step():
    found = noted(
        lambda c, x, r: ([c[0] // x[0]], []), [torch.tensor([60])], [torch.ones(5, 1).long()]
    )
    assert found is not None
    xs = torch.tensor([[2], [3], [0], [5], [7]])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        found.run(5, [torch.tensor([60])], [xs], [], [])
    assert found.run(2, [torch.tensor([60])], [xs[:2]], [], [])[0].tolist() == [10]


BIG = torch.ones(1 << 21)

OTHERS = {
    "a library": program(lambda c, x, r: ([c[0] @ r[0]], []), reads=[torch.ones(4, 4)]),
    "an empty value": program(lambda c, x, r: ([c[0] + 1], []), torch.ones(0)),
    "an empty output": program(lambda c, x, r: ([c[0] + 1], [x[0][:0]])),
    "much memory": program(
        lambda c, x, r: ([c[0] + r[0].exp().cumsum(0)[:12]], []), C.view(-1), reads=[BIG]
    ),
    "a transposed result": program(lambda c, x, r: ([c[0] * 2], [(c[0] + 1).T])),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_code_is_left_to_python(name):
    assert noted(*OTHERS[name]) is None


@pytest.mark.parametrize("code", [lambda values: [values[0] + 1], print, object()])
def test_code_that_is_no_function_of_inductors_is_left_to_python(code):
    assert replay_of(code, [C], [XS], []) is None


def test_a_replay_that_does_not_agree_is_not_used(monkeypatch):
    code = compiled(lambda c, x, r: ([c[0] + x[0]], [c[0]]), [C], [XS], [])
    assert replay_of(code, [C], [XS], []) is not None

    def wrong(self, *args):
        carry = right(self, *args)
        carry[0][0, 0] += args[0] == 2  # only after two steps
        return carry

    right = Replay.run
    monkeypatch.setattr(Replay, "run", wrong)
    assert replay_of(code, [C], [XS], []) is None
