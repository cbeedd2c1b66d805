"""Refuses in-place writes to tensors that were made before a block of code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchpmap._base.torch_internals import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    gives_views,
    innermost,
    no_torch_dispatch,
    with_memory,
)
from torchpmap._base.writes import written_values


class RefuseWrites(TorchDispatchMode):
    """Raises before an operation of the block writes to what was made before the block."""

    supports_higher_order_operators = True

    def __init__(
        self, own: Sequence[torch.Tensor], error: Callable[[torch.Tensor, str], Exception]
    ) -> None:
        """
        Args:
            own: tensors that the block may write to.
            error: gives the error, from the tensor and the name of the operation that writes.
        """
        super().__init__()
        self._error = error
        self._inside: set[int] = set()
        """Memory that was made in the block.  What was made before the block lives as long as the
        block, so memory of it never gets one of these numbers.
        """
        for tensor in own:
            self._note(tensor)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.cond and friends run Dynamo on their branches

    def _note(self, value: Any) -> None:
        value = innermost(value)
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if _has_memory(tensor):
                self._inside.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        for tensor in written_values(func, args, kwargs):
            if _has_memory(tensor) and tensor.untyped_storage()._cdata not in self._inside:
                raise self._error(tensor, str(func))
        result = with_memory(func)(*args, **kwargs)
        if not gives_views(func):  # which need no note: they have the storage of their base
            self._note(result)
        return result


def _has_memory(value: Any) -> bool:
    """Whether it is a tensor of this process, and not a handle of blocks on devices."""
    kind = type(value)
    return isinstance(value, torch.Tensor) and (
        kind is torch.Tensor
        or issubclass(kind, FakeTensor)
        or kind.__torch_dispatch__ is no_torch_dispatch
    )
