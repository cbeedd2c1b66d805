"""Values as JSON, which holds only data, never code: messages of processes over a network, tables
of checkpoints, and recorded graphs.

A pickle can run code where it is read, and any program that reaches the store of a job can write
there.  What JSON lacks becomes a pair of a kind and its content:

    [1, (2.5, b"x")]  ->  [1, {"tuple": [{"float": "0x1.4p+1"}, {"bytes": "eA=="}]}]

Whatever the bytes are, reading them gives values of these kinds or raises ``PmapError``.
"""

from __future__ import annotations

import base64
import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchpmap._base.errors import PmapError, dtype_name

DTYPES = {dtype_name(x): x for x in vars(torch).values() if isinstance(x, torch.dtype)}

_KNOWN = (
    "None, bool, int, float, complex, str, bytes, numpy scalars, dtypes, torch.Size, and dicts, "
    "lists, tuples, sets and named tuples of them"
)
_MAX_INT = 1 << 63  # larger ones are sent in hex: decimals take quadratic time


def packed(
    value: Any, name: str = "value", aside: Callable[[Any, str], Any] | None = None
) -> bytes:
    """The bytes of a value.

    Args:
        value: of the kinds above.
        name: what error messages call it.
        aside: given a part and its path, returns what to write if the part is sent separately, else
            None.

    Raises:
        TypeError: a part is of another kind; the text has its path.
    """
    return json.dumps(written(value, name, aside), separators=(",", ":")).encode()


def unpacked(data: bytes, aside: Callable[[Any], Any] | None = None) -> Any:
    """The value of bytes from any source, trusted or not.

    Args:
        data: what ``packed`` returned, or anything else.
        aside: given what was written for a part that was sent separately, returns the part.

    Raises:
        PmapError: the bytes are not from ``packed``.
    """
    try:
        return read(json.loads(data, parse_float=_refused, parse_constant=_refused), aside)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise not_ours(f"{type(error).__name__}: {error!s:.100}") from None


def json_of_file(text: bytes) -> Any:
    """The JSON of a file, for ``read``.  It may name no class: a tree with a named tuple is taken
    apart by code of that class.
    """
    return json.loads(text, object_hook=_without_classes)


def _without_classes(part: dict[str, Any]) -> dict[str, Any]:
    if "namedtuple" in part:
        raise ValueError("a file has no named tuples")
    return part


def not_ours(what: str) -> PmapError:
    """The error for data of another process that is not in torchpmap's format."""
    return PmapError(
        f"data from another process of this job is not in torchpmap's format: {what}. "
        "Another program may have written to the store of the job: see docs/security.md."
    )


def _refused(text: str) -> Any:
    raise ValueError(f"a bare {text}")


def written(value: Any, path: str, aside: Callable[[Any, str], Any] | None = None) -> Any:
    """A value as JSON; the arguments are those of ``packed``."""

    def inner(part: Any, where: str) -> Any:
        return written(part, f"{path}{where}", aside)

    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_MAX_INT < value < _MAX_INT else {"int": hex(value)}
    if kind is list:
        return [inner(part, f"[{k}]") for k, part in enumerate(value)]
    if kind in _WRITERS:
        return {kind.__name__: _WRITERS[kind](value)}
    if kind is dict or kind is OrderedDict:
        keys = [inner(key, f" key {key!r}") for key in value]
        parts = [inner(part, f"[{key!r}]") for key, part in value.items()]
        return {kind.__name__: list(map(list, zip(keys, parts, strict=True)))}
    if kind is tuple or kind is set or kind is frozenset:
        return {kind.__name__: [inner(part, f"[{k}]") for k, part in enumerate(value)]}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    apart = None if aside is None else aside(value, path)
    if apart is not None:
        return {"aside": apart}
    if _is_named_tuple(kind) and _named_tuple(kind.__module__, kind.__qualname__) is kind:
        parts = [inner(part, f".{field}") for field, part in zip(kind._fields, value, strict=True)]
        return {"namedtuple": [kind.__module__, kind.__qualname__, parts]}
    raise TypeError(
        f"{path} has type {kind.__module__}.{kind.__qualname__}, but only data can be sent to "
        f"other processes: {_KNOWN}. Send what it is made from."
    )


_WRITERS: dict[type, Callable[[Any], Any]] = {
    float: float.hex,
    complex: lambda value: [value.real.hex(), value.imag.hex()],
    bytes: lambda value: base64.b64encode(value).decode(),
    torch.dtype: dtype_name,
    torch.Size: list,
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda pair: complex(float.fromhex(pair[0]), float.fromhex(pair[1])),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "dtype": DTYPES.__getitem__,
    "Size": torch.Size,
    "numpy": lambda pair: _numpy_scalar(*pair),
}
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "OrderedDict": OrderedDict,
}


def read(data: Any, aside: Callable[[Any], Any] | None = None) -> Any:
    """The value of JSON from any source; raises any exception for what is none."""
    if type(data) is list:
        return [read(part, aside) for part in data]
    if type(data) is not dict:
        return data
    ((kind, content),) = data.items()
    if kind == "aside" and aside is not None:
        return aside(content)
    if kind in _READERS:
        try:
            return _READERS[kind](content)
        except (OverflowError, SyntaxError) as error:  # a float or a dtype of numpy has many digits
            raise ValueError(error) from None
    if kind == "namedtuple":
        module, name, parts = content
        found = _named_tuple(module, name)
        if found is None or len(found._fields) != len(parts):
            raise ValueError(f"this process has no named tuple {module}.{name} with these fields")
        # not by its own __new__, which may be user code
        return tuple.__new__(found, [read(part, aside) for part in parts])
    parts = _CONTAINERS[kind]([read(part, aside) for part in content])
    if len(parts) < len(content):
        raise ValueError(f"a {kind} has something twice")
    return parts


def _numpy_scalar(kind: str, text: str) -> Any:
    dtype = np.dtype(kind)
    if dtype.kind not in "biufc":
        raise ValueError(f"numpy scalars of {dtype}")
    return np.frombuffer(base64.b64decode(text, validate=True), dtype, 1)[0]


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _named_tuple(module: str, qualname: str) -> Any:
    """The named tuple class if this process has already imported it, else None."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found if _is_named_tuple(found) else None
