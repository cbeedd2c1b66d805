"""Covers: _trace/environment.py, capture.py: a function sees the present outside and only reads."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _outside import ONES, check_follows
from _spies import asked
from _support import EAGER

import torchpmap as tp
from torchpmap._trace import trace

pytestmark = pytest.mark.usefixtures("pool")

X, ROWS = torch.arange(4.0), torch.ones(2, 3)


SCALE = 1.0
ARRAY = np.float32(1.0)


def reads_global(x):
    return x * SCALE


def test_globals(mode, monkeypatch):
    f = tp.pmap(lambda x: x * SCALE * torch.as_tensor(ARRAY), compile=mode)
    check_follows(f, lambda v: monkeypatch.setitem(globals(), "SCALE", v), [2.0, 3.0, 1.0])
    check_follows(f, lambda v: monkeypatch.setitem(globals(), "ARRAY", np.float32(v)), [2.0, 3.0])


BY_NAME = pytest.mark.xfail(reason="functions of importable modules go to the workers by name")


@pytest.mark.parametrize(
    "mode", [EAGER, pytest.param(False, marks=BY_NAME)], ids=["graph", "python"]
)
def test_globals_of_imported_functions(mode, monkeypatch):
    f = tp.pmap(reads_global, compile=mode)
    check_follows(f, lambda v: monkeypatch.setitem(globals(), "SCALE", v), [2.0, 3.0, 1.0])


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_changed_in_place(inference, mode):
    with torch.inference_mode(inference):
        w = torch.ones(1)

    @torch.inference_mode(inference)
    def through_data(value):
        w.view(1).data.copy_(torch.tensor([value]))
        w.add_(0)

    def through_another_address(value):
        before = w.data_ptr()
        for _ in range(100):  # the address of freed memory is soon used again
            w.data = torch.full((1,), value)
            if w.data_ptr() == before:
                break

    f = tp.pmap(lambda x: x * w, compile=mode)
    check_follows(f, torch.inference_mode(inference)(w.fill_), [2.0, 3.0, 1.0])
    check_follows(f, through_data, [4.0, 1.0])
    if not inference:
        check_follows(f, through_another_address, [2.0, 3.0, 1.0])


def test_sharded_tensors_changed_in_place(mode):
    w = tp.replicate(torch.ones(1))
    f = tp.pmap(lambda x: x * w, compile=mode)
    check_follows(f, lambda v: w.fill_(v), [2.0, 3.0, 1.0])
    w.delete()
    with pytest.raises((RuntimeError, TypeError), match=r"deleted by delete\(\)"):
        f(ONES)


def test_parameters_of_modules(mode):
    module = torch.nn.Linear(1, 1, bias=False)
    module.register_buffer("shift", torch.zeros(1))
    f = tp.pmap(lambda x: (module(x) + module.shift).detach(), compile=mode)

    def load(weight, shift, **options):
        state = {"weight": torch.full((1, 1), weight), "shift": torch.full((1,), shift)}
        module.load_state_dict(state, **options)

    changes = [
        (lambda: module.weight.fill_(2.0), 2.0),
        (lambda: setattr(module.weight, "data", torch.full((1, 1), 3.0)), 3.0),
        (lambda: load(4.0, 0.0), 4.0),
        (lambda: load(5.0, 1.0, assign=True), 6.0),
        (lambda: setattr(module, "weight", torch.nn.Parameter(torch.full((1, 1), 7.0))), 8.0),
        (lambda: setattr(module, "shift", torch.full((1,), 10.0)), 17.0),
        (lambda: torch.optim.SGD([module.weight], 1.0).step(), 17.0),
        (lambda: module.register_forward_hook(lambda module, args, out: out * 2), 24.0),
    ]
    with torch.no_grad():
        for change, value in changes:
            change()
            for _ in range(2):
                assert f(torch.ones(4, 1)).flatten().tolist() == [value] * 4


class Named(torch.Tensor):
    """As torch.Tensor, by another name."""


def check(fun, mode, *changes):
    """Every call gives what plain Python gives, and nothing is traced again without a change."""
    mapped = tp.pmap(fun, compile=mode)
    for change in (lambda: None, *changes):
        change()
        for _ in range(2):
            assert mapped(ROWS)[0].tolist() == pytest.approx(fun(ROWS[0]).tolist())
            assert mapped._latest[1].plan.holds()
            assert not mapped._environment.changed()


def test_learning_rates(mode):
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    groups = optimizer.param_groups
    check(lambda r: r * optimizer.param_groups[0]["lr"], mode, lambda: groups[0].update(lr=0.05))
    change = lambda: (optimizer.step(), schedule.step())  # noqa: E731
    check(lambda r: r * schedule.get_last_lr()[0], mode, change)


def test_what_a_tensor_is_asked(mode):
    t = torch.ones(3)
    check(lambda r: r * t.numel(), mode, lambda: t.resize_(5))
    check(lambda r: r * t.shape[-1] + len(t), mode, lambda: setattr(t, "data", torch.ones(4, 2)))
    check(lambda r: r * t.size(1), mode, lambda: setattr(t, "data", torch.ones(4, 3)))
    q = torch.ones(3, requires_grad=True)
    freeze = lambda: q.requires_grad_(False)  # noqa: E731
    check(lambda r: r * (2 if q.requires_grad else 3), mode, freeze)
    t.tag = 2.0
    check(lambda r: r * t.tag, mode, lambda: setattr(t, "tag", 3.0))
    w = torch.tensor(1.0)
    change = lambda: setattr(w, "data", torch.tensor(5.0))  # noqa: E731
    check(lambda r: r * (2 if float(w) > 0 else 3), mode, w.neg_, change)


def test_gradients_of_captured_tensors(mode):
    w = torch.ones(3, requires_grad=True)
    check(
        lambda r: r + w.grad if w.grad is not None else r,
        mode,
        lambda: setattr(w, "grad", torch.ones(3)),
        lambda: w.grad.fill_(4),
        lambda: setattr(w, "grad", torch.ones(3) * 2),
        lambda: setattr(w, "grad", None),
    )
    v = w * 2  # torch warns about its .grad, which a function that says grad does not mean
    check(lambda r: torch.func.grad(lambda z: (z * v).sum())(r), mode)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_classes_of_tensors_that_are_only_names(requires_grad, mode):
    t = (torch.ones(3) * 2).as_subclass(Named).requires_grad_(requires_grad)

    def double():
        with torch.no_grad():
            t.mul_(2)

    check(lambda r: r * t + t.sum(), mode, double)
    check(lambda r: tp.grad(lambda z: (z * t).sin().sum())(r), mode, double)
    if requires_grad:
        tp.pmap(lambda r: r * t, compile=mode)(ROWS).sum().backward()
        assert t.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("inference", [False, True])
def test_unchanged_captured_tensors_are_sent_once(inference, monkeypatch):
    with torch.inference_mode(inference):  # whose tensors count no versions
        w = torch.ones(1)
    f = tp.pmap(lambda x: x * w, compile=EAGER)
    f(ONES)
    x = tp.device_put(ONES, tp.devices())
    calls = asked(monkeypatch)
    f(x)
    assert [name for name, _ in calls] == ["execute"]
    with torch.inference_mode(inference):
        w.add_(1)
    assert f(x).tolist() == [[2.0]] * 4
    assert [name for name, _ in calls] == ["execute", "put", "execute", "fetch"]


def replace_data(w, p, x):
    p.data = p.data - x


def step_of_an_optimizer(w, p, x):
    (p * x).sum().backward()
    torch.optim.SGD([p], lr=0.1).step()


OF_TYPE = r"tensor of type float32\[2\]"
LOST = {
    "add_": (lambda w, p, x: w.add_(x), OF_TYPE),
    "a view": (lambda w, p, x: w[0].copy_(x), OF_TYPE),
    "at a traced position": (lambda w, p, x: w[x.long()].add_(1), OF_TYPE + ".*would be lost"),
    "out=": (lambda w, p, x: torch.add(w, x, out=w), OF_TYPE),
    ".data": (lambda w, p, x: w.data.add_(1), OF_TYPE),
    "numpy": (lambda w, p, x: w.numpy().fill(9), OF_TYPE),
    ".data.numpy": (lambda w, p, x: w.data.numpy().fill(9), OF_TYPE),
    "detach().numpy": (lambda w, p, x: w.detach().numpy().fill(9), OF_TYPE),
    "apply_": (lambda w, p, x: w.apply_(lambda a: a + 1), OF_TYPE + r" \(.apply_\(\)\)"),
    "map_": (lambda w, p, x: w.map_(w, lambda a, b: a + b + 1), OF_TYPE + r" \(.map_\(\)\)"),
    "undeclared": (
        lambda w, p, x: torch.batch_norm_update_stats(torch.stack([p, p]) * x, w, None, 0.1),
        OF_TYPE,
    ),
    "replaced data": (replace_data, "parameter"),
    "an optimizer": (step_of_an_optimizer, "parameter.*optimizer"),
}


OF_THE_HOST = {*(name for name in LOST if "numpy" in name), "map_"}
NUMPY = [
    pytest.mark.filterwarnings("ignore:.*running without tracing"),
    pytest.mark.cpu_only("an uncompiled function has tensors of the GPU, without a NumPy view"),
]


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NUMPY if name in OF_THE_HOST else ()) for name in LOST]
)
def test_writes_to_captured_tensors_raise(name, returned, mode):
    write, text = LOST[name]
    w, p = torch.zeros(2), torch.nn.Parameter(torch.ones(2))
    if mode is False:
        text = text.partition(" \\(")[0]  # where it is not traced, it is not known how
    elif name == "add_":
        text += r" \(aten\.add_"

    def f(x):
        result = write(w, p, x)
        return result if returned else x

    f = tp.pmap(f, compile=mode)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="writes in place to a captured " + text):
            f(ONES)
    assert (w.tolist(), p.tolist(), p.grad) == ([0.0, 0.0], [1.0, 1.0], None)


NORMS = {
    "batch norm": lambda x, mean, var: F.batch_norm(x, mean, var, training=True),
    "instance norm": lambda x, mean, var: F.instance_norm(x, mean, var),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_statistics_are_updated_also_if_the_result_is_of_no_use(norm, mode):
    def f(mean, var, x):
        mean, var = mean.clone(), var.clone()
        norm(x, mean, var)
        return mean, var

    x = torch.arange(120.0).reshape(4, 2, 3, 5)
    mapped = tp.pmap(f, in_axes=(None, None, 0), compile=mode)(torch.zeros(3), torch.ones(3), x)
    for k in range(4):
        for mine, theirs in zip(mapped, f(torch.zeros(3), torch.ones(3), x[k]), strict=True):
            torch.testing.assert_close(mine[k], theirs)


def test_batch_norm(mode):
    norm = torch.nn.BatchNorm1d(3)
    x = torch.arange(24.0).reshape(4, 2, 3)
    with pytest.raises(RuntimeError, match=r"writes in place to a captured.*BatchNorm: \.eval\(\)"):
        tp.pmap(norm, compile=mode)(x)
    assert norm.running_mean.tolist() == [0.0] * 3
    assert norm.num_batches_tracked == 0
    norm.eval()
    torch.testing.assert_close(
        tp.pmap(norm, compile=mode)(x).cpu(), norm(x.view(8, 3)).view(4, 2, 3)
    )


@pytest.mark.parametrize("is_on_a_gpu", [False, True])
def test_gradients_left_behind_raise(is_on_a_gpu, monkeypatch):
    if is_on_a_gpu:
        monkeypatch.setattr(trace, "needs_leaves", lambda device: True)
    w = torch.nn.Parameter(torch.ones(2))

    def f(x):
        (w * x).sum().backward()
        return x

    with pytest.raises(RuntimeError, match=r"leaves a gradient on a captured parameter.*\.grad"):
        tp.pmap(f, compile=EAGER)(X)
    assert w.grad is None


def test_a_gradient_left_behind_beside_one_that_is_used():
    """One operation computes both."""
    norm = torch.nn.LayerNorm(3)

    def f(x):
        x = x.clone().requires_grad_()
        (norm(x) ** 2).sum().backward()
        return x.grad

    with pytest.raises(RuntimeError, match="leaves a gradient on a captured parameter"):
        tp.pmap(f, compile=EAGER)(torch.arange(6.0).reshape(2, 3))


OUTER = {
    "grad": lambda f: torch.func.grad(lambda w: f(w).sum()),
    "jvp": lambda f: lambda w: torch.func.jvp(f, (w,), (w + 1,))[1],
    "vmap": lambda f: lambda w: torch.func.vmap(f)(torch.stack([w, w * 2])),
    "jacfwd": torch.func.jacfwd,
    "grad of vmap": lambda f: torch.func.grad(
        lambda w: torch.func.vmap(f)(torch.stack([w, w * 2])).sum()
    ),
}
INNER = {
    "grad": lambda h, x, w: torch.func.grad(lambda x: h(x, w).sum())(x),
    "jvp": lambda h, x, w: torch.func.jvp(lambda x: h(x, w), (x,), (w,))[1],
    "vmap": lambda h, x, w: torch.func.vmap(lambda x: h(x, w))(torch.stack([x, x * 3])),
    "jacrev": lambda h, x, w: torch.func.jacrev(lambda x: h(x, w))(x),
    "grad of what is captured": lambda h, x, w: torch.func.grad(lambda w: h(x, w).sum())(w),
    "vmap over what is captured": lambda h, x, w: torch.func.vmap(lambda w: h(x, w))(w),
    "vjp of what is captured": lambda h, x, w: torch.func.vjp(lambda w: h(x, w), w)[1](w)[0],
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
def test_transforms_inside_of_what_transforms_around_trace(outer, inner, mode):
    def call(mapped):
        return lambda w: mapped(lambda x: inner(lambda x, w: (x * x * w).sin(), x, w))(rows)

    rows, w = torch.tensor([[0.3, 0.5], [-0.2, 1.0]]), torch.tensor([0.7, -0.4])
    expected = outer(call(torch.func.vmap))(w)
    got = outer(call(lambda f: tp.pmap(f, compile=mode)))(w)
    torch.testing.assert_close(got.cpu(), expected)
