"""Covers: _trace/buckets.py: sums run in buckets beside the computation; CPUs stand for GPUs."""

import re
from datetime import timedelta
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from _support import EAGER, close
from _traced import F32
from _traced import traced as traced_of
from hypothesis import given, settings

import torchpmap as tp
from torchpmap._base.devices import PLATFORMS
from torchpmap._base.platform import Accelerator, Platform
from torchpmap._base.torch_groups import add_backend, make_gloo, register_group, unregister_group
from torchpmap._trace import compile as _compile

LAYERS, WIDTH, ROWS = 4, 8, 4
WEIGHT_BYTES = WIDTH * WIDTH * 4
GROUP = "alone"


class Overlapping(Platform):
    """A CPU whose sums go in buckets of so many bytes."""

    def __init__(self, bucket_bytes):
        self.bucket_bytes = bucket_bytes


@pytest.fixture
def buckets(monkeypatch):
    """Sets the size of buckets in this process, which traces; workers only run what they get."""

    def buckets(num_bytes):
        monkeypatch.setitem(PLATFORMS, "cpu", Overlapping(num_bytes))

    return buckets


@pytest.fixture(scope="module")
def group():
    """A process group of this process alone: a sum is what was given."""
    store, wait = dist.HashStore(), timedelta(seconds=10)
    alone = dist.ProcessGroup(store, 0, 1)
    add_backend(alone, "cpu", "GLOO", make_gloo(store, 0, 1, None, wait, wait), is_default=True)
    register_group(GROUP, alone)
    yield
    unregister_group(GROUP)


def traced(function, *shapes, **options):
    """The graph of a function of tensors that gives several."""
    return traced_of(function, *shapes, size=2, group=GROUP, **options).graph


def loss(weights, x):
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x.square().mean()


def gradients(*given):
    *weights, x = given
    return torch.func.grad(loss)(tuple(weights), x)


def mean_gradients(*given):
    return tp.pmean(gradients(*given), "i")


def step(*given):
    return [w - 0.1 * g for w, g in zip(given[:-1], mean_gradients(*given), strict=True)]


def norms(*given):
    return [g.square().sum() for g in mean_gradients(*given)]


SHAPES = [(WIDTH, WIDTH)] * LAYERS + [(ROWS, WIDTH)]
IN_TURN = ["mm"] * LAYERS + ["mm", "all_reduce"] + ["mm", "mm", "all_reduce"] * (LAYERS - 1)
"""Forward, then the gradient of the last weight, and of each other after that of what goes in."""


def named(graph):
    """Of each node, the name of its operation and the node."""
    return [
        (re.sub(r"^\w+\.|\.\w+$", "", str(node.target)), node)
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]


def order(graph, names=("mm", "all_reduce", "wait_tensor")):
    return [name for name, _ in named(graph) if name in names]


def sizes(graph, *given):
    """How many numbers each sum carries, in the order of the launches."""
    found = []

    class Watch(torch.fx.Interpreter):
        def run_node(self, n):
            value = super().run_node(n)
            if "all_reduce" in str(n.target):
                found.append(value.numel())
            return value

    Watch(graph).run(*given)
    return found


def examples(shapes=SHAPES, seed=0):
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=make) for shape in shapes]


def test_a_sum_starts_behind_its_gradient_and_is_awaited_before_its_first_use(buckets):
    buckets(WEIGHT_BYTES)
    graph = traced(step, *SHAPES)
    assert order(graph) == [*IN_TURN, *["wait_tensor"] * LAYERS]
    previous = dict(pairwise(node for _, node in named(graph)))
    behind = {after: before for before, after in previous.items()}
    launches = [node for name, node in named(graph) if name == "all_reduce"]
    assert [behind[node] for node in launches] == [node.args[0] for node in launches]
    waits = [node for name, node in named(graph) if name == "wait_tensor"]
    assert all(previous[node] in node.users for node in waits)


def test_without_buckets_all_gradients_are_one_sum_at_the_end(buckets):
    graph = traced(step, *SHAPES)
    assert order(graph)[-2:] == ["all_reduce", "wait_tensor"]
    assert order(graph).count("all_reduce") == 1
    assert (Platform.bucket_bytes, Accelerator.bucket_bytes) == (None, 25 * 2**20)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (0, [64, 64, 64, 64]),
        (2 * WEIGHT_BYTES - 1, [64, 64, 64, 64]),
        (2 * WEIGHT_BYTES, [128, 128]),
        (3 * WEIGHT_BYTES, [192, 64]),
        (100 * WEIGHT_BYTES, [256]),
    ],
)
def test_buckets_are_filled_up_to_their_size(buckets, group, limit, expected):
    buckets(limit)
    assert sizes(traced(step, *SHAPES), *examples()) == expected


def twice(*xs):
    return tp.psum(tp.psum(xs, "i"), "i")


MESSAGES = {
    "a large tensor goes alone and without a copy": (
        300, lambda *xs: tp.psum([x * 2 for x in xs], "i"), [(5,), (100,), (7,), ()],
        [5, 100, 8], 1),
    "sums over several axes share messages": (1000, twice, [(10,), (20,)], [30, 30], 2),
    "extremes are one message": (
        64, lambda *xs: tp.pmax(list(xs), "i"), [(40,), (50,)], [90], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(buckets, group, name):
    limit, function, shapes, expected, copies = MESSAGES[name]
    buckets(limit)
    graph = traced(function, *shapes)
    assert sizes(graph, *examples(shapes)) == expected
    assert order(graph, ("cat",)) == ["cat"] * copies


def test_the_same_sums_one_by_one_go_in_the_same_buckets(buckets, group):
    def one_by_one(*given):
        pairs = zip(given[:-1], gradients(*given), strict=True)
        return [w - 0.1 * tp.pmean(g, "i") for w, g in pairs]

    buckets(2 * WEIGHT_BYTES)
    graph = traced(one_by_one, *SHAPES)
    assert sizes(graph, *examples()) == [128, 128]
    assert order(graph)[-2:] == ["wait_tensor", "wait_tensor"]


def test_a_sum_does_not_wait_for_one_that_depends_on_it(buckets, group):
    buckets(1000)

    def chain(x, y):
        first = tp.psum(x.sin(), "i")
        return [tp.psum(first @ y, "i"), tp.psum(y.cos(), "i")]

    graph = traced(chain, (4, 4), (4, 4))
    assert sizes(graph, *examples([(4, 4)] * 2)) == [32, 16]
    assert order(graph) == ["all_reduce", "wait_tensor", "mm", "all_reduce", "wait_tensor"]


def test_what_is_cheap_goes_up_with_a_sum(buckets):
    def scaled(*given):
        wanted = reversed(gradients(*given))
        return [tp.psum((g * 2).T.to(torch.float64), "i") for g in wanted]

    buckets(0)
    assert order(traced(scaled, *SHAPES), ("mm", "all_reduce")) == IN_TURN


def test_other_collectives_keep_their_order(buckets):
    def mixed(x, y):
        a = tp.all_gather(x @ y, "i").sum(0)
        b = tp.pmax(x + y, "i")
        c = tp.all_to_all(x @ y.T, "i", 0, 0, tiled=True)
        d = tp.ppermute(y @ x, "i", [(0, 1)])
        e = tp.psum_scatter(y, "i", tiled=True)
        return [*tp.psum([a, b, c, d, x * 2], "i"), e]

    kinds = ("all_gather_into_tensor", "all_to_all_single", "ppermute", "reduce_scatter_tensor")
    flat = traced(mixed, (4, 4), (4, 4))
    buckets(64)
    graph = traced(mixed, (4, 4), (4, 4))
    assert order(graph, kinds) == order(flat, kinds)
    assert len(order(graph, kinds)) == 4
    launches = [node.args[1] for name, node in named(graph) if name == "all_reduce"]
    assert launches[0] == "sum"  # of x * 2, which needs nothing else
    assert launches.count("max") == 1


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what Inductor imports
@pytest.mark.parametrize("function", [step, norms])
def test_compiled_code_starts_sums_while_it_computes(buckets, group, monkeypatch, function):
    """``norms`` could free each gradient at once: Inductor would wait for each sum to do so."""
    width = 80
    shapes = [(width, width)] * LAYERS + [(ROWS, width)]
    buckets(width * width * 4)
    graph = traced(function, *shapes)
    codes = []
    name = "torch._inductor.graph.GraphLowering.save_output_code"  # a long import
    monkeypatch.setattr(name, codes.append)
    with torch._inductor.config.patch(force_disable_caches=True):
        kinds = [(shape, F32) for shape in shapes]
        runner = _compile._inductor(graph, kinds, torch.device("cpu"), _compile.INDUCTOR)
    found = re.findall(r"^ +.*(mm|all_reduce_|wait_tensor)(?:\.default)?\(", codes[0], re.M)
    in_turn = [name.replace("all_reduce", "all_reduce_") for name in IN_TURN]
    assert found == [*in_turn, *["wait_tensor"] * LAYERS]
    given = examples(shapes)
    close(runner(list(given)), graph(*given))


@pytest.fixture
def both(pool, buckets):
    """Results on four devices without buckets and with them."""

    def both(function, *given, limit=2 * WEIGHT_BYTES, around=lambda f: f, **options):
        results = []
        for each in (None, limit):
            buckets(each)
            mapped = tp.pmap(lambda *xs: function(*xs), "i", compile=EAGER, **options)
            out = around(mapped)(*given)
            results.append([x.cpu() for x in torch.utils._pytree.tree_leaves(out)])
        return results

    return both


def weights_and_rows(dtype=F32):
    *weights, x = examples([*SHAPES[:-1], (4, ROWS, WIDTH)])
    return [w.to(dtype) for w in weights], x.to(dtype)


AXES = (*[None] * LAYERS, 0)


def test_a_step_equals_one_without_buckets_and_one_on_one_device(both):
    weights, x = weights_and_rows()
    flat, found = both(step, *weights, x, in_axes=AXES, out_axes=None)
    assert all(map(torch.equal, flat, found))
    alone = torch.func.grad(loss)(tuple(weights), x.flatten(0, 1))
    for got, weight, gradient in zip(found, weights, alone, strict=True):
        torch.testing.assert_close(got, weight - 0.1 * gradient)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.int16, torch.int64, torch.float8_e5m2),
        *(torch.bfloat16, torch.float16, torch.float64, torch.complex64),
    ],
    ids=str,
)
def test_every_dtype(both, dtype):
    given = [(4 * torch.rand(4, n)).to(dtype) for n in (3, 40, 200, 1)]
    total = lambda *xs: tp.psum([x.reshape(1, -1) for x in xs], "i")  # noqa: E731
    flat, found = both(total, *given, limit=500)
    assert all(map(torch.equal, flat, found))
    assert [x.dtype for x in found] == [tp.psum([g], ()).pop().dtype for g in given]


def test_derivatives_from_outside(both):
    def value(*given):
        *weights, x = given
        return loss(tp.pmean(weights, "i"), x)

    def around(mapped):
        return torch.func.grad(lambda *given: mapped(*given).sum(), tuple(range(LAYERS)))

    weights, x = weights_and_rows(torch.float64)
    flat, found = both(value, *weights, x, limit=WEIGHT_BYTES, around=around, in_axes=AXES)
    assert all(map(torch.equal, flat, found))
    alone = torch.func.grad(lambda w: 4 * loss(w, x.flatten(0, 1)))(tuple(weights))
    close(found, alone)


# Programs of operations on a list of matrices; psum of several goes in buckets. Each takes the list
# and two places in it.
OPERATIONS = {
    "product": lambda xs, a, b: xs.append(xs[a] @ xs[b] / WIDTH),
    "sum": lambda xs, a, b: xs.append(xs[a] + xs[b]),
    "view": lambda xs, a, b: xs.append(xs[a].T),
    "write": lambda xs, a, b: xs[a].add_(xs[b].clone()),
    "halve": lambda xs, a, b: xs[a].mul_(0.5),
    "total": lambda xs, a, b: xs.append(xs[a].sum() * xs[b]),
    "one": lambda xs, a, b: xs.append(tp.psum(xs[a], "i")),
    "two": lambda xs, a, b: xs.extend(tp.psum([xs[a], xs[b]], "i")),
    "most": lambda xs, a, b: xs.append(tp.pmax(xs[a], "i")),
}
places = st.integers(0, 2)
lines = st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), places, places), max_size=14)


@pytest.mark.long
@settings(max_examples=60)
@given(lines, st.sampled_from([0, WEIGHT_BYTES, 2 * WEIGHT_BYTES, 10**9]))
def test_programs_give_what_they_give_without_buckets(group, lines, limit):
    def program(*given):
        xs = list(given)
        for name, a, b in lines:
            OPERATIONS[name](xs, -1 - a, -1 - b)  # the latest ones: programs are deep
        return xs

    shapes = [(WIDTH, WIDTH)] * 3
    graphs = []
    for each in (None, limit):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(PLATFORMS, "cpu", Overlapping(each))
            graphs.append(traced(program, *shapes))
    flat, found = (graph(*examples(shapes)) for graph in graphs)
    for got, expected in zip(found, flat, strict=True):
        assert torch.equal(got, expected)
