"""What is true of this machine and of this process, as JSON; nothing here starts a worker."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchpmap._base.config import Config, config
from torchpmap._base.devices import PLATFORMS, default_platform, usable_cores
from torchpmap._runtime.groups.shared_memory import is_able
from torchpmap._runtime.torchrun.place import found_place
from torchpmap._trace.toolchain import cache_folder, cpp_compiler, missing_compiler

Facts = dict[str, dict[str, Any]]
"""Section -> name -> what JSON can hold."""

_PREFIXES = ("TORCHPMAP_", "TORCHINDUCTOR_", "NCCL_", "GLOO_", "OMP_", "MKL_", "PYTORCH_")
_NAMES = ("CXX", "CC", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TMPDIR")
_ANSWER_S = 30.0


def collect() -> Facts:
    settings, wrong = _settings()
    devices = _devices(settings)
    command = cpp_compiler()
    version = command and _answer(command, "--version").partition("\n")[0]
    return {
        "versions": {
            "torchpmap": _version("torchpmap") or "not installed",
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in ("numpy", "cloudpickle")},
        },
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "is_linux": sys.platform == "linux",
            "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
            "cores": os.cpu_count(),
            "usable_cores": usable_cores(),
            **_memory(),
        },
        "settings": {"values": {} if wrong else asdict(settings), "error": wrong},
        "devices": devices,
        "compiler": {
            "missing": missing_compiler(devices["kind"]),
            "command": command,
            "version": version,
        },
        "cache": _cache(),
        "sharing": _sharing(),
        "network": _network(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) or name in _NAMES or name.endswith("VISIBLE_DEVICES")
        },
    }


def of_torch() -> list[str]:
    """What torch itself asks for in a report: in a process of its own, as nvidia-smi may hang."""
    text = _answer(sys.executable, "-m", "torch.utils.collect_env")
    return text.splitlines() or [f"no answer within {_ANSWER_S:g} s"]


def _answer(*command: str) -> str:
    """What a program prints; nothing if it fails or does not end."""
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=_ANSWER_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def is_first() -> bool:
    """Whether this process speaks for the job: of several, each has the same to say."""
    place = found_place()
    return place is None or place.rank == 0


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _field(path: str, name: str) -> str:
    """Of a file of ``/proc``: what follows a name and a colon, where that comes first."""
    found = re.search(rf"^{name}\s*: *(.*)$", _read(path), re.MULTILINE)
    return found[1].strip() if found else ""


def _memory() -> dict[str, int | None]:
    """In bytes; what a container may use counts, if it is less than the host has."""
    fields = (_field("/proc/meminfo", name) for name in ("MemTotal", "MemAvailable"))
    total, available = (int(each.removesuffix(" kB")) * 1024 if each else None for each in fields)
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdecimal() and (total is None or int(limit) < total):
        total = int(limit)
        used = _read("/sys/fs/cgroup/memory.current").strip()
        available = total - int(used) if used.isdecimal() else available
    return {"memory_bytes": total, "available_bytes": available}


def _settings() -> tuple[Config, str | None]:
    """Those of this process, and what is wrong with a variable."""
    try:
        return config.snapshot(), None
    except ValueError as error:
        return Config(), str(error)


def _devices(settings: Config) -> dict[str, Any]:
    chosen = PLATFORMS[settings.device_type] if settings.device_type else default_platform()
    place = found_place() if settings.runtime in ("auto", "torchrun") else None
    return {
        "kind": chosen.name,
        "count": place.size if place else settings.num_devices or chosen.count(),
        "launcher": place.launcher if place else None,
        "available": {name: each.count() for name, each in PLATFORMS.items()},
        "collectives": chosen.collectives,
        "is_built": {name: each.is_built() for name, each in PLATFORMS.items()},
        "has_nvidia_driver": Path("/proc/driver/nvidia/version").exists(),
    }


def _cache() -> dict[str, Any]:
    folder = Path(cache_folder())
    parent = folder if folder.exists() else folder.parent
    return {
        "folder": str(folder),
        "exists": folder.exists(),
        "is_ours": not folder.exists() or folder.stat().st_uid == os.geteuid(),
        "is_writable": os.access(parent, os.W_OK),
        "free_bytes": shutil.disk_usage(parent).free if parent.exists() else None,
    }


def _sharing() -> dict[str, Any]:
    error = None
    try:
        os.close(os.memfd_create("torchpmap-doctor", os.MFD_CLOEXEC))
    except (OSError, AttributeError) as problem:
        error = str(problem)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "is_possible": is_able(),
        "memfd_error": error,
        "open_files": soft,
        "open_files_at_most": hard,
        "temporary_folder": tempfile.gettempdir(),
    }


def _network() -> dict[str, Any]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        address = f"not found: {error}"
    return {
        "host": name,
        "address": address,
        "is_resolved": not address.startswith("not found"),
        "interfaces": [each for _, each in socket.if_nameindex()],
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
