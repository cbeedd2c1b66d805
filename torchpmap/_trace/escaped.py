"""Clear errors for tensors of a mapped function that are used after its end.

While a function is traced, or its rows run as lanes of a vmap, its tensors stand for values that do
not exist outside.  An ``EscapeWatch`` holds a weak reference to each, with the user's line that
made it.  Tensors that are still alive at the end have escaped: their class becomes ``Escaped``,
which refuses every use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from torchpmap._base.boundary import boundary
from torchpmap._base.context import assigned
from torchpmap._base.errors import TensorEscaped, kind_of
from torchpmap._base.pytree import tree_leaves
from torchpmap._base.sources import line, users_line
from torchpmap._base.torch_internals import (
    FakeTensor,
    depth,
    innermost,
    level_of,
    torch_function_off,
)

Where = str | tuple[str, int] | None
"""What a message says of it, or the line that made it as file and number."""

_current: ContextVar[EscapeWatch | None] = ContextVar("torchpmap_watch", default=None)


class Escaped(torch.Tensor):
    """A tensor of a mapped function that has ended."""

    _torchpmap_story: str

    def refuse(self, what: str = "this tensor") -> NoReturn:
        """Raise, calling the tensor ``what``."""
        raise TensorEscaped(f"{what} {self._told()}")

    def _told(self) -> str:
        return (
            f"(of type {kind_of(self.shape, self.dtype)}) escaped from "
            f"{self.__dict__['_torchpmap_story']}. There it stood for values on the devices, and "
            "the call is over. Return it from the mapped function, and use the result."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<a tensor that {self._told()}>"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    @classmethod
    @boundary
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) in _DESCRIBING:
            with torch_function_off():
                return func(*args, **(kwargs or {}))
        return cls._refuse_all((args, kwargs), func)

    @classmethod
    @boundary
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls._refuse_all((args, kwargs), func)

    @classmethod
    def _refuse_all(cls, values: Any, func: Any) -> NoReturn:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Escaped):
                leaf.refuse()
        raise TensorEscaped(f"{func} met a tensor that escaped from a mapped function")


_DESCRIBING = tuple(
    getattr(torch.Tensor, name)
    for name in ("shape", "dtype", "layout", "ndim", "requires_grad", "is_leaf", "is_meta")
)
"""Attributes that an escaped tensor still has, for messages and debuggers."""


class EscapeWatch(TorchFunctionMode):
    """Notes the tensors that the mapped function ``name`` makes inside the ``with`` block."""

    def __init__(self, name: str, *, is_traced: bool = False) -> None:
        """``is_traced``: whether a trace tells it of tensors, and it is no mode itself."""
        super().__init__()
        self._name = name
        self._is_traced = is_traced
        self._depth = depth()
        self._made: dict[int, tuple[TensorWeakRef, Where]] = {}

    def entered(self) -> AbstractContextManager[None]:
        """A block in which ``note`` tells this of arguments."""
        return assigned(_current, self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_dynamo_compiling():
            self.note(result, None)
        return result

    def note(self, value: Any, where: Where) -> None:
        """Note arguments, or tensors that a line made: None for the one that runs."""
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and self._stands_for_others(tensor):
                known = self._made.get(id(tensor))
                if known is None or known[0]() is not tensor:  # Python reuses ids
                    story = where or f"made at {users_line()}"
                    self._made[id(tensor)] = TensorWeakRef(tensor), story

    def _stands_for_others(self, tensor: torch.Tensor) -> bool:
        if not self._is_traced:
            return bool(level_of(tensor) > self._depth)
        # levels tell nothing here: tracing sets aside those around the call, and counts anew inside
        return isinstance(innermost(tensor), FakeTensor)

    def end(self) -> None:
        """Mark the tensors that are still alive after the function as escaped."""
        for reference, where in self._made.values():
            tensor = reference()
            if tensor is not None:
                if isinstance(where, tuple):
                    where = f"made at {line(*where)}"
                tensor.__class__ = Escaped
                tensor.__dict__["_torchpmap_story"] = f"the mapped function {self._name}: {where}"


@contextmanager
def watched(name: str) -> Iterator[None]:
    """Mark the tensors of the mapped function ``name`` that outlive the block, unless an outer
    watch does so.
    """
    if _current.get() is not None:
        yield
        return
    watch = EscapeWatch(name)
    try:
        with watch.entered(), watch:
            yield
    finally:
        watch.end()


def note(value: Any, where: Where) -> None:
    """Note what a line of a mapped function made, or what it was given, if it is watched."""
    watch = _current.get()
    if watch is not None:
        watch.note(value, where)
