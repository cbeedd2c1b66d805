"""Runs a graph for all devices at once, operation by operation, in this process.

Each value is one tensor per rank.  A collective is computed from the values of all ranks of a
group; a branch or a loop is followed by those ranks that take it.  It is a generator, so that the
caller sees every operation, may look at its values, or run two graphs side by side.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchpmap._base.torch_internals import OpOverload, gives_views
from torchpmap._collectives.meanings import MEANINGS
from torchpmap._layout.axis_stack import Partition
from torchpmap._plan.collectives import name_of
from torchpmap._trace.graphs import (
    COND,
    PRINT,
    SCAN,
    arguments,
    groups_of,
    kind_of_node,
    results_of,
)
from torchpmap._trace.repetition import place_of
from torchpmap._transforms.nans import UNSET

Values = dict[int, Any]
"""By rank."""


class Step(NamedTuple):
    """An operation that has run, or an input."""

    node: Node
    values: Values
    inputs: list[Values]
    """The tensors that it took."""
    steps: tuple[int, ...]
    """Of the loops around it, the outermost first, counted from 0."""


def operation_of(node: Node) -> str:
    """``"aten.log.default"``, or the name of a loop, a branch or an input."""
    if node.op == "placeholder":
        return f"input {node.name}"
    return str(node.target) if isinstance(node.target, OpOverload) else node.name


@dataclass(frozen=True)
class Place:
    """An operation, and where it is."""

    operation: str
    """As torch names it, ``"aten.log.default"``; of an input, its name."""
    line: str
    """The user's line; empty if it is not known: only what is traced while ``record`` is on has
    it.
    """
    rank: int
    steps: tuple[int, ...]
    """Of the loops around it, the outermost first, counted from 0."""

    def described(self, operation: str) -> str:
        """As messages say it; ``operation``: what they call it."""
        steps = "".join(f", step {number}" for number in self.steps)
        return f"{operation}{f' at {self.line}' * bool(self.line)}, rank {self.rank}{steps}"


def has_own_numbers(node: Node) -> bool:
    """Whether what it gives is not memory that nothing has set, or a view, maybe of such."""
    target = node.target
    if not isinstance(target, OpOverload):
        return True
    return target._opname not in UNSET and not gives_views(target)


Steps = Generator[Step, None, list[Values]]
"""Ends with the results."""


class Lockstep:
    def __init__(self, groups: Mapping[str, Partition]) -> None:
        self.groups = groups

    def start(self, graph: GraphModule, inputs: list[Values], ranks: Sequence[int]) -> Steps:
        return self.run(graph, inputs, ranks)

    def run(
        self,
        module: GraphModule,
        inputs: Iterable[Values],
        ranks: Sequence[int],
        steps: tuple[int, ...] = (),
    ) -> Steps:
        given, env = iter(inputs), dict[Node, Values]()
        last = {each: node for node in module.graph.nodes for each in node.all_input_nodes}
        for node in module.graph.nodes:
            if node.op == "output":
                return [_for_each(each, env, ranks) for each in results_of(module.graph)]
            if node.op == "placeholder":
                env[node] = next(given)
                yield Step(node, env[node], [], steps)
                continue
            if node.op == "get_attr":
                value = getattr(module, str(node.target))
                is_graph = isinstance(value, GraphModule)
                env[node] = {rank: value if is_graph else value.clone() for rank in ranks}
                continue
            env[node] = yield from self.computed(node, env, ranks, steps)
            yield Step(node, env[node], [env[each] for each in node.all_input_nodes], steps)
            for each in node.all_input_nodes:
                if last[each] is node:
                    del env[each]
        raise AssertionError("a graph has an output")

    def computed(
        self, node: Node, env: dict[Node, Values], ranks: Sequence[int], steps: tuple[int, ...]
    ) -> Generator[Step, None, Values]:
        kind = kind_of_node(node)
        args = [_for_each(each, env, ranks) for each in node.args]
        if kind == SCAN:
            return (yield from self._scan(args, ranks, steps))
        if kind == COND:
            return (yield from self._cond(args, ranks, steps))
        if kind:
            return (yield from self._while(args, ranks, steps))
        groups = groups_of(node)
        if groups and name_of(node) != PRINT:
            return self._together(node, env, ranks, self.groups[groups[0]])
        target: Any = node.target
        found: Values = {}
        for rank in ranks:
            given, named = map_arg((node.args, node.kwargs), lambda each: env[each][rank])  # noqa: B023
            if groups:  # each prints its own lines
                given = (*given[:4], [], *given[5:])
            try:
                found[rank] = target(*given, **named)
            except Exception as error:
                where = Place(operation_of(node), place_of(node), rank, steps)
                error.add_note(f"replay: raised by {where.described(where.operation)}")
                raise
        return found

    def _together(
        self, node: Node, env: dict[Node, Values], ranks: Sequence[int], partition: Partition
    ) -> Values:
        _, *how, _ = arguments(node).values()
        found = Values()
        if node.target not in MEANINGS:
            raise NotImplementedError(f"replay: the collective {node.target} at {place_of(node)}")
        (operand,) = node.all_input_nodes
        for members in partition:
            absent = [rank for rank in members if rank not in ranks]
            if len(absent) == len(members):
                continue
            if absent:
                raise RuntimeError(
                    f"{name_of(node)} at {place_of(node) or node.name}: the ranks {absent} do not "
                    f"come to it, as they took another branch or fewer steps; {list(members)} "
                    "must all call it."
                )
            given, places = [env[operand][rank] for rank in members], range(len(members))
            results = MEANINGS[node.target](given, places, *how)
            found |= zip(members, results, strict=True)
        return found

    # -- loops and branches ------------------------------------------------------------------------

    def _scan(
        self, args: list[Values], ranks: Sequence[int], steps: tuple[int, ...]
    ) -> Generator[Step, None, Values]:
        body, init, xs, reads = (_each(each, ranks) for each in args)
        carry, rows = init, list[list[Values]]()
        for number in range(len(xs[0][ranks[0]])):
            row = [{rank: x[rank][number] for rank in ranks} for x in xs]
            results = yield from self.run(
                _graph(body), [*carry, *row, *reads], ranks, (*steps, number)
            )
            carry = results[: len(init)]
            rows.append(results[len(init) :])
        stacked = zip(*rows, strict=True)
        ys = [{rank: torch.stack([y[rank] for y in each]) for rank in ranks} for each in stacked]
        return {rank: [x[rank] for x in (*carry, *ys)] for rank in ranks}

    def _while(
        self, args: list[Values], ranks: Sequence[int], steps: tuple[int, ...]
    ) -> Generator[Step, None, Values]:
        test, body, init, reads = (_each(each, ranks) for each in args)
        state = [dict(each) for each in init]
        number, active = 0, list(ranks)
        while active:
            here = (*steps, number)
            (goes_on,) = yield from self.run(_graph(test), [*state, *reads], active, here)
            active = [rank for rank in active if bool(goes_on[rank])]
            if active:
                results = yield from self.run(_graph(body), [*state, *reads], active, here)
                for values, new in zip(state, results, strict=True):
                    values |= new
            number += 1
        return {rank: [values[rank] for values in state] for rank in ranks}

    def _cond(
        self, args: list[Values], ranks: Sequence[int], steps: tuple[int, ...]
    ) -> Generator[Step, None, Values]:
        which, on_true, on_false, reads = args[0], *(_each(each, ranks) for each in args[1:])
        found: Values = {}
        for branch, taken in ((on_true, True), (on_false, False)):
            mine = [rank for rank in ranks if bool(which[rank]) is taken]
            if mine:
                results = yield from self.run(_graph(branch), reads, mine, steps)
                found |= {rank: [each[rank] for each in results] for rank in mine}
        return found


def _for_each(argument: Any, env: Mapping[Node, Values], ranks: Sequence[int]) -> Values:
    return {rank: map_arg(argument, lambda node: env[node][rank]) for rank in ranks}  # noqa: B023


def _each(argument: Values, ranks: Sequence[int]) -> list[Values]:
    """A value per rank of several things -> of each of them; of a graph: that one."""
    if isinstance(argument[ranks[0]], GraphModule):
        return [argument]
    return [{r: argument[r][k] for r in ranks} for k in range(len(argument[ranks[0]]))]


def _graph(body: list[Values]) -> GraphModule:
    found = next(iter(body[0].values()))
    assert isinstance(found, GraphModule)
    return found
