"""Covers: the layers of the folders, the public names, private parts of torch, sizes of files."""

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import torchpmap as tp
from torchpmap import _api

PACKAGE = Path(tp.__file__).parent

MAP = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| `(\w+)` \|.*\| `(\w+)` \|$", MAP, re.MULTILINE)
LAYERS = {folder: int(layer) for layer, folder, _ in ROWS}
"""Of each folder, as CONTRIBUTING.md says."""

INTERNALS = "_base/torch_internals"
NEAR_TORCH = {
    "_base/ambient": "the list of torch's settings: a getter and a setter of each",
    "_base/pytree": "torch.utils._pytree",
    "_base/torch_groups": "process groups and their back ends",
    "_base/torch_versions": "what differs between versions",
    "_collectives/backend": "torch.ops._c10d_functional",
    "_trace/boxed": "code of fx and of Inductor that takes a list of arguments",
    "_trace/compile": "Inductor and Dynamo's back ends, imported when a graph is compiled",
    "_trace/custom_ops": "questions to the dispatcher that nothing else asks",
    "_trace/inductor_gaps": "Inductor's passes, where its code would be wrong",
    "_trace/promises": "the keys of the dispatcher around an operation of the user",
    "_trace/replay": "what Inductor's code of a graph calls",
    "_trace/toolchain": "Inductor's choice of a compiler and of a folder",
    "_trace/trace": "what tracing sets in Dynamo, imported at the first trace",
}
"""Files that name private parts of torch, besides ``INTERNALS``, whose docstring lists them too."""

LONG_FILES: set[str] = set()
LONG_FUNCTIONS = {"pmap", "shard_map", "trace"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(name: str) -> set[str]:
    """Modules of the package that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {f"torchpmap.{other}" for other in SOURCES}
            found |= (inner & modules) or {node.module}
    return {
        module.removeprefix("torchpmap").removeprefix(".")
        for module in found
        if module.split(".")[0] == "torchpmap"
    }


def folder_of(name: str) -> str:
    folder = name.partition(".")[0]
    return folder if folder in LAYERS else "__init__"


def test_the_map_names_the_folders():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders | {"__init__"} == set(LAYERS)
    assert max(LAYERS.values()) <= 11
    for _, folder, first in ROWS:
        assert (PACKAGE / folder.removeprefix("__init__") / f"{first}.py").exists()


def test_a_folder_imports_lower_layers():
    upward = {
        (name, other)
        for name in SOURCES
        for other in imports(name)
        if folder_of(other) != folder_of(name)
        if LAYERS[folder_of(other)] >= LAYERS[folder_of(name)]
    }
    assert upward == set()


def test_files_import_one_way():
    order = graphlib.TopologicalSorter({name: imports(name) for name in SOURCES})
    order.prepare()  # raises CycleError, with the circle


def private_parts_of_torch(path: Path) -> set[str]:
    """Those that a file imports, or reaches by attributes of what it imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    origins, found = {}, set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found |= {prefix + alias.name for alias in node.names}
            for alias in node.names:
                name = alias.name if prefix or alias.asname else alias.name.partition(".")[0]
                origins[alias.asname or name] = prefix + name
    for attribute in (ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)):
        start, _, rest = attribute.partition(".")
        found.add(f"{origins.get(start, '')}.{rest}")
    private = re.compile(r"functorch\b.*|torch\.(?!ops\.(?!_c10d))([\w.]+\.)?_(?!_)[\w.]+")
    return {name for name in found if private.fullmatch(name)}


def test_few_files_name_private_parts_of_torch():
    paths = {str(path.relative_to(PACKAGE).with_suffix("")): path for path in SOURCES.values()}
    found = {name: parts for name, path in paths.items() if (parts := private_parts_of_torch(path))}
    assert {name: found[name] for name in found.keys() - NEAR_TORCH.keys() - {INTERNALS}} == {}
    assert NEAR_TORCH.keys() - found.keys() == set()
    listed = re.findall(
        r"^    (\S+)  +\S", ast.get_docstring(ast.parse(paths[INTERNALS].read_text())), re.M
    )
    assert listed == sorted(NEAR_TORCH)


def test_public_names():
    public = {
        name
        for name, value in vars(_api).items()
        if not name.startswith("_") and not isinstance(value, type(sys))
    }
    assert tp.__all__ == sorted(tp.__all__)
    assert set(tp.__all__) == public
    assert set(dir(tp)) - public == {*tp._MODULES, "__version__"}
    assert tp.P is tp.PartitionSpec
    for name in tp.__all__:
        value = getattr(tp, name)
        if callable(value) and value is not tp.config:
            assert (value.__doc__ or "").strip(), f"{name} has no docstring"


IMPORTING = """
import sys, torchpmap as tp
def loaded():
    return {name.split(".")[1] for name in sys.modules if name.startswith("torchpmap.")}
seen = [loaded(), "torch" in sys.modules]
import pickle, torch
pickle.dumps(torch.contiguous_format)  # looks for it in every module
seen.append("torchpmap._api" in sys.modules)
tp.pmap, tp.random
print([*seen, sorted(loaded() & {*tp._MODULES}), "torch._dynamo" in sys.modules])
try:
    tp.nothing
except AttributeError as error:
    print(error)
"""


def test_importing_the_package_imports_nothing():
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "[set(), False, False, ['profiler', 'random'], False]",
        "module 'torchpmap' has no attribute 'nothing'",
    ], done.stderr


def test_declared_names_exist():
    for name in SOURCES:
        module = importlib.import_module(f"torchpmap.{name}".rstrip("."))
        for exported in getattr(module, "__all__", ()):
            assert hasattr(module, exported), (name, exported)


def test_files_are_short():
    long = {p.name for p in SOURCES.values() if len(p.read_text().splitlines()) > 500}
    assert long == LONG_FILES


def test_functions_are_short():
    long = {
        node.name
        for path in SOURCES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    }
    assert long == LONG_FUNCTIONS


def test_sources_are_ascii():
    for path in (*SOURCES.values(), *Path(__file__).parent.rglob("*.py")):
        assert path.read_text().isascii(), path
