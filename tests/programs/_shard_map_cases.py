"""Random ``shard_map`` programs, and what they give, computed by hand.

A program is a chain of steps on the blocks of its arguments.  Every step is written twice: for the
devices, and for a list with the block of every device, in row-major order, where a collective is
plain indexing.  The lists are ordinary torch code in float64, so autograd knows their derivatives.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torchpmap as tp

MESHES: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = (
    ((4,), ("x",)),
    ((2, 2), ("x", "y")),
    ((4, 1), ("x", "y")),
    ((2, 4), ("data", "model")),
    ((2, 2, 2), ("a", "b", "c")),
    ((8,), ("all",)),
)
Names = tuple[str, ...]
Spec = tuple[Any, ...]
"""Per dim: None, a name, or a tuple of names."""
Blocks = list[torch.Tensor]
"""Of every device, in row-major order."""


@dataclass(frozen=True)
class Step:
    """One operation on a value."""

    kind: str
    over: Names = ()
    dims: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    tiled: bool = True


@dataclass(frozen=True)
class Program:
    """A random program."""

    seed: str
    sizes: tuple[int, ...]
    names: Names
    in_specs: tuple[Spec, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of the whole arguments."""
    chains: tuple[tuple[Step, ...], ...]
    """Per argument, before they meet."""
    meeting: str
    after: tuple[Step, ...]
    out_specs: tuple[Spec, ...]
    """Of the result, and of what the first argument's chain gives."""
    captures: bool
    """Whether the result is multiplied by a captured number."""
    is_tree: bool
    is_smooth: bool
    """Whether it has derivatives that all agree on (not where equal numbers have a maximum)."""

    def mesh(self) -> tp.Mesh:
        return tp.make_mesh(self.sizes, self.names)

    def arguments(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(sum(map(ord, self.seed)))
        return [
            torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes
        ]


# -- on devices ----------------------------------------------------------------------------------


def mapped(program: Program, captured: torch.Tensor, **options: Any) -> Callable[..., Any]:
    """The program as a ``shard_map``; of the whole arguments."""

    def function(*given: Any) -> Any:
        values = list(given[0]["arguments"]) if program.is_tree else list(given)
        ends = []
        for x, chain in zip(values, program.chains, strict=True):
            for step in chain:
                x = ON_DEVICES[step.kind](step, x)
            ends.append(x)
        result = _met(program, ends)
        for step in program.after:
            result = ON_DEVICES[step.kind](step, result)
        if program.captures:
            result = result * captured
        return {"result": result, "first": ends[0]} if program.is_tree else (result, ends[0])

    specs = [tp.P(*spec) for spec in program.in_specs]
    result, first = (tp.P(*spec) for spec in program.out_specs)
    call = tp.shard_map(
        function,
        mesh=program.mesh(),
        in_specs=({"arguments": specs},) if program.is_tree else tuple(specs),
        out_specs={"result": result, "first": first} if program.is_tree else (result, first),
        **options,
    )

    def whole(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = call({"arguments": list(args)}) if program.is_tree else call(*args)
        return (found["result"], found["first"]) if program.is_tree else found

    return whole


def _met(program: Program, values: Sequence[torch.Tensor]) -> torch.Tensor:
    result = values[0]
    for value in values[1:]:
        if program.meeting == "matmul":
            result = result.flatten(0) @ result.flatten(0) + value
        elif result.shape == value.shape:
            result = result * value if program.meeting == "mul" else result + value
        else:
            result = result + value.sum()
    return result


_COLLECTIVES: dict[str, Callable[[Step, torch.Tensor], torch.Tensor]] = {
    "psum": lambda s, x: tp.psum(x, _written(s)),
    "pmean": lambda s, x: tp.pmean(x, _written(s)),
    "pmax": lambda s, x: tp.pmax(x, _written(s)),
    "pmin": lambda s, x: tp.pmin(x, _written(s)),
    "pbroadcast": lambda s, x: tp.pbroadcast(x, _written(s), s.dims[0]),
    "all_gather": lambda s, x: tp.all_gather(x, _written(s), axis=s.dims[0], tiled=s.tiled),
    "psum_scatter": lambda s, x: tp.psum_scatter(
        x, _written(s), scatter_dimension=s.dims[0], tiled=True
    ),
    "all_to_all": lambda s, x: tp.all_to_all(x, _written(s), *s.dims, tiled=True),
    "ppermute": lambda s, x: tp.ppermute(x, _written(s), s.pairs),
    "axis_index": lambda s, x: x * (tp.axis_index(_written(s)) + 1),
}
_LOCAL: dict[str, Callable[[Step, torch.Tensor], torch.Tensor]] = {
    "sin": lambda s, x: x.sin(),
    "affine": lambda s, x: 2 * x - 1,
    "tanh": lambda s, x: torch.tanh(x) * x,
    "softmax": lambda s, x: x.softmax(s.dims[0]),
    "cumsum": lambda s, x: x.cumsum(s.dims[0]),
    "flip": lambda s, x: x.flip(s.dims[0]),
    "transpose": lambda s, x: x.transpose(*s.dims),
    "sum": lambda s, x: x.sum(s.dims[0]),
    "mean": lambda s, x: x.mean(s.dims[0], keepdim=True),
    "flatten": lambda s, x: x.flatten(),
    "gram": lambda s, x: x @ x.transpose(-1, -2),
    "unsqueeze": lambda s, x: x.unsqueeze(s.dims[0]),
    "write": lambda s, x: _with_write(x),
}
ON_DEVICES = _COLLECTIVES | _LOCAL


def _written(step: Step) -> Any:
    """One name as a name, several as a tuple."""
    return step.over[0] if len(step.over) == 1 else step.over


def _with_write(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.mul_(0.5)
    y.unsqueeze(0)[0].add_(1)
    return y


# -- by hand -------------------------------------------------------------------------------------


def by_hand(
    program: Program, args: Sequence[torch.Tensor], captured: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    ends: list[Blocks] = []
    for x, spec, chain in zip(args, program.in_specs, program.chains, strict=True):
        blocks = cut(program, x, spec)
        for step in chain:
            blocks = step_by_hand(program, step, blocks)
        ends.append(blocks)
    result = [_met(program, values) for values in zip(*ends, strict=True)]
    for step in program.after:
        result = step_by_hand(program, step, result)
    if program.captures:
        result = [x * captured for x in result]
    first, second = program.out_specs
    return joined(program, result, first), joined(program, ends[0], second)


def entries(spec: Spec) -> list[Names]:
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]


def places(program: Program) -> list[dict[str, int]]:
    """The coordinates of every device."""
    ranges = itertools.product(*map(range, program.sizes))
    return [dict(zip(program.names, place, strict=True)) for place in ranges]


def number(program: Program, place: dict[str, int], over: Names) -> int:
    """The place of a device along some axes, of which the first is the slowest."""
    sizes = dict(zip(program.names, program.sizes, strict=True))
    found = 0
    for name in over:
        found = found * sizes[name] + place[name]
    return found


def count(program: Program, over: Names) -> int:
    return math.prod(program.sizes[program.names.index(name)] for name in over)


def cut(program: Program, x: torch.Tensor, spec: Spec) -> Blocks:
    blocks = []
    for place in places(program):
        block = x
        for dim, over in enumerate(entries(spec)):
            size = x.shape[dim] // count(program, over)
            block = block.narrow(dim, number(program, place, over) * size, size)
        blocks.append(block)
    return blocks


def joined(program: Program, blocks: Blocks, spec: Spec) -> torch.Tensor:
    """The whole; of several devices with the same place, the first counts."""
    found: dict[tuple[int, ...], torch.Tensor] = {}
    for place, block in zip(places(program), blocks, strict=True):
        key = tuple(number(program, place, over) for over in entries(spec))
        found.setdefault(key, block)
    for dim in reversed(range(len(spec))):
        rows: dict[tuple[int, ...], Blocks] = {}
        for key in sorted(found):
            rows.setdefault(key[:dim], []).append(found[key])
        found = {key: torch.cat(parts, dim) for key, parts in rows.items()}
    return found[()]


def members(program: Program, over: Names) -> list[list[int]]:
    """For every device, the devices of its group, in the order of the group."""
    all_places = places(program)
    rest = tuple(name for name in program.names if name not in over)
    groups = []
    for mine in all_places:
        group = [k for k, p in enumerate(all_places) if all(p[n] == mine[n] for n in rest)]
        groups.append(sorted(group, key=lambda k: number(program, all_places[k], over)))
    return groups


def step_by_hand(program: Program, step: Step, blocks: Blocks) -> Blocks:
    if step.kind in _LOCAL:
        return [_LOCAL[step.kind](step, x) for x in blocks]
    results = []
    for k, group in enumerate(members(program, step.over)):
        xs, mine = [blocks[member] for member in group], group.index(k)
        results.append(_BY_HAND[step.kind](step, xs, mine))
    return results


def _permuted(step: Step, xs: Blocks, mine: int) -> torch.Tensor:
    sources = [source for source, target in step.pairs if target == mine]
    return xs[sources[0]] if sources else torch.zeros_like(xs[mine])


def _piece(x: torch.Tensor, dim: int, parts: int, which: int) -> torch.Tensor:
    return x.chunk(parts, dim)[which]


_BY_HAND: dict[str, Callable[[Step, Blocks, int], torch.Tensor]] = {
    "psum": lambda s, xs, k: torch.stack(xs).sum(0),
    "pmean": lambda s, xs, k: torch.stack(xs).mean(0),
    "pmax": lambda s, xs, k: torch.stack(xs).amax(0),
    "pmin": lambda s, xs, k: torch.stack(xs).amin(0),
    "pbroadcast": lambda s, xs, k: xs[s.dims[0]],
    "all_gather": lambda s, xs, k: (torch.cat if s.tiled else torch.stack)(xs, s.dims[0]),
    "psum_scatter": lambda s, xs, k: _piece(torch.stack(xs).sum(0), s.dims[0], len(xs), k),
    "all_to_all": lambda s, xs, k: torch.cat(
        [_piece(x, s.dims[0], len(xs), k) for x in xs], s.dims[1]
    ),
    "ppermute": _permuted,
    "axis_index": lambda s, xs, k: xs[k] * (k + 1),
}


# -- generation ----------------------------------------------------------------------------------


@dataclass
class _Value:
    """What is known of a value while steps are chosen."""

    shape: tuple[int, ...]
    varying: set[str]
    is_smooth: bool = True


class _Generator:
    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.sizes, self.names = self.random.choice(MESHES)

    def some_names(self, least: int = 1) -> Names:
        most = len(self.names)
        return tuple(self.random.sample(self.names, self.random.randint(least, most)))

    def count(self, over: Names) -> int:
        return math.prod(self.sizes[self.names.index(name)] for name in over)

    def spec(self, rank: int, names: Sequence[str]) -> Spec:
        """Names anywhere, one or several to a dim; trailing entries may be left out."""
        found: list[list[str]] = [[] for _ in range(rank)]
        for name in names:
            self.random.choice(found).append(name)
        spec = [tuple(e) if len(e) != 1 else self.random.choice([e[0], (e[0],)]) for e in found]
        plain = [self.random.choice([None, ()]) if e == () else e for e in spec]
        while plain and not plain[-1] and self.random.random() < 0.5:
            plain.pop()
        return tuple(e if e != () else None for e in plain)

    def argument(self) -> tuple[Spec, tuple[int, ...], _Value]:
        rank = self.random.randint(0, 3)
        names = self.some_names(0) if rank else ()
        spec = self.spec(rank, names)
        block = tuple(self.random.choice([1, 2, 3, 4, 8]) for _ in range(rank))
        if math.prod(block) > 64:
            block = tuple(min(2, size) for size in block)
        parts = [self.count(over) for over in entries(spec)] + [1] * (rank - len(spec))
        shape = tuple(b * p for b, p in zip(block, parts, strict=True))
        return spec, shape, _Value(block, set(names))

    def step(self, value: _Value) -> Step | None:
        """A step that means something for the value, which becomes its result."""
        if self.random.random() < 0.5:
            return self.local(value)
        return self.collective(value)

    def local(self, value: _Value) -> Step | None:
        kind = self.random.choice(sorted(_LOCAL))
        shape, rank = value.shape, len(value.shape)
        dims: tuple[int, ...] = ()
        if kind in ("softmax", "cumsum", "flip", "sum", "mean", "transpose", "gram") and not rank:
            return None
        if kind in ("softmax", "cumsum", "flip", "sum", "mean"):
            dims = (self.random.randrange(rank),)
        if kind == "unsqueeze":
            dims = (self.random.randint(0, rank),)
            value.shape = (*shape[: dims[0]], 1, *shape[dims[0] :])
        if kind == "transpose":
            dims = tuple(self.random.choices(range(rank), k=2))
        if kind == "gram" and rank < 2:
            return None
        step = Step(kind, dims=dims)
        value.shape = tuple(_LOCAL[kind](step, torch.zeros(shape)).shape)
        return step

    def collective(self, value: _Value) -> Step | None:
        kind = self.random.choice(sorted(_COLLECTIVES))
        over = self.some_names()
        n, shape, rank = self.count(over), value.shape, len(value.shape)
        step = Step(kind, over)
        if kind in ("psum", "pmean", "pmax", "pmin"):
            if kind in ("pmax", "pmin") and not set(over) <= value.varying:
                value.is_smooth = False
            value.varying -= set(over)
        elif kind == "pbroadcast":
            step = Step(kind, over, (self.random.randrange(n),))
            value.varying -= set(over)
        elif kind == "all_gather":
            tiled = bool(rank) and self.random.random() < 0.7
            dim = self.random.randint(0, rank - tiled)
            step = Step(kind, over, (dim,), tiled=tiled)
            wide = [*shape]
            if tiled:
                wide[dim] *= n
            else:
                wide.insert(dim, n)
            if math.prod(wide) > 512:
                return None
            value.shape = tuple(wide)
            value.varying -= set(over)
        elif kind in ("psum_scatter", "all_to_all"):
            dims = [d for d, size in enumerate(shape) if size % n == 0]
            if not dims:
                return None
            dim = self.random.choice(dims)
            other = self.random.randrange(rank)
            changed = [*shape]
            changed[dim] //= n
            if kind == "all_to_all":
                changed[other] *= n
            step = Step(kind, over, (dim,) if kind == "psum_scatter" else (dim, other))
            value.shape = tuple(changed)
            value.varying |= set(over)
        elif kind == "ppermute":
            some = self.random.randint(1, n)
            pairs = zip(
                self.random.sample(range(n), some), self.random.sample(range(n), some), strict=True
            )
            step = Step(kind, over, pairs=tuple(pairs))
            value.varying |= set(over)
        else:
            value.varying |= set(over)
        return step

    def chain(self, value: _Value, most: int) -> tuple[Step, ...]:
        steps = [self.step(value) for _ in range(self.random.randint(0, most))]
        return tuple(step for step in steps if step is not None)

    def out_spec(self, value: _Value) -> Spec:
        more = [n for n in self.names if n not in value.varying and self.random.random() < 0.2]
        names = [*sorted(value.varying), *more]
        self.random.shuffle(names)
        return self.spec(len(value.shape), names)


def generate(seed: str) -> Program:
    """A valid program; the same for the same seed."""
    while True:
        program = _draft(seed)
        if program is not None:
            return program
        seed += "'"


def _draft(seed: str) -> Program | None:
    make = _Generator(seed)
    arguments = [make.argument() for _ in range(make.random.randint(1, 3))]
    values = [value for _, _, value in arguments]
    chains = tuple(make.chain(value, 3) for value in values)
    meeting = make.random.choice(["add", "mul", "matmul"])
    program = Program(
        seed,
        make.sizes,
        make.names,
        tuple(spec for spec, _, _ in arguments),
        tuple(shape for _, shape, _ in arguments),
        chains,
        meeting,
        (),
        (),
        make.random.random() < 0.3,
        make.random.random() < 0.3,
        True,
    )
    met = _met(program, [torch.zeros(value.shape) for value in values])
    result = _Value(
        tuple(met.shape),
        set().union(*(value.varying for value in values)),
        all(value.is_smooth for value in values),
    )
    after = make.chain(result, 3)
    first = values[0]
    if any((not v.shape and v.varying) or math.prod(v.shape) > 2048 for v in (result, first)):
        return None  # a number cannot be put together from different ones
    out_specs = (
        make.out_spec(result) if result.shape else (),
        make.out_spec(first) if first.shape else (),
    )
    changes: dict[str, Any] = {
        "after": after,
        "out_specs": out_specs,
        "is_smooth": result.is_smooth,
    }
    return Program(**{**vars(program), **changes})
