"""Tells the user's code from ours and torch's, and finds the line of the user's that led here."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from types import CodeType, FrameType
from typing import Any

import numpy
import torch

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
TORCH = os.path.join(os.path.dirname(torch.__file__), "")
STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")
_NOT_USERS = (PACKAGE, TORCH, threading.__file__, contextlib.__file__)
_FOREIGN = {"torch", "torchpmap", "numpy", "builtins", *sys.stdlib_module_names} - {"__main__"}
_FOLDERS = (PACKAGE, TORCH, os.path.join(os.path.dirname(numpy.__file__), ""))
_PYTHONS = (STDLIB, os.path.join(sysconfig.get_path("platstdlib"), ""))
_INSTALLED = tuple(os.path.join("", folder, "") for folder in ("site-packages", "dist-packages"))


def users_frames(within: CodeType | None = None) -> Iterator[FrameType]:
    """Frames of this thread outside this package and torch, innermost first, up to ``within``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not within:
        if not frame.f_code.co_filename.startswith(_NOT_USERS):
            yield frame
        frame = frame.f_back


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs code that the user wrote; code that torch generates has no module."""
    return "__name__" in frame.f_globals and not frame.f_code.co_filename.startswith(_NOT_USERS)


def is_foreign(module: str | None) -> bool:
    """Whether a module is Python's, torch's, numpy's or this package's: its functions and instances
    do not change under a user's feet.  A user's ``trace.py`` or ``code.py`` is none of Python's.
    """
    if type(module) is not str:
        return False
    package = module.partition(".")[0]
    if package not in _FOREIGN:
        return False
    found = sys.modules.get(package)
    file = getattr(found, "__file__", None)
    if file is None:
        file = next(iter(getattr(found, "__path__", ())), None)  # of a folder without __init__
    return file is None or _is_foreign_file(file)


def is_extension(module: str | None) -> bool:
    """Whether a module that is not foreign is not written in Python: nothing tells what its code
    reads.
    """
    found = sys.modules.get(module) if type(module) is str else None
    file = getattr(found, "__file__", None) or ""
    return file.endswith(tuple(EXTENSION_SUFFIXES)) and not is_foreign(module)


@functools.lru_cache(1024)
def _is_foreign_file(file: str) -> bool:
    if file.startswith(_FOLDERS):
        return True
    return file.startswith(_PYTHONS) and not _is_installed(file)


def _is_installed(file: str) -> bool:
    return any(folder in file for folder in _INSTALLED)


def is_library(file: str) -> bool:
    """Whether a file is of Python or of an installed package."""
    return file.startswith("<frozen ") or _is_foreign_file(file) or _is_installed(file)


def users_line() -> str:
    """The innermost line of the user's code in this thread."""
    for frame in filter(is_users, users_frames()):
        return line(frame.f_code.co_filename, frame.f_lineno)
    return "an unknown line"


def defined_at(function: Any) -> str:
    """``"train.py:12"``, where a function was written down; empty if it has no code of its own."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):  # an object that is called, such as a module
        function = getattr(function, "forward", None) or type(function).__call__
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def line(file: str, number: int) -> str:
    """A line of a file, as a message names it."""
    text = linecache.getline(file, number).strip()
    return f"{file}:{number}" + (f" `{text}`" if text else "")
