"""A graph as data: lists, dicts, numbers and strings, for JSON, and back.

Nothing in it is run, imported or evaluated: an operation is a name, which is looked up among those
of torch and of this package (``_NAMESPACES``); other names, and names that are no names, are
refused.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchpmap._base.data import read, written
from torchpmap._base.torch_internals import HigherOrderOperator, LazyGraphModule, OpOverload
from torchpmap._trace.graphs import COND, SCAN, WHILE
from torchpmap._trace.repetition import file_and_line, set_place

_NAMESPACES = frozenset({"aten", "prims", "_c10d_functional", "torchpmap", "torchpmap_random"})
_REFUSED = {"aten::from_file", "aten::_reshape_alias"}
"""One reads and writes any file; the other does not check that it stays in its memory."""
_LOOPS = (SCAN, WHILE, COND)
_NAME, _OPERATION = re.compile(r"[A-Za-z_]\w*"), re.compile(r"(\w+)::(\w+)(?:\.(\w+))?")
_GETITEM = "getitem"
_MAX_LINE = 1_000_000
_KINDS: dict[str, type] = {
    "memory_format": torch.memory_format,
    "layout": torch.layout,
}

Tensors = dict[str, torch.Tensor]


class NotData(ValueError):
    """Something that is no data, or that no such graph has."""


# -- values ----------------------------------------------------------------------------------------


def encoded(value: Any) -> Any:
    """A constant, or several, or a setting, as JSON (see ``_base/data``)."""
    return written(value, "a constant", _apart)


def _apart(value: Any, path: str) -> Any:
    if isinstance(value, Node):
        return ["node", value.name]
    if isinstance(value, list):  # of a class of torch's
        return ["list", encoded([*value])]
    if isinstance(value, torch.device):
        return ["device", value.type]
    for kind, of in _KINDS.items():
        if isinstance(value, of):
            return [kind, str(value).removeprefix("torch.")]
    raise NotData(f"a constant of type {type(value).__name__}")


def decoded(data: Any, node_of: Callable[[str], Any] = lambda name: None) -> Any:
    def apart(pair: Any) -> Any:
        kind, value = pair
        if kind == "node":
            return node_of(value)
        if kind == "list":
            return read(value, apart)
        if kind == "device":
            return torch.device("cpu")
        found = getattr(torch, _checked(value))
        if not isinstance(found, _KINDS[kind]):
            raise NotData(f"{pair!r:.100} is no constant of torch")
        return found

    try:
        return read(data, apart)
    except (LookupError, AttributeError) as error:
        raise NotData(f"{data!r:.100} is no constant of torch: {error!r}") from None


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise NotData(f"{name!r:.100} is no name")
    return name


# -- operations ------------------------------------------------------------------------------------


def _name_of(target: Any) -> str:
    if isinstance(target, OpOverload):
        name = str(target.name())
    elif isinstance(target, HigherOrderOperator):
        name = str(target._name)
    else:
        name = _GETITEM if target is operator.getitem else repr(target)
    _operation(name)
    return name


def _operation(name: Any) -> Any:
    if name == _GETITEM:
        return operator.getitem
    if name in _LOOPS:
        return getattr(torch.ops.higher_order, name)
    found = _OPERATION.fullmatch(name) if isinstance(name, str) else None
    if found is None or found[1] not in _NAMESPACES or f"{found[1]}::{found[2]}" in _REFUSED:
        raise NotData(f"the operation {name!s:.100}, which is none of torch's or this package's")
    try:
        packet = getattr(getattr(torch.ops, found[1]), found[2])
        overload = getattr(packet, found[3] or "default")
    except AttributeError:
        overload = None
    if not isinstance(overload, OpOverload) or not _has_tensors(overload):
        raise NotData(
            f"the operation {name}, which this torch does not have, or which has no tensor"
        )
    return overload


def _has_tensors(operation: OpOverload) -> bool:
    """The others may set a seed, print or write a file."""
    found = operation._schema
    return any("Tensor" in str(each.type) for each in (*found.arguments, *found.returns))


# -- graphs ----------------------------------------------------------------------------------------


def encoded_graph(module: GraphModule, tensors: Tensors) -> Any:
    """``tensors`` gets its constants, by the keys that stand for them.

    Raises:
        NotData: it has an operation of the user's, or a constant that is no data.
    """
    nodes, inner, constants = [], {}, {}
    for node in module.graph.nodes:
        target = node.target if node.op == "get_attr" else None
        if node.op == "call_function":
            target = _name_of(node.target)
        elif node.op == "get_attr":
            value = operator.attrgetter(node.target)(module)
            if isinstance(value, GraphModule):
                inner[target] = encoded_graph(value, tensors)
            else:
                constants[target] = f"constant {len(tensors)}"
                tensors[constants[target]] = value.detach().cpu()
        args, kwargs = encoded(list(node.args)), {k: encoded(v) for k, v in node.kwargs.items()}
        nodes.append([node.op, node.name, target, args, kwargs, file_and_line(node)])
    return {"nodes": nodes, "graphs": inner, "constants": constants}


_OPS = ("placeholder", "get_attr", "call_function", "output")


def decoded_graph(data: Any, tensors: Tensors) -> GraphModule:
    """Raises ``NotData``, or any other exception, for what is no graph."""
    attributes: dict[str, Any] = {
        _checked(name): decoded_graph(each, tensors) for name, each in data["graphs"].items()
    }
    attributes |= {_checked(name): tensors[key] for name, key in data["constants"].items()}
    graph, made = Graph(), dict[str, Node]()
    for op, name, target, args, kwargs, place in data["nodes"]:
        is_last = len(made) == len(data["nodes"]) - 1
        if (
            op not in _OPS
            or name in made
            or is_last is not (op == "output")
            or (op == "get_attr" and target not in attributes)
        ):
            raise NotData(f"{op!r:.50} of {target!r:.100}")
        if op == "call_function":
            target = _operation(target)
        elif op != "get_attr":
            target = _checked(name)
        given = tuple(decoded(args, made.__getitem__))
        named = {_checked(key): decoded(each, made.__getitem__) for key, each in kwargs.items()}
        made[name] = graph.create_node(op, target, given, named, _checked(name))
        if place is not None:
            file, number = place
            set_place(made[name], str(file), min(int(number), _MAX_LINE))
    return LazyGraphModule(attributes, graph)
