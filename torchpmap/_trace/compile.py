"""Graph -> function that runs on one device.

``compile=`` speaks ``torch.compile``'s vocabulary: Inductor with a mode and options, ``"eager"``
(the traced graph as it is), any registered backend name, or a callable that takes ``(graph_module,
example_inputs)``.

Inductor's code is shared between the workers of a host through its own caches: the first worker
compiles, the others find every artifact there and load it in milliseconds.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchpmap._base.ambient import Ambient, applied, for_graph, running_under
from torchpmap._base.devices import PLATFORMS, usable_cores
from torchpmap._base.imports import uncollected
from torchpmap._base.torch_internals import (
    FakeTensorMode,
    LazyGraphModule,
    OpOverload,
    new_fake,
)
from torchpmap._collectives.backend import DIRECTLY, NAMESPACES
from torchpmap._layout.axis_stack import is_group_name
from torchpmap._trace import saved_code
from torchpmap._trace.boxed import Boxed, boxed_artifact, boxed_body, boxed_call, own_code
from torchpmap._trace.compiled_loops import (
    Loop,
    has_scans,
    running_with,
    with_compiled_loops,
    with_loops,
)
from torchpmap._trace.constants import place
from torchpmap._trace.custom_ops import NATIVE
from torchpmap._trace.graph_code import boxed_code
from torchpmap._trace.graphs import acts, all_nodes, results_of, shows, writes
from torchpmap._trace.inductor_gaps import mending_passes, right_code
from torchpmap._trace.passes import names_in
from torchpmap._trace.toolchain import make_cache_private, quietly
from torchpmap.random import _threefry as _threefry

Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""

# a plan's inputs have the sizes it was compiled for: checking each of them again costs 0.4 us per
# leaf and call
_PATCHES = {"size_asserts": False, "alignment_asserts": False}


def _no_time(node: Any) -> float:
    return 0.0


# launches of collectives as early, waits for them as late as the graph allows: Inductor orders the
# rest for little memory, which would undo what _trace/buckets has done.  These two passes need no
# times, but Inductor would estimate them (torch 2.11 starts nvidia-smi for that).
_OVERLAPPING = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
    "estimate_op_runtime": _no_time,
}

# torch 2.13 does not cache graphs with loops, nor with operations that are kept in order
# (``with_effects``), unless they are listed in a setting; the key of its cache contains the code of
# the graph and of the graphs inside
_CACHED = {
    f"torch.ops.higher_order.{name}": "1" for name in ("scan", "while_loop", "cond", "with_effects")
}

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
    """What a worker must know to run a plan; sent once."""

    plan_id: int
    name: str
    graph: torch.fx.GraphModule
    uses_index: bool
    ranks: tuple[int, ...]
    """In axis order: a rank's place here is its axis index."""
    inputs: tuple[Kind, ...]
    outputs: tuple[Kind, ...]
    """As they were when it was traced."""
    backend: Backend = field(default=INDUCTOR)
    ambient: Ambient = ()
    """The settings of torch with which it was traced."""
    timeout: float | None = None
    """How long a call may take."""
    arguments: str = ""
    """What it takes, as messages name it; empty: ``inputs``."""
    where: str = ""
    """``file:line`` of the user's function; empty if there is none."""
    num_residuals: int = 0
    """How many of its last outputs are for a backward plan."""


class CompileReport(NamedTuple):
    """How a worker compiled a plan."""

    seconds: float
    cache: str
    """What became of Inductor's cache: "hit", "miss" or "unused"; or "bypassed" for a graph that
    cannot be cached, so that every worker compiles it.
    """
    is_saved: bool = False
    """Whether its code runs without Inductor from now on."""


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


def compile_and_report(definition: Definition, index: torch.Tensor) -> tuple[Boxed, CompileReport]:
    """``compile_definition``, and how that went."""
    begin, before, num_saved = time.monotonic(), _cache_counts(), _without_it.total()
    runner = compile_definition(definition, index)
    now = _cache_counts()
    cache = next((said for name, said in _CACHE.items() if now[name] > before[name]), "unused")
    return runner, CompileReport(time.monotonic() - begin, cache, _without_it.total() > num_saved)


_CACHE = {"bypass": "bypassed", "miss": "miss", "hit": "hit"}
"""Name of a count of Inductor's -> what is said of a plan; the first that is true of a part."""


def _cache_counts() -> dict[str, int]:
    """How often Inductor's cache had a graph, had it not, and could not have it."""
    utils = sys.modules.get("torch._dynamo.utils")
    # another thread may be in the middle of importing the module
    counts = getattr(utils, "counters", {}).get("inductor", {})
    return {name: counts.get(f"fxgraph_cache_{name}", 0) + _without_it[name] for name in _CACHE}


_without_it: Counter[str] = Counter()
"""The same of code that runs without Inductor: it was there ("hit"), or is now ("saved")."""


def compile_definition(definition: Definition, index: torch.Tensor) -> Boxed:
    """The runner of a definition on this device: block tensors in, block tensors out."""
    leading = [index] if definition.uses_index else []
    if index.device.type != "cpu":
        place(definition.graph, index.device)
    # under python -W error, torch's own deprecation warnings would raise
    with applied(for_graph(definition.ambient)), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled = _compile(definition, leading, index.device)
    compiled = running_under(definition.ambient, compiled)

    def with_index(blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        blocks.insert(0, index)
        return compiled(blocks)

    def below_autograd(blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        blocks[:0] = leading
        with torch._C._AutoDispatchBelowAutograd():
            return compiled(blocks)

    if _needs_no_autograd(definition):
        return below_autograd
    return with_index if leading else compiled


def _namespaces(graph: torch.fx.GraphModule) -> set[str]:
    targets = {node.target for node in all_nodes(graph)}
    return {target.namespace for target in targets if isinstance(target, OpOverload)}


def communicates(definition: Definition) -> bool:
    """Whether a plan waits for the other processes."""
    # in the graph of an operation on sharded tensors, functions of this package send
    in_functions = any(map(is_group_name, names_in(definition.graph)))
    return in_functions or not _namespaces(definition.graph).isdisjoint(NAMESPACES)


_VIEWS = (torch.ops.aten.squeeze.dim, torch.ops.aten.unsqueeze.default, torch.ops.aten.view.default)


def only_communicates(graph: torch.fx.GraphModule) -> bool:
    """Whether there is nothing to compile: Inductor would only copy the inputs."""
    called = [node.target for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    plain = {target for target in called if target not in _VIEWS}
    return bool(plain) and all(getattr(each, "namespace", "") in NAMESPACES for each in plain)


def has_users_operations(graph: torch.fx.GraphModule) -> bool:
    """Whether a result may differ from its fake, so that Inductor's checks are needed."""
    return not _namespaces(graph) <= NATIVE


def _needs_no_autograd(definition: Definition) -> bool:
    """Whether a plan has collectives, and no code of the user's, which may ask for derivatives.
    Their autograd layer (Python, in torch 2.13) takes as long as a small collective itself.
    """
    names = _namespaces(definition.graph)
    return (
        definition.backend in (INDUCTOR, EAGER)
        and "_c10d_functional" in names
        and names <= {"_c10d_functional", "aten", "prims"}
    )


def _compile(
    definition: Definition, leading: Sequence[torch.Tensor], device: torch.device
) -> Boxed:
    graph, backend = definition.graph, definition.backend
    kinds = [*((index.shape, index.dtype) for index in leading), *definition.inputs]
    if backend == EAGER:
        return _eager(graph, kinds, device)
    if backend.is_inductor:
        if device.type != "cpu":
            return _inductor(graph, kinds, device, backend)
        return _saved(graph, kinds, device, backend, definition.ambient)
    examples = [
        *leading,
        *(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in definition.inputs),
    ]
    return _by_backend(graph, examples, backend)


def _eager(graph: torch.fx.GraphModule, kinds: Sequence[Kind], device: torch.device) -> Boxed:
    def body(graph: torch.fx.GraphModule, inputs: Sequence[Any], num_results: int) -> Boxed:
        graph, loops = with_compiled_loops(graph, mode, inputs, body)
        return running_with(_in_order(graph), loops)

    if not has_scans(graph):
        return _in_order(graph)
    mode, examples = _fakes(kinds, device)
    return body(graph, examples, len(results_of(graph.graph)))


def _fakes(kinds: Sequence[Kind], device: torch.device) -> tuple[FakeTensorMode, list[Any]]:
    """Fake inputs: those of a plan may take half the memory of a device."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    return mode, [new_fake(mode, shape, dtype, device) for shape, dtype in kinds]


def _refuse_effects_inside(graph: torch.fx.GraphModule, backend: Backend) -> None:
    """torch (2.13) loses the effects of a body, or fails."""
    if shows(graph.graph):
        what = "in branches and while loops" if backend.is_inductor else "in loops and branches"
        raise NotImplementedError(
            f"compile: the backend {backend.name!r} cannot print or check {what}. Use "
            "compile={'backend': 'eager'}, or print outside of it."
        )


def _by_backend(graph: torch.fx.GraphModule, examples: list[Any], backend: Backend) -> Boxed:
    _refuse_effects_inside(graph, backend)
    function = backend.function
    if function is None:
        from torch._dynamo.backends.registry import lookup_backend

        function = lookup_backend(backend.name)
    given = {"mode": backend.mode, "options": dict(backend.options)}
    extra = {name: value for name, value in given.items() if value}
    LazyGraphModule.force_recompile(graph)  # a backend may return its ``forward``
    return boxed_call(function(graph, examples, **extra))


# -- strides ---------------------------------------------------------------------------------------

# Stored values are contiguous: graphs are traced with contiguous inputs, and Inductor's code relies
# on it.  If an operand is not contiguous, some results have other strides than in the trace: in
# torch 2.13 those of batch_norm, copysign, mse_loss_backward and more, and perhaps those of an
# operation of the user's.

_PLAIN = {"view", "unsqueeze", "squeeze", "clone", "sum", "mean", "amax", "amin", "full", "mm"}
"""Operations on contiguous tensors that give contiguous ones, besides pointwise ones."""


_COPIES = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}
"""Views -> what copies where the strides allow no view."""


def _keeps_strides(graph: torch.fx.Graph) -> bool:
    """Whether every tensor in a graph is sure to be contiguous, if the inputs are."""
    return all(
        node.op in ("placeholder", "output")
        or (
            isinstance(node.target, OpOverload)
            and (
                node.target.namespace == "_c10d_functional"
                or (
                    node.target.namespace == "aten"
                    and (torch.Tag.pointwise in node.target.tags or node.target._opname in _PLAIN)
                )
            )
        )
        for node in graph.nodes
    )


def _in_order(module: torch.fx.GraphModule) -> Boxed:
    """Run a graph operation by operation.

    Its views are copies where the strides allow no view, unless it writes to a tensor.
    """
    keeps = writes(module.graph) or _keeps_strides(module.graph)
    return boxed_code(module, DIRECTLY if keeps else DIRECTLY | _COPIES)


def _saved(
    graph: torch.fx.GraphModule,
    kinds: Sequence[Kind],
    device: torch.device,
    backend: Backend,
    ambient: Ambient,
) -> Boxed:
    """Inductor's code for a CPU, without Inductor if it was saved before."""
    make_cache_private()
    file = saved_code.file_of(graph, dict(backend.options), kinds, backend.mode, ambient)
    found = None if file is None else saved_code.load(file)
    if found is not None:
        _without_it["hit"] += 1
        return found
    return _inductor(graph, kinds, device, backend, file)


def _inductor(
    graph: torch.fx.GraphModule,
    kinds: Sequence[Kind],
    device: torch.device,
    backend: Backend,
    file: Path | None = None,
) -> Boxed:
    """``file``: where to save the code, if it can run alone."""
    with uncollected():
        import torch._inductor.compile_fx  # standalone_compile would import it
        from torch._inductor import standalone_compile

    make_cache_private()
    _teach_hashes()
    mode, examples = _fakes(kinds, device)

    def artifact(
        graph: torch.fx.GraphModule, inputs: Sequence[Any], loops: Sequence[Loop], **more: Any
    ) -> Any:
        _refuse_effects_inside(graph, backend)
        patches = _patches(graph, device, backend) | more
        with torch._guards.tracing(torch._guards.TracingContext(mode)), with_loops(loops):
            return standalone_compile(
                graph,
                list(inputs),
                dynamic_shapes="from_tracing_context",
                options={"config_patches": patches},
            )

    def body(graph: torch.fx.GraphModule, inputs: Sequence[Any], num_results: int) -> Boxed:
        is_pure = not acts(graph.graph)
        graph, loops = with_compiled_loops(graph, mode, inputs, body, in_chunks=True)
        # a body is a chain of steps: where each value is used twice, Inductor (torch 2.13) would
        # write the whole chain before it into each use, up to 30 operations, and take minutes
        found = artifact(graph, inputs, loops, realize_opcount_threshold=4)
        compiled = boxed_body(found, num_results) if is_pure else boxed_artifact(found)
        return running_with(compiled, loops)

    with quietly(), right_code():
        graph, loops = with_compiled_loops(graph, mode, examples, body, in_chunks=True)
        found = artifact(graph, examples, loops)
    own = None if file is None else own_code(found, len(results_of(graph.graph)))
    if file is not None and own is not None and saved_code.save(file, own):
        _without_it["saved"] += 1
        return saved_code.load(file) or boxed_artifact(found)
    return running_with(boxed_artifact(found), loops)


def _patches(graph: torch.fx.GraphModule, device: torch.device, backend: Backend) -> dict[str, Any]:
    """The settings of Inductor for a graph."""
    from torch._inductor import list_mode_options

    patches: dict[str, Any] = {} if has_users_operations(graph) else dict(_PATCHES)
    patches |= mending_passes()
    # which the passes may change for this graph
    patches["emulate_precision_casts"] = torch._inductor.config.emulate_precision_casts
    # many: they wait for g++ or for Triton's compiler, which runs in processes of its own, and the
    # other workers wait for what this one builds
    patches["compile_threads"] = min(8, usable_cores())
    if device.type == "cpu" and torch._inductor.config.cpp.vec_isa_ok is None:
        # Inductor would run the C++ compiler four times (6 s) to find out which vector instructions
        # the CPU has, but /proc/cpuinfo lists them
        patches["cpp.vec_isa_ok"] = True
    if PLATFORMS[device.type].bucket_bytes is not None:
        patches |= _OVERLAPPING
    known = torch._inductor.config.unsafe_marked_cacheable_functions
    patches["unsafe_marked_cacheable_functions"] = {**known, **_CACHED}
    if backend.mode is not None:
        patches |= list_mode_options(backend.mode, dynamic=False)
    patches |= dict(backend.options)
    if device.type != "cpu":
        # a CUDA graph holds the communicators of its epoch, and nothing here ends its generations
        patches["triton.cudagraphs"] = False
    return patches


def _teach_hashes() -> None:
    """Let Inductor make one kernel of a hash, instead of a call of Python."""
    from torch._inductor import decomposition

    rules = _threefry.decompositions()
    if not rules.keys() <= decomposition.decompositions.keys():
        decomposition.decompositions.update(rules)
        decomposition.fast_random_decomps.cache_clear()  # a copy, made by the first compilation
