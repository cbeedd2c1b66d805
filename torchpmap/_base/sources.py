"""Whose code a file is: ours, torch's or the user's; and which line of the user's led here."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

import torch

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_NOT_USERS = (PACKAGE, TORCH, threading.__file__)
_GENERATED = "<eval"
"""torch.fx calls the code that it makes of a graph ``<eval_with_key>``."""


def is_users(file: str) -> bool:
    """Whether code of a file of this name was written by the user."""
    return not file.startswith((*_NOT_USERS, _GENERATED))


def users_frames(within: CodeType | None = None) -> Iterator[FrameType]:
    """Those of this thread that are neither ours nor torch's, the innermost first, up to the call
    of ``within``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not within:
        if not frame.f_code.co_filename.startswith(_NOT_USERS):
            yield frame
        frame = frame.f_back


def users_line() -> str:
    """The innermost line of the user's in this thread."""
    for frame in users_frames():
        if is_users(frame.f_code.co_filename):
            return line(frame.f_code.co_filename, frame.f_lineno)
    return "an unknown line"


def line(file: str, number: int) -> str:
    """A line of a file, as a message names it."""
    text = linecache.getline(file, number).strip()
    return f"{file}:{number}" + (f" `{text}`" if text else "")
