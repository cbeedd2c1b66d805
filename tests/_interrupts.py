"""Ctrl-C before a chosen line of the package, for tests that try all of them."""

import linecache
import sys

NO_HANDLER = "with ", "try:"
"""Python runs no signal handler between the end of a ``with`` block and ``__exit__``, nor at
``try``: an exception from there would keep the lock.
"""


def interrupted_at(number, function, is_of_interest, *, times=1, sure=NO_HANDLER):
    """Whether a call has so many lines in the code that is of interest: Ctrl-C comes before that
    line, and ``times - 1`` times again at the next ones.  ``sure``: how lines begin that are not
    counted.
    """
    lines = 0

    def trace(frame, event, arg):
        nonlocal lines
        if not is_of_interest(frame.f_code):
            return None
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not source.startswith(sure):
            lines += 1
            if number <= lines < number + times:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
