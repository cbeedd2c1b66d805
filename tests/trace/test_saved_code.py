"""Covers: _trace/saved_code.py, and how compile.py uses it, without a pool."""

import json
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchpmap._trace import saved_code
from torchpmap._trace.compile import INDUCTOR, Definition, compile_and_report

X, W = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 2, 20).reshape(4, 5)
ANY = torch.tensor(0)


def layer(x, w):
    h = torch.relu(x @ w)
    return h.softmax(1), h.sum(0).exp(), torch.addmm(h, x, w)


def plan(function, *inputs, backend=INDUCTOR):
    graph = make_fx(function)(*inputs)
    kinds = tuple((tuple(x.shape), x.dtype) for x in inputs)
    return Definition(1, "f", graph, False, (0,), kinds, (), backend)


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """Those of now: a test before may have imported the fork server's side, which sets one."""
    monkeypatch.setattr(saved_code, "_AT_START", saved_code._variables())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "torchpmap"


IN_A_FRESH_PROCESS = """
import sys, torch
sys.path[:0] = {path!r}
from test_saved_code import *
run, report = compile_and_report(plan(layer, X, W), ANY)
given = [X.clone().requires_grad_(), W.clone()]
for got, expected in zip(run(given), layer(X, W), strict=True):
    torch.testing.assert_close(got, expected)
    assert not got.requires_grad
print(report.cache, report.is_saved, given, "torch._inductor.compile_fx" in sys.modules)
"""


@pytest.mark.inductor
def test_saved_code_runs_without_inductor(folder):
    """The first process compiles, the second only loads: both compute what plain torch does."""
    said = [
        subprocess.run(
            [sys.executable, "-c", IN_A_FRESH_PROCESS.format(path=sys.path)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for _ in range(2)
    ]
    assert said == ["miss True [] True\n", "hit True [] False\n"]
    (file,) = folder.iterdir()
    assert "_inductor" not in file.read_text().partition("\n")[2].replace("_pyobject", "")


def file_of(function, *inputs, given=(), **options):
    return saved_code.file_of(plan(function, *inputs).graph, options, tuple(inputs[0].shape), given)


def test_what_else_makes_another_file(folder):
    first = file_of(layer, X, W)
    assert first.parent == folder
    assert file_of(layer, X.clone(), W.clone()) == first
    threads = torch.get_num_threads()
    others = [
        file_of(layer, X[:2], W),
        file_of(lambda x, w: (x @ w * 2,), X, W),
        file_of(lambda x, w: (x @ w * 2.5,), X, W),
        file_of(layer, X, W, given="max-autotune"),
        file_of(layer, X, W, epilogue_fusion=False),
        file_of(layer, X, W, given=[("bfloat16",)]),
    ]
    torch.set_num_threads(threads + 1)
    try:
        others.append(file_of(layer, X, W))
    finally:
        torch.set_num_threads(threads)
    with torch._inductor.config.patch(epilogue_fusion=False):
        others.append(file_of(layer, X, W))
    assert len({first, *others}) == 9
    with torch._inductor.config.patch(epilogue_fusion=True):  # as it is by default
        assert file_of(layer, X, W) == first


def printing(x):
    torch.ops.torchpmap.debug_print("x \0", [""], [], [], [], [x])
    return (x + 1,)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + torch.ones(4),),  # a constant, whose bytes would be part of the file
        lambda x: (x.add_(1) * 2,),
        printing,
        lambda x: (x[1:].mul_(2) + x[0],),
        lambda x: (x + 1, None),
    ],
    ids=["constant", "write", "print", "write to a view", "no tensor"],
)
def test_what_is_not_saved(function, folder):
    constant = torch.ones(4) if "ones" in function.__code__.co_names else None
    traced = (lambda x: (x + constant,)) if constant is not None else function
    assert file_of(traced, X) is None


def trains(x, w):
    """As a step does: it writes to what it has made, draws, and returns what it was given."""
    with torch.profiler.record_function("step"):
        moved = w.clone().lerp_(w * 2, 0.25)
        moved[1:].add_(1)
    return moved, x, x.T[1:], moved.T, torch.rand_like(x) * 0 + x, moved


@pytest.mark.inductor
def test_results_that_share_memory(folder):
    made = plan(trains, X, W)
    for expected in ("miss", "hit"):
        run, report = compile_and_report(made, ANY)
        assert (report.cache, report.is_saved) == (expected, True)
        x, w = X.clone(), W.clone()
        found = run([x, w])
        for got, wanted in zip(found, trains(X, W), strict=True):
            torch.testing.assert_close(got, wanted)
            assert got.stride() == wanted.stride()
        given, written, itself, view, turned, _, again = (
            each.untyped_storage().data_ptr() for each in (x, *found)
        )
        assert given == itself == view
        assert written == turned == again
        assert w.equal(W)


@dataclass
class Pass:
    """Its text says nothing of what it does."""

    def __call__(self, graph):
        pass


def test_the_text_of_an_object_is_not_all_of_it(folder):
    assert file_of(layer, X, W, post_grad_custom_pre_pass=Pass()) is None
    assert file_of(layer, X, W, given=({"a": [Pass()]},)) is None
    with torch._inductor.config.patch(post_grad_custom_pre_pass=Pass()):
        assert file_of(layer, X, W) is None


@pytest.mark.parametrize("name", ["force_disable_caches", "fx_graph_cache"])
def test_inductors_settings_of_its_cache_hold(name, folder):
    with torch._inductor.config.patch({name: name.startswith("force")}):
        assert file_of(layer, X, W) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1"),
        ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "true"),
        ("TORCH_COMPILE_FORCE_DISABLE_CACHES", "1"),
        ("TORCHINDUCTOR_FX_GRAPH_CACHE", "0"),
        ("TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT", "0"),
    ],
)
def test_inductors_variables_of_its_cache_hold(name, value, folder, monkeypatch):
    monkeypatch.setenv(name, value)
    assert file_of(layer, X, W) is None


def test_inductors_options_of_its_cache_hold(folder):
    assert file_of(layer, X, W, force_disable_caches=True) is None
    assert file_of(layer, X, W, fx_graph_cache=False) is None


def test_a_script_is_expected_to_need_what_it_needed(folder, monkeypatch):
    script = folder.with_name("train.py")
    script.write_text("x")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(saved_code, "_noted", None)
    for is_saved, expected in ((True, True), (False, False), (True, False)):
        saved_code._mark_of_script.cache_clear()
        saved_code.expect(is_saved)
        assert saved_code.is_expected() is expected
    monkeypatch.setattr(saved_code, "_noted", None)  # as when it starts again
    saved_code.expect(True)
    script.write_text("y")
    saved_code._mark_of_script.cache_clear()
    assert not saved_code.is_expected()
    (mark,) = folder.iterdir()
    mark.write_bytes(b"\xff")
    assert not saved_code.is_expected()
    for other in (None, 3, b"x", "no\0file", str(folder)):
        monkeypatch.setattr(sys.modules["__main__"], "__file__", other)
        saved_code._mark_of_script.cache_clear()
        assert not saved_code.is_expected()
        saved_code.expect(True)
    assert list(folder.iterdir()) == [mark]
    saved_code._mark_of_script.cache_clear()


def test_a_folder_that_cannot_be_used(folder, monkeypatch):
    folder.write_text("a file")
    saved_code.expect(True)
    assert not saved_code.is_expected()
    assert saved_code.load(file_of(layer, X, W)) is None
    assert not saved_code.save(file_of(layer, X, W), test_a_folder_that_cannot_be_used)


def test_a_full_disk_leaves_no_file(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        assert not saved_code._write(tmp_path / "code.py", "text")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


@pytest.mark.inductor
def test_damaged_code_is_made_again(folder):
    def function(x, w):  # of this test alone: a process builds a library once
        return ((x @ w).cos() + 0.625,)

    made = plan(function, X, W)
    compile_and_report(made, ANY)
    (file,) = folder.iterdir()
    text = file.read_text()
    ((_, library, _),) = json.loads(text.partition("\n")[0][1:])
    shutil.copy(folder.parent / library, elsewhere := folder.parent.parent / "library.so")
    for harmed in (
        text.replace(library, f"none/{library}"),
        text.replace(library, str(elsewhere)),  # in a folder of others
        text.replace(library, f"../{elsewhere.name}"),
        "",
        text.replace("class", "clas", 1),
        text.replace("call =", "other ="),
        text.replace(", ", ", 1", 2).replace(", 1", ", ", 1),  # another size
    ):
        assert harmed != text
        file.write_text(harmed)
        assert saved_code.load(file) is None
        run, report = compile_and_report(made, ANY)
        assert report.cache == "hit"  # of Inductor
        for got, expected in zip(run([X, W]), function(X, W), strict=True):
            torch.testing.assert_close(got, expected)
        assert file.read_text() == text
        assert saved_code.load(file) is not None


def test_variables_that_changed_after_the_start(folder, monkeypatch):
    """Inductor has read them before, or reads them later."""
    assert file_of(layer, X, W) is not None
    monkeypatch.setenv("TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "1")
    assert file_of(layer, X, W) is None


INDUCTORS = """
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.utils import maybe_profile
async_compile = AsyncCompile()
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions
    def call(self, args):
        x, = args
        args.clear()
        return ({},)
runner = Runner(partitions=[])
call = runner.call
def helper(x):
    return x
"""


@pytest.mark.parametrize(
    ("result", "is_saved"),
    [
        ("extern_kernels.mm(x, x)", True),
        ("torch.ops.aten.add.Tensor(x, 1)", True),
        ("extern_kernels.of_inductor(x)", False),  # not one of torch's
        ("torch.ops.of_the_user.f(x)", False),
        ("maybe_profile(x)", False),
        ("async_compile.f(x)", False),
        ("helper(x)", False),
    ],
)
def test_modules_that_need_inductor_are_not_saved(result, is_saved, tmp_path):
    source, file = tmp_path / "made.py", tmp_path / "saved" / "code.py"
    source.write_text(INDUCTORS.format(result))
    kernels = SimpleNamespace(mm=torch.mm, of_inductor=torch.neg)
    scope = {"__file__": str(source), "extern_kernels": kernels}
    exec("def call(args): ...", scope)
    assert saved_code.save(file, scope["call"]) is is_saved
    assert file.exists() is is_saved


@pytest.mark.inductor
def test_a_function_in_python_is_not_taken_for_one_of_a_library(tmp_path):
    source = tmp_path / "made.py"
    source.write_text("f = async_compile.cpp_pybinding([], '')\ncall = f\n")
    scope = {"__file__": str(source), "f": lambda args: args}
    exec("def call(args): return f(args)", scope)
    assert not saved_code.save(tmp_path / "code.py", scope["call"])
