"""Covers: _transforms/jit.py: what is traced again, what is not traced, and errors."""

import contextlib
import functools
import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch
from _models import LINE, SQUARE, cut, made, placed
from _spies import asked
from _support import DEVICE, EAGER, autocast, beside

import torchpmap as tp
from torchpmap import P

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(32.0).reshape(8, 4)


def jit(function, **options):
    return tp.jit(function, **{"compile": EAGER, **options})


def on(spec, x=X, axes=LINE):
    return tp.device_put(x, tp.NamedSharding(tp.make_mesh(*axes), spec))


def test_computation_follows_the_data():
    double = jit(lambda x: x * 2)
    for spec in (P("x"), P(None, "x"), P()):
        result = double(on(spec))
        assert result.sharding.spec == spec
        assert torch.equal(result.cpu(), X * 2)
    assert double(X).is_fully_replicated
    assert double.num_traces == 4


def test_what_is_traced_again():
    f = jit(lambda x, factor: x * factor)
    calls = [
        *((X, 2), (X, 2), (X, 2.0), (X, True), (X, 0.0), (X, -0.0), (X.double(), 2), (X[:4], 2)),
        *((X, torch.tensor(2)), (on(P("x")), 2), (on(P("x"), X + 1), 2), (X.numpy(), 2)),
    ]
    counts = []
    for x, factor in calls:
        assert torch.equal(f(x, factor).cpu(), torch.as_tensor(x).cpu() * factor)
        counts.append(f.num_traces)
    assert counts == [1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9]


ARRAYS = {
    "read-only": np.broadcast_to(np.float32(3), (8, 4)),
    "backwards": X.numpy()[::-1],
    "other bytes": X.numpy().astype(">f4"),
    "transposed": X.numpy().T,
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays_that_torch_does_not_take(array):
    f = jit(lambda x: x * 2)
    for _ in range(2):
        assert f(array).tolist() == (array * 2).tolist()


def test_writes_to_arrays_reach_those_of_the_caller():
    def step(x):
        x += 1
        return x * 2

    f, plain, backwards = jit(step), np.zeros(3), np.zeros(3)
    assert f(plain).tolist() == [2.0] * 3
    assert f(np.zeros((0, 3))).shape == (0, 3)
    with pytest.warns(match="writes to a NumPy array with which no tensor can share memory"):
        assert f(backwards[::-1]).tolist() == [2.0] * 3
    assert plain.tolist() == backwards.tolist() == [1.0] * 3


ODD = {
    "masked": (np.ma.masked_array([1.0], [True]), "is a numpy masked array"),
    "objects": (np.array([object()]), "is a numpy array of dtype object"),
    "sparse": (X.to_sparse(), r"has the layout torch\.sparse_coo"),
    "nested": (
        torch.nested.nested_tensor([X[0], X[1, :2]], layout=torch.jagged),
        "is a nested tensor",
    ),
}


@pytest.mark.parametrize("laid_out", [False, True])
@pytest.mark.parametrize(("value", "text"), ODD.values(), ids=ODD)
def test_arguments_that_cannot_be_on_devices(value, text, laid_out):
    where = tp.NamedSharding(tp.make_mesh(*LINE), P()) if laid_out else None
    f = jit(lambda x, n: x * n, out_shardings=where)
    f(X, 2)
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"jit\(<lambda>\): argument x {text}"):
            f(value, 2)


def test_settings_of_torch_are_part_of_the_key():
    f = jit(lambda x: x @ x.T + torch.ones(8, 1))
    results = [f(X)]
    with autocast(torch.bfloat16):
        results.append(f(X))
    torch.set_default_dtype(torch.float64)
    try:
        results.append(f(X))
    finally:
        torch.set_default_dtype(torch.float32)
    results.append(f(X))
    assert [x.dtype for x in results] == [torch.float32] * 2 + [torch.float64, torch.float32]
    assert f.num_traces == 3


def test_a_constraint_says_where_a_value_lies():
    mesh = tp.make_mesh(*SQUARE)

    @jit
    def f(x):
        wide = tp.with_sharding_constraint(x * 2, tp.NamedSharding(mesh, P("x", "y")))
        with tp.set_mesh(mesh):
            return wide, tp.with_sharding_constraint(wide.sum(0), P("y"))

    wide, total = f(X)
    assert (wide.sharding.spec, total.sharding.spec) == (P("x", "y"), P("y"))
    assert torch.equal(total.cpu(), X.sum(0) * 2)
    assert torch.equal(wide.cpu(), X * 2)
    moved = tp.with_sharding_constraint(on(P("x", "y"), axes=SQUARE), tp.NamedSharding(mesh, P()))
    assert moved.is_fully_replicated


def test_random_numbers_do_not_depend_on_layouts():
    def draw(x):
        torch.manual_seed(4)
        return jit(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.randn(4))(x).cpu()

    torch.manual_seed(4)
    first = draw(X)
    assert all(torch.equal(draw(on(spec)), first) for spec in (P("x"), P(None, "x"), P()))
    f = jit(lambda x: torch.nn.functional.dropout(x, 0.5))
    assert not torch.equal(f(X).cpu(), f(X).cpu())


def test_methods_and_decorators():
    class Model:
        factor = 3

        @tp.jit(compile=EAGER)
        def times(self, x):
            """Multiply."""
            return x * self.factor

    assert Model.times.__doc__ == "Multiply."
    assert torch.equal(Model().times(X).cpu(), X * 3)
    assert repr(tp.jit(Model.times.__wrapped__)) == "<jit of times>"


def test_what_depends_on_values_runs_operation_by_operation():
    f = jit(lambda x: x * 2 if x.sum() > 0 else x * 3)
    with pytest.warns(UserWarning, match="jit.*: running operation by operation, which is slower"):
        assert torch.equal(f(on(P("x"))).cpu(), X * 2)
    assert torch.equal(f(on(P("x"), -X)).cpu(), -X * 3)
    assert f.num_traces == 1
    with pytest.raises(tp.TraceError, match=r"fullgraph=True, but the function cannot be traced"):
        jit(f.__wrapped__, fullgraph=True)(X)
    with pytest.raises(tp.TraceError, match="it runs operation by operation: there is no graph"):
        tp.jit(f.__wrapped__, compile=False).lower(X)


def test_a_schedule_inside_is_not_lost():
    model = placed(made("network"), "replicated")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    @jit
    def step(x):
        model(x).sum().backward()
        optimizer.step()
        schedule.step()

    with pytest.warns(UserWarning, match=r"it changes a setting of SGD. Use scheduler.step\(\)"):
        step(cut(torch.randn(8, 8, dtype=torch.float64), "replicated"))


class Decaying(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0][self.name] *= 0.5
        return super().step(closure)


@pytest.mark.parametrize("where", ["in step", "before step"])
@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay"])
def test_a_setting_that_changes_inside_is_not_lost(name, where):
    def trained(jit):
        x = torch.ones(3, requires_grad=True)
        kind = Decaying if where == "in step" else torch.optim.SGD
        optimizer = kind([x], lr=0.1, momentum=0.5, weight_decay=0.5)
        optimizer.name = name

        @jit
        def step():
            optimizer.zero_grad()
            (x * x).sum().backward()
            if where == "before step":
                optimizer.param_groups[0][name] *= 0.5
            optimizer.step()

        for _ in range(4):
            step()
        return x.detach().cpu(), optimizer.param_groups[0][name]

    with pytest.warns(UserWarning, match="it changes a setting of"):
        found = trained(jit)
    torch.testing.assert_close(found, trained(lambda f: f))


@pytest.mark.parametrize(("name", "is_input"), [("lr", True), ("momentum", False)])
def test_a_setting_of_one_of_two_steps_is_not_lost(name, is_input):
    def trained(jit):
        x = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([x], lr=0.1, momentum=0.5)

        @jit
        def step():
            (group,) = optimizer.param_groups
            for setting in (group[name], group[name] / 2):
                before, group[name] = group[name], setting
                optimizer.zero_grad()
                (x * x).sum().backward()
                optimizer.step()
                group[name] = before

        for _ in range(3):
            step()
        return x.detach().cpu()

    told = pytest.warns(UserWarning, match="it changes a setting of")
    with told if is_input else contextlib.nullcontext():
        found = trained(jit)
    torch.testing.assert_close(found, trained(lambda f: f))


def test_a_rate_that_is_a_tensor():
    def trained(jit):
        x = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([x], lr=torch.tensor(0.5))

        @jit
        def step():
            for _ in range(2):
                optimizer.zero_grad()
                (x * x).sum().backward()
                optimizer.step()

        for _ in range(3):
            step()
            optimizer.param_groups[0]["lr"].mul_(0.5)
        return x.detach().cpu()

    found = trained(functools.partial(jit, fullgraph=True))
    torch.testing.assert_close(found, trained(lambda f: f))


class Registry(dict):
    """As tables of transformers: get() takes one argument, and entries are made when asked for."""

    def get(self, key):
        return self[key]

    def keys(self):
        return [*super().keys(), "others"]

    def __getitem__(self, key):
        if key == "others":
            raise ImportError("it is not installed")
        return super().__getitem__(key)

    def __len__(self):
        return len(self.keys())


def test_a_dict_of_the_users_own_is_asked_for_nothing():
    registry = Registry(scale=2)

    def f(x):
        if x.dim() == 1:
            raise KeyError("mine")
        registry["last"] = 3
        return x * registry["scale"]

    with pytest.raises(KeyError, match="mine"):
        jit(f)(X[0])
    assert dict.__eq__(registry, {"scale": 2})
    assert jit(f)(X).tolist() == (X.cpu() * 2).tolist()


class Tenfold(dict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value * 10)


def first_out(table):
    table.pop(next(iter(table)))
    table["new"] = 4


def last_used(table):
    table["a"] = table.pop("a")


@pytest.mark.filterwarnings("ignore:.*running operation by operation")
@pytest.mark.parametrize("change", [first_out, last_used])
@pytest.mark.parametrize("kind", [dict, OrderedDict, Tenfold])
def test_a_table_is_put_back_in_its_order_before_the_function_runs_again(kind, change):
    table, right = (kind({"a": 1, "b": 2, "c": 3}) for _ in range(2))

    def f(x):
        change(table)
        return x if float(x.sum()) > 1e9 else x * 2

    jit(f)(X)
    change(right)
    assert list(table.items()) == list(right.items())


def test_another_name_of_a_value_lies_where_the_value_does():
    step = jit(lambda x: x[:, slice(None)] * 2, fullgraph=True)
    x = tp.shard_batch(X.cpu())
    assert not step.lower(x).resharded
    assert step(x).tolist() == (X.cpu() * 2).tolist()


def test_what_the_function_raises():
    def f(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jit(f)(X)
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        jit(lambda x: x @ x)(X)
    mesh = tp.make_mesh((2,), ("x",), devices=tp.devices()[:2])
    other = tp.device_put(X, tp.NamedSharding(mesh, P("x")))
    with pytest.raises(
        ValueError, match=rf"jit: values are on {DEVICE}:0 {DEVICE}:1 .* but a program runs"
    ):
        jit(lambda x, y: x + y)(on(P("x")), other)
    with pytest.raises(
        TypeError, match="Expected a callable value, got 3 of type int: fun of jit must"
    ):
        tp.jit(3)
    with pytest.raises(TypeError, match="with_sharding_constraint takes a NamedSharding or a P"):
        tp.with_sharding_constraint(X, "x")
    with pytest.raises(ValueError, match=r"with_sharding_constraint: PartitionSpec.* needs a mesh"):
        tp.with_sharding_constraint(X, P("x"))


def test_a_call_that_fails_on_a_device_poisons_what_it_writes_and_no_more():
    table, total = on(P("x")), on(P(), torch.zeros(4, 4))

    @jit
    def f(x):
        total.add_(torch.linalg.cholesky(x))
        return table.sum()

    with pytest.raises(torch.linalg.LinAlgError):
        (f(-torch.eye(4)), total.cpu())
    assert torch.equal(table.cpu(), X)
    with pytest.raises(torch.linalg.LinAlgError):
        total.cpu()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_numbers_of_an_optimizer_are_sent_when_they_are_not_there(monkeypatch, kind):
    model = tp.replicate(torch.nn.Linear(4, 1))
    optimizer = kind(model.parameters(), lr=0.1)

    @jit
    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    x = on(P("x"))
    step(x)
    sent = asked(monkeypatch)
    for _ in range(3):
        step(x)
    optimizer.param_groups[0]["lr"] = 0.05
    for _ in range(2):
        step(x)
    call, new_rate = "execute", "put"
    assert [name for name, _ in sent] == [call, call, call, new_rate, call, call]


def test_numbers_of_an_optimizer_outlive_a_call_that_fails():
    def trained(second):
        weight = on(P(), torch.eye(4)).requires_grad_()
        optimizer = torch.optim.AdamW([weight], lr=0.1)

        @jit
        def step(x):
            optimizer.zero_grad()
            torch.linalg.cholesky(weight @ x).sum().backward()
            optimizer.step()

        step(torch.eye(4))
        values = [weight, *(x for x in optimizer.state[weight].values() if x.dim())]
        saved = [x.detach().clone() for x in values]
        with contextlib.suppress(torch.linalg.LinAlgError):
            (step(second), weight.cpu())
        for x, value in zip(values, saved, strict=True):
            x.data = value
        step(torch.eye(4))
        assert step.num_traces == 1
        return weight.detach().cpu()

    assert torch.equal(trained(-torch.eye(4)), trained(torch.eye(4)))


def test_inside_of_mapped_functions_it_is_the_function():
    f = jit(lambda x: x * 2)
    assert torch.equal(tp.pmap(f, compile=EAGER)(X[:4]).cpu(), X[:4] * 2)
    with tp.debug.fake_pmap():
        assert torch.equal(f(X), X * 2)
    assert f.num_traces == 0


@pytest.mark.parametrize("compile", [EAGER, False])
def test_where_results_lie(compile):
    w = on(P(), X[:4])
    rows, columns = P("x"), tp.NamedSharding(tp.make_mesh((4,), ("x",)), P(None, "x"))

    def f(x):
        return {"a": x @ w, "b": (x + 1, 3)}, w, (x * 2,)

    tp.set_mesh(columns.mesh)
    try:
        jitted = tp.jit(f, compile=compile, out_shardings=({"a": columns, "b": rows}, rows, None))
        (results, weights, others), x = jitted(on(P("x"))), X
        assert results["b"][1] == 3
        for mine, right in (
            *((results["a"], x @ X[:4]), (results["b"][0], x + 1)),
            *((weights, X[:4]), (others[0], x * 2)),
        ):
            assert torch.equal(mine.cpu(), right)
        specs = [each.sharding.spec for each in (results["a"], results["b"][0], weights)]
        assert specs == [P(None, "x"), rows, rows]
        assert torch.equal(tp.pmap(jitted, compile=EAGER)(torch.ones(4, 8, 4))[1].cpu()[0], X[:4])
        with pytest.raises(ValueError, match="pytree structure error: different lengths of"):
            tp.jit(f, compile=EAGER, out_shardings=(rows, rows))(on(P("x")))
    finally:
        tp.set_mesh(None)


def test_what_is_resharded_names_the_users_line():
    w, count = on(P("x"), X[:4]).requires_grad_(), on(P(), X[:2])

    def step(x):
        count.add_(1)
        y = (x @ w).sort(0)[0]
        y.sum().backward()

    found = [
        (each.operation, each.place.split("`")[1]) for each in jit(step).lower(on(P("x"))).resharded
    ]
    assert found[:2] == [
        ("aten.mm.default", "y = (x @ w).sort(0)[0]"),
        ("aten.sort.default", "y = (x @ w).sort(0)[0]"),
    ]
    assert {place for _, place in found[2:]} == {"y.sum().backward()"}


def test_a_setting_tells_of_gathers(monkeypatch):
    x, w = on(P("x")), on(P("x"), X[:4])
    moved = "float32.4, 4. from PartitionSpec.'x',. to PartitionSpec.. .64 B."
    product, later = jit(lambda x: x @ w), jit(lambda x: x @ w)
    product(x)
    monkeypatch.setattr(tp.config, "gathers", "raise")
    for f in (product, later, product, product.lower):
        with pytest.raises(
            RuntimeError, match=rf"operands are resharded: aten\.mm\.default: {moved}"
        ):
            f(x)
    with pytest.raises(
        RuntimeError, match=r"^aten\.cumsum\.default gathers \(128 B\), at .*'raise'"
    ):
        x.cumsum(0)
    assert torch.equal((x * 2).cpu(), X * 2)  # which is no gather
    monkeypatch.setattr(tp.config, "gathers", "warn")
    with pytest.warns(UserWarning, match=r"aten\.cumsum\.default gathers"):
        assert torch.equal(x.cumsum(0).cpu(), X.cumsum(0))
    with pytest.warns(UserWarning, match=r"^jit\(<lambda>\): operands are resharded"):
        assert torch.equal(product(x).cpu(), X @ X[:4])
    assert product.num_traces == 1
    with pytest.raises(
        ValueError, match="gathers must be 'allow', 'warn' or 'raise', but got 'no'"
    ):
        tp.config.gathers = "no"


def test_what_other_threads_write_during_a_trace_stays():
    log, begun, written = [], threading.Event(), threading.Event()

    def other():
        begun.wait()
        log.append("other")
        written.set()

    def f(x):
        if not written.is_set():
            begun.set()
            written.wait()
        assert log
        return x + 1 if x.sum() > 0 else x

    with beside(other), pytest.warns(UserWarning, match="running operation by operation"):
        jit(f)(X)
    assert log == ["other"]
