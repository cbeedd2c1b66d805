"""Operations that users add to torch (``torch.library``), on workers without the users' imports.

A graph or a pickled function that names such an operation is sent with its *source*, by which a
worker learns it::

    torch.library.custom_op in a script, a notebook or a function  its Python functions
    any Python definition in a module that can be imported         the name of the module
    C++, loaded by torch.ops.load_library                          the paths of the libraries
    torch.library.Library, define or impl in a script, a notebook  nothing: it is *hidden*

Torch's dispatcher does not give back the functions of a hidden operation.  A graph contains the
operations that its implementation calls instead (see ``_trace/capture``); a Python function that
uses it is refused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch._library import simple_registry

from torchpmap._base.sources import TORCH
from torchpmap._base.torch_internals import OPDEFS, CustomOpDef, OpOverload, written_names
from torchpmap._base.torch_versions import autocast_dtypes
from torchpmap._trace.environment import Environment
from torchpmap._trace.graphs import all_nodes

NATIVE = frozenset(
    {"aten", "prims", "prim", "profiler", "_c10d_functional", "torchpmap", "torchpmap_random"}
)
"""Namespaces of operations that every worker has."""

_REGISTERED = re.compile(r"^(\S+?)(?:\[alias\])?: registered at (.*):\d+", re.MULTILINE)


class HiddenOperation(TypeError):
    """A Python function needs an operation whose own functions torch does not give back."""


@dataclass(frozen=True)
class _Module:
    """A module that defines the operation when it is imported."""

    name: str

    def supply(self, operation: str) -> None:
        try:
            importlib.import_module(self.name)
        except ImportError as error:
            raise ImportError(
                f"the operation {operation} is defined in the module {self.name!r}, which the "
                f"devices cannot import: {error}. Put it on the path before the first use of the "
                "devices, or define the operation with torch.library.custom_op in the script "
                "itself."
            ) from error


@dataclass(frozen=True)
class _Libraries:
    """Shared libraries, one of which may define the operation, and its Python fake function."""

    paths: tuple[str, ...]
    fake: Callable[..., Any] | None

    def supply(self, operation: str) -> None:
        if operation not in _fakes and torch._C._dispatch_has_kernel(operation):
            return
        for path in self.paths:
            if path not in torch.ops.loaded_libraries:
                torch.ops.load_library(path)
        if self.fake is not None:
            if operation not in _fakes:
                torch.library.register_fake(operation, functools.partial(_call_fake, operation))
            _fakes[operation] = self.fake


_fakes: dict[str, Callable[..., Any]] = {}


def _call_fake(operation: str, *args: Any, **kwargs: Any) -> Any:
    return _fakes[operation](*args, **kwargs)


def source(operation: str) -> Any:
    """The source of an operation, picklable; None if a worker needs none.

    Raises ``HiddenOperation`` if a worker needs one and there is none.
    """
    if operation.partition("::")[0] in NATIVE:
        return None
    definition = OPDEFS.get(operation)
    if definition is not None:
        module = _home(definition)
        return definition if module is None else _Module(module)
    places = _places(operation)
    file = places.get("debug", "")
    if not _is_python(file):
        paths = tuple(sorted(torch.ops.loaded_libraries))
        fake = _fake(operation)
        own = fake is not None and not fake.source.startswith(TORCH)
        return _Libraries(paths, fake.func if own else None) if paths else None
    module = _module_of(operation, file)
    if module is None:
        raise HiddenOperation(
            f"the operation {operation} cannot be sent to the devices: torch.library.Library, "
            "define and impl do not keep its Python functions. Define it with "
            "torch.library.custom_op, or in a module of its own that can be imported."
        )
    return _Module(module)


def mentioned(names: set[str]) -> list[tuple[str, Any]]:
    """(operation, source) of the operations whose namespace and name are among ``names`` (what the
    code of a function mentions: ``torch.ops.<namespace>.<name>``).
    """
    found: list[tuple[str, Any]] = []
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, name = qualified.partition("::")
        if namespace in names and name.partition(".")[0] in names:
            kind = source(qualified)
            found += [] if kind is None else [(qualified, kind)]
    return found


# -- where an operation comes from -----------------------------------------------------------------


def _home(definition: CustomOpDef) -> str | None:
    """The module whose import makes this definition; None if no import is sure to make it."""
    function = definition._init_fn
    name = function.__module__
    inside = "<locals>" in getattr(function, "__qualname__", "<locals>")
    return None if inside or not _is_importable(name) else name


def _is_importable(name: str | None) -> bool:
    by_value = cloudpickle.list_registry_pickle_by_value()
    module = sys.modules.get(name or "")
    return module not in (None, sys.modules["__main__"]) and name not in by_value


def _places(operation: str) -> dict[str, str]:
    """Dispatch key -> file of the registration; "debug" stands for the schema's."""
    return dict(_REGISTERED.findall(torch._C._dispatch_dump(operation)))


def _is_python(file: str) -> bool:
    return file.endswith(".py") or file.startswith("<")


def _module_of(operation: str, file: str) -> str | None:
    if file == torch.library.__file__:  # define and impl, called as functions
        file = "" if (fake := _fake(operation)) is None else fake.source.rpartition(":")[0]
    for name, module in tuple(sys.modules.items()):
        if getattr(module, "__file__", None) == file and _is_importable(name):
            return name
    return None


def _fake(operation: str) -> Any:
    return simple_registry.singleton.find(operation).fake_impl.kernel


# -- hidden operations -----------------------------------------------------------------------------


def is_hidden(operation: OpOverload) -> bool:
    """Whether only the implementation of an operation, not the operation, can go into a graph."""
    name = operation._schema.name
    if operation.namespace in NATIVE or name in OPDEFS:
        return False
    places = _places(operation.name())
    file = places.pop("debug", "")
    return _is_python(file) and _module_of(name, file) is None


def expand(operation: OpOverload, device: str, args: Any, kwargs: Any) -> Any:
    """Run the Python implementation of a hidden operation, on traced tensors too."""
    if operation._can_decompose():
        return operation.decompose(*args, **kwargs)
    key: str = torch._C._dispatch_key_for_device(device)
    places = _places(operation.name())
    implementation = places.get(key) or places.get("CompositeExplicitAutograd", "")
    if not _is_python(implementation):
        raise TypeError(
            f"the operation {operation.name()} is declared in Python, but has no implementation in "
            f"Python for {device} that could take its place in a graph. Declare it in the module "
            "or library that implements it."
        )
    return operation.redispatch(
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *args, **kwargs
    )


# -- definitions as pickles ------------------------------------------------------------------------


def _fixed(definition: CustomOpDef) -> tuple[Any, ...]:
    """The parts of a definition that are fixed once it is made."""
    name = definition._qualname
    return (
        name,
        definition._schema,
        tuple(tag.name for tag in definition._tags),
        tuple(definition._backend_fns),
        tuple(autocast_dtypes(definition).items()),
        simple_registry.singleton.find(name).effect.effect,
        tuple(_rules(definition)),
    )


def _rules(definition: CustomOpDef) -> dict[str, Callable[..., Any]]:
    rules = {
        "fake": definition._abstract_fn,
        "setup_context": definition._setup_context_fn,
        "backward": definition._backward_fn,
        "vmap": definition._vmap_fn,
    }
    return {name: function for name, function in rules.items() if function is not None}


def _kernels(definition: CustomOpDef) -> dict[str | None, Callable[..., Any]]:
    """The user's functions by device type; torch 2.13 wraps them, and offers no way back."""
    kernels = {}
    for device, wrapped in definition._backend_fns.items():
        inner: Any = inspect.unwrap(wrapped)
        cells = dict(zip(inner.__code__.co_freevars, inner.__closure__, strict=True))
        kernels[device] = cells["fn"].cell_contents
    return kernels


def reduced(definition: CustomOpDef) -> tuple[Any, ...]:
    """The pickle of a definition: made first, then filled with its functions, which may use it."""
    functions = _kernels(definition), _rules(definition)
    module = definition._init_fn.__module__
    home = module if _is_importable(module) else None
    return _make, (_fixed(definition), home), functions, None, None, _fill


_made: dict[str, CustomOpDef] = {}  # torch itself keeps only weak references


def _make(fixed: tuple[Any, ...], home: str | None) -> CustomOpDef:
    """Return the worker's definition; make it if there is none."""
    if home is not None:  # if its functions imported it later, it would replace what is made here
        with contextlib.suppress(ImportError):
            importlib.import_module(home)
    name, schema, tags, devices, autocast, effect, _ = fixed
    earlier = OPDEFS.get(name)
    if earlier is not None and _fixed(earlier) == fixed:
        return earlier
    arguments = torch._C.parse_schema(f"{name}{schema}").arguments
    definition = torch.library.custom_op(
        name,
        _unfilled,
        mutates_args=set(written_names(arguments)),
        device_types=next(iter(devices), None),
        schema=schema,
        tags=tuple(getattr(torch.Tag, tag) for tag in tags),
    )
    for device, dtype in autocast:
        definition.register_autocast(device, dtype)
    if effect is not None:
        definition.register_effect(effect)
    _made[name] = definition
    return definition


def _unfilled(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the operation was called before its functions had arrived")


def _fill(
    definition: CustomOpDef,
    functions: tuple[dict[str | None, Callable[..., Any]], dict[str, Callable[..., Any]]],
) -> None:
    kernels, rules = functions
    for device, kernel in kernels.items():
        definition.register_kernel(device)(kernel)
    if "fake" in rules:
        definition.register_fake(rules["fake"])
    if "backward" in rules:
        backward, setup_context = rules["backward"], rules.get("setup_context")
        definition.register_autograd(backward, setup_context=setup_context)
    if "vmap" in rules:
        definition.register_vmap(rules["vmap"])


# -- what was sent may change ----------------------------------------------------------------------


class Implementations:
    """The Python functions that travel with the operations of a graph, watched for changes."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        targets = {node.target for node in all_nodes(graph)}
        sent = any(_travels(x._schema.name) for x in targets if isinstance(x, OpOverload))
        # all of them: one may use another
        names = [name for name in tuple(OPDEFS) if _travels(name)] if sent else []
        self._functions = {name: _functions(name) for name in names}
        self._environments = [Environment(f) for fs in self._functions.values() for f in fs]
        for environment in self._environments:
            environment.refresh()

    def tensors(self) -> list[torch.Tensor]:
        """Tensors that the functions read from outside, of which the workers have copies."""
        return [tensor for environment in self._environments for tensor in environment.tensors()]

    def __bool__(self) -> bool:
        return bool(self._functions)

    def changed(self) -> bool:
        return any(_functions(name) != was for name, was in self._functions.items()) or any(
            environment.changed() for environment in self._environments
        )


def _travels(name: str) -> bool:
    definition = None if name.startswith("aten::") else OPDEFS.get(name)
    return definition is not None and _home(definition) is None


def _functions(name: str) -> tuple[Callable[..., Any], ...]:
    definition = OPDEFS.get(name)
    if definition is None:
        return ()
    return (*_kernels(definition).values(), *_rules(definition).values())
