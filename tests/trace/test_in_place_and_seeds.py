"""Covers: ``x.data =``, moves in memory, seeds, tensors of traced numbers, what is replaced."""

import contextlib

import pytest
import torch
import torch.utils.checkpoint
from _support import EAGER, check_rows, in_another_thread, in_threads

import torchpmap as tp
from torchpmap._base.replaced import Replaced, Replacement
from torchpmap._trace.capture import Substitute

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(24.0).reshape(4, 3, 2) + 1


def stepped(x):
    w = x.clone().requires_grad_()
    (w * w).sum().backward()
    w.data = w.data - 0.1 * w.grad
    (w * w * w).sum().backward()
    return w.detach(), w.grad


def of_another_shape(x):
    y = x * 1
    y.data = y.data[:2]
    return y * 2, y


def shared(x):
    y, z = x * 1, x + 1
    y.data = z
    z.add_(1)
    y.mul_(2)
    return y, z


def of_a_constant(x):
    y = x * 1
    y.data = torch.ones(3, 2) * 2
    return y + x, y


def in_a_body(x):
    def body(i, c):
        y = c * 1
        y.data = c * 2
        return c + y

    return tp.fori_loop(0, 3, body, x), x


@pytest.mark.parametrize("f", [stepped, of_another_shape, shared, of_a_constant, in_a_body])
def test_data_of_a_traced_tensor(f):
    check_rows(f, X, most=1)


def test_data_of_a_tensor_from_outside_of_a_loop():
    def f(x):
        y = x * 1

        def body(i, c):
            y.data = c
            return c + y

        return tp.fori_loop(0, 3, body, x)

    with pytest.raises(NotImplementedError, match=r"x.data = .*Use x.data.copy_"):
        tp.pmap(f, compile=EAGER)(X)


CHANGES = {
    "resize_": lambda x: x.resize_(2, 1),
    "resize_as_": lambda x: x.resize_as_(torch.zeros(3)),
    "as_strided_": lambda x: x.as_strided_((2, 2), (2, 1), 1),
    "transpose_": lambda x: x[:1].transpose_(0, 1),
    "t_": lambda x: x[:1].clone().t_(),
    "unsqueeze_": lambda x: x[:1].clone().unsqueeze_(0),
    "squeeze_": lambda x: x[:1].clone().squeeze_(0),
    "swapaxes_": lambda x: x[:1].clone().swapaxes_(0, 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_of_shape(change):
    def f(x):
        x = x.clone()
        part = x[:1]
        y = change(x).mul_(2)
        return y + 0, part

    check_rows(f, X)


def test_a_change_of_the_shape_of_what_is_detached():
    def f(x):
        y = x.detach().unsqueeze_(0)
        return y * 2, x.sum(0)

    check_rows(f, X)
    torch.testing.assert_close(tp.jit(f, compile=EAGER, fullgraph=True)(X), f(X))


AWAY = {"resize_": lambda x: x.t().resize_(2), "set_": lambda x: x.set_(x * 2)}


@pytest.mark.parametrize("name", AWAY)
def test_moves_that_would_mix_rows(name):
    def f(x):
        return AWAY[name](x.clone())

    want = torch.stack([f(row) for row in X])
    for mode in (EAGER, False):
        torch.testing.assert_close(tp.pmap(f, compile=mode)(X).cpu(), want)
        with pytest.raises(NotImplementedError, match=rf"{name} under vmap .* mix the rows. Use "):
            tp.pmap(f, compile=mode)(torch.cat([X, X]))


def forked(x):
    with torch.random.fork_rng():
        return x + torch.rand(())


def restored(x):
    torch.set_rng_state(torch.get_rng_state())
    return x


SEEDS = {
    "torch.seed": lambda x: (torch.seed(), x)[1],
    "torch.fork_rng": forked,
    "torch.set_rng_state": restored,
    "torch.manual_seed_all": lambda x: (torch.cuda.manual_seed_all(0), x)[1],
    "default_generator": lambda x: (torch.default_generator.manual_seed(123), x)[1],
}


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_inside_are_refused(name, mode):
    before, text = torch.get_rng_state(), rf"{name} inside a mapped .* Call torch.manual"
    if name == "default_generator":  # a method, which is seen by what it has done
        mode, text = EAGER, f"{name} was seeded inside a mapped"
    with pytest.raises(NotImplementedError, match=text):
        tp.pmap(SEEDS[name], compile=mode)(X)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(0)  # as before, outside


def test_another_thread_may_draw_while_a_function_is_traced():
    drawn = []

    def f(x):
        drawn.extend(in_threads(1, lambda _: torch.rand(2)))
        return x + 1

    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    torch.testing.assert_close(tp.pmap(f, compile=EAGER)(X).cpu(), X + 1)
    assert torch.equal(drawn[0], expected)


def test_tensors_of_traced_numbers():
    def listed(x):
        a, b = x[0, 0], x[1, 1]
        return (
            torch.tensor([a, 2 * b, 3.0]),
            torch.tensor([[a, 1], [b, 2]], dtype=torch.float64),
            torch.as_tensor([a, b]),
            torch.tensor((a.long(), 2, True)),
        )

    def loss(x):  # for which they are constants
        return (torch.tensor([x[0, 0], x[1, 1]]) * x[2]).sum()

    def slope(x):
        return torch.stack([torch.zeros(2), torch.zeros(2), torch.stack([x[0, 0], x[1, 1]])])

    check_rows(listed, X)
    check_rows(tp.grad(loss), X, expected=slope, modes=(EAGER,), most=1)


def test_other_makers_run_uncompiled():
    for f in (
        lambda x: torch.Tensor([x[0, 0], x[0, 1]]),
        lambda x: torch.full((2,), x[0, 0]),
        lambda x: x.new_tensor([x[0, 0]]),
    ):
        with pytest.warns(UserWarning, match="running without tracing"):
            got = tp.pmap(f, compile=EAGER)(X)
        torch.testing.assert_close(got.cpu(), torch.stack([f(row) for row in X]))


def test_nothing_stays_replaced():
    names = [
        (torch, "manual_seed"),
        (torch.utils.checkpoint, "CheckpointFunction"),
        (torch._functorch.eager_transforms, "_wrap_for_grad"),
        (torch._functorch.vmap, "_add_batch_dim"),
    ]
    before = [getattr(*name) for name in names]
    during = []

    def f(x):
        during.extend(getattr(*name) for name in names)
        return torch.func.grad(lambda y: (y**2).sum())(x)

    tp.pmap(f, compile=EAGER)(X)
    assert all(a is not b for a, b in zip(before, during, strict=True))
    assert all(a is getattr(*name) for a, name in zip(before, names, strict=True))


def test_blocks_of_two_threads_may_end_in_any_order():
    class Module:
        value = "own"

    replaced = Replaced([Replacement(Module, "value", lambda own: f"not {own}")])
    block = contextlib.ExitStack()
    enter, leave = in_another_thread(lambda: block.enter_context(replaced), block.close)
    with replaced:
        enter()
    assert Module.value == "not own"
    leave()
    assert Module.value == "own"


def test_what_threads_substitute_is_their_own():
    def into(value):
        tensor = torch.tensor(value)
        return Substitute(lambda x: x, lambda x: tensor)

    def gradient():
        return torch.func.grad(lambda y: y**2)(torch.tensor(1.0)).item()

    block, found = contextlib.ExitStack(), []

    def other():
        block.enter_context(into(5.0))
        found.append(gradient())

    enter, leave = in_another_thread(other, block.close)
    with into(3.0):
        enter()
        assert gradient() == 3.0  # what leaves a transform is substituted too
    assert gradient() == 2.0
    leave()
    assert found == [5.0]
    assert gradient() == 2.0
