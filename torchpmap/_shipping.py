"""Pickle a function for the workers (``compile=False`` only; the default mode ships graphs and needs none of this).

cloudpickle takes lambdas, closures and everything defined in ``__main__``.  What it lacks are ``torch.ops`` objects, which go by
name, and functions wrapped by ``torch.compile``, which go as the function inside.
"""

from __future__ import annotations

import io
import operator
from typing import Any

import cloudpickle
import torch

__all__ = ["pickled"]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc,name-defined]
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch._ops.OpOverload):
            namespace, name = obj._schema.name.split("::")
            return _overload, (namespace, name, obj._overloadname)
        if isinstance(obj, torch._ops.OpOverloadPacket):
            namespace, name = obj._qualified_op_name.split("::")
            return _packet, (namespace, name)
        if isinstance(obj, torch._ops._OpNamespace):
            return getattr, (torch.ops, obj.name)
        if isinstance(obj, type(torch.ops)):
            return operator.attrgetter("ops"), (torch,)
        inner = getattr(obj, "_torchdynamo_orig_callable", None)
        if inner is not None and callable(obj):
            return _same, (inner,)
        return super().reducer_override(obj)


def pickled(value: Any, what: str) -> bytes:
    """Bytes of ``value``; ``TypeError`` naming ``what`` if it cannot be pickled."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:
        raise TypeError(
            f"compile=False runs {what} on the workers and must send it there, but it cannot be pickled: {error}. Locks, open "
            "files, sockets and generators do not travel: create them inside the function, or use compile=True, which sends a "
            "graph instead."
        ) from error
    return buffer.getvalue()


def _overload(namespace: str, name: str, overload: str) -> Any:
    return getattr(_packet(namespace, name), overload)


def _packet(namespace: str, name: str) -> Any:
    return getattr(getattr(torch.ops, namespace), name)


def _same(value: Any) -> Any:
    return value
