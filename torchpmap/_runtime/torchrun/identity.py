"""What a plan is: as text that is equal in all processes that would run the same, and as messages
name it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchpmap._base.errors import kind_of
from torchpmap._runtime import wire
from torchpmap._trace.compile import Definition
from torchpmap._trace.pickling import number_of


def title(definition: Definition) -> str:
    """``"step(float32[1, 3]) on 2 devices"``."""
    inputs = definition.arguments or ", ".join(kind_of(*given) for given in definition.inputs)
    return f"{definition.name}({inputs}) on {len(definition.ranks)} devices"


def shown(what: str, where: str) -> str:
    """What a process does, with the place of the user's function, as messages name it."""
    return f"{what}, defined at {where}" if where else what


def described(definition: Definition, device: torch.device) -> str:
    """A plan for ``device`` as text.  It has no place in a file: a function may be written down
    once for each process.
    """
    backend = definition.backend
    lines: Iterable[str] = [
        title(definition),
        f"compile: {backend.name} {backend.mode} {backend.options}",
        *str(definition.graph.graph).splitlines(),
    ]
    constants = definition.graph.named_buffers()
    text = "\n".join([*lines, *(f"{name} = {_value(value)}" for name, value in constants)])
    return text.replace(str(device), device.type)  # each process has a number of its own


def _value(constant: torch.Tensor) -> str:
    if constant.numel() <= 64:
        return str(constant.tolist())
    number = number_of(bytes(wire.bytes_of(constant.contiguous())))
    return f"{kind_of(constant.shape, constant.dtype)} number {number}"
