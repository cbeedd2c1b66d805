"""Covers: ``pmap(check_replicated=True)`` compares only what tracing does not prove to be equal."""

import pytest
import torch
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

W = torch.tensor([2.0, 3.0])


def checked(f, compile=EAGER, **options):
    return tp.pmap(f, "i", out_axes=None, check_replicated=True, compile=compile, **options)


PROVED = {
    "psum": lambda x: tp.psum(x, "i"),
    "a tree": lambda x: {"mean": tp.pmean(x, "i"), "max": [tp.pmax(x, "i") * 2]},
    "all_gather": lambda x: tp.all_gather(x, "i"),
    "a closure and a sum": lambda x: W * tp.psum(x, "i"),
    "no part of the index": lambda x: tp.axis_index("i") * 0 + tp.psum(x, "i"),
    "a gradient": lambda x: tp.pmean(tp.grad(lambda w: (w * x).sum())(W), "i"),
    "a scan": lambda x: tp.scan(lambda c, _: (tp.psum(c + x, "i"), c), torch.zeros(()), length=3),
}
UNPROVED = {
    "a row": lambda x: x,
    "equal by arithmetic": lambda x: tp.psum(x, "i") + (x - x),
    "a scan": lambda x: tp.scan(lambda c, _: (c + x, tp.psum(c, "i")), x, length=3)[0],
}


@pytest.mark.parametrize("name", PROVED)
@pytest.mark.parametrize("num_rows", [4, 8, 1])
def test_what_is_proved_is_not_compared(name, num_rows):
    f, x = PROVED[name], torch.arange(float(num_rows))
    lowered = checked(f).lower(x)
    if name != "no part of the index" or num_rows == 1:
        assert lowered.compared == ()
        plain = tp.pmap(f, "i", out_axes=None, compile=EAGER).lower(x)
        assert lowered.as_text() == plain.as_text()
    expected = tp.pmap(f, "i", out_axes=None, compile=False)(x)
    torch.testing.assert_close(values(checked(f)(x)), values(expected))


def values(tree):
    return [torch.as_tensor(leaf).cpu() for leaf in torch.utils._pytree.tree_leaves(tree)]


@pytest.mark.parametrize("name", UNPROVED)
def test_what_is_not_proved_is_compared(name):
    f, x = UNPROVED[name], torch.arange(4.0)
    lowered = checked(f).lower(x)
    (claim,) = lowered.compared
    assert claim == "out_axes is None for the output of <lambda>"
    assert lowered.as_text().endswith(f"\n# compared in each call: {claim}")
    if name == "equal by arithmetic":
        assert checked(f)(x).item() == 6
        return
    with pytest.raises(ValueError, match=f"{claim}, but its value differs between devices"):
        checked(f)(x)


def test_only_the_leaf_that_is_not_proved_is_compared(mode):
    f = checked(lambda x: {"loss": tp.pmean(x, "i"), "own": [x, W]}, mode)
    if mode is EAGER:
        lowered = f.lower(torch.ones(4))
        assert lowered.compared == ("out_axes is None for the output of <lambda>['own'][0]",)
        assert len(lowered.out_layouts) == 3
    found = f(torch.ones(4))
    assert (found["loss"].item(), found["own"][0].item()) == (1, 1)
    text = r"out_axes is None for the output of <lambda>\['own'\]\[0\], but its value differs"
    for x, difference in ((torch.arange(4.0), "3"), (torch.tensor([1.0, 1.0, 1.5, 1.0]), "0.5")):
        with pytest.raises(ValueError, match=rf"{text}.*\(largest difference {difference}\)"):
            f(x)


def test_derivatives_of_what_is_proved():
    x = torch.arange(4.0)
    f = checked(lambda x: tp.psum(x * x, "i"))
    assert torch.func.grad(f)(x).tolist() == (2 * x).tolist()
    found = torch.func.vmap(f)(torch.stack([x, x + 1]))
    assert found.tolist() == [14, 30]


LARGE = 2**60
DIFFERENT = {
    "int64": torch.tensor([LARGE, LARGE + 1]),
    "uint64": torch.tensor([2**63, 2**63 + 1], dtype=torch.uint64),
    "uint32": torch.tensor([2**32 - 1, 2**32 - 2], dtype=torch.uint32),
    "bool": torch.tensor([True, False]),
    "bool of the last": torch.tensor([True, True, True, False]),
    "float16": torch.tensor([1.0, 1.001], dtype=torch.float16),
    "bfloat16": torch.tensor([1.0, 1.01], dtype=torch.bfloat16),
    "small": torch.tensor([1e-300, 2e-300], dtype=torch.float64),
    "nan": torch.tensor([1.0, float("nan")]),
    "nan of the second": torch.tensor([1.0, float("nan"), 1.0, 1.0]),
    "infinities": torch.tensor([float("inf"), -float("inf")]),
    "imaginary part": torch.tensor([1 + 2j, 1 + 3j]),
    "beside a nan": torch.tensor([complex(float("nan"), 1), complex(float("nan"), 2)]),
    "eight rows": torch.arange(8.0),
}
DIFFERENCES = {"bool of the last": "1", "nan of the second": "inf"}
EQUAL = {
    "int64": torch.tensor([LARGE, LARGE]),
    "int64 of four": torch.full((4,), 2**40),
    "eight rows": torch.ones(8),
    "uint64": torch.tensor([2**63 + 1, 2**63 + 1], dtype=torch.uint64),
    "nan": torch.tensor([float("nan")] * 2),
    "infinity": torch.tensor([float("inf")] * 2),
    "zeros": torch.tensor([0.0, -0.0]),
    "complex": torch.tensor([complex(float("nan"), 2)] * 2),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_comparison_loses_no_bits(name, mode):
    difference = DIFFERENCES.get(name, "")
    with pytest.raises(
        ValueError, match=rf"differs between devices \(largest difference {difference}"
    ):
        checked(lambda x: x, mode)(DIFFERENT[name])


@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_are_equal(name, mode):
    found = checked(lambda x: x, mode)(EQUAL[name])
    assert repr(found.item()) == repr(EQUAL[name][0].item())


def _foreach(z, x):
    torch._foreach_add_([z.detach()], [x])


WRITES = {
    "detach": lambda z, x: z.detach().add_(x),
    "view": lambda z, x: z.view(1, -1)[0].add_(x),
    "data": lambda z, x: z.data.copy_(x),
    "out=": lambda z, x: torch.add(x, 1, out=z.detach()),
    "list": _foreach,
    "scatter": lambda z, x: z.detach().scatter_(0, torch.tensor([0]), x),
    "index": lambda z, x: z.detach().__setitem__(0, x[0]),
    "unfold": lambda z, x: z.unfold(0, 1, 1).squeeze(1).mul_(0).add_(x),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_through_another_name_is_seen(name):
    def f(x):
        z = (tp.axis_index("i") * 0).reshape(1) * torch.ones(1, dtype=torch.int64)
        z = (tp.axis_index("i") * 0).reshape(1) if name != "unfold" else z
        WRITES[name](z, x)
        return z * 2

    with pytest.raises(ValueError, match="differs between devices"):
        checked(f)(torch.tensor([[1], [2]]))


ROWS = torch.tensor([1.0, 2.0])
ENTRANCES = {
    "vmap": lambda g: torch.func.vmap(g)(torch.stack([ROWS, ROWS])),
    "vmap of one that differs": lambda g: torch.func.vmap(g)(torch.stack([ROWS * 0, ROWS])),
    "jvp": lambda g: torch.func.jvp(g, (ROWS,), (ROWS,)),
    "grad": lambda g: torch.func.grad(lambda x: g(x).sum())(ROWS),
    "backward": lambda g: g(ROWS.clone().requires_grad_()).backward(),
    "vmap of grad": lambda g: torch.func.vmap(torch.func.grad(g))(torch.stack([ROWS, ROWS])),
    "grad of vmap": lambda g: torch.func.grad(lambda x: torch.func.vmap(g)(x).sum())(ROWS[None]),
    "jacrev": lambda g: torch.func.jacrev(g)(ROWS),
    "in batches": lambda g: tp.map(g, torch.stack([ROWS] * 3), batch_size=2),
    "inside": lambda g: tp.pmap(lambda k: g(ROWS + k), compile=EAGER)(ROWS).tolist(),
    "inside python": lambda g: tp.pmap(lambda k: g(ROWS + k), compile=False)(ROWS).tolist(),
    "inside a loop": lambda g: tp.pmap(
        lambda k: tp.scan(lambda c, _: (c + g(ROWS + k), None), k, length=3)[0], compile=EAGER
    )(ROWS).tolist(),
    "inside rows": lambda g: tp.pmap(lambda k: g(ROWS + k), compile=EAGER)(torch.ones(8)).tolist(),
    "grad in one process": tp.debug.fake_pmap()(lambda g: torch.func.grad(g)(ROWS)),
    "in one process": tp.debug.fake_pmap()(lambda g: torch.func.vmap(g)(torch.stack([ROWS, ROWS]))),
}


@pytest.mark.parametrize("name", ENTRANCES)
def test_every_entrance_checks(name):
    with pytest.raises(ValueError, match=r"out_axes is None for the output .*differs between dev"):
        ENTRANCES[name](checked(lambda x: x * x))
    ENTRANCES[name](checked(lambda x: tp.psum(x, "i") + (x - x)))


@pytest.mark.parametrize("name", [name for name in ENTRANCES if name.startswith("inside")])
def test_the_promise_of_a_spec_is_checked_inside(name):
    mesh = tp.make_mesh((2,), ("x",))
    specs = {"mesh": mesh, "in_specs": tp.P("x"), "out_specs": tp.P(), "compile": EAGER}
    with pytest.raises(ValueError, match="out_specs does not mention axis 'x' for the output"):
        ENTRANCES[name](tp.shard_map(lambda x: x.sum(), **specs))  # a forgotten psum
    ENTRANCES[name](tp.shard_map(lambda x: tp.psum(x.sum(), "x"), **specs))
