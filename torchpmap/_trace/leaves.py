"""Parameters that a traced function closes over, as leaves of autograd on an accelerator.

On the CPU a parameter itself is the leaf while a function is traced, and only its value is
replaced, where an operation takes it.  From an accelerator no backward pass leads to a leaf on the
CPU (torch 2.11: an internal assert of the engine).  There a stand-in takes the place of the
parameter above autograd.  What the two do not have in common is refused: hooks that a backward pass
inside would call, and gradients that go on to what was computed outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchpmap._base.pytree import map_tensors, tree_leaves
from torchpmap._base.sources import users_line
from torchpmap._base.torch_internals import (
    hooks_of,
    is_wrapped,
    outside_modes,
    outside_transforms,
    torch_function_off,
)
from torchpmap._trace.capture import (
    DESCRIBING,
    READERS,
    Capture,
    TracedCalls,
    autograd_nodes,
    is_real,
)
from torchpmap._trace.untraceable import Untraceable


def needs_leaves(device: torch.device) -> bool:
    return device.type != "cpu"


class Leaves:
    """The stand-ins of parameters, in one trace."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._real: dict[int, torch.Tensor] = {}
        """By the id of the stand-in."""

    def find(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a parameter; any other tensor is left alone."""
        if not is_real(tensor) or is_wrapped(tensor):
            return tensor
        with torch_function_off(), outside_modes(), outside_transforms():
            is_leaf = tensor.is_leaf and tensor.requires_grad and not tensor.is_meta
        known = self._stand_ins.get(id(tensor))
        if known is not None and not is_leaf:
            raise Untraceable("it changes requires_grad of a parameter", users_line(), "x.detach()")
        if known is None and is_leaf:
            with torch_function_off(), outside_transforms(), torch.inference_mode(False):
                known = self.capture.substitute(tensor).requires_grad_()
            self._stand_ins[id(tensor)], self._real[id(known)] = known, tensor
        return tensor if known is None else known

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._stand_ins.get(id(tensor), tensor)

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The parameter of a stand-in, which methods such as ``contiguous()`` return."""
        return self._real.get(id(tensor), tensor)

    def check(self, outputs: Any) -> None:
        """Raise if a backward pass would do something with a tensor of the caller's that a trace
        does not.
        """
        with torch_function_off(), outside_modes():
            # those of a transform are wrapped, and lead to its own arguments
            tensors = (x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor))
            for node in autograd_nodes(x for x in tensors if not is_wrapped(x)):
                leaf = getattr(node, "variable", None)
                real = None if leaf is None else self._real.get(id(leaf))
                if real is not None and any(hooks_of(real)):
                    raise _refused("calls hooks of a parameter that were registered outside of it")
                if leaf is not None and is_real(leaf) and not is_wrapped(leaf):
                    raise _refused("goes through a tensor that was computed outside of it")

    def gradients(self) -> list[torch.Tensor]:
        return [x.grad for x in self._stand_ins.values() if x.grad is not None]


class CallsWithLeaves(TracedCalls):
    """Puts stand-ins in the place of parameters."""

    def __init__(self, find: Any, leaves: Leaves) -> None:
        def at_transforms(tensor: torch.Tensor) -> torch.Tensor:
            leaves.capture.views.before_call(tensor)
            return leaves.capture.on_enter_transform(leaves.find(find(tensor)))

        super().__init__(leaves.capture, find, at_transforms)
        self._leaves = leaves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if torch.compiler.is_dynamo_compiling() or name in _OF_ITSELF:
            return super().__torch_function__(func, types, args, kwargs)
        if name in ("__get__", "__set__") and func.__self__ not in _VIEWS:
            if func.__self__ is torch.Tensor.grad:
                args = map_tensors(self._leaves.known, args)
            return super().__torch_function__(func, types, args, kwargs)
        if name in ("backward", "grad"):
            if isinstance(kwargs.get("inputs"), Iterator):
                kwargs = {**kwargs, "inputs": tuple(kwargs["inputs"])}
            self._leaves.check(args[0])
        args, kwargs = map_tensors(self._leaves.find, (args, kwargs))
        result = super().__torch_function__(func, types, args, kwargs)
        return self._leaves.real(result) if isinstance(result, torch.Tensor) else result


_VIEWS = frozenset(getattr(torch.Tensor, name) for name in ("T", "mT", "H", "mH", "real", "imag"))
_OF_ITSELF = {each.__name__ for each in (*READERS, *DESCRIBING) if callable(each)} | {
    *("requires_grad_", "detach_", "data_ptr", "untyped_storage", "storage", "set_", "item"),
    *("is_shared", "share_memory_", "is_pinned", "is_nonzero", "__bool__", "__int__", "__float__"),
    *("__index__", "__complex__", "__repr__", "__format__", "__contains__", "__deepcopy__"),
    "get_device",
}
"""Functions that ask or change the tensor itself, whatever its value is on the devices."""


def _refused(reason: str) -> NotImplementedError:
    return NotImplementedError(
        f"at {users_line()}: a backward pass inside the function {reason}, which works on CPU "
        "devices only. Pass what it needs as arguments, or differentiate the mapped function."
    )
