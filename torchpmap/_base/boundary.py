"""Where an exception leaves the package: there its traceback is folded.

Only the outermost boundary folds.  Inside the package, and in the workers, code looks at whole
tracebacks.  A bug of the package (see ``is_bug``) keeps all frames, and so does every exception
with ``TORCHPMAP_TRACEBACK=full`` or ``tp.config.traceback = "full"``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from torch.compiler import is_dynamo_compiling

from torchpmap._base.config import Settings, config
from torchpmap._base.sources import PACKAGE
from torchpmap._base.tracebacks import fold_chain, is_bug

_P = ParamSpec("_P")
_T = TypeVar("_T")
_C = TypeVar("_C", bound=type)


def boundary(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Fold the tracebacks of what a public function raises."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if is_dynamo_compiling():  # it breaks no graph inside ``try``
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            fold(error)
            raise

    return call


def bounded(cls: _C) -> _C:
    """Make boundaries of the methods and properties that a class has for its users."""
    for name, value in vars(cls).copy().items():
        if name == "__new__" or (name.startswith("_") and not name.endswith("__")):
            continue
        if isinstance(value, FunctionType):
            setattr(cls, name, _method(value))
        elif isinstance(value, classmethod):
            setattr(cls, name, classmethod(_method(value.__func__)))
        elif isinstance(value, property):
            setter = None if value.fset is None else _method(value.fset)
            setattr(cls, name, property(_method(value.fget), setter, doc=value.__doc__))
    return cls


def _method(function: Any) -> Any:
    bound: Any = boundary(function)
    # code of its own: by their code, Dynamo is told which methods to leave alone
    bound.__code__ = bound.__code__.replace(co_name=function.__name__)
    return bound


def fold(error: BaseException) -> None:
    """Fold an exception that leaves the package: called where a boundary has caught it, before a
    bare ``raise``, which adds no frame.
    """
    above = []
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return  # an outer boundary follows
        above.append(frame)
        frame = frame.f_back
    if is_wanted() and not is_bug(error):
        fold_chain(error, above)


def is_wanted() -> bool:
    """Whether the user wants short tracebacks."""
    try:
        return config.traceback == "folded"
    except ValueError:  # an environment variable is wrong, which may be the error itself
        return True


bounded(Settings)  # here, because its file cannot import this one
