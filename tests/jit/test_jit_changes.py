"""Covers: _transforms/jit.py, _trace/snapshot.py: what no graph can say, what later calls have."""

import queue
from collections import deque

import pytest
import torch
from _cases import Cases, OnDevices, data
from _models import LINE
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchpmap as tp
from torchpmap import P

pytestmark = pytest.mark.usefixtures("pool")

CASES = Cases()


@CASES.add(fullgraph=False)
def tensors_that_are_stored(on):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.zeros(8, 8, dtype=torch.float64))
            self.seen = []

        def forward(self, x):
            self.average = self.average * 0.9 + x
            self.seen.append(x.sum())
            return self.average.sum()

    model = on.put(Counter())
    f = on.jit(lambda x: model(x))
    return [f(on.put(data())), f(on.put(data(1))), model.average, *model.seen]


@CASES.add(fullgraph=False)
def tensors_in_a_queue(on):
    waiting = queue.Queue()

    @on.jit
    def f(x):
        waiting.put(x * 2)
        return x.sum()

    return [*map(f, on.rows(3)), *(waiting.get() for _ in range(3))]


@CASES.add(fullgraph=False)
def tensors_that_are_keys(on):
    one, two = on.put(data()), on.put(data(1))
    kept, nested, moved = {two: 1}, {}, {one: 1, two: 2}

    @on.jit
    def stores(x):
        kept.clear()
        kept[x] = 1
        return x * 2

    @on.jit
    def nests(x):
        nested["last"] = {x: 1}
        return x * 3

    @on.jit
    def moves(x):
        moved[one] = moved.pop(one)
        return x * 4

    found = [stores(one), nests(one), moves(one), *kept, *nested["last"], *moved]
    for key, value in on.jit(lambda x: {x: x * 5})(one).items():
        found += key, value
    return found


class Norms(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        self.seen = {"all": [{}]}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad)
                group["norm"] = self.seen["all"][0]["norm"] = p.grad.norm()


@CASES.add(fullgraph=False)
def what_an_optimizer_stores_in_a_group(on):
    weight = on.put(data()).requires_grad_()
    optimizer = Norms([weight])
    step = on.step(lambda x: x @ weight, optimizer)
    found = [*map(step, on.rows(3)), weight]
    return [*found, optimizer.param_groups[0]["norm"], optimizer.seen["all"][0]["norm"]]


@CASES.add(fullgraph=False)
def a_schedule_inside(on):
    weight = on.put(data()).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step = on.step(lambda x: x @ weight, optimizer, also=schedule.step)
    rate = lambda: torch.tensor([optimizer.param_groups[0]["lr"], schedule.last_epoch])  # noqa: E731
    return [*map(step, on.rows(2)), weight, rate()]


@CASES.add(fullgraph=False)
def python_state_of_what_is_not_traced(on):
    class Count:
        calls = 0

    calls = 0

    @on.jit
    def f(x):
        nonlocal calls
        calls += 1
        Count.calls += 1
        return x * calls if x.sum() > 0 else -x * calls

    results = [f(on.put(data(k))) for k in range(3)]
    return [*results, torch.tensor([calls, Count.calls])]


@CASES.add()
def parameter_groups_and_hooks_of_later(on):
    weight, bias = on.put(data()).requires_grad_(), on.put(data(3, 8)).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    step, x = on.step(lambda x: x @ weight + bias, optimizer), on.put(data(1))
    step(x)
    optimizer.add_param_group({"params": [bias]})
    step(x)
    handle = weight.register_hook(lambda grad: grad * 2)
    step(x)
    handle.remove()
    step(x)
    return [weight, bias]


@CASES.add()
def gradients_of_frozen_parameters(on):
    model = on.model(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    cleared, zeroed = on.step(model, optimizer), on.step(model, optimizer, set_to_none=False)

    @on.jit
    def kept(x):
        model(x).square().mean().backward()
        optimizer.step()
        return [p.grad.sum() for p in model.parameters() if p.grad is not None]

    x, found = on.put(data(3)), []
    cleared(x)
    for step in (zeroed, kept, cleared, cleared, kept):
        model[0].requires_grad_(False)
        step(x)
        found += [p.clone() for p in model.parameters()]
        found += [p.grad for p in model.parameters()]
        model[0].requires_grad_(True)
        found += kept(x)
    return found


@CASES.add()
def parameters_that_are_frozen_between_steps(on):
    model = on.model(nn.Linear(8, 8), nn.Linear(8, 4)).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @on.jit
    def step(x):
        model.requires_grad_(True)
        model(x).square().mean().backward()
        optimizer.step()
        for p in model.parameters():
            p.requires_grad = False

    for x in on.rows(3):
        step(x)
    return [x for p in model.parameters() for x in (p, p.grad)]


@CASES.add()
def a_gradient_of_what_requires_none(on):
    w = on.put(data())
    optimizer = torch.optim.SGD([w], lr=0.1)

    @on.jit
    def step(x):
        w.grad = x if w.grad is None else w.grad + x
        optimizer.step()

    for x in on.rows(3):
        step(x)
    return [w, w.grad]


@CASES.add()
def arguments_that_are_let_require_grad(on):
    model, batches = on.model(), on.rows(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @on.jit
    def step(x):
        x.requires_grad_()
        y = model(x).tanh()
        (slopes,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        optimizer.zero_grad()
        (y.square() + slopes.square().sum(1, keepdim=True)).mean().backward()
        optimizer.step()
        return slopes.detach()

    forward = on.jit(lambda x: model(x.requires_grad_()).square().sum())
    results = [step(x) for x in (*batches, *batches)]
    last = on.put(data(7))
    forward(last).backward()
    assert all(x.requires_grad for x in (*batches, last))
    return [*results, *model.parameters(), *(x.grad for x in (*batches, last))]


@CASES.add(fullgraph=False)
def results_of_what_is_frozen_meanwhile(on):
    w = on.put(data())

    @on.jit
    def f(x):
        w.requires_grad_()
        result = (x @ w).square().sum()
        w.requires_grad_(False)
        return result

    f(on.put(data(1))).backward()
    return [w.grad]


@CASES.add(fullgraph=False)
def gradients_of_other_arguments(on):
    f = on.jit(lambda x: x.square().sum().backward())
    first, second = (on.put(data(k)).requires_grad_() for k in range(2))
    for x in (first, first, second, second, second):
        f(x)
    computed = first * 2
    computed.retain_grad()
    f(computed)
    return [first.grad, second.grad, computed.grad]


@CASES.add()
def objects_among_the_arguments(on):
    class Scale:
        factor = 2.0

        def times(self, x):
            return x * self.factor

    scale, model = Scale(), on.model(nn.BatchNorm1d(8))
    f = on.jit(lambda scale, x: scale.times(x))
    g = on.jit(torch.no_grad()(lambda model, x: model(x)))
    results = [f(scale, on.put(data())), g(model, on.put(data()))]
    scale.factor = 3.0
    model.eval()
    results += [f(scale, on.put(data())), g(model, on.put(data(1)))]
    model.train()
    return [*results, g(model, on.put(data(2))), *model.buffers()]


@CASES.add(fullgraph=False)
def values_that_are_shared(on):
    w, x, plain = on.put(data()), on.put(data(4)), data(1)
    part = plain[:4]

    @on.jit
    def f(x, y):
        w.mul_(2)
        y.add_(1)
        return w + x + y

    @on.jit
    def g():
        plain.add_(1)
        part.mul_(2)

    results = [f(x, on.put(data(3))), f(w.detach(), on.put(data(3))), f(w, x), f(x, x), f(w.T, w)]
    g()
    return [*results, w, x, plain]


@CASES.add()
def a_gradient_with_another_layout(on):
    w = on.put(data()).requires_grad_()
    f = on.jit(lambda x: (x @ w).square().sum().backward())
    f(on.put(data(1)))
    f(on.put(data(1)))
    w.grad = w.grad.clone()
    if type(on) is OnDevices:
        sharding = tp.NamedSharding(tp.make_mesh(*LINE), P(None, "x"))
        w.grad = tp.device_put(w.grad.detach(), sharding)
    f(on.put(data(1)))
    return [w.grad]


@CASES.add()
def code_in_the_backward_pass(on):
    w, v = on.put(data()).requires_grad_(), on.put(data(1)).requires_grad_()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in (w, v)}

    def step_and_clear(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    v.register_post_accumulate_grad_hook(step_and_clear)

    @on.jit
    def f(x):
        w.grad = None
        x = x.clone().requires_grad_()
        (checkpoint(lambda x: (x @ w).tanh(), x, use_reentrant=True) @ v).sum().backward()

    f(on.put(data(2)))
    f(on.put(data(2)))
    return [w.grad, v, v.grad]


@CASES.add(fullgraph=False)
def tensors_that_are_stored_deep_inside(on):
    class Cache:
        __slots__ = ("last",)
        best = None

    cache, recent, found = Cache(), deque(maxlen=3), {}

    @on.jit
    def f(x):
        cache.last = x * 2
        Cache.best = x.sum()
        recent.append(x * 3)
        found["results"] = {"x": (x * 4, [x * 5])}
        return x.sum()

    f(on.put(data()))
    f(on.put(data(1)))
    last, more = found["results"]["x"]
    return [cache.last, Cache.best, *recent, last, *more]


@CASES.add(fullgraph=False)
def a_variable_that_is_deleted(on):
    count = [1]

    @on.jit
    def f(x):
        nonlocal count
        del count
        return x * 2 if x.sum() > 100 else x

    return [f(on.put(data()))]


@CASES.add()
def matrices_that_are_not_contiguous(on):
    x = on.put(data(0, 4, 4)).requires_grad_()

    @on.jit
    def f(x):
        x.grad = None
        (torch.linalg.det(x.t()) + torch.linalg.slogdet(torch.cat([x, x], 1)[:, :4])[1]).backward()

    f(x)
    return [x.grad]


@CASES.add(fullgraph=False)  # it cannot write to a view that is not contiguous under a transform
def strides_of_what_comes_from_outside(on):
    image = data(2, 4, 4, 4, 4).to(memory_format=torch.channels_last)
    weights = [on.put(data(0, 4, 4)).t(), data(1, 4, 4).t(), data(1, 8, 8)[::2, 1:5], image]

    @on.jit
    def f(x):
        total = x * 1
        for k, each in enumerate((x, *weights)):
            last = each.dim() == 4 and each.is_contiguous(memory_format=torch.channels_last)
            total = total * (each.stride()[-1] + 3 * each.is_contiguous() + 7 * last + k)
            total = total + 2 * (each * 2).is_contiguous()
            for copy in (each.contiguous(), each.reshape(-1)) if not each.is_contiguous() else ():
                total = total + copy.mul_(2).sum()
        return total

    x = on.put(data(3, 4, 4))
    gradients = [torch.func.grad(lambda x: f(x).sum())(each) for each in (x, x.t())]
    results = [f(x), f(x.t()), *gradients, torch.func.vmap(f, 2)(x[..., None])]
    weights[1].set_(data(4, 4, 4))
    return [*results, f(x), x, *weights]


@CASES.add(fullgraph=False)
def places_in_memory_of_what_comes_from_outside(on):
    weight, x = data(0, 40)[8:], data(1, 40)
    f = on.jit(lambda x: x + x.storage_offset() + weight.as_strided((4,), (2,), 10))
    return [f(x[2:6]), f(x[4:8]), on.jit(lambda x: (x * 2)[1:].storage_offset() + x)(x)]


@CASES.add(fullgraph=False)
def elements_by_their_places_in_memory(on):
    f = on.jit(lambda x: x.t().as_strided((3, 2), (1, 8)))
    return [f(on.put(data()))]


@CASES.add()
def bodies_return_parts_of_what_comes_from_outside(on):
    weight = data(0, 40)[8:]

    def f(x):
        ys = tp.scan(lambda c, _: (c, (weight[4:], x[1:])), x, None, length=2)[1]
        return (*ys, tp.cond(x.sum() > 0, lambda: x[2:], lambda: weight[:2]))

    return on.jit(f)(on.put(data(1, 4)))


test_as_in_plain_torch = CASES.tests()
