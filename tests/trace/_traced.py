"""Trace a function without a pool."""

import torch

from torchpmap._layout.axis_stack import bind
from torchpmap._trace.replication import Demand
from torchpmap._trace.trace import TracedInput, trace

F32 = torch.float32


def traced(body, *shapes, same=False, varying=True, size=4, device="cpu", group="g"):
    """Trace a function of one tensor per shape that returns one tensor, or several."""

    held = tuple(range(size)) if varying else (0,) * size

    def blocks(inputs, axis):
        with bind(axis):
            out = body(*inputs)
        return [
            Demand(block, (axis,) if same else ())
            for block in (out if isinstance(out, tuple | list) else (out,))
        ]

    return trace(
        blocks,
        [TracedInput(tuple(shape), F32, held) for shape in shapes],
        axis_name="i",
        axis_size=size,
        group=group,
        device=torch.device(device),
    )
