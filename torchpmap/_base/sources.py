"""Tells the user's code from ours and torch's, and finds the line of the user's that led here."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

import torch

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
TORCH = os.path.join(os.path.dirname(torch.__file__), "")
STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")
_NOT_USERS = (PACKAGE, TORCH, threading.__file__)


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


def users_line() -> str:
    """The innermost line of the user's code in this thread."""
    for frame in filter(is_users, users_frames()):
        return line(frame.f_code.co_filename, frame.f_lineno)
    return "an unknown line"


def line(file: str, number: int) -> str:
    """A line of a file, as a message names it."""
    text = linecache.getline(file, number).strip()
    return f"{file}:{number}" + (f" `{text}`" if text else "")
