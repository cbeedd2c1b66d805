"""A call of a mapped function, taken apart: what all front ends share (pure)."""

from __future__ import annotations

import functools
import inspect
import reprlib
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from torchpmap._base.ambient import Ambient
from torchpmap._base.axis_spec import LeafInfo
from torchpmap._base.errors import kind_of
from torchpmap._base.exact import Pictures, exact
from torchpmap._base.pytree import Structure, flatten_call
from torchpmap._base.sources import is_foreign
from torchpmap._layout.grid import Cut, Grid, block_shape, dim_of
from torchpmap._plan.lower import Target
from torchpmap._sharded.transfer import host_tensor
from torchpmap._trace.compile import EAGER, Backend
from torchpmap._trace.environment import Environment
from torchpmap._trace.escaped import Escaped
from torchpmap._trace.kinds import check_dtype, check_number, insist, oddity
from torchpmap._trace.program import Block, Constant

_T = TypeVar("_T")

_MAX_LISTED = 8
"""How many arguments a note or a log names."""


@dataclass(frozen=True)
class CallOptions:
    """The options that all front ends have, checked."""

    name: str
    backend: Backend | None
    """None: uncompiled."""
    fullgraph: bool
    timeout: float | None

    @property
    def prefix(self) -> str:
        """The function, as messages name it."""
        raise NotImplementedError

    def target(
        self,
        grid: Grid,
        seed: torch.Tensor,
        settings: Ambient,
        where: str,
        arguments: str = "",
        names: tuple[str, ...] = (),
    ) -> Target:
        """What the function is lowered for; see ``Target``."""
        backend = EAGER if self.backend is None else self.backend
        given = self.prefix, self.name, grid, backend, seed, settings, self.timeout
        return Target(*given, f"`{self.name}`", arguments, where, names)


@dataclass(frozen=True)
class MapOptions(CallOptions):
    """The options that mapped functions have."""

    randomness: str
    static_advice: ClassVar[str] = (
        "Make it static (static_broadcasted_argnums or static_broadcasted_argnames)"
    )


class Static:
    """A static argument, equal only to one that the function cannot tell from it: not ``1`` to
    ``1.0``, and not a module in training to the same one in evaluation.
    """

    __slots__ = ("_environment", "_has_parts", "_hash", "_identities", "_is_noted", "_key", "value")

    def __init__(self, value: Any) -> None:
        pictures = Pictures()
        self.value = value
        self._key = pictures.of(value)
        self._hash = hash(self._key)
        self._has_parts = pictures.has_parts
        self._identities = pictures.identities
        self._is_noted = False
        self._environment: Environment | None = None
        """What the function reads of its functions and instances, as of the trace."""

    def environment(self, fun: Callable[..., Any]) -> Environment | None:
        """What ``fun`` reads of functions and instances in it, if there are any; for a trace."""
        self._is_noted = True
        if self._environment is None and any(map(_may_change, self._identities)):
            self._environment = Environment(fun, (self.value,))
        return self._environment

    def is_intact(self) -> bool:
        """Whether its parts are what they were."""
        return not self._has_parts or exact(self.value) == self._key

    def _holds(self, other: Static) -> bool:
        """Whether it still is what it was in the trace that it is a key of."""
        if not self._is_noted:
            return True
        if self.value is not other.value and not self.is_intact():
            return False
        return self._environment is None or not self._environment.changed()

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Static)
            and self._hash == other._hash
            and self._key == other._key
            and self._holds(other)
            and other._holds(self)
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return Static, (self.value,)


def _may_change(value: Any) -> bool:
    """Whether functions read of a value what may change; not of ``torch.relu``."""
    if isinstance(value, types.ModuleType):
        return not is_foreign(value.__name__)
    return not (isinstance(value, types.FunctionType | type) and is_foreign(value.__module__))


@dataclass(frozen=True)
class CallArguments:
    """A call, taken apart."""

    leaves: list[Any]
    structure: Structure
    paths: tuple[str, ...]
    is_donated: tuple[bool, ...]
    cuts: tuple[Cut | None, ...]
    """Per leaf; None for static and empty leaves."""
    sizes: tuple[int, ...]
    """Of the grid that they cut values over."""
    spans: bool | None = None
    """Of rows, whether they are those of all processes, not only of this one; None of blocks."""

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.sizes[0]

    @property
    def axes(self) -> tuple[int | None, ...]:
        """Per leaf, the dim of the rows."""
        return tuple(dim_of(cut or (), 0) for cut in self.cuts)

    @property
    def template(self) -> tuple[Block | Constant, ...]:
        """The leaves, as a program has them."""
        return tuple(
            Constant(leaf.value if isinstance(leaf, Static) else None)
            if cut is None
            else Block(cut)
            for leaf, cut in zip(self.leaves, self.cuts, strict=True)
        )

    @functools.cached_property
    def positions(self) -> tuple[int, ...]:
        """The leaves that travel as blocks: all but None and static ones."""
        pairs = enumerate(self.leaves)
        return tuple(k for k, x in pairs if not (x is None or isinstance(x, Static)))

    @functools.cached_property
    def donated(self) -> tuple[int, ...]:
        """Places among the leaves that travel."""
        flags = self.travelling(self.is_donated)
        return tuple(place for place, is_donated in enumerate(flags) if is_donated)

    def travelling(self, per_leaf: Sequence[_T]) -> list[_T]:
        """The entries for leaves that travel."""
        return [per_leaf[position] for position in self.positions]

    def of_kinds(self) -> CallArguments:
        """The same with the kinds of the leaves in their places, which keep no tensors."""
        return replace(self, leaves=list(map(leaf_kind, self.leaves)))

    def check_same(self, leaves: Sequence[Any], structure: Structure, options: MapOptions) -> None:
        """Raise unless the arguments of another call are of these kinds."""
        if structure != self.structure or structure.dict_order != self.structure.dict_order:
            raise TypeError(
                f"{options.prefix}: function compiled with input pytree {self.structure} does not "
                f"match the input pytree it was called with: {structure}"
            )
        for path, leaf, known in zip(self.paths, leaves, self.leaves, strict=True):
            describe(leaf, path, options)
            if isinstance(leaf, torch.Tensor):
                insist(leaf, f"{options.prefix}: argument {path}")
            kind = leaf_kind(leaf)
            if kind != known:
                raise TypeError(
                    f"{options.prefix}: argument types differ from the types for which this "
                    f"computation was compiled: argument {path} compiled with {told(known)} and "
                    f"called with {told(kind)}"
                )

    def seen_shape(self, position: int, shape: tuple[int, ...]) -> Sequence[int]:
        """The shape that the function sees of a leaf of this shape."""
        block = block_shape(shape, self.cuts[position] or (), self.sizes)
        dropped = None if self.spans is None else self.axes[position]
        return [size for dim, size in enumerate(block) if dim != dropped]


def leaf_kind(leaf: Any) -> Any:
    """What must be the same of an argument for the same program: a static value itself, of others
    shape and dtype.
    """
    if leaf is None or isinstance(leaf, Static):
        return leaf
    tensor = leaf if isinstance(leaf, torch.Tensor) else host_tensor(leaf)
    return tuple(tensor.shape), tensor.dtype


def told(kind: Any) -> str:
    """A kind, as messages say it."""
    if kind is None:
        return "None"
    if isinstance(kind, Static):
        try:
            return f"the static value {kind.value!r}"
        except Exception:  # code of the user's, which no call needs
            return f"the static value {reprlib.repr(kind.value)}"
    return kind_of(*kind)


def donated(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: Sequence[int],
    argnames: Sequence[str],
) -> tuple[bool, ...]:
    """Per leaf of a call, whether it is given up."""
    numbers = {k % len(args) for k in argnums if -len(args) <= k < len(args)}
    given = [(number in numbers, arg) for number, arg in enumerate(args)]
    given += [(key in argnames, value) for key, value in sorted(kwargs.items())]
    return tuple(flag for flag, x in given for _ in range(flatten_call((x,), {})[1].num_leaves))


def describe(leaf: Any, path: str, options: MapOptions) -> LeafInfo:
    """An argument, or the error for what can be none."""
    if leaf is None or isinstance(leaf, Static):
        return path, None, "none"
    what = f"{options.prefix}: argument {path}"
    if isinstance(leaf, Escaped):
        leaf.refuse(what)
    if isinstance(leaf, torch.Tensor):
        reason = oddity(leaf)
        if reason is not None:
            raise TypeError(f"{what} {reason}")
    elif isinstance(leaf, np.ndarray | np.generic):
        check_dtype(leaf, what)
    elif isinstance(leaf, bool | int | float | complex):
        check_number(leaf, what)
        return path, (), type(leaf).__name__
    if hasattr(leaf, "__dlpack__") or isinstance(leaf, np.generic):
        return path, tuple(leaf.shape), str(leaf.dtype)
    raise TypeError(
        f"{what} has type {type(leaf).__name__}, but a mapped function takes tensors, numpy "
        f"arrays, numbers and None (in any pytree). {options.static_advice}, "
        "or close over it; a torch.nn.Module is passed as dict(module.named_parameters()) with "
        "torch.func.functional_call."
    )


def check_function(fun: Any, what: str) -> Callable[..., Any]:
    """``what``: the argument of the front end, as messages name it."""
    if not callable(fun):
        raise TypeError(
            f"Expected a callable value, got {fun!r} of type {type(fun).__name__}: {what} must be "
            "a function."
        )
    inner = inspect.unwrap(fun) if inspect.isfunction(fun) else fun
    if inspect.isgeneratorfunction(inner):
        raise TypeError(f"Expected a function, got a generator function: {fun!r}")
    if inspect.iscoroutinefunction(inner):
        raise TypeError(
            f"Expected a function, got a coroutine function: {fun!r}. pmap calls are asynchronous "
            "by themselves."
        )
    return fun


def takes_keywords(fun: Callable[..., Any]) -> bool:
    """Whether a function takes keyword arguments of any name, and so sees their order."""
    try:
        parameters = inspect.signature(fun, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # without a signature
        return True
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def check_randomness(what: str, randomness: str) -> None:
    """Raise unless it is known; ``what``: the front end, as messages name it."""
    if randomness not in ("different", "same", "error"):
        raise ValueError(
            f"{what}: randomness must be 'different', 'same' or 'error', but got {randomness!r}."
        )


def as_tuple(value: Any, what: str, kind: type) -> tuple[Any, ...]:
    """``argnums``-like arguments: one value or an iterable of them."""
    items = (
        (value,)
        if isinstance(value, kind)
        else tuple(value)
        if isinstance(value, Iterable)
        else None
    )
    if items is None or not all(type(item) is kind for item in items):
        raise TypeError(
            f"{what} must be {kind.__name__} or an iterable of {kind.__name__}, but got {value!r}."
        )
    return items


def name_of(fun: Any) -> str:
    if isinstance(fun, functools.partial):
        return name_of(fun.func)
    return getattr(fun, "__name__", type(fun).__name__)


def listed(paths: Sequence[str], kinds: Iterable[str]) -> str:
    """The first arguments of a call, as notes name them: "arguments x float32[3], n = 2"."""
    found = [f"{path} {kind}" for path, kind in zip(paths[:_MAX_LISTED], kinds, strict=False)]
    if not found:
        return ""
    more = f" and {len(paths) - len(found)} more" if len(paths) > len(found) else ""
    return f"argument{'s' * (len(paths) > 1)} {', '.join(found)}{more}"
