"""Covers: optim/_accumulate.py. The expectation is torch.optim on means of the gradients."""

import pickle

import pytest
import torch
import torch.utils._pytree as pytree
from _support import EAGER

import torchpmap as tp

EVERY, NUM_CALLS = 3, 8  # two steps, and two gradients more

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "AdamW": {"lr": 0.1},
    "Adagrad": {"lr": 0.1},
    "NAdam": {"lr": 0.1},
    "RAdam": {"lr": 0.1},
    "Adadelta": {"lr": 0.5},
}
each = pytest.mark.parametrize("name", OPTIMIZERS)


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return {
            "w": torch.randn(3, 2, generator=generator),
            "b": [torch.randn((), generator=generator)],
        }

    return normal(), [normal() for _ in range(NUM_CALLS)]


def with_torch(name, params, grads, lrs=None):
    """The parameters after every call."""
    leaves = [leaf.clone() for leaf in pytree.tree_leaves(params)]
    optimizer = getattr(torch.optim, name)(leaves, **OPTIMIZERS[name])
    for call in range(NUM_CALLS):
        for p, grad in zip(leaves, pytree.tree_leaves(grads[call]), strict=True):
            p.grad = grad / EVERY + (0 if p.grad is None else p.grad)
        if call % EVERY == EVERY - 1:
            if lrs is not None:
                optimizer.param_groups[0]["lr"] = lrs[call]
            optimizer.step()
            optimizer.zero_grad()
        yield [leaf.clone() for leaf in leaves]


def accumulating(name):
    optimizer = tp.optim.functional(getattr(torch.optim, name), **OPTIMIZERS[name])
    return tp.optim.accumulate(optimizer, every=EVERY)


@each
def test_plain_tensors(name):
    params, grads = problem()
    optimizer = pickle.loads(pickle.dumps(accumulating(name)))
    state = optimizer.init(params)
    for grad, expected in zip(grads, with_torch(name, params, grads), strict=True):
        params, state = optimizer.update(grad, state, params)
        assert [x.tolist() for x in pytree.tree_leaves(params)] == [x.tolist() for x in expected]
    assert state["b"][0]["accumulated_calls"].item() == NUM_CALLS % EVERY
    rest = (grads[-2]["w"] + grads[-1]["w"]) / EVERY
    torch.testing.assert_close(state["w"]["accumulated_grad"], rest)


IN_MODES = [(name, EAGER) for name in OPTIMIZERS]
IN_MODES += [
    ("AdamW", False),
    pytest.param("AdamW", True, marks=[pytest.mark.inductor, pytest.mark.always]),
]


@pytest.mark.parametrize(("name", "compiled"), IN_MODES)
@pytest.mark.parametrize("pool", [2], indirect=True)
def test_one_program_for_all_calls(pool, name, compiled):
    params, grads = problem()
    optimizer = accumulating(name)
    traces = []

    def step(grads, state, params, lr):
        traces.append(1)
        return optimizer.update(tp.pmean(grads, "i"), state, params, lr=lr)

    train = tp.pmap(
        step, "i", in_axes=(0, None, None, None), out_axes=None, compile=compiled,
        donate_argnums=(1, 2),
    )  # fmt: skip
    lrs = [0.1 * 0.9**call for call in range(NUM_CALLS)]
    state = optimizer.init(params)
    for grad, lr, expected in zip(grads, lrs, with_torch(name, params, grads, lrs), strict=True):
        rows = pytree.tree_map(lambda g: torch.stack([0.5 * g, 1.5 * g]), grad)
        params, state = train(rows, state, params, lr)
        for mine, theirs in zip(pytree.tree_leaves(params), expected, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=2e-6)
    assert compiled is False or len(traces) == 1


@each
def test_ensemble(name):
    members = [problem(seed) for seed in range(2)]
    params, *grads = (
        pytree.tree_map(lambda *xs: torch.stack(xs), *trees)
        for trees in zip(*([params, *grads] for params, grads in members), strict=True)
    )
    optimizer = accumulating(name)
    state = tp.vmap(optimizer.init)(params)
    for grad in grads:
        params, state = tp.vmap(optimizer.update)(grad, state, params)
    for k, (member, gradients) in enumerate(members):
        *_, expected = with_torch(name, member, gradients)
        for mine, theirs in zip(pytree.tree_leaves(params), expected, strict=True):
            torch.testing.assert_close(mine[k], theirs, rtol=1e-5, atol=2e-6)


def test_parameters_without_gradient_do_not_change():
    optimizer = tp.optim.accumulate(
        tp.optim.functional(torch.optim.AdamW, lr=0.1, weight_decay=0.5), every=1
    )
    params = {"w": torch.ones(2), "frozen": torch.ones(2), "none": None}
    state = optimizer.init(params)
    grads = {"w": torch.ones(2), "frozen": None, "none": None}
    after, later = optimizer.update(grads, state, params)
    assert after["frozen"] is params["frozen"]
    assert str(later["frozen"]) == str(state["frozen"])
    assert after["none"] is later["none"] is None
    assert after["w"].tolist() != [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes_are_kept(dtype):
    optimizer = tp.optim.accumulate(tp.optim.functional(torch.optim.Adam), every=2)
    params = {"w": torch.ones(2, dtype=dtype), "b": torch.ones((), dtype=dtype)}
    state = optimizer.init(params)
    after, later = optimizer.update(params, state, params)
    kinds = [(x.shape, x.dtype) for x in pytree.tree_leaves((params, state))]
    assert [(x.shape, x.dtype) for x in pytree.tree_leaves((after, later))] == kinds


# What is left over --------------------------------------------------------------------------------


def flushed_with_torch(name, params, grads):
    """The parameters after the calls and a step with the mean of the gradients that are left."""
    leaves = [leaf.clone() for leaf in pytree.tree_leaves(params)]
    optimizer = getattr(torch.optim, name)(leaves, **OPTIMIZERS[name])
    for start in range(0, NUM_CALLS, EVERY):
        group = [pytree.tree_leaves(tree) for tree in grads[start : start + EVERY]]
        for p, *parts in zip(leaves, *group, strict=True):
            p.grad = torch.stack(parts).mean(0)
        optimizer.step()
    return leaves


@pytest.mark.parametrize("mapped", [False, True])
@each
def test_flush_steps_with_the_mean_of_what_is_left(name, mapped):
    params, grads = problem()
    optimizer = accumulating(name)
    update, flush = optimizer.update, optimizer.flush
    if mapped:
        options = {"out_axes": None, "compile": EAGER}
        update = tp.pmap(
            lambda g, s, p, _: optimizer.update(g, s, p), in_axes=(None, None, None, 0), **options
        )
        flush = tp.pmap(lambda s, p, _: optimizer.flush(s, p), in_axes=(None, None, 0), **options)
    rows = (torch.zeros(2),) if mapped else ()
    expected = flushed_with_torch(name, params, grads)
    state = optimizer.init(params)
    for grad in grads:
        params, state = update(grad, state, params, *rows)
    for _ in range(2):  # the second time there is nothing left
        params, state = flush(state, params, *rows)
        for mine, theirs in zip(pytree.tree_leaves(params), expected, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs)
        assert {int(state[k]["accumulated_calls"]) for k in ("w",)} == {0}


def test_flush_takes_hyperparameters_and_keeps_what_has_no_gradient():
    optimizer = tp.optim.accumulate(tp.optim.functional(torch.optim.SGD, lr=1.0), every=4)
    params = {"w": torch.tensor(5.0), "frozen": torch.tensor(2.0), "none": None}
    state = optimizer.init(params)
    params, state = optimizer.update(
        {"w": torch.tensor(3.0), "frozen": None, "none": None}, state, params
    )
    params, state = optimizer.flush(state, params, lr=0.5)
    assert (params["w"].item(), params["frozen"].item(), params["none"]) == (3.5, 2.0, None)
    with pytest.raises(ValueError, match="accumulated_calls"):
        optimizer.flush({"w": {}, "frozen": {}, "none": None}, params)
