"""How one of several processes fails: which error it raises, and how the others and torchrun learn
of it.

A process that fails in a plan leaves its groups, so that the others fail at once instead of waiting
for it.  They read from the store which process failed first.  On an asynchronous device a failure
may come when no call is in progress: then the next use of the runtime raises it, at the latest the
end of the script.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from torchpmap._base import ending
from torchpmap._base.errors import (
    POOL_CLOSED,
    CallTimeout,
    CollectiveMismatch,
    PmapError,
    RuntimeClosed,
    WorkerDied,
    WorkerError,
)
from torchpmap._runtime.groups.process_groups import Groups, is_communication
from torchpmap._runtime.torchrun.joining import exit_with_failure
from torchpmap._runtime.torchrun.rendezvous import Rendezvous, lost

_CONSEQUENCES = (WorkerError, WorkerDied)
"""Errors that a process raises because another one failed."""
_DESTROYED = (
    "torch.distributed.destroy_process_group() was called before, which ends the groups of "
    "torchpmap too. Call it at the end of the script."
)


class Failures:
    """The first failure of this process is the one that counts; any thread may report one."""

    def __init__(self, rendezvous: Rendezvous, groups: Groups) -> None:
        self.closed_because: str | None = None
        """Why the runtime takes no more calls; None: it does."""
        self.verdict: PmapError | None = None
        """Why a call in progress was ended; its collectives were aborted then."""
        self._rendezvous = rendezvous
        self._groups = groups
        self._lock = threading.Lock()  # guards _failure and _is_seen
        self._failure: BaseException | None = None
        self._is_seen = True
        """Whether ``_failure`` was raised where the script sees it."""
        self._recorded: BaseException | None = None
        self._previous_hook = sys.excepthook
        sys.excepthook = self._uncaught

    def raise_if_closed(self) -> None:
        """Raise if the runtime was closed."""
        if self.closed_because is not None:
            self._raise_unseen()
            raise RuntimeClosed(self.closed_because)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """An exception of the block ends the job."""
        try:
            yield
        except Exception as error:
            failure = self.fail(error)
            raise failure from failure.__cause__

    def fail(self, error: Exception, *, is_late: bool = False) -> BaseException:
        """The exception to raise for ``error``; tells the others, which then stop waiting.

        ``is_late``: the call has returned, so that nothing raises the exception now.
        """
        with self._lock:
            if self._failure is None:
                self._failure = self._reported(error)
                # the script may catch the error, but the launcher must see that the job has failed
                exit_with_failure(str(self._failure))
                # another thread may be in a group now, which it must not lose
                self._groups.abort(self._groups.epoch) if is_late else self._groups.drop()
                text = str(self._failure).removesuffix(".")
                self._is_seen = not is_late
                self.closed_because = (
                    "a mapped call failed in this process, so the others cannot go on with it: "
                    f"{type(self._failure).__name__}: {text}. End the script, and let the "
                    "launcher restart it."
                )
            elif not is_late:
                self._is_seen = True
            return self._failure

    def conclude(self, verdict: PmapError) -> None:
        """End the call in progress, which then fails with ``verdict`` (any thread)."""
        self.verdict = verdict
        self._rendezvous.report_cause(verdict)
        self._groups.abort(self._groups.epoch)

    def close(self) -> None:
        if self.closed_because is None:
            self.closed_because = POOL_CLOSED
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._previous_hook

    def surface(self) -> None:
        """Raise a failure that nothing has raised; at the end of the script: fail the process."""
        try:
            self._raise_unseen()
        except Exception as failure:
            if not ending.has_begun():
                raise
            traceback.print_exception(failure)
            exit_with_failure("")

    def end_process(self, error: BaseException) -> None:
        """End this process: the call that should raise ``error`` does not return."""
        self._record(error)
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)

    def _raise_unseen(self) -> None:
        with self._lock:
            was_seen, self._is_seen = self._is_seen, True
        if not was_seen:
            assert self._failure is not None
            raise self._failure from self._failure.__cause__

    def _reported(self, error: Exception) -> Exception:
        self._rendezvous.hurry()
        if not dist.is_initialized():
            error.add_note(_DESTROYED)
        if is_communication(error):
            try:
                if self.verdict is not None:
                    raise self.verdict
                self._rendezvous.raise_cause()
                self._rendezvous.raise_absence()
                error = lost(error)
            except (WorkerError, CollectiveMismatch, CallTimeout) as cause:
                error = cause
            except Exception:  # the store is gone too
                error = lost(error)
        if not isinstance(error, _CONSEQUENCES):
            self._record(error)  # at once: torchrun takes the earliest record for the cause
        self._rendezvous.report_cause(error)
        return error

    def _record(self, error: BaseException) -> None:
        """Write for torchrun why this process fails."""
        if "TORCHELASTIC_ERROR_FILE" not in os.environ or error is self._recorded:
            return
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        self._recorded, where = error, error.__traceback__
        try:
            raise error  # torchrun records the exception that is being handled
        except BaseException as handled:
            get_error_handler().record_exception(handled)
        error.with_traceback(where)
        if isinstance(error, _CONSEQUENCES):
            _note_as_later(Path(os.environ["TORCHELASTIC_ERROR_FILE"]))

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, where: TracebackType | None
    ) -> None:
        """``sys.excepthook``: the others, and torchrun, learn what ended this process."""
        with self._lock:
            if self.closed_because is None:
                self._failure = error  # what the device still runs fails now, but is not the cause
                self._rendezvous.hurry()
                self._rendezvous.report_cause(error.with_traceback(where))
                self._groups.drop()
                self.closed_because = f"this process failed: {kind.__name__}: {error}"
        exit_with_failure(None)  # Python does
        self._record(error)
        self._previous_hook(kind, error, where)


def _note_as_later(file: Path) -> None:
    """Date a consequence a second later: torchrun takes the earliest failure for the cause, and
    counts in whole seconds.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads(file.read_text())
        extra = note["message"]["extraInfo"]
        extra["timestamp"] = str(int(extra["timestamp"]) + 1)
        file.write_text(json.dumps(note))
