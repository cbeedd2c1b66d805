"""Collectives of processes that share a GPU, which NCCL refuses, for tests (see ``SharedCuda``).

Gloo reads and writes the memory of the host, except in few of its collectives.  So tensors are
copied to the host, and results back.  A collective is complete when it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchpmap._base.errors import GroupLost
from torchpmap._base.pytree import map_tensors, tree_leaves
from torchpmap._base.torch_groups import ProcessGroup, Work


class _Done(Work):
    def wait(self, timeout=None):
        return True


_DONE = _Done()


class ThroughHost(ProcessGroup):  # type: ignore[misc]
    """The collectives of ``group``, of tensors that are not in the memory of the host."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group


def _copying(name: str) -> Callable[..., Any]:
    @torch.no_grad()
    def run(self: ThroughHost, *args: Any) -> Any:
        arguments = map_tensors(lambda x: x.to("cpu", copy=True), args)
        try:
            getattr(self.group, name)(*arguments).wait()
        except RuntimeError as error:  # in Gloo's own frames, by which it would be known
            raise GroupLost(str(error)) from error
        for x, copy in zip(tree_leaves(args[0]), tree_leaves(arguments[0]), strict=True):
            x.copy_(copy)  # the first argument is what a collective writes to
        return _DONE

    return run


# what torch.ops._c10d_functional asks for: of torch 2.11, and of later versions
for _name in (
    *("allreduce", "broadcast", "allgather_into_tensor_coalesced"),
    *("reduce_scatter_tensor_coalesced", "alltoall_base", "all_gather_single_coalesced"),
    *("reduce_scatter_single_coalesced", "all_to_all_single"),
):
    setattr(ThroughHost, _name, _copying(_name))
