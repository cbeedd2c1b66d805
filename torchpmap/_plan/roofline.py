"""How long a call will take: a roofline, from what it computes, moves and sends, and from how fast
the devices are.

    seconds = of a call + flops / rate + moved bytes / bandwidth
              + for each collective: latency + bytes / bandwidth

``debug.calibrate`` measures a machine once, and keeps its numbers in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from torchpmap._base.devices import Device
from torchpmap._base.torch_internals import OpOverload
from torchpmap._collectives.backend import NAMESPACES
from torchpmap._plan.collectives import Collective, bytes_of, steps_of
from torchpmap._trace.graphs import COND, inner_graphs, kind_of_node

_GATHERS = "all_gather_into_tensor"
"""A device receives as much from each member of its group."""


@dataclass(frozen=True)
class Machine:
    """How fast each device of a machine is while all of them work.

    Example:
        >>> import torch, torchpmap as tp
        >>> machine = tp.debug.Machine(1e9, 1e9, 1e-4, 1e9, 1e-3)
        >>> f = tp.pmap(lambda x: tp.psum(x @ x, "i"), "i")
        >>> cost = f.lower(torch.zeros(4, 100, 100)).cost(machine)  # 2e6 flops
        >>> round(cost.seconds, 4)
        0.0032
    """

    flops: float
    """Floating-point operations of matrix products in a second."""
    memory_bytes: float
    """Read or written in a second."""
    collective_s: float
    """Seconds of a collective of a few bytes."""
    collective_bytes: float
    """Sent into a large ``psum`` in a second."""
    call_s: float
    """Seconds of a call that does nothing, and is waited for."""

    def seconds(self, flops: int, moved_bytes: int, collectives: Sequence[Collective]) -> float:
        """Of a call that computes, moves and sends so much."""
        sent = sum(each.times * _received(each) for each in collectives)
        count = sum(each.times for each in collectives)
        return (
            self.call_s
            + flops / self.flops
            + moved_bytes / self.memory_bytes
            + count * self.collective_s
            + sent / self.collective_bytes
        )


def _received(each: Collective) -> int:
    is_gather = each.name == _GATHERS and each.size
    return each.num_bytes * (each.size or 1) if is_gather else each.num_bytes


# -- in the user's cache folder --------------------------------------------------------------------


def keep(machine: Machine, devices: Sequence[Device]) -> None:
    """Keep the numbers of these devices for other programs."""
    path = _path(devices)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(asdict(machine)))
    new.replace(path)  # another program may read it


def kept(devices: Sequence[Device]) -> Machine | None:
    """The numbers that were kept for these devices; None if there are none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = Machine(**json.loads(_path(devices).read_text()))
        if all(number > 0 for number in asdict(found).values()):
            return found
    return None


def _path(devices: Sequence[Device]) -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    name = f"{platform.node()}-{devices[0].platform}-{len(devices)}.json"
    return Path(folder, "torchpmap", name)


# -- memory traffic --------------------------------------------------------------------------------


def moved_bytes(graph: Graph, *, is_fused: bool) -> int:
    """The bytes that a device reads and writes; nodes have fake values as ``meta["val"]``.

    ``is_fused``: what is computed element by element is written only where something else reads it.
    """
    total = 0
    for node in graph.nodes:
        inside = [moved_bytes(inner, is_fused=is_fused) for inner in inner_graphs(node)]
        if inside:
            total += max(inside) if kind_of_node(node) == COND else sum(inside) * steps_of(node)
        elif node.op == "call_function" and not _is_free(node) and not _sends(node):
            if not (is_fused and _is_by_element(node)):
                total += sum(map(_size, node.all_input_nodes))
            total += _size(node) if not is_fused or _is_stored(node) else 0
        if is_fused and _is_stored(node):
            total += _size(node) if any(map(_is_by_element, _readers(node))) else 0
    return total


def _sends(node: Node) -> bool:
    """Whether it is a collective, whose bytes are counted as such."""
    return getattr(node.target, "namespace", "") in NAMESPACES


def _is_stored(node: Node) -> bool:
    """Whether a value is in memory, if what is computed by element is fused."""
    if _is_free(node) or node.op == "output":
        return False
    return not _is_by_element(node) or not all(map(_is_by_element, _readers(node)))


def _readers(node: Node) -> list[Node]:
    """Those that use a value, also through views of it."""
    found = []
    for user in node.users:
        found += _readers(user) if _is_free(user) else [user]
    return found


def _is_free(node: Node) -> bool:
    """Whether a node takes what is there: a view, an item of a list, a wait."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return node.op == "call_function" and not inner_graphs(node)
    return target.is_view or target._opname in ("wait_tensor", "view", "_unsafe_view")


def _is_by_element(node: Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and (
        torch.Tag.pointwise in target.tags or target._opname in _REDUCTIONS
    )


_REDUCTIONS = {"sum", "mean", "amax", "amin", "var", "clone", "_to_copy", "full", "zeros", "cat"}
"""Others that are fused with what they read."""


def _size(node: Node) -> int:
    """Bytes of a value, which may be a small one that is expanded."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return min(bytes_of(value), value.untyped_storage().nbytes())
    return bytes_of(value)
