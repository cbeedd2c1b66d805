"""Random programs: every step is run by the reference as it is added, so that all are valid.

The same seed gives the same program.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _fuzz_draft import DEVICES, Draft, is_of_kind
from _fuzz_loops import LARGE, MOST_ROWS, Shards
from _fuzz_models import Grid, count, taken
from _fuzz_operations import SCALARS, STATE, STATICS, Family
from _fuzz_programs import Blocks, Body, Derivative, Local, Map, Program, bodies, used
from _fuzz_reference import Expected, expectation, made, quiet

AROUND = ("torch_grad", "grad", "value_and_grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian")
DONATES = "donate_argnums=0"
FORMS = ("plain", "plain", "dict", "tree", "name")


BLOCKS = "blocks:"
"""Programs of seeds that begin so call a ``shard_map``, also on meshes of eight devices."""


def generate(seed: str) -> Program:
    """The program of a seed."""
    return generated(seed)[0]


@functools.lru_cache(maxsize=512)
def generated(seed: str) -> tuple[Program, list[Expected]]:
    """The program of a seed, and what it gives."""
    for attempt in itertools.count():
        with quiet():
            program = _attempt(random.Random(f"{seed} {attempt}"), seed.startswith(BLOCKS))
        expected = None if program is None else expectation(program)
        if program is not None and expected is not None:
            return program, expected
    raise AssertionError


def _attempt(rng: random.Random, of_blocks: bool) -> Program | None:
    maker = _MakerOfBlocks(rng) if of_blocks else _Maker(rng)
    inputs = maker.inputs()
    draft = Draft({given.name: [made(given)] for given in inputs}, (), [])
    draft.names = [given.name for given in inputs]
    maker.outermost(draft)
    results = [name for step in draft.steps for name in step.outs if name in draft.env]
    kinds = [type(step) for body in _all(draft) for step in body.steps if is_mapped(step)]
    if not kinds or (of_blocks and Blocks not in kinds):
        return None
    body = Body(tuple(given.name for given in inputs), tuple(draft.steps), tuple(results[-10:]))
    return Program(tuple(inputs), body)


def is_mapped(step: object) -> bool:
    """Whether a step runs on the devices."""
    return isinstance(step, Blocks) or (isinstance(step, Map) and step.transform == "pmap")


def _all(draft: Draft) -> list[Body]:
    return list(bodies(Body((), tuple(draft.steps), ())))


class _Maker(Shards):
    """Makes functions of steps: mapped ones, derivatives, and the program itself."""

    odds_of_blocks = 0.25
    odds_of_local = 0.4
    odds_of_no_name = 0.3
    odds_of_torch = 0.0
    """How often a ``vmap`` without a name is torch's own."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._families: dict[str, Family] = {}

    def derivative(self, draft: Draft, fill: Callable[[Draft], None], kinds: Any) -> bool:
        """Differentiate a function that ``fill`` makes."""
        rng = self._rng
        kind = rng.choice(kinds)
        jacobian = kind in ("jacrev", "jacfwd", "hessian")
        several = 1 if jacobian else rng.choice((1, 1, 2))
        found = [self.pick(draft, "f", 6 if jacobian else 24) for _ in range(several)]
        args = [name for name in dict.fromkeys(found) if name is not None]
        if not args or draft.depth > 1 or self._special:
            return False  # no one promises where a product of zero and infinity comes up
        forward = kind in ("jvp", "jacfwd", "hessian")
        if forward and any(not draft.env[name][0].dim() for name in args):
            return False  # torch 2.13 gives float64 for a float32 number that is scaled by 0.5
        lanes = draft.place == "row" and jacobian  # a vmap: random functions raise there
        inner = draft.inner(depth=draft.depth + 1, place="lane" if lanes else draft.place)
        params = self.bind(inner, args, [draft.env[name] for name in args])
        fill(inner)
        result = self._result(inner, kind not in ("vjp", "jvp", "jacrev", "jacfwd"))
        if result is None or (jacobian and inner.env[result][0].numel() > 6):
            return False
        if draft.is_divided and self._is_summed(inner, args):
            return False  # over devices of which some do not come
        along = self._along(draft, kind, args, inner.env[result][0])
        if along is None:
            return False
        body = Body(tuple(params), tuple(inner.steps), (result,))
        outs = {"value_and_grad": 1, "vjp": 1}.get(kind, 0) + len(args)
        names = tuple(self.name("v") for _ in range(2 if kind == "jvp" else outs))
        step = Derivative(names, kind, self.name("f"), body, tuple(args), along)
        return self.add(draft, step)

    def _is_summed(self, inner: Draft, args: list[str]) -> bool:
        """Whether a value meets others along more axes, so that its gradient is a sum over them."""
        names = [name for body in _all(inner) for step in body.steps for name in step.outs]
        met = self._reference.shared_axes(inner.grid) & self.varying(names)
        return any(met - self.varying([name]) for name in args)

    def _result(self, draft: Draft, scalar: bool) -> str | None:
        floats = [name for name in draft.names if is_of_kind("f", draft.env[name][0])]
        if not floats:
            return None
        name = floats[-1]
        if not scalar or (not draft.env[name][0].dim() and self._rng.random() < 0.5):
            return name
        step = Local((self.name("v"),), self._rng.choice(SCALARS), (name,))
        return step.outs[0] if self.add(draft, step) else None

    def _along(
        self, draft: Draft, kind: str, args: list[str], result: torch.Tensor
    ) -> tuple[str, ...] | None:
        """Tangents or a cotangent."""
        steps: list[Local] = []
        if kind == "jvp":
            steps = [Local((self.name("v"),), "torch.cos({0})", (name,)) for name in args]
        elif kind == "vjp":
            shape, numel = tuple(result.shape), result.numel()
            code = f"torch.linspace(-1.0, 2.0, {numel}, dtype={result.dtype}).reshape({shape})"
            steps = [Local((self.name("v"),), code, ())]
        if not all(self.add(draft, step) for step in steps):
            return None
        return tuple(step.outs[0] for step in steps)

    def mapped(
        self,
        draft: Draft,
        transform: str,
        given: Sequence[str] = (),
        mesh: bool = False,
        fill: Callable[[Draft], None] | None = None,
    ) -> bool:
        """Map a function over a dim of some values."""
        rng = self._rng
        args = list(given) or self._arguments(draft)
        axes = self._axes(draft, args, transform)
        if axes is None:
            return False
        size = next(
            draft.env[n][0].shape[a] for n, a in zip(args, axes, strict=True) if a is not None
        )
        nameless = transform == "vmap" and (
            draft.place == "blocks" or rng.random() < self.odds_of_no_name
        )
        axis = None if nameless else self.name("axis")
        grid: Grid = (*draft.grid, (axis, size))
        if count(grid) > MOST_ROWS:
            return False
        form = "plain" if mesh or given else rng.choice(FORMS)
        if (form == "tree" and len(args) < 2) or (form == "name" and transform == "vmap"):
            form = "plain"
        statics = self._statics() if (transform, form, mesh) == ("pmap", "plain", False) else ()
        inner = draft.inner(
            grid=grid,
            reach=draft.reach | ({axis} if axis else set()),
            statics=(*draft.statics, *((name, family) for name, family, _ in statics)),
            place=self._place(draft, transform),
        )
        rows = [taken(draft.env[n], a, size, draft.grid) for n, a in zip(args, axes, strict=True)]
        params = self.bind(inner, args, rows)
        for param, a in zip(params, axes, strict=True):
            self._reference.varies[param] |= frozenset() if a is None else {len(draft.grid)}
        if mesh:
            if not self.mapped(inner, "pmap", params):
                return False
            results = list(inner.steps[0].outs)
        else:
            (fill or self.row)(inner)
            own = [name for name in inner.names if name not in params] or params
            spare = used(Body((), tuple(inner.steps), ()))
            results = [name for name in own if name not in spare][-4:] or own[-1:]
            if rng.random() < 0.3:
                results = list(dict.fromkeys([*results, rng.choice(inner.names)]))
        outs = tuple(self.name("v") for _ in results)
        places = tuple(self._out_axis(inner, name) for name in results)
        body = Body(tuple(params), tuple(inner.steps), tuple(results))
        option = self._option(draft, transform, size) if not mesh and not given else ""
        if nameless and form == "plain" and set(places) == {0}:
            # torch 2.13 puts what all lanes share elsewhere wrongly
            form = "torch" if self._forms.random() < self.odds_of_torch else form
        step = Map(
            outs,
            transform,
            self.name("f"),
            axis,
            body,
            tuple(args),
            axes,
            places,
            form,
            option,
            tuple((name, text) for name, _, text in statics),
        )
        return self.add(draft, step)

    def _statics(self) -> tuple[tuple[str, Family, str], ...]:
        """Perhaps a static argument: its name, what it may be, and its value as source."""
        if self._rng.random() < 0.75:
            return ()
        name, family = self.name("s"), self._rng.choice(STATICS)
        self._families[name] = family
        text = self._rng.choice(family[0])
        self._reference.statics[name] = eval(text, {"torch": torch})
        return ((name, family, text),)

    def _option(self, draft: Draft, transform: str, size: int) -> str:
        if transform == "vmap" or draft.grid or self._rng.random() < 0.8:
            return ""
        options = [f"axis_size={size}", "donate_argnums=()"]
        if size <= DEVICES:
            options.append(f"devices=tp.devices()[:{size}][::-1]")
        return self._rng.choice(options)

    def _arguments(self, draft: Draft) -> list[str]:
        found = [self.pick(draft) for _ in range(self._rng.choice((1, 2, 2, 3)))]
        return [name for name in dict.fromkeys(found) if name is not None]

    def _axes(self, draft: Draft, args: list[str], transform: str) -> tuple[int | None, ...] | None:
        """A dim of every argument, all of one size; None for those that have none of it."""
        rng = self._rng
        most = 4 if transform == "vmap" else 16
        shapes = [draft.env[name][0].shape for name in args]
        sizes = [s for shape in shapes for s in shape if 0 < s <= most]
        if not sizes:
            return None
        size = max(sizes) if transform == "pmap" and rng.random() < 0.7 else rng.choice(sizes)
        axes: list[int | None] = []
        for shape in shapes:
            dims = [d for d, s in enumerate(shape) if s == size]
            d = rng.choice(dims) if dims and rng.random() < 0.85 else None
            axes.append(d - len(shape) if d is not None and rng.random() < 0.2 else d)
        return None if all(axis is None for axis in axes) else tuple(axes)

    def _out_axis(self, inner: Draft, name: str) -> int | None:
        place, ndim = len(inner.grid) - 1, inner.env[name][0].dim()
        if place not in self.varying([name]) and self._rng.random() < 0.6:
            return None
        return self._rng.choice((0, 0, self._rng.randint(-ndim - 1, ndim)))

    # --- bodies -----------------------------------------------------------------------------------

    def row(self, draft: Draft, most: int = 5) -> None:
        """Fill a body that runs on one row."""
        rng, wanted = self._rng, self._rng.randint(1, most)
        for _ in range(40):
            if len(draft.steps) >= wanted:
                return
            dice = rng.random()
            if dice < self.odds_of_local:
                self.local(draft)
            elif dice < 0.66 and draft.reach:
                self.collective(draft)
            elif dice < 0.72:
                self.written(draft)
            elif dice < 0.84:
                self.loop(draft)
            elif dice < 0.85 and draft.place == "row" and draft.names:
                self.add(draft, Local((), "tp.debug.print('{{}}', {0})", self._any(draft), "pass"))
            elif dice < 0.92 and len(draft.grid) < 3:
                self.mapped(draft, self._lanes(draft))
            elif draft.depth < 2:
                self.derivative(draft, self.row, AROUND)

    def outermost(self, draft: Draft) -> None:
        """Fill the body in the caller's process."""
        rng = self._rng
        for _ in range(rng.choice((1, 1, 2, 3))):
            self.placed(draft)
            dice = rng.random()
            if dice < 0.15:
                self.donating(draft)
            elif dice < 0.5:
                self.pmapped(draft)
            elif dice < 0.85:
                self.derivative(draft, self.pmapped, (*AROUND, "backward"))
            else:
                self.mapped_around(draft)
        later = (self.local, self.local, self.local, self.written, self.loop)
        later += (self.again, self.again, self.changed)
        for _ in range(rng.choice((0, 1, 2, 4, 8))):
            rng.choice(later)(draft)

    def changed(self, draft: Draft) -> bool:
        """Change the module that functions close over, then call again."""
        self.add(draft, Local((), self._rng.choice(STATE), ()))
        return self.again(draft)

    def donating(self, draft: Draft) -> bool:
        """A call that consumes a value, which nothing uses later."""
        name = self.pick(draft)
        if name is None:
            return False
        code = self._rng.choice(("{0}.clone()", "tp.replicate({0})"))
        given = Local((self.name("v"),), code, (name,), "{0}.clone()")
        if not self.add(draft, given) or not self.mapped(draft, "pmap", given.outs):
            return False
        step = draft.steps[-1]
        assert isinstance(step, Map)
        if given.outs[0] in used(step.body):
            return True
        draft.steps[-1] = dataclasses.replace(step, option=DONATES)
        draft.names.remove(given.outs[0])
        del draft.env[given.outs[0]]
        return True

    def _place(self, draft: Draft, transform: str) -> str:
        if draft.place == "blocks":
            return "blocks"
        return "row" if transform == "pmap" and draft.place != "lane" else "lane"

    def _lanes(self, draft: Draft) -> str:
        """The transform of a map inside another: blocks have no devices to share."""
        return self._rng.choice(("vmap", "vmap", "vmap" if draft.place == "blocks" else "pmap"))

    def _any(self, draft: Draft) -> tuple[str, ...]:
        return (self._rng.choice(draft.names),)

    def pmapped(self, draft: Draft) -> None:
        """A call of a pmapped function, and perhaps operations on its results."""
        for _ in range(6):
            if self._rng.random() < self.odds_of_blocks:
                if self.blocks(draft):
                    break
            elif self.mapped(draft, "pmap", mesh=self._rng.random() < 0.2):
                break
        for _ in range(self._rng.choice((0, 0, 1, 2))):
            self.local(draft)

    def mapped_around(self, draft: Draft) -> None:
        """A vmap of a function that has a pmap in it."""
        self.mapped(draft, "vmap", fill=self.pmapped)

    def again(self, draft: Draft) -> bool:
        """Call a mapped function again, with other values."""
        rng = self._rng
        calls = [s for s in draft.steps if is_mapped(s) and getattr(s, "option", "") != DONATES]
        if not calls:
            return False
        call = rng.choice(calls)
        args = []
        for name in call.args:
            shape = draft.env[name][0].shape
            like = [n for n in draft.env if draft.env[n][0].shape == shape and n in draft.names]
            args.append(rng.choice(like or [name]))
        outs = tuple(self.name("v") for _ in call.outs)
        changes: dict[str, Any] = {"outs": outs, "args": tuple(args)}
        if isinstance(call, Map):
            changes["statics"] = tuple(
                (name, rng.choice(self._families[name][0])) for name, _ in call.statics
            )
        return self.add(draft, dataclasses.replace(call, **changes))


class _MakerOfBlocks(_Maker):
    """Makes programs of ``shard_map``: of values that eight devices can cut, and of collectives."""

    meshes = LARGE
    rows = (4, 8, 8, 16)
    most_elements = 96
    numbers_of_arguments = (1, 3, 6)
    odds_of_blocks = 1.0
    odds_of_local = 0.2
    odds_of_no_name = 0.8
    odds_of_torch = 0.9
    single_axes = 0
    reductions = ("psum", "pmean", "pmax", "pmin")
    permutations = ("ppermute", "pshuffle", "pbroadcast")
