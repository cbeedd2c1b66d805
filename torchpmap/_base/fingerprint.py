"""Whether processes have equal values: digests of them, and how messages show them."""

from __future__ import annotations

import copyreg
import hashlib
import struct
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

from torchpmap._base.errors import kind_of

DIGEST_BYTES = 16
_SHOWN = 6
"""How many elements of a tensor a message shows."""
_NAMED = (type, FunctionType, BuiltinFunctionType)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The data of a tensor of any dtype, as one row of bytes (Gloo knows few dtypes)."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # the new last dim has stride 1, as view() needs; the dim of a single element may have any
    return dense.reshape(-1).unsqueeze(-1).view(torch.uint8).view(-1)


def fingerprint(value: Any) -> str:
    """Text that is the same only for equal values; it shows the first elements."""
    return f"{shown(value)} (digest {digest(value)[:8].hex()})"


def shown(value: Any) -> str:
    """A value as messages show it."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        first = value.detach().cpu().reshape(-1)[:_SHOWN].tolist()
        more = ", ..." if value.numel() > _SHOWN else ""
        return f"{kind_of(value.shape, value.dtype)} [{', '.join(map(str, first))}{more}]"
    return repr(value) if isinstance(value, _PLAIN) else f"an object {type(value).__name__}"


def digest(value: Any) -> bytes:
    """16 bytes that stand for a value, the same in all processes that have an equal one.

    Tensors are equal if shape, dtype and every bit are, and numbers if type and every bit are.  The
    order of dicts and sets does not count, nor which objects are shared.

    Raises:
        TypeError: a part cannot be compared, such as a lambda.
    """
    return _hash(_parts(value, []))


def _hash(parts: Iterator[bytes]) -> bytes:
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        found.update(struct.pack("<q", len(part)))
        found.update(part)
    return found.digest()


def _parts(value: Any, outer: list[Any]) -> Iterator[bytes]:
    """What distinguishes a value from others; ``outer``: the objects that it is in."""
    kind = type(value)
    if kind is np.ndarray and value.dtype != object:
        yield f"{value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
        return
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu()
        yield f"{str(host.dtype).removeprefix('torch.')} {tuple(host.shape)}".encode()
        yield as_bytes(host).numpy().tobytes()
        return
    yield f"{kind.__module__}.{kind.__qualname__}".encode()
    if kind is float:
        yield struct.pack("<d", value)
    elif kind is complex:
        yield struct.pack("<dd", value.real, value.imag)
    elif kind is bytes:
        yield value
    elif kind in _PLAIN or isinstance(value, torch.dtype | torch.device | torch.layout):
        yield str(value).encode(errors="surrogatepass")
    else:
        for place, each in enumerate(outer):
            if each is value:  # an object that holds itself
                yield f"outer {place}".encode()
                return
        yield from _inner(value, [*outer, value])


def _inner(value: Any, outer: list[Any]) -> Iterator[bytes]:
    if type(value) in (list, tuple, torch.Size):
        for item in value:
            yield _hash(_parts(item, outer))
    elif type(value) in (set, frozenset):
        yield from sorted(_hash(_parts(item, outer)) for item in value)
    elif type(value) is dict:
        items = ((_hash(_parts(k, outer)), _hash(_parts(v, outer))) for k, v in value.items())
        for pair in sorted(items):
            yield from pair
    else:
        yield from _reduced(value, outer)


def _reduced(value: Any, outer: list[Any]) -> Iterator[bytes]:
    """What pickle would write: a name, or how to make the object again."""
    if isinstance(value, _NAMED):
        made: Any = value.__qualname__
    else:
        reduce = copyreg.dispatch_table.get(type(value))
        made = reduce(value) if reduce is not None else value.__reduce_ex__(4)
    if isinstance(made, str):
        yield _found(value, made).encode()
        return
    function, given, *rest = made  # then the state, items of a list, items of a dict
    state, items, pairs = (*rest, None, None, None)[:3]
    yield _hash(_parts((function, given, state, list(items or ()), dict(pairs or ())), outer))


def _found(value: Any, name: str) -> str:
    """Module and name of what is not compared by its parts, such as a class or a function."""
    module = value.__module__ or "builtins"
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        raise TypeError(
            f"{value!r} cannot be compared between processes: {module} has nothing of this name "
            "that another process could look up."
        )
    return f"{module}.{name}"
