"""Covers: _trace/compile.py, without a pool."""

import os
import re
import sys
import tempfile
import types
from contextlib import nullcontext

import pytest
import torch
from _launched import run_program
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import torchpmap as tp
from torchpmap._base.devices import Device
from torchpmap._layout.axis_stack import group_name
from torchpmap._plan import lower
from torchpmap._sharded.spmd import combined
from torchpmap._trace import compile
from torchpmap._trace.compile import (
    EAGER,
    INDUCTOR,
    Backend,
    Definition,
    communicates,
    compile_and_report,
    compile_definition,
    parse_compile,
)
from torchpmap._trace.toolchain import cpp_compiler, make_cache_private, missing_compiler


def backend(graph, examples, **extra):
    backend.seen = examples, extra
    return graph.forward


def inductor(graph, examples):
    """A back end of the user, by that name."""


@pytest.mark.inductor  # or True is the traced graph; nothing is compiled
@pytest.mark.always
@pytest.mark.parametrize(
    ("value", "expected", "is_inductor"),
    [
        (True, INDUCTOR, True),
        (False, None, None),
        ({}, INDUCTOR, True),
        ({"backend": "inductor"}, INDUCTOR, True),
        ({"backend": "eager"}, EAGER, False),
        ({"mode": "default"}, Backend("inductor", None, "default"), True),
        ({"mode": "reduce-overhead"}, Backend("inductor", None, "reduce-overhead"), True),
        ({"options": {"b": 1, "a": 2}}, Backend("inductor", options=(("a", 2), ("b", 1))), True),
        ({"backend": "aot_eager"}, Backend("aot_eager"), False),
        ({"backend": backend, "mode": "default"}, Backend("backend", backend, "default"), False),
        ({"backend": inductor}, Backend("inductor", inductor), False),
    ],
)
def test_vocabulary(value, expected, is_inductor):
    found = parse_compile(value)
    assert found == expected
    assert hash(found) == hash(expected)
    assert getattr(found, "is_inductor", None) is is_inductor


def definition(backend, uses_index):
    def with_index(index, x):
        return (x + index,)

    def without(x):
        return (x * 2,)

    graph = symbolic_trace(with_index if uses_index else without)
    kinds = (((2,), torch.float32),)
    return Definition(1, "f", graph, uses_index, (0, 1), kinds, kinds, backend)


def test_functions_that_send_count_as_collectives():
    graph = torch.fx.Graph()
    part = graph.placeholder("part")
    arguments = (part, "sum", 2, group_name((0, 1)), None)
    graph.output((graph.call_function(combined, arguments),))
    kinds = (((2,), torch.float32),)
    module = torch.fx.GraphModule({}, graph)
    assert communicates(Definition(1, "sum", module, False, (0, 1), kinds, kinds, EAGER))
    assert not communicates(definition(EAGER, False))


@pytest.mark.parametrize(
    "chosen",
    [EAGER, INDUCTOR, Backend("aot_eager"), Backend("mine", backend)],
    ids=lambda b: b.name,
)
@pytest.mark.parametrize("uses_index", [False, True])
def test_runners_take_blocks(chosen, uses_index):
    run = compile_definition(definition(chosen, uses_index), torch.tensor(3))
    (out,) = run([torch.ones(2)])
    assert out.tolist() == ([4.0, 4.0] if uses_index else [2.0, 2.0])


def test_backends_get_examples_mode_and_options():
    compile_definition(definition(Backend("mine", backend, "fast"), True), torch.tensor(3))
    (index, example), extra = backend.seen
    assert index == 3
    assert (example.shape, example.dtype) == ((2,), torch.float32)
    assert extra == {"mode": "fast"}
    chosen = Backend("mine", backend, None, (("a", 1),))
    compile_definition(definition(chosen, False), torch.tensor(3))
    assert backend.seen[1] == {"options": {"a": 1}}
    unknown = Backend("inductor", None, None, (("no_such_option", 1),))
    with pytest.raises(AttributeError, match="no_such_option"):
        compile_definition(definition(unknown, False), torch.tensor(0))


def test_dynamo_may_be_half_imported_by_another_thread(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", types.ModuleType("half"))
    _, report = compile_and_report(definition(EAGER, False), torch.tensor(3))
    assert report.cache == "unused"


def printing(word):
    def step(x):
        torch.ops.torchpmap.debug_print(word + " \0" + "0\0", [""], [], [], [], [x])
        return (x.sin() * 3,)

    graph = make_fx(step)(torch.ones(2))
    kinds = (((2,), torch.float32),)
    return Definition(1, "f", graph, False, (0,), kinds, kinds, INDUCTOR)


@pytest.mark.inductor
def test_what_prints_is_cached_by_what_it_prints(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    index, x = torch.tensor(0), torch.ones(2)
    words = "one", "one", "two", "one", "two"
    definitions = list(map(printing, words))
    capsys.readouterr()
    said = []
    for word, plan in zip(words, definitions, strict=True):
        run, report = compile_and_report(plan, index)
        said.append(report.cache)
        (y,) = run([x])
        assert torch.equal(y, x.sin() * 3)
        assert capsys.readouterr().out == f"{word} {x}\n"
    assert said == ["miss", "hit", "miss", "hit", "hit"]


@pytest.mark.inductor
def test_a_graph_that_cannot_be_cached_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "_CACHED", {})
    for _ in range(2):
        _, report = compile_and_report(printing("none"), torch.tensor(0))
        assert report.cache == "bypassed"


WARM = """
import torch, torchpmap as tp
tp.init(num_devices=2, device_type="cpu")
def f(x):
    tp.debug.print("row {}", x.sum(), ordered=True)
    return tp.scan(lambda c, x: (tp.debug.print("c {}", c) or c + x, None), x[0], x)[0]
print(tp.pmap(f, "i")(torch.arange(6.0).reshape(2, 3)).tolist())
"""


@pytest.mark.inductor
@pytest.mark.timeout(400)
@pytest.mark.cpu_only("Triton has a cache of its own")
def test_the_next_process_and_all_workers_load_what_the_first_has_compiled(tmp_path):
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCH_LOGS": "+torch._inductor.codecache",
        "TORCHPMAP_LOG_COMPILES": "1",
        "TORCHPMAP_WARM": "0",
    }
    said = []
    for _ in range(2):
        log = run_program("-c", WARM, limit_s=200, **settings).stderr
        assert "Bypassing" not in log
        said.append(re.findall(r"in the worker, cache (\w+)", log))
        others = [each for each in log.splitlines() if each.startswith("[cpu:1]")]
        assert not any("cache miss" in each for each in others)
    assert said == [["miss"], ["hit"]]


def test_the_compiler_is_looked_for_where_inductor_looks(monkeypatch):
    from torch._inductor import config

    looked = []
    monkeypatch.setattr("shutil.which", lambda name: looked.append(name))
    with config.patch({"cpp.cxx": ("mine", None, "g++")}):
        assert not cpp_compiler()
        assert looked == ["mine", "g++"]
    with config.patch({"cpp.cxx": "only"}):
        assert not cpp_compiler()
        assert looked[-1] == "only"
        monkeypatch.setattr("shutil.which", lambda name: name if name == "only" else None)
        assert cpp_compiler()


@pytest.mark.parametrize(
    ("there", "named", "found"),
    [
        ("gcc", None, True),
        ("clang", None, True),
        ("g++", None, False),
        ("gcc", "mine", False),  # Triton takes the one that is named, or fails
        ("mine", "mine", True),
    ],
)
def test_an_accelerator_needs_a_c_compiler(monkeypatch, there, named, found):
    """Without one, graphs run as they are."""
    monkeypatch.setattr(lower, "_missing_compiler_warned", False)
    monkeypatch.delenv("CC", raising=False)
    if named is not None:
        monkeypatch.setenv("CC", named)
    monkeypatch.setattr("shutil.which", lambda name: name if name == there else None)
    warns = nullcontext() if found else pytest.warns(UserWarning, match=r"no C compiler was found")
    with warns:
        assert lower._usable(INDUCTOR, (Device(0, "cuda"),)) == (INDUCTOR if found else EAGER)
    missing = missing_compiler("cuda")
    assert missing is None if found else missing.startswith("C compiler was found (gcc")


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what Inductor imports
@pytest.mark.skipif(not cpp_compiler(), reason="no C++ compiler")
def test_compiling_takes_no_memory_for_inputs():
    graph = make_fx(lambda x: (x + 1,))(torch.empty(2))
    kinds = (((1 << 50,), torch.float32),)  # 4 PiB
    runner = compile_definition(
        Definition(1, "f", graph, False, (0,), kinds, kinds), torch.zeros((), dtype=torch.int64)
    )
    assert callable(runner)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where Inductor's folder would be."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    return tmp_path / "torchinductor_me"


def mode(path):
    return path.stat().st_mode & 0o777


def test_compiled_code_is_the_users_alone(temporary, tmp_path, monkeypatch):
    make_cache_private.__wrapped__()
    assert mode(temporary) == 0o700
    temporary.chmod(0o777)
    make_cache_private.__wrapped__()
    assert mode(temporary) == 0o700
    temporary.rmdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # one that was chosen
    before = mode(tmp_path)
    make_cache_private.__wrapped__()
    assert (mode(tmp_path), temporary.exists()) == (before, False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("linked", [False, True])
def test_compiled_code_of_another_user_is_refused(temporary, tmp_path, linked):
    folder = tmp_path / "theirs" if linked else temporary
    folder.mkdir(0o777)
    os.chown(folder, 65534, 65534)
    if linked:
        temporary.symlink_to(folder)
    with pytest.raises(tp.PmapError, match=r"torchinductor_me, where .* belongs to another user"):
        make_cache_private.__wrapped__()
