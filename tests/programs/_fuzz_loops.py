"""Random loops and branches, and ``shard_map`` calls on meshes of one to three axes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from _fuzz_draft import Collectives, Draft, is_of_kind
from _fuzz_models import Grid, Rows, count, cut, spread
from _fuzz_operations import ASSOCIATIVE, WRITES
from _fuzz_programs import Blocks, Body, Derivative, Local, Loop, Map, Spec, bodies, used

KINDS = (
    *("scan", "scan", "scan", "map", "fori_loop", "while_loop"),
    *("cond", "cond", "switch", "associative_scan"),
)
MOST_STEPS, MOST_CARRIED, DEEPEST = 4, 12, 2
MOST_ROWS = 32
MESHES = ((2,), (4,), (2, 2), (2, 2), (1, 2))
LARGE = ((4,), (2, 2), (4, 1), (2, 4), (2, 2, 2), (8,))
"""For eight devices."""
FORMS = ("plain", "plain", "short", "tuples", "tree")


class Loops(Collectives):
    """Makes loops, whose bodies may write to what they get."""

    def row(self, draft: Draft, most: int = 5) -> None:
        raise NotImplementedError

    def loop(self, draft: Draft) -> bool:
        """A loop or a choice among branches."""
        kind = self._rng.choice(KINDS)
        if draft.loops >= DEEPEST or (kind == "while_loop" and draft.depth):
            return False  # a while_loop has no derivative in reverse mode
        return bool(getattr(self, f"_{kind}")(draft))

    def bind(self, inner: Draft, args: Sequence[str], rows: Sequence[Rows]) -> list[str]:
        """Parameters for some values, which vary as ``args`` do."""
        params = [self.name("p") for _ in rows]
        for param, name, values in zip(params, args, rows, strict=True):
            inner.env[param] = [row.detach().clone() for row in values]
            inner.names.append(param)
            self._reference.varies[param] = self.varying([name])
        return params

    def _body(
        self, draft: Draft, args: Sequence[str], rows: Sequence[Rows], is_same: bool = True
    ) -> tuple[Draft, list[str]]:
        """A body of some values with a few steps; ``is_same``: all devices run it together."""
        inner = draft.inner(loops=draft.loops + 1)
        if not is_same:  # no collectives, nor prints, which come in order
            inner.reach, inner.place, inner.is_divided = frozenset(), "lane", True
        params = self.bind(inner, args, rows)
        self.row(inner, most=3)
        # what transforms return may share memory with what they take, which the reference copies
        may_share = any(isinstance(step, Map | Derivative) for step in inner.steps)
        for param in params:
            fits = [code for kind, code in WRITES if is_of_kind(kind, inner.env[param][0])]
            if fits and inner.env[param][0].numel() and self._rng.random() < 0.2:
                write = Local((), self._rng.choice(fits), (param,))
                if not may_share:
                    self.add(inner, write)
        return inner, params

    def _like(self, inner: Draft, wanted: torch.Tensor) -> str | None:
        """A late value of a body that is of the same kind."""
        fits = [
            name
            for name in inner.names
            if inner.env[name][0].shape == wanted.shape and inner.env[name][0].dtype == wanted.dtype
        ]
        if fits:
            return fits[-1]
        name, code = self.name("v"), f"torch.ones({tuple(wanted.shape)}, dtype={wanted.dtype})"
        return name if self.add(inner, Local((name,), code, ())) else None

    def _carried(self, draft: Draft) -> list[str]:
        found = [self.pick(draft, "n", MOST_CARRIED) for _ in range(self._rng.choice((1, 1, 2)))]
        return [name for name in dict.fromkeys(found) if name is not None]

    def _scanned(self, draft: Draft) -> list[str]:
        """One or two values with the same number of rows."""
        fits = [
            name
            for name in draft.names
            if draft.env[name][0].dim() and draft.env[name][0].shape[0] <= MOST_STEPS
        ]
        if not fits:
            return []
        first = self._rng.choice(fits)
        size = draft.env[first][0].shape[0]
        others = [name for name in fits if draft.env[name][0].shape[0] == size]
        return list(dict.fromkeys([first, self._rng.choice(others)]))

    def _rows(self, draft: Draft, names: Sequence[str]) -> list[Rows]:
        return [spread(draft.env[name], draft.grid) for name in names]

    def _scan(self, draft: Draft) -> bool:
        carries, xs = self._carried(draft), self._scanned(draft)
        if self._rng.random() < 0.3:
            xs = []
        length = None if xs else self._rng.choice((0, 1, 2, 3))
        if not carries or any(not draft.env[name][0].shape[0] for name in xs):
            return False
        first = [[row[0] for row in rows] for rows in self._rows(draft, xs)]
        args = [*carries, *xs]
        inner, params = self._body(draft, args, [*self._rows(draft, carries), *first])
        results = [self._like(inner, draft.env[name][0]) for name in carries]
        ys = [name for name in inner.names if name not in params][-2:]
        return self._looped(
            draft, "scan", [(inner, params, [*results, *ys])], args, len(carries), length=length
        )

    def _map(self, draft: Draft) -> bool:
        xs = self._scanned(draft)
        if not xs or not draft.env[xs[0]][0].shape[0]:
            return False
        first = [[row[0] for row in rows] for rows in self._rows(draft, xs)]
        inner, params = self._body(draft, xs, first)
        return self._looped(draft, "map", [(inner, params, inner.names[-2:])], xs)

    def _fori_loop(self, draft: Draft) -> bool:
        carries = self._carried(draft)
        index = [torch.tensor(0)] * count(draft.grid)
        inner, params = self._body(draft, ["", *carries], [index, *self._rows(draft, carries)])
        results = [self._like(inner, draft.env[name][0]) for name in carries]
        length = self._rng.choice((0, 1, 2, 3))
        bodies = [(inner, params, results)]
        return self._looped(draft, "fori_loop", bodies, carries, len(carries), length=length)

    def _while_loop(self, draft: Draft) -> bool:
        carries, by = self._carried(draft), self._chosen(draft, "% 3")
        if by is None:
            return False
        is_same = not self.varying([by])
        inner, params = self._body(draft, carries, self._rows(draft, carries), is_same)
        results = [self._like(inner, draft.env[name][0]) for name in carries]
        bodies = [(inner, params, results)]
        return self._looped(draft, "while_loop", bodies, carries, len(carries), by=(by,))

    def _cond(self, draft: Draft) -> bool:
        return self._branches(draft, "cond", self._chosen(draft, "% 2 == 0"), 2)

    def _switch(self, draft: Draft) -> bool:
        number = self._rng.choice((1, 2, 3))
        return self._branches(draft, "switch", self._chosen(draft, "% 4 - 1"), number)

    def _branches(self, draft: Draft, kind: str, by: str | None, number: int) -> bool:
        operands = self._carried(draft)
        if by is None:
            return False
        bodies: list[tuple[Draft, list[str], list[str | None]]] = []
        for _ in range(number):
            is_same = not self.varying([by])
            inner, params = self._body(draft, operands, self._rows(draft, operands), is_same)
            results: list[str | None] = [*inner.names[-2:]]
            if bodies:
                first, _, wanted = bodies[0]
                results = [self._like(inner, first.env[name or ""][0]) for name in wanted]
            bodies.append((inner, params, results))
        return self._looped(draft, kind, bodies, operands, by=(by,))

    def _associative_scan(self, draft: Draft) -> bool:
        xs = self._scanned(draft)[:1]
        if not xs or not draft.env[xs[0]][0].shape[0]:
            return False
        fits = [code for kind, code in ASSOCIATIVE if is_of_kind(kind, draft.env[xs[0]][0])]
        if not fits:
            return False
        inner = draft.inner()
        first = [[row[0] for row in rows] for rows in self._rows(draft, xs)] * 2
        params = self.bind(inner, xs * 2, first)
        name = self.name("v")
        if not self.add(inner, Local((name,), self._rng.choice(fits), tuple(params))):
            return False
        return self._looped(draft, "associative_scan", [(inner, params, [name])], xs)

    def _chosen(self, draft: Draft, code: str) -> str | None:
        """A predicate or an index: of some value, or the same everywhere."""
        given = self.pick(draft, "i")
        name, args = self.name("v"), () if given is None else (given,)
        number = "{0}.long().reshape(-1)[0]" if args else f"torch.tensor({self._rng.randrange(4)})"
        return name if self.add(draft, Local((name,), f"{number} {code}", args)) else None

    def _looped(
        self,
        draft: Draft,
        kind: str,
        parts: Sequence[tuple[Draft, Sequence[str], Sequence[str | None]]],
        args: Sequence[str],
        carries: int = 0,
        **more: Any,
    ) -> bool:
        """Add the loop of these bodies: each as it was drafted, its parameters and its results."""
        found = []
        for inner, params, results in parts:
            known = [name for name in results if name is not None]
            if len(known) < len(results) or not known or not args:
                return False
            found.append(Body(tuple(params), tuple(inner.steps), tuple(known)))
            if self._differs_later(found[-1], args, carries):
                return False
        outs = tuple(self.name("v") for _ in found[0].results)
        option = {"scan": "reverse=True", "associative_scan": "reverse=True", "map": "batch_size=2"}
        chosen = option.get(kind, "") if self._rng.random() < 0.3 else ""
        step = Loop(
            outs, kind, self.name("f"), tuple(found), tuple(args), carries, option=chosen, **more
        )
        return self.add(draft, step)

    def _differs_later(self, body: Body, args: Sequence[str], carries: int) -> bool:
        """Whether a choice in a body is made with collectives, and may be another on each device in
        a later step, as what is carried then varies along more axes.
        """
        chooses = any(isinstance(s, Loop) and s.by for each in bodies(body) for s in each.steps)
        pairs = zip(body.results[:carries], args, strict=False)
        return chooses and any(self.varying([new]) - self.varying([old]) for new, old in pairs)


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
