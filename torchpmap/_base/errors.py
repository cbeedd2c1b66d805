"""What can go wrong, and how an exception crosses from a worker to the caller.

Misuse raises the built-in ``TypeError``, ``ValueError`` and ``NameError`` in the caller's process,
before anything is sent. Everything else is in this tree:

    RuntimeError
      PmapError
        WorkerError          user code raised and its exception could not be rebuilt
        WorkerDied           a worker process ended
        ShardLost            the value was on a worker that is gone
        RuntimeClosed        the runtime of a value or a call was shut down
        TraceError           fullgraph=True and the function cannot be traced
        CollectiveMismatch   devices ran different collectives
        CallTimeout          a call took longer than its limit
        TensorEscaped        a tensor of a mapped function was used outside of it
        CheckpointError      a checkpoint is damaged, or could not be written

A user's exception keeps its own type. ``pickle.dumps(exc)`` alone does not suffice: the class may
not be importable, unpickling may raise (a required argument of ``__init__``), ``__str__`` may
raise, and the value may hold a lock or a gigabyte. So text and traceback are always sent as plain
strings. The exception object is an optional extra, which the sender has already unpickled once: if
that fails, it fails in the worker.
"""

from __future__ import annotations

import io
import pickle
import reprlib
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch

from torchpmap._base.arrays import HostArray
from torchpmap._base.sources import PACKAGE
from torchpmap._base.tracebacks import RemoteTraceback, printed_folded


class PmapError(RuntimeError):
    """Base class of every failure that is not plain misuse.

    Example:
        >>> issubclass(WorkerDied, PmapError) and issubclass(PmapError, RuntimeError)
        True
    """


class WorkerError(PmapError):
    """User code raised on a worker and its exception could not be rebuilt; only its text is left.

    Example:
        >>> packed = pack_exception(SystemExit(3))  # must not end the caller's process
        >>> unpack_exception(packed, where="on device cpu:0")
        WorkerError('SystemExit: 3')
    """


class WorkerDied(PmapError):
    """A worker process ended by itself or was killed; ``rank`` and ``exitcode`` tell which and how.

    Args:
        message: the whole text; by default it is built from ``rank`` and ``exitcode``.
        rank: rank of the worker.
        exitcode: as ``multiprocessing.Process.exitcode``: negative for a signal.

    Example:
        >>> str(WorkerDied(rank=2, exitcode=-9))
        'the worker of rank 2 died (SIGKILL)'
    """

    def __init__(
        self, message: str | None = None, *, rank: int | None = None, exitcode: int | None = None
    ) -> None:
        if message is None:
            which = "a worker" if rank is None else f"the worker of rank {rank}"
            message = f"{which} died ({exit_reason(exitcode)})"
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode


class ShardLost(PmapError):
    """The value lived on a worker that died, or belongs to a call that failed."""


class RuntimeClosed(PmapError):
    """The runtime of a value or a call was shut down, or the process was forked."""


POOL_CLOSED = (
    "the pool of devices was shut down, and the values on its workers are lost. Fetch what you "
    "need (torchpmap.device_get) before torchpmap.shutdown() or torchpmap.init() with other "
    "devices; torchpmap.resize() keeps values."
)
FORKED = (
    "this process was forked from the one that owns the torchpmap devices; use torchpmap in the "
    "parent, or start the child with spawn or forkserver"
)


class TraceError(PmapError):
    """``fullgraph=True`` was asked for and the function cannot be traced as one graph."""


class CollectiveMismatch(PmapError):
    """Devices of one axis ran different collectives, so no result is right."""


class GroupLost(RuntimeError):
    """A process group failed during a collective because another rank failed, whose own error is,
    or will be, known.
    """


class CallTimeout(PmapError):
    """A call did not finish within its time limit."""


class TensorEscaped(PmapError):
    """A tensor that a mapped function made, or was given, was used after the call was over."""


class CheckpointError(PmapError):
    """The files of a checkpoint are missing or damaged, or could not be written."""


class CallCancelled(BaseException):
    """Ends a call in the middle of the user's code; never reaches the caller."""


def warn(text: str) -> None:
    """Warn at the innermost line of the user's code that led here."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(text, UserWarning, stacklevel=level)


def exit_reason(exitcode: int | None) -> str:
    """Return ``"SIGKILL"`` for a process that a signal ended, else ``"exit code 3"``.

    Example:
        >>> exit_reason(-9), exit_reason(3)
        ('SIGKILL', 'exit code 3')
    """
    if exitcode is None:
        return "unknown exit code"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def call_prefix(kind: str, name: str, in_axes: Any, axis_name: Hashable | None) -> str:
    """Return the head of a message about one call, as ``torch.func.vmap`` writes it.

    Example:
        >>> call_prefix("pmap", "step", (None, 0), "i")
        "pmap(step, in_axes=(None, 0), axis_name='i')(<inputs>)"
    """
    short = reprlib.Repr()
    short.maxdict = short.maxlist = short.maxtuple = 8
    axis = "" if axis_name is None else f", axis_name={axis_name!r}"
    return f"{kind}({name}, in_axes={short.repr(in_axes)}{axis})(<inputs>)"


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def wrong_dtype(
    function: str, dtype: Any, expected: str, kind: type[Exception] = TypeError
) -> Exception:
    """The error for a dtype that a function does not take; ``expected``: those that it takes,
    ``kind``: that of JAX's error.  What is no dtype is a ``TypeError``.
    """
    if isinstance(dtype, torch.dtype):
        return kind(f"{function}: got dtype {dtype}, expected {expected}.")
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    is_known = isinstance(getattr(torch, name, None), torch.dtype)
    what = f"the string {dtype!r}" if isinstance(dtype, str) else f"{dtype!r}"
    wanted = f"torch.{name}" if is_known else f"a torch.dtype ({expected})"
    return TypeError(f"{function}: got {what} for the dtype, expected {wanted}.")


def kind_of(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return ``"float32[2, 3]"``."""
    return f"{dtype_name(dtype)}[{', '.join(map(str, shape))}]"


def size_text(num_bytes: int) -> str:
    """Return ``"24 B"``, ``"1.5 MB"``."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def lost_write(tensor: torch.Tensor, how: str = "") -> str:
    """Return the message about an in-place write to a tensor that the function closes over."""
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    return (
        f"the function writes in place to a captured {kind} of type "
        f"{kind_of(tensor.shape, tensor.dtype)}"
        f"{how}; each device works on its own copy, so the write would be lost. Pass the tensor as "
        "an argument and return its new value (for a module: torch.func.functional_call with its "
        "parameters and buffers; BatchNorm: .eval(), or return the buffers; an optimizer: "
        "torchpmap.optim, and return parameters and state)."
    )


def write_in_body(name: str, tensor: torch.Tensor, operation: str) -> str:
    """Return the message about an in-place write, in the body of a loop or branch, to a tensor that
    the body closes over.
    """
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    return (
        f"{name}: a function writes in place to a {kind} of type "
        f"{kind_of(tensor.shape, tensor.dtype)} ({operation}) that it closes over, in the body of "
        "a loop or branch. A body is traced once, whatever the number of steps, so the write would "
        "be lost. Make the tensor a part of the carry (of the operands, for a branch) and return "
        "its new value (for a module: torch.func.functional_call with its parameters and buffers; "
        "BatchNorm: .eval(); an optimizer: torchpmap.optim)."
    )


def pack_exception(
    exc: BaseException, *, limit: int = 64 * 1024, trace: str | None = None
) -> bytes:
    """Turn any exception into bytes for ``unpack_exception``; never raises any error, but lets a
    ``CallCancelled`` through.

    Args:
        exc: the exception, with its traceback, causes and notes.
        limit: maximum of bytes for the pickled exception, and of characters for its text, for each
            note and for its traceback.
        trace: what to show in place of its own traceback.
    """
    type_name = _guarded(lambda: _type_name(type(exc)), "an exception")
    # join: __str__ may return a subclass of str that cannot be pickled.
    text = _guarded(lambda: "".join([str(exc)]), "<exception str() failed>")
    # after the text: traceback swallows any exception of __str__
    full = folded = trace or ""
    if trace is None:
        full = _guarded(lambda: "".join(traceback.format_exception(exc)), "")
        folded = _guarded(lambda: printed_folded(exc), full)
    full = full or f"{type_name}: {text}"
    fields = (
        type_name,
        _capped(text, limit),
        # both: the setting is the controller's
        (_capped(full, limit), _capped(folded, limit)),
        _guarded(lambda: [_capped(str(note), limit) for note in exc.__notes__][:100], []),
        _guarded(lambda: _pickled(exc, type_name, text, limit), None),
    )
    return pickle.dumps(fields)


def unpack_exception(packed: bytes, *, where: str) -> BaseException:
    """Rebuild what ``pack_exception`` packed: the same type if possible, else a ``WorkerError``.

    Args:
        packed: bytes from ``pack_exception``; unpickled, so they must be of our own workers.
        where: added as a note: ``"on device cpu:2 (rank 2, pid 71) while running step"``.

    Returns:
        the exception, not raised, with ``__cause__`` set to the remote traceback.
    """
    type_name, text, traces, notes, pickled = pickle.loads(packed)
    lost = WorkerError(f"{type_name}: {text}" if text else type_name)

    def told(exc: Exception) -> Exception:
        # Bypasses a __setattr__ of the user's class; a property of this name makes it fail.
        BaseException.__setattr__(exc, "__notes__", [*notes, where])
        BaseException.__setattr__(exc, "__cause__", RemoteTraceback(*traces))
        return exc

    found = _guarded(lambda: told(_rebuilt(pickled, type_name)), None) if pickled else None
    return told(lost) if found is None else found


class _LimitedFile(io.BytesIO):
    """Raises once more than ``limit`` bytes are written: a huge value is never pickled whole."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._left = limit

    def write(self, data: Any) -> int:
        self._left -= memoryview(data).nbytes
        if self._left < 0:
            raise pickle.PicklingError("larger than the limit")
        return super().write(data)


class _HostPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Refuses accelerator tensors: rebuilding one would start the accelerator in the caller."""

    def persistent_id(self, obj: Any) -> None:
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            raise pickle.PicklingError(f"tensor on {obj.device}")


def _pickled(exc: BaseException, type_name: str, text: str, limit: int) -> bytes | None:
    file = _LimitedFile(limit)
    # args travel too: __init__ may have computed them, and unpickling runs it on its own result.
    _HostPickler(file).dump((exc, exc.args))
    pickled = file.getvalue()
    return pickled if str(_rebuilt(pickled, type_name)) == text else None


def _rebuilt(pickled: bytes, type_name: str) -> Exception:
    exc, args = pickle.loads(pickled)
    # Not BaseException: SystemExit of a worker must not end the caller's script.
    # Only the last part of the name: a class made in a function loses the rest when unpickled.
    if not isinstance(exc, Exception) or type(exc).__name__ != type_name.rpartition(".")[2]:
        raise TypeError(f"{type_name} was rebuilt as {type(exc)}")
    BaseException.__setattr__(exc, "args", args)
    return exc


def _guarded(build: Callable[[], Any], fallback: Any) -> Any:
    # User code runs inside (__str__, __reduce__, __setstate__); even its SystemExit is caught.
    try:
        return build()
    except CallCancelled:
        raise
    except BaseException:
        return fallback


def _type_name(cls: type) -> str:
    known = cls.__module__ in ("builtins", "__main__")
    return cls.__qualname__ if known else f"{cls.__module__}.{cls.__qualname__}"


def _capped(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    # Both ends: the head has the outermost frames, the tail the error.
    half = limit // 2
    return f"{text[:half]}\n... [{len(text) - 2 * half} characters left out] ...\n{text[-half:]}"


_ARRAYS = (np.ndarray, HostArray, np.memmap, np.matrix, np.recarray)
"""Array classes that hold nothing but data."""


def check_array(value: Any, what: str) -> None:
    """Raise ``TypeError`` for an array whose class holds more than data (a mask, a unit)."""
    if not isinstance(value, np.ndarray) or type(value) in _ARRAYS:
        return
    name = type(value).__name__
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{what} is a numpy masked array ({name}), whose mask a tensor cannot have. Use "
            ".filled(value) to replace masked entries, or pass .data and .mask as two arrays."
        )
    raise TypeError(
        f"{what} is a {name}, a subclass of numpy's array; a tensor would keep its data only. Pass "
        "numpy.asarray(x) if you need only the data."
    )
