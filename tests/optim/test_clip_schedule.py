"""Covers: optim/_clip.py, optim/_schedule.py. Expected is what torch gives for the same numbers."""

import copy
import pickle
import re

import pytest
import torch
from _support import COMPILED, EAGER, close
from torch.optim import lr_scheduler

import torchpmap as tp

TREES = {
    "tree": {"w": torch.arange(6.0).reshape(2, 3), "rest": [torch.tensor(-2.0), None]},
    "bfloat16": {"w": torch.arange(4.0).bfloat16(), "b": torch.tensor(3.0), "c": torch.ones(2)},
    "without dims": {"w": torch.tensor(4.0).bfloat16(), "b": torch.tensor(3.0).double()},
    "complex": {"w": torch.tensor([3 + 4j, 1j]), "b": torch.ones(2)},
    "leaf": torch.tensor([3.0, 4.0]),
    "zeros": {"w": torch.zeros(3)},
    "infinite": {"w": torch.tensor([1.0, torch.inf]), "b": torch.ones(2)},
    "nan": {"w": torch.tensor([1.0, torch.nan]), "b": torch.ones(2)},
    "nothing": {"w": None},
}


def leaves_of(tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if x is not None]


def with_torch(tree, max_norm, norm_type):
    params = [torch.zeros_like(x, requires_grad=True) for x in leaves_of(tree)]
    for p, grad in zip(params, leaves_of(tree), strict=True):
        p.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    return [p.grad for p in params], norm


def assert_same(results, expected, **tolerance):
    (clipped, norm), (theirs, their_norm) = results, expected
    close([*leaves_of(clipped), norm], [*theirs, their_norm], **tolerance)


@pytest.mark.parametrize("norm_type", [2.0, 1, float("inf")])
@pytest.mark.parametrize("max_norm", [0.1, 4, 100.0])
@pytest.mark.parametrize("name", TREES)
def test_clipping_is_torchs(name, max_norm, norm_type):
    tree = TREES[name]
    before = copy.deepcopy(tree)
    results = tp.optim.clip_grad_norm(tree, max_norm, norm_type)
    assert_same(results, with_torch(tree, max_norm, norm_type), rtol=0, atol=0)
    assert str(tree) == str(before)


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize("name", sorted(TREES.keys() - {"nothing"}))
def test_clipping_in_mapped_functions(pool, mode, name):
    tree = TREES[name]
    rows = torch.utils._pytree.tree_map(
        lambda x: None if x is None else torch.stack([x, 10 * x]), tree
    )
    for transform in (tp.vmap, lambda f: tp.pmap(f, compile=mode)):
        clipped, norms = transform(lambda grads: tp.optim.clip_grad_norm(grads, 3.0))(rows)
        for k, factor in enumerate((1, 10)):
            scaled = [factor * x for x in leaves_of(tree)]
            mine = [x.cpu()[k] for x in leaves_of(clipped)], norms.cpu()[k]
            assert_same(mine, with_torch(scaled, 3.0, 2.0))


def test_derivatives_pass_through_clipping():
    def clipped(x):
        return tp.optim.clip_grad_norm({"a": x, "b": x[0]}, 1.0)

    x = torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: clipped(x)[0]["a"], x)
    slope = tp.grad(lambda x: clipped(x)[1])(x.detach())
    torch.testing.assert_close(slope, torch.tensor([6.0, 4.0], dtype=torch.float64) / 34**0.5)


@pytest.mark.parametrize(
    ("grads", "text"),
    [
        ({"a": 1.0}, "grads['a'] is of type float, expected a floating-point or complex tensor."),
        ([torch.arange(3)], "grads[0] is int64[3], expected a floating-point or complex tensor."),
        ([torch.ones(3).to_sparse()],
         "grads[0] is sparse, expected a dense tensor: grads[0].to_dense()."),
    ],
)  # fmt: skip
def test_what_cannot_be_clipped(grads, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        tp.optim.clip_grad_norm(grads, 1.0)


S = lr_scheduler
NUM_STEPS = 12

SCHEDULERS = {
    "class": (S.CosineAnnealingLR, {"T_max": 5}),
    "lambda": (S.LambdaLR, {"lr_lambda": lambda step: 1 / (step + 1)}),
    "one cycle": (
        S.OneCycleLR, {"max_lr": 1.0, "total_steps": NUM_STEPS, "cycle_momentum": False}),
    "cyclic": (
        S.CyclicLR, {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 3, "cycle_momentum": False}),
    "restarts": (S.CosineAnnealingWarmRestarts, {"T_0": 2, "T_mult": 2}),
    "sequence": (lambda optimizer: S.SequentialLR(
        optimizer,
        [S.LinearLR(optimizer, total_iters=3), S.CosineAnnealingLR(optimizer, 6)], [3]), {}),
    "chain": (lambda optimizer, gamma: S.ChainedScheduler(
        [S.ExponentialLR(optimizer, gamma), S.LinearLR(optimizer, total_iters=3)],
        optimizer=optimizer), {"gamma": 0.9}),
}  # fmt: skip


def rates_of_torch(make, options, lrs):
    """The learning rates that steps of torch's optimizer have."""
    optimizer = torch.optim.Adam([{"params": [torch.zeros(1)], "lr": lr} for lr in lrs])
    scheduler = make(optimizer, **options)
    found = []
    for _ in range(NUM_STEPS):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        if len(found) < NUM_STEPS:
            scheduler.step()
    return found


each = pytest.mark.parametrize(("make", "options"), SCHEDULERS.values(), ids=SCHEDULERS)


@each
def test_rates_are_torchs(make, options):
    rate = tp.optim.schedule(make, lr=0.3, num_steps=NUM_STEPS, **options)
    expected = [group for (group,) in rates_of_torch(make, options, [0.3])]
    assert [rate(step) for step in range(NUM_STEPS)] == expected  # to the last bit
    steps = torch.arange(NUM_STEPS)
    torch.testing.assert_close(rate(steps), torch.tensor(expected))
    torch.testing.assert_close(tp.vmap(rate)(steps.float()), torch.tensor(expected))
    assert rate(torch.tensor(3)).shape == ()
    rates = tp.optim.schedule(make, lr=[0.3, 0.1], num_steps=NUM_STEPS, **options)
    expected = rates_of_torch(make, options, [0.3, 0.1])
    assert [rates(step) for step in range(NUM_STEPS)] == expected
    torch.testing.assert_close(torch.stack(rates(steps), 1), torch.tensor(expected))
    long = tp.optim.schedule(S.StepLR, lr=0.5, num_steps=300, step_size=1)
    assert long(torch.tensor(2, dtype=torch.uint8)).item() == pytest.approx(long(2))


@pytest.mark.parametrize("compiled", [EAGER, False, COMPILED])
@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_scheduled_clipped_step_is_that_of_torch(pool, compiled):
    options = {"T_max": 4}
    rate = tp.optim.schedule(S.CosineAnnealingLR, lr=0.1, num_steps=5, **options)
    optimizer = tp.optim.functional(torch.optim.AdamW)
    traces = []

    def step(params, state, x):
        traces.append(1)
        grads = tp.pmean(tp.grad(lambda p: ((x @ p["w"]) ** 2).mean())(params), "i")
        grads, norm = tp.optim.clip_grad_norm(grads, 0.5)
        lr = rate(state["w"]["step"])
        return *optimizer.update(grads, state, params, lr=lr), norm, lr

    train = tp.pmap(step, "i", in_axes=(None, None, 0), out_axes=None, compile=compiled)
    params = {"w": torch.tensor([1.0, -2.0, 3.0])}
    state, w = optimizer.init(params), torch.nn.Parameter(params["w"].clone())
    theirs = torch.optim.AdamW([w], lr=0.1)
    scheduler = S.CosineAnnealingLR(theirs, **options)
    for k in range(5):
        x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(k))
        params, state, norm, lr = train(params, state, x)
        theirs.zero_grad()
        ((x.flatten(0, 1) @ w) ** 2).mean().backward()
        expected = torch.nn.utils.clip_grad_norm_([w], 0.5)
        torch.testing.assert_close(norm.cpu(), expected)
        assert lr.item() == pytest.approx(scheduler.get_last_lr()[0], abs=1e-8)
        theirs.step()
        scheduler.step()
        torch.testing.assert_close(params["w"].cpu(), w.detach())
    if compiled is not False:
        assert len(traces) == 1


def test_steps_that_the_table_does_not_have():
    rate = tp.optim.schedule(S.StepLR, lr=0.5, num_steps=3, step_size=1)
    assert rate(torch.tensor([-1, 3, 10**6])).isnan().all()
    assert not rate(torch.tensor(2)).isnan()
    for step in (-1, 3):
        text = f"optim.schedule(StepLR, num_steps=3) has no step {step}. Make it with a larger"
        with pytest.raises(IndexError, match=re.escape(text)):
            rate(step)
    for step, kind in ((1.0, "of type float"), (torch.tensor(True), "bool[]")):
        with pytest.raises(
            TypeError, match=re.escape(f"or a tensor of whole numbers, but got {kind}.")
        ):
            rate(step)


def test_rates_have_the_default_dtype_and_schedules_pickle():
    rate = pickle.loads(
        pickle.dumps(tp.optim.schedule(S.ExponentialLR, lr=0.5, num_steps=3, gamma=0.9))
    )
    torch.set_default_dtype(torch.float64)
    try:
        assert rate(torch.arange(3)).tolist() == [rate(step) for step in range(3)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert rate(torch.arange(3)).dtype == torch.float32


def other_optimizer(optimizer):
    return S.ExponentialLR(torch.optim.SGD([torch.zeros(1)]), 0.9)


PLATEAU = "ReduceLROnPlateau depends on the loss, so it is no function of the step. Run torch's"
NOT_ONE = "optim.schedule needs a torch.optim.lr_scheduler.LRScheduler, but got "
MISUSE = {
    "plateau": (S.ReduceLROnPlateau, {}, TypeError, PLATEAU),
    "plateau made": (lambda optimizer: S.ReduceLROnPlateau(optimizer), {}, TypeError, PLATEAU),
    "other class": (torch.optim.SGD, {}, TypeError, NOT_ONE + "SGD."),
    "other result": (lambda optimizer: None, {}, TypeError, NOT_ONE + "NoneType."),
    "not callable": (3, {}, TypeError, "function from an optimizer to a scheduler, but got 3."),
    "other optimizer": (other_optimizer, {}, ValueError,
        "optim.schedule: ExponentialLR was made for another optimizer. Use the one that"),
    "momentum": (S.OneCycleLR, {"max_lr": 1.0, "total_steps": 9}, ValueError,
        "optim.schedule gives learning rates only, but OneCycleLR changes momentum too. Pass"),
    "steps": (S.StepLR, {"step_size": 1, "num_steps": 0}, ValueError,
        "optim.schedule: num_steps must be an int of at least 1, not 0."),
    "too many": (S.OneCycleLR, {"max_lr": 1.0, "total_steps": 5, "cycle_momentum": False},
        ValueError, "The specified number of total steps is 5"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "options", "kind", "text"), MISUSE.values(), ids=MISUSE)
def test_misuse(make, options, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        tp.optim.schedule(make, **{"lr": 0.1, "num_steps": 9, **options})
