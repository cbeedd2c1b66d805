"""Imported by the fork server before it forks the first worker: pays the imports (and one
compilation) once for all.

Importing this module is the point of it: ``multiprocessing`` preloads modules, it does not call
functions.  It must start no thread and must never touch CUDA, or forked workers would be broken.
"""

# ruff: noqa: E402 - what is set first must be set before the imports

from __future__ import annotations

import contextlib
import ctypes
import gc
import os

gc.disable()  # what is made below stays: looking through it again and again takes 0.8 s

# Inductor would start a pool of compile processes, and probe the C++ compiler four times (6 s) for
# vector instructions that /proc/cpuinfo tells already.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import torch

from torchpmap._compile import have_cpp_compiler
from torchpmap._config import config
from torchpmap._runtimes import _worker  # noqa: F401 - so that a forked worker finds it imported

torch.set_num_threads(1)

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def _keep_memory() -> None:
    """Let glibc keep freed pages: fresh ones make a 64 MB operation three times slower."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _warm_up() -> None:
    """Compile one small function, so that every worker is born with Inductor's modules and tables
    in memory.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: (x * 2 + 1,))(torch.empty(3))
    torch._inductor.standalone_compile(
        graph, [torch.empty(3)], dynamic_shapes="from_example_inputs"
    )


_keep_memory()
if config.warm and have_cpp_compiler():
    with contextlib.suppress(Exception):  # a worker that compiles for real reports what is wrong
        _warm_up()
gc.freeze()  # workers need not look through it either, and its pages stay shared
gc.enable()
