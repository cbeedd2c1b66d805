"""Covers: _collectives/queries.py and its families, on processes, traced, and vmapped."""

import pytest
import torch
from _collective_cases import AUTOGRAD, CASES, PAIRS, RING, ROWS, UNEVEN
from _spmd import spmd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torchpmap._collectives import (
    all_gather,
    all_to_all,
    axis_index,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
)
from torchpmap._layout import axis_stack
from torchpmap._layout.axis_stack import Axis
from torchpmap._transforms.grad import grad
from torchpmap._transforms.vmap import vmap

VMAPPED = [name for name in CASES if name.removeprefix("autograd-") not in AUTOGRAD]


# --- run on the processes -------------------------------------------------------------------------


def trace(f, args, axis):
    """The graph of ``f(*args)`` over (index, *leaves), made with fake tensors; and what f gave."""
    leaves, spec = pytree.tree_flatten(args)
    box = []

    def body(index, *fakes):
        inner = Axis(axis.name, axis.size, index, axis.group, axis.subgroup)
        with axis_stack.bind(inner):
            out = f(*pytree.tree_unflatten(list(fakes), spec))
        flat, out_spec = pytree.tree_flatten(out)
        box[:] = [flat, out_spec]
        return [x.detach() for x in flat if isinstance(x, torch.Tensor)]

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x.clone()) for x in (torch.tensor(0), *leaves)]
    with mode:
        return make_fx(body)(*fakes), box


def run_case(name):
    """What a case gives, what its traced graph gives, and the code of the graph."""
    (axis,) = axis_stack.lookup("i")
    function, inputs, _ = CASES[name]
    args = pytree.tree_map(lambda x: x[int(axis.index)], inputs)
    graph, (leaves, spec) = trace(function, args, axis)
    tensors = iter(graph(axis.index, *pytree.tree_leaves(args)))
    out = [next(tensors) if isinstance(x, torch.Tensor) else x for x in leaves]
    return function(*args), pytree.tree_unflatten(out, spec), graph.code


# of which sums wrap, and the order of the second is not that of its bits
WHOLE = {
    torch.int8: torch.tensor([[90, 30, 0, 60], [-90, 100, -90, 100]] * 2, dtype=torch.int8),
    torch.uint8: torch.tensor([[90, 30, 0, 200]] * 4, dtype=torch.uint8),
    torch.uint64: torch.tensor([[0, -2, -3, -1], [-3, 2, -3, 4]] * 2).view(torch.uint64),
}


def reductions(x):
    return psum(x, "i"), pmax(x, "i"), pmin(x, "i"), pbroadcast(x, "i", 1)


def reductions_of_whole_numbers():
    rank = int(axis_stack.lookup("i")[0].index)
    return [(*reductions(x[rank]), psum_scatter(x[rank], "i")) for x in WHOLE.values()]


def record_calls():
    x = torch.ones(2)
    with axis_stack.recording() as calls:
        psum((x, x, axis_index("i")), "i")
        pmax(x, "i", axis_index_groups=UNEVEN)
        grad(lambda x: (ppermute(x, "i", RING) * all_gather(x, "i")).sum())(x)
        psum(3, "i")
    psum(x, "i")
    return calls


def misuse():
    """Errors that every rank raises before it communicates; the axis works afterwards."""
    x = torch.ones(4)
    for f in (
        lambda: psum(x, "i", axis_index_groups=[[0, 1], [1, 2, 3]]),
        lambda: all_gather(x, "i", axis_index_groups=UNEVEN),
        lambda: psum_scatter(x[:2], "i"),
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - texts are tested below
            f()
    return psum(x, "i").tolist()


@pytest.fixture(scope="module")
def run():
    with spmd(4) as run:
        yield run


# --- the table ------------------------------------------------------------------------------------


def check(results, expected):
    """Compare the results of the devices with the rows of ``expected``; no tensor: the same."""
    wanted, spec = pytree.tree_flatten(expected)
    for rank, result in enumerate(results):
        leaves, got_spec = pytree.tree_flatten(result)
        assert got_spec == spec
        for got, want in zip(leaves, wanted, strict=True):
            if isinstance(want, torch.Tensor):
                torch.testing.assert_close(got, want[rank], rtol=1e-5, atol=1e-5, equal_nan=True)
            else:
                assert got == want
                assert not isinstance(got, torch.Tensor)


@pytest.mark.parametrize("name", CASES)
def test_on_processes_and_as_a_traced_graph(name, run):
    plain, traced, code = zip(*run(run_case, name), strict=True)
    check(plain, CASES[name][2])
    check(traced, CASES[name][2])
    assert len(set(code)) == 1  # the graph is the same on every rank


@pytest.mark.parametrize("name", VMAPPED)
def test_vmapped(name):
    function, inputs, expected = CASES[name]
    expected = pytree.tree_map(
        lambda x: x if x is None or isinstance(x, torch.Tensor) else torch.full((4,), x), expected
    )
    result = vmap(function, axis_name="i")(*inputs)
    got, got_spec = pytree.tree_flatten(result)
    wanted, spec = pytree.tree_flatten(expected)
    assert got_spec == spec
    for leaf, want in zip(got, wanted, strict=True):
        if want is None:
            assert leaf is None
        else:
            torch.testing.assert_close(
                leaf, want, rtol=1e-5, atol=1e-5, equal_nan=True, check_dtype=want.dim() > 1
            )


# --- dtypes ---------------------------------------------------------------------------------------


def test_whole_numbers(run):
    """The result of numpy, on processes and vmapped."""
    everywhere = run(reductions_of_whole_numbers)
    for k, x in enumerate(WHOLE.values()):
        rows = x.numpy()
        wanted = rows.sum(0, dtype=rows.dtype), rows.max(0), rows.min(0), rows[1]
        vmapped = vmap(reductions, axis_name="i", out_axes=None)(x)
        for rank, on_rank in enumerate(everywhere):
            *reduced, part = on_rank[k]
            assert (part.item(), part.dtype) == (wanted[0][rank], x.dtype)
            for got, here, want in zip(reduced, vmapped, wanted, strict=True):
                assert got.tolist() == here.tolist() == want.tolist()
                assert got.dtype == here.dtype == x.dtype


# --- what is sent ---------------------------------------------------------------------------------


def test_record_is_the_same_on_every_rank(run):
    calls, *others = run(record_calls)
    assert others == [calls] * 3
    names = [call[0] for call in calls]
    assert names[:5] == ["all_reduce", "all_reduce", "all_reduce", "permute", "all_gather"]
    assert sorted(names[5:]) == ["permute", "reduce_scatter"]  # the transposes
    assert calls[0] == ("all_reduce", "sum", "axis", (4,), "torch.float32")
    assert calls[2] == ("all_reduce", "max", "axis[0|1,2,3]", (2,), "torch.float32")


def test_misuse_leaves_the_axis_usable(run):
    assert run(misuse) == [[4.0] * 4] * 4


def operations(f, *args):
    axis = Axis("i", 4, torch.tensor(0), "axis", lambda partition: f"axis{len(partition)}")
    with axis_stack.recording() as calls:
        graph, _ = trace(f, args, axis)
    assert calls == []
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_tree_travels_as_one_message_per_dtype():
    names = operations(lambda x: psum([x, x * 2, x.to(torch.int64), x[0]], "i"), torch.ones(3))
    assert names.count("_c10d_functional.all_reduce.default") == 2
    assert names.count("_c10d_functional.wait_tensor.default") == 2


def test_every_message_is_waited_for():
    def f(x):
        y = ppermute(x, "i", RING) + psum(all_gather(x, "i").sum(0), "i", axis_index_groups=PAIRS)
        return pmean(y, "i") + psum_scatter(all_to_all(x, "i", 0, 0), "i")

    names = operations(grad(lambda x: f(x).sum()), torch.ones(4))
    sent = [n for n in names if n.startswith(("_c10d", "torchpmap")) and "wait" not in n]
    waits = [n for n in names if "wait_tensor" in n]
    sent.remove("torchpmap.ppermute.default")  # waits by itself, in the forward pass
    sent.remove("torchpmap.ppermute.default")  # and in the backward pass
    assert len(sent) == len(waits)
    assert not any("item" in n or "local_scalar" in n for n in names)


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "kind", "text"),
    [
        (lambda x: psum(x, "j"), NameError, r"unbound axis name: j\. Bound here: 'i' \(size 4\)\."),
        (lambda x: axis_index(("i", "k")), NameError, "unbound axis name: k"),
        (lambda x: psum(x, ("i", "i")), ValueError, "repeated axis in axis_name="),
        (lambda x: psum(x, ("i", 0, -1)), ValueError, "duplicate positional axes"),
        (lambda x: psum(x, ("i", 5)), ValueError,
         "axis 5 is out of bounds for array of dimension 1"),
        (lambda x: all_gather(x, "i", axis=5), ValueError, "axis 5 is out of bounds .*dimension 2"),
        (lambda x: all_gather(x[0], "i", tiled=True), ValueError,
         "axis 0 is out of bounds for array of dimension 0"),
        (lambda x: psum(x, "i", axis_index_groups=[[0, 1]]), ValueError,
         "axis_index_groups must cover all indices exactly once"),
        (lambda x: pmax(x, "i", axis_index_groups=[[0, 1, 2], [2, 3]]), ValueError,
         "axis_index_groups must cover all indices exactly once"),
        (lambda x: psum(x, ("i", 0), axis_index_groups=PAIRS), ValueError,
         "axis_index_groups only supported for sums over just named axes"),
        (lambda x: vmap(lambda y: psum(y, ("i", "j"), axis_index_groups=PAIRS), axis_name="j")(x),
         ValueError,
         r"axis \('i', 'j'\) has the indices 0 to 15, but psum got \[\[0, 1\], \[2, 3\]\]"),
        *(
            (f, ValueError, "must all have the same size")
            for f in (
                lambda x: all_gather(x, "i", axis_index_groups=UNEVEN),
                lambda x: psum_scatter(x, "i", axis_index_groups=UNEVEN),
                lambda x: all_to_all(x, "i", 0, 0, axis_index_groups=UNEVEN),
            )
        ),
        (lambda x: psum_scatter(x[:2], "i"), ValueError,
         "reduce_scatter operand scatter dimension size 2 must match shard count 4"),
        (lambda x: psum_scatter(x[:2], "i", tiled=True), ValueError,
         "tiled reduce_scatter operand scatter dimension size 2 must be divisible by "
         "shard_count 4"),
        (lambda x: psum_scatter(x > 0, "i"), TypeError, "add does not accept dtype bool"),
        (lambda x: all_to_all(x[:2], "i", 0, 0), ValueError,
         r"all_to_all requires the size of the mapped axis axis_name to equal "
         r"x.shape\[split_axis\], but they are 4 and 2 respectively."),
        (lambda x: all_to_all(x[:2], "i", 0, 0, tiled=True), ValueError,
         r"The size of all_to_all split_axis \(2\) has to be divisible by the size of the named "
         r"axis i \(4\)"),
        (lambda x: ppermute(x, "i", [(0, 1), (2, 1)]), ValueError,
         r"ppermute sources and destinations must be unique, got \(\(0, 1\), \(2, 1\)\)\."),
        (lambda x: ppermute(x, "i", [(-1, 0), (3, 1)]), ValueError, "must be unique"),
        (lambda x: ppermute(x, "i", [(0, 4)]), IndexError, "index 4 is out of range .* size 4"),
        (lambda x: pbroadcast(x, "i", 4), IndexError, "pbroadcast: index 4 is out of range"),
        (lambda x: pshuffle(x, "i", [1, 1, 2, 3]), ValueError,
         r"`perm` does not represent a permutation: \[1, 1, 2, 3\]"),
        (lambda x: pmax(x * 1j, "i"), TypeError, "pmax does not accept dtype torch.complex64"),
        (lambda x: psum({"a": [x, "b"]}, "i"), TypeError, r"x\['a'\]\[1\] is 'b' of type str"),
    ],
)  # fmt: skip
def test_message(f, kind, text):
    with pytest.raises(kind, match=text):
        vmap(f, axis_name="i")(torch.ones(4, 4))


def test_result_is_not_a_view_of_the_operand():
    x = ROWS.clone()
    vmap(lambda x: all_gather(x, "i").mul_(0), axis_name="i", out_axes=None)(x)
    assert torch.equal(x, ROWS)


ALONE = [[0], [1], [2], [3]]
OVER_ONE = {
    "psum": lambda x, **how: psum(x, **how),
    "pmax": lambda x, **how: pmax(x, **how),
    "all_gather": lambda x, **how: all_gather(x, **how),
    "all_gather tiled": lambda x, **how: all_gather(x, tiled=True, **how),
    "psum_scatter": lambda x, **how: psum_scatter(x, tiled=True, **how),
    "all_to_all": lambda x, **how: all_to_all(x, split_axis=0, concat_axis=0, tiled=True, **how),
}


@pytest.mark.parametrize("name", OVER_ONE)
def test_result_over_one_device_is_not_the_operand(name):
    def f(x):
        OVER_ONE[name](x, axis_name="i", axis_index_groups=ALONE).mul_(0)
        OVER_ONE[name](x, axis_name=()).mul_(0)
        ppermute(x, (), []).mul_(0)
        pbroadcast(x, (), 0).mul_(0)
        return x

    assert torch.equal(vmap(f, axis_name="i")(ROWS.clone()), ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("values", [[-0.0, 0.0, 0.0], [0.0, 0.0, -0.0]])
def test_signed_zeros_in_any_order(dtype, values):
    zeros = torch.tensor(values, dtype=dtype)
    high, low = vmap(lambda x: (pmax(x, "i"), pmin(x, "i")), axis_name="i", out_axes=None)(zeros)
    assert torch.signbit(torch.stack([high, low])).tolist() == [False, True]


def signed_zeros():
    rank = int(axis_stack.lookup("i")[0].index)
    zero = torch.tensor(0.0 if rank == 2 else -0.0)
    return torch.signbit(torch.stack([pmax(zero, "i"), pmin(zero, "i")]))


def test_signed_zeros_on_processes(run):
    assert [result.tolist() for result in run(signed_zeros)] == [[False, True]] * 4
