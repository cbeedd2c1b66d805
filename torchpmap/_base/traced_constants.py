"""Tensors of classes that ``make_fx`` does not know, as constants of the graph that it traces.

``make_fx`` leaves an operation on such a tensor to its class.  The operation would run while the
function is traced, and the graph would get its result as if it did not depend on anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchpmap._base.torch_internals import tracing_mode


def become_constants(tensors: Iterable[torch.Tensor]) -> bool:
    """Make nodes of the tensors that have none in the graph that is traced; whether there were any.

    Then ``make_fx`` records the next operation on them.
    """
    mode = tracing_mode()
    if mode is None:
        return False
    from torch.fx import Proxy
    from torch.fx.experimental.proxy_tensor import has_proxy_slot, track_tensor_tree

    tracer = mode.tracer
    unknown = [tensor for tensor in tensors if not has_proxy_slot(tensor, tracer)]
    for tensor in unknown:
        proxy = Proxy(tracer.create_arg(tensor), tracer)
        track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)
    return bool(unknown)
