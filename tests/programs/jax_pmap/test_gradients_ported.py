"""Covers: derivatives of mapped functions, from inside and from outside, as JAX tests them."""

from typing import Any

import pytest
import torch
from _ported import check_grads, counting, pmap, rows, same, sample, strided
from torch.utils.checkpoint import checkpoint

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


n = rows(4, 8)


# From outside ------------------------------------------------------------------------------------


def test_grad_basic(n: int) -> None:
    x = sample(n, 2)
    f = pmap(lambda x: torch.sin(x), "i")
    same(torch.func.grad(lambda x: f(x).sum())(x), x.cos())


def test_grad_of_psum(n: int) -> None:
    f = pmap(lambda x: tp.psum(x.sin() * x, "i"), "i")
    check_grads(lambda x: f(x).sum(0), sample(n, 2), forward=True)
    check_grads(f, sample(n, 1), forward=True)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own, of x
def test_jvp_and_partial_eval(n: int) -> None:
    f = pmap(lambda x: tp.psum(x.sin(), "i") * x, "i")
    x, tangent = sample(n, 3), sample(n, 3, seed=1)

    value, push = torch.func.linearize(f, x)
    same(value, x.sin().sum(0) * x)
    same(push(tangent), (x.cos() * tangent).sum(0) * x + x.sin().sum(0) * tangent)


def test_grad_of_jvp(n: int) -> None:
    f = pmap(torch.sin, "i")

    def whole(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(f, (x,), (t,))[1].sum()

    x, t = sample(n, 3), sample(n, 3, seed=1)
    by_x, by_t = torch.func.grad(whole, argnums=(0, 1))(x, t)
    same(by_x, -x.sin() * t)
    same(by_t, x.cos())


def test_two_args_grad(n: int) -> None:
    f = pmap(lambda x, y: tp.psum(5.0 * x.cos() * y.sin(), "i"), "i")
    x, y = sample(n), sample(n, seed=1)
    by_x, by_y = torch.func.grad(lambda x, y: f(x, y).sum(), argnums=(0, 1))(x, y)
    same(by_x, -5.0 * n * x.sin() * y.sin())
    same(by_y, 5.0 * n * x.cos() * y.cos())


@pytest.mark.parametrize("grouped", [False, True], ids=["all", "groups"])
@pytest.mark.parametrize("tiled", [False, True], ids=["stacked", "tiled"])
@pytest.mark.parametrize("name", ["all_gather", "psum_scatter"])
def test_grad_of(n: int, name: str, tiled: bool, grouped: bool) -> None:
    groups = strided(n) if grouped else None
    members = n // 2 if grouped else n
    collective = getattr(tp, name)
    f = pmap(lambda x: collective(x, "i", tiled=tiled, axis_index_groups=groups) ** 2, "i")
    w = sample(n, members, dtype=torch.float64)
    x = sample(n, 1, seed=1) if name == "all_gather" else sample(n, members, seed=1)
    check_grads(lambda x: (f(x).cpu().reshape(n, -1)[:, :members] * w[:, :1]).sum(), x)


def test_collective_permute_grad() -> None:
    f = pmap(lambda x: tp.ppermute(x, "i", [(0, 1), (1, 2), (2, 3)]), "i")
    x, w = sample(4, 3), sample(4, 3, seed=1)
    same(f(x), torch.cat([torch.zeros(1, 3), x[:3]]))
    got = torch.func.grad(lambda x: (f(x) * w).sum())(x)
    same(got, torch.cat([w[1:], torch.zeros(1, 3)]))


def test_collective_permute_cyclic_grad(n: int) -> None:
    perm = [(k, (k + 1) % n) for k in range(n)]
    f = pmap(lambda x: tp.ppermute(x, "i", perm) ** 2, "i")
    x, w = sample(n, 2), sample(n, 2, seed=1)
    same(torch.func.grad(lambda x: (f(x) * w).sum())(x), 2 * x * w.roll(-1, 0))
    check_grads(f, sample(n), forward=True)


def test_collective_broadcast_grad(n: int) -> None:
    f = pmap(lambda x: tp.pbroadcast(x, "i", source=0), "i")
    got = torch.func.grad(lambda x: f(x).sum())(torch.ones(n, 2))
    same(got, torch.cat([torch.full((1, 2), float(n)), torch.zeros(n - 1, 2)]))


def test_pmap_in_axes_grad(n: int) -> None:
    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return (x @ y).sin() * z

    x, y, z = sample(3, n), sample(3, 2, n, seed=1), sample(2, seed=2)
    mapped = pmap(f, in_axes=(1, 2, None))
    reference = torch.func.vmap(f, in_dims=(1, 2, None))
    same(mapped(x, y, z), reference(x, y, z))
    got = torch.func.grad(lambda *a: (mapped(*a) ** 2).sum(), argnums=(0, 1, 2))(x, y, z)
    expected = torch.func.grad(lambda *a: (reference(*a) ** 2).sum(), argnums=(0, 1, 2))(x, y, z)
    for g, e in zip(got, expected, strict=True):
        same(g, e)


@pytest.mark.parametrize("out_axis", [0, 1, 2])
@pytest.mark.parametrize("second", [0, 1, None])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_pmap_all_axes_grad(first: int, second: int | None, out_axis: int) -> None:
    f = pmap(lambda x, y: (x @ y).sin().T, in_axes=(first, second), out_axes=out_axis)
    x = sample(2, 3).expand(2, 2, 3).contiguous().movedim(0, first)
    y = sample(3, seed=1) if second is None else sample(3, 2, seed=1).movedim(1, second)
    y = y[..., None] if second is None else y.unsqueeze(-1)
    check_grads(f, x.contiguous(), y.contiguous(), order=2 if first == second else 1)


def test_pmap_post_process() -> None:
    def closed(mapping: Any) -> Any:
        def f(w: torch.Tensor) -> torch.Tensor:
            x = counting(3, 4) / 10
            return (mapping(lambda x: (x[:, None] * w).sin())(x) ** 2).sum()

        return f

    w = sample(2)
    got = torch.func.grad(closed(lambda f: pmap(f, in_axes=1, out_axes=2)))(w)
    expected = torch.func.grad(closed(lambda f: torch.func.vmap(f, 1, 2)))(w)
    same(got, expected)


def test_grad_of_pmap_compilation_caching() -> None:
    traces: list[int] = []
    note = traces.append

    def f(x: torch.Tensor) -> torch.Tensor:
        note(1)
        return x.sin()

    mapped = pmap(f, "i")
    x = torch.ones(4)
    value, pull = torch.func.vjp(mapped, x)
    same(pull(torch.ones(4))[0], x.cos())
    same(value, x.sin())
    count = len(traces)
    for _ in range(3):
        _, pull = torch.func.vjp(mapped, x)
        pull(torch.ones(4))
    assert len(traces) == count


def test_remat_of_pmap(n: int) -> None:
    f = pmap(lambda x: tp.psum(x.sin().sin(), "i") * x, "i")

    x = sample(n, 2).requires_grad_()
    checkpoint(f, x, use_reentrant=False).sum().backward()
    same(x.grad, torch.func.grad(lambda x: (x.sin().sin().sum(0) * x).sum())(x.detach()))


def test_custom_jvp(mode: Any) -> None:
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(x: Any) -> Any:
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_forward(*inputs)
            ctx.save_for_backward(*inputs)

        @staticmethod
        def jvp(ctx: Any, t: Any) -> Any:
            (x,) = ctx.saved_tensors
            return 7 * x.cos() * t  # not the derivative, to be recognised

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            (x,) = ctx.saved_tensors
            return 7 * x.cos() * g

    x = counting(4)

    f = tp.pmap(lambda x: torch.func.jvp(Sine.apply, (x,), (torch.ones_like(x),)), compile=mode)
    value, tangent = f(x)
    same(value, x.sin())
    same(tangent, 7 * x.cos())


def test_custom_vjp(mode: Any) -> None:
    class Sine(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Any) -> Any:
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            (x,) = ctx.saved_tensors
            return 2 * x.cos() * g

    x = counting(8)
    same(tp.pmap(tp.grad(Sine.apply), compile=mode)(x), 2 * x.cos())
    whole = tp.pmap(Sine.apply, compile=mode)
    same(torch.func.grad(lambda x: whole(x).sum())(x), 2 * x.cos())


# From inside -------------------------------------------------------------------------------------


def test_grad_of_pswapaxes(n: int) -> None:
    x, w = counting(n, 1, n), counting(n) + 2

    f = pmap(lambda x, w: tp.grad(lambda x: (tp.pswapaxes(x, "i", 1) * w).sum())(x), "i")
    same(f(x, w), w.expand(n, 1, n))


@pytest.mark.parametrize(("split", "concat"), [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_grad_of_all_to_all_replica_groups(n: int, split: int, concat: int) -> None:
    groups, half = strided(n), n // 2
    x, w = sample(n, half, half), sample(n, half, half, seed=1)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def loss(x: torch.Tensor) -> torch.Tensor:
            exchanged = tp.all_to_all(x, "i", split, concat, axis_index_groups=groups)
            return (exchanged.sin() * w).sum()

        return tp.grad(loss)(x)

    def whole(x: torch.Tensor) -> torch.Tensor:
        moved = (x[group].movedim((0, split + 1), (concat + 1, 0)) for group in groups)
        return sum((y.sin() * w[group]).sum() for y, group in zip(moved, groups, strict=True))

    same(pmap(f, "i")(x, w), torch.func.grad(whole)(x))


def test_psum_zero_cotangents() -> None:
    def inner_loss(params: Any, scale: torch.Tensor) -> torch.Tensor:
        return scale * params["used"] ** 2 * params["other"]

    def outer_loss(scale: torch.Tensor, params: Any) -> torch.Tensor:
        grads = tp.psum(tp.grad(inner_loss)(params, scale), "i")
        return params["other"] * (params["used"] + grads["used"])  # grads["other"] is unused

    def meta(params: Any) -> torch.Tensor:
        return tp.grad(outer_loss)(torch.tensor(4.0).to(params["used"].dtype), params)

    used, other = sample(4, dtype=torch.float64), sample(4, seed=1, dtype=torch.float64)
    mapped = pmap(meta, "i")
    # outer = b (a + sum_j 2 s a_j b_j); the cotangents of the sum are b_k, summed
    expected = 2 * used * other * other.sum()
    same(mapped({"used": used, "other": other}), expected)
    check_grads(lambda a, b: mapped({"used": a, "other": b}), used, other)


def test_psum_zero_cotangents_forward() -> None:
    """testPsumZeroCotangents, in forward mode."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return tp.grad(lambda scale: tp.psum((scale * x, scale * y), "i")[0])(torch.tensor(4.0))

    mapped, x, y = pmap(f, "i"), sample(4), sample(4, seed=1)
    _, tangent = torch.func.jvp(lambda x: mapped(x, y), (x,), (torch.ones(4),))
    same(tangent, torch.full((4,), 4.0))


ROWS_AT_ONCE = "two rows per device: torch.vmap has no requires_grad_"


@pytest.mark.parametrize(
    "n", [4, pytest.param(8, marks=pytest.mark.xfail(raises=RuntimeError, reason=ROWS_AT_ONCE))]
)
def test_axis_index_remat(n: int) -> None:
    def f(key: torch.Tensor, x: torch.Tensor) -> Any:
        def loss(x: torch.Tensor) -> torch.Tensor:
            here = tp.random.fold_in(key, tp.axis_index("i"))
            return (x * tp.random.normal(here, (3,)) * (1 + tp.axis_index("i"))).sum()

        x = x.detach().requires_grad_()
        (got,) = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), x)
        return got

    key, x = tp.random.key(0), sample(n, 3)
    got = tp.pmap(f, "i", in_axes=(None, 0), compile=False)(key, x)
    draws = [tp.random.normal(tp.random.fold_in(key, k), (3,)) * (1 + k) for k in range(n)]
    same(got, torch.stack(draws))


def test_gradient_of_a_loss_that_is_averaged() -> None:
    """testGradOfPsum from inside, where the transpose of psum is psum."""
    x, w = sample(8), sample(8, seed=1)
    f = pmap(tp.grad(lambda x, w: w * tp.psum(x**2, "i")), "i")
    same(f(x, w), 2 * x * w.sum())
    g = pmap(tp.grad(lambda x, w: tp.pmean(w * x**2, "i")), "i")
    same(g(x, w), 2 * x * w)


def test_axis_name_does_not_leak() -> None:
    """test_axis_env_length."""

    def f(x: torch.Tensor) -> torch.Tensor:
        assert tp.axis_bound("i")
        assert not tp.axis_bound("j")
        return x

    mapped = pmap(f, "i", axis_size=1)
    got = torch.func.grad(lambda x: mapped(x[None])[0])(torch.tensor(3.0))
    assert float(got) == 1.0
    assert not tp.axis_bound("i")
