"""``replay``: a recorded call again, in this process, operation by operation."""

from __future__ import annotations

import contextlib
import functools
import os
import pdb
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch.fx import Node

from torchpmap._base.ambient import SETTINGS, applied, callers_modes_off
from torchpmap._base.boundary import boundary
from torchpmap._base.pytree import tree_leaves
from torchpmap._base.torch_internals import outside_modes, outside_transforms
from torchpmap._trace.graphs import all_nodes, placeholders
from torchpmap._trace.repetition import file_and_line, place_of
from torchpmap._transforms.nans import described, holds
from torchpmap.debug._bisect import Compiled, Difference, InDtype, differing, precision_of
from torchpmap.debug._graph_data import decoded
from torchpmap.debug._lockstep import (
    Lockstep,
    Place,
    Step,
    Steps,
    Values,
    has_own_numbers,
    operation_of,
)
from torchpmap.debug._record_file import Recorded, load


class Found(Place):
    """The first operation that made a NaN, and where it is."""

    def __str__(self) -> str:
        is_known = self.line or self.operation.startswith("input ")
        return self.described(
            self.operation + " (traced before record was on: no lines)" * (not is_known)
        )


@dataclass
class Replay:
    """What ``replay`` returns; ``print`` it.

    Attributes:
        call: what was called, as messages name it.
        results: the outputs by name (``"result['loss']"``), whole, as CPU tensors; for a value that
            the ranks hold alike, that of the first rank.  What a jitted function writes follows
            what it returns.  Under a launcher: the rows of the process that wrote the file.
        blocks: per output, the block of each rank.
        first_nan: the first operation that made a NaN, or the input that held one.
        notes: why numbers may not be the same, bit for bit, as those of the recorded call.
        error: of the exception for which the file was written; or empty.
    """

    call: str
    results: dict[str, torch.Tensor]
    blocks: dict[str, list[torch.Tensor]]
    first_nan: Found | None
    notes: list[str]
    error: str
    _recorded: Recorded = field(repr=False)

    def bisect(
        self,
        against: str | os.PathLike[str] | None = None,
        *,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
        tolerance: float | None = None,
    ) -> Difference | None:
        """Return the first operation where this run and another one differ; None if none does.

        Args:
            against: the file of another call of the same function.
            dtype: run again with floating-point numbers of this dtype, ``torch.float64``.
            backend: run again with all operations between two collectives compiled by this backend
                of ``torch.compile``, ``"inductor"``.
            tolerance: the largest difference of two numbers, as a part of the largest number in
                the tensor, or of 0.001 if that is less; default: 0 against a file, else 0.001, or
                four times the precision of ``dtype`` if that is more.

        Raises:
            ValueError: not exactly one of the three is given, or the graphs are different ones.
            NotImplementedError: a compiled operation would write to memory that others share.
        """
        given = [each is not None for each in (against, dtype, backend)]
        if sum(given) != 1:
            raise ValueError("bisect takes one of against, dtype and backend.")
        other = self._recorded if against is None else _loaded(against)
        if _shape(other) != _shape(self._recorded):
            raise ValueError(
                f"bisect: {self.call} and {other.facts.call} run different graphs: compare two "
                "calls of one function on the same devices, with arguments of the same shapes and "
                "dtypes."
            )
        rounding = 0.0 if dtype is None else 4 * precision_of(dtype)
        allowed = tolerance
        if allowed is None:
            allowed = 0.0 if against is not None else max(1e-3, rounding)
        if not allowed >= 0:
            raise ValueError(f"bisect: tolerance must be 0 or more, but got {tolerance!r}.")
        kind: Callable[..., Lockstep] = Lockstep
        if backend is not None:
            kind = functools.partial(Compiled, backend)
        elif dtype is not None:
            kind = functools.partial(InDtype, dtype)
        with _as_recorded(self._recorded):
            mine = _steps(self._recorded, Lockstep)
            return differing(mine, _steps(other, kind), allowed)

    def __str__(self) -> str:
        facts, lines = self._recorded.facts, [self.call]
        made = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
        lines.append(
            f"call {facts.number} on {len(facts.ranks)} {facts.device} devices, backend "
            f"{facts.backend}, {made}"
        )
        lines += [f"written because of {self.error}"] if self.error else []
        names = placeholders(self._recorded.graph.graph)[facts.uses_index :]
        for node, blocks in zip(names, self._recorded.inputs, strict=True):
            lines.append(f"input {node.name}: {described(*blocks.values(), between=' ')}")
        for name, whole in self.results.items():
            lines.append(f"{name}: {described(whole, between=' ')}")
        lines.append(f"first NaN: {self.first_nan or 'none'}")
        return "\n".join([*lines, *(f"note: {each}" for each in self.notes)])


@boundary
def replay(file: str | os.PathLike[str], *, at: str | None = None) -> Replay:
    """Run a recorded call again, on the CPU of this process, and return what it gives.

    All ranks run together, operation by operation; a collective is computed from their values.  The
    numbers are those of the recorded call, bit for bit, if that ran uncompiled
    (``compile={"backend": "eager"}``) on CPU devices; else ``notes`` says why they may differ in
    rounding.  It needs no devices, and neither the script nor its modules: the file is data, in
    which nothing is run but operations of torch.

    Args:
        file: a path that ``dump`` returned.  Parts of other processes must be beside it.
        at: stop in ``pdb`` after an operation: ``"train.py:12"`` (each operation of that line) or
            its name in the graph (``"log_1"``).  Its inputs and its result have their names in the
            graph, one tensor per rank; ``ranks``, ``operation`` and ``steps`` are there too.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such file, is damaged, or has an operation that is not known here; or
            it lacks a block that was lost with a device, or an operation ``at`` the place.
        Exception: what an operation raised on a device it raises here, with the user's line.

    Example:
        >>> import tempfile, torch, torchpmap as tp
        >>> f = tp.pmap(lambda x: (x - 1).log() + tp.psum(x, "i"), axis_name="i")
        >>> with tempfile.TemporaryDirectory() as folder, tp.debug.record(folder):
        ...     _ = f(torch.tensor([3.0, 0.5]))
        ...     [path] = tp.debug.dump()
        ...     again = tp.debug.replay(path)
        >>> again.results["result"].tolist(), again.first_nan.operation, again.first_nan.rank
        ([4.1931471824646, nan], 'aten.log.default', 1)
    """
    recorded = _loaded(file)
    nodes = all_nodes(recorded.graph)
    if at is not None and not any(_is_at(node, at) for node in nodes):
        raise ValueError(
            f"replay: no operation is at {at!r}. A line is known if it was traced while record was "
            f"on; operations are {', '.join(node.name for node in nodes[:20])}."
        )
    blocks, results = {}, {}
    facts = recorded.facts
    with _as_recorded(recorded):
        outputs, first_nan = _followed(_steps(recorded, Lockstep), at)
        for told, values in zip(facts.outputs, outputs, strict=False):  # others are for a gradient
            blocks[told["name"]] = mine = [values[rank] for rank in facts.ranks]
            if prod(told["shape"]) > sum(x.numel() for x in mine):
                raise ValueError(f"replay: the blocks of {told['name']} are not {told['shape']}")
            results[told["name"]] = whole = torch.empty(told["shape"], dtype=mine[0].dtype)
            for rank, slices in reversed([*zip(told["ranks"], told["slices"], strict=True)]):
                whole[tuple(slice(*each) for each in slices)] = values[rank]
    return Replay(facts.call, results, blocks, first_nan, _notes(recorded), facts.error, recorded)


def _notes(recorded: Recorded) -> list[str]:
    facts, found = recorded.facts, []
    if facts.backend != "eager":
        found.append(f"it ran compiled by {facts.backend}, which may round otherwise")
    if facts.device != "cpu":
        found.append(f"it ran on {facts.device}, whose operations and sums round otherwise")
    if facts.versions["torch"] != torch.__version__:
        found.append(f"it ran with torch {facts.versions['torch']}; this is {torch.__version__}")
    return found


# -- running ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_recorded(recorded: Recorded) -> Iterator[None]:
    """The settings of the call: how a sum is cut for threads changes its rounding."""
    facts, threads = recorded.facts, torch.get_num_threads()
    with _alone(), contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(facts.num_threads)
        if facts.settings:
            try:
                told = {name: decoded(x) for name, x in facts.settings.items()}
                told["autocast"] = None
                wanted = tuple(told.get(each.name, each.read()) for each in SETTINGS)
                stack.enter_context(applied(wanted))
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"replay: {facts.call} has other settings: {error}") from error
        yield


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """The caller may be traced, or have a default device."""
    with callers_modes_off(), outside_transforms(), outside_modes(), torch.no_grad():
        yield


def _loaded(file: str | os.PathLike[str]) -> Recorded:
    with _alone():
        return load(file)


def _steps(recorded: Recorded, kind: Callable[..., Lockstep]) -> Steps:
    facts = recorded.facts
    if recorded.lost:
        listed = "; ".join(f"{what}: {why}" for what, why in recorded.lost.items())
        raise ValueError(f"replay: {facts.call} lacks blocks that were lost. {listed}")
    for place, blocks in enumerate(recorded.inputs):
        absent = [rank for rank in facts.ranks if rank not in blocks]
        if absent:
            raise ValueError(
                f"replay: there is no block of input {place} on the ranks {absent}. The processes "
                "of a launcher each write a part (.rank0, .rank1, ...): put all in one folder."
            )
    inputs: list[Values] = [
        {rank: block.clone() for rank, block in each.items()} for each in recorded.inputs
    ]
    if facts.uses_index:
        inputs.insert(0, {rank: torch.tensor(k) for k, rank in enumerate(facts.ranks)})
    groups = {name: tuple(map(tuple, parts)) for name, parts in facts.groups.items()}
    return kind(groups).start(recorded.graph, inputs, facts.ranks)


def _followed(steps: Steps, at: str | None) -> tuple[list[Values], Found | None]:
    """The results of a run, and the first operation that made a NaN."""
    first = None
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return end.value, first
        if first is None and has_own_numbers(step.node):
            first = _nan_in(step)
        if at is not None and _is_at(step.node, at):
            _stop(step)


def _nan_in(step: Step) -> Found | None:
    for rank, value in step.values.items():
        if any(isinstance(x, torch.Tensor) and holds(x, ("NaN",)) for x in tree_leaves(value)):
            return Found(operation_of(step.node), place_of(step.node), rank, step.steps)
    return None


def _is_at(node: Node, at: str) -> bool:
    file, number = file_and_line(node) or ("", 0)
    return at == node.name or f"/{file}:{number}".endswith(f"/{at}")


def _shape(recorded: Recorded) -> list[Any]:
    """What two runs of one graph have in common."""
    kinds = [[(x.shape, x.dtype) for x in blocks.values()] for blocks in recorded.inputs]
    nodes = [(node.name, str(node.target)) for node in all_nodes(recorded.graph)]
    return [recorded.facts.ranks, kinds, nodes]


def _stop(step: Step) -> None:
    """The debugger, as if it had stopped at the line of the user's that made an operation."""
    file, number = file_and_line(step.node) or ("<graph>", 1)
    names: dict[str, Any] = {
        each.name: list(values.values())
        for each, values in zip(step.node.all_input_nodes, step.inputs, strict=True)
    }
    names |= {step.node.name: list(step.values.values())}
    names |= {"operation": operation_of(step.node), "ranks": list(step.values), "steps": step.steps}
    # code of our own, of which only the file and the line come from the record
    code = _AT.replace(co_filename=file, co_firstlineno=number, co_name="<module>")
    FunctionType(code, names | {"_pause": _pause})()


def _pause() -> None:
    pdb.Pdb().set_trace(sys._getframe(1))


_AT = (lambda: _pause()).__code__
