"""What ``jit`` runs for one kind of call: a plan, and where its results go."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch.autograd.graph import increment_version

from torchpmap._base.ambient import ambient, for_graph
from torchpmap._base.config import config
from torchpmap._base.devices import Device
from torchpmap._base.storages import own_strides
from torchpmap._base.torch_internals import hooks_of
from torchpmap._layout.layout import Layout, replicated_layout
from torchpmap._plan.plan import Captured, Drawn, Plan
from torchpmap._plan.whole_plan import grid_of, plans_of
from torchpmap._runtime.base import Handle
from torchpmap._runtime.current import devices as all_devices
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._sharded.constraints import constrained, wishes
from torchpmap._sharded.gather_report import tell_of_gather
from torchpmap._sharded.global_view import check_host_values
from torchpmap._sharded.spread import NotOnBlocks
from torchpmap._sharded.tensor import ShardedTensor, make_all
from torchpmap._sharded.transfer import gather
from torchpmap._sharded.views import Changed, in_turn, is_linked, linked, write
from torchpmap._trace.compile import parse_compile
from torchpmap._trace.graphs import results_of
from torchpmap._trace.optimizers import Numbers
from torchpmap._trace.untraceable import Untraceable
from torchpmap._trace.whole import WholeTrace, trace_whole
from torchpmap._transforms.call import CallOptions
from torchpmap._transforms.jit_containers import Changes
from torchpmap._transforms.jit_gradient import Derivable, overwritten
from torchpmap._transforms.jit_values import (
    RESULT,
    Argument,
    ClosedOver,
    GradientOf,
    JitCall,
    Kept,
    Place,
    StepNumbers,
    Value,
    direct,
    returned,
)
from torchpmap.random._streams import new_seed


@dataclass(frozen=True)
class Options(CallOptions):
    """What ``jit`` was given."""

    out_shardings: Any
    where: str = ""
    """``file:line`` of the function."""

    @property
    def prefix(self) -> str:
        return f"jit({self.name})"


class JitOptions(TypedDict, total=False):
    """The keyword arguments of ``jit``, for its overloads; its docstring explains them."""

    out_shardings: Any
    compile: bool | dict[str, Any]
    fullgraph: bool
    timeout: float | None


def make_options(name: str, *, compile: Any, **others: Any) -> Options:
    """The settings of ``jit``, checked; ``others``: those that stay as they are."""
    return Options(name=name, backend=parse_compile(compile), **others)


Advance = tuple[Numbers, list[Any]]
"""The numbers of an optimizer, and what tells them that they count a call already."""

_EQUAL = (
    "Make them equal (torchpmap.multihost.broadcast; for a seed, torch.manual_seed with one "
    "number), or cut rows among the devices with torchpmap.shard_batch."
)
SHARED = "it writes to an argument that shares its value with another or a closure"


@dataclass
class Turns:
    """The calls with effects, of all programs."""

    num_ended: int = 0


turns = Turns()
"""An instance, as Python uses a class slowly after one of its attributes was set."""


class Program:
    """What runs for one kind of call."""

    changes = Changes()
    _told = "allow"
    """The last setting ``tp.config.gathers`` that it has heeded."""

    def __init__(
        self,
        call: JitCall,
        options: Options,
        optimizers: Sequence[torch.optim.Optimizer],
        alike: Sequence[int] = (),
    ) -> None:
        """``alike``: for each of the first results the argument whose gradient it is, which says
        where it is to lie.
        """
        tensors, seed = call.tensors, new_seed()
        device = current_runtime().device
        traced = trace_whole(call.of_tensors, tensors, device, seed, _wish_for_gradient, optimizers)
        self._tree, self._values = traced.returned
        self._num_results, self._overwritten = traced.num_results, traced.overwritten
        devices = _devices_of([*tensors, *traced.captured])
        place = functools.partial(_layout_of, devices)
        self._numbers = {
            id(each.vector): StepNumbers(each, place(each.vector)) for each in traced.numbers
        }
        self._find_targets(traced, tensors)
        self._inputs = [self._input(x, seed, place(x), traced) for x in traced.captured]
        self._inputs += [Value(Argument(k), place(x)) for k, x in enumerate(tensors)]
        self._check_equal(call, options, devices)
        self._direct = [direct(each, tensors) for each in self._inputs]
        inputs_of = {id(x): k for k, x in enumerate(traced.captured)}
        self._counted = [inputs_of[id(each.vector)] for each in traced.counted]
        """Places of the inputs that follow what a call returns."""
        self._leaves = list(map(self._target, traced.pulled))
        del self._places
        inputs = list(map(place, (*traced.captured, *tensors)))
        vectors = (each.vector for each in traced.counted)
        kept = [place(x) for x in (*traced.written, *vectors, *traced.graded)]
        grid = grid_of(devices, [*inputs, *kept, *wishes(traced.graph).values()])
        if grid is None:
            raise Untraceable(
                "its values lie on meshes that have no grid in common",
                options.where,
                "one mesh for all",
            )
        weights = [k for k, x in enumerate(traced.captured) if type(x) is ShardedTensor]
        wanted = [*self._wished(traced, [tensors[k] for k in alike]), *kept]
        paths = zip(self._tree.paths("result"), self._values, strict=True)
        names = tuple(path for path, value in paths if value is RESULT)
        settings = for_graph(ambient())  # its casts are in the graph already
        target = options.target(grid, seed, settings, options.where, names=names)
        given = target, traced.graph, inputs, weights, wanted
        self._derivable = None
        try:
            if traced.pulled:
                layouts = list(map(place, traced.pulled))
                self._derivable = Derivable(*given, tuple(traced.cotangents), layouts)
            plans = self._derivable.first() if self._derivable else plans_of(*given)
            self.plan, self.resharded = plans.forward, plans.resharded
        except NotOnBlocks as error:
            raise Untraceable(str(error), options.where, "indices, or x.contiguous()") from error
        self._prefix = options.prefix

    def _check_equal(self, call: JitCall, options: Options, devices: Sequence[Device]) -> None:
        """Raise if processes give different host values: their copies of the results would differ.
        Once for each kind of call, as it waits for all of them.
        """
        pairs = zip(call.names, call.leaves, strict=True)
        names = [name for name, leaf in pairs if isinstance(leaf, torch.Tensor)]
        given = [each.given(call.tensors, names) for each in self._inputs]
        named = {f"{options.prefix}: {name} (input {k})": x for k, (name, x) in enumerate(given)}
        check_host_values(named, devices, (options.prefix, options.where), _EQUAL)

    @property
    def has_effects(self) -> bool:
        """Whether a second run would not give what the first one did."""
        return bool(self._writes or self._cleared or self._numbers)

    def _wished(self, traced: WholeTrace, alike: Sequence[torch.Tensor]) -> list[Layout | None]:
        """Where results are to lie; None if anywhere."""
        sources = [*alike, *([None] * len(self._values))]
        pairs = zip(self._values, sources, strict=False)
        results = [source for value, source in pairs if value is RESULT]
        made = (node.meta["val"] for node in results_of(traced.graph.graph))
        return list(map(_like, made, results))

    def _input(
        self, x: torch.Tensor, seed: torch.Tensor, layout: Layout, traced: WholeTrace
    ) -> Any:
        if x is seed:
            return Kept(Drawn(x, layout))
        if id(x) in self._numbers:
            return self._numbers[id(x)]
        if id(x) in traced.grad_of:
            return Value(GradientOf(self._target(traced.grad_of[id(x)])), layout)
        is_sharded = type(x) is ShardedTensor
        return Value(ClosedOver(x), layout) if is_sharded else Kept(Captured(x, layout))

    def _find_targets(self, traced: WholeTrace, tensors: Sequence[torch.Tensor]) -> None:
        self._places = {id(x): k for k, x in enumerate(tensors)}
        target, grad_of = self._target, traced.grad_of
        self._written: list[Place] = [
            GradientOf(target(grad_of[id(x)])) if id(x) in grad_of else target(x)
            for x in traced.written
        ]
        self._graded = list(map(target, traced.graded))
        self._cleared = list(map(target, traced.cleared))
        self._required = list(map(target, traced.required))
        self._read_gradients = [
            (target(x), layout_of_gradient(x) if had else None) for x, had in traced.read_gradients
        ]
        self._closed = [x for x in traced.met if id(x) not in grad_of]
        self._kinds = fixed_parts(self._closed)
        self._hooked = [(target(x), _hooks(x)) for x in traced.leaves]
        written = [x for x in traced.written if id(x) not in self._places]
        self._own = {id(x): x for x in (*self._closed, *written)}
        self._alike = self._pattern(tensors)
        self._writes = bool(self._written or self._graded)
        changed = [x.leaf if isinstance(x, GradientOf) else x for x in self._written]
        changed += self._graded
        self._changed = (
            {x.place for x in changed if isinstance(x, Argument)},
            {id(x.tensor) for x in changed if isinstance(x, ClosedOver)},
        )
        """Places of arguments, and ids of what it closes over."""
        writes_plain = any(type(x) is not ShardedTensor for x in traced.written)
        plain = [x for x in self._own.values() if type(x) is not ShardedTensor]
        self._plain = plain if writes_plain else None
        """Tensors of this process that it closes over, if it writes to such."""

    def _target(self, x: torch.Tensor) -> Argument | ClosedOver:
        place = self._places.get(id(x))
        return ClosedOver(x) if place is None else Argument(place)

    def taken(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """What it takes of a call; None unless all is as it was in the trace, but for values."""
        if self.plan.team.runtime is not current_runtime() or not self.plan.holds():
            return None
        if fixed_parts(self._closed) != self._kinds:
            return None
        if self._pattern(tensors) != self._alike:
            return None
        for target, layout in self._read_gradients:
            if layout_of_gradient(target.of(tensors)) != layout:
                return None
        for target, hooks in self._hooked:
            if _hooks(target.of(tensors)) != hooks:
                return None
        return tensors if all(each.numbers.hold() for each in self._numbers.values()) else None

    def _pattern(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """Which arguments are another argument, or are closed over: the graph names a gradient by
        its tensor.
        """
        ids = list(map(id, tensors))
        if len(set(ids)) == len(ids) and self._own.keys().isdisjoint(ids):
            return {}
        seen: dict[int, int] = {}
        found = {}
        for k, number in enumerate(ids):
            if number in self._own:
                found[k] = -number
            elif seen.setdefault(number, k) != k:
                found[k] = seen[number]
        return found

    def refuses(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Why a write would not do what it does in the function: it reaches one value under two
        names, which the graph does not know, or a copy.
        """
        if not self._writes:
            return None
        places, own = self._changed
        if any(hasattr(tensors[k], "is_copy") for k in places):
            return "it writes to a NumPy array with which no tensor can share memory"
        names: list[set[int]] = []
        for k, x in enumerate(tensors):
            mine = set(map(id, linked(x))) if type(x) is ShardedTensor else {id(x)}
            shared = mine & self._own.keys()
            if shared and (k in places or not shared.isdisjoint(own)):
                return SHARED
            if any((k in places or j in places) and mine & names[j] for j in range(k)):
                return SHARED
            names.append(mine)
        if self._plain is None:
            return None
        plain = [*self._plain, *(x for x in tensors if type(x) is not ShardedTensor)]
        return SHARED if len({x.untyped_storage()._cdata for x in plain}) < len(plain) else None

    def again(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """``taken``, of what that has returned before."""
        return self.taken(tensors)

    def tell(self) -> None:
        """Warn or raise if operands are resharded and ``tp.config.gathers`` says so."""
        if not self.resharded or self._told == config.gathers:
            return
        few, num_more = "; ".join(map(str, self.resharded[:3])), len(self.resharded) - 3
        more = f"; and {num_more} more" if num_more > 0 else ""
        tell_of_gather(f"{self._prefix}: operands are resharded: {few}{more}")
        self._told = config.gathers

    def run(self, tensors: Sequence[Any]) -> Any:
        here = current_runtime()
        if self.plan.team.runtime is not here:
            raise Changed
        held = [
            each.handle(tensors)
            if same is None
            else (tensors[same] if type(same) is int else same)._handle
            for same, each in zip(self._direct, self._inputs, strict=True)
        ]
        for target in self._required:
            target.of(tensors).requires_grad_()
        if any(handle is None or handle.team.runtime is not here for handle in held):
            if current_runtime() is not here:
                raise Changed
            held = [each.handle(tensors) for each in self._inputs]  # says what is gone
        if self._derivable is None or torch.is_inference_mode_enabled():
            results = list(self._start(tensors, self.plan, held)[0])
        else:
            start = functools.partial(self._start, tensors)
            leaves = [target.of(tensors) for target in self._leaves]
            results = self._derivable.call(start, held, leaves)
        for k, text in self._overwritten.items():
            results[k] = overwritten(results[k], text)
        return self._tree.unflatten(returned(self._values, results, tensors))

    def _start(
        self, tensors: Sequence[torch.Tensor], plan: Plan, held: list[Handle]
    ) -> tuple[Sequence[torch.Tensor], list[Handle]]:
        """Run a plan, with its effects: the results, and what follows the effects."""
        targets = [target.of(tensors) for target in self._written]
        graded = [target.of(tensors) for target in self._graded]
        pairs = enumerate(targets, self._num_results)
        alone = [(k, x) for k, x in pairs if type(x) is ShardedTensor and not is_linked(x)]
        early: set[int] | None = None
        """Ids of the targets that have their new values; None until they give up the old ones."""

        def give_up(made: Sequence[Handle]) -> None:
            nonlocal early
            early = {id(x) for _, x in alone} if made else set()
            for leaf in (*graded, *(target.of(tensors) for target in self._cleared)):
                leaf.grad = None
            for k, each in alone:  # at once, as other threads may use it
                each._handle = made[k] if made else None

        outputs, num = plan.outputs, self._num_results
        numbers_before = [held[place] for place in self._counted]
        advances: list[Advance] = [(each.numbers, []) for each in self._numbers.values()]

        def change(written: Sequence[Any]) -> None:
            given = graded, numbers_before, advances, outputs[num:], held[num:]
            self._change(written, early or (), *given)

        try:
            plan.run(held, None, give_up)
            change(targets)
        except BaseException:  # Ctrl-C: what was given up would be lost, though the call is sent
            if early is not None and len(held) >= len(outputs):
                change([x if type(x) is ShardedTensor else None for x in targets])
            raise
        return make_all(outputs[:num], held[:num]), held[len(outputs) :]

    def _change(
        self,
        targets: Sequence[Any],
        early: Collection[int],
        graded: Sequence[Any],
        numbers_before: Sequence[Handle],
        advances: Sequence[Advance],
        outputs: Sequence[Layout],
        handles: Sequence[Handle],
    ) -> None:
        """The effects of a call that was sent; the outputs are those after its results.  A target
        that is None keeps its value.  Done again, as after Ctrl-C, it changes nothing more.
        """
        first, second = len(targets), len(targets) + len(numbers_before)
        grads = make_all(outputs[second:], handles[second : len(outputs)])
        for leaf, grad in zip(graded, grads, strict=True):
            leaf.grad = grad
        for numbers, done in advances:
            numbers.advance(done)
        for place, *made in zip(self._counted, numbers_before, handles[first:second], strict=True):
            self._inputs[place].follow(*made)
        _write_all(targets, early, outputs[:first], handles[:first])


def run_in_turn(program: Any, tensors: Sequence[Any], since: int) -> Any:
    """What a program returns, after its effects; ``since``: ``turns.num_ended`` before ``taken``.

    Raises:
        Changed: another thread has changed since then what the program depends on.
    """
    program.tell()
    if not program.has_effects:
        return program.run(tensors)
    program.plan.prepare()
    with in_turn():
        if turns.num_ended != since:
            tensors = program.again(tensors)
            if tensors is None:
                raise Changed
        try:
            return program.run(tensors)
        finally:
            turns.num_ended += 1


def _like(made: torch.Tensor, source: torch.Tensor | None) -> Layout | None:
    """Where the source lies, if a result could lie so."""
    if type(source) is not ShardedTensor or source.shape != made.shape:
        return None
    return source._alive()[0] if source.dtype == made.dtype else None


def layout_of_gradient(leaf: Any) -> Any:
    """Where the gradient of a leaf lies; None if it has none."""
    grad = leaf.grad
    return None if grad is None else getattr(grad, "_layout", grad.dtype)


def _hooks(leaf: torch.Tensor) -> tuple[int, ...]:
    """The hooks of a leaf, by their numbers."""
    return tuple(itertools.chain(*hooks_of(leaf)))


def fixed_parts(tensors: Sequence[Any]) -> Any:
    """What must not change of tensors that a function closes over."""
    where = [x._layout if type(x) is ShardedTensor else (x.shape, x.dtype) for x in tensors]
    return where, list(map(own_strides, tensors)), [x.requires_grad for x in tensors]


def _write_all(
    targets: Sequence[Any],
    early: Collection[int],
    layouts: Sequence[Layout],
    handles: Sequence[Handle],
) -> None:
    """Give tensors of the caller's their new values; those of ids ``early`` have them."""
    plain = []
    for target, layout, handle in zip(targets, layouts, handles, strict=True):
        if target is None:
            continue
        if type(target) is not ShardedTensor:
            plain.append((target, layout, handle))
        else:
            if id(target) not in early:
                target._layout, target._handle = layout, handle
            if is_linked(target):  # asked last: another thread may take a view at any moment
                write(target, handle)
    written = [x for x in targets if x is not None]
    try:
        increment_version(written)
    except RuntimeError:  # tensors of inference mode have no version
        increment_version([x for x in written if not x.is_inference()])
    for target, layout, handle in plain:  # last, as to fetch them may raise
        with torch.no_grad():
            target.copy_(gather(layout, handle))


def _wish_for_gradient(real: torch.Tensor, stand_in: torch.Tensor) -> None:
    """Let the gradient of a parameter that is cut be made cut, before anything uses it."""
    if type(real) is ShardedTensor:
        layout, _ = real._alive()
        if not layout.is_replicated:
            stand_in.register_hook(
                lambda grad: None if grad is None else constrained(grad, layout.sharding)
            )


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
