"""Where an exception leaves the package: there its traceback is folded.

Only the outermost boundary folds.  Inside the package, and in the workers, code looks at whole
tracebacks.  A bug of the package (see ``is_bug``) keeps all frames, and so does every exception
with ``TORCHPMAP_TRACEBACK=full`` or ``tp.config.traceback = "full"``.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

from torch.compiler import is_dynamo_compiling

from torchpmap._base.config import Settings, config
from torchpmap._base.sources import PACKAGE
from torchpmap._base.torch_internals import skipped
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
            if isinstance(error, TypeError):
                _name_keyword(function, error)
            fold(error)
            raise

    return call


_OUTSIDE_GRAPHS = skipped(boundary(lambda: None).__code__.replace(co_name="outside_graphs"))


def outside_graphs(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A boundary of a function that calls users' functions: where ``torch.compile`` compiles the
    caller, it runs between the graphs.  Dynamo would compile the package's code piece by piece.
    """
    bound: Any = boundary(function)
    bound.__code__ = _OUTSIDE_GRAPHS
    bound._torchdynamo_disable = True
    return cast(Callable[_P, _T], bound)


_OTHER_NAMES = {
    "axes": "axis_name",
    "axis": "axis_name",
    "check_rep": "check_vma",
    "dim": "axis",
    "donate_args": "donate_argnums",
    "in_dims": "in_axes",
    "out_dims": "out_axes",
    "static_argnames": "static_broadcasted_argnames",
    "static_argnums": "static_broadcasted_argnums",
}
"""Keyword arguments as torch, or another version or function of JAX, calls them."""

_INSTEAD = {
    "allow_int": "integers have no gradient here, leave them out of argnums",
    "donate_argnames": "leave it out, what a step writes in place is not held twice",
    "donate_argnums": "leave it out, what a step writes in place is not held twice",
    "holomorphic": "the derivative of f is grad(lambda z: f(z).real)(z).conj()",
    "impl": "leave it out, keys are those of threefry2x32",
    "in_shardings": "place the arguments with torchpmap.device_put",
    "spmd_axis_name": "leave it out, it changes no value",
    "static_argnames": "leave it out, arguments that are no tensors are static",
    "static_argnums": "leave it out, arguments that are no tensors are static",
}
"""Keyword arguments of JAX that have no counterpart."""


def _name_keyword(function: Callable[..., Any], error: TypeError) -> None:
    """Add what a keyword argument is called here, if the call itself has failed."""
    within = error.__traceback__
    found = re.search(r"got an unexpected keyword argument '(\w+)'$", str(error))
    if found is None or within is None or within.tb_next is not None:
        return
    known = inspect.signature(function).parameters
    given = found[1]
    name = _OTHER_NAMES.get(given)
    told = None if name in known else _INSTEAD.get(given)
    if told is None:
        close = [name, *difflib.get_close_matches(given, known, 1)]
        told = next((f"it is {name} here" for name in close if name in known), None)
    if told:
        error.args = (f"{error}: {told}.",)


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
