"""What a function reads from outside itself, watched so that a traced graph is never stale.

JAX bakes closed-over values into the program at the first call and never looks again.  Here the
cells, globals, defaults and attributes that the function's code can reach are noted by identity;
when one is rebound, the function is traced again. (In-place changes of tensors need no new trace
and are noticed separately, by ``Captured``; so are changes of a property that the function read.)

It follows plain functions, partials, methods, modules (``torch.nn``), instances, classes, and
containers such as lists, dicts and sets.  Of a class it follows the methods that the code names,
and those that Python and torch call by themselves.  numpy arrays have no version counter, so their
contents are compared.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.errors import warn
from torchpmap._base.sources import is_library
from torchpmap._trace.reach import MAX_FOLLOWED, Walk, dict_of
from torchpmap._trace.watched import OF_A_FUNCTION, Watched

_MAX_UNEXPLAINED = 3


class Environment:
    """The outside references of one function."""

    def __init__(
        self,
        fun: Callable[..., Any],
        given: tuple[Any, ...] = (),
        *,
        by_name: tuple[type, ...] = (),
    ) -> None:
        """
        Args:
            given: arguments of which the function may read more than is compared; if there are any,
                only what they lead to is watched.
            by_name: classes; see ``Walk``.
        """
        self._fun: Any = fun
        self._classes = by_name
        self._given = given
        self._stored: Collection[tuple[int, Any]] = ()
        self._walk: Walk | None = None
        """As noted; None if nothing is, or if it is not what a trace has read."""
        self._watched = Watched()
        self._code: list[Any] | None = None
        """What a function runs that closes over nothing."""
        self._changed_meanwhile: str | None = None
        """The origin of what has changed during a trace."""
        self._num_unexplained = 0
        self._has_warned = False

    def refresh(self) -> None:
        """Note the present state."""
        walk = Walk(self._classes, self._stored)
        walk.run(self._fun, self._given)
        self._walk, self._watched = walk, walk.watched
        is_function = isinstance(self._fun, types.FunctionType) and not self._given
        is_alone = is_function and len(walk.watched) == len(OF_A_FUNCTION)
        self._code = [ask(self._fun) for ask in OF_A_FUNCTION] if is_alone else None

    def copy(self) -> Environment:
        """The same state, noted at the same time."""
        other = copy.copy(self)
        other._has_warned = True  # this one does
        return other

    def without(self, stored: Collection[tuple[int, Any]]) -> Environment:
        """The same but for what is in places where the function stores tensors; see ``Walk``."""
        other = self.copy()
        if stored and other._walk is not None:
            other._stored = stored
            other.refresh()
            if not self._watched.same():  # other than what was traced
                other._walk, other._code = None, None
        return other

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Note the state before the function is traced.  What the function itself changes is noted
        as it is afterwards; whatever else changes meanwhile counts as a change.
        """
        if self._walk is None or not self._watched.same():
            self.refresh()
        before, is_alone = self._walk, not others_run()
        assert before is not None
        yield
        stores = before.stores
        if self._watched.same() and not (stores.names or stores.attributes):
            self._num_unexplained = 0
            return
        self.refresh()
        unexplained = [
            place
            for place in before.watched.changes()
            if not stores.explain(place, before.names) and (place.kind == "name" or not is_alone)
        ]
        self._num_unexplained = self._num_unexplained + 1 if unexplained else 0
        if not unexplained:
            return
        if self._num_unexplained < _MAX_UNEXPLAINED:
            self._walk, self._code = None, None
            self._changed_meanwhile = unexplained[0].origin
        elif self._num_unexplained == _MAX_UNEXPLAINED:
            warn(
                f"{self._name}: what it reads from outside ({unexplained[0].origin}) has changed "
                f"in each of its last {_MAX_UNEXPLAINED} traces, so the function itself seems to "
                "change it. It is not traced again for that, so what another thread changes during "
                "a trace may be missed. Pass what changes as an argument."
            )

    @property
    def _name(self) -> str:
        return getattr(self._fun, "__name__", str(self._fun))

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among them."""
        return [] if self._walk is None else self._walk.tensors

    def objects(self) -> list[Any]:
        """All that is reached."""
        return [] if self._walk is None else self._walk.objects()

    def change(self) -> str:
        """What has changed since it was noted, as logs say it."""
        origin = self._changed_meanwhile or "the function itself"
        if self._code is None and self._walk is not None:
            origin = next((place.origin for place in self._watched.changes()), "an object")
        return f"what it reads from outside has changed ({origin})"

    def changed(self) -> bool:
        """Whether a reference leads to something else than when it was noted."""
        if self._code is not None:  # most are of this kind, and this is quicker
            fun, (code, defaults, keywords) = self._fun, self._code
            return (
                fun.__code__ is not code
                or fun.__defaults__ is not defaults
                or fun.__kwdefaults__ is not keywords
            )
        if self._walk is None or not self._watched.same():
            return True
        if self._walk.unwatched is not None and not self._has_warned:
            self._has_warned = True
            warn(
                f"{self._name} closes over {self._walk.unwatched}, which "
                f"leads to more than {MAX_FOLLOWED} objects. Changes of the objects beyond these "
                "are not noticed: the compiled function keeps using the old ones. Pass what "
                "changes as an argument."
            )
        return False


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What a program reads from outside itself, besides tensors."""

    environments: Sequence[Environment]
    intact: Sequence[Callable[[], bool]] = ()
    """Of what else must stay, whether it has."""

    def copy(self) -> Surroundings:
        """The same, noted at the same time; later calls may note anew."""
        return Surroundings([each.copy() for each in self.environments], self.intact)

    def objects(self) -> list[Any]:
        """All that is reached."""
        return [x for each in self.environments for x in each.objects()]

    def changed(self) -> bool:
        """Whether something has changed since the program was traced."""
        for environment in self.environments:
            if environment.changed():
                return True
        return not all(is_intact() for is_intact in self.intact)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """See ``Environment``."""
        with contextlib.ExitStack() as stack:
            for environment in self.environments:
                stack.enter_context(environment.tracing())
            yield


def others_run() -> bool:
    """Whether another thread is in code of the user's."""
    mine = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        found: types.FrameType | None = frame
        while thread != mine and found is not None:
            if not is_library(found.f_code.co_filename):
                return True
            found = found.f_back
    return False


def tensors_of(fun: Callable[..., Any]) -> list[torch.Tensor]:
    """The tensors that a function can reach."""
    walk = Walk()
    walk.run(fun)
    return walk.tensors


def parameters(fun: Callable[..., Any]) -> list[torch.Tensor]:
    """The leaf tensors that a function can reach and that require grad."""
    leaves = [x for x in tensors_of(fun) if x.is_leaf and x.requires_grad]
    return list({id(leaf): leaf for leaf in leaves}.values())


def named_tensors(
    fun: Callable[..., Any], given: tuple[Any, ...] = ()
) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a function can reach, each with what leads to it: ``'model', 0.weight``.
    ``given``: arguments; if there are any, what only these lead to.
    """
    walk = Walk()
    walk.run(fun, given)
    names: dict[int, str] = {}
    for each in walk.objects():  # the outermost comes first
        known = [*(dict_of(each) or {}).items()]
        if isinstance(each, torch.nn.Module):
            known = [*each.named_parameters(), *each.named_buffers(), *known]
        for name, x in known:
            names.setdefault(id(x), f", {name}")
    found = zip(walk.origins, walk.tensors, strict=True)
    return [(origin + names.get(id(x), ""), x) for origin, x in found]
