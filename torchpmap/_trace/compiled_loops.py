"""Scans in compiled code: each body is compiled by itself, and run row by row.

Inductor (torch 2.13) turns a scan into a ``while_loop``.  A step of that takes some 35 us: it
computes a predicate and reads it, and makes the views and buffers of the step one by one.  Here C++
repeats the kernels of the body (_trace/replay); if it cannot, Python calls the body's code, which
takes some 10 us.

    scan(body, [c], [xs], (w,))    ->    torchpmap.scan(0, "digest", [c], [xs], [w])

The operation finds the body by its number among the loops of the code that is running.  Inductor
caches the code around it by its text, so the digest says which body this is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from torchpmap._base.context import assigned
from torchpmap._base.platform import Boxed
from torchpmap._base.pytree import tree_leaves
from torchpmap._base.storages import apart
from torchpmap._base.torch_internals import FakeTensor, FakeTensorMode, keep_in_order
from torchpmap._trace.chunks import calls_libraries, repeated, steps_at_once
from torchpmap._trace.graphs import (
    SCAN,
    all_modules,
    all_nodes,
    copied_whole,
    drop_dead,
    has_effects,
    kind_of_node,
)
from torchpmap._trace.replay import Replay, calls_only_kernels, replay_of

Tensors = Sequence[torch.Tensor]
Compile = Callable[[GraphModule, Tensors, int], Boxed]
"""(a graph, fake inputs, how many results it has) -> its code"""


@dataclass
class Loop:
    """The body of a scan."""

    graph: GraphModule
    init: Tensors
    """Fake ones, as all tensors here."""
    xs: Tensors
    reads: Tensors
    results: Tensors
    """The next carry, then a row of each output."""
    compiled: Boxed | None = None
    """Code of a step; None if all steps are part of chunks."""
    size: int = 1
    chunk: Boxed | None = None
    """Code of ``size`` steps, for a body of short steps that C++ does not repeat."""
    replay: Replay | None = None
    is_noted: bool = False
    """Whether ``replay`` is known."""

    def compile(self, compile_body: Compile, *, in_chunks: bool) -> None:
        body, count, length = self.graph.graph, len(self.results), len(self.xs[0])
        size = steps_at_once(length, body) if in_chunks else 1
        may_repeat = self.xs[0].device.type == "cpu" and not calls_libraries(body)
        if size == 1 or length % size or may_repeat:
            self.compiled = compile_body(self.graph, self._inputs(0), count)
        if size > 1 and not calls_only_kernels(self.compiled):
            steps = repeated(self.graph, body, len(self.init), len(self.xs), size)
            self.size, self.chunk = size, compile_body(steps, self._inputs(slice(size)), count)

    def _inputs(self, rows: int | slice) -> list[torch.Tensor]:
        return [*self.init, *(x[rows] for x in self.xs), *self.reads]


_running: ContextVar[Sequence[Loop]] = ContextVar("torchpmap_running_loops", default=())


def with_compiled_loops(
    graph: GraphModule,
    mode: FakeTensorMode,
    inputs: Tensors,
    compile_body: Compile,
    *,
    in_chunks: bool = False,
) -> tuple[GraphModule, list[Loop]]:
    """A graph whose scans are operations on compiled bodies, and these.

    Args:
        graph: any graph; it stays as it is.
        mode: of the fake tensors.
        inputs: fake ones of the graph.
        compile_body: compiles the body of a scan.
        in_chunks: whether it makes kernels, which C++ may repeat.  If it cannot, Python runs
            several steps at once (_trace/chunks).
    """
    if not has_scans(graph):
        return graph, []
    changed = copied_whole(graph)
    loops: list[Loop] = []
    _Changes(changed, mode, loops).change(inputs)
    for loop in loops:
        loop.compile(compile_body, in_chunks=in_chunks)
    return changed, loops


def with_loops(loops: Sequence[Loop]) -> AbstractContextManager[None]:
    """Let the operation find these loops in the block."""
    return assigned(_running, loops)


def running_with(compiled: Boxed, loops: Sequence[Loop]) -> Boxed:
    """Code that finds its loops."""

    def run(blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        token = _running.set(loops)
        try:
            return compiled(blocks)
        finally:
            _running.reset(token)

    return run if loops else compiled


def has_scans(graph: GraphModule) -> bool:
    return any(kind_of_node(node) == SCAN for node in all_nodes(graph))


class _Changes(Interpreter):
    """Changes a graph while it runs on fake tensors, which tells what the bodies of scans get."""

    def __init__(self, graph: GraphModule, mode: FakeTensorMode, loops: list[Loop]) -> None:
        super().__init__(graph)
        self._graph = graph
        self._mode = mode
        self._loops = loops

    def change(self, inputs: Tensors) -> None:
        with self._mode, with_loops(self._loops):
            self.run(*inputs)
        drop_dead(self._graph.graph)
        self._graph.recompile()

    def run_node(self, n: Node) -> Any:
        args: Any = self.fetch_args_kwargs_from_env(n)[0]
        if kind_of_node(n) == SCAN:
            return self._changed(n, *args)
        if kind_of_node(n):  # a branch or another loop: its graphs get the operands after them
            operands = [x for group in args if isinstance(group, list | tuple) for x in group]
            for graph in args:
                if isinstance(graph, GraphModule):
                    _Changes(graph, self._mode, self._loops).change(operands)
        found = super().run_node(n)
        for x in tree_leaves(found):
            if isinstance(x, FakeTensor):
                # torch runs an operation on known values, also a collective, in this process alone
                x.constant = None
        return found

    def _changed(self, n: Node, body: GraphModule, init: Any, xs: Any, reads: Any) -> Any:
        given = [*init, *(x[0] for x in xs), *reads]
        results = tuple(body(*given))
        digest = hashlib.sha256(
            repr((_text(body), _kinds(given), _kinds(results))).encode()
        ).hexdigest()
        n.target = _in_order if has_effects(n) else _plain
        n.args = (len(self._loops), digest, *map(list, n.args[1:]))  # type: ignore[arg-type]
        self._loops.append(Loop(body, init, xs, reads, results))
        return _like_results(results, init, xs)


def _text(graph: GraphModule) -> list[str]:
    return [module.code for module in all_modules(graph)]


def _kinds(tensors: Tensors) -> list[Any]:
    return [(tuple(x.shape), x.dtype, x.device.type) for x in tensors]


# -- the operation ---------------------------------------------------------------------------------


def run_scan(number: int, digest: str, init: Tensors, xs: Tensors, reads: Tensors) -> Tensors:
    """The last carry and the stacked outputs."""
    loop = _running.get()[number]
    ys = _outputs(loop.results[len(init) :], xs)
    carry, rows, shared = ([x.contiguous() for x in group] for group in (init, xs, reads))
    if not loop.is_noted and len(xs[0]):
        loop.replay, loop.is_noted = replay_of(loop.compiled, carry, rows, shared), True
    if loop.replay is not None:
        return [*loop.replay.run(len(xs[0]), carry, rows, shared, ys), *ys]
    last, whole = carry, 0
    if loop.chunk is not None:
        whole = len(xs[0]) // loop.size * loop.size
        chunks, parts = ([x[:whole].unflatten(0, (-1, loop.size)) for x in r] for r in (rows, ys))
        last = _run_rows(loop.chunk, last, chunks, shared, parts)
    if loop.compiled is not None:
        rest = [x[whole:] for x in rows], shared, [y[whole:] for y in ys]
        last = _run_rows(loop.compiled, last, *rest)
    # a body returns an input as it is if that is a result; the code around takes it for a copy
    return [*apart(last, [*init, *xs, *reads]), *ys]


def _run_rows(
    body: Boxed, carry: list[torch.Tensor], xs: Tensors, reads: Tensors, ys: Tensors
) -> list[torch.Tensor]:
    """The last carry; writes the rows of ``ys``."""
    places = zip(*(y.unbind(0) for y in ys), strict=True) if ys else repeat(())
    rows = zip(*(x.unbind(0) for x in xs), strict=True)
    for row, place in zip(rows, places, strict=False):
        found = body([*carry, *row, *reads])
        results = found[len(carry) :]
        carry = list(found[: len(carry)])
        for target, value in zip(place, results, strict=True):
            target.copy_(value)
    return carry


def _fake(number: int, digest: str, init: Tensors, xs: Tensors, reads: Tensors) -> Tensors:
    return _like_results(_running.get()[number].results, init, xs)


def _like_results(results: Tensors, init: Tensors, xs: Tensors) -> list[torch.Tensor]:
    # Inductor (torch 2.13) may let an operand of an ordered operation lie otherwise: bytes of four
    # dims that a ``cat`` joins lie by channels
    return [*(x.new_empty(x.shape) for x in init), *_outputs(results[len(init) :], xs)]


def _outputs(rows: Tensors, xs: Tensors) -> list[torch.Tensor]:
    return [xs[0].new_empty((len(xs[0]), *y.shape), dtype=y.dtype) for y in rows]


_library = torch.library.Library("torchpmap", "FRAGMENT")
for _name in ("scan", "scan_in_order"):
    _library.define(
        f"{_name}(int number, str digest, Tensor[] init, Tensor[] xs, Tensor[] reads) -> Tensor[]",
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
    )
    _library.impl(_name, run_scan, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchpmap::{_name}", _fake, lib=_library)
keep_in_order(_library, "torchpmap::scan_in_order")
_plain = torch.ops.torchpmap.scan.default
_in_order = torch.ops.torchpmap.scan_in_order.default
"""For bodies that print, or do something else besides computing."""
SCANS = (_plain, _in_order)
