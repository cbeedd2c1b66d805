"""Python code of a graph: how the back end ``"eager"`` runs it.

The code of ``torch.fx`` takes three times as long to make: it can be read, exported and changed,
for which a module, its class and its attributes are made, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from types import NoneType
from typing import Any

from torch.fx import GraphModule, Node

from torchpmap._base.platform import Boxed

_PLAIN = (bool, int, str, NoneType)
"""Types whose values are written as they are; of others the code has a name."""


def boxed_code(module: GraphModule, instead: Mapping[Any, Any]) -> Boxed:
    """A function that runs a graph; ``instead``: operation -> what runs in its place.

    It takes a list and empties it, and keeps no value beyond its last use.
    """
    code = _Code(module, instead)
    scope = code.scope
    exec(compile(code.text(), "<graph>", "exec"), scope)
    found: Boxed = scope.pop("run")  # or each would keep the other
    return found


class _Code:
    def __init__(self, module: GraphModule, instead: Mapping[Any, Any]) -> None:
        self._module = module
        self._instead = instead
        self._texts: dict[Node, str] = {}
        """Of the value of each node, where others use it."""
        self._named: dict[int, str] = {}
        """Name of each value in ``scope``, by ``id``."""
        self.scope: dict[str, Any] = {}

    def text(self) -> str:
        nodes = list(self._module.graph.nodes)
        ends = _ends(nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        lines = ["def run(blocks):"]
        if inputs:
            lines.append(f" {', '.join(map(self._new, inputs))}, = blocks")
        lines.append(" blocks.clear()")
        for node in nodes:
            lines += self._lines(node)
            if ended := [self._texts[end] for end in ends[node]]:
                lines.append(f" del {', '.join(ended)}")
        return "\n".join(lines)

    def _new(self, node: Node) -> str:
        return self._texts.setdefault(node, f"x{len(self._texts)}")

    def _lines(self, node: Node) -> list[str]:
        if node.op == "placeholder":
            return []
        if node.op == "get_attr":
            self._texts[node] = self._name(attrgetter(str(node.target))(self._module))
            return []
        if node.op == "output":
            return [f" return {self._value(node.args[0])}"]
        assert node.op == "call_function", node.op
        function = self._name(self._instead.get(node.target, node.target))
        args = [self._value(arg) for arg in node.args]
        if node.kwargs:  # among their names is "from", which is a word of Python
            args.append(f"**{self._value(node.kwargs)}")
        return [f" {self._new(node)} = {function}({', '.join(args)})"]

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return self._texts[value]
        if type(value) in _PLAIN:
            return repr(value)
        if isinstance(value, tuple):
            return f"({''.join(f'{self._value(item)}, ' for item in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._value, value))}]"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"{self._name(slice)}({', '.join(map(self._value, parts))})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self._value(v)}' for k, v in value.items())}}}"
        return self._name(value)

    def _name(self, value: Any) -> str:
        name = self._named.setdefault(id(value), f"c{len(self._named)}")
        self.scope[name] = value
        return name


def _ends(nodes: list[Node]) -> dict[Node, list[Node]]:
    """After each node, the nodes whose values are used no more."""
    ends: dict[Node, list[Node]] = {node: [] for node in nodes}
    seen: set[Node] = set()
    for node in reversed(nodes):
        if node.op == "output":
            seen.update(node.all_input_nodes)
            continue
        for used in (node, *node.all_input_nodes):
            if used not in seen and used.op != "get_attr":
                seen.add(used)
                ends[node].append(used)
    return ends
