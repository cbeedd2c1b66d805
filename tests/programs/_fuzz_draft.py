"""A body of a random program in the making, and the simplest steps: operations, and collectives
over axes and in groups, of operands that suit them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from _fuzz_operations import IN_PLACE, OUT_OF_PLACE, RANDOM, VIEWS, Family
from _fuzz_programs import Collective, Input, Local, Step
from _fuzz_reference import Env, Grid, Reference, Rows, count

ROWS = (1, 2, 2, 3, 4, 4, 4, 5, 6, 8, 8, 12, 16)
"""Sizes of a pmapped axis: on four devices up to five rows of one device, and devices left out."""
DEVICES = 4
MOST_ELEMENTS = 48
LARGEST = 300.0
DTYPES = ("float64", "float64", "float32", "float32", "bfloat16", "float16", "int64", "complex64")
OTHERS = ("int64", "int32", "int8", "uint8", "int16", "bool", "float32", "float64")

REDUCTIONS = ("psum", "psum", "pmean", "pmax", "pmin")


@dataclass
class Draft:
    """A body in the making."""

    env: Env
    grid: Grid
    steps: list[Step]
    names: list[str] = field(default_factory=list)
    """Its own values; those around are the others in ``env``."""
    reach: frozenset[str] = frozenset()
    """Names of the axes that collectives can use."""
    depth: int = 0
    """Derivatives around."""
    loops: int = 0
    """Loops and branches around."""
    statics: tuple[tuple[str, Family], ...] = ()
    """Static arguments, and what they may be."""
    is_divided: bool = False
    """Whether devices may not all run it."""
    place: str = "caller"
    """Where it runs: ``caller``, ``row``, ``blocks``, or ``lane`` of a vmap."""

    def inner(self, **changes: Any) -> Draft:
        return replace(self, env=dict(self.env), steps=[], names=[], **changes)

    @property
    def everywhere(self) -> frozenset[int]:
        """All axes of the grid."""
        return frozenset(range(len(self.grid)))


class Steps:
    """Makes inputs and operations of torch."""

    rows: tuple[int, ...] = ROWS
    most_elements = MOST_ELEMENTS

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._forms = random.Random(hash(rng.getstate()[1]))  # of its own: changes no other choice
        self._reference = Reference()
        self._numbers = itertools.count()
        self._special = False
        """Whether an input has infinities and NaN."""

    def inputs(self) -> list[Input]:
        """Some tensors that share a dim or two."""
        rng = self._rng
        n, m = rng.choice(self.rows), rng.choice((2, 3, 4))
        dtype = rng.choice(DTYPES)
        found = []
        for k in range(rng.choice((1, 2, 2, 3))):
            shape = [rng.choice((1, 2, 3, 4, n, m)) for _ in range(rng.choice((0, 1, 1, 2)))]
            shape = [1 if size > 4 else size for size in shape]
            if rng.random() < 0.03:
                shape.append(0)
            if rng.random() < 0.4:
                shape.insert(rng.randint(0, len(shape)), m)
            if k == 0 or rng.random() < 0.8:
                shape.insert(rng.choice((0, 0, len(shape))), n)
            kind = dtype if k == 0 or rng.random() < 0.7 else rng.choice(OTHERS)
            layouts = ["plain"] * 6 + (["transposed", "sliced", "expanded"] if shape else [])
            layouts += ["special"] if "float" in kind else []
            seed = rng.randrange(1000)
            layout = rng.choice(layouts)
            self._special |= layout == "special"
            found.append(Input(f"x{k}", seed, tuple(shape), kind, layout))
        return found

    def name(self, prefix: str) -> str:
        return f"{prefix}{next(self._numbers)}"

    def pick(self, draft: Draft, kind: str = "a", most: int | None = None) -> str | None:
        """A name of a value of some kind: one of its own and a late one rather than others."""
        most = self.most_elements if most is None else most
        fits = [
            name
            for name in draft.env
            if is_of_kind(kind, draft.env[name][0]) and draft.env[name][0].numel() <= most
        ]
        if not fits:
            return None
        own = [name for name in draft.names if name in fits]
        if own and self._rng.random() < 0.85:
            late = self._rng.random() < 0.6
            return self._rng.choice(own[-2:] if late else own)
        return self._rng.choice(fits)

    def varying(self, names: Sequence[str]) -> frozenset[int]:
        """Along which axes of the grid some values may differ."""
        return self._reference.varying(names)

    def add(self, draft: Draft, step: Step) -> bool:
        """Add a step if it can be run and gives values of a moderate size."""
        try:
            self._reference.step(step, draft.env, draft.grid)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            return False
        if not all(_moderate(draft.env[name], self.most_elements) for name in step.outs):
            for name in step.outs:
                del draft.env[name]
            return False
        draft.steps.append(step)
        for name in step.outs:
            draft.names.append(name)
        return True

    # --- steps ------------------------------------------------------------------------------------

    def _drawn(self, table: Sequence[Any], draft: Draft) -> tuple[str | None, list[str]]:
        """The code of an operation and its operands; no code if a draft has no operands for it."""
        kinds, code = self._rng.choice(table)
        names = [self.pick(draft, kind) for kind in kinds]
        chosen = [name for name in names if name is not None]
        filled = self._filled(code, draft, chosen)
        return (None if len(chosen) < len(kinds) else filled), chosen

    def local(self, draft: Draft) -> bool:
        """An operation of torch."""
        table: Sequence[Any] = OUT_OF_PLACE
        if draft.statics and self._rng.random() < 0.4:
            name, (_, codes) = self._rng.choice(draft.statics)
            table = [(kinds, code.replace("$s", name)) for kinds, code in codes]
        elif draft.place == "row" and self._rng.random() < 0.06:
            table = RANDOM
        filled, chosen = self._drawn(table, draft)
        if filled is None:
            return False
        operands = [draft.env[name][0] for name in chosen]
        if "logcumsumexp" in filled and draft.depth:
            return False  # torch 2.13 gives NaN or 0 for second derivatives, as the mode may be
        if "linalg.solve" in filled and draft.depth > 1:
            return False  # torch 2.13 differs in the gradient of its tangent
        if "logsumexp" in filled and not operands[0].numel():
            return False  # its tangent, a sum of nothing, is NaN in torch 2.13
        if "einsum" in filled and len({x.dtype for x in operands}) > 1:
            return False  # an error, but not of something that is empty
        return self.add(draft, Local((self.name("v"),), filled, tuple(chosen)))

    def written(self, draft: Draft) -> bool:
        """A copy that is then written to."""
        filled, chosen = self._drawn(IN_PLACE, draft)
        if filled is None:
            return False
        if "alpha" in filled and draft.depth > 1:
            return False  # torch 2.13 crashes in its third tangent under a dispatch mode
        copy = self.name("v")
        if len(chosen) > 1 and self.varying(chosen[:1]) != draft.everywhere:
            return False  # torch.func.vmap does not write what differs into what does not
        if not draft.env[chosen[0]][0].numel():
            return False  # torch.func.vmap does not differentiate writes to nothing
        if not self.add(draft, Local((copy,), "{0}.clone()", (chosen[0],))):
            return False
        target = copy
        if self._rng.random() < 0.4:
            view = self._filled(self._rng.choice(VIEWS), draft, [copy])
            if view is None or not self.add(draft, Local((self.name("v"),), view, (copy,))):
                return False
            target = draft.names[-1]
            if not draft.env[target][0].numel():
                return False  # torch.func.vmap does not differentiate writes to nothing
            if self._rng.random() < 0.3:
                target = copy  # which the view then sees
        return self.add(draft, Local((), filled, (target, *chosen[1:])))

    def _filled(self, code: str, draft: Draft, names: list[str]) -> str | None:
        ndim = draft.env[names[0]][0].dim() if names else 0
        if "$d" in code and not ndim:
            return None
        d = self._rng.randrange(-ndim, ndim) if ndim else 0
        return code.replace("$d", str(d)).replace("$k", str(self._rng.choice((1, 2, 3))))

    def placed(self, draft: Draft) -> None:
        """Put a value on the devices before a call."""
        name = self.pick(draft)
        if name is None or self._rng.random() < 0.7:
            return
        codes = ["tp.replicate({0})"]
        shape = draft.env[name][0].shape
        if shape and 0 < shape[0] <= DEVICES:
            codes.append(f"tp.device_put({{0}}, tp.devices()[:{shape[0]}])")
        for dim, size in enumerate(shape):
            if size and size % 2 == 0:
                spec = ", ".join(["None"] * dim + ["'d'"])
                mesh = "tp.Mesh(tp.devices()[:2], ('d',))"
                codes.append(f"tp.device_put({{0}}, tp.NamedSharding({mesh}, tp.P({spec})))")
        model = f"{{0}}.clone().view({tuple(shape)})"  # of this shape only
        step = Local((self.name("v"),), self._rng.choice(codes), (name,), model)
        self.add(draft, step)


def is_of_kind(kind: str, value: Any) -> bool:
    dtype = value.dtype
    real = dtype.is_floating_point
    whole = not real and not dtype.is_complex and dtype != torch.bool
    return {
        "f": real,
        "c": dtype.is_complex,
        "i": whole,
        "b": dtype == torch.bool,
        "n": real or dtype.is_complex or whole,
        "a": True,
    }[kind]


def _moderate(rows: Rows, most: int) -> bool:
    """Whether the rows are alike, small, finite and not large."""
    first = rows[0]
    if not isinstance(first, torch.Tensor) or first.numel() > most or first.dim() > 4:
        return False
    if any(row.shape != first.shape or row.dtype != first.dtype for row in rows):
        return False
    if first.dtype == torch.complex32:
        return False  # torch cannot even compare them
    return all(
        not row.numel()
        or bool(row.detach().to(torch.complex128).abs().nan_to_num(posinf=0.0).max() < LARGEST)
        for row in rows
    )


class Collectives(Steps):
    """Makes collectives."""

    single_axes = 3
    """How often one axis is taken, beside any number of them."""
    reductions: tuple[str, ...] = REDUCTIONS
    permutations: tuple[str, ...] = ("ppermute", "ppermute", "pshuffle", "pbroadcast")

    def collective(self, draft: Draft) -> bool:
        """A collective over one or several axes, perhaps in groups."""
        rng = self._rng
        axes = [name for name, _ in draft.grid if name in draft.reach]
        counts = [1] * self.single_axes + list(range(1, len(axes) + 1))
        chosen = rng.sample(axes, rng.choice(counts))
        places = frozenset(k for k, (name, _) in enumerate(draft.grid) if name in chosen)
        size = count(tuple(draft.grid[k] for k in places))
        named: Any = chosen[0] if len(chosen) == 1 and rng.random() < 0.8 else tuple(chosen)
        kind = rng.choice(("reduce", "reduce", "gather", "scatter", "exchange", "permute", "index"))
        if kind == "index":
            step = Collective((self.name("v"),), "axis_index", (), named)
            return self.add(draft, step)
        name = self.pick(draft, "n" if kind in ("reduce", "scatter") else "a")
        if name is None:
            return False
        step = getattr(self, f"_{kind}")(draft, name, named, size)
        if step is None:
            return False
        other = self.pick(draft, "f")
        if kind in ("reduce", "permute") and other is not None and rng.random() < 0.2:
            step = replace(step, args=(*step.args, other), outs=(*step.outs, self.name("v")))
        return self.add(draft, step)

    def _reduce(self, draft: Draft, x: str, axes: Any, size: int) -> Step:
        rng = self._rng
        operation = rng.choice(self.reductions)
        ndim = draft.env[x][0].dim()
        if draft.env[x][0].dtype.is_complex:
            operation = "psum"
        if ndim and rng.random() < 0.15:
            names = list(axes) if isinstance(axes, tuple) else [axes]
            names.insert(rng.randint(0, len(names)), rng.randrange(-ndim, ndim))
            return Collective((self.name("v"),), operation, (x,), tuple(names))
        options = self._groups(draft, size, equal=False)
        return Collective((self.name("v"),), operation, (x,), axes, options)

    def _groups(self, draft: Draft, size: int, equal: bool, odds: float = 0.35) -> Any:
        """``axis_index_groups`` of an axis."""
        rng = self._rng
        if size == 1 or draft.place == "blocks" or rng.random() > odds:
            return ()
        order = list(range(size))
        if rng.random() < 0.6:
            rng.shuffle(order)
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        each = rng.choice(divisors)
        groups = [order[k : k + each] for k in range(0, size, each)]
        if not equal and rng.random() < 0.5:
            cut = rng.randint(1, size - 1)
            groups = [order[:cut], order[cut:]]
        return (("axis_index_groups", groups),)

    def _gather(self, draft: Draft, x: str, axes: Any, size: int) -> Step | None:
        rng, ndim = self._rng, draft.env[x][0].dim()
        options = self._groups(draft, size, equal=True)
        if ndim and rng.random() < 0.4:
            options += (("axis", rng.randrange(-ndim, ndim)), ("tiled", True))
        else:
            options += (("axis", rng.randint(-ndim - 1, ndim)),)
        return Collective((self.name("v"),), "all_gather", (x,), axes, options)

    def _scatter(self, draft: Draft, x: str, axes: Any, size: int) -> Step | None:
        options, prepared = self._cut_in_groups(draft, x, size)
        if prepared is None:
            return None
        name, dim, tiled = prepared
        options += (("scatter_dimension", dim), ("tiled", tiled))
        return Collective((self.name("v"),), "psum_scatter", (name,), axes, options)

    def _exchange(self, draft: Draft, x: str, axes: Any, size: int) -> Step | None:
        rng = self._rng
        options, prepared = self._cut_in_groups(draft, x, size)
        if prepared is None:
            return None
        name, dim, tiled = prepared
        ndim = draft.env[name][0].dim()
        if not tiled and rng.random() < 0.3:
            given = (*options, ("axis", dim))
            return Collective((self.name("v"),), "pswapaxes", (name,), axes, given)
        to = rng.randrange(-ndim, ndim)
        options += (("split_axis", dim), ("concat_axis", to), ("tiled", tiled))
        return Collective((self.name("v"),), "all_to_all", (name,), axes, options)

    def _cut_in_groups(self, draft: Draft, x: str, size: int) -> tuple[Any, Any]:
        """Groups, and what ``_cut`` gives for the members of one."""
        options = self._groups(draft, size, equal=True)
        return options, self._cut(draft, x, len(options[0][1][0]) if options else size)

    def _cut(self, draft: Draft, x: str, members: int) -> tuple[str, int, bool] | None:
        """A value with a dim that can be cut for so many members, made of ``x`` if need be."""
        rng, shape = self._rng, draft.env[x][0].shape
        tiled = rng.random() < 0.5
        fits = [d for d, s in enumerate(shape) if (s % members == 0 if tiled else s == members)]
        if fits and rng.random() < 0.7:
            d = rng.choice(fits)
            return x, rng.choice((d, d - len(shape))), tiled
        if tiled and not shape:
            return None
        d = rng.randrange(len(shape) + (not tiled))
        join = "cat" if tiled else "stack"
        part = "{0} + k" if is_of_kind("n", draft.env[x][0]) else "{0}"
        code = f"torch.{join}([{part} for k in range({members})], {d})"
        made_of = Local((self.name("v"),), code, (x,))
        if not self.add(draft, made_of):
            return None
        return made_of.outs[0], d, tiled

    def _permute(self, draft: Draft, x: str, axes: Any, size: int) -> Step:
        rng, indices = self._rng, list(range(size))
        kind = rng.choice(self.permutations)
        order = rng.sample(indices, size)
        option: tuple[str, Any] = ("perm", order)
        if kind == "pbroadcast":
            option = ("source", rng.randrange(-size, size))
        elif kind == "ppermute":
            shift = rng.randrange(size)
            pairs = [(k, (k + shift) % size) for k in indices]
            if rng.random() < 0.5:
                pairs = list(zip(indices, order, strict=True))
            if rng.random() < 0.5:
                pairs = rng.sample(pairs, rng.randint(0, size))
            option = ("perm", pairs)
        return Collective((self.name("v"),), kind, (x,), axes, (option,))
