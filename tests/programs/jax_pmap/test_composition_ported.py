"""Covers: pmap with compilation, control flow and steps in a loop, as JAX tests them."""

from typing import Any

import pytest
import torch
import torch._dynamo.exc
from _ported import counting, pmap, same, sample

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


def jit(f: Any) -> Any:
    return torch.compile(f, backend="eager")


def difference(x: torch.Tensor) -> torch.Tensor:
    return x - tp.psum(x, "i")


def test_jit_pmap_composition() -> None:
    x = sample(4, 4)
    same(pmap(jit(difference), "i")(x), x - x.sum(0))
    hidden = torch.compiler.disable(pmap(difference, "i"))
    same(jit(lambda x: hidden(x * 2))(x), 2 * (x - x.sum(0)))


def test_jit_pmap_composition_around() -> None:
    """testJitPmapComposition, without torch.compiler.disable."""
    x = sample(4, 4)
    same(jit(pmap(difference, "i"))(x), x - x.sum(0))


def test_composition_with_jit_twice() -> None:
    @jit
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2

        @jit
        def g(z: torch.Tensor) -> Any:
            return pmap(lambda x: x[None] * y)(z) * 1

        return g(x)

    same(f(torch.ones(4, 1)), torch.full((4, 4, 1), 2.0))


def test_jit_in_pmap() -> None:
    devices = tp.devices()[::-1]
    x = sample(4, 3)
    f = pmap(lambda x: jit(lambda x: x - tp.psum(x, "i"))(x), "i", devices=devices)
    same(f(x), x - x.sum(0))


def test_pmap_in_jit() -> None:
    x = sample(4, 3)
    f = pmap(lambda x: x - tp.psum(x, "i"), "i", devices=tp.devices()[::-1])
    same(jit(lambda x: f(x) * 1)(x), x - x.sum(0))


def test_jit_of_pmap_output_sharding() -> None:
    f = pmap(lambda x: x * 2)
    x: Any = torch.ones(4)
    for k in range(10):
        x = f(x)
        assert x.devices() == set(tp.devices())
        same(x, torch.full((4,), 2.0 ** (k + 1)))


def test_issue1065() -> None:
    """testIssue1065: many steps, each of a loss and of an update, from one loop."""
    x, y = sample(4, 3), sample(4, seed=1)
    value = tp.value_and_grad(lambda w, x, y: (x @ w - y) ** 2)

    def step(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss, slope = tp.pmean(value(w, x, y), "i")
        return w - 0.1 * slope, loss

    update = pmap(step, "i", in_axes=(None, 0, 0), out_axes=None)
    w: Any = torch.zeros(3)
    reference = torch.zeros(3)
    for _ in range(20):
        w, loss = update(w, x, y)
        same(loss, ((x @ reference - y) ** 2).mean())
        reference = reference - 0.1 * 2 * ((x @ reference - y)[:, None] * x).mean(0)
    same(w, reference)


def test_issue_1062() -> None:
    """test_issue_1062: a function over a closure whose count changes from step to step."""

    def make(count: int) -> Any:
        def one(x: torch.Tensor) -> torch.Tensor:
            for _ in range(count):
                x = x + tp.psum(1.0, "i")
            return x

        return pmap(one, "i")

    for count in range(3):
        same(make(count)(counting(4)), counting(4) + 4 * count)


def test_axis_index_in_initial_style() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        found = []
        carry = x
        for k in range(3):
            carry = carry + tp.axis_index("i")
            found.append(carry * k)
        return torch.stack(found)

    index = torch.arange(8)
    expected = torch.stack([(index * (k + 1)) * k for k in range(3)], 1)
    same(pmap(f, "i")(torch.zeros(8, dtype=torch.int64)), expected)


@pytest.mark.parametrize("rows", [4, 8])
def test_num_replicas_with_switch(rows: int) -> None:
    """test_num_replicas_with_switch: every row takes its own branch."""

    def f(x: torch.Tensor) -> torch.Tensor:
        total = tp.psum(x, "i")
        return torch.cond(x > 1, lambda x, t: x + t, lambda x, t: x - t, (x, total))

    x = counting(rows)
    total = x.sum()
    same(pmap(f, "i")(x), torch.where(x > 1, x + total, x - total))


def test_post_process_map() -> None:
    """testPostProcessMap: power iteration with the rows of the matrix on the devices."""
    matrix = torch.diag(torch.tensor([1.0, 3.0, 2.0, 0.5])) + 0.1
    multiply = pmap(lambda row, v: row @ v, in_axes=(0, None))
    v: Any = torch.ones(4)
    for _ in range(60):
        product = multiply(matrix, v).to_host()
        v = product / product.norm()
    values, vectors = torch.linalg.eigh(matrix)
    torch.testing.assert_close(v.abs(), vectors[:, -1].abs(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(v @ matrix @ v, values[-1])


def test_post_process_map2() -> None:
    def product(matrix: torch.Tensor, v: torch.Tensor) -> Any:
        return pmap(lambda row: torch.stack([r * v for r in row]).sum(0))(matrix)

    matrix, vectors = sample(4, 3), sample(5, seed=1)
    got = torch.func.vmap(product, in_dims=(None, 0))(matrix, vectors)
    same(got, vectors[:, None] * matrix.sum(1))


def test_while_loop_of_pmap() -> None:
    """test_while_loop_of_pmap of lax_control_flow_test."""
    f = pmap(lambda i, x: (i + 1, x + i))
    i: Any = torch.zeros(4, dtype=torch.int64)
    x: Any = torch.arange(4)
    while int(i[0]) < 5:
        i, x = f(i, x)
    same(i, torch.full((4,), 5))
    same(x, torch.arange(4) + 10)


def test_callback_inside_of_pmap() -> None:
    """callback_inside_of_pmap of python_callback_test: any Python without a graph."""

    def f(x: torch.Tensor) -> torch.Tensor:
        squares = [float(v) ** 2 for v in x.tolist()]
        return torch.tensor(squares)

    same(tp.pmap(f, compile=False)(counting(4, 3)), counting(4, 3) ** 2)


# Programs with a batch axis (batching_test) ------------------------------------------------------


def test_all_gather_of_const() -> None:
    """testAllGatherOfConst of batching_test."""
    for mapping in (lambda f: pmap(f, "i"), lambda f: tp.vmap(f, axis_name="i")):
        same(mapping(lambda x: tp.all_gather(3.0, "i") + x)(counting(4)), _rows_plus_three())


def _rows_plus_three() -> torch.Tensor:
    return (counting(4) + 3)[:, None].expand(4, 4)


def test_reduce_scatter_autodiff() -> None:
    """testReduceScatterAutodiff of batching_test."""
    x, w = sample(4, 4), sample(4, seed=1)
    for mapping in (lambda f: pmap(f, "i"), lambda f: tp.vmap(f, axis_name="i")):
        f = mapping(lambda x, w: w * tp.psum_scatter(x**2, "i"))
        got = torch.func.grad(lambda x, f=f: f(x, w).sum())(x)
        same(got, 2 * x * w)


def test_comm_assoc_collective() -> None:
    """testCommAssocCollective of batching_test."""
    x = sample(4, 3)
    kinds = {"psum": x.sum(0), "pmean": x.mean(0), "pmax": x.amax(0), "pmin": x.amin(0)}
    for name, expected in kinds.items():
        f = pmap(lambda x, name=name: getattr(tp, name)(x, "i"), "i", out_axes=None)
        same(f(x), expected)
        shifted = pmap(lambda x, name=name: x - getattr(tp, name)(x, ("i", 0)), "i")
        total = getattr(x, name.removeprefix("p"))()
        same(shifted(x), x - total)


def test_debug_nans_pmap_with_donation() -> None:
    """testDebugNansPmapWithDonation of debug_nans_test: NaN travels like any number."""
    x = tp.device_put(torch.tensor([1.0, float("nan"), 2.0, 3.0]), tp.devices())
    got = pmap(lambda x: tp.psum(x, "i"), "i", donate_argnums=0)(x)
    assert torch.isnan(got.to_host()).all()
    assert x.is_deleted()
