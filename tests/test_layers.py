"""Covers: the order of the modules, the public names, and the sizes of files and functions."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import torchpmap as tp

PACKAGE = Path(tp.__file__).parent

# A module imports only modules above it.
MODULES = """
_transforms _plan _sharded _sharded.rules _runtime.groups _runtime.local _runtime.torchrun _trace
_collectives _layout _base _base.imports _base.untraced _base.sources _base.deadline _base.ending
_base.errors _base.ambient _base.config _base.data _runtime.torchrun.launcher _runtime.inline_mode
_base.pytree _base.axis_spec _base.devices _layout.mesh _layout.layout _layout.axis_stack
_layout.grid _collectives.backend _collectives.primitives _collectives.groups _collectives.operands
_collectives.reduce _collectives.exchange _collectives.permute _collectives.ragged
_collectives.queries _trace.effects _trace.agreement _transforms.grad _transforms.vmap
_base.contents _trace.escaped _trace.kinds random._threefry random._keys random._continuous
random._integers random._choices random random._streams _transforms.retraces _trace.replication
_trace.partition _trace.environment _trace.custom_ops _trace.remat _trace.transform_rules
_trace.capture _trace.trace _trace.program _trace.pickling _trace.compile _transforms.arguments
_runtime.groups.shared_memory _runtime.groups.shared_memory_group _runtime.groups.process_groups
_runtime.wire _runtime _runtime.base _runtime.local.reentry _runtime.local.supervise
_runtime.local.vigil _runtime.local.losses _runtime.local.progress _runtime.local.outbox
_runtime.local.inbox _runtime.local.output _runtime.local.forkserver _runtime.torchrun.agent
_runtime.torchrun.store _runtime.torchrun.joining _runtime.torchrun.rendezvous
_runtime.torchrun.watch _runtime.torchrun.runtime _runtime.local.worker _runtime.local.preload
_runtime.local.process _runtime.local.monitor _runtime.local.crew _runtime.local.lookout
_runtime.local.triage _runtime.local.limits _runtime.local.pool _runtime.local.runtime
_runtime.current _sharded.transfer _sharded.rules.signature _sharded.rules.compute
_sharded.rules.shape _sharded.rules.table _sharded.blocks _sharded.arguments _sharded.graphs
_sharded.operations _sharded.gather_report _sharded.views _sharded.memory _sharded.strides
_sharded.host _sharded.tensor _sharded.device_put _sharded.global_view _plan.plan _plan.uncompiled
_transforms.rows _transforms.inline _plan.lower _plan.derivatives _plan.autograd _transforms.nesting
_transforms.preparation _plan.stages _transforms.pmap optim._checks optim multihost._values
multihost checkpoint._files checkpoint._tree checkpoint._peers checkpoint._pickles checkpoint._table
checkpoint._storage checkpoint._workers checkpoint._values checkpoint._save checkpoint._load
checkpoint debug._check debug._picture debug
"""
ORDER = MODULES.split()

LONG_FILES: set[str] = set()
LONG_FUNCTIONS = {"pmap", "trace"}


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


def test_every_module_has_its_place():
    assert len(ORDER) == len(set(ORDER))
    assert set(ORDER) == set(SOURCES) - {""}


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_upwards(name):
    above = set(ORDER[: ORDER.index(name)])
    assert imports(name) <= above


def test_the_package_imports_only_its_modules():
    assert imports("") <= set(ORDER)


def test_public_names():
    public = {
        name
        for name, value in vars(tp).items()
        if not name.startswith("_") and not isinstance(value, type(sys))
    }
    assert tp.__all__ == sorted(tp.__all__)
    assert set(tp.__all__) == public
    assert tp.P is tp.PartitionSpec
    for name in tp.__all__:
        value = getattr(tp, name)
        if callable(value) and value is not tp.config:
            assert (value.__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize("name", SOURCES)
def test_declared_names_exist(name):
    module = __import__(f"torchpmap.{name}".rstrip("."), fromlist=["x"])
    for exported in getattr(module, "__all__", ()):
        assert hasattr(module, exported)


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
