"""Covers: optim/_functional.py, optim/_checks.py. Expected is what torch.optim gives."""

import copy
import pickle

import pytest
import torch
from _problems import (
    NUM_STEPS,
    assert_equal,
    members,
    problem,
    run,
    tensors,
    tree_map,
    with_torch,
)
from _support import EAGER

import torchpmap as tp

CASES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("Adam", {"lr": 0.1}),
    ("Adam", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    ("AdamW", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("RMSprop", {"lr": 0.1}),
    ("RMSprop", {"lr": 0.1, "centered": True, "momentum": 0.9}),
    ("Adadelta", {"lr": 0.5}),
    ("Adamax", {"lr": 0.1}),
    ("NAdam", {"lr": 0.1}),
    ("RAdam", {"lr": 0.1}),
    ("ASGD", {"lr": 0.1, "t0": 2, "weight_decay": 0.1}),
    ("Rprop", {"lr": 0.1}),
    ("Adafactor", {"lr": 0.1}),
    ("Muon", {"lr": 0.1}),
]


IDS = [f"{name}-{'-'.join(k for k in options if k != 'lr')}".rstrip("-") for name, options in CASES]

each = pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)


MEMBERS = [pytest.param(*case, id=name) for case, name in zip(CASES, IDS, strict=True)]
in_vmap = pytest.mark.parametrize(("name", "options"), MEMBERS)


def functional(name, options):
    return tp.optim.functional(getattr(torch.optim, name), **options)


@each
def test_plain_tensors(name, options):
    params, grads = problem(name)
    given = copy.deepcopy((params, grads))
    optimizer = functional(name, options)
    out, state = run(optimizer.init, optimizer.update, params, grads)
    expected, theirs = with_torch(name, options, params, grads)
    assert [t.tolist() for t in tensors(out)] == [t.tolist() for t in expected]  # to the last bit
    kept = [entries for entries in theirs.state.values() if any(v is not None for v in entries)]
    ours = [state["w"], *state["rest"][:-1]]
    assert state["rest"][-1] is None
    for mine, its in zip(ours, kept or [{}] * len(ours), strict=True):
        assert {k: v.tolist() for k, v in mine.items()} == {
            k: v.tolist() for k, v in its.items() if v is not None
        }
    assert str(given) == str((params, grads))


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(
    ("compiled", "changing"),
    [(EAGER, False), (False, False), (EAGER, True)],
    ids=["graph", "python", "changing lr"],
)
@each
@pytest.mark.filterwarnings("ignore:.*running without tracing:UserWarning")
def test_data_parallel(pool, compiled, changing, name, options):
    params, grads = problem(name)
    optimizer = functional(name, options)
    traces = []

    def step(grads, state, params, lr):
        traces.append(len(state["w"]))
        given = {"lr": lr} if changing else {}
        return optimizer.update(tp.pmean(grads, "i"), state, params, **given)

    axes = (0, None, None, None)
    f = tp.pmap(step, "i", in_axes=axes, out_axes=None, compile=compiled, donate_argnums=(1, 2))
    per_device = [tree_map(lambda g: torch.stack([g, 3 * g]), grad) for grad in grads]
    lrs = [0.1 / (k + 1) if changing else options["lr"] for k in range(NUM_STEPS)]
    rates = iter(lrs)
    out, state = run(optimizer.init, lambda *args: f(*args, next(rates)), params, per_device)
    doubled = [tree_map(lambda g: 2 * g, grad) for grad in grads]
    assert_equal(out, with_torch(name, options, params, doubled, lrs)[0], name)
    assert all(isinstance(leaf, tp.ShardedTensor) for leaf in tensors(state))
    if compiled is not False:
        assert len(traces) == (2 if options.get("dampening") else 1)


def on_two_devices(f):
    """The vmap of a function for four members, two on each device."""

    def run(*trees):
        cut = tree_map(lambda x: x.unflatten(0, (2, 2)), trees)
        results = tp.pmap(tp.vmap(f), compile=EAGER)(*cut)
        return tree_map(lambda x: x.flatten(0, 1), results)

    return run


ON_DEVICES = pytest.param("RAdam on devices", {"lr": 0.1}, id="on devices")


@pytest.mark.parametrize(("name", "options"), [*MEMBERS, ON_DEVICES])
@pytest.mark.parametrize("pool", [2], indirect=True)
def test_ensemble(pool, name, options):
    mapped = on_two_devices if "devices" in name else tp.vmap
    name = name.split()[0]
    params, grads, problems = members(name, 4)
    optimizer = functional(name, options)
    out, state = run(mapped(optimizer.init), mapped(optimizer.update), params, grads)
    for k, (member, gradients) in enumerate(problems):
        expected, _ = with_torch(name, options, member, gradients)
        assert_equal(tree_map(lambda x, k=k: x[k], out), expected, name)
    assert all(leaf.shape[0] == 4 for leaf in tensors(state))


@in_vmap
def test_batched_gradients_of_shared_parameters(name, options):
    params, grads = problem(name)
    optimizer = functional(name, options)
    batch = tree_map(lambda *gs: torch.stack(gs), *grads[:3])
    update = tp.vmap(optimizer.update, in_axes=(0, None, None))
    out, _ = update(batch, optimizer.init(params), params)
    for k in range(3):
        expected, _ = with_torch(name, options, params, [grads[k]])
        assert_equal(tree_map(lambda x, k=k: x[k], out), expected, name)


@pytest.mark.parametrize("name", ["Adam", "SGD", "RAdam", "Adagrad"])
def test_torch_compile(name):
    params, grads = problem(name)
    optimizer = functional(name, {"lr": 0.1})

    @torch.compile(backend="aot_eager")
    def step(grads, state, params):
        doubled = {"w": 2 * grads["w"], "rest": grads["rest"]}
        return optimizer.update(doubled, state, params)

    out, _ = run(optimizer.init, step, params, grads)
    doubled = [{**grad, "w": 2 * grad["w"]} for grad in grads]
    assert_equal(out, with_torch(name, {"lr": 0.1}, params, doubled)[0])


@pytest.mark.xfail(reason="torch.optim itself breaks the graph in step()")
def test_torch_compile_as_one_graph():
    params, grads = problem("SGD")
    optimizer = functional("SGD", {"lr": 0.1})
    torch.compile(optimizer.update, backend="aot_eager", fullgraph=True)(
        grads[0], optimizer.init(params), params
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "Rprop", "Adagrad"])
def test_dtypes(name, dtype):
    params, grads = problem(name, dtype=dtype)
    optimizer = functional(name, {"lr": 0.1})
    expected, _ = with_torch(name, {"lr": 0.1}, params, grads)
    one = tree_map(lambda x: x[None], params)
    many = [tree_map(lambda x: x[None], grad) for grad in grads]
    out, state = run(tp.vmap(optimizer.init), tp.vmap(optimizer.update), one, many)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    for leaf, other in zip(tensors(out), expected, strict=True):
        torch.testing.assert_close(leaf[0], other, **tolerance)
    kinds = {leaf.dtype for leaf in tensors(optimizer.init(params))}
    assert {leaf.dtype for leaf in tensors(state)} == kinds


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adadelta", "RMSprop", "Adagrad"])
def test_ensemble_over_learning_rates(name):
    params, grads = problem(name)
    lrs = torch.tensor([0.01, 0.1, 1.0])
    optimizer = functional(name, {"lr": 0.5})
    update = tp.vmap(
        lambda lr, *args: optimizer.update(*args, lr=lr), in_axes=(0, None, None, None)
    )
    out, _ = update(lrs, grads[0], optimizer.init(params), params)
    for k, lr in enumerate(lrs.tolist()):
        expected, _ = with_torch(name, {"lr": lr}, params, grads[:1])
        assert_equal(tree_map(lambda x, k=k: x[k], out), expected)


def test_groups_by_path():
    def make(params, lr):
        groups = [
            {"params": [params["w"]]},
            {"params": params["rest"][:1], "weight_decay": 0.0, "lr": lr / 2},
        ]
        return torch.optim.AdamW(groups, lr=lr, weight_decay=0.3)

    params, grads = problem("AdamW")
    optimizer = tp.optim.functional(make, lr=0.1)
    out, state = run(optimizer.init, optimizer.update, params, grads)
    w = with_torch("AdamW", {"lr": 0.1, "weight_decay": 0.3}, params["w"], [g["w"] for g in grads])
    b = with_torch(
        "AdamW", {"lr": 0.05, "weight_decay": 0.0}, params["rest"][0], [g["rest"][0] for g in grads]
    )
    frozen = params["rest"][1]
    assert_equal(out, [*w[0], *b[0], frozen])
    assert state["rest"][1:] == [{}, None]
    state = optimizer.init(params)
    out, _ = optimizer.update(grads[0], state, params, lr=[0.0, 0.05])
    expected, _ = optimizer.update(grads[0], state, params)
    assert out["w"].tolist() == params["w"].tolist()
    assert out["rest"][0].tolist() == expected["rest"][0].tolist()


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_what_the_function_closes_over_is_never_stale(pool):
    rate = 0.5
    optimizer = tp.optim.functional(lambda params: torch.optim.SGD([params], lr=rate))
    f = tp.pmap(lambda g, p: optimizer.update(g, {}, p)[0], in_axes=0, compile=EAGER)
    ones = torch.ones(2, 3)
    assert f(ones, ones).tolist() == [[0.5] * 3] * 2
    rate = 0.25
    assert f(ones, ones).tolist() == [[0.75] * 3] * 2


def test_update_in_a_loop(pool):
    """torch names each update for its profiler, by operations of a namespace of its own."""
    optimizer = functional("Adam", {"lr": 0.1})
    start, x = torch.ones(2), torch.arange(8.0).reshape(4, 2)

    def train(x):
        def step(carry, _):
            w, state = carry
            return optimizer.update(tp.pmean(w - x, "i"), state, w), w.sum()

        (w, _), sums = tp.scan(step, (start, optimizer.init(start)), None, length=3)
        return w, sums

    found = tp.pmap(train, "i", out_axes=None, compile=EAGER)(x)
    w = start.clone()
    theirs, sums = torch.optim.Adam([w], lr=0.1), []
    for _ in range(3):
        sums.append(w.sum())
        w.grad = w - x.mean(0)
        theirs.step()
    assert_equal(found, [w, torch.stack(sums)])


def test_state_before_the_first_step():
    params = {"w": torch.ones(2, 3), "b": None}
    state = functional("NAdam", {}).init(params)
    assert state["b"] is None
    assert {k: v.tolist() for k, v in state["w"].items()} == {
        "step": 0.0,
        "mu_product": 1.0,
        "exp_avg": [[0.0] * 3] * 2,
        "exp_avg_sq": [[0.0] * 3] * 2,
    }
    assert functional("SGD", {}).init(params) == {"w": {}, "b": None}
    dampened = functional("SGD", {"momentum": 0.9, "dampening": 0.1})
    assert dampened.init(params) == {"w": {}, "b": None}
    (leaf,) = tensors(functional("SGD", {"momentum": 0.9}).init(params))
    assert leaf.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_state_pickles_replicates_and_resumes(pool):
    params, grads = problem("Adam")
    optimizer = pickle.loads(pickle.dumps(functional("Adam", {"lr": 0.1})))
    half, state = run(optimizer.init, optimizer.update, params, grads[:3])
    half, state = pickle.loads(pickle.dumps((half, state)))
    f = tp.pmap(optimizer.update, in_axes=None, out_axes=None, compile=EAGER, axis_size=2)
    half, state = tp.replicate(half), tp.replicate(state)
    for grad in grads[3:]:
        half, state = f(grad, state, half)
    assert_equal(half, with_torch("Adam", {"lr": 0.1}, params, grads)[0])
    assert state["w"]["step"] == NUM_STEPS


@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "vmap"])
def test_parameters_without_a_gradient_wait(mapped):
    optimizer = functional("Adam", {"lr": 0.1})
    update = optimizer.update
    if mapped:
        update = tp.vmap(update, in_axes=({"a": 0, "b": None}, None, None), out_axes=0)
    params = {"a": torch.ones(2), "b": torch.ones(3)}
    grads = {"a": torch.ones(4, 2) if mapped else torch.ones(2), "b": None}
    out, state = update(grads, optimizer.init(params), params)
    assert out["b"].flatten().tolist() == [1.0] * (12 if mapped else 3)
    assert state["b"]["step"].sum() == 0
    assert (out["a"] < 0.95).all()


class Lion(torch.optim.Optimizer):
    """Not torch's; counts in a Python number and makes its state in step()."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(p))
                p.sub_(torch.sign(0.9 * mean + 0.1 * p.grad) * group["lr"] / state["steps"])
                mean.mul_(0.99).add_(p.grad, alpha=0.01)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_optimizers_that_are_not_torchs(pool, mode):
    params, grads = problem("Lion")
    theirs, _ = with_torch(Lion, {}, params, grads)
    optimizer = tp.optim.functional(Lion)
    assert tensors(optimizer.init(params)) == []
    f = tp.pmap(optimizer.update, in_axes=None, out_axes=None, axis_size=2, compile=mode)
    for update in (optimizer.update, f):
        out, state = run(optimizer.init, update, params, grads)
        assert_equal(out, theirs)
        assert state["w"]["steps"] == NUM_STEPS
    params, grads = torch.ones(2, 3), torch.tensor([[1.0] * 3, [-1.0] * 3])
    out, state = run(tp.vmap(optimizer.init), tp.vmap(optimizer.update), params, [grads, grads])
    torch.testing.assert_close(out, torch.tensor([[0.85] * 3, [1.15] * 3]))
    assert state["steps"].tolist() == [2, 2]


def test_arguments_survive_optimizers_that_write_to_gradients():
    class Clips(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.clamp_(-1, 1)
            super().step()

    optimizer = tp.optim.functional(Clips, lr=1.0)
    params, grads = torch.zeros(2), torch.tensor([5.0, -5.0])
    assert optimizer.update(grads, {}, params)[0].tolist() == [-1.0, 1.0]
    assert (grads.tolist(), params.tolist()) == ([5.0, -5.0], [0.0, 0.0])


def test_a_specification_of_the_parameters_fits_the_state():
    params = {"w": torch.ones(2, 3), "b": torch.ones(4)}
    axes = {"w": 0, "b": None}
    optimizer = functional("Adam", {"lr": 0.1})
    state = tp.vmap(optimizer.init, (axes,), axes)(params)
    assert [state[k]["step"].shape for k in "wb"] == [(2,), ()]
    out, state = tp.vmap(optimizer.update, (axes, axes, axes), (axes, axes))(params, state, params)
    torch.testing.assert_close(out, {"w": torch.full((2, 3), 0.9), "b": torch.full((4,), 0.9)})
    assert [state[k]["step"].tolist() for k in "wb"] == [[1.0, 1.0], 1.0]


OTHERS = ["Adam", "RMSprop", "Adagrad", "NAdam", "RAdam", "ASGD", "Adadelta", "Adamax"]
DIFFERENTIABLE = [("SGD", {"momentum": 0.9}), *((name, {}) for name in OTHERS)]


@pytest.mark.parametrize(("name", "options"), DIFFERENTIABLE, ids=[n for n, _ in DIFFERENTIABLE])
def test_meta_gradients(name, options):
    optimizer = functional(name, {"lr": 0.1, "differentiable": True, **options})

    def after_two_steps(w, scale):
        params, state = {"w": w}, optimizer.init({"w": w})
        for _ in range(2):
            grads = {"w": 2 * scale * params["w"] + torch.arange(1.0, 4.0, dtype=w.dtype) * w}
            params, state = optimizer.update(grads, state, params)
        return (params["w"] ** 2).sum()

    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(after_two_steps, (w, scale), atol=1e-6)
    (expected,) = torch.autograd.grad(after_two_steps(w, scale), w)
    w, scale = w.detach(), scale.detach()
    close = {"rtol": 1e-4, "atol": 1e-5}  # the counter is float32
    torch.testing.assert_close(tp.grad(after_two_steps)(w, scale), expected, **close)
    rows = tp.vmap(tp.grad(after_two_steps), in_axes=(None, 0))(w, torch.stack([scale, scale]))
    torch.testing.assert_close(rows, torch.stack([expected, expected]), **close)


@pytest.mark.parametrize(
    "use",
    [lambda f: tp.grad(f)(torch.ones(2)), lambda f: f(torch.ones(2, requires_grad=True))],
    ids=["grad", "backward"],
)
def test_derivatives_are_not_lost_silently(use):
    update = functional("SGD", {"lr": 0.1}).update
    with pytest.raises(RuntimeError, match=r"update is differentiated, but .*differentiable=True"):
        use(lambda w: update(2 * w, {}, w)[0].sum())


def test_repr():
    optimizer = functional("SGD", {"lr": 0.1})
    assert repr(optimizer) == "optim.functional(SGD, lr=0.1)"
    assert repr(tp.optim.accumulate(optimizer, 4)) == (
        "optim.accumulate(optim.functional(SGD, lr=0.1), every=4)"
    )
