"""What ``jit`` runs for one kind of call: a plan, and where its results go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchpmap._base.ambient import ambient
from torchpmap._base.devices import Device
from torchpmap._base.pytree import Structure, flatten
from torchpmap._layout.layout import Layout, replicated_layout
from torchpmap._plan.cost import Cost, cost_of
from torchpmap._plan.lower import Target
from torchpmap._plan.plan import Captured, Drawn
from torchpmap._plan.whole_plan import grid_of, plan_of
from torchpmap._runtime.base import Handle
from torchpmap._runtime.current import devices as all_devices
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._sharded.constraints import constrained, wishes
from torchpmap._sharded.device_put import handle_of
from torchpmap._sharded.tensor import ShardedTensor, make_sharded
from torchpmap._sharded.transfer import gather
from torchpmap._sharded.views import is_linked, write
from torchpmap._trace.capture import is_real
from torchpmap._trace.compile import Backend
from torchpmap._trace.optimizers import Numbers
from torchpmap._trace.trace import Untraceable
from torchpmap._trace.whole import trace_whole
from torchpmap.random._streams import new_seed


@dataclass(frozen=True)
class Options:
    """What ``jit`` was given."""

    name: str
    where: str
    """``file:line`` of the function."""
    backend: Backend
    timeout: float | None

    @property
    def prefix(self) -> str:
        return f"jit({self.name})"


class _Numbers:
    """The numbers of an optimizer, as an input."""

    def __init__(self, numbers: Numbers, layout: Layout) -> None:
        self._numbers, self._layout = numbers, layout

    def handle(self) -> Handle:
        return handle_of(self._numbers.read(), self._layout)


class _Gradient:
    """The gradient that a leaf has when the function is called, as an input."""

    def __init__(self, leaf: torch.Tensor, layout: Layout) -> None:
        self._leaf, self._layout = leaf, layout

    def handle(self) -> Handle:
        return handle_of(self._leaf.grad, self._layout)


class _Argument(NamedTuple):
    """A tensor that the function was given."""

    place: int

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        return tensors[self.place]


class _Same(NamedTuple):
    """A tensor that the function closes over."""

    tensor: torch.Tensor

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self.tensor


class _GradientOf(NamedTuple):
    """The gradient of another target."""

    leaf: _Argument | _Same

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self.leaf.of(tensors).grad


_RESULT = object()
"""Stands for what the graph returns."""


class Program:
    """What runs for one kind of call."""

    def __init__(
        self, fun: Callable[..., Any], options: Options, leaves: list[Any], structure: Structure
    ) -> None:
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        seed = new_seed()
        fun = _on_tensors(fun, leaves, structure)
        device = current_runtime().device
        traced = trace_whole(fun, tensors, device, seed, _wish_for_gradient)
        if traced.is_differentiable:
            raise Untraceable(
                "backward() may follow outside of it",
                options.where,
                "loss.backward() in the function, or torch.no_grad() around the call",
            )
        self._traced = traced
        self._tree, self._values = traced.returned
        devices = _devices_of([*tensors, *traced.captured])
        place = functools.partial(_layout_of, devices)
        self._inputs = [self._input(x, seed, place(x)) for x in traced.captured]
        self._layouts = [place(x) for x in tensors]
        inputs = [*map(place, traced.captured), *self._layouts]
        kept = [place(x) for x in (*traced.written, *traced.graded)]
        grid = grid_of(devices, [*inputs, *kept, *wishes(traced.graph).values()])
        if grid is None:
            raise Untraceable(
                "its values lie on meshes that have no grid in common",
                options.where,
                "one mesh for all",
            )
        target = Target(
            options.prefix,
            options.name,
            grid,
            options.backend,
            seed,
            ambient(),
            options.timeout,
            what=f"`{options.name}`",
            where=options.where,
        )
        weights = [k for k, x in enumerate(traced.captured) if type(x) is ShardedTensor]
        wanted = [*([None] * traced.num_results), *kept]
        self.plan, self.resharded = plan_of(target, traced, inputs, weights, wanted)
        self._find_targets(tensors)

    def _input(self, x: torch.Tensor, seed: torch.Tensor, layout: Layout) -> Any:
        if x is seed:
            return Drawn(x, layout)
        for numbers in self._traced.optimizers.numbers:
            if x is numbers.vector:
                return _Numbers(numbers, layout)
        leaf = self._traced.grad_of.get(id(x))
        return Captured(x, layout) if leaf is None else _Gradient(leaf, layout)

    def _find_targets(self, tensors: list[torch.Tensor]) -> None:
        traced = self._traced
        places = {id(x): k for k, x in enumerate(tensors)}

        def target(x: torch.Tensor) -> _Argument | _Same:
            return _Argument(places[id(x)]) if id(x) in places else _Same(x)

        def written(x: torch.Tensor) -> _Argument | _Same | _GradientOf:
            leaf = traced.grad_of.get(id(x))
            return target(x) if leaf is None else _GradientOf(target(leaf))

        self._written = list(map(written, traced.written))
        self._graded = list(map(target, traced.graded))
        self._cleared = list(map(target, traced.cleared))
        self._asked = [(target(x), had) for x, had in traced.asked]
        self._closed = [x for x in traced.captured if id(x) not in traced.grad_of]
        self._kinds = list(map(_kind, self._closed))
        self._own = set(map(id, self._closed))
        self._writes = bool(self._written or self._graded)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all is as it was when the function was traced, but for values."""
        if not self.plan.holds() or list(map(_kind, self._closed)) != self._kinds:
            return False
        for target, had in self._asked:
            if (target.of(tensors).grad is not None) is not had:
                return False
        return all(numbers.hold() for numbers in self._traced.optimizers.numbers)

    def refuses(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a write could reach one value under two names."""
        if not self._writes:
            return False
        ids = set(map(id, tensors))
        return len(ids) < len(tensors) or not ids.isdisjoint(self._own)

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        plan, num = self.plan, self._traced.num_results
        held = [each.handle() for each in self._inputs]
        held += map(handle_of, tensors, self._layouts)
        targets = [target.of(tensors) for target in self._written]
        graded = [target.of(tensors) for target in self._graded]

        def give_up() -> None:
            for leaf in (*graded, *(target.of(tensors) for target in self._cleared)):
                leaf.grad = None
            for each in targets:
                if type(each) is ShardedTensor and not is_linked(each):
                    each._handle = None

        handles = plan.run(held, None, give_up)
        made = iter(zip(plan.outputs, handles, strict=True))
        results = [make_sharded(*next(made)) for _ in range(num)]
        for target in targets:
            _write(target, *next(made))
        for leaf in graded:
            leaf.grad = make_sharded(*next(made))
        for numbers in self._traced.optimizers.numbers:
            numbers.advance()
        return self._tree.unflatten(self._returned(results, tensors))

    def _returned(self, results: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
        rest = iter(results)
        return [
            next(rest)
            if value is _RESULT
            else value.of(tensors)
            if isinstance(value, _Argument | _Same)
            else value
            for value in self._values
        ]


class LoweredProgram:
    """A function of ``jit`` for certain arguments, traced and not yet compiled.

    Attributes:
        resharded: operands that operations cannot take as they lie, and so are sent around.

    Example:
        >>> import torch, torchpmap as tp
        >>> mesh = tp.make_mesh((4,), ("x",))
        >>> w = tp.device_put(torch.zeros(8, 4), tp.NamedSharding(mesh, tp.P("x")))
        >>> x = tp.device_put(torch.zeros(8, 8), tp.NamedSharding(mesh, tp.P("x")))
        >>> lowered = tp.jit(lambda x: x @ w).lower(x)
        >>> print(*lowered.resharded)
        aten.mm.default: float32[8, 4] from PartitionSpec('x',) to PartitionSpec() (128 B)
        >>> print(lowered.cost())
        128 flops on each device
        all_gather_into_tensor over x: 32 B
        memory: 96 B arguments, 32 B results, at most 256 B temporaries

    Source: ``jax.stages.Lowered``.
    """

    def __init__(self, program: Program) -> None:
        self._plan = program.plan
        self.resharded = program.resharded

    @property
    def graph(self) -> torch.fx.GraphModule:
        """The graph that every device runs: [its index,] captured tensors, arguments."""
        return self._plan.definition.graph

    def as_text(self) -> str:
        """The graph as text, one operation a line, and then what is resharded."""
        notes = [f"# resharded: {each}" for each in self.resharded]
        return "\n".join([str(self.graph.graph).strip(), *notes])

    def cost(self) -> Cost:
        """Count, from shapes alone, what a call costs one device."""
        return cost_of(self._plan)

    def __repr__(self) -> str:
        return f"<lowered {self._plan.prefix}>"


def _kind(tensor: Any) -> Any:
    """What must not change of a tensor that a function closes over."""
    where = tensor._layout if type(tensor) is ShardedTensor else (tensor.shape, tensor.dtype)
    return where, tensor.requires_grad


def _write(target: torch.Tensor, layout: Layout, handle: Handle) -> None:
    """Give a tensor of the caller's its new value."""
    if type(target) is not ShardedTensor:
        with torch.no_grad():
            target.copy_(gather(layout, handle))
        return
    if target._handle is None:
        target._handle = handle
    else:
        write(target, handle, make_sharded)
    if not target.is_inference():
        torch.autograd.graph.increment_version(target)


def _on_tensors(fun: Callable[..., Any], leaves: Sequence[Any], structure: Structure) -> Any:
    """``fun`` as a function of the tensors among these arguments; see ``whole.Fun``."""

    def of_tensors(given: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        rest = iter(given)
        args, kwargs = structure.unflatten(
            [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        )
        places = {id(x): k for k, x in enumerate(given)}
        values, tree = flatten(fun(*args, **kwargs))
        template: list[Any] = []
        results = []
        for value in values:
            if id(value) in places:
                template.append(_Argument(places[id(value)]))
            elif isinstance(value, torch.Tensor) and is_real(value):
                template.append(_Same(value))
            elif isinstance(value, torch.Tensor):
                template.append(_RESULT)
                results.append(value)
            else:
                template.append(value)
        return (tree, template), results

    return of_tensors


def _wish_for_gradient(real: torch.Tensor, stand_in: torch.Tensor) -> None:
    """Let the gradient of a parameter that is cut be made cut, before anything uses it."""
    if type(real) is ShardedTensor:
        layout, _ = real._alive()
        if not layout.is_replicated:
            stand_in.register_hook(lambda grad: constrained(grad, layout.sharding))


def _devices_of(tensors: Sequence[torch.Tensor]) -> tuple[Device, ...]:
    """Where the tensors are, which must be the same devices; all if they are in this process."""
    found = {x._alive()[0].devices for x in tensors if type(x) is ShardedTensor}
    if len(found) > 1:
        one, other, *_ = (" ".join(map(str, devices)) for devices in found)
        raise ValueError(
            f"jit: values are on {one} and on {other}, but a program runs on the same devices for "
            "all. Move them with torchpmap.device_put."
        )
    return found.pop() if found else tuple(all_devices())


def _layout_of(devices: tuple[Device, ...], x: torch.Tensor) -> Layout:
    if type(x) is ShardedTensor:
        return x._alive()[0]
    return replicated_layout(tuple(x.shape), x.dtype, devices)
