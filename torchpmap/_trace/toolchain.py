"""What Inductor finds on this machine: compilers, and the folder of compiled code; its import."""

from __future__ import annotations

import contextlib
import functools
import getpass
import importlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from torchpmap._base.errors import PmapError
from torchpmap._base.imports import uncollected
from torchpmap._base.torch_versions import no_cuda_probe


def cpp_compiler() -> str | None:
    """What Inductor builds its CPU kernels with here (its own choice of compiler: ``CXX``, ``g++``,
    ``clang++``); None if there is nothing.
    """
    from torch._inductor import config

    candidates = config.cpp.cxx if isinstance(config.cpp.cxx, list | tuple) else (config.cpp.cxx,)
    found = (shutil.which(candidate) for candidate in candidates if candidate)
    return next(filter(None, found), None)


def missing_compiler(device_type: str) -> str | None:
    """Which compiler Inductor lacks here for such devices, as the end of a sentence."""
    if device_type == "cpu":
        what = "C++ compiler was found (g++ or clang++, or the one named by CXX)"
        found = cpp_compiler() is not None
    else:  # Triton builds what starts its kernels
        named = os.environ.get("CC")
        found = any(map(shutil.which, (named,) if named else ("gcc", "clang")))
        what = "C compiler was found (gcc or clang, or the one named by CC)"
    return None if found else what


def import_dynamo() -> None:
    """Import what tracing needs (``make_fx`` would), which takes a second."""
    with uncollected():
        importlib.import_module("torch._dynamo")


def import_inductor() -> None:
    """Import what compiling needs, which takes seconds."""
    with uncollected(), no_cuda_probe():
        importlib.import_module("torch._inductor.compile_fx")


def _own_folder() -> str:
    """What ``default_cache_dir`` of Inductor says; its import takes three seconds (torch 2.13)."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{name}")


def cache_folder() -> str:
    """Where Inductor keeps compiled code: the folder that the user has chosen, or its own."""
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _own_folder()


def own_cache() -> Path:
    """Where this package keeps compiled code, in the same folder."""
    return Path(cache_folder(), "torchpmap")


@functools.cache
def make_cache_private() -> None:
    """Keep other users from writing to Inductor's folder, because the code in it is run unchecked.

    Torch (2.13) uses a folder named after the user in the temporary folder, even if another user
    has made it.  A folder that the user has chosen is left as it is.

    Raises:
        PmapError: the folder belongs to another user.
    """
    folder = _own_folder()
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", folder) != folder:
        return
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if {os.lstat(folder).st_uid, os.stat(folder).st_uid} != {os.geteuid()}:
        raise PmapError(
            f"{folder}, where Inductor keeps compiled code, belongs to another user, who could put "
            "code there. Set TORCHINDUCTOR_CACHE_DIR to a folder of yours."
        )
    os.chmod(folder, 0o700)


def warm_up() -> None:
    """Compile a small function: afterwards the modules and tables of Inductor are in memory."""
    make_cache_private()
    from torch._inductor import standalone_compile
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: (x * 2 + 1,))(torch.empty(3))
    with quietly():
        standalone_compile(graph, [torch.empty(3)], dynamic_shapes="from_example_inputs")


_UNWANTED = {
    # of a graph that cannot be cached, which the report of the compilation says
    "torch._inductor.standalone_compile": "artifact generation failed",
    # torch with CUDA asks for a GPU where there is a CUDA compiler, also to compile for a CPU
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}
"""Logger -> what it warns of, to no use here."""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Compile without the warnings that are ``_UNWANTED``."""

    def keep(record: logging.LogRecord) -> bool:
        return _UNWANTED[record.name] not in record.getMessage()

    logs = [logging.getLogger(name) for name in _UNWANTED]
    for log in logs:
        log.addFilter(keep)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(keep)
