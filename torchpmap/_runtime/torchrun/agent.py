"""Ends a process of torchrun whose agent is gone.

Torchrun starts every process in a session of its own.  If the agent is killed, nothing else ends
these processes: they would keep their GPUs, and wait for each other.

``PR_SET_PDEATHSIG`` does not help: it reacts to the end of the parent's *thread* that forked, and
this process may be a grandchild.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path

_GRACE_S = 30.0
"""How long the script's handler for SIGTERM may take; torchrun allows the same."""
_STDERR = 2
_TEXT = b"torchpmap: the agent of torchrun that started this process has ended, so it ends, too.\n"

_is_watched = False


def end_with_agent() -> None:
    """From now on this process ends when the agent of torchrun that started it does."""
    global _is_watched
    if _is_watched or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    _is_watched = True
    try:
        agent = os.pidfd_open(_agent())
    except OSError:  # the agent is another user's, or this is an old kernel
        return
    threading.Thread(target=_watch, args=(agent,), name="torchpmap-agent", daemon=True).start()


def _agent() -> int:
    """The process that started the session of this one; a script may stand between the two."""
    leader = os.getsid(0)
    if leader == os.getpid():
        return os.getppid()
    after_name = Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2]
    return int(after_name.split()[1])


def _watch(agent: int) -> None:
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    poll.poll()
    with contextlib.suppress(OSError):  # the reader of stderr may have been the agent
        if select.select([], [_STDERR], [], 0)[1]:  # else it is full, and writing would wait
            os.write(_STDERR, _TEXT)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)  # a handler in Python never runs while the main thread is in C++
    os.kill(os.getpid(), signal.SIGKILL)
