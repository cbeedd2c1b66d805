"""Covers: _base/tracebacks.py, _base/boundary.py, _base/sources.py: what callers see of errors."""

import builtins
import inspect
import json
import pickle
import sys
import traceback
from types import TracebackType

import pytest
import torch

import torchpmap as tp
from torchpmap._base.boundary import boundary
from torchpmap._base.errors import pack_exception, unpack_exception
from torchpmap._base.sources import PACKAGE, TORCH, users_frames, users_line
from torchpmap._base.tracebacks import RemoteTraceback, fold_chain

ROWS = torch.ones(2, 3)


@pytest.fixture(autouse=True)
def _default(monkeypatch):
    monkeypatch.delenv("TORCHPMAP_TRACEBACK", raising=False)
    yield
    monkeypatch.undo()
    tp.config.reset()


def raised(call) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (the caller looks)
        call()
    return caught.value


def frames(error: BaseException) -> list[str]:
    """The functions in a traceback, behind ``raised``."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)][1:]


def fails(x):
    return x @ torch.ones(5)


def interrupted(x):
    raise KeyboardInterrupt


def ours(source: str):
    """The function ``f`` of a file of the package."""
    exec(compile(source, PACKAGE + "_file.py", "exec"), scope := {"__name__": "torchpmap._file"})
    return boundary(scope["f"])


@pytest.mark.parametrize(
    "call",
    [
        lambda: tp.vmap(fails)(ROWS),
        lambda: tp.grad(fails)(ROWS),
        lambda: tp.value_and_grad(tp.vmap(fails))(ROWS),
        lambda: tp.vmap(torch.func.grad(fails))(ROWS),
        lambda: tp.vmap(lambda x: torch.nn.Sequential(torch.nn.Linear(5, 1))(x))(ROWS),
        lambda: tp.vmap(interrupted)(ROWS),
    ],
)
def test_only_the_users_frames_stay(call):
    error = raised(call)
    assert type(error) in (RuntimeError, KeyboardInterrupt)
    assert frames(error) in [["<lambda>", name] for name in ("fails", "<lambda>", "interrupted")]
    assert all(PACKAGE not in line for line in traceback.format_exception(error))


@pytest.mark.parametrize("way", ["environment", "setting"])
def test_all_frames_on_request(way, monkeypatch):
    if way == "setting":
        tp.config.traceback = "full"
    else:
        monkeypatch.setenv("TORCHPMAP_TRACEBACK", "full")
    found = frames(raised(lambda: tp.vmap(fails)(ROWS)))
    assert len(found) > 5
    assert {"mapped", "vmap_impl"} <= set(found)


def test_a_wrong_variable_is_reported_by_its_own_error(monkeypatch):
    monkeypatch.setenv("TORCHPMAP_TRACEBACK", "short")
    error = raised(lambda: tp.vmap(fails)(ROWS))
    assert type(error) is RuntimeError
    assert frames(error) == ["<lambda>", "fails"]
    with pytest.raises(ValueError, match="TORCHPMAP_TRACEBACK must be 'folded' or 'full'"):
        tp.config.snapshot()


def test_debuggers_reach_the_users_frame():
    trace = raised(lambda: tp.vmap(fails)(ROWS)).__traceback__
    *_, (innermost, line) = traceback.walk_tb(trace)
    assert tuple(innermost.f_locals["x"].shape) == (3,)
    assert line == fails.__code__.co_firstlineno + 1


def test_pythons_library_goes_with_its_caller():
    error = raised(lambda: tp.vmap(lambda x: json.loads("{"))(ROWS))
    assert frames(error)[:3] == ["<lambda>", "<lambda>", "loads"]
    assert frames(raised(ours("import pickle\ndef f(): pickle.loads(b'.')"))) == []


def test_an_interrupt_on_no_line_is_folded_too():
    def cleans_up():
        try:
            raise KeyError
        except KeyError as error:
            return sys._getframe() if error else None

    frame = cleans_up()
    nowhere = next(start for start, _, line in frame.f_code.co_lines() if line is None)
    trace = TracebackType(None, frame, nowhere, -1)  # -1: the line is looked up
    assert trace.tb_lineno is None
    error = KeyboardInterrupt().with_traceback(trace)
    fold_chain(error)
    assert error.__traceback__.tb_lineno == frame.f_code.co_firstlineno


MISUSES = {
    "collective": lambda: tp.psum(ROWS, "i"),
    "collective over an index": lambda: tp.pmax_if_bound(object(), None),
    "index": lambda: tp.axis_index("i"),
    "function": lambda: tp.pmap(3),
    "decorator": lambda: tp.pmap(axis_name="i")(3),
    "axes": lambda: tp.vmap(fails, in_axes="rows"),
    "positions": lambda: tp.grad(fails, argnums="x"),
    "mesh": lambda: tp.make_mesh((2, 2), ("a",), devices=[]),
    "key": lambda: tp.random.normal(3),
    "setting": lambda: setattr(tp.config, "number_of_devices", 2),
    "value of a setting": lambda: setattr(tp.config, "num_devices", "two"),  # through a dataclass
}


@pytest.mark.parametrize("call", MISUSES.values(), ids=MISUSES)
def test_misuse_points_at_the_line_of_the_call(call):
    error = raised(call)
    assert type(error) in (TypeError, ValueError, NameError, AttributeError)
    assert frames(error) == ["<lambda>"]


GENERATED = """
from dataclasses import dataclass

@dataclass
class Even:
    number: int

    def __post_init__(self):
        raise ValueError(self.number)
"""


def test_what_a_dataclass_of_the_user_generates_stays(tmp_path, monkeypatch):
    (tmp_path / "of_the_user.py").write_text(GENERATED)
    monkeypatch.syspath_prepend(str(tmp_path))
    from of_the_user import Even  # type: ignore[import-not-found]

    assert frames(raised(lambda: tp.vmap(lambda x: Even(3))(ROWS))) == [
        *["<lambda>", "<lambda>", "__init__", "__post_init__"]
    ]


def test_every_public_function_is_a_boundary():
    modules = [tp, tp.checkpoint, tp.debug, tp.multihost, tp.optim, tp.profiler, tp.random]
    is_open = {
        function.__name__
        for module in modules
        for function in (getattr(module, name) for name in module.__all__)
        if inspect.isfunction(function) and "/boundary.py" not in function.__code__.co_filename
    }
    # the first raises nothing, the second is a debugger's, the others make context managers
    assert is_open == {"axis_bound", "breakpoint", "fake_pmap", "report_gathers", "trace"}


# Chains -------------------------------------------------------------------------------------------


def test_the_users_chain_stays():
    def chained(x):
        try:
            fails(x)
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def in_a_handler(x):
        try:
            fails(x)
        except RuntimeError as error:
            raise ValueError(str(error))  # noqa: B904

    def never_raised(x):
        raise ValueError("bad") from KeyError("bad")

    assert frames(raised(lambda: tp.vmap(chained)(ROWS)).__cause__) == ["fails"]
    assert frames(raised(lambda: tp.vmap(in_a_handler)(ROWS)).__context__) == ["fails"]
    assert type(raised(lambda: tp.vmap(never_raised)(ROWS)).__cause__) is KeyError


REPEATS = """
def f():
    try:
        {}["bad"]
    except KeyError as error:
        raise ValueError("got 'bad'") from error
"""


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        (REPEATS, False),
        (REPEATS.replace("got 'bad'", "something else"), True),
        (REPEATS.replace(" from error", ""), False),
        (REPEATS.replace(" from error", "").replace("got 'bad'", "something else"), False),
    ],
    ids=["cause repeats", "cause tells more", "context repeats", "context"],
)
def test_exceptions_that_never_left_the_package(source, kept):
    text = "".join(traceback.format_exception(raised(ours(source))))
    assert ("KeyError: 'bad'" in text) == kept
    assert ("exception" in text) == kept
    assert "_file.py" not in text


def test_what_the_caller_handles_stays_whole():
    try:
        torch.nn.Linear(5, 1)(ROWS)
    except RuntimeError as error:
        mine, before = error, traceback.extract_tb(error.__traceback__)
        later = raised(lambda: tp.vmap(fails)(ROWS))
    assert later.__context__ is mine
    assert traceback.extract_tb(mine.__traceback__) == before


def test_members_of_a_group_are_folded():
    def grouped(x):
        try:
            fails(x)
        except RuntimeError as error:
            raise ExceptionGroup("both", [error, ValueError("alone")]) from None

    group = raised(lambda: tp.vmap(grouped)(ROWS))
    assert frames(group.exceptions[0]) == ["fails"]


def test_attributes_of_the_users_class_are_not_touched():
    class Hostile(Exception):
        __traceback__ = __cause__ = __context__ = property(lambda self: 1 / 0)

    def hostile():
        raise Hostile("mine")

    try:
        boundary(hostile)()
    except Hostile as error:
        text = str(error)  # contextlib and pytest would ask the class
    assert text == "mine"


# Bugs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("{}['a']", True),
        ("None.a", True),
        ("assert False", True),
        ("a", True),
        ("raise KeyError('a')", False),
        ("raise NameError('unbound axis name: i')", False),
        ("int('a')", False),
    ],
)
def test_a_bug_of_the_package_keeps_its_frames(body, shown):
    assert frames(raised(ours(f"def f(): {body}"))) == (["call", "f"] if shown else [])


def test_an_error_of_the_users_is_no_bug():
    assert frames(raised(lambda: tp.vmap(lambda x: {}["a"])(ROWS))) == ["<lambda>", "<lambda>"]


KINDS = [
    each
    for each in vars(builtins).values()
    if isinstance(each, type)
    and issubclass(each, BaseException)
    and not issubclass(each, UnicodeError | BaseExceptionGroup)
]


@pytest.mark.usefixtures("pool")
def test_an_exception_of_a_worker_is_short_whatever_its_type():
    """It is raised among frames of the package, which are no news."""
    shown = {}
    for kind in KINDS:

        def f(x, kind=kind):
            if x == 0:  # on one device: the text names others that had reported the same by then
                raise kind("mine")

        error = raised(lambda f=f: tp.pmap(f, compile=False)(torch.arange(2)))
        assert type(error) is (kind if issubclass(kind, Exception) else tp.WorkerError)
        shown[kind] = "".join(traceback.format_exception(error))
    assert {PACKAGE in text for text in shown.values()} == {False}
    assert {len(text.splitlines()) for text in shown.values()} == {
        len(shown[ValueError].splitlines())
    }


def from_another(x):
    try:
        {}["bad"]
    except KeyError as error:
        raise AssertionError("mine") from error


def after_another(x):
    try:
        assert x is None
    except AssertionError:
        raise AssertionError("mine")  # noqa: B904


def in_a_group(x):
    raise ExceptionGroup("mine", [AssertionError("a"), KeyError("b"), ValueError("c")])


def asserted(x):
    assert (x < 0).all(), "mine"


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("function", [from_another, after_another, in_a_group, asserted])
def test_an_assertion_of_a_worker_shows_the_users_frames_only(function):
    error = raised(lambda: tp.pmap(function, compile=False)(ROWS))
    text = "".join(traceback.format_exception(error))
    assert PACKAGE not in text
    assert f"in {function.__name__}" in text
    assert "mine" in text


# Boundaries ---------------------------------------------------------------------------------------


def test_a_boundary_looks_like_its_function():
    assert list(inspect.signature(tp.device_put).parameters) == ["x", "device"]
    assert pickle.loads(pickle.dumps(tp.device_put)) is tp.device_put
    assert tp.ShardedTensor.tolist.__code__ is not tp.device_put.__code__
    assert isinstance(inspect.getattr_static(tp.ShardedTensor, "sharding"), property)
    assert tp.ShardedTensor.sharding.__doc__ == "Mesh and partition spec."


CALLS_OF_USERS_FUNCTIONS = {
    "vmap": lambda x: tp.vmap(lambda row: row * 2)(x),
    "map": lambda x: tp.map(lambda row: row * 2, x),
    "scan": lambda x: tp.scan(lambda carry, row: (carry + 1.0, carry * row), 0.0, x)[1],
    "while_loop": lambda x: tp.while_loop(lambda c: c.sum() < 20, lambda c: c + 1, x),
    "fori_loop": lambda x: tp.fori_loop(0, 3, lambda i, c: c * 2 + i, x),
    "cond": lambda x: tp.cond(True, lambda v: v * 2, lambda v: v, x),
    "switch": lambda x: tp.switch(1, [lambda v: v, lambda v: v * 3], x),
    "associative_scan": lambda x: tp.associative_scan(torch.add, x),
    "grad": lambda x: tp.grad(lambda v: (v**2).sum())(x),
    "value_and_grad": lambda x: tp.value_and_grad(lambda v: (v**2).sum())(x)[1],
    "torch's grad": lambda x: torch.func.grad(lambda v: tp.vmap(torch.sum)(v).sum())(x),
}


# where there is a GPU, reset() imports Inductor, which imports what warns
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is:DeprecationWarning")
@pytest.mark.parametrize("name", CALLS_OF_USERS_FUNCTIONS)
def test_a_compiled_function_goes_through(name):
    call = CALLS_OF_USERS_FUNCTIONS[name]
    torch.compiler.reset()  # all cases are one function to it, which it would compile 8 times only
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return graph

    compiled = torch.compile(lambda x: call(x + 1) + 1, backend=keep)
    assert torch.equal(compiled(ROWS), call(ROWS + 1) + 1)
    names = [[node.name for node in graph.nodes if node.op != "output"] for graph in graphs]
    assert len(names) == 2, f"the package's own code has been compiled too: {names}"


# From a worker ------------------------------------------------------------------------------------


def remote(error: BaseException) -> RemoteTraceback:
    cause = unpack_exception(pack_exception(error), where="there").__cause__
    assert type(cause) is RemoteTraceback
    return cause


def whole(call) -> BaseException:
    """What a call raises in a worker, where nothing is folded."""
    tp.config.traceback = "full"
    error = raised(call)
    tp.config.reset()
    return error


def test_a_remote_traceback_is_folded_by_the_caller():
    cause = remote(whole(lambda: tp.vmap(fails)(ROWS)))
    assert "vmap_impl" in str(cause)
    cause.fold()
    cause.fold()
    assert "vmap_impl" not in str(cause)
    assert "return x @ torch.ones(5)" in str(cause)


IN_A_WORKER = """
from torchpmap._base.errors import pack_exception

def f():
    try:
        int("a")
    except ValueError as error:
        return pack_exception(error)
"""


def test_a_remote_traceback_without_users_frames_is_cut():
    packed = ours(IN_A_WORKER)()

    def arrives():
        raise unpack_exception(packed, where="there")

    error = raised(boundary(arrives))
    assert type(error) is ValueError
    assert error.__cause__ is None


# Whose code a file is -----------------------------------------------------------------------------

ASKS = "def ask():\n    return users_line()\n"


def line_in(file, **scope):
    """The line that is found by code of a file."""
    exec(compile(ASKS, file, "exec"), scope := {**scope, "users_line": users_line})
    return scope["ask"]()


@pytest.mark.parametrize(
    "file", [PACKAGE + "_trace/trace.py", TORCH + "nn/modules/linear.py", "<eval_with_key>.7"]
)
def test_code_of_others_is_passed_over(file):
    named = {} if file.startswith("<") else {"__name__": "somewhere"}
    assert line_in(file, **named).startswith(__file__)


@pytest.mark.parametrize(
    "file", [PACKAGE[:-1] + "_tools/model.py", TORCH[:-1] + "vision/ops.py", "<string>", "cell.py"]
)
def test_the_users_code_is_found(file):
    assert line_in(file, __name__="__main__") == f"{file}:2"


def test_frames_end_within_a_call():
    def inner():
        return list(users_frames(outer.__code__))

    def outer():
        return inner()

    assert [frame.f_code.co_name for frame in outer()] == ["inner"]
