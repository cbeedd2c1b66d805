"""Covers: _transforms/jit_stores.py, _trace/snapshot.py, _trace/optimizers.py: tensors that a step
stores, and what of torch decides by a value what it writes.
"""

import functools
import threading
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from _cases import Cases, Plain, data
from _support import EAGER, beside, gradients
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_swa_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

CASES = Cases()


# -- what is stored --------------------------------------------------------------------------------


@CASES.add(2)  # then there is a ``last``, and an average on the devices
def attributes(on):
    class Follower(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.zeros(8, 8, dtype=torch.float64))
            self.last = None

        def forward(self, x):
            self.average = self.average * 0.9 + x
            self.last = x.sum()
            return self.average.sum()

    model, found = Follower(), []
    f = on.jit(lambda x: model(x))
    for k, x in enumerate(on.rows(5)):
        found += [f(x), model.last, model.average]  # others in each call
        if k == 2:
            model.average = model.average * 3
    return found


class Slotted:
    __slots__ = ("last",)


@CASES.add(3)  # the list is shifted twice until all its items are results
def places_of_all_kinds(on):
    slotted, table, recent, nested = Slotted(), {"sum": None}, [None, None], {}
    best = torch.tensor(-100.0, dtype=torch.float64)

    @on.jit
    def f(x):
        nonlocal best
        best = torch.maximum(best, x.max())
        slotted.last = x * 2
        table["sum"] = x.sum() if table["sum"] is None else table["sum"] + x.sum()
        recent.append(x.mean())
        recent.pop(0)
        nested["results"] = {"x": (x * 4, [x * 5])}
        return x.sum()

    results = [f(x) for x in on.rows(5)]
    product, [more] = nested["results"]["x"]
    return [*results, best, slotted.last, table["sum"], *recent, product, more]


@CASES.add(2)
def an_attribute_by_its_text(on):
    weight = on.put(data())

    @on.jit
    def f(x):
        setattr(weight, "last", x * 2)  # noqa: B010
        return (weight * x).sum()

    return [*map(f, on.rows(3)), weight.last]


class Guarded:
    __slots__ = ("last", "never")

    def __getattr__(self, name):
        raise KeyError(name)

    def __setattr__(self, name, value):
        raise TypeError(name)


@CASES.add(2)
def slots_that_their_class_guards(on):
    guarded = Guarded()

    @on.jit
    def f(x):
        object.__setattr__(guarded, "last", x * 2)
        return x.sum()

    return [*map(f, on.rows(3)), guarded.last]


class Private:
    __slots__ = ("__last",)

    def store(self, x):
        self.__last = x

    def read(self):
        return self.__last


settings: Any = None
latest: Any = None


@CASES.add(2)
def places_that_are_not_the_users_own_objects(on):
    space, private, module = SimpleNamespace(last=None), Private(), ModuleType("settings")
    weight, found = on.put(data()), []
    globals()["settings"] = module

    def f(x):
        def store_inside():
            global latest
            latest = x * 6

        store_inside()
        private.store(x)
        space.last, settings.last, weight.last, f.last = x * 2, x * 3, x * 4, x * 5
        return x.sum()

    f = on.jit(f)
    for x in on.rows(3):
        found += [f(x), private.read(), space.last, module.last, weight.last, f.last, latest]
    return found


@CASES.add(2)
def one_tensor_in_two_places(on):
    nested = Slotted(), Slotted()

    @on.jit
    def f(x):
        nested[0].last = nested[1].last = doubled = x * 2
        return doubled

    results = []
    for x in on.rows(3):
        results.append(f(x))
        assert nested[0].last is nested[1].last is results[-1]
        nested[0].last.add_(1)
    return results


@CASES.add(4)  # each in either mode
def modes_of_modules(on):
    model, found = on.model(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = on.step(lambda x: model.train()(x), optimizer)

    @on.jit
    @torch.no_grad()
    def evaluate(x):
        return model.eval()(x).square().mean()

    for f in (step, evaluate, evaluate, step, step, evaluate, step, evaluate):
        found += [f(on.put(data(len(found)))), torch.tensor([x.training for x in model.modules()])]
        found += [model(on.put(data(3))).sum()]
    return [*found, *model.buffers()]


@CASES.add(4)  # each without and with what is in them
def containers_that_are_returned_too(on):
    logged, last, found = {}, [None, {}], []

    @on.jit
    def f(x):
        logged["sum"], logged["mean"] = x.sum(), x.mean()
        return logged

    @on.jit
    def g(x):
        last[0], last[1]["mean"] = x.sum(), x.mean()
        return last, [last[1]]

    for x in on.rows(3):
        (total, own), [also] = g(x)
        found += [*f(x).values(), total, own["mean"], also["mean"], *logged.values()]
    return found


@CASES.add(2)
def a_hidden_state(on):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.hidden = on.model(nn.Linear(8, 8)), None

        def forward(self, x):
            before = 0 if self.hidden is None else self.hidden.detach()
            self.hidden = torch.tanh(self.cell(x) + before)
            return self.hidden

    model = Recurrent()
    step = on.step(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return [*map(step, on.rows(4)), model.hidden, *model.parameters()]


@CASES.add(1)
def what_is_stored_beside_a_checkpoint(on):
    """A trace replaces functions that torch's ``checkpoint`` calls."""
    model, kept = on.model(nn.Linear(8, 8), nn.Tanh()), {}

    @on.jit
    def step(x):
        y = checkpoint(model, x, use_reentrant=False)
        kept["y"] = y.detach()
        y.square().mean().backward()

    step(on.put(data()))
    return [kept["y"], *gradients(model)]


@CASES.add(2)
def a_hidden_state_of_a_recurrent_layer(on):
    """torch's layer stores lists of its parameters in the first call after these are replaced."""
    layer = on.model(nn.GRU(8, 4))[0]

    class State:
        hidden = None

    state = State()

    @on.jit
    def step(x):
        y, hidden = layer(x, state.hidden)
        state.hidden = hidden.detach()
        return y.sum()

    return [step(on.put(data(k)[:, None])) for k in range(3)]


@CASES.add(2)
def objects_in_a_list(on):
    layers = [Slotted(), SimpleNamespace()]
    for each in layers:
        each.last = on.put(data()).float()  # later float64: traced again

    @on.jit
    def f(x):
        for each in layers:
            each.last = each.last * 0.5 + x
        return x.sum()

    found = [*map(f, on.rows(3))]
    return [*found, *(each.last for each in layers)]


@CASES.add(3)
def what_another_program_reads(on):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.features = on.model(), None

        def forward(self, x):
            if self.training:
                self.features = x * 2
            return self.layer(x) + (0 if self.training else self.features.sum())

    model, results = Model(), []
    f = on.jit(torch.no_grad()(lambda x: model(x)))
    for x in on.rows(4):
        results += [f(x), model.eval() and f(x)]
        model.train()
    return results


@CASES.add(2)
def what_is_stored_for_a_backward_pass_outside(on):
    holder, weight = Slotted(), on.put(data()).requires_grad_()

    @on.jit
    def f(x):
        holder.last = (x * weight).sin()
        return x.sum()

    for x in on.rows(3):
        f(x)
        holder.last.sum().backward()
    return [weight.grad]


@CASES.add(3)  # nothing is there; one tensor; two
def the_last_two(on):
    class Holder:
        now = before = None

    holder, found = Holder(), []

    @on.jit
    def f(x):
        holder.before, holder.now = holder.now, x * 2
        return x.sum()

    for x in on.rows(5):
        found += [f(x), holder.now, holder.before]
    return [x for x in found if x is not None]


@CASES.add(2)
def what_the_first_call_makes(on):
    class Cached:
        is_ready = False

        def __call__(self, x):
            if not self.is_ready:
                self.cache = torch.zeros_like(x)
                self.is_ready = True
            self.cache += x
            return self.cache.sum()

    cached = Cached()
    return [*map(on.jit(lambda x: cached(x)), on.rows(4)), cached.cache]


@functools.cache
def lower_triangle(size):
    return torch.ones(size, size, dtype=torch.float64).tril()


@CASES.add(3)
def tensors_that_a_function_caches(on):
    holder = Slotted()

    @on.jit
    def f(x):
        holder.last = lower_triangle(8) @ x
        return holder.last.sum()

    xs = [data(), data(1, 8, 16), data(2)]
    return [each for x in xs for each in (f(on.put(x)), holder.last, lower_triangle(8))]


@CASES.add(fullgraph=False)
def what_is_written_and_stored_by_another_name(on):
    holder, buffer, found = Slotted(), on.put(data()), []
    holder.last = None

    @on.jit
    def f(x):
        if holder.last is not None:
            holder.last.mul_(2)
        holder.last = buffer.add_(x)
        return holder.last

    for x in on.rows(4):
        found.append(f(x))
        assert found[-1] is holder.last is buffer
    return found


@CASES.add(2)
def a_list_that_a_call_makes_and_others_change(on):
    holder, seen = Slotted(), []
    holder.last = None

    @on.jit
    def f(x):
        if holder.last is None:
            holder.last = [x * 0, {}]
        holder.last[0] = holder.last[0] + x
        holder.last[1]["sum"] = holder.last[1].get("sum", 0) + x.sum()
        return x.sum()

    for x in on.rows(4):
        f(x)
        seen.append(holder.last)
    assert all(x is seen[0] for x in seen)
    return [seen[0][0], seen[0][1]["sum"]]


@CASES.add(fullgraph=False)
def one_list_in_two_places(on):
    first, second, table = Slotted(), Slotted(), [None]
    first.last = None

    @on.jit
    def f(x):
        if first.last is None:
            first.last = second.last = [x * 0]
        first.last[0] = first.last[0] + x
        return second.last[0].sum()

    @on.jit
    def g(x):
        table[0] = x * 2
        second.last = table
        return second.last[0].sum()

    return [*map(f, on.rows(4)), *map(g, on.rows(3)), *table, *second.last]


@CASES.add()
def whether_two_places_have_one_tensor(on):
    first, second = Slotted(), Slotted()
    first.last = second.last = None

    @on.jit
    def f(x, both):
        result = x * (2 if first.last is second.last else 3)
        first.last = second.last = x.clone()
        first.last.add_(1)
        if not both:
            second.last = x * 5
        return result + second.last

    return [f(x, both) for x, both in zip(on.rows(6), (1, 1, 0, 0, 1, 1), strict=True)]


@CASES.add(fullgraph=False)
def counters_beside_what_is_stored(on):
    class Ring:
        calls, values = 0, [None] * 3

    ring = Ring()

    @on.jit
    def f(x):
        ring.values[ring.calls % 3] = x.sum()
        ring.calls += 1
        return x * ring.calls

    return [*map(f, on.rows(5)), *ring.values, torch.tensor(ring.calls)]


@CASES.add(1)
def lbfgs_with_a_closure_that_is_traced(on):
    model, x = on.model(), on.put(data())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)

    @on.jit
    def closure():
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    return [*(optimizer.step(closure) for _ in range(2)), *model.parameters()]


@CASES.add(2)  # then its state has what it keeps
def an_optimizer_that_keeps_weights(on):
    class Sharpness(torch.optim.Optimizer):
        def __init__(self, base):
            super().__init__(base.param_groups, {})
            self.base = base

        @torch.no_grad()
        def climb(self):
            for p in self.param_groups[0]["params"]:
                self.state[p]["before"] = p.data.clone()
                p.add_(p.grad, alpha=0.1)
            self.zero_grad()

        @torch.no_grad()
        def descend(self):
            for p in self.param_groups[0]["params"]:
                p.data = self.state[p]["before"]
            self.base.step()
            self.zero_grad()

    model = on.model()
    optimizer = Sharpness(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @on.jit
    def step(x):
        for finish in (optimizer.climb, optimizer.descend):
            model(x).square().mean().backward()
            finish()

    for x in on.rows(3):
        step(x)
    return [*model.parameters(), *(optimizer.state[p]["before"] for p in model.parameters())]


@CASES.add(fullgraph=False)
def sparse_gradients(on):
    weight = on.put(data()).requires_grad_()
    optimizer = torch.optim.SparseAdam([weight], lr=0.1)

    @on.jit
    def step(index):
        optimizer.zero_grad()
        nn.functional.embedding(index, weight, sparse=True).square().sum().backward()
        optimizer.step()

    for k in range(3):
        step(torch.arange(3) + k)
    return [weight]


@CASES.add(fullgraph=False)
def lists_that_grow(on):
    seen, others = [], []
    note = others.append
    f, g = on.jit(lambda x: seen.append(x.sum())), on.jit(lambda x: note(x.sum()))
    for x in on.rows(3):
        f(x)
        g(x)
    return seen + others


def leaks_of(on, transform):
    """What a function that a transform or a loop calls leaves behind is what plain code leaves."""
    holder, found = Slotted(), []

    def leave(x):
        inside = []

        def body(c):
            holder.last = c * 2
            inside.append(c * 3)
            return c.sum()

        return transform(body, x), inside

    f = on.jit(lambda x: leave(x)[0])
    g = on.jit(lambda x: leave(x)[1][0])
    h = on.jit(lambda x: leave(x)[1][0] + 1)
    for x in on.rows(2):
        found += [f(x), holder.last, g(x), h(x)]
    return found


@CASES.add(2)
def a_context_variable(on):
    latest = ContextVar("latest")

    @on.jit
    def f(x):
        latest.set(latest.get(0) + x)
        return x.sum()

    return [each for x in on.rows(4) for each in (f(x), latest.get())]


@CASES.add(5, fullgraph=False)  # each number is another graph: then it is not traced any more
def a_counter_in_each_call(on):
    ring = SimpleNamespace(calls=0, last=on.put(data()))

    @on.jit
    def f(x):
        ring.last = ring.last + x
        ring.calls += 1
        return x * ring.calls

    return [*map(f, on.rows(9)), ring.last, torch.tensor(ring.calls)]


@CASES.add(fullgraph=False)
def what_a_loop_leaves(on):
    return leaks_of(on, lambda body, x: tp.scan(lambda c, _: (c + body(c), None), x, None, 2)[0])


@CASES.add(fullgraph=False)
def what_a_derivative_leaves(on):
    return leaks_of(on, lambda body, x: torch.func.grad(body)(x))


# -- layers of torch that store --------------------------------------------------------------------


def trained(on, change, also=lambda model: None):
    torch.manual_seed(0)  # power iterations begin with random numbers
    layers = nn.Linear(8, 8).double(), nn.Tanh(), nn.Linear(8, 4).double()
    change(layers[0])
    model = on.model(*layers)
    step, results = on.step(model, torch.optim.AdamW(model.parameters(), lr=0.1)), []
    for k, x in enumerate(on.rows(5)):
        results.append(step(x))
        if k == 2:
            also(model)
    return [*results, *model.state_dict().values()]


@CASES.add(1)
def spectral_norm(on):
    return trained(on, parametrizations.spectral_norm)


@CASES.add(1)
def weight_norm(on):
    return trained(on, parametrizations.weight_norm)


@CASES.add()
def weight_norm_over_the_other_dim(on):
    return trained(on, lambda layer: parametrizations.weight_norm(layer, dim=1))


@CASES.add(2)
def pruning(on):
    def change(layer):
        nn.utils.prune.l1_unstructured(layer, "weight", 0.3)

    def use_all(model):
        model[0].weight_mask.fill_(1)

    return trained(on, change, use_all)


# -- what decides by a value -----------------------------------------------------------------------


def averaged(on, **options):
    model = on.model(nn.Linear(8, 8), nn.BatchNorm1d(8))
    average = AveragedModel(model, **options)
    step = on.step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        also=lambda: average.update_parameters(model),
    )
    return [*map(step, on.rows(4)), *average.state_dict().values()]


@CASES.add(1)
def the_mean_of_models(on):
    return averaged(on)


@CASES.add(1)
def the_mean_of_models_in_lists(on):
    return averaged(on, multi_avg_fn=get_swa_multi_avg_fn())


@CASES.add(1)
def an_average_that_computes_with_its_counter(on):
    def follow(average, now, count):
        return (
            now if count == 0 else average + (now - average) / (count.to(torch.float64) * 0.3 + 1)
        )

    return averaged(on, avg_fn=follow)


@CASES.add(1)
def a_moving_average_of_models_with_buffers(on):
    return averaged(on, avg_fn=get_ema_avg_fn(0.9), use_buffers=True)


class Momentum(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"momentum": torch.zeros_like(p), "steps": torch.zeros(())}

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["steps"] += 1
            self.state[p]["momentum"] *= 0.9
            p.sub_(self.state[p]["momentum"].add_(p.grad), alpha=0.1)


class Counting(Momentum):
    """With a counter that is a number of Python."""

    def __init__(self, params):
        super().__init__(params)
        self.last = self.state[self.param_groups[0]["params"][-1]]
        self.last["count"] = 0

    def step(self):
        super().step()
        self.last["count"] += 1


def scaled(on, make, clips=False, bad=(0, 3), updates_outside=False, is_used=False):
    model = on.model()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    if is_used:
        scaler.scale(torch.ones(()))

    @on.jit
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        if not updates_outside:
            scaler.update()
        return loss.detach()

    results = []
    for k in range(7):
        x = data(k)
        x[0, 0] = float("inf") if k in bad else 1
        loss = step(on.put(x))
        if updates_outside:
            scaler.update()
        results += [loss, torch.tensor(scaler.get_scale())]
    state = [torch.as_tensor(x) for entries in optimizer.state.values() for x in entries.values()]
    return [*results[3:6], *results[8:], *model.parameters(), *state]


class Everywhere(torch.optim.Optimizer):
    """With tensors in lists, settings and attributes, and writes that autograd does not hear of."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "count": torch.zeros((), dtype=torch.float64)})
        self.params = self.param_groups[0]["params"]
        self.total = torch.zeros((), dtype=torch.float64)
        self.slow = {p: torch.zeros_like(p) for p in self.params}
        self.state.update({p: {"sums": [torch.zeros_like(p)]} for p in self.params})

    @torch.no_grad()
    def step(self):
        self.param_groups[0]["count"].add_(1)
        self.total.add_(2)
        for p in self.params:
            p.grad.add_(1)
            self.state[p]["sums"][0].add_(p.grad.sign())
            self.slow[p].add_(self.state[p]["sums"][0])
            p.data.sub_(self.slow[p] / (self.param_groups[0]["count"] + self.total))


def skipped(on, make):
    model = on.model(nn.Linear(8, 4), nn.Linear(4, 2))
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    scaler.scale(torch.ones(()))

    @on.jit
    def step(x, more):
        optimizer.zero_grad()  # the gradients of the first layer stay finite
        scaler.scale(model(x).mean() + more * model[1].bias[0]).backward()
        scaler.step(optimizer)
        scaler.update()

    grads = []
    for k, x in enumerate(on.rows(5)):
        step(x, torch.tensor(float("inf") if k in (1, 3) else 1.0, dtype=torch.float64))
        grads += [p.grad for p in model[0].parameters()]
    return [*grads, *model.parameters()], optimizer


@CASES.add(1)
def a_skipped_step_changes_nothing(on):
    found, optimizer = skipped(on, Everywhere)
    sums = [x["sums"][0] for x in optimizer.state.values()]
    count = optimizer.param_groups[0]["count"]
    return [*found, *sums, *optimizer.slow.values(), optimizer.total, count]


class CountingItself(torch.optim.SGD):
    count = 0

    def step(self):
        self.count += 1
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(self.count)


@CASES.add(fullgraph=False)
def a_skipped_step_of_one_that_counts_in_an_attribute(on):
    found, optimizer = skipped(on, CountingItself)
    return [*found, torch.tensor(optimizer.count)]


@CASES.add(4, fullgraph=False)
def an_optimizer_that_counts_in_an_attribute(on):
    model = on.model()
    optimizer = CountingItself(model.parameters(), lr=0.1)
    losses = list(map(on.step(model, optimizer), on.rows(6)))
    return [*losses, *model.parameters(), torch.tensor(optimizer.count)]


@CASES.add(fullgraph=False)
def a_skipped_step_with_a_hook(on):
    averages = [on.put(torch.zeros(*n, dtype=torch.float64)) for n in ((4, 8), (4,), (2, 4), (2,))]

    def make(params):
        optimizer = torch.optim.SGD(params, lr=0.1)

        @optimizer.register_step_post_hook
        @torch.no_grad()
        def follow(optimizer, args, kwargs):
            for average, p in zip(averages, optimizer.param_groups[0]["params"], strict=True):
                average.add_(p)

        return optimizer

    return [*skipped(on, make)[0], *averages]


class NewState(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = self.state[p].get("sum", 0) + p.grad
            p.sub_(self.state[p]["sum"], alpha=0.1)


@CASES.add(4, fullgraph=False)  # then it is not traced any more
def an_optimizer_that_makes_its_state_anew(on):
    model = on.model()
    step = on.step(model, NewState(model.parameters()))
    return [*map(step, on.rows(6)), *model.parameters()]


@CASES.add(2)  # the first makes the scale
def a_scaler_and_sgd(on):
    return scaled(on, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), clips=True)


@CASES.add(2)
def a_scaler_and_adam(on):
    return scaled(on, lambda p: torch.optim.AdamW(p, lr=0.1))


@CASES.add(2)
def a_scaler_and_an_optimizer_that_is_fused(on):
    return scaled(on, lambda p: torch.optim.Adam(p, lr=0.1, fused=True))


@CASES.add(2)
def a_scaler_that_is_updated_outside(on):
    return scaled(on, lambda p: torch.optim.Adam(p, lr=0.1), updates_outside=True)


@CASES.add(fullgraph=False)
def a_scaler_and_an_optimizer_that_counts_in_python(on):
    return scaled(on, Counting, is_used=True)


@CASES.add(1)
def a_scaler_and_an_optimizer_of_the_user(on):
    return scaled(on, Momentum, is_used=True)


@CASES.add(4, fullgraph=False)  # each number is another graph: then it is not traced any more
def an_optimizer_that_counts_in_python(on):
    model = on.model()
    optimizer = Counting(model.parameters())
    losses = list(map(on.step(model, optimizer), on.rows(7)))
    return [*losses, *model.parameters(), torch.tensor(optimizer.last["count"])]


@CASES.add(1)
def an_optimizer_of_the_user(on):
    model = on.model()
    optimizer = Momentum(model.parameters())
    state = [x for entries in optimizer.state.values() for x in entries.values()]
    return [*map(on.step(model, optimizer), on.rows(4)), *model.parameters(), *state]


@CASES.add(1)
def a_scaler_whose_scale_is_on_the_host(on):
    return scaled(on, lambda p: torch.optim.Adam(p, lr=0.1), is_used=True)


@CASES.add()
def settings_of_a_scaler(on):
    weight = on.put(data()).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1), []

    @on.jit
    def step(x):
        optimizer.zero_grad()
        scaler.scale((weight * x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    for k, x in enumerate(on.rows(4)):
        step(x)
        scales.append(scaler.get_scale())
        if k == 1:
            scaler.set_growth_factor(4.0)
    return [torch.tensor(scales), weight]


test_as_in_plain_torch = CASES.tests()


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["attributes", "spectral_norm", "pruning", "a_scaler_and_adam"])
def test_compiled(name):
    class Compiled(Plain):
        def jit(self, function):
            return tp.jit(function, fullgraph=True)

        def put(self, x):
            return tp.replicate(x) if isinstance(x, nn.Module) else tp.shard_batch(x)

    run, _, _ = CASES[name]
    for mine, right in zip(run(Compiled()), run(Plain()), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), right.detach(), atol=1e-12, rtol=1e-12)


class Follower:
    progress, last = 0, None


def test_what_another_thread_changes_is_its_own():
    holder, begun, written = Follower(), threading.Event(), threading.Event()

    def other():
        begun.wait()
        holder.progress = 1
        written.set()

    def f(x):
        if not written.is_set():
            begun.set()
            written.wait()
        holder.last = x * 2

    f, x = tp.jit(f, compile=EAGER), torch.ones(4)
    with beside(other), pytest.warns(UserWarning, match="'progress'"):
        f(x)
    holder.progress = 0
    f(x)
    assert holder.progress == 0
    assert holder.last.tolist() == [2] * 4


def test_a_trace_that_fails_leaves_objects_in_their_list():
    layer = SimpleNamespace(last=None)
    layers, first = [layer], torch.zeros(3)
    layer.last = first

    def f(x):
        for each in layers:
            each.last = x * 2
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tp.jit(f, compile=EAGER)(torch.ones(3))
    assert layers == [layer]
    assert layer.last is first


def test_a_trace_that_fails_leaves_what_another_thread_adds():
    known, begun, written = {}, threading.Event(), threading.Event()

    def other():
        begun.wait()
        known["other"] = 1
        written.set()

    def f(x):
        known["mine"] = x * 2
        begun.set()
        written.wait()
        raise KeyError("mine")

    with beside(other), pytest.raises(KeyError, match="mine"):
        tp.jit(f, compile=EAGER)(torch.ones(3))
    assert known == {"other": 1}


class Later:
    __slots__ = ("last", "later")


class Shared(Later):
    """What it holds becomes another value as soon as it was read, as if by another thread."""

    __slots__ = ()

    @property
    def last(self):
        found = Later.last.__get__(self)
        if self.later is not None:
            self.last, self.later = self.later, None
        return found

    @last.setter
    def last(self, value):
        Later.last.__set__(self, value)


def test_a_call_reads_once_what_is_stored():
    shared = Shared()
    shared.last, shared.later = torch.ones(4), None

    @tp.jit(compile=EAGER, fullgraph=True)
    def f(x):
        shared.last = shared.last * 0.5 + x
        return shared.last.sum()

    for _ in range(2):  # then it is on the devices
        f(torch.ones(4))
    before, shared.later = shared.last.sum(), torch.ones(2)
    assert f(torch.ones(4)) == before * 0.5 + 4
    assert shared.last.shape == (4,)


def test_what_changes_beside_a_tensor_is_named():
    losses, holder = [0], Slotted()

    def f(x):
        holder.last = x * 2
        losses.append(1)
        return x

    f = tp.jit(f, compile=EAGER, fullgraph=True)
    with pytest.raises(tp.TraceError, match=r"changes what is none \(an item of a list\)"):
        f(torch.ones(4))


def test_a_wrapper_that_looks_like_torchs_changes_what_is_the_users():
    calls, state = 0, {}

    @functools.wraps(torch.nn.functional.silu)
    def counting(x):
        nonlocal calls
        calls += 1
        state["last"] = x * 2
        return x + 1

    f = tp.jit(lambda x: counting(x), compile=EAGER)
    for _ in range(3):
        f(torch.ones(4))
    assert calls == 3


@pytest.mark.parametrize("reads", [True, False])
def test_a_thread_that_uses_what_a_step_writes(monkeypatch, reads):
    """A view that it takes sees the step's write, and what it writes is not undone by the step."""
    w, seen = tp.replicate(torch.ones(3)), []
    act = (lambda: seen.append(w[0])) if reads else (lambda: w.mul_(0))
    thread = threading.Thread(target=act)

    @tp.jit(compile=EAGER)
    def step(x):
        w.add_(x)
        return x * 2

    x = tp.replicate(torch.ones(3))
    step(x)
    kind = type(w._handle.team.runtime)
    execute = kind.execute

    def executed(runtime, team, plan, held, num, give_up=None):
        results = execute(runtime, team, plan, held, num, give_up)
        if give_up is not None:  # the call is sent, and may wait for room
            thread.start()
            thread.join(None if reads else 0.2)  # a write waits for its turn
        return results

    with monkeypatch.context() as patch:
        patch.setattr(kind, "execute", executed)
        step(x)
    thread.join()
    assert w.tolist() == [3 if reads else 0] * 3
    assert all(view.item() == 3 for view in seen)
