"""Covers: _trace/whole.py, _transforms/jit_program.py: what a function does besides returning."""

import copy

import pytest
import torch
import torch.nn.functional as F
from _cases import Cases, Plain, data
from _models import LINE
from _support import autocast
from torch import nn

import torchpmap as tp
from torchpmap import P

pytestmark = pytest.mark.usefixtures("pool")

CASES = Cases()


# -- gradients and optimizers ----------------------------------------------------------------------


@CASES.add(3)  # without and with a gradient from before; the step makes its state before
def accumulation_over_calls(on):
    model = on.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @on.jit
    def add(x):
        loss = model(x).square().mean() / 2
        loss.backward()
        return loss.detach()

    @on.jit
    def step():
        optimizer.step()
        optimizer.zero_grad()

    losses = []
    for k in range(3):
        losses += [add(on.put(data(k))), add(on.put(data(k + 9)))]
        step()
        assert model[0].weight.grad is None
    add(on.put(data()))
    step()
    return [*losses, *model.parameters()]


@CASES.add(2)
def gradients_that_are_set_to_zero(on):
    model = on.model()
    step = on.step(model, torch.optim.Adam(model.parameters(), lr=0.1), set_to_none=False)
    return [*map(step, on.rows(3)), *model.parameters(), *(p.grad for p in model.parameters())]


@CASES.add(1)
def a_moving_average(on):
    model = on.model()
    average = [p.detach().clone() for p in model.parameters()]

    def follow():
        with torch.no_grad():
            for mine, now in zip(average, model.parameters(), strict=True):
                mine.lerp_(now, 0.1)

    step = on.step(model, torch.optim.SGD(model.parameters(), lr=0.1), also=follow)
    return [*map(step, on.rows(3)), *average, *model.parameters()]


@CASES.add(3)  # then it is not frozen, and then it has a gradient, which nothing clears
def frozen_and_tied_parameters(on):
    layer = nn.Linear(8, 8)
    model = on.model(layer, nn.Tanh(), layer, nn.Linear(8, 4))
    model[3].bias.requires_grad_(False)
    known = [p for p in model.parameters() if p.requires_grad]
    step = on.step(model, torch.optim.AdamW(known, lr=0.1))
    for k, x in enumerate(on.rows(4)):
        model[3].bias.requires_grad_(k > 1)
        step(x)
    assert model[0].weight is model[2].weight
    return [*model.parameters(), model[3].bias.grad]


@CASES.add()
def parameters_that_only_some_calls_use(on):
    model = on.model(nn.Linear(8, 4), nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = on.step(lambda x, depth: model[:depth](x), optimizer)
    for x, depth in zip(on.rows(5), [1, 2, 1, 1, 2], strict=True):
        step(x, depth)
    steps = [optimizer.state[p]["step"] for p in model.parameters()]
    return [*model.parameters(), *steps]


@CASES.add()
def two_optimizers_and_schedules(on):
    model = on.model()
    first = torch.optim.AdamW([model[0].weight], lr=0.1)
    second = torch.optim.SGD([{"params": [model[0].bias], "lr": 0.3}], lr=0.1, momentum=0.9)
    schedules = [
        torch.optim.lr_scheduler.StepLR(first, 1),
        torch.optim.lr_scheduler.OneCycleLR(second, 0.5, total_steps=10),  # momentum too
    ]
    step = on.step(model, first, second)
    for x in on.rows(4):
        step(x)
        for schedule in schedules:
            schedule.step()
    return list(model.parameters())


@CASES.add()
def an_optimizer_that_several_functions_step(on):
    model = on.model()
    weight, bias = model.parameters()
    groups = [{"params": [weight]}, {"params": [bias], "lr": 0.03}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    plain, once = Plain().step(model, optimizer), on.step(model, optimizer)
    twice = on.jit(lambda x: (plain(x), plain(x)))
    half = on.step(lambda x: x @ weight.T + bias.detach(), optimizer)
    for k, function in enumerate((once, twice, once, once, plain, once, half, half, once, once)):
        function(on.put(data(k)))
        if k == 2:
            optimizer.param_groups[1]["lr"] = 0.2
        if k == 3:
            optimizer.state[weight]["step"].add_(2)
        if k == 8:
            for x in (weight, bias):
                optimizer.state[x]["step"].data = torch.tensor(3.0)
    return [weight, bias, *(optimizer.state[x]["step"] for x in (weight, bias))]


class Doubled(torch.optim.AdamW):
    """It counts each step twice, and calls the step of its class."""

    def step(self, closure=None):
        super().step(closure)
        for entries in self.state.values():
            entries["step"] += 1


@CASES.add()
def counters_that_part(on):
    weights = [on.put(data(k)).requires_grad_() for k in range(3)]
    optimizers = [torch.optim.AdamW(weights, lr=0.1), Doubled(weights, lr=0.01)]

    def step(x, trained):
        for each in optimizers:
            each.zero_grad()
            sum((weights[k] * x).sin().sum() for k in trained).backward()
            each.step()

    every, middle = on.jit(lambda x: step(x, range(3))), on.jit(lambda x: step(x, [1]))
    for k, function in enumerate((every, middle, middle, every, every, middle)):
        function(on.put(data(k)))
    counters = [each.state[x]["step"] for each in optimizers for x in weights]
    return [*weights, *counters]


@CASES.add()
def state_that_is_replaced(on):
    weights = [x.requires_grad_() for x in on.rows(3)]
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    step = on.step(lambda x: sum((weight * x).sin() for weight in weights), optimizer)
    for k, x in enumerate(on.rows(8)):
        step(x)
        if k == 1:
            optimizer.state[weights[0]] = {}
        if k == 3:
            optimizer.state[weights[1]]["step"].data = torch.tensor(9.0)
        if k == 5:
            optimizer.state[weights[1]]["step"].zero_()
    return [*weights, *(optimizer.state[x]["step"] for x in weights)]


@CASES.add(fullgraph=False)
def an_optimizer_made_inside(on):
    model = on.model()
    made = lambda: torch.optim.AdamW(model.parameters(), lr=0.1)  # noqa: E731
    step = on.jit(lambda x: Plain().step(model, made())(x))
    return [*map(step, on.rows(3)), *model.parameters()]


@CASES.add(fullgraph=False)
def a_counter_that_the_function_reads(on):
    model = on.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plain = Plain().step(model, optimizer)
    step = on.jit(lambda x: plain(x) * optimizer.state[model[0].weight]["step"])
    return [*map(step, on.rows(3)), *model.parameters()]


@CASES.add(3)
def a_rate_that_the_function_reads(on):
    model = on.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = Plain().step(model, optimizer)
    step, losses = on.jit(lambda x: plain(x) * optimizer.param_groups[0]["lr"]), []
    for k, x in enumerate(on.rows(3)):
        optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)
        losses.append(step(x))
    return [*losses, *model.parameters()]


@CASES.add(2)
def a_first_step_that_is_another(on):
    model = on.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)
    return [*map(on.step(model, optimizer), on.rows(3)), *model.parameters()]


@CASES.add()
def state_that_is_loaded(on):
    model = on.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step, (first, second, third) = on.step(model, optimizer), on.rows(3)
    step(first)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for _ in range(2):
        step(second)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    step(third)
    return list(model.parameters())


@CASES.add(2)
def gradients_of_an_argument(on):
    x = on.put(data()).requires_grad_()
    f = on.jit(lambda x: x.square().sum().backward())
    f(x)
    f(x)
    return [x.grad]


# -- writes ----------------------------------------------------------------------------------------


@CASES.add(2)
def views_and_aliases(on):
    w = on.put(data())
    columns, twin = w.T, w.detach()

    @on.jit
    def f():
        w.mul_(2)
        columns.add_(1)
        return w.sum() + twin[0].sum()

    @on.jit
    def g():
        twin[2] = 5
        columns[:, 3].mul_(2)

    results = [f(), f()]
    g()
    return [*results, w, columns, twin]


@CASES.add(1)
def arguments_that_are_written(on):
    x, host = on.put(data()), data(1)

    @on.jit
    def f(x, y):
        x.add_(1)
        y[0] = 0
        return x

    assert f(x, host) is x
    return [x, host]


@CASES.add(1)
def tensors_of_this_process(on):
    count = torch.zeros(3)

    @on.jit
    def f(x):
        count.add_(1)
        return x.sum() * count[0]

    return [f(on.put(data())), f(on.put(data())), count]


@CASES.add(1)
def a_view_of_what_an_operation_in_place_left(on):
    w = on.put(data()).requires_grad_()

    @on.jit
    def f(x):
        y = (w * x).add_(1)
        z = torch.einsum("...ij,...ik->...kj", y, w)
        torch.maximum(z, y).sum().backward()  # fills a mask, in place

    f(on.put(data(1, 8, 8, 8)))
    return [w.grad]


@CASES.add()
def what_is_closed_over_changes(on):
    model, settings = on.model(), {"factor": 2.0}
    f = on.jit(torch.no_grad()(lambda x: model(x) * settings["factor"]))
    results = [f(on.put(data()))]
    settings["factor"] = 3.0
    results.append(f(on.put(data())))
    model[0].weight.data.mul_(2)
    results.append(f(on.put(data())))
    model[0].bias = nn.Parameter(model[0].bias.detach() * 3)
    return [*results, f(on.put(data()))]


# -- what is returned, and other transforms --------------------------------------------------------


@CASES.add(1)
def results_of_all_kinds(on):
    model = on.model()

    @on.jit
    @torch.no_grad()
    def f(x, factor):
        found = {"x": (x, 3, None, "text"), "y": model(x) * factor, "ones": torch.ones(3)}
        return found | {"weight": model[0].weight, "best": x.argmax(1)}

    x = on.put(data())
    found = f(x, 2)
    assert found["x"][0] is x
    assert found["x"][1:] == (3, None, "text")
    assert found["weight"] is model[0].weight
    return [found["y"], found["ones"], found["best"]]


@CASES.add(1)
def function_transforms_inside(on):
    model = on.model()

    @on.jit
    def f(x):
        params = {name: p.detach() for name, p in model.named_parameters()}

        def loss(params):
            return torch.func.functional_call(model, params, (x,)).square().sum()

        rows = torch.func.vmap(lambda row: row * row.sum())(x)
        tangent = torch.func.jvp(torch.sin, (x,), (x,))[1]
        return *torch.func.grad(loss)(params).values(), rows, tangent

    return list(f(on.put(data())))


@CASES.add(1)
def second_derivatives(on):
    model = on.model()

    @on.jit
    def f(x):
        weights = list(model.parameters())
        grads = torch.autograd.grad(model(x).tanh().sum(), weights, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), weights)

    return list(f(on.put(data())))


@CASES.add(1)
def functions_of_the_user(on):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w.T, 3 * (x.T @ grad)

    w = on.put(data(1)).requires_grad_()

    @on.jit
    def f(x):
        w.grad = None
        Product.apply(x, w).square().sum().backward()

    for x in on.rows(2):
        f(x)
    return [w.grad]


@CASES.add(1)
def under_autocast(on):
    model = on.put(on.model().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @on.jit
    def step(x, y):
        optimizer.zero_grad()
        with autocast(torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    shapes = (8, 8), (8, 4)
    x, y = (on.put(data(k, *shape, dtype=torch.float32)) for k, shape in enumerate(shapes))
    return [step(x, y), *model.parameters()]


@CASES.add(1)
def statistics_whose_update_no_schema_declares(on):
    mean, var = on.put(torch.zeros(8, dtype=torch.float64)), on.put(torch.ones(8).double())

    @on.jit
    def step(x):
        return torch.batch_norm_update_stats(x, mean, var, 0.1)

    return [*(each for x in on.rows(2) for each in step(x)), mean, var]


@CASES.add(1)
def loops(on):
    w = on.put(data() / 8).requires_grad_()

    def body(i, x):
        return torch.tanh(x @ w)

    def three_times(x):
        if type(on) is Plain:
            return body(2, body(1, body(0, x)))
        return tp.fori_loop(0, 3, body, x)

    @on.jit
    def f(x):
        w.grad = None
        loss = three_times(x).sum()
        loss.backward()
        return loss.detach()

    return [f(on.put(data(1))), w.grad]


@CASES.add(1)
def loops_that_end_by_a_value(on):
    def doubled(x):
        if type(on) is Plain:
            while x.square().sum() < 1000:
                x = x * 2
            return x
        return tp.while_loop(lambda x: x.square().sum() < 1000, lambda x: x * 2, x)

    def twice(x):
        if type(on) is Plain:
            return doubled(doubled(x) / 100)
        x, _ = tp.scan(lambda x, _: (doubled(x) / 100, None), x, None, length=2)
        return tp.cond(x.square().sum() < 1000, lambda: doubled(x * 100), lambda: x)

    return on.jit(lambda x: (doubled(x), twice(x)))(on.put(data()))


@CASES.add(1)
def mapped_functions_inside(on):
    if type(on) is Plain:
        return [data() * 2 + data().sum()]
    mesh = tp.make_mesh(*LINE)
    f = tp.shard_map(
        lambda x: x * 2 + tp.psum(x.sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    return [on.jit(lambda x: f(x))(on.put(data()))]


@CASES.add(1)
def mapped_functions_inside_that_first_meet_a_tensor(on):
    weight, f = data(1, 1, 8), lambda x: x * weight
    if type(on) is not Plain:
        mesh = tp.make_mesh(*LINE)
        f = tp.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    result = torch.func.jvp(on.jit(lambda x: f(x)), *[(on.put(data(k)),) for k in range(2)])
    return [*result, torch.tensor(weight._version)]


test_as_in_plain_torch = CASES.tests()
