"""Covers: _modules/replicate.py: modules and optimizers on all devices."""

import copy
import gc
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from _support import close, gradients
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as HOOKS

import torchpmap as tp
from torchpmap import P

pytestmark = pytest.mark.usefixtures("pool")

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def equal(module, other, rtol=0.0, atol=0.0):
    mine, theirs = module.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name].cpu(), theirs[name].cpu(), rtol=rtol, atol=atol)


def on_devices(module):
    return all(type(x) is tp.ShardedTensor for x in [*module.parameters(), *module.buffers()])


def test_a_module_is_changed_in_place_and_returned():
    module = make()
    assert tp.replicate(module) is module
    assert on_devices(module)
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in module.parameters())
    assert all(p.is_fully_replicated and p.requires_grad for p in module.parameters())
    assert not any(buffer.requires_grad for buffer in module.buffers())
    equal(module, make())
    before = list(module.parameters())
    torch.optim.SGD(module.parameters(), lr=0.1)
    tp.replicate(module)
    assert all(x is y for x, y in zip(module.parameters(), before, strict=True))


def test_some_devices():
    module = tp.replicate(make(), tp.devices()[:2])
    assert {p.devices() for p in module.parameters() if not p.devices()} == set()
    assert module[0].weight.devices() == set(tp.devices()[:2])
    tp.replicate(module)
    assert module[0].weight.devices() == set(tp.devices())


def test_frozen_parameters_and_gradients_stay():
    module, plain = make(), make()
    module[0].requires_grad_(False)
    module[3].weight.grad = torch.full((3, 6), 2.0)
    tp.replicate(module)
    assert [p.requires_grad for p in module.parameters()] == [False, *[True] * 4]
    assert module[3].weight.grad.sharding == module[3].weight.sharding
    assert torch.equal(module[3].weight.grad.cpu(), torch.full((3, 6), 2.0))
    assert module[3].bias.grad is None
    equal(module, plain)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_parameter("absent", None)
        self.register_buffer("other_scale", self.scale)

    def forward(self, x):
        return self.head(self.embedding(x)) * self.scale


def weight_normed():
    return nn.Sequential(nn.Embedding(5, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))


@pytest.mark.parametrize("kind", [Tied, weight_normed])
def test_tied_weights_and_parametrizations_stay(kind):
    torch.manual_seed(0)
    plain = kind()
    module, x = tp.replicate(copy.deepcopy(plain)), torch.arange(8) % 5
    if kind is Tied:
        assert module.head.weight is module.embedding.weight
        assert module.scale is module.other_scale
    assert list(module.state_dict()) == list(plain.state_dict())
    result, expected = module(tp.shard_batch(x)), plain(x)
    torch.testing.assert_close(result.cpu(), expected)
    result.sum().backward()
    expected.sum().backward()
    close(gradients(module), gradients(plain))


def test_state_dicts_load_both_ways():
    plain, module = make(), tp.replicate(make())
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2)
    plain.load_state_dict(module.state_dict())
    equal(plain, module)
    module.load_state_dict(make().state_dict())
    assert on_devices(module)
    equal(module, make())
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        module[0].load_state_dict(nn.Linear(2, 2).state_dict())


def clipped_step(module, optimizer, x):
    loss = F.mse_loss(module(x), x[:, :3].sin())
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    optimizer.step()
    return loss.item(), norm.item()


def closed_step(module, optimizer, x):
    def loss():
        optimizer.zero_grad()
        value = F.mse_loss(module(x), x[:, :3].sin())
        value.backward()
        return value

    return optimizer.step(loss).item()


class Scaled(nn.Module):
    """With parameters of two, one and no dims."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.linear(x) * self.scale


NAMES = (
    *("Adafactor", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
TRAININGS = [
    (make, clipped_step, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (make, clipped_step, lambda p: torch.optim.AdamW(p, lr=0.01)),
    (make, clipped_step, lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True)),
    *((Scaled, closed_step, getattr(torch.optim, name)) for name in NAMES),
    (Scaled, closed_step, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4)),
    (Scaled, closed_step, lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9)),
]


def kinds_of_state(optimizer):
    leaves = torch.utils._pytree.tree_leaves
    return [
        {name: [type(x) for x in leaves(value)] for name, value in values.items()}
        for values in optimizer.state.values()
    ]


def resume(module, plain, make_optimizer, optimizer):
    """Go on with what a plain module and its optimizer are now."""
    module.load_state_dict(plain.state_dict())
    mine = make_optimizer(module.parameters())
    mine.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the steps
    return mine


def test_the_state_of_a_cut_parameter_is_resumed_cut_as_it_is():
    plain = nn.Linear(4, 8)
    theirs = torch.optim.AdamW(plain.parameters())
    plain(torch.ones(2, 4)).sum().backward()
    theirs.step()
    mesh = tp.make_mesh((4,), ("x",))
    module = tp.shard_module(nn.Linear(4, 8), {"weight": tp.P("x")}, mesh)
    mine = tp.replicate(resume(module, plain, torch.optim.AdamW, theirs))
    for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert mine.state[parameter][name].sharding == parameter.sharding
            assert mine.state[parameter][name].tolist() == theirs.state[other][name].tolist()


@pytest.mark.parametrize(("make_module", "step", "make_optimizer"), TRAININGS)
def test_training_and_resuming_are_those_of_one_device(make_module, step, make_optimizer):
    """... and a resumed state is where a new one is."""
    plain, lasting = make_module(), tp.replicate(make_module())
    theirs, mine = make_optimizer(plain.parameters()), make_optimizer(lasting.parameters())
    for _ in range(3):
        result = step(lasting, mine, tp.shard_batch(X))
        assert result == pytest.approx(step(plain, theirs, X), rel=1e-4)
    resumed = tp.replicate(make_module())
    optimizer = resume(resumed, plain, make_optimizer, theirs)
    assert tp.replicate(optimizer) is optimizer
    assert kinds_of_state(optimizer) == kinds_of_state(mine)
    with tp.debug.report_gathers() as gathers:
        result = step(resumed, optimizer, tp.shard_batch(X))
    assert gathers == []
    assert result == pytest.approx(step(plain, theirs, X), rel=1e-4)
    equal(resumed, plain, rtol=1e-3, atol=1e-4)


def test_a_state_that_stays_on_the_host_gives_the_same_numbers():
    plain, module = make(), tp.replicate(make())
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    clipped_step(plain, theirs, X)
    mine = resume(module, plain, lambda p: torch.optim.AdamW(p, lr=0.01), theirs)
    for _ in range(2):
        result = clipped_step(module, mine, tp.shard_batch(X))
        assert result == pytest.approx(clipped_step(plain, theirs, X), rel=1e-4)


def test_a_training_step_leaves_no_tensor_to_the_garbage_collector():
    """Memory of the devices would wait for it, and it does not see how much that is."""
    module = tp.replicate(nn.Sequential(*make(), nn.Dropout()))
    optimizer = torch.optim.AdamW(module.parameters())
    x = tp.shard_batch(X)

    def step():
        module(x).view(-1).square().sum().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def count():
        return sum(type(each) is tp.ShardedTensor for each in gc.get_objects())

    step()
    gc.collect()
    gc.disable()
    try:
        before = count()
        step()
        assert count() == before
    finally:
        gc.enable()


def test_hooks_and_attributes_stay():
    module, updated = nn.Linear(4, 2), []
    module.weight.register_hook(lambda grad: grad * 0)
    module.bias.register_post_accumulate_grad_hook(updated.append)
    module.bias.no_decay = True
    tp.replicate(module)(tp.shard_batch(X)).sum().backward()
    assert module.weight.grad.abs().sum().item() == 0
    assert module.bias.grad.tolist() == [8, 8]
    assert [parameter is module.bias for parameter in updated] == [True]
    assert module.bias.no_decay


def test_weights_that_two_modules_share_stay_shared_in_one_pool():
    one, other, last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = last.weight = one.weight
    expected = one.weight.tolist()
    tp.replicate(one)
    tp.replicate(other)
    assert other.weight is one.weight
    assert other.bias is not one.bias
    tp.shutdown()
    assert tp.replicate(last).weight.tolist() == expected


def test_optimizers_are_watched_while_a_replaced_tensor_is_alive():
    gc.collect()
    before = len(HOOKS)
    module = nn.Linear(4, 2)
    old = list(module.parameters())
    tp.replicate(module)
    assert len(HOOKS) == 1
    del old
    gc.collect()
    assert len(HOOKS) == before


def test_objects_are_searched_for_optimizers_only_if_something_else_has_a_parameter(monkeypatch):
    searched = []
    objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: searched.append(1) or objects())
    tied = nn.Sequential(make(), make())
    tied[1][0].weight = tied[0][0].weight
    tp.replicate(tied)
    assert not searched
    module = make()
    held = module[0].weight
    tp.replicate(module)
    assert searched
    assert held.shape == (6, 4)


def test_copies_and_pickles_are_modules():
    module = tp.replicate(make())
    module[1].weight.requires_grad_(False)
    twin = copy.deepcopy(module).eval()
    assert on_devices(twin)
    torch.testing.assert_close(twin(tp.shard_batch(X)).cpu(), make().eval()(X))
    twin = pickle.loads(pickle.dumps(module))
    for name, parameter in twin.named_parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad == (name != "1.weight")
    equal(tp.replicate(twin), module)


def test_writes_to_rows_of_a_module_are_seen():
    module, plain = tp.replicate(make()), make()
    for each in (module, plain):
        each[0].weight.data[0].fill_(2.0)
        each[0].weight.data[:, 1].zero_()
        each[0].weight.data.fill_diagonal_(1.0)
        each[1].running_mean[2].fill_(3.0)
        each[1].running_var[1:3][0] = 4.0
        for number, row in enumerate(each[3].weight.detach()):
            row.mul_(number)
    equal(module, plain)


def test_a_module_that_gathers_says_so_once():
    class Summing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return self.linear(x).cumsum(0)

    module, x = tp.replicate(Summing()), tp.shard_batch(X)
    message = (
        r"^Summing is on the devices, but its operation aten\.cumsum\.default gathers its "
        r"operands, .* Cut another dim of the input, or call the module in a mapped function"
    )
    with pytest.warns(UserWarning, match=message) as found:
        module(x)
    assert [warning.filename for warning in found] == [__file__]
    module(x).sum().backward()
    Summing()(X)
    nn.Softmax(0)(x)  # it has nothing on the devices


def test_parameters_lie_as_their_names_say():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.BatchNorm1d(4), layer, nn.Linear(4, 8))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model[3].weight.grad = torch.ones(8, 4)
    mesh = tp.make_mesh((2, 2), ("x", "y"))
    specs = {r"^3\.weight": P("x", "y"), "weight": P("y"), "running_": P("x")}
    with tp.set_mesh(mesh):
        assert tp.shard_module(model, specs) is model
    found = {name: value.sharding.spec for name, value in model.state_dict().items()}
    assert found["3.weight"] == model[3].weight.grad.sharding.spec == P("x", "y")
    assert found["0.weight"] == found["1.weight"] == P("y")
    assert found["1.running_mean"] == P("x")
    assert found["0.bias"] == found["1.num_batches_tracked"] == P()
    assert model[0].weight is model[2].weight
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), expected[name])
    weight = model[3].weight
    assert tp.shard_module(model, specs, mesh)[3].weight is weight  # it is there
    assert tp.replicate(model)[3].weight.is_fully_replicated


def of_old_parameters(place):
    module = make()
    optimizer = torch.optim.AdamW(module.parameters())
    try:
        place(module)
    finally:
        assert type(module[0].weight) is nn.Parameter
        del optimizer
        tp.replicate(module)  # which nothing holds any more


def step_of_replaced_parameters():
    module = nn.Linear(4, 2)
    groups = list(module.parameters())
    tp.replicate(module)
    torch.optim.SGD(groups, lr=0.1).step()


def by_spec(name, spec, **options):
    model = nn.Sequential(nn.Linear(4, 6))
    return tp.shard_module(model, {name: spec}, **({"mesh": tp.make_mesh((4,), ("x",))} | options))


NEW = (
    "Sequential) makes new parameters, but an optimizer, AdamW, holds those that the module has "
    "now. Place the module first, then make the optimizer."
)
REFUSED = {
    "an optimizer of the old parameters": (
        lambda: of_old_parameters(tp.replicate), ValueError, f"^{re.escape('replicate(' + NEW)}$"),
    "and of shard_module": (
        lambda: of_old_parameters(
            lambda m: tp.shard_module(m, {"3.weight": P(None, "x")}, tp.make_mesh((2,), ("x",)))),
        ValueError, f"^{re.escape('shard_module(' + NEW)}$"),
    "its step": (
        step_of_replaced_parameters, RuntimeError,
        r"^SGD holds a parameter \[2, 4\] that replicate or shard_module has replaced, so a "
        r"step would not change the module\. Collect the parameters afterwards\.$"),
    "a lazy module": (
        lambda: tp.replicate(nn.Sequential(nn.LazyLinear(3))), ValueError,
        r"^replicate\(Sequential\): 0\.weight belongs to a lazy module and has no shape yet\. Run "
        r"the module once on a batch, then place it\.$"),
    "no mesh": (
        lambda: by_spec("weight", P("x"), mesh=None), ValueError,
        r"^shard_module\(Sequential\) needs a mesh: pass mesh=, or"),
    "no spec": (
        lambda: by_spec("weight", "x"), TypeError,
        r"^shard_module.*: 'weight' must be a P\(...\), but is 'x'"),
    "no such axis": (
        lambda: by_spec("weight", P("data")), ValueError,
        r"^shard_module\(Sequential\): 0\.weight: Resource axis: data of .* not found in mesh"),
    "no such name": (
        lambda: by_spec("up", P("x")), ValueError,
        r"'up' is found in no name; there are 0.weight, 0.bias\.$"),
    "no expression": (
        lambda: by_spec("(", P("x")), ValueError,
        r"^shard_module\(Sequential\): '\(' is no regular expression: missing \)"),
    "no module": (
        lambda: tp.shard_module({"w": torch.ones(4)}, {"w": P("x")}, tp.make_mesh((4,), ("x",))),
        TypeError, r"^shard_module\(dict\): module must be an nn\.Module\.$"),
    "uneven": (
        lambda: by_spec("bias", P("x")), ValueError,
        r"^shard_module\(Sequential\): 0\.bias: .*evenly divide"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        call()
