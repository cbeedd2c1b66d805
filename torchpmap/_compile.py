"""Graph -> function that runs on one device.

``compile=`` speaks ``torch.compile``'s vocabulary: Inductor with a mode and options, ``"eager"``
(the traced graph as it is), any registered backend name, or a callable that takes ``(graph_module,
example_inputs)``.

Inductor's code is shared between the workers of a host through its own caches: the first worker
compiles, the others find every artifact there and load it in milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchpmap import _threefry
from torchpmap._imports import uncollected

__all__ = [
    "Backend",
    "Definition",
    "Runner",
    "compile_definition",
    "have_cpp_compiler",
    "parse_compile",
]

Runner = Callable[..., Sequence[torch.Tensor]]

# a plan's inputs have the sizes it was compiled for: checking each of them again costs 0.4 us per
# leaf and call
_PATCHES = {"size_asserts": False, "alignment_asserts": False}

_KEYS = ("backend", "mode", "options")
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Backend:
    """What turns a graph into code; hashable, part of the plan's key."""

    name: str
    function: Callable[..., Any] | None = None
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_inductor(self) -> bool:
        return self.name == "inductor" and self.function is None


INDUCTOR = Backend("inductor")
EAGER = Backend("eager")


@dataclass(frozen=True)
class Definition:
    """What a worker must know to run a plan: travels once."""

    plan_id: int
    name: str
    graph: torch.fx.GraphModule
    uses_index: bool
    ranks: tuple[int, ...]
    """In axis order: a rank's place here is its axis index."""
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    backend: Backend = field(default=INDUCTOR)


def parse_compile(value: Any) -> Backend | None:
    """``compile=`` -> backend; ``None`` means: run the Python function itself."""
    if value is True:
        return INDUCTOR
    if value is False:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(
            f"compile must be True, False or a dict with the keys {', '.join(_KEYS)} (as "
            f"torch.compile's arguments), but got {value!r}."
        )
    unknown = sorted(set(value) - set(_KEYS))
    if unknown:
        raise ValueError(
            f"compile got the unknown key {unknown[0]!r}; known keys are {', '.join(_KEYS)}."
        )
    backend, mode, options = (
        value.get("backend", "inductor"),
        value.get("mode"),
        value.get("options") or {},
    )
    if mode is not None and options:
        raise ValueError("compile: give either mode or options, not both (as in torch.compile).")
    if mode is not None and mode not in _MODES:
        raise ValueError(f"compile got mode={mode!r}; known modes are {', '.join(_MODES)}.")
    frozen = tuple(sorted(options.items()))
    if callable(backend):
        return Backend(getattr(backend, "__name__", repr(backend)), backend, mode, frozen)
    if not isinstance(backend, str):
        raise TypeError(f"compile: backend must be a name or a callable, but got {backend!r}.")
    if backend not in ("inductor", "eager"):
        _check_registered(backend)
    return Backend(backend, None, mode, frozen)


def _check_registered(name: str) -> None:
    from torch._dynamo.backends.registry import list_backends

    known = list_backends(exclude_tags=())
    if name not in known:
        raise ValueError(
            f"compile got the unknown backend {name!r}; registered backends are {', '.join(known)}."
        )


def have_cpp_compiler() -> bool:
    """Whether Inductor can build its CPU kernels here (its own choice of compiler: ``CXX``,
    ``g++``, ``clang++``).
    """
    from torch._inductor import config

    candidates = config.cpp.cxx if isinstance(config.cpp.cxx, list | tuple) else (config.cpp.cxx,)
    return any(shutil.which(candidate) for candidate in candidates if candidate)


def compile_definition(definition: Definition, index: torch.Tensor) -> Runner:
    """The runner of a definition on this device: block tensors in, block tensors out."""
    leading = (index,) if definition.uses_index else ()
    with warnings.catch_warnings():  # under python -W error, torch's own deprecations would end it
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled = _compile(definition, leading, index.device)
    if _needs_no_autograd(definition):

        def run(*blocks: torch.Tensor) -> Sequence[torch.Tensor]:
            with torch._C._AutoDispatchBelowAutograd():
                return compiled(*leading, *blocks)

        return run
    return functools.partial(compiled, *leading) if leading else compiled


def _needs_no_autograd(definition: Definition) -> bool:
    """Whether a plan has collectives, whose way through autograd (Python, in torch 2.13) takes as
    long as a small one itself, and no code of the user's, which may ask for derivatives.
    """
    names = {
        node.target.namespace
        for node in definition.graph.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    }
    return (
        definition.backend in (INDUCTOR, EAGER)
        and "_c10d_functional" in names
        and names <= {"_c10d_functional", "aten", "prims"}
    )


def _compile(
    definition: Definition, leading: tuple[torch.Tensor, ...], device: torch.device
) -> Runner:
    graph, backend = definition.graph, definition.backend
    if backend == EAGER:
        return graph.forward
    examples: list[Any] = [
        *leading,
        *(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in definition.inputs),
    ]
    if backend.is_inductor:
        return _inductor(graph, examples, backend)
    function = backend.function
    if function is None:
        from torch._dynamo.backends.registry import lookup_backend

        function = lookup_backend(backend.name)
    extra: dict[str, Any] = {}
    if backend.mode is not None:
        extra["mode"] = backend.mode
    if backend.options:
        extra["options"] = dict(backend.options)
    return function(graph, examples, **extra)


def _inductor(graph: torch.fx.GraphModule, examples: list[Any], backend: Backend) -> Runner:
    with uncollected():
        import torch._inductor.compile_fx  # standalone_compile would
        from torch._inductor import list_mode_options, standalone_compile
        from torch._inductor.decomposition import decompositions

    decompositions.update(_threefry.decompositions())
    patches: dict[str, Any] = dict(_PATCHES)
    if all(example.device.type == "cpu" for example in examples):
        # threads that wait for g++: this worker compiles, and the others wait for what it builds
        patches["compile_threads"] = min(8, len(os.sched_getaffinity(0)))
        # Inductor would ask the C++ compiler four times (6 s) for vector instructions that
        # /proc/cpuinfo tells already
        if torch._inductor.config.cpp.vec_isa_ok is None:
            patches["cpp.vec_isa_ok"] = True
    if backend.mode is not None:
        patches |= list_mode_options(backend.mode, dynamic=False)
    patches |= dict(backend.options)
    with _without_artifact_warning():
        return standalone_compile(
            graph,
            examples,
            dynamic_shapes="from_example_inputs",
            options={"config_patches": patches},
        )


@contextlib.contextmanager
def _without_artifact_warning() -> Iterator[None]:
    """Graphs that print are not cached by torch 2.13, which says so for every one of them."""
    log = logging.getLogger("torch._inductor.standalone_compile")

    def keep(record: logging.LogRecord) -> bool:
        return "artifact generation failed" not in record.getMessage()

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)
