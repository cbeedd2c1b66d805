"""Inductor's code for a CPU, saved so that it runs without Inductor, whose import takes seconds.

That code is a module in Python, which calls functions in C++: each is in a library of its own.
What is saved of a graph is the module without what it imports from Inductor, and where the
libraries are.  It lies beside Inductor's own cache, and is trusted as that is.

Nothing is saved of a module that does anything else, or of a graph for which AOTAutograd would do
something around it (writes to inputs, prints in order): these are compiled again, by way of
Inductor's cache.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import hashlib
import json
import operator
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchpmap._base.platform import Boxed
from torchpmap._base.torch_internals import (
    OpOverload,
    is_profiler_on,
    profiled_range,
    tensor_data_pointer,
)
from torchpmap._base.whole_file import write_whole
from torchpmap._trace.custom_ops import NATIVE
from torchpmap._trace.graphs import is_kept, results_of, views_to, written_by
from torchpmap._trace.toolchain import cache_folder, own_cache

_SETTINGS = ("torch._inductor.config", "torch._functorch.config", "torch.compiler.config")
_COMPILERS = ("TORCHINDUCTOR_", "TORCH_COMPILE", "CXX")
_UNRELATED = ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")
_CACHES = {
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0",
    "TORCH_COMPILE_FORCE_DISABLE_CACHES": "0",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT": "1",
}
"""Variables -> the value with which compiled code is kept, as without the variable."""
_PACKAGE = Path(__file__).parents[1]
_OWN = (_PACKAGE / "_base", _PACKAGE / "_trace", _PACKAGE / "random")
_TORCHS = Path(torch.__file__).with_name("_inductor")
"""Folders whose files decide which code is made of a graph."""
_OPERATIONS = NATIVE | {"inductor", "_quantized", "mkldnn", "mkl"}
"""Namespaces of operations that are there without Inductor."""
_KERNELS = "extern_kernels"
"""What Inductor's code calls a namespace of functions, most of which are those of torch."""
_ENTRY = "kernel"
"""The function of a library."""


# -- which code ------------------------------------------------------------------------------------


def file_of(graph: GraphModule, options: Mapping[str, Any], *given: Any) -> Path | None:
    """Where the code of a graph is, or would be; None if none is saved of it.

    ``options``: of Inductor; ``given``: what else the code is made from.
    """
    if not _is_plain(graph) or _is_refused(options) or _variables() != _AT_START:
        return None
    nodes = [(node.name, str(node.target), node.args, node.kwargs) for node in graph.graph.nodes]
    facts = [nodes, options, given, torch.get_num_threads(), *_changed_settings()]
    if not _is_data(facts):
        return None
    return own_cache() / f"{_digest([*map(repr, facts), *_installation(), *_variables()])}.py"


def _digest(facts: Sequence[str], data: bytes = b"") -> str:
    return hashlib.sha256("\n".join(facts).encode() + data).hexdigest()


def _is_data(value: Any) -> bool:
    """Whether the text of a value says all of it: an object of the user's may hide some."""
    if isinstance(value, list | tuple | dict):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return all(map(_is_data, parts))
    if type(value) is slice:
        return _is_data([value.start, value.stop, value.step])
    return type(value) in _DATA


_DATA = {
    *(type(None), bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, Node),
}


def _is_refused(options: Mapping[str, Any]) -> bool:
    """Whether the script wants all to be compiled again."""
    settings = sys.modules.get(_SETTINGS[0])
    return (
        any(os.environ.get(name, kept) != kept for name, kept in _CACHES.items())
        or not options.keys().isdisjoint(("force_disable_caches", "fx_graph_cache"))
        or (settings is not None and settings.force_disable_caches)
        or (settings is not None and not settings.fx_graph_cache)
    )


def _is_plain(graph: GraphModule) -> bool:
    """Whether all that a graph does is to compute tensors, from no constants."""
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    return all(map(_computes, nodes)) and all(
        isinstance(each, Node) for each in results_of(graph.graph)
    )


def _computes(node: Node) -> bool:
    target = node.target
    if target is operator.getitem or node.op != "call_function":
        return target is operator.getitem
    if not isinstance(target, OpOverload) or target.namespace not in NATIVE:
        return False
    if written := written_by(node):  # of an input, AOTAutograd would do it
        return all(views_to(each)[-1].op != "placeholder" for each in written)
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    return is_random or target.namespace == "profiler" or not is_kept(node)


def _changed_settings() -> Iterator[tuple[str, Any]]:
    """A process that lacks a module of settings has changed none."""
    for module in filter(None, map(sys.modules.get, _SETTINGS)):
        for name, value in sorted(module._get_dict(skip_default=True).items()):
            if value != module._config[name].default:
                yield name, value


@functools.cache
def _installation() -> Sequence[str]:
    """What is the same for all code here: of torch's sources the sizes, as they do not change."""
    return [
        f"{torch.__version__} {torch.version.git_version} {sys.version}",
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_processor()}",
        *(f"{name} {_digest([], Path(path).read_bytes())}" for name, path in _modules(*_OWN)),
        *(f"{name} {os.stat(path).st_size}" for name, path in _modules(_TORCHS)),
    ]


def _modules(*folders: Path) -> list[tuple[str, str]]:
    """Each with a name that is the same wherever the package is installed."""
    return sorted(
        (f"{within} {name}", f"{at}/{name}")
        for folder in folders
        for at, _, names in os.walk(folder)
        for within in [os.path.relpath(at, folder.parent)]
        for name in names
        if name.endswith(".py")
    )


def _variables() -> list[str]:
    names = (name for name in sorted(os.environ) if name.startswith(_COMPILERS))
    return [f"{name}={os.environ[name]!r}" for name in names if name not in _UNRELATED]


_AT_START = None if _SETTINGS[0] in sys.modules else _variables()
"""Inductor reads the variables when it is imported, which is later: the process that workers are
forked from may have done it.  If one has changed, what it read is not known, and nothing is saved.
"""


def _processor() -> str:
    """What the compiler is told to use all of (``-march=native``)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    first, _, _ = text.partition("\n\n")
    names = ("model", "flags", "CPU ", "Features")
    return "\n".join(line for line in first.splitlines() if line.startswith(names))


# -- which scripts ---------------------------------------------------------------------------------


def is_expected() -> bool:
    """Whether all code was there, or saved, when this script last ran: a guess of what will be
    needed, which may be wrong.
    """
    found = _mark_of_script()
    with contextlib.suppress(OSError, ValueError):
        return found is not None and found[0].read_text(encoding="utf-8") == found[1]
    return False


def expect(is_saved: bool) -> None:
    """Note for the next run whether the code of a graph of this script is there now."""
    global _noted
    is_all_saved = is_saved and _noted is not False
    found = _mark_of_script()
    if found is not None and is_all_saved is not _noted:
        _write(found[0], found[1] if is_all_saved else "")
    _noted = is_all_saved


_noted: bool | None = None
"""What this process has noted."""


@functools.cache
def _mark_of_script() -> tuple[Path, str] | None:
    """A file for the script, and the text that it has if all code was there; None if the script is
    no file, as in a notebook.
    """
    try:
        path = Path(sys.modules["__main__"].__file__ or "").resolve()
        script = path.read_bytes()
    except Exception:  # of a program that runs Python in it, or of a tool
        return None
    facts = [torch.__version__, *_variables(), repr(os.environ.get("TORCHPMAP_DEVICE_TYPE"))]
    return own_cache() / f"script_{_digest([repr(path)])}", _digest(facts, script)


# -- reading ---------------------------------------------------------------------------------------


def load(file: Path) -> Boxed | None:
    """The code in a file; None if it is not there, or cannot be used any more."""
    try:
        text = file.read_text(encoding="utf-8")
        scope: dict[str, Any] = {_KERNELS: torch}
        for name, path, size in json.loads(text.partition("\n")[0][1:]):
            library = os.path.join(cache_folder(), path)
            # to load a part of one would end the process
            if os.stat(library).st_size != size or not _is_below(path):
                return None
            scope[name] = _function_in(library)
        exec(compile(text, str(file), "exec"), scope)
        return _as_by_inductor(scope["call"], file.stem)
    except Exception:  # another program may have changed it
        return None


def _is_below(path: str) -> bool:
    """Whether a path begins in the folder that it is relative to, and stays there."""
    return not os.path.isabs(path) and os.pardir not in Path(path).parts


@functools.cache
def _function_in(path: str) -> Callable[..., None]:
    """The function of a library that Inductor has built."""
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(tensor_data_pointer)
    name = f"{Path(path).stem}.{_ENTRY}"
    loader = ExtensionFileLoader(name, path)
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    found: Callable[..., None] = getattr(module, _ENTRY)
    return found


def _as_by_inductor(call: Boxed, name: str) -> Boxed:
    """Without gradients, and seen by a profiler, as Inductor and AOTAutograd would run it."""
    shown = f"## Call CompiledFxGraph {name} ##"

    def run(blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not torch.is_grad_enabled() and not is_profiler_on():
            return call(blocks)
        with torch.no_grad(), profiled_range(shown):
            return call(blocks)

    return run


# -- writing ---------------------------------------------------------------------------------------


def save(file: Path, call: Any) -> bool:
    """Save a function that Inductor has made, if all that its module does is known."""
    try:
        found = _Module(getattr(call, "__func__", call).__globals__)
    except (_Unknown, OSError, ValueError, LookupError, AttributeError, SyntaxError):
        return False
    return _write(file, f"#{json.dumps(found.libraries)}\n{found.text}\n")


def _write(file: Path, text: str) -> bool:
    try:
        file.parent.mkdir(exist_ok=True)
        write_whole(file, text)
    except OSError:
        return False
    return True


class _Unknown(Exception):
    """A module has a name that may need Inductor."""


class _Module:
    """A module that Inductor has made: its text, and the library of each function in C++."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.libraries: list[tuple[str, str, int]] = []
        """Name of the function, file in Inductor's folder, and bytes of it."""
        self._scope = scope
        tree = ast.parse(Path(scope["__file__"]).read_text(encoding="utf-8"))
        tree.body = [each for each in tree.body if self._is_kept(each)]
        self._check(tree)
        if not any(map(_makes_call, tree.body)):
            raise _Unknown("call")
        self.text = ast.unparse(tree)

    def _is_kept(self, statement: ast.stmt) -> bool:
        """Whether a statement of the module is needed."""
        if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith("torch._"):
            return False
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            function = ast.unparse(statement.value.func)
            if function == "async_compile.cpp_pybinding":
                name = ast.unparse(statement.targets[0])
                path = _library_of(self._scope[name])
                below = os.path.relpath(os.path.realpath(path), os.path.realpath(cache_folder()))
                if not _is_below(below):
                    raise _Unknown(path)
                self.libraries.append((name, below, os.stat(path).st_size))
            return function not in ("async_compile.cpp_pybinding", "AsyncCompile")
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "None":
            raise _Unknown(ast.unparse(statement))  # Inductor sets it
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.Assign):
            return True
        return isinstance(statement, ast.ClassDef) and statement.name == "Runner"

    def _check(self, tree: ast.Module) -> None:
        """Raises ``_Unknown`` for names that were dropped, and for what only Inductor has."""
        used, bound = set[str](), {*dir(builtins), _KERNELS}
        bound.update(name for name, _, _ in self.libraries)
        for each in ast.walk(tree):
            if isinstance(each, ast.Name):
                (used if isinstance(each.ctx, ast.Load) else bound).add(each.id)
            elif isinstance(each, ast.arg):
                bound.add(each.arg)
            elif isinstance(each, ast.alias | ast.ClassDef | ast.FunctionDef):
                bound.add(getattr(each, "asname", None) or each.name)
            elif isinstance(each, ast.Attribute):
                self._check_attribute(ast.unparse(each.value), each.attr)
        if not used <= bound:
            raise _Unknown(used - bound)

    def _check_attribute(self, owner: str, name: str) -> None:
        if owner == "torch.ops" and name not in _OPERATIONS:
            raise _Unknown(name)
        if owner == _KERNELS and (
            getattr(self._scope[owner], name) is not getattr(torch, name, None)
        ):
            raise _Unknown(name)


def _makes_call(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "call"


def _library_of(function: Any) -> str:
    module = getattr(function, "__self__", None)
    if type(function) is not BuiltinFunctionType or not isinstance(module, ModuleType):
        raise _Unknown(function)
    return str(module.__file__)
