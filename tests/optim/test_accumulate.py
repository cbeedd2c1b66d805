"""Covers: optim/_accumulate.py. The expectation is torch.optim on means of the gradients."""

import pickle

import pytest
import torch
import torch.utils._pytree as pytree
from _problems import assert_equal, members, problem, run, tensors, tree_map, with_torch
from _support import EAGER, close

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


def means(grads):
    """Of every three gradients, added up as a loop in torch adds them up."""
    for start in range(0, len(grads) - EVERY + 1, EVERY):
        mean = tree_map(lambda g: g / EVERY, grads[start])
        for grad in grads[start + 1 : start + EVERY]:
            mean = tree_map(lambda part, g: g / EVERY + part, mean, grad)
        yield mean


def expected_of(name, params, grads, lrs=None):
    """The parameters after all calls."""
    lrs = None if lrs is None else lrs[EVERY - 1 :: EVERY]
    return with_torch(name, OPTIMIZERS[name], params, means(grads), lrs)[0]


def accumulating(name):
    optimizer = tp.optim.functional(getattr(torch.optim, name), **OPTIMIZERS[name])
    return tp.optim.accumulate(optimizer, every=EVERY)


@each
def test_plain_tensors(name):
    first, grads = problem(name, num_steps=NUM_CALLS)
    optimizer = pickle.loads(pickle.dumps(accumulating(name)))
    params, state = first, optimizer.init(first)
    for call, grad in enumerate(grads, 1):
        params, state = optimizer.update(grad, state, params)
        expected = expected_of(name, first, grads[:call])
        assert [x.tolist() for x in tensors(params)] == [x.tolist() for x in expected]
    assert state["rest"][0]["accumulated_calls"].item() == NUM_CALLS % EVERY
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
    first, grads = problem(name, num_steps=NUM_CALLS)
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
    params, state = first, optimizer.init(first)
    for call, grad in enumerate(grads):
        rows = tree_map(lambda g: torch.stack([0.5 * g, 1.5 * g]), grad)
        params, state = train(rows, state, params, lrs[call])
        assert_equal(params, expected_of(name, first, grads[: call + 1], lrs))
    assert compiled is False or len(traces) == 1


@each
def test_ensemble(name):
    params, grads, problems = members(name, 2, num_steps=NUM_CALLS)
    optimizer = accumulating(name)
    out, _ = run(tp.vmap(optimizer.init), tp.vmap(optimizer.update), params, grads)
    for k, (member, gradients) in enumerate(problems):
        assert_equal(tree_map(lambda x, k=k: x[k], out), expected_of(name, member, gradients))


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


@pytest.mark.parametrize("mapped", [False, True])
@each
def test_flush_steps_with_the_mean_of_what_is_left(name, mapped):
    params, grads = problem(name, num_steps=NUM_CALLS)
    optimizer = accumulating(name)
    update, flush = optimizer.update, optimizer.flush
    if mapped:
        options = {"out_axes": None, "compile": EAGER}
        update = tp.pmap(
            lambda g, s, p, _: optimizer.update(g, s, p), in_axes=(None, None, None, 0), **options
        )
        flush = tp.pmap(lambda s, p, _: optimizer.flush(s, p), in_axes=(None, None, 0), **options)
    rows = (torch.zeros(2),) if mapped else ()
    last = tree_map(lambda *left: torch.stack(left).mean(0), *grads[-2:])
    expected, _ = with_torch(name, OPTIMIZERS[name], params, [*means(grads), last])
    params, state = run(optimizer.init, lambda *args: update(*args, *rows), params, grads)
    for _ in range(2):  # the second time there is nothing left
        params, state = flush(state, params, *rows)
        close(tensors(params), expected)
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
