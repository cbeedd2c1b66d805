"""Settings of torch around a call that change what a mapped function computes.

``SETTINGS`` lists them all and says how to read and write each.  The caller's values apply where a
function is traced, where its graph is compiled and run, and where it runs as Python on a worker
(``compile=False``).  Every call compares the settings of ``KEYED``: a change means a new plan.  The
others keep the values that they had when the function was traced.

Settings that are not listed stay with the caller (see docs/state.md).  If the function itself
changes a listed setting, the change is undone after the call.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import _C
from torch.overrides import _pop_mode_temporarily

from torchpmap._base.devices import CUDA, PLATFORMS
from torchpmap._base.platform import Boxed

Ambient = tuple[Hashable, ...]
"""Values of ``SETTINGS`` or ``KEYED``, in order; () stands for those of a fresh process."""

_DENORMAL = 5e-324
"""Equal to zero in a thread that flushes denormal numbers; torch has no other way to ask."""

# every call reads these: saves the attribute lookups
_is_any_autocast_enabled = _C._is_any_autocast_enabled
_default_dtype, _is_deterministic = torch.get_default_dtype, _C._get_deterministic_algorithms
_has_flash, _has_efficient = _C._get_flash_sdp_enabled, _C._get_mem_efficient_sdp_enabled
_has_cudnn, _fp32_precision = _C._get_cudnn_sdp_enabled, _C._get_fp32_precision_getter
_HAS_CUDA = CUDA.is_built()


class Setting(NamedTuple):
    """How to read and write one setting, and its name in messages."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _autocast() -> Hashable:
    """None if autocast is off; else whether it caches, and its dtype per device type."""
    if not _is_any_autocast_enabled():
        return None
    kinds = [kind for kind in PLATFORMS if torch.is_autocast_enabled(kind)]
    return torch.is_autocast_cache_enabled(), tuple((k, torch.get_autocast_dtype(k)) for k in kinds)


def _set_autocast(value: Any) -> None:
    caches, dtypes = value or (True, ())
    for kind in PLATFORMS:
        torch.set_autocast_enabled(kind, kind in dict(dtypes))
    for kind, dtype in dtypes:
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(caches)
    torch.clear_autocast_cache()


def _set_deterministic(value: bool) -> None:
    _C._set_deterministic_algorithms(value, warn_only=_C._get_deterministic_algorithms_warn_only())


def _set_warn_only(value: bool) -> None:
    _C._set_deterministic_algorithms(_C._get_deterministic_algorithms(), warn_only=value)


def _matmul_precision() -> Any:
    """None if the script mixed the older and the newer API: then torch refuses to read it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(value: Any) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _precision(backend: str, operation: str) -> Setting:
    return Setting(
        f"float32 precision of {backend} {operation}",
        functools.partial(_fp32_precision, backend, operation),
        functools.partial(_C._set_fp32_precision_setter, backend, operation),
    )


KEYED: tuple[Setting, ...] = (
    Setting("autocast", _autocast, _set_autocast),
    Setting("default dtype", _default_dtype, torch.set_default_dtype),
    Setting("deterministic algorithms", _is_deterministic, _set_deterministic),
    Setting(
        "flush denormal", functools.partial(operator.eq, _DENORMAL, 0.0), torch.set_flush_denormal
    ),
    Setting("flash attention", _has_flash, _C._set_sdp_use_flash),
    _precision("mkldnn", "matmul"),
)
if _HAS_CUDA:
    KEYED += (
        _precision(CUDA.name, "matmul"),
        Setting("memory-efficient attention", _has_efficient, _C._set_sdp_use_mem_efficient),
        Setting("cuDNN attention", _has_cudnn, _C._set_sdp_use_cudnn),
    )

SETTINGS: tuple[Setting, ...] = (
    *KEYED,
    Setting(
        "deterministic algorithms only warn",
        _C._get_deterministic_algorithms_warn_only,
        _set_warn_only,
    ),
    Setting(
        "deterministic algorithms fill uninitialized memory",
        _C._get_deterministic_fill_uninitialized_memory,
        _C._set_deterministic_fill_uninitialized_memory,
    ),
    Setting("plain attention", _C._get_math_sdp_enabled, _C._set_sdp_use_math),
    *(_precision("mkldnn", operation) for operation in ("conv", "rnn")),
    *(_precision(CUDA.name, operation) for operation in ("conv", "rnn")),
    Setting("oneDNN", _C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    Setting("oneDNN deterministic", _C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic),
    Setting("cuDNN", _C._get_cudnn_enabled, _C._set_cudnn_enabled),
    Setting("cuDNN benchmark", _C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    Setting("cuDNN deterministic", _C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    Setting(
        "anomaly detection",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    Setting(
        "checks of sparse tensors",
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
        _C._set_check_sparse_tensor_invariants,
    ),
    Setting(
        "numpy's error handling",
        lambda: tuple(np.geterr().items()),
        lambda value: np.seterr(**dict(value)),
    ),
    Setting("float32 matmul precision", _matmul_precision, _set_matmul_precision),
)

_IN_GRAPH = ("autocast", "flash attention", "memory-efficient attention", "cuDNN attention")
"""Tracing builds the effect of these into the graph, operation by operation."""

_AROUND_GRAPH = tuple(setting for setting in KEYED if setting.name not in _IN_GRAPH)


def keyed() -> Ambient:
    """The values of ``KEYED`` in the calling thread."""
    # KEYED written out, because every call runs this and a loop takes twice as long
    found: Ambient = (
        _autocast() if _is_any_autocast_enabled() else None,
        _default_dtype(),
        _is_deterministic(),
        _DENORMAL == 0.0,
        _has_flash(),
        _fp32_precision("mkldnn", "matmul"),
    )
    if _HAS_CUDA:
        found += (_fp32_precision(CUDA.name, "matmul"), _has_efficient(), _has_cudnn())
    return found


def ambient() -> Ambient:
    """The values of ``SETTINGS`` in the calling thread."""
    return tuple(setting.read() for setting in SETTINGS)


class Unchanged:
    """Notices a change of the settings that a graph does not contain."""

    def __init__(self) -> None:
        self._values = [setting.read() for setting in _AROUND_GRAPH]

    def broken_by(self) -> str | None:
        """The name of a setting that has changed since this was made, or None."""
        for setting, value in zip(_AROUND_GRAPH, self._values, strict=True):
            if setting.read() != value:
                return setting.name
        return None


def for_graph(wanted: Ambient) -> Ambient:
    """The settings under which a graph runs: no autocast, whose casts are in the graph already."""
    return (None, *wanted[1:])


@contextmanager
def applied(wanted: Ambient) -> Iterator[None]:
    """Apply settings in the block; restore the earlier ones afterwards, whatever the block sets."""
    before = ambient()
    try:
        _write(wanted)
        yield
    finally:
        _write(before)


def in_force(wanted: Ambient) -> bool:
    """Whether the ``KEYED`` settings have the ``wanted`` values in this thread."""
    return keyed() == wanted[: len(KEYED)]


def running_under(wanted: Ambient, run: Boxed) -> Boxed:
    """``run``, the code of a graph, under the settings with which it was traced.

    If those are set now, they are taken to be set in every later call: nothing changes them in a
    worker process, and in the caller's process a change leads to another plan.
    """
    settings = for_graph(wanted)
    if not wanted or settings == ambient():
        return run

    def run_under(blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with applied(settings):
            return run(blocks)

    return run_under


@contextmanager
def callers_modes_off() -> Iterator[None]:
    """Turn off, for tracing, what the caller set for its own operations: torch function modes (such
    as a default device), hooks on saved tensors, inference mode, and the search for NaN, for which
    fake tensors have no values.
    """
    with (
        _popped(_C._len_torch_function_stack, _pop_mode_temporarily),
        _popped(_has_hooks, _hooks_popped),
        torch.inference_mode(False),
        torch.autograd.set_detect_anomaly(False),
    ):
        yield


@contextmanager
def _popped(remain: Callable[[], Any], pop: Callable[[], Any]) -> Iterator[None]:
    """Pop until none remain; all are pushed again after the block."""
    with ExitStack() as taken:
        while remain():
            taken.enter_context(pop())
        yield


def _has_hooks() -> bool:
    return _C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextmanager
def _hooks_popped() -> Iterator[None]:
    hooks = _C._autograd._top_saved_tensors_default_hooks(False)
    _C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        _C._autograd._push_saved_tensors_default_hooks(*hooks)


def _write(wanted: Ambient) -> None:
    # in reverse: set_float32_matmul_precision, the last, overwrites the newer precision settings
    for setting, value in reversed(list(zip(SETTINGS, wanted, strict=False))):
        if value != setting.read():
            setting.write(value)
