"""Folds tracebacks: what is left are the frames of the user's code (pure; see ``_base/boundary``).

    caller -> boundary -> ours, torch's -> the user's function -> torch's, ours -> raise
    kept      folded                       kept                   folded

Frames are removed from the traceback objects themselves, so every way of showing them is short:
scripts, notebooks, pytest, ``logging``.  Debuggers still stop in the user's frames.  Chained
exceptions stay, except those that never left hidden frames and say nothing new.
"""

from __future__ import annotations

import dis
import traceback
from collections.abc import Collection
from types import FrameType, TracebackType
from typing import Any

from torchpmap._base.sources import PACKAGE, STDLIB, TORCH

_BUGS = (AssertionError, AttributeError, KeyError, NameError)
"""What torch does not raise about arguments of the user's."""
_RAISE = dis.opmap["RAISE_VARARGS"]

# these bypass properties of the same names in the class of a user's exception
_exception: Any = BaseException
_group: Any = BaseExceptionGroup
TRACE = _exception.__traceback__
CAUSE = _exception.__cause__
CONTEXT = _exception.__context__
MEMBERS = _group.exceptions
_IS_SUPPRESSED = _exception.__suppress_context__


class RemoteTraceback(Exception):
    """The ``__cause__`` of an exception from a worker: its text is the traceback on the worker.

    Args:
        text: the whole traceback.
        folded: the same with the user's frames only; empty if there are none.
    """

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'

    def fold(self) -> None:
        """Show the user's frames only; idempotent."""
        self.args = self.args[-1:]


def fold_chain(error: BaseException, above: Collection[FrameType] = ()) -> None:
    """Fold an exception and those printed with it, in place.

    ``above``: frames of callers.  What these were handling already is theirs, and stays whole.
    """
    pending, seen = [error], set()
    while pending:
        one = pending.pop()
        trace = TRACE.__get__(one)
        if id(one) in seen or (trace is not None and trace.tb_frame in above):
            continue
        seen.add(id(one))
        TRACE.__set__(one, _folded(trace))
        while (before := _shown_before(one)) is not None and _says_nothing(before, one):
            link = CONTEXT if CAUSE.__get__(one) is None else CAUSE
            link.__set__(one, _shown_before(before))
        if before is not None:
            pending.append(before)
        if issubclass(type(one), BaseExceptionGroup):
            pending += MEMBERS.__get__(one)


def printed_folded(error: BaseException) -> str:
    """An exception as it is printed, after folding it; empty if that says no more than its text."""
    if not is_bug(error):
        fold_chain(error)
    if TRACE.__get__(error) is None and _shown_before(error) is None:
        return ""
    return "".join(traceback.format_exception(error))


def _folded(trace: TracebackType | None) -> TracebackType | None:
    kept = []
    is_hidden = True  # the first frame is that of a boundary
    while trace is not None:
        is_hidden = _is_hidden(trace.tb_frame, is_hidden)
        if not is_hidden:
            kept.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for each in reversed(kept):
        # Ctrl-C may come where Python cleans up, which is on no line
        line = each.tb_lineno or each.tb_frame.f_code.co_firstlineno
        found = TracebackType(found, each.tb_frame, each.tb_lasti, line)
    return found


def _is_hidden(frame: FrameType, is_callers: bool) -> bool:
    """Whether a frame is ours or torch's; code of Python's library, and code that was generated,
    goes with its caller.
    """
    file = frame.f_code.co_filename
    if file == "<string>":  # as dataclasses make it, for a class of this module
        file = frame.f_globals.get("__file__", file)
    if file.startswith((PACKAGE, TORCH)):
        return True
    if "__name__" not in frame.f_globals or file.startswith("<frozen "):
        return is_callers
    return is_callers and file.startswith(STDLIB) and "-packages" not in file


def is_bug(error: BaseException) -> bool:
    """Whether an exception comes from this package, by no ``raise`` statement and through no frame
    of the user's.
    """
    trace = TRACE.__get__(error)
    if not issubclass(type(error), _BUGS) or trace is None or _folded(trace) is not None:
        return False
    if type(CAUSE.__get__(error)) is RemoteTraceback:
        return False  # it was raised elsewhere, and judged there
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    is_raised = code.co_code[trace.tb_lasti] == _RAISE and not isinstance(error, AssertionError)
    return code.co_filename.startswith(PACKAGE) and not is_raised


def _shown_before(error: BaseException) -> BaseException | None:
    """The exception that is printed above another."""
    cause: BaseException | None = CAUSE.__get__(error)
    if cause is not None or _IS_SUPPRESSED.__get__(error):
        return cause
    context: BaseException | None = CONTEXT.__get__(error)
    return context


def _says_nothing(before: BaseException, error: BaseException) -> bool:
    """Whether an exception shown before another one is no news: it was raised and caught among
    hidden frames, and the other one was not raised *from* it, or repeats its text.
    """
    if type(before) is RemoteTraceback:
        before.fold()
        return not before.args[0]
    trace = TRACE.__get__(before)
    if trace is None or _folded(trace) is not None:
        return False
    if CAUSE.__get__(error) is not before:
        return True
    try:
        return str(before) in str(error)
    except Exception:  # of the user's class
        return False
