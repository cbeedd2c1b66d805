"""``jit``: ordinary code over tensors on the devices, as one program for all of them.

__call__ --key--> Program --run--> one plan, whose results go to the caller's tensors
         +------> trace_whole --> plan_of     the first call of a kind
"""

from __future__ import annotations

import functools
import operator
import reprlib
import threading
import types
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, cast, overload

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchpmap._base.ambient import keyed
from torchpmap._base.boundary import boundary, fold
from torchpmap._base.busy import waiting
from torchpmap._base.config import config
from torchpmap._base.errors import TraceError, kind_of
from torchpmap._base.sources import defined_at
from torchpmap._base.storages import own_strides
from torchpmap._base.torch_internals import break_graph, is_transformed
from torchpmap._plan.lower import tracing_of
from torchpmap._plan.stages import LoweredPlan
from torchpmap._runtime import inline_mode
from torchpmap._runtime.current import expect_compiling
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._sharded.constraints import with_sharding_constraint
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap._sharded.views import Changed
from torchpmap._trace import recording
from torchpmap._trace.environment import Environment, Surroundings
from torchpmap._trace.optimizers import NotYet
from torchpmap._trace.pickling import Made
from torchpmap._trace.snapshot import Snapshot
from torchpmap._trace.untraceable import Untraceable
from torchpmap._transforms import nans
from torchpmap._transforms.call import listed
from torchpmap._transforms.jit_containers import Changes, NotingChanges, are_given_twice
from torchpmap._transforms.jit_program import (
    SHARED,
    JitOptions,
    Options,
    Program,
    make_options,
    run_in_turn,
    turns,
)
from torchpmap._transforms.jit_stores import Look, Storing, storing
from torchpmap._transforms.jit_transforms import Body, Outline
from torchpmap._transforms.jit_values import JitCall, leaf_keys
from torchpmap._transforms.mapped import NO_PART_OF_A_GRAPH, is_part, map_with, outside_dynamo
from torchpmap._transforms.retraces import Retraces
from torchpmap.random._streams import peek_key, streams_of

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MAX_PROGRAMS = 8
"""Of one kind of call, that differ in what they close over."""
_MAX_KINDS = 256
"""Of calls, whose programs are kept."""
_MAX_CONSTANTS = 4
"""Programs that store other values of Python; a function that counts would need ever more."""
_BY_OPERATION = "operation by operation"
_BY_NAME = (Optimizer, LRScheduler, torch.amp.GradScaler)
"""What changes in each step: of these the code's own reads are watched."""


_Known = tuple[Any, Surroundings]
"""What runs a kind of call (None: the function itself), and what it reads from outside."""
_Found = tuple[Any, Sequence[torch.Tensor]]
"""What runs a call (None: the function itself), and the tensors that it takes."""


class Jitted(Made, Generic[_P, _R]):
    """A function that ``jit`` has made, called like the function."""

    __wrapped__: Callable[_P, _R]
    _what = "`{}`"

    def __init__(self, fun: Callable[_P, _R], options: Options) -> None:
        functools.update_wrapper(self, fun, updated=())
        self.__wrapped__ = fun
        self._fun: Callable[..., Any] = fun
        if options.out_shardings is not None:
            self._fun = functools.partial(_laid_out, fun, options.out_shardings)
        self._options = replace(options, where=defined_at(fun))
        self._is_traced = options.backend is not None
        expect_compiling(options.backend)
        self._lock = threading.RLock()
        self._programs: dict[Hashable, list[_Known]] = {}
        """The latest is first: ``train()`` and ``eval()`` take turns."""
        self._traces = Retraces()
        self._environment = Environment(fun, by_name=_BY_NAME)
        self._runtime: Any = None
        self._make: Callable[..., Program] = Program
        self.num_traces = 0

    def __repr__(self) -> str:
        return f"<jit of {self._options.name}>"

    def made_of(self) -> tuple[Any, ...]:
        return Jitted, (self.__wrapped__, self._options)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if is_dynamo_compiling():
            break_graph(NO_PART_OF_A_GRAPH)
            return cast(_R, outside_dynamo(self, *args, **kwargs))
        if self._is_part():
            return self.__wrapped__(*args, **kwargs)
        if not self._is_traced and (is_transformed() or not config.sought):
            recording.lacks(self._options.prefix, _BY_OPERATION)
            fun = self.__wrapped__ if is_transformed() else self._fun
            return cast(_R, fun(*args, **kwargs))
        try:
            if config.sought and nans.is_due():
                again: dict[str, Any] = {}
                if self._is_traced:  # with the random numbers that the next call draws
                    again["again"] = lambda: streams_of(peek_key())
                return cast(_R, nans.checked(self, args, kwargs, self._options.name, **again))
            if not self._is_traced:
                return cast(_R, self._by_operation(args, kwargs))
            if is_transformed():
                return cast(_R, self._run_transformed(args, kwargs))
            return cast(_R, self._run(args, kwargs))
        except BaseException as error:
            fold(error)
            raise

    def _is_part(self) -> bool:
        """Whether a call is no program of its own: in a mapped function or a trace."""
        return is_part() or inline_mode.active()

    @boundary
    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> LoweredProgram:
        """Trace the call, without compiling or running it.

        Raises:
            TraceError: the function cannot be traced, or is never traced (``compile=False``).
        """
        call = self._taken(args, kwargs)
        program = self._program(call, self._make)[0] if self._is_traced else None
        if program is None:
            prefix = self._options.prefix
            raise TraceError(f"{prefix}: it runs operation by operation: there is no graph to show")
        program.tell()
        return LoweredProgram(program)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        while True:
            with suppress(Changed):
                return self._run_now(args, kwargs)

    def _run_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        since = turns.num_ended
        program, taken = self._program_of(args, kwargs, self._make)
        if program is None:
            return self._by_operation(args, kwargs)
        reason = program.refuses(taken)
        if reason is None and program.changes.meet((args, kwargs)):
            reason = SHARED
        if reason is not None:
            verdict = Untraceable(reason, self._options.where, "a copy of one of them")
            self._traces.untraced(self._options, verdict, _BY_OPERATION)
            return self._by_operation(args, kwargs)
        if config.sought and (program.has_effects or program.changes.of_given):
            return self._by_operation(args, kwargs)
        return program.changes.put_back(run_in_turn(program, taken, since), (args, kwargs))

    def _by_operation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recording.lacks(self._options.prefix, _BY_OPERATION)
        if config.sought:
            return nans.stepped(self._fun, args, kwargs)
        return self._fun(*args, **kwargs)

    def _run_transformed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as transforms around it see it."""
        make = functools.partial(Outline, make=functools.partial(_Derived, self))
        outline, taken = self._program_of(args, kwargs, make)
        if outline is None or outline.changes.meet((args, kwargs)):
            return self.__wrapped__(*args, **kwargs)
        return outline.changes.put_back(outline.call(taken), (args, kwargs))

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JitCall:
        return JitCall(self._fun, args, kwargs, self._options.prefix, self.__wrapped__)

    def _program_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], make: Callable[..., Any]
    ) -> _Found:
        try:
            return self._program(self._taken(args, kwargs), make)
        except TraceError:
            raise
        except Exception:
            if not are_given_twice((args, kwargs)):
                raise
            return None, ()  # a trace has a copy of each, and one lacks what is added to the other

    def _program(self, call: JitCall, make: Callable[..., Any]) -> _Found:
        structure, kinds = call.structure, leaf_keys(call.leaves)
        modes = torch.is_grad_enabled(), make is self._make
        key = structure, structure.dict_order, keyed(), modes, kinds
        runtime = current_runtime()
        if runtime is not self._runtime:
            self._forget(runtime)
        found = self._found(key, call)
        if found is None:
            with self._lock, waiting(None):
                found = self._found(key, call)  # another thread may have traced it
                if found is None:
                    found = self._traced(key, call, make)
        return found

    def _found(self, key: Hashable, call: JitCall) -> _Found | None:
        programs = self._programs.get(key, [])
        for place, entry in enumerate(tuple(programs)):
            program, surroundings = entry
            if program is None:  # the last one
                return None, ()
            taken = program.taken(call.tensors)
            if taken is not None and not surroundings.changed():
                if place:
                    with self._lock:
                        programs.sort(key=lambda each: each is not entry)
                return program, taken
        return None

    def _traced(self, key: Hashable, call: JitCall, make: Callable[..., Any]) -> _Found:
        call.check()
        self._note(call, make is not self._make)
        call.fun = noting = NotingChanges(call.fun, self._options.where)
        objects = tuple(call.objects())
        own: list[Environment] = []
        if objects:
            own.append(Environment(self.__wrapped__, objects, by_name=_BY_NAME))
        surroundings = Surroundings([self._environment, *own])
        with surroundings.tracing():
            reached = surroundings.objects()
            for each in reached:
                if isinstance(each, torch.nn.RNNBase):
                    each._update_flat_weights()  # else its first call does, and stores lists
            snapshot = Snapshot(reached, _BY_NAME)
            try:
                optimizers = [x for x in reached if isinstance(x, Optimizer)]
                complete = functools.partial(make, options=self._options, optimizers=optimizers)
                where, mine = self._options.where, self._programs.get(key, ())
                stores = [x for x, _ in mine if isinstance(x, Storing)]
                is_full = len(stores) >= _MAX_CONSTANTS
                look = functools.partial(snapshot.stored, where=where, constants=not is_full)
                with tracing_of(self._what.format(self._options.name), _listed(call)):
                    if make is self._make:
                        others = [x for kept in self._programs.values() for x, _ in kept]
                        given = others, stores if is_full else (), look, where
                        program, taken = storing(complete, call, snapshot, *given)
                    else:
                        outlined = functools.partial(_outlined, complete, call, look, where)
                        program, taken = copy_context().run(outlined), call.tensors
            except BaseException as error:
                snapshot.restore()
                if not isinstance(error, Untraceable):
                    raise
                if not isinstance(error, NotYet):
                    self._traces.untraced(self._options, error, _BY_OPERATION)
                    self._keep(key, (None, surroundings))
                return None, ()
        slots = program.slots if isinstance(program, Storing) else ()
        program.changes = Changes.of(noting.has_changed, reached, (x.owner for x in slots))
        keys = {x.key for x in slots}
        own = [each.without(keys) for each in own] if keys else own
        noted = Surroundings([self._environment.without(keys), *own])
        if isinstance(program, Outline):
            program.surroundings = noted
        self._keep(key, (program, noted))
        return program, taken

    def _keep(self, key: Hashable, known: _Known) -> None:
        programs = self._programs.setdefault(key, [])
        is_last = known[0] is None
        programs.insert(len(programs) if is_last else 0, known)
        if len(programs) > _MAX_PROGRAMS:
            del programs[-2 if is_last else -1]
        if len(self._programs) > _MAX_KINDS:
            del self._programs[next(iter(self._programs))]

    def _note(self, call: JitCall, is_outline: bool) -> None:
        """Count a trace, and warn if there are too many."""
        named = dict(zip(call.names, call.leaves, strict=True))
        tensors = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
        places = {name: x._alive()[0] for name, x in tensors.items() if type(x) is ShardedTensor}
        kinds: dict[str, Hashable] = {name: _described(x) for name, x in named.items()}
        kinds |= {f"requires_grad of {name}": x.requires_grad for name, x in tensors.items()}
        kinds |= {f"strides of {name}": own_strides(x) for name, x in tensors.items()}
        kinds |= {"grad mode": torch.is_grad_enabled(), "a transform around it": is_outline}
        self._traces.tell(self._options, kinds, places)
        self.num_traces += 1

    def _forget(self, runtime: Any) -> None:
        self._programs.clear()
        self._traces.clear()
        self._runtime = runtime


class LoweredProgram(LoweredPlan):
    """A function of ``jit`` for certain arguments, traced and not yet compiled.

    Attributes:
        resharded: operands that operations cannot take as they lie, and so are sent around; each
            with the user's line that asks for it (``place``).

    Example:
        >>> import torch, torchpmap as tp
        >>> mesh = tp.make_mesh((4,), ("x",))
        >>> w = tp.device_put(torch.zeros(8, 4), tp.NamedSharding(mesh, tp.P("x")))
        >>> x = tp.device_put(torch.zeros(8, 8), tp.NamedSharding(mesh, tp.P("x")))
        >>> lowered = tp.jit(lambda x: x @ w).lower(x)
        >>> [moved] = lowered.resharded
        >>> print(f"{moved.operation}: {moved.kind} from {moved.before} to {moved.after}")
        aten.mm.default: float32[8, 4] from PartitionSpec('x',) to PartitionSpec()
        >>> print(lowered.cost())
        128 flops on each device
        all_gather_into_tensor over x: 32 B
        memory: 96 B arguments, 32 B results, at most 256 B temporaries

    Source: ``jax.stages.Lowered``.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program.plan, [f"resharded: {each}" for each in program.resharded])
        self.resharded = program.resharded


class _Derived(Jitted[..., Any]):
    """A derivative or a batched form of a jitted function, on tensors that no transform follows."""

    _what = "a derivative of `{}`"

    def __init__(self, of: Jitted[..., Any], body: Body, alike: Sequence[int]) -> None:
        # what ``Outline`` watches is read by the function that is derived
        super().__init__(cast(Any, lambda: None), replace(of._options, out_shardings=None))
        self._options = of._options
        self._fun = lambda *tensors: body(tensors)
        self._make = functools.partial(Program, alike=alike)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return cast(list[torch.Tensor], self._run(tuple(tensors), {}))


def _outlined(complete: Callable[..., Any], call: JitCall, look: Look, where: str) -> Any:
    program = complete(call)
    for slot in look(()):
        if not slot.is_mode:
            raise slot.refusal(where)
    return program


def _laid_out(fun: Callable[..., Any], out_shardings: Any, *args: Any, **kwargs: Any) -> Any:
    return with_sharding_constraint(fun(*args, **kwargs), out_shardings)


def _described(leaf: Any) -> str:
    """What a trace depends on, as warnings say it."""
    is_tensor = isinstance(leaf, torch.Tensor)
    return kind_of(leaf.shape, leaf.dtype) if is_tensor else reprlib.repr(leaf)


def _listed(call: JitCall) -> str:
    """The arguments of a call, as a note names them."""
    told = ("" if isinstance(x, torch.Tensor) else "= " for x in call.leaves)
    return listed(call.paths, map(operator.add, told, map(_described, call.leaves)))


@overload
def jit(fun: Callable[_P, _R], **options: Unpack[JitOptions]) -> Jitted[_P, _R]: ...
@overload
def jit(
    fun: None = None, **options: Unpack[JitOptions]
) -> Callable[[Callable[_P, _R]], Jitted[_P, _R]]: ...
@boundary
def jit(
    fun: Callable[..., Any] | None = None,
    *,
    out_shardings: Any = None,
    compile: bool | dict[str, Any] = True,
    fullgraph: bool = False,
    timeout: float | None = None,
) -> Any:
    """Return ``fun`` as one program for all devices; computation follows the data.

    (fun: tensors -> results) -> the same, with ShardedTensors

    The function is ordinary code over whole values: a model, ``loss.backward()``,
    ``optimizer.step()``.  Where its tensors lie (``replicate``, ``shard_batch``, ``device_put``)
    says how it runs: replicated parameters and a batch cut in rows are data-parallel training,
    parameters that are cut are fully sharded or tensor-parallel training.  A call sends one message
    to each device.  The first call of a kind traces the function on whole shapes; Python code runs
    then and not again.  What it writes (parameters, buffers, ``.grad``, state of optimizers) is
    written as by the same code without ``jit``, and rates of schedules may change between calls.
    ``backward()`` from outside, and transforms of ``torch.func`` around calls, run programs too.

    Args:
        fun: a function of pytrees of tensors and other values, which are compared by value.  Left
            out, ``jit(...)`` is a decorator.
        out_shardings: where results lie, as for ``with_sharding_constraint``; None: as they come.
        compile: True (Inductor), False (run ``fun`` as it is, operation by operation), or a dict as
            for ``pmap``; ``{"backend": "eager"}`` runs the graph uncompiled.
        fullgraph: raise instead of running operation by operation when ``fun`` cannot be traced.
        timeout: most seconds that a call may take on the devices; see ``pmap``.

    Returns:
        The function; ``__wrapped__`` is ``fun``.  Results that are tensors are ShardedTensors.

    Raises:
        ValueError: the tensors are on different devices.
        TraceError: ``fullgraph=True``, and the function cannot be traced.  What ``fun`` raises is
            raised with its own type.

    Example:
        >>> import torch, torchpmap as tp
        >>> _ = torch.manual_seed(0)
        >>> model = tp.replicate(torch.nn.Linear(2, 1))
        >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> @tp.jit
        ... def step(x, y):
        ...     opt.zero_grad()
        ...     loss = (model(x) - y).square().mean()
        ...     loss.backward()
        ...     opt.step()
        ...     return loss
        >>> x = tp.shard_batch(torch.ones(8, 2))
        >>> losses = [float(step(x, 3.0)) for _ in range(30)]
        >>> losses[0] > 1, losses[-1] < 0.01
        (True, True)

    Source: ``jax.jit`` over sharded arrays; effects are those of torch.
    """
    settings: dict[str, Any] = dict(locals())
    return map_with(Jitted, make_options, settings, settings.pop("fun"), "fun of jit")
