"""``backward()`` outside of a jitted function, through what its calls return."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from _cases import Cases, OnDevices, data
from _models import MODELS
from torch import nn

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")
cases = Cases()


def gradients(model):
    return [p.grad for p in model.parameters()]


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
def a_part_of_a_larger_graph(on):
    first, second = on.model(), on.model(nn.Linear(4, 8))
    f = on.jit(lambda x: second(x).sin())
    for k in range(3):
        (f(first(on.put(data(k))).tanh()) * 3).cos().sum().backward()
    return gradients(first) + gradients(second)


@cases.add(num_traces=2)
def two_calls_in_one_graph(on):
    model = on.model(nn.Linear(8, 8), nn.Dropout(0.0))
    f = on.jit(lambda x: model(x).tanh())
    f(f(on.put(data()))).sum().backward()
    return gradients(model)


@cases.add(num_traces=1)
def a_parameter_of_this_process(on):
    w = data(1).requires_grad_()
    f = on.jit(lambda x: (x @ w).relu())
    for k in range(2):
        f(on.put(data(k))).sum().backward()
    assert type(w.grad) is torch.Tensor
    return [w.grad]


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
def twice_through_one_call(on):
    model = on.model()
    loss = on.jit(lambda x: model(x).square().sum())(on.put(data()))
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


@cases.add(num_traces=1)
def some_gradients(on):
    model = on.model(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    loss = on.jit(lambda x: model(x).square().sum())(on.put(data()))
    found = torch.autograd.grad(loss, [model[2].weight, model[0].bias])
    return [*found, *gradients(model)]


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


test_as_in_plain_torch = cases.tests()


@pytest.mark.parametrize("layout", ["replicated", "fully sharded"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, layout):
    on = OnDevices(layout, True)
    torch.manual_seed(0)
    plain = MODELS[name]().double()
    torch.manual_seed(0)
    model = on.put(MODELS[name]().double())
    forward, f = on.jit(lambda x: model(x)), F.cross_entropy
    shape = {"network": (8, 8), "convolutional": (8, 1, 8, 8), "transformer": (8, 4)}[name]
    for k in range(3):
        x, y = data(k, *shape), torch.arange(8) % 4
        if name == "transformer":
            x, y = (x.abs() * 5).long().clamp(0, 15), (torch.arange(32) % 16).view(8, 4)
        right = f(plain(x).flatten(0, -2), y.flatten())
        right.backward()
        mine = f(forward(tp.shard_batch(x)).flatten(0, -2), tp.shard_batch(y).flatten())
        mine.backward()
        torch.testing.assert_close(mine.detach().cpu(), right.detach(), atol=1e-12, rtol=1e-12)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad.cpu(), b.grad, atol=1e-12, rtol=1e-12)
    assert forward.num_traces == 1


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
