"""Random ``shard_map`` calls on meshes of one to three axes."""

from collections.abc import Callable

from _fuzz_draft import Draft
from _fuzz_loops import Loops
from _fuzz_models import Grid, count
from _fuzz_programs import Blocks, Body, Local, Spec, used
from _fuzz_rows import cut, spread

MOST_ROWS = 32
MESHES = ((2,), (4,), (2, 2), (2, 2), (1, 2))
LARGE = ((4,), (2, 2), (4, 1), (2, 4), (2, 2, 2), (8,))
"""For eight devices."""
FORMS = ("plain", "plain", "short", "tuples", "tree")


class Shards(Loops):
    """Makes functions that are mapped over the blocks of a mesh."""

    meshes: tuple[tuple[int, ...], ...] = MESHES
    numbers_of_arguments: tuple[int, ...] = (1, 2, 2)

    def blocks(self, draft: Draft, fill: Callable[[Draft], None] | None = None) -> bool:
        rng = self._rng
        mesh = tuple((self.name("axis"), size) for size in rng.choice(self.meshes))
        found = [self.pick(draft) for _ in range(rng.choice(self.numbers_of_arguments))]
        args = [name for name in dict.fromkeys(found) if name is not None]
        grid: Grid = (*draft.grid, *mesh)
        if not args or count(grid) > MOST_ROWS:
            return False
        names = [name for name, _ in mesh]
        inner = draft.inner(grid=grid, reach=frozenset(names), place="blocks")
        specs = [self._spec(draft.env[name][0].shape, dict(mesh)) for name in args]
        rows = [
            cut(spread(draft.env[name], draft.grid), spec, mesh)
            for name, spec in zip(args, specs, strict=True)
        ]
        params = self.bind(inner, args, rows)
        first = len(draft.grid)
        for param, spec in zip(params, specs, strict=True):
            along = {first + names.index(axis) for entry in spec for axis in entry}
            self._reference.varies[param] |= along
        check_vma = rng.random() < 0.7
        if check_vma:
            self._reference.typed(names)
        (fill or self.row)(inner)
        spare = used(Body((), tuple(inner.steps), ()))
        own = [name for name in inner.names if name not in params] or params
        results = [name for name in own if name not in spare][-3:] or own[-1:]
        placed = [self._placed(inner, name, mesh, first) for name in results]
        if any(place is None for place in placed):
            return False
        found_places = [place for place in placed if place is not None]
        body = Body(tuple(params), tuple(inner.steps), tuple(name for name, _ in found_places))
        outs = tuple(self.name("v") for _ in results)
        out_specs = tuple(spec for _, spec in found_places)
        step = Blocks(
            outs,
            self.name("f"),
            mesh,
            body,
            tuple(args),
            tuple(specs),
            out_specs,
            check_vma,
            self._forms.choice(FORMS),
        )
        return self.add(draft, step)

    def _spec(self, shape: tuple[int, ...], sizes: dict[str, int]) -> Spec:
        """Axes for the dims, each where it divides."""
        rng, spec = self._rng, [() for _ in shape]
        for axis in rng.sample(list(sizes), len(sizes)):
            for dim in rng.sample(range(len(shape)), len(shape)):
                pieces = sizes[axis]
                for other in spec[dim]:
                    pieces *= sizes[other]
                if shape[dim] and shape[dim] % pieces == 0 and rng.random() < 0.8:
                    spec[dim] = (*spec[dim], axis)
                    break
        return tuple(spec)

    def _placed(self, inner: Draft, name: str, mesh: Grid, first: int) -> tuple[str, Spec] | None:
        """A result and the spec of its whole: an axis along which it varies cuts some dim."""
        rng = self._rng
        varies = self.varying([name])
        axes = [
            axis
            for k, (axis, _) in enumerate(mesh)
            if axis is not None and (first + k in varies or rng.random() < 0.2)
        ]
        if axes and not inner.env[name][0].dim():
            longer = Local((self.name("v"),), "{0}[None]", (name,))
            if not self.add(inner, longer):
                return None
            name = longer.outs[0]
        spec: list[tuple[str, ...]] = [() for _ in inner.env[name][0].shape]
        for axis in rng.sample(axes, len(axes)):
            dim = rng.randrange(len(spec))
            spec[dim] = (*spec[dim], axis)
        return name, tuple(spec)
