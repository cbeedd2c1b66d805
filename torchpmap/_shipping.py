"""Pickles for the workers: graphs (every plan) and Python functions (``compile=False`` only).

Graphs travel as lists of nodes.  ``torch.fx``'s own pickle is generated code that is traced again
when it is loaded; an operation on constants alone is *executed* by that, which for a collective
means waiting for peers that will not come.

Functions go through cloudpickle, which takes lambdas, closures and everything defined in
``__main__``.  What it lacks are ``torch.ops`` objects, which go by name, and functions wrapped by
``torch.compile``, which go as the function inside.
"""

from __future__ import annotations

import io
import operator
from typing import Any

import cloudpickle
import torch
from torch.fx.node import map_arg

__all__ = ["pickled", "pickled_function"]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self._tensors.append(obj)
        if isinstance(obj, torch.fx.GraphModule):
            return _decoded, _encoded(obj)
        if isinstance(obj, torch.memory_format | torch.layout):
            # their own pickle looks for a module that has a "torch" and may find the user's script
            return getattr, (torch, str(obj).removeprefix("torch."))
        if isinstance(obj, torch._ops.OpOverload):
            namespace, name = obj._schema.name.split("::")
            return _overload, (namespace, name, obj._overloadname)
        if isinstance(obj, torch._ops.OpOverloadPacket):
            namespace, name = obj._qualified_op_name.split("::")
            return _packet, (namespace, name)
        if isinstance(obj, torch._ops.HigherOrderOperator):
            return operator.attrgetter(f"ops.higher_order.{obj._name}"), (torch,)
        if isinstance(obj, torch._ops._OpNamespace):
            return getattr, (torch.ops, obj.name)
        if isinstance(obj, type(torch.ops)):
            return operator.attrgetter("ops"), (torch,)
        inner = getattr(obj, "_torchdynamo_orig_callable", None)
        if inner is not None and callable(obj):
            return _same, (inner,)
        return super().reducer_override(obj)


def pickled(value: Any) -> bytes:
    """Bytes that ``pickle.loads`` on a worker turns into ``value``."""
    buffer = io.BytesIO()
    _Pickler(buffer, []).dump(value)
    return buffer.getvalue()


def pickled_function(function: Any, what: str) -> bytes:
    """Bytes of (a user's function, the tensors it closes over); ``TypeError`` naming ``what`` if it
    cannot be pickled.
    """
    buffer = io.BytesIO()
    tensors: list[
        torch.Tensor
    ] = []  # filled while the function is written, itself written after it
    try:
        _Pickler(buffer, tensors).dump((function, tensors))
        return buffer.getvalue()
    except Exception as error:
        raise TypeError(
            f"compile=False runs {what} on the workers and must send it there, but it cannot be "
            f"pickled: {error}. Locks, open files, sockets and generators do not travel: create "
            "them inside the function, or use compile=True, which sends a graph instead."
        ) from error


def _overload(namespace: str, name: str, overload: str) -> Any:
    return getattr(_packet(namespace, name), overload)


def _packet(namespace: str, name: str) -> Any:
    return getattr(getattr(torch.ops, namespace), name)


def _same(value: Any) -> Any:
    return value


# -- graphs ----------------------------------------------------------------------------------------


class _Ref:
    """Stands for a node in the arguments of another."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return _Ref, (self.name,)


def _ref(node: torch.fx.Node) -> _Ref:
    return _Ref(node.name)


def _encoded(module: torch.fx.GraphModule) -> tuple[list[Any], dict[str, Any]]:
    """(nodes, attributes): attributes are constants and the graphs of branches and loop bodies."""
    nodes = []
    attributes = {}
    for node in module.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), _ref)  # type: ignore[arg-type]
        nodes.append((node.op, node.target, args, kwargs, node.name))
        if node.op == "get_attr":
            attributes[node.target] = operator.attrgetter(node.target)(module)
    return nodes, attributes


def _decoded(nodes: list[Any], attributes: dict[str, Any]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    made: dict[str, torch.fx.Node] = {}

    def resolve(value: Any) -> Any:
        if isinstance(value, _Ref):
            return made[value.name]
        if isinstance(value, tuple):
            return tuple([resolve(item) for item in value])
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if isinstance(value, dict):
            return {key: resolve(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(resolve(value.start), resolve(value.stop), resolve(value.step))
        return value

    for op, target, args, kwargs, name in nodes:
        made[name] = graph.create_node(op, target, resolve(args), resolve(kwargs), name)
    return torch.fx.GraphModule(attributes, graph)
