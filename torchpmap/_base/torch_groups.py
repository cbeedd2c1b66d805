"""Undocumented parts of torch that make process groups: check them first with a new torch."""

from __future__ import annotations

import re
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from torchpmap._base.torch_internals import OpOverload, OpOverloadPacket

Work = dist._Work
"""Base of what a collective returns, to be waited for."""

ProcessGroup: Any = dist.ProcessGroup
"""To derive from: it is annotated with overloads that C++ never calls."""

default_store = distributed_c10d._get_default_store
"""() -> the store of the group that ``torch.distributed.init_process_group`` has made."""

group_named: Any = _distributed_c10d._resolve_process_group
"""The group of this name, as operations in a graph find it."""


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Let operations find a group by a name.  (``new_group`` would choose the name itself.)"""
    group._set_group_name(distributed_c10d.GroupName(name))
    _distributed_c10d._register_process_group(distributed_c10d.GroupName(name), group)


def unregister_group(name: str) -> None:
    _distributed_c10d._unregister_process_group(distributed_c10d.GroupName(name))


def make_gloo(
    store: dist.Store,
    rank: int,
    size: int,
    address: str | None,
    connecting: timedelta,
    running: timedelta,
) -> Any:
    """Gloo between ``size`` processes, on the interface of an address (None: within a host), with
    how long it waits while it connects, and in each collective.
    """
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [
        kind.create_device(interface="lo")
        if address is None
        else kind.create_device(hostname=address)
    ]
    options._timeout = connecting
    gloo = kind(store, rank, size, options)
    gloo._set_default_timeout(running)
    return gloo


def was_forked_with(device: str) -> bool:
    """Whether this process was forked from one that had initialised such devices."""
    return bool(torch.get_device_module(device)._is_in_bad_fork())


def make_nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def abort_nccl(group: dist.ProcessGroup, device: torch.device) -> None:
    backend: Any = group._get_backend(device)
    backend.abort()


def add_backend(
    group: dist.ProcessGroup, device: str, kind: str, backend: Any, *, is_default: bool
) -> None:
    """Let a group use ``backend`` for tensors of a kind of device."""
    member = getattr(dist.ProcessGroup.BackendType, kind)
    group._register_backend(torch.device(device), member, backend)
    if is_default:
        group._set_default_backend(member)


_OPERATOR_FRAMES = frozenset(
    call.__code__
    for call in (OpOverload.__call__, OpOverload.redispatch, OpOverloadPacket.__call__)
)
"""Every operator is called in such a frame, by eager code, graphs and Inductor's code alike."""

_CPP_COLLECTIVE = re.compile(r"aoti_torch_\w+?__c10d_functional_")


def is_raised_by_collective(error: BaseException, frame: FrameType) -> bool:
    """Whether a collective raised this in ``frame``, the innermost one of the traceback."""
    if frame.f_code in _OPERATOR_FRAMES:
        namespace, _, name = str(frame.f_locals["self"]).partition(".")
        return namespace == "_c10d_functional" and (
            issubclass(type(error), dist.DistError) or name.startswith("wait_tensor")
        )
    # Inductor's C++ (cpp_wrapper) names the operator
    module = str(frame.f_globals.get("__name__"))
    return module.startswith("torch._inductor.") and bool(_CPP_COLLECTIVE.match(str(error)))
