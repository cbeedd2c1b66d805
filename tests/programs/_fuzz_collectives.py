"""Random collectives, over axes and in groups, of operands that suit them."""

from dataclasses import replace
from typing import Any

from _fuzz_draft import Draft, Steps, is_of_kind
from _fuzz_programs import Collective, Local, Step
from _fuzz_reference import count

REDUCTIONS = ("psum", "psum", "pmean", "pmax", "pmin")


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
