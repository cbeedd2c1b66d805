"""Covers: debug/_check.py and _transforms/rows.py: check_pmap finds what it should, and nothing
else.
"""

import numpy as np
import pytest
import torch
from _support import EAGER

import torchpmap as tp
from torchpmap._runtime import inline_mode
from torchpmap.debug import check_pmap

pytestmark = pytest.mark.usefixtures("pool")

X = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -3.0], [2.5, 0.0, 1.0], [-0.75, 4.0, 0.125]])
W = torch.tensor([1.0, -2.0, 0.5])
GRAPH = {"compile": EAGER}
VALUES_ONLY = {"gradients": False, **GRAPH}


def every_collective(w, x):
    y = w * x
    gathered = tp.all_gather(y, "i")
    return {
        "psum": tp.psum(y, "i"),
        "pmean": tp.pmean(y.sin(), "i"),
        "pmax": tp.pmax(y, "i"),
        "groups": tp.psum(y, "i", axis_index_groups=[[0, 2], [3, 1]]),
        "gather": gathered,
        "scatter": tp.psum_scatter(gathered.cos(), "i"),
        "all_to_all": tp.all_to_all(gathered, "i", 0, 0),
        "ppermute": tp.ppermute(y, "i", [(0, 1), (1, 2), (3, 0)]),
        "index": tp.axis_index("i"),
        "grad": tp.grad(lambda y: (tp.psum(y**2, "i") * y).sum())(y),
        "number": 3,
        "nothing": None,
    }


def test_every_collective():
    report = check_pmap(every_collective, W, X, axis_name="i", in_axes=(None, 0), compile=EAGER)
    assert report.values == ("serial", "vmapped", "pmapped")
    assert report.gradients == ("serial", "vmapped", "pmapped")
    assert (report.num_outputs, report.num_gradients) == (11, 2)
    assert report.largest_difference < 1e-3  # of numbers up to 100, in float32


def test_an_error_in_the_lanes_of_a_vmap_is_raised_unless_vmap_lacks_something():
    def refuses_lanes(x):
        if torch._C._functorch.is_batchedtensor(x):
            raise ValueError("no lanes")
        return x

    with pytest.raises(ValueError, match="no lanes"):
        check_pmap(refuses_lanes, X, **VALUES_ONLY)
    assert check_pmap(lambda x: x[x > 0].sum(), X, compile=False).skipped


@pytest.mark.inductor
def test_compiled():
    report = check_pmap(lambda x: tp.pmean(x, "i") * x, X, axis_name="i")
    assert report.values == ("serial", "vmapped", "pmapped")


def test_axes_statics_and_arrays():
    @tp.pmap(axis_name="i", in_axes=(1, None, None), out_axes=(1, None),
             static_broadcasted_argnums=2, compile=EAGER)  # fmt: skip
    def f(tree, w, k):
        return tree["x"] * w + k, tp.psum(tree["y"].sum(), "i")

    report = check_pmap(f, {"x": X.T, "y": X.T.numpy()}, W.double(), 2)
    assert (report.num_outputs, report.num_gradients) == (2, 3)


def test_random_numbers_are_the_same_in_every_way():
    def f(x):
        return x * torch.rand(3) + torch.nn.functional.dropout(x)

    torch.manual_seed(0)
    check_pmap(f, X, compile=EAGER)
    check_pmap(f, X, compile=EAGER, randomness="same")
    after = torch.rand(2)
    torch.manual_seed(0)
    tp.pmap(f, compile=EAGER)(X)
    tp.pmap(f, compile=EAGER)(X)
    assert torch.equal(torch.rand(2), after)  # a check uses up as much as a call


def test_arguments_are_left_alone_and_may_be_sharded():
    x, array = X.clone().requires_grad_(), np.ones((4, 2))
    check_pmap(lambda x, a: (x + 1, a.add_(1)), x, array, compile=EAGER)
    assert x.grad is None
    assert array.tolist() == [[1.0, 1.0]] * 4
    assert check_pmap(lambda x: x * 2, tp.device_put(X, tp.devices()), compile=EAGER)


@pytest.mark.parametrize(
    "around", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")]
)
def test_gradients_are_those_without_the_modes_of_the_caller(around):
    with around():
        report = check_pmap(lambda x: x * 2, X, compile=EAGER)
    assert report.gradients == ("serial", "vmapped", "pmapped")


def test_what_lanes_cannot_do_is_skipped():
    def absolute(x):
        return x if x > 0 else -x

    report = check_pmap(absolute, torch.tensor([1.0, -2.0, 3.0, -4.0]), compile=False)
    assert report.values == ("serial", "pmapped")
    (lanes, gradients) = report.skipped
    assert lanes[0] == "vmapped"
    assert "data-dependent control flow" in lanes[1]
    assert gradients[0] == "the gradients of pmapped"
    assert "cannot be differentiated or batched from outside" in gradients[1]


def test_gradients_inside_belong_to_a_row():
    layer = torch.nn.Linear(3, 1)

    def f(x):
        layer(x).sum().backward()
        mine = layer.weight.grad.clone()
        return mine, tp.psum(layer.weight.grad, "i"), layer.weight.grad

    report = check_pmap(f, X, axis_name="i", compile=False, gradients=False)
    assert report.values == ("serial", "pmapped")
    assert layer.weight.grad is None
    with tp.debug.fake_pmap(serial=True):
        mine, total, after = tp.pmap(f, "i")(X)
    assert mine.squeeze(1).tolist() == after.squeeze(1).tolist() == X.tolist()
    assert total[0].tolist() == [X.sum(0).tolist()]
    assert layer.weight.grad is None


def test_report_reads_well():
    report = check_pmap(total := lambda x: tp.psum(x, "i"), X, axis_name="i", compile=EAGER)
    assert total.__name__ == "<lambda>"
    lines = str(report).splitlines()
    assert lines[0].startswith("check_pmap(<lambda>): equal, largest difference ")
    assert lines[1:3] == [
        "  values (1): serial, vmapped, pmapped",
        f"  gradients (1): {', '.join(report.gradients)}",
    ]
    for line, (what, why) in zip(lines[3:], report.skipped, strict=True):
        assert line == f"  not compared: {what}, because: {why}"


@pytest.mark.parametrize(("x", "options"), [(X, VALUES_ONLY), (torch.arange(4), GRAPH)])
def test_without_gradients(x, options):
    report = check_pmap(lambda x: tp.psum(x, "i"), x, axis_name="i", **options)
    assert (report.num_outputs, report.num_gradients) == (1, 0)
    assert (report.gradients, report.skipped) == ((), ())


# What it finds: functions that know how they are run, and do something else in one way -----------


def lanes_only():
    """Whether this is the vmapped way."""
    return inline_mode.active() and not inline_mode.serial()


class Faulty(torch.autograd.Function):
    """x, whose gradient is wrong by a factor for row elements above 3, in the vmapped way."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.where((x > 3) & lanes_only(), 10.0, 1.0) * grad


def wrong_value(x):
    wrong = torch.where(x == 4.0, 1.0, 0.0) if lanes_only() else 0.0
    return {"right": x, "y": x + wrong}


def raised_in_lanes(x):
    return x + 0.25 if lanes_only() else x


@pytest.mark.parametrize(
    ("f", "x", "options", "text"),
    [
        (wrong_value, X, GRAPH,
         r"^check_pmap\(wrong_value\): the output of wrong_value\['y'\] differs at index \(3, 1\): "
         r"serial gives 4.0 and vmapped gives 5.0 \(difference 1, allowed 1e-05 \+ 0.0001 \* "
         r"\|serial\|\); 1 of 12 elements differ\.$"),
        (lambda tree: Faulty.apply(tree["x"]) * tree["w"], {"x": X, "w": W},
         {"in_axes": ({"x": 0, "w": None},), **GRAPH},
         r"the gradient to argument tree\['x'\] differs at index \(3, 1\): serial gives .*; "
         "1 of 12 elements differ"),
        (lambda x: x + 1 if type(x).__name__ == "FakeTensor" else x, X, VALUES_ONLY,
         r"serial gives 0.0 and pmapped gives 1.0"),
        (lambda x: x.double() if lanes_only() else x, X, GRAPH,
         r"serial gives float32\[4, 3\] and vmapped gives float64"),
        (lambda x: (x,) if lanes_only() else x, X, GRAPH,
         "the structure of the result differs: serial gives"),
        (lambda x: [None if lanes_only() else x], X, GRAPH,
         r"\[0\] differs: serial gives float32\[4, 3\] and vmapped gives None"),
        (lambda x: x * float("nan") if lanes_only() else x, X, VALUES_ONLY,
         "and vmapped gives nan"),
        (raised_in_lanes, X, {**VALUES_ONLY, "atol": 0.2, "rtol": 0}, r"allowed 0.2 \+ 0 "),
        # integers have no tolerance
        (lambda n: n + lanes_only(), torch.arange(4), {**VALUES_ONLY, "atol": 3.0}, "allowed 0 "),
    ],
)  # fmt: skip
def test_differences_are_named(f, x, options, text):
    with pytest.raises(AssertionError, match=text):
        check_pmap(f, x, **options)


def test_nan_equals_nan_and_differences_within_the_tolerances_are_allowed():
    check_pmap(lambda x: x * float("nan"), X, **VALUES_ONLY)
    check_pmap(raised_in_lanes, X, atol=0.3, **VALUES_ONLY)
    check_pmap(raised_in_lanes, X.abs() + 1, rtol=0.3, **VALUES_ONLY)


@pytest.mark.parametrize("name", ["rtol", "atol"])
@pytest.mark.parametrize("value", [-1, float("nan")])
def test_tolerances_are_not_negative(name, value):
    with pytest.raises(ValueError, match=f"check_pmap: {name} must be 0 or more, but got {value}"):
        check_pmap(lambda x: x, X, **{name: value})


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (2**53, 2**53 + 1),
        (-(2**63), -(2**63) + 1),
        (complex(0.0, float("inf")), complex(1.0, float("inf"))),
        (complex(float("nan"), 1.0), complex(float("nan"), 2.0)),
        (float("inf"), -float("inf")),
    ],
)
def test_no_bit_is_lost(value, other):
    right, wrong = (torch.tensor([x] * 4) for x in (value, other))
    check_pmap(lambda x, y: x, right, wrong, **VALUES_ONLY)
    with pytest.raises(AssertionError, match="4 of 4 elements differ"):
        check_pmap(lambda x, y: y if lanes_only() else x, right, wrong, **VALUES_ONLY)


# What it refuses ---------------------------------------------------------------------------------


def test_options_twice_are_refused():
    with pytest.raises(TypeError, match="a function that is mapped already brings its own options"):
        check_pmap(tp.pmap(lambda x: x), X, axis_name="i")
