"""Settings of torch around a call that change what a mapped function computes.

The table here is the only place that names them, and says how each is read and written.  All of
them are in force where a function is traced, where its graph is compiled and run, and where it runs
as Python on a worker (``compile=False``).  Those of ``KEYED`` are looked at in every call: a change
means a new plan.  The others are as they were when the function was traced.

Whatever is not in the table belongs to the caller only (see docs/state.md).  A setting that the
function itself changes is put back after the call.
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

Ambient = tuple[Hashable, ...]
"""What the settings are, in the order of the table; () stands for those of a fresh process."""

_DENORMAL = 5e-324
"""Equal to zero in a thread that flushes denormal numbers; torch has no other way to ask."""

# found sooner in every call
_is_any_autocast_enabled = _C._is_any_autocast_enabled
_default_dtype, _is_deterministic = torch.get_default_dtype, _C._get_deterministic_algorithms
_has_flash, _has_efficient = _C._get_flash_sdp_enabled, _C._get_mem_efficient_sdp_enabled
_has_cudnn, _fp32_precision = _C._get_cudnn_sdp_enabled, _C._get_fp32_precision_getter
_HAS_CUDA = torch.backends.cuda.is_built()


class Setting(NamedTuple):
    """One setting: what it is called, and how it is read and written."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _autocast() -> Hashable:
    """None where it is off; else whether it caches, and the dtype per kind of device."""
    if not _is_any_autocast_enabled():
        return None
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return torch.is_autocast_cache_enabled(), tuple((k, torch.get_autocast_dtype(k)) for k in kinds)


def _set_autocast(value: Any) -> None:
    caches, dtypes = value or (True, ())
    for kind in ("cpu", "cuda"):
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
    """None where the older and the newer way to say it were mixed, which torch refuses to read."""
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
        _precision("cuda", "matmul"),
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
    *(_precision("cuda", operation) for operation in ("conv", "rnn")),
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
"""What these change is decided operation by operation when a graph is made."""

_AROUND_GRAPH = tuple(setting for setting in KEYED if setting.name not in _IN_GRAPH)


def keyed() -> Ambient:
    """The settings that every call looks at, as they are for the calling thread."""
    # KEYED, written out: a loop takes twice as long, in every call
    found: Ambient = (
        _autocast() if _is_any_autocast_enabled() else None,
        _default_dtype(),
        _is_deterministic(),
        _DENORMAL == 0.0,
        _has_flash(),
        _fp32_precision("mkldnn", "matmul"),
    )
    if _HAS_CUDA:
        found += (_fp32_precision("cuda", "matmul"), _has_efficient(), _has_cudnn())
    return found


def ambient() -> Ambient:
    """All settings, as they are for the calling thread."""
    return tuple(setting.read() for setting in SETTINGS)


class Unchanged:
    """Whether the settings that a graph does not contain are as they were when this was made."""

    def __init__(self) -> None:
        self._values = [setting.read() for setting in _AROUND_GRAPH]

    def broken_by(self) -> str | None:
        """The name of one that is not, if there is one."""
        for setting, value in zip(_AROUND_GRAPH, self._values, strict=True):
            if setting.read() != value:
                return setting.name
        return None


def for_graph(wanted: Ambient) -> Ambient:
    """The settings under which a graph runs: the casts that autocast made are in the graph, and
    there are to be none besides.
    """
    return (None, *wanted[1:])


@contextmanager
def applied(wanted: Ambient) -> Iterator[None]:
    """Settings in force in the block; put back afterwards, whatever the block sets."""
    before = ambient()
    try:
        _write(wanted)
        yield
    finally:
        _write(before)


def in_force(wanted: Ambient) -> bool:
    """Whether the settings that every call looks at are those."""
    return keyed() == wanted[: len(KEYED)]


def running_under(
    wanted: Ambient, run: Callable[..., Sequence[torch.Tensor]]
) -> Callable[..., Sequence[torch.Tensor]]:
    """``run``, the code of a graph, under the settings with which it was traced.

    Those that hold where this is called are taken to hold in every call: of a worker's process
    nothing changes them, and in the caller's they are the key.
    """
    settings = for_graph(wanted)
    if not wanted or settings == ambient():
        return run

    def run_under(*blocks: torch.Tensor) -> Sequence[torch.Tensor]:
        with applied(settings):
            return run(*blocks)

    return run_under


@contextmanager
def callers_modes_off() -> Iterator[None]:
    """What the caller does with its own operations, off for tracing: default device and other modes
    of torch functions, hooks on saved tensors, inference mode; and no search for NaN, which fake
    tensors do not have.
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
    """Everything taken from a stack."""
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
    # the last first: the older way to set precisions of products overwrites the newer ones
    for setting, value in reversed(list(zip(SETTINGS, wanted, strict=False))):
        if value != setting.read():
            setting.write(value)
