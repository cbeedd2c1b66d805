"""Covers: _transforms/pmap.py: what can be mapped, how it is compiled, what happens if it is not
traceable.
"""

import copy
import dataclasses
import functools
import gc
import pickle
import queue
import traceback
import warnings
import weakref

import pytest
import torch
from _support import EAGER

import torchpmap as tp
from torchpmap._plan import lower

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(4.0)


def double(x):
    """Twice."""
    return x * 2


@tp.pmap
def doubled(x):
    return x * 2


@tp.jit
def jitted(x):
    return x * 2


class Doubles:
    @tp.pmap(static_broadcasted_argnums=0)
    def method(self, x):
        return x * 2


class Scaler:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale

    def method(self, x):
        return x * self.scale

    @classmethod
    def build(cls, x):
        return cls(2).method(x)


CALLABLES = {
    "function": double,
    "lambda": lambda x: x * 2,
    "partial": functools.partial(torch.mul, 2),
    "partial with a keyword": functools.partial(lambda x, k: x * k, k=2),
    "callable": Scaler(2),
    "method": Scaler(2).method,
    "classmethod": Scaler.build,
    "bound call": Scaler(2).__call__,
    "of torch": torch.neg,
    "operation": torch.ops.aten.sin.default,
    "module": torch.nn.Tanh(),
    "method of a module": torch.nn.Tanh().forward,
    "compiled": torch.compile(lambda x: x.sin() * 2, backend="eager"),
}
CALLABLES["with a compiled one inside"] = lambda x: CALLABLES["compiled"](x)


@pytest.mark.parametrize("fun", CALLABLES.values(), ids=CALLABLES)
def test_any_callable(mode, fun):
    torch.testing.assert_close(tp.pmap(fun, compile=mode)(X).cpu(), fun(X))


def test_looks_like_the_function():
    f = tp.pmap(double)
    assert f.__wrapped__ is double
    assert (f.__name__, f.__doc__, f.__module__) == ("double", "Twice.", __name__)
    assert repr(tp.pmap(double, "i")) == "<pmap of double over axis 'i'>"
    assert repr(tp.pmap(functools.partial(double))) == "<pmap of double over axis None>"


def test_pickled():
    """What a decorator has made is pickled as functions are, and so goes to a spawned process."""
    for named in (doubled, jitted, Doubles.method):
        assert pickle.loads(pickle.dumps(named)) is named
    for other in (tp.pmap(double), Doubles().method):
        again = pickle.loads(pickle.dumps(other))
        assert again is not other
        assert again(X).tolist() == [0.0, 2.0, 4.0, 6.0]


FACTOR = 2


@tp.pmap
def scaled(x):
    return x * FACTOR


@tp.jit
def scaled_by_jit(x):
    return x * FACTOR


@pytest.mark.parametrize("function", [scaled, scaled_by_jit])
def test_a_worker_reads_the_globals_of_the_caller(function, monkeypatch):
    """Not those that the module has when a worker imports it."""
    monkeypatch.setitem(globals(), "FACTOR", 5)
    call = tp.pmap(lambda x: function(x[None])[0], compile=False)
    assert call(X).tolist() == [0.0, 5.0, 10.0, 15.0]


def test_decorators(mode):
    @tp.pmap
    def plain(x):
        return x * 2

    @tp.pmap(axis_name="i", compile=mode)
    def named(x):
        return x / tp.psum(x, "i")

    @functools.partial(tp.pmap, axis_name="i", compile=mode)
    def partial(x):
        return tp.psum(x, "i")

    assert plain.__name__ == "plain"
    assert named(X + 1).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert partial(X).tolist() == [6.0] * 4
    assert tp.pmap(double, "i", compile=mode)(X).tolist() == [0.0, 2.0, 4.0, 6.0]
    with pytest.raises(TypeError, match="takes from 0 to 2 positional arguments but 3"):
        tp.pmap(double, "i", 0)


def make_class(mode):
    """Without an ``assert``, through which a function reaches all of pytest."""

    class Model:
        def __init__(self, scale):
            self.scale = scale

        def __eq__(self, other):
            return type(other) is type(self)

        @tp.pmap(axis_name="i", compile=mode)
        def mapped(self, x):
            return tp.psum(x, "i") * self.scale

        @tp.pmap(static_broadcasted_argnums=0, in_axes=(None, 0), compile=mode)
        def static_self(self, x):
            return x + self.scale

        __hash__ = object.__hash__

    return Model


def test_methods(mode):
    cls = make_class(mode)
    one, two = cls(1.0), cls(2.0)  # equal, and not the same
    assert one.mapped(X).tolist() == [6.0] * 4
    assert two.mapped(X).tolist() == [12.0] * 4
    assert two.static_self(X).tolist() == [2.0, 3.0, 4.0, 5.0]
    two.scale = torch.tensor(3.0)
    assert two.mapped(X).tolist() == [18.0] * 4
    assert cls.mapped.__name__ == one.mapped.__name__ == "mapped"
    assert one.mapped is one.mapped


def test_methods_of_unhashable_instances_are_traced_once():
    traces = queue.SimpleQueue()  # a list that grows would be a reason to trace again

    @dataclasses.dataclass
    class Model:
        scale: float

        @tp.pmap(compile=EAGER)
        def mapped(self, x):
            traces.put(self.scale)
            return x * self.scale

    one, two = Model(2.0), Model(3.0)
    for _ in range(3):
        assert one.mapped(X).tolist() == (X * 2).tolist()
        assert two.mapped(X).tolist() == (X * 3).tolist()
    assert [traces.get() for _ in range(traces.qsize())] == [2.0, 3.0]


def test_methods_keep_a_limited_number_of_instances(monkeypatch):
    monkeypatch.setattr("torchpmap._transforms.mapped._MAX_INSTANCES", 2)
    cls, there = make_class(EAGER), []
    for scale in (1.0, 2.0, 3.0, 4.0):
        model = cls(scale)
        assert model.mapped(X).tolist() == [6.0 * scale] * 4
        there.append(weakref.ref(model))
        del model
        gc.collect()
    assert [model() is None for model in there] == [True, True, False, False]
    method = there[2]().mapped
    for scale in (5.0, 6.0):
        cls(scale).mapped(X)
    gc.collect()
    assert there[2]() is not None  # the caller has the method
    assert method(X).tolist() == [18.0] * 4


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    @tp.pmap(compile=EAGER)
    def mapped(self, x):
        return x * self.scale


def test_methods_are_pickled_and_copied_with_their_instance():
    model = Scaled(3.0)
    again = pickle.loads(pickle.dumps(model.mapped))
    copied = copy.deepcopy(model.mapped)
    model.scale = 4.0
    assert [f(X)[1].item() for f in (again, copied, model.mapped)] == [3.0, 3.0, 4.0]


def test_methods_of_temporary_instances(mode):
    cls = make_class(mode)
    assert cls(2.0).mapped(X).tolist() == [12.0] * 4
    method = cls(3.0).mapped
    gc.collect()
    assert [method(X).tolist() for _ in range(2)] == [[18.0] * 4] * 2
    x = X.clone().requires_grad_()
    cls(4.0).mapped(x).sum().backward()
    assert x.grad.tolist() == [16.0] * 4
    hessian = torch.func.hessian(lambda x: cls(2.0).mapped(x)[0] ** 2)
    assert hessian(X).tolist() == torch.full((4, 4), 8.0).tolist()


def test_methods_of_modules(mode):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        @tp.pmap(axis_name="i", compile=mode)
        def forward(self, x):
            return tp.pmean(self.linear(x), "i").detach()

    model, x = Model(), torch.arange(8.0).reshape(4, 2)
    for _ in range(2):
        expected = model.linear(x).mean(0).detach()
        torch.testing.assert_close(model(x).to_host(), expected.expand(4, 2))
        with torch.no_grad():
            model.linear.weight.mul_(2)


def test_classes_with_slots(mode):
    class Slotted:
        __slots__ = ("scale",)

        @tp.pmap(compile=mode)
        def mapped(self, x):
            return x * self.scale

    instance = Slotted()
    instance.scale = 3
    assert instance.mapped(X).tolist() == (X * 3).tolist()


@pytest.mark.inductor
@pytest.mark.always  # there is no compiler
def test_without_a_cpp_compiler(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(lower, "_missing_compiler_warned", False)
    with pytest.warns(UserWarning, match=r"no C(\+\+)? compiler was found") as record:
        assert tp.pmap(double)(X).tolist() == [0.0, 2.0, 4.0, 6.0]
    assert [warning.filename for warning in record] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tp.pmap(lambda x: x * 3)(X).tolist() == [0.0, 3.0, 6.0, 9.0]


def branch(x):
    if x > 1:
        return x
    return -x


def numpy(x):
    return torch.as_tensor(x.numpy(force=True) * 2)


def loop(x):
    while x < 10:
        x = x * 2
    return x


UNTRACEABLE = [
    (branch, "if x > 1:", X, [-0.0, -1.0, 2.0, 3.0]),
    (numpy, "return torch.as_tensor(x.numpy(force=True) * 2)", X, [0.0, 2.0, 4.0, 6.0]),
    (loop, "while x < 10:", X + 1, [16.0, 16.0, 12.0, 16.0]),
]


@pytest.mark.parametrize(("fun", "line", "x", "expected"), UNTRACEABLE)
def test_falls_back_with_one_warning_that_names_the_line(fun, line, x, expected):
    number = fun.__code__.co_firstlineno + 1
    f = tp.pmap(fun)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        assert f(x).tolist() == expected
        here = traceback.extract_stack()[-1].lineno - 1
        assert f(x).tolist() == expected
        assert f(x.double()).tolist() == expected
    (warning,) = record
    assert str(warning.message).startswith(
        f"pmap({fun.__name__}, in_axes=0)(<inputs>): running without tracing (as compile=False), "
        f"which is slower, because of {__file__}:{number} `{line}`: the "
    )
    assert (warning.filename, warning.lineno) == (__file__, here)
    with pytest.raises(tp.TraceError, match=rf"fullgraph=True.*{__file__}:{number}") as error:
        tp.pmap(fun, fullgraph=True)(x)
    assert error.value.__cause__ is not None


def test_shape_errors_are_torchs_own_and_point_at_the_line(capfd, caplog):
    def fails(x):
        return x @ torch.ones(5, 2)

    with pytest.raises(RuntimeError, match=r"\[3, 3\] X \[5, 2\]") as error:
        tp.pmap(fails, compile=EAGER)(torch.ones(4, 3, 3))
    assert capfd.readouterr().err == ""
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    frames = [frame.name for frame in error.traceback if str(frame.path) == __file__]
    assert frames[-1] == "fails"


def test_results_do_not_require_grad_where_nothing_does(mode):
    w = torch.ones(4, requires_grad=True)
    f = tp.pmap(double, compile=mode)
    assert not f(X).requires_grad
    assert not f(w.detach()).requires_grad
    with torch.no_grad():
        assert not f(w).requires_grad
    assert f(w).requires_grad
    assert not tp.pmap(lambda x: x > 1, compile=mode)(w).requires_grad


def test_what_vmap_cannot_do_comes_with_advice():
    def f(x):
        y = x.detach().requires_grad_()
        (y**2).backward()
        return y.grad

    assert tp.pmap(f, compile=EAGER)(X).tolist() == (2 * X).tolist()
    with pytest.raises(RuntimeError) as caught:
        tp.pmap(f, compile=EAGER)(torch.ones(8))
    note, _ = caught.value.__notes__
    assert "2 rows run at once on each device" in note
    assert "with torchpmap.grad" in note
