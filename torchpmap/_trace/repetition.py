"""Whether a traced function runs one line again and again, where a loop that is traced once would
do.

Every node remembers which *execution* of which line of the user's code made it.  The line is that
of the innermost frame outside of torch and this package; an execution is one call that this frame
makes, however many operations there are in it: ``model(x)`` is one, also of 300 equal layers.
"""

from __future__ import annotations

import operator
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from torchpmap._base.sources import PACKAGE, STDLIB, is_users, line
from torchpmap._collectives.backend import NAMESPACES
from torchpmap._trace import recording
from torchpmap._trace.graphs import all_modules, inner_modules

LIMIT = 200
"""How often a line may make the same operation without a word about it: or once for every input,
if there are more of these, as the leaves of a tree are not steps.
"""

_PLACE, _LINE = "place", "line"
"""In the ``meta`` of a node; that of a loop or branch is the text of its line."""
_PLACES = {_PLACE, _LINE, "called"}
_LOOPS = os.path.join(PACKAGE, "_loops", "")
_SITE = os.path.join("", "site-packages", "")


class _Place(NamedTuple):
    file: str
    line: int
    call: int
    """Where the call stands in the code of the line."""
    execution: int


class Repeated(NamedTuple):
    """A line of the user's that made the same operation very often."""

    line: str
    times: int
    operation: str


class Executions:
    """Tells the nodes of a trace which execution of which line made them."""

    def __init__(self) -> None:
        self._is_users: dict[str, bool] = {}
        """By file: a code object takes microseconds to hash."""
        self._called: FrameType | None = None
        """The latest frame that a line of the user's called: as it is held, no other is taken for
        it.
        """
        self._is_asked_for = False
        """Whether that is part of a loop that the user wants unrolled."""
        self._number = 0
        self.place: tuple[str, int] | None = None
        """The line that made the latest node."""
        self._counts: Counter[tuple[str, int]] = Counter()

    def end(self) -> None:
        """Let go of what the frame holds."""
        self._called = None

    def note(self, graph: Graph) -> None:
        """Note where the caller's latest node comes from."""
        node = graph._root.prev
        if _PLACE in node.meta:
            return
        innermost = called = sys._getframe(1)
        frame = called.f_back
        known = self._is_users
        while frame is not None:
            file = frame.f_code.co_filename
            if known[file] if file in known else self._belongs_to_user(frame, file):
                break
            called, frame = frame, frame.f_back
        if frame is None:
            self.place = None
            return
        self.place = place = file, frame.f_lineno
        if called is not self._called:
            self._called = called
            self._number += 1
            self._counts[place] += 1
            # looking through the whole stack takes a while: only where it matters
            self._is_asked_for = self._counts[place] > LIMIT and _is_asked_for(innermost)
        if not self._is_asked_for:
            node.meta[_PLACE] = _Place(*place, frame.f_lasti, self._number)
            if node.target is operator.getitem:
                node.all_input_nodes[0].meta.setdefault(_PLACE, node.meta[_PLACE])

    def _belongs_to_user(self, frame: FrameType, file: str) -> bool:
        found = is_users(frame) and (not file.startswith(STDLIB) or _SITE in file)
        if not file.startswith("<"):  # code of no file may be torch's or the user's
            self._is_users[file] = found
        return found


def place_of(node: Node) -> str:
    """The user's line that made a node; empty if it is not known."""
    if _LINE in node.meta:
        return str(node.meta[_LINE])
    place = file_and_line(node)
    return "" if place is None else line(*place)


def file_and_line(node: Node) -> tuple[str, int] | None:
    """The same as file and number; None if it is not known."""
    place = node.meta.get(_PLACE)
    return None if place is None else place[:2]


def set_place(node: Node, file: str, number: int) -> None:
    """Say where a node of a graph that was not traced comes from."""
    node.meta[_PLACE] = _Place(file, number, 0, 0)


def keep_places(made: Mapping[Node, Iterable[Node]], *, instead: bool = False) -> None:
    """``made``: the nodes that each node of another graph became; ``instead``: of their own."""
    for node, others in made.items():
        for key in node.meta.keys() & _PLACES:
            for other in others:
                if instead or key not in other.meta:
                    other.meta[key] = node.meta[key]


def keep_only_places(node: Node) -> None:
    """Forget all of a node but its line, which is asked for if it communicates, or is recorded."""
    communicates = getattr(node.target, "namespace", "") in NAMESPACES
    is_needed = communicates or recording.ring is not None or bool(inner_modules(node))
    places = {key: node.meta[key] for key in node.meta.keys() & _PLACES if is_needed}
    node.meta.clear()
    node.meta |= places


def _is_asked_for(frame: FrameType) -> bool:
    """Whether this is a step of a loop with ``unroll=True``."""
    caller: FrameType | None = frame
    while caller is not None:
        in_loops = caller.f_code.co_filename.startswith(_LOOPS)
        if in_loops and caller.f_locals.get("is_unrolled") is True:
            return True
        caller = caller.f_back
    return False


def repeated(graph: GraphModule) -> Repeated | None:
    """The line that made the same operation most often, if that is too often.  Operations that give
    other shapes are other ones: no loop could contain both.
    """
    inputs = len(graph.graph.find_nodes(op="placeholder"))
    most = Repeated("", max(LIMIT, inputs), "")
    for module in all_modules(graph):
        counts: dict[Any, tuple[int, int]] = {}  # number of executions, and the latest
        for node in module.graph.nodes:
            place = node.meta.get(_PLACE)
            if place is None:
                continue
            key = *place[:3], node.target, _shapes(node.meta.get("val"))
            times, latest = counts.get(key, (0, -1))
            if latest != place.execution:
                counts[key] = times + 1, place.execution
        for (file, number, _, target, _), (times, _) in counts.items():
            if times > most.times:
                most = Repeated(line(file, number), times, str(target))
    return most if most.line else None


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    return tuple(map(_shapes, value)) if isinstance(value, list | tuple) else None


def unrolled(found: Repeated) -> str:
    """The warning about it."""
    return (
        f"{found.line} runs {found.times} times in the traced function ({found.operation}). A "
        "Python loop is unrolled: it takes time to trace and to compile with every step. Write it "
        "as torchpmap.scan(body, init, xs), whose body is traced once, or as torchpmap.fori_loop "
        "or torchpmap.map."
    )
