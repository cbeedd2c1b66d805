"""What a traced function closes over: real tensors that meet traced operations become inputs.

``Capture`` is a dispatch mode: whatever reaches an operation, from whichever Python object, it
sees.  A value that was baked into the graph instead would go stale when the caller changes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchpmap._custom_ops import expand, is_hidden
from torchpmap._errors import lost_write

__all__ = ["Capture", "KeepData", "Substitute", "clean_grads", "is_real"]

_aten = torch.ops.aten
_COLLECTIVE_NAMESPACES = ("_c10d_functional", "torchpmap")


class Capture(TorchDispatchMode):
    """Gives every real tensor that meets a traced operation a placeholder of its own."""

    supports_higher_order_operators = True

    def __init__(
        self,
        make_fake: Callable[[Sequence[int], torch.dtype], torch.Tensor],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._make_fake = make_fake
        self._device = device
        self.captured: list[torch.Tensor] = []
        self.nodes: list[torch.fx.Node] = []
        self.pinned: list[torch.Tensor] = []
        self.stand_ins: dict[int, torch.Tensor] = {}
        self.grads_before: dict[int, torch.Tensor | None] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.cond and friends run Dynamo on their branches

    def substitute(self, value: Any) -> Any:
        """The stand-in of a real tensor; anything else is left alone."""
        if not is_real(value):
            return value
        stand_in = self.stand_ins.get(id(value))
        return self._add(value) if stand_in is None else stand_in

    def outer(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a tensor that a function transform around the call is tracing."""
        stand_in = self.stand_ins.get(id(tensor))
        if stand_in is None:
            stand_in = self._stand_in(tensor)
            if stand_in.is_floating_point() or stand_in.is_complex():
                stand_in.requires_grad_()
        return stand_in

    def _add(self, real: torch.Tensor) -> torch.Tensor:
        stand_in = self._stand_in(real)
        if real.is_leaf and real.requires_grad:
            self.grads_before[id(real)] = real.grad
            real.grad = None  # .backward() in the traced function starts from no gradient
        return stand_in

    def _stand_in(self, real: torch.Tensor) -> torch.Tensor:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

        mode = get_proxy_mode()
        assert mode is not None
        stand_in = self._make_fake(tuple(real.shape), real.dtype)
        proxy = mode.tracer.create_proxy("placeholder", f"captured_{len(self.nodes)}", (), {})
        track_tensor_tree(stand_in, proxy, constant=None, tracer=mode.tracer)
        proxy.node.meta["val"] = stand_in
        self.nodes.append(proxy.node)
        self.captured.append(real)  # also keeps id(real) from being reused
        self.stand_ins[id(real)] = stand_in
        return stand_in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            if is_real(args[0]):
                self.pinned.append(args[0])
            return func(*args, **kwargs)
        if func not in (_aten.lift_fresh.default, _aten.lift_fresh_copy.default):
            args, kwargs = pytree.tree_map(self.substitute, (args, kwargs))
        if isinstance(func, torch._ops.OpOverload) and is_hidden(func):
            with self:
                return expand(func, self._device.type, args, kwargs)
        if func.namespace in _COLLECTIVE_NAMESPACES:
            args = pytree.tree_map(self._without_value, args)
        return func(*args, **kwargs)

    def _without_value(self, value: Any) -> Any:
        """Hide that a number is known: torch would run the operation now, here, alone."""
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.fx.experimental.proxy_tensor import (
            get_proxy_mode,
            get_proxy_slot,
            track_tensor_tree,
        )

        mode = get_proxy_mode()
        if not isinstance(value, FakeTensor) or value.constant is None or mode is None:
            return value
        unknown = self._make_fake(tuple(value.shape), value.dtype)
        proxy = get_proxy_slot(value, mode.tracer).proxy
        track_tensor_tree(unknown, proxy, constant=None, tracer=mode.tracer)
        return unknown


class KeepData(TorchFunctionMode):
    """``tensor.data = ...`` is no operation that a dispatch mode sees: it would leave the caller's
    tensor without its data.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        setter = func.__name__ == "__set__" and func.__self__ is torch.Tensor.data
        if setter and is_real(args[0]):
            raise RuntimeError(lost_write(args[0], " (.data)"))
        return func(*args, **(kwargs or {}))


class Substitute(TorchFunctionMode):
    """Tensors that the function closes over, replaced by others as they enter torch functions.

    Unlike ``Capture`` it stands above functorch and autograd, so the replacements may be traced by
    transforms around the function.
    """

    def __init__(self, find: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._find = find

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._find, (args, kwargs or {}))
        return func(*args, **kwargs)


def is_real(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


@contextlib.contextmanager
def clean_grads(capture: Capture) -> Iterator[list[torch.Tensor]]:
    """``loss.backward()`` inside the program sets ``.grad`` of captured parameters to traced
    tensors: take them off again.

    Yields a list that holds, afterwards, every gradient that was left on a captured leaf.
    """
    leftover: list[torch.Tensor] = []
    try:
        yield leftover
    finally:
        for real in capture.captured:
            if id(real) in capture.grads_before:
                if real.grad is not None:
                    leftover.append(real.grad)
                real.grad = capture.grads_before[id(real)]
