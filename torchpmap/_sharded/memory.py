"""A tensor without memory in this process, and what torch may not do with it.

torch treats a wrapper subclass as an ordinary tensor of its device.  Code that accesses the memory
without an operation would read or write at address 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch

from torchpmap._base.torch_internals import DispatchKey, num_modes


class Remote(torch.Tensor):
    """Base of tensors whose data is elsewhere: their memory is a copy, to be read.

    ``torch.tensor([x, y])`` asks each for its number, below the operations of their class.
    Only modes, such as that of a trace, see these questions as operations.
    """

    __slots__ = ()

    def to_host(self) -> torch.Tensor:
        """The whole value as a plain CPU tensor."""
        raise NotImplementedError

    def __bool__(self) -> bool:
        return super().__bool__() if num_modes() else bool(self.to_host())

    def __int__(self) -> int:
        return super().__int__() if num_modes() else int(self.to_host())

    def __index__(self) -> int:
        return super().__index__() if num_modes() else self.to_host().__index__()

    def __float__(self) -> float:
        return super().__float__() if num_modes() else float(self.to_host())

    def __complex__(self) -> complex:
        return super().__complex__() if num_modes() else complex(self.to_host())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError(
                "a ShardedTensor lives on the devices: an array of it is always a copy"
            )
        array = self.detach().numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, *, stream: Any = None, **kwargs: Any) -> Any:
        return self.to_host().__dlpack__(stream=stream, **kwargs)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0).__dlpack_device__()

    def _memory(self) -> torch.Tensor:
        """A copy of the memory that it would lie in, flat."""
        raise NotImplementedError

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of a copy: what is written there is lost."""
        return self._memory().untyped_storage()

    def storage(self) -> Any:
        """As ``untyped_storage``, in elements."""
        storage = self.untyped_storage()
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=self.dtype, _internal=True)

    _typed_storage = storage

    def data_ptr(self) -> int:
        """The address in a copy: what is written there is lost."""
        return self._memory().data_ptr() + int(self.storage_offset()) * self.element_size()

    def share_memory_(self) -> NoReturn:
        raise RuntimeError(
            "a ShardedTensor has no memory in this process that share_memory_() could share; its "
            "blocks are on the devices. Use a copy: x.to_host() has the whole value, "
            "x.addressable_shards the blocks."
        )

    def is_shared(self) -> bool:
        """Never: its memory is the workers'."""
        return False


Class = TypeVar("Class", bound=type)

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod"),
    *("pow", "and", "or", "xor", "lshift", "rshift"),
)


def with_operators(cls: Class) -> Class:
    """Give a class ``x += y`` and the like as methods in Python: at those in C, Dynamo (torch 2.13)
    calls itself without end.
    """
    for name in _OPERATORS:
        setattr(cls, f"__i{name}__", _in_python(getattr(torch.Tensor, f"__i{name}__")))
    return cls


def _in_python(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def operator(self: Any, other: Any) -> Any:
        return method(self, other)

    return operator


CPU, STRIDED = torch.device("cpu"), torch.strided

# -- what torch does without an operation ----------------------------------------------------------

_aten = torch.ops.aten
_SUBCLASSES = DispatchKey.PythonTLSSnapshot
"""Only tensors of classes with ``__torch_dispatch__`` have this key: others bypass the kernels."""


def _may_share_memory(keys: Any, tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """torch's check before ``tensor.data = value``, which ``Module._apply`` also makes.

    In torch 2.13 any CPU tensor can take the memory of any other: ``tensor`` would get address 0,
    and its next use would end the process.
    """
    if isinstance(tensor, Remote) or isinstance(value, Remote):
        return type(tensor) is type(value)
    ask = _aten._has_compatible_shallow_copy_type.default
    return bool(ask.redispatch(keys.remove(_SUBCLASSES), tensor, value))


def _copying(into: Any, value_of: Any) -> Callable[..., torch.Tensor]:
    """A kernel that copies the value to ``out=``: for arguments of a wrapper subclass, torch 2.13
    ignores this ``out=``, or writes to it through a view that it does not declare.
    """

    def copy(keys: Any, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if not any(isinstance(x, Remote) for x in (out, *args, *kwargs.values())):
            return cast(
                torch.Tensor, into.redispatch(keys.remove(_SUBCLASSES), *args, out=out, **kwargs)
            )
        value = value_of(*args, **kwargs)
        if out.shape != value.shape:
            raise RuntimeError(
                f"{into} got out= of shape {list(out.shape)}, but the result has shape "
                f"{list(value.shape)}, and a ShardedTensor does not change its shape in place."
            )
        return out.copy_(value)

    return copy


def _one_hot(keys: Any, x: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """A class that does not exist raises where the result is used.  torch writes the ones of plain
    tensors, but compares a subclass with each class, and so gives zeros (torch 2.11 to 2.15).
    """
    if not isinstance(x, Remote) or x.dtype is not torch.int64:
        made = _aten.one_hot.default.redispatch(keys.remove(_SUBCLASSES), x, num_classes)
        return cast(torch.Tensor, made)
    count = int(x.max()) + 1 if num_classes == -1 else num_classes
    places = x.unsqueeze(-1)
    return torch.zeros_like(places.expand(*x.shape, count)).scatter_(-1, places, 1)


def _tensor_split(keys: Any, x: torch.Tensor, places: torch.Tensor, dim: int = 0) -> Any:
    """torch reads the memory of the places."""
    if isinstance(places, Remote):
        places = places.to_host()
    split = _aten.tensor_split.tensor_indices_or_sections
    return split.redispatch(keys.remove(_SUBCLASSES), x, places, dim)


_library = torch.library.Library("aten", "IMPL")
_FORGETFUL = {
    _aten.kron.out: _aten.kron.default,
    _aten.linalg_matrix_rank.atol_rtol_float_out: _aten.linalg_matrix_rank.atol_rtol_float,
    _aten.linalg_matrix_rank.atol_rtol_tensor_out: _aten.linalg_matrix_rank.atol_rtol_tensor,
    _aten.linalg_matrix_rank.out: _aten.linalg_matrix_rank.default,
    _aten.linalg_matrix_rank.out_tol_tensor: _aten.linalg_matrix_rank.tol_tensor,
}
_KERNELS: dict[Any, Callable[..., Any]] = {
    _aten._has_compatible_shallow_copy_type.default: _may_share_memory,
    _aten.one_hot.default: _one_hot,
    _aten.tensor_split.tensor_indices_or_sections: _tensor_split,
    **{into: _copying(into, value_of) for into, value_of in _FORGETFUL.items()},
}
for _operator, _kernel in _KERNELS.items():
    _library.impl(_operator, _kernel, "PythonTLSSnapshot", with_keyset=True)
