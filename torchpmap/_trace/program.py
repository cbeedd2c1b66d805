"""What one device does in a mapped call: take its blocks, call the function, lay out the results.

The devices are a grid of named axes, and a ``Program`` is a function with a cut for each of its
arguments.  Of a block the function sees one row (``_trace/row_program``) or all
(``_trace/block_program``).  Without devices, every axis of the grid is a ``torch.func.vmap`` over
the blocks of the whole values.

The same ``Program`` is traced in the controller (``_trace/trace``) and, with ``compile=False``, run
as it is on every worker, so all modes follow the same rules and raise the same errors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch

from torchpmap._base.axis_spec import broadcast_axes
from torchpmap._base.errors import kind_of
from torchpmap._base.pytree import Structure, flatten
from torchpmap._layout import axis_stack
from torchpmap._layout.axis_stack import Axis, Parts, mesh_axes
from torchpmap._layout.grid import Cut, dim_of
from torchpmap._trace.escaped import note, watched
from torchpmap._trace.idioms import translate
from torchpmap._trace.kinds import as_result
from torchpmap._trace.replication import Demand
from torchpmap._trace.traced_views import in_lanes, settle
from torchpmap._trace.transform_rules import TransformRules


@dataclass(frozen=True)
class Block:
    """A leaf that arrives as a block."""

    cut: Cut


@dataclass(frozen=True)
class Constant:
    """A leaf that is the same Python value on every device."""

    value: Any


GIVE_AN_AXIS = "give it an out axis"
"""What to do with an output that is not replicated, as messages say it."""


@dataclass(frozen=True)
class Outcome:
    """What a program returned, as blocks; a None leaf stays None and has no block."""

    structure: Structure
    blocks: tuple[torch.Tensor | None, ...]
    cuts: tuple[Cut, ...]
    """Per leaf; devices along axes that are not in it return the same."""
    checks: tuple[torch.Tensor, ...] = ()
    """How far values declared replicated differ between devices (``check_replicated``)."""
    checked: tuple[str, ...] = ()
    """What was declared of each."""
    draws: int = 0
    """How often random numbers were drawn."""
    first_counts: bool = False
    """Whether only the first of equal copies gets a cotangent; else each gets an equal part."""
    unbound: tuple[int, ...] = ()
    """Dims of the grid that no axis is bound for: devices along them do the same, and each has the
    whole of every cotangent.
    """
    tracked: tuple[frozenset[Axis], ...] | None = None
    """Of a program in which it is followed which values vary: per dim of the grid, its axis, if it
    is followed along it.  There what does not vary has one cotangent, which all devices hold.
    """
    bound: tuple[Parts, ...] = ()
    """The axes that were bound where the function ran, for what runs in a backward pass; none if
    there were lanes, which have ended.
    """
    demands: tuple[Demand, ...] = ()
    """Of values inside that are no outputs."""
    refuse: Callable[[int, Sequence[Hashable]], Exception] | None = None
    """The error for a leaf that may differ along axes that are not in its cut; None if that is
    allowed.
    """

    @property
    def dims(self) -> tuple[int | None, ...]:
        """Per leaf, its cut along the outermost axis."""
        return tuple(dim_of(cut, 0) for cut in self.cuts)

    @property
    def outputs(self) -> list[tuple[torch.Tensor, Cut]]:
        """Every block that is an output."""
        pairs = zip(self.blocks, self.cuts, strict=True)
        return [(block, cut) for block, cut in pairs if block is not None]

    def change_blocks(self, change: Callable[[torch.Tensor, Cut], torch.Tensor]) -> Outcome:
        """The same, with other blocks."""
        pairs = zip(self.blocks, self.cuts, strict=True)
        blocks = tuple(None if block is None else change(block, cut) for block, cut in pairs)
        return replace(self, blocks=blocks)

    @property
    def returned(self) -> Any:
        """The blocks, as the function returned them."""
        return self.structure.unflatten(list(self.blocks))

    @property
    def requires_grad(self) -> bool:
        return any(block is not None and block.requires_grad for block in self.blocks)


@dataclass(frozen=True)
class Program:
    """A function, and how its arguments are made from blocks."""

    fun: Callable[..., Any]
    name: str
    prefix: str
    """The mapped function, as messages name it."""
    structure: Structure
    """Of ``(args, kwargs)``."""
    leaves: tuple[Block | Constant, ...]
    names: tuple[Hashable, ...]
    """Of the axes of the grid."""
    sizes: tuple[int, ...]
    """Of the grid that the whole values lie on, where there are no devices."""
    out: Any
    """How outputs are cut, as the user says it."""
    randomness: str
    seed: torch.Tensor
    """Stands for the key of a call."""
    what_is_out: ClassVar[str]
    """What the user calls ``out``."""
    out_hint: ClassVar[str]
    """For errors about its structure."""
    otherwise: ClassVar[str]
    """What to do with an output that is not replicated."""
    part: ClassVar[str]
    """What each place of the grid is called."""

    @property
    def of_one(self) -> Self:
        """The program of one place of the grid."""
        return self

    @property
    def cuts(self) -> list[Cut]:
        """Of the blocks that arrive."""
        return [leaf.cut for leaf in self.leaves if isinstance(leaf, Block)]

    def place(self, number: int) -> str:
        """A place of the grid, as notes say it."""
        place = zip(self.names, np.unravel_index(number, self.sizes), strict=True)
        return f"on the device at {', '.join(f'{name}={k}' for name, k in place)}"

    def axes(self, process_axis: Axis) -> tuple[Axis | None, ...]:
        """The axis of all devices as one per axis of the grid; None for one with one device."""
        return mesh_axes(process_axis, self.sizes, self.names)

    def run(self, blocks: Sequence[torch.Tensor], process_axis: Axis | None) -> Outcome:
        """Run on one device's blocks, along the axis of the devices; without, on whole values."""
        raise NotImplementedError

    def own(self, values: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
        """The blocks that a place of the grid, by its row-major number, has of whole values."""
        place = np.unravel_index(number, self.sizes)
        return [
            split(x, cut, self.sizes)[tuple(int(place[k]) for k in sorted(itertools.chain(*cut)))]
            for x, cut in zip(values, self.cuts, strict=True)
        ]

    def whole(self, blocks: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
        """The whole value that the places of the grid have blocks of."""
        stacked = torch.stack(list(blocks)).unflatten(0, self.sizes)
        over = set(itertools.chain(*cut))
        lanes = stacked[tuple(slice(None) if k in over else 0 for k in range(len(self.sizes)))]
        return join(lanes, cut)

    def seen_shape(self, block: torch.Tensor, cut: Cut) -> Sequence[int]:
        """That of what the function returned."""
        return block.shape

    def over_lanes(
        self,
        run: Callable[[torch.Tensor, Sequence[torch.Tensor]], Outcome],
        size: int,
        blocks: Sequence[torch.Tensor],
        dims: Sequence[int | None],
        stack: Callable[[torch.Tensor, Cut], torch.Tensor],
        outer: Sequence[Axis] = (),
    ) -> Outcome:
        """Run under a vmap over these dims of the blocks, whose index ``run`` gets; ``stack``: what
        is made of all lanes of an output, which are its first dim; ``outer``: axes around.
        """
        outcomes: list[Outcome] = []

        def lane(index: torch.Tensor, *rows: torch.Tensor) -> list[torch.Tensor]:
            outcomes.append(run(index, rows))
            return [*(block for block, _ in outcomes[-1].outputs), *outcomes[-1].checks]

        devices = [tensor.device for tensor in (*blocks, *(axis.index for axis in outer))]
        index = torch.arange(size, device=devices[0] if devices else None)
        over = torch.func.vmap(lane, (0, *dims), randomness=self.randomness)
        with watched(self.name):
            lanes = iter(over(index, *blocks))
        (outcome,) = outcomes
        stacked = outcome.change_blocks(lambda _, cut: stack(next(lanes), cut))
        return replace(stacked, checks=tuple(x.amax(0) for x in lanes))

    def call_function(self, given: Sequence[torch.Tensor]) -> Outcome:
        """Call the function, where the axes are bound; its outcome, which nothing has checked."""
        tensors = iter(given)
        values = [x.value if isinstance(x, Constant) else next(tensors) for x in self.leaves]
        args, kwargs = self.structure.unflatten(values)
        code = getattr(self.fun, "__code__", None)
        where = "" if code is None else f", {code.co_filename}:{code.co_firstlineno}"
        note(list(given), f"it is one of its arguments{where}")
        with in_lanes():
            try:
                with TransformRules():
                    result = self.fun(*args, **kwargs)
            except AttributeError as error:
                translate(error)
                raise
            settle(result)
        axes = axis_stack.bound()
        has_lanes = any(axis.group is None and axis.size > 1 for parts in axes for axis in parts)
        return replace(self.lay_out(result), bound=() if has_lanes else axes)

    def lay_out(self, returned: Any) -> Outcome:
        """Of what the function returned: blocks and cuts."""
        values, structure = flatten(returned)
        outs: list[Any] = broadcast_axes(
            self.out, returned, what=self.what_is_out, hint=self.out_hint
        )
        blocks: list[torch.Tensor | None] = []
        cuts: list[Cut] = []
        for value, out, path in zip(values, outs, self.paths(structure), strict=True):
            block = None if value is None else as_result(value, path)
            blocks.append(block)
            cuts.append(() if block is None else self._cut(block, out, path))
        return Outcome(structure, tuple(blocks), tuple(cuts))

    def paths(self, structure: Structure) -> Sequence[str]:
        """The outputs, as messages name them."""
        return structure.paths(f"the output of {self.name}")

    def _cut(self, block: torch.Tensor, out: Any, path: str) -> Cut:
        """The cut of an output, as ``out`` says it; misuse is an error."""
        raise NotImplementedError


def split(x: torch.Tensor, cut: Cut, sizes: Sequence[int]) -> torch.Tensor:
    """A whole value with the dims of the grid that cut it in front, in their order."""
    for dim in reversed(range(len(cut))):
        over = [sizes[k] for k in cut[dim]]
        x = x.unflatten(dim, (*over, x.shape[dim] // math.prod(over))) if over else x
    front: dict[int, int] = {}
    place = 0
    for dims in cut:
        front |= {k: place + i for i, k in enumerate(dims)}
        place += len(dims) + 1
    return x.movedim([front[k] for k in sorted(front)], list(range(len(front))))


def join(lanes: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The whole value of the blocks of ``split``."""
    axes = sorted(itertools.chain(*cut))
    for dim, over in enumerate(cut):  # the dims before this one are whole: they are in front
        for i, k in enumerate(over):
            lanes = lanes.movedim(dim + i + axes.index(k), dim + i)
            axes.remove(k)
        # between them and that of the block are the dims of the axes that are left
        lanes = lanes.movedim(dim + len(over) + len(axes), dim + len(over))
        lanes = lanes.flatten(dim, dim + len(over)) if over else lanes
    return lanes


def check_same_kinds(
    prefix: str,
    whose: str,
    found: Sequence[tuple[object, Structure | str, Sequence[tuple[Any, ...] | None]]],
) -> None:
    """Raise if results are of different kinds.  ``whose``: "rows" or "devices"; ``found``: for each
    of them, which one it is, and the structure, shapes and dtypes of what it returned.
    """
    first, *others = found
    for other in others:
        if other[1:] != first[1:]:
            raise ValueError(
                f"{prefix}: {whose} returned different kinds of results: {_told(*first)}, "
                f"{_told(*other)}. All {whose} must return the same structure, shapes and dtypes "
                "to be stacked."
            )


def _told(
    who: object, structure: Structure | str, results: Sequence[tuple[Any, ...] | None]
) -> str:
    kinds = [None if each is None else kind_of(*each[:2]) for each in results]
    return f"{who} returned {structure} of {kinds}"


def check_replicated(
    prefix: str, found: Iterable[tuple[str, float]], otherwise: str = GIVE_AN_AXIS
) -> None:
    """Raise if copies differ; ``found``: what was declared of each, and how far they are apart."""
    for claim, difference in found:
        if difference != 0:
            raise ValueError(not_replicated(prefix, claim, difference, otherwise))


def not_replicated(prefix: str, claim: str, difference: float | str, otherwise: str) -> str:
    """``claim``: what was declared of an output; ``otherwise``: how to declare it as it is;
    ``difference``: a number, or a placeholder for it.
    """
    told = difference if isinstance(difference, str) else f"{difference:g}"
    return (
        f"{prefix}: {claim}, but its value differs between devices (largest difference "
        f"{told}). Reduce it over the axis (for example with pmean), or {otherwise}."
    )
