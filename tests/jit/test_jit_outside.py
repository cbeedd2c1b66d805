"""``backward()`` outside of a jitted function, through what its calls return."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from _cases import Cases, OnDevices, data
from _support import EAGER, autocast, gradients
from torch import nn

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")
cases = Cases()


@cases.add(num_traces=1)
def only_the_model(on):
    model = on.model(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    forward, losses = on.jit(lambda x: model(x)), []
    for k in range(4):
        optimizer.zero_grad()
        loss = forward(on.put(data(k))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [*losses, *model.state_dict().values()]


@cases.add()
def a_gradient_that_torch_leaves_out(on):
    """The number of elements that are not zero does not depend on them."""
    x = on.put(data(0)).requires_grad_()

    def step():
        count = torch.linalg.vector_norm(x, 0)
        count.backward()
        return count.detach()

    return [on.jit(step)(), torch.tensor(x.grad is None)]


@cases.add(num_traces=1)
def one_result_of_several(on):
    model = on.model(nn.Linear(8, 4), nn.BatchNorm1d(4))

    @on.jit
    def f(x):
        y = model(x)
        return y, y.square().mean(), y.argmax(1), y.detach()

    for k in (1, 1, 0, 1):
        f(on.put(data()))[k].sum().backward()
    kept = [x.requires_grad for x in f(on.put(data()))]
    assert kept == [True, True, False, False]
    return [*gradients(model), *model.buffers()]


@cases.add(num_traces=1)
def hooks_run_once(on):
    model, seen = on.model(), []
    model[0].weight.register_hook(lambda grad: grad * 2)
    model[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(1))
    f = on.jit(lambda x: model(x).sin())
    f(on.put(data())).sum().backward()
    assert seen == [1]
    return gradients(model)


@cases.add(num_traces=1)
def constants(on):
    model = on.model()
    f = on.jit(lambda x: model(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.arange(4))
    f(on.put(data())).square().sum().backward()
    return gradients(model)


@cases.add(num_traces=2)
def a_cotangent_that_is_not_there_is_no_zero(on):
    w = on.put(torch.zeros(8, 8, dtype=torch.float64)).requires_grad_()
    root, double = on.jit(lambda: (w.sqrt(), w * 2))()
    double.sum().backward()
    first = w.grad.clone()
    del root
    w.grad = None
    _, double = on.jit(lambda: ((w.sqrt() @ w).cumsum(0), torch.cat([w * 2, w.exp()])))()
    double.square().sum().backward()
    return [first, w.grad]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x


@cases.add(num_traces=1)
def a_result_that_backward_went_through(on):
    w = on.put(data()).requires_grad_()

    @on.jit
    def step():
        w.grad = None
        y = Doubled.apply(w)
        y.square().mean().backward()
        return y

    return [step().detach(), w.grad]


@cases.add(num_traces=1)
def what_the_function_uses(on):
    model = on.model(nn.Linear(8, 8))

    def f(x):
        y = torch.utils.checkpoint.checkpoint(model, Doubled.apply(x), use_reentrant=False)
        if not isinstance(on, OnDevices):
            for _ in range(3):
                y = torch.sin(y) + x
            return y
        return tp.scan(lambda y, _: (torch.sin(y) + x, None), y, None, length=3)[0]

    on.jit(f)(on.put(data())).sum().backward()
    return gradients(model)


@cases.add(num_traces=2)
def effects_and_gradients(on):
    model, count = on.model(), on.put(torch.zeros(8, 8, dtype=torch.float64))

    @on.jit
    def f(x):
        with torch.no_grad():
            count.add_(x)
        model(x).sin().sum().backward()
        return model(x).cos().sum()

    for k in range(2):
        f(on.put(data(k))).backward()
    return [count, *gradients(model)]


@cases.add(num_traces=2)
def with_and_without_gradients(on):
    model = on.model()
    f = on.jit(lambda x: model(x).sin())
    with torch.no_grad():
        assert not f(on.put(data())).requires_grad
    f(on.put(data())).sum().backward()
    with torch.no_grad():
        return [f(on.put(data(1))), *gradients(model)]


def leaf(on, value=1.0):
    return on.put(torch.full((8, 8), value, dtype=torch.float64)).requires_grad_()


@cases.add(num_traces=2)
def a_tensor_that_is_two_arguments(on):
    w, a, b = leaf(on), leaf(on), leaf(on)
    f = on.jit(lambda x, y: (x * 2 + y * 3).sum())
    for x, y in ((w, w), (a, b), (w, w)):
        f(x, y).backward()
    return [w.grad, a.grad, b.grad]


@cases.add(num_traces=2)
def an_argument_that_is_closed_over(on):
    w, z = leaf(on), leaf(on)
    f = on.jit(lambda x: (x * 2 + w * 3).sum())
    for x in (w, z, w):
        f(x).backward()
    return [w.grad, z.grad]


@cases.add(fullgraph=False)
def an_argument_that_is_closed_over_and_gets_its_gradient_inside(on):
    w, z = leaf(on), leaf(on)
    f = on.jit(lambda x: (x * 2 + w * 3).sum().backward())
    for x in (w, z):
        f(x)
    return [w.grad, z.grad]


@cases.add(fullgraph=False)
def what_the_backward_pass_writes_to(on):
    w, seen = leaf(on), on.put(torch.zeros(8, 8, dtype=torch.float64))

    def f():
        y = w * 2
        y.register_hook(lambda grad: (seen.add_(grad), None)[1])
        return y.sin().sum()

    loss = on.jit(f)()
    before = seen.clone()
    loss.backward()
    return [before, seen, w.grad]


@cases.add(num_traces=1)
def what_only_the_backward_pass_reads(on):
    w, factor = leaf(on), on.put(torch.full((8, 8), 3.0, dtype=torch.float64))

    def f(x):
        y = w * 2
        y.register_hook(lambda grad: grad * factor)
        return (y * x).sum()

    on.jit(f)(on.put(data())).backward()
    return [w.grad, factor]


class Mixed(torch.autograd.Function):
    """Its backward pass is not linear in the cotangents."""

    @staticmethod
    def forward(ctx, a, b):
        return a * 2, b * 3

    @staticmethod
    def backward(ctx, a, b):
        return a * 2 * (1 + b.square().sum()), b * 3 + a.sum()


@cases.add(fullgraph=False)
def a_function_of_two_results(on):
    a, b = leaf(on), leaf(on)
    on.jit(lambda: Mixed.apply(a, b))()[0].sum().backward()
    return [a.grad, b.grad]


@cases.add(num_traces=1)
def autocast_is_not_around_the_backward_pass(on):
    w = on.put(data(1).float() + 4 * torch.eye(8)).requires_grad_()

    def f(x):
        with autocast(enabled=False):
            return torch.linalg.inv(w) @ x.float()

    with autocast(torch.bfloat16):
        y = on.jit(f)(on.put(data()))
    y.sum().backward()
    return [y, w.grad]


@cases.add(num_traces=2)
def what_fake_kernels_of_torch_promise_wrongly(on):
    """The dtypes of what the backward pass of attention and of ``layer_norm`` needs."""
    q = leaf(on)
    y = on.jit(lambda: F.scaled_dot_product_attention(*[q.view(1, 1, 8, 8)] * 3))()
    y.square().sum().backward()
    model = on.model(nn.LayerNorm(8)).float()
    with autocast(torch.bfloat16):
        z = on.jit(lambda x: model(x))(on.put(torch.eye(8, dtype=torch.bfloat16)))
    z.float().sum().backward()
    return [y, q.grad, model[0].bias.grad]


@cases.add(num_traces=1)
def a_function_that_asks_for_gradients(on):
    w = leaf(on)

    @on.jit
    def f():
        with torch.enable_grad():
            return w.square().sum()

    with torch.no_grad():
        loss = f()
    loss.backward()
    return [w.grad]


@cases.add(fullgraph=False)
def gradients_that_require_grad(on):
    w = leaf(on)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.* with create_graph=True")
        on.jit(lambda: w.pow(3).sum().backward(create_graph=True))()
    assert w.grad.requires_grad
    return [w.grad]


@cases.add(fullgraph=False)
def a_computed_argument_that_is_written_to(on):
    w = leaf(on)
    on.jit(lambda x: x.mul_(2).sin().sum())(w * 1).backward()
    return [w.grad]


@cases.add(num_traces=1)
def a_step_that_returns_more(on):
    model = on.model(nn.Linear(8, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @on.jit
    def step(x):
        optimizer.zero_grad()
        loss, other = model(x).square().mean(), model(x).sin()
        loss.backward()
        optimizer.step()
        return loss, other

    found = [step(on.put(data(k))) for k in range(2)]
    assert all(other.requires_grad for _, other in found)
    return [x for pair in found for x in pair] + list(model.parameters())


@cases.add()
def arguments_that_share_a_value_which_is_not_written_to(on):
    model, anchor = on.model(nn.Linear(8, 8), nn.BatchNorm1d(8)), on.put(data(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @on.jit
    def step(x, y):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean() + anchor.mean()
        loss.backward()
        optimizer.step()
        return loss

    rows = on.put(data(3, 16, 8))
    given = [(anchor, rows[:8]), (rows[:8], rows[8:])]
    same = [on.put(data(k)) for k in range(2)]
    given += [(x, x) for x in same] + [(x, x.detach()) for x in same]
    return [step(*each) for each in given] + list(model.parameters())


@cases.add(num_traces=2)
def training_and_evaluation_take_turns(on):
    model = on.model(nn.BatchNorm1d(8), nn.Linear(8, 4))
    f, found = on.jit(lambda x: model(x)), []
    for k in range(3):
        f(on.put(data(k))).sum().backward()
        model.eval()
        with torch.no_grad():
            found.append(f(on.put(data(k))))
        model.train()
    return [*found, *gradients(model), *model.buffers()]


@cases.add(num_traces=2)
def where_nothing_may_be_saved(on):
    w = leaf(on)

    @on.jit
    def f():
        with torch.enable_grad():
            return w.sin()

    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        f().sum().backward()
    with torch.inference_mode():
        return [f(), w.grad]


test_as_in_plain_torch = cases.tests()


def test_dropout_has_one_mask():
    w = tp.replicate(torch.ones(8, 8)).requires_grad_()
    f = tp.jit(lambda: F.dropout(w, 0.5), compile={"backend": "eager"})
    for _ in range(2):
        w.grad = None
        y = f()
        y.sum().backward()
        assert 0 < int((y == 0).sum()) < 64
        assert torch.equal(w.grad.cpu(), y.detach().cpu())


def test_second_derivatives_are_refused():
    w = tp.replicate(torch.ones(8)).requires_grad_()
    y = tp.jit(lambda: w.pow(3), compile={"backend": "eager"})().sum()
    with pytest.raises(NotImplementedError, match="its gradient has no derivative outside of it"):
        torch.autograd.grad(y, w, create_graph=True)


@pytest.mark.parametrize("jitted", [False, True])
def test_what_torch_refuses(jitted):
    w = tp.replicate(torch.ones(8)).requires_grad_()
    jit = functools.partial(tp.jit, compile=EAGER, fullgraph=True) if jitted else lambda f: f
    loss = jit(lambda: w.square().sum())()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert torch.equal(w.grad.cpu(), torch.full((8,), 2.0))

    def overwritten():
        x = w.exp()
        y = x * w
        x.add_(1)
        return y, w.sin()

    y, z = jit(overwritten)()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (y + z).sum().backward()


def test_a_backward_pass_frees_what_it_needed():
    w = tp.replicate(torch.ones(1000, 100)).requires_grad_()
    f = tp.jit(lambda: (w.sin().exp().sum(), 1), compile={"backend": "eager"})
    before = tp.memory_stats()[tp.devices()[0]].value_bytes
    losses = []
    for _ in range(4):
        loss, _ = f()
        loss.backward()
        w.grad = None
        losses.append(loss)
    after = tp.memory_stats()[tp.devices()[0]].value_bytes
    assert after - before < w.nbytes
