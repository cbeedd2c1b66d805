"""What a mapped function does besides computing: it prints, and it checks.

Both are operators without results, registered with torch as effects, so that they stay in a traced
graph, in order, through every optimizer (torch.library's effect tokens).  They run where and when
the values exist: on the workers, also in compiled code.

Each is a ``Transformable``: under torch.func's derivatives it sees the primal values once, and each
vmap around it adds a leading dim to them, the outermost first.

    devices       ordered: the lines of all devices travel to the first one, which prints them all
    lanes         one call prints all of them
    derivatives   values only

An ordered print is a collective: every device must reach it.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import string
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchpmap._base.inexact import is_inexact
from torchpmap._base.pytree import flatten
from torchpmap._base.torch_groups import group_named
from torchpmap._base.torch_internals import forward_level, keep_in_order
from torchpmap._collectives import pbroadcast, pmax
from torchpmap._layout import axis_stack
from torchpmap._trace.agreement import gathered
from torchpmap._trace.transformable import Tensors, WithoutDerivatives, apply, batch_first

_SLOT = re.compile("\0(\\d+)\0")
_AS_REPR = "!r"

_line_start = ""


def mark_lines(mark: str) -> None:
    """In a worker: start every line with ``mark``, so that the controller prints it as it is."""
    global _line_start
    _line_start = mark


# -- print -----------------------------------------------------------------------------------------


class _Template(string.Formatter):
    """Formats what is known now, and leaves slots for the values of tensors."""

    def __init__(self) -> None:
        self.specs: list[str] = []
        self.tensors: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor, spec: str) -> str:
        self.tensors.append(tensor.detach())
        self.specs.append(spec)
        return f"\0{len(self.specs) - 1}\0"

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(self._slotted(value) if conversion else value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, torch.Tensor) and format_spec and value.dim():
            raise TypeError(
                f"debug.print: the format {format_spec!r} is for a number, but the value has "
                f"shape {list(value.shape)}. Leave the format out, or print one element."
            )
        return format(self._slotted(value), format_spec)

    def _slotted(self, value: Any) -> Any:
        leaves, structure = flatten(value)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return value
        slots = [_Slot(self, x) if isinstance(x, torch.Tensor) else x for x in leaves]
        return structure.unflatten(slots)

    def get_value(self, key: Any, args: Any, kwargs: Any) -> Any:
        if key not in (kwargs if isinstance(key, str) else range(len(args))):
            error = KeyError if isinstance(key, str) else IndexError
            raise error(
                f"debug.print: the format string asks for argument {key!r}, but the arguments are "
                f"{', '.join(map(str, (*range(len(args)), *kwargs))) or 'none'}."
            )
        return super().get_value(key, args, kwargs)

    def check_unused_args(self, used_args: Any, args: Any, kwargs: Any) -> None:
        unused = [str(k) for k in (*range(len(args)), *kwargs) if k not in used_args]
        if unused:
            raise ValueError(
                f"debug.print: the format string does not use argument {', '.join(unused)}. "
                "Write {} (or {name}) where a value belongs."
            )


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor while its surroundings are formatted."""

    template: _Template
    tensor: torch.Tensor

    def __format__(self, spec: str) -> str:
        return self.template.add(self.tensor, spec)

    def __repr__(self) -> str:
        return self.template.add(self.tensor, _AS_REPR)


@dataclass(frozen=True)
class _Lines(WithoutDerivatives):
    """How lines are made of a list of tensors: an index per name, then a value per slot."""

    template: str
    specs: tuple[str, ...]
    names: tuple[str, ...]
    groups: tuple[str, ...]
    """Process groups that the lines are collected over, the slowest axis first."""
    batch: tuple[int, ...] = ()
    """Leading dims of every tensor: one line for each of their indices."""

    def run(self, tensors: Tensors) -> Tensors:
        given = self.template, self.specs, self.names, self.batch, self.groups, tensors
        torch.ops.torchpmap.debug_print(*given)
        return [torch.zeros(())]  # torch.func wants a tensor

    def vmap(
        self, info: Any, dims: Sequence[int | None], tensors: Tensors
    ) -> tuple[Tensors, Sequence[int | None]]:
        size = info.batch_size
        of_batch = replace(self, batch=(size, *self.batch))
        return apply(of_batch, batch_first(tensors, dims, size)), [None]


def show(fmt: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, ordered: bool) -> None:
    """Print ``fmt.format(*args, **kwargs)``, once known, for every index of all bound axes."""
    formatter = _Template()
    template = formatter.vformat(fmt, args, kwargs)
    names, indices, groups = [], [], []
    for parts in axis_stack.bound():
        index = parts[0].index
        for part in parts[1:]:
            index = index * part.size + part.index
        names.append("" if parts[0].name is None else f"{parts[0].name}=")
        indices.append(index)
        groups += [part.group for part in parts if part.group is not None]
    how = _Lines(template, tuple(formatter.specs), tuple(names), tuple(groups) if ordered else ())
    apply(how, [*indices, *formatter.tensors])


def lines_of(*printed: Any) -> str:
    """The lines that this device prints; the arguments are those of the operator."""
    return "\n".join(text for _, text in _entries(*printed))


_Entries = list[tuple[list[int], str]]
"""Indices along the axes, and what is printed there."""


def _entries(
    template: str,
    specs: Sequence[str],
    names: Sequence[str],
    batch: Sequence[int],
    groups: Sequence[str],
    tensors: Sequence[torch.Tensor],
) -> _Entries:
    entries = []
    for place in itertools.product(*map(range, batch)):
        row = [tensor[place] for tensor in tensors]
        indices, values = [int(k) for k in row[: len(names)]], row[len(names) :]
        at = ", ".join(f"{name}{k}" for name, k in zip(names, indices, strict=True))
        texts = _formatted(values, specs)
        text = _SLOT.sub(functools.partial(_filled, texts), template)
        head = f"[{at}] " if names else ""
        entries.append((indices, head + text.replace("\n", "\n" + " " * len(head))))
    return entries


def _filled(texts: Sequence[str], slot: re.Match[str]) -> str:
    return texts[int(slot[1])]


def _formatted(values: Sequence[torch.Tensor], specs: Sequence[str]) -> list[str]:
    if forward_level() >= 0:
        # torch would look for a tangent to print, which raises below autograd, where this thread
        # is; a new thread is not below it
        with ThreadPoolExecutor(1) as pool:
            return list(pool.map(_text, values, specs))
    return list(map(_text, values, specs))


def _text(value: torch.Tensor, spec: str) -> str:
    return repr(value) if spec == _AS_REPR else format(value, spec)


def emit(text: str) -> None:
    """Print lines where the user looks."""
    out = sys.stdout
    out.write("".join(f"{_line_start}{line}\n" for line in text.split("\n")))
    out.flush()


def _print(*printed: Any) -> None:
    entries = _entries(*printed)
    *_, groups, tensors = printed
    for group in reversed(groups):
        entries = _collected(entries, group, tensors[0].device)
    if len(groups) > 1:  # the devices of one group are in order already
        entries.sort(key=lambda entry: entry[0])
    if entries:
        emit("\n".join(text for _, text in entries))


def _collected(entries: _Entries, group: str, device: torch.device) -> _Entries:
    """The entries of all members on the first member, none on the others."""
    axis_stack.record(("print", "", group))
    process_group = group_named(group)
    size, first = process_group.size(), process_group.rank() == 0
    text = json.dumps(entries).encode()
    lengths = gathered(len(text).to_bytes(8), 8, size, group, device)
    rows = gathered(text, max(map(int.from_bytes, lengths)), size, group, device)
    return [entry for row in rows for entry in json.loads(row)] if first else []


def prints(graph: torch.fx.GraphModule) -> bool:
    return any(node.target is torch.ops.torchpmap.debug_print.default for node in graph.graph.nodes)


# -- check -----------------------------------------------------------------------------------------


def difference(value: torch.Tensor, axis_name: Any) -> torch.Tensor:
    """The largest distance of any device's value from the first device's; infinite where only one
    of the two is NaN.
    """
    return pmax(distance(value, pbroadcast(value, axis_name, 0)), axis_name)


def distance(value: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """The largest distance of two elements; infinite where only one of them is NaN."""
    apart = distances(value, first).flatten()
    return torch.cat([apart, apart.new_zeros(1)]).amax()  # an empty value differs nowhere


def distances(these: torch.Tensor, those: torch.Tensor) -> torch.Tensor:
    """How far elements are apart, in float64: 0 for equal ones alone, of which NaN and NaN are two;
    infinite where only one is NaN.  Integers that differ are at least 1 apart.
    """
    a, b = _comparable(these), _comparable(those)
    unequal = (a != b) & ~((a != a) & (b != b))
    if these.is_complex():
        unequal = unequal.any(-1)
    apart = (wide(these) - wide(those)).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    # float64 has neither all integers nor, on some devices, the smallest differences
    least = torch.finfo(torch.float64).tiny if is_inexact(these) else 1.0
    return torch.where(unequal, apart.clamp(min=least), torch.zeros_like(apart))


def wide(x: torch.Tensor) -> torch.Tensor:
    """The nearest values in float64, or in complex128."""
    if x.dtype == torch.uint64:
        bits = x.view(torch.int64)
        return ((bits >> 1) & torch.iinfo(torch.int64).max).to(torch.float64) * 2 + (bits & 1)
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _comparable(x: torch.Tensor) -> torch.Tensor:
    """Numbers that are equal where those of ``x`` are, in a dtype that torch compares."""
    if x.is_complex():
        return torch.view_as_real(x.to(torch.complex128))
    if x.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return x.view(torch.int64) if x.dtype == torch.uint64 else x.to(torch.int64)
    return x.to(torch.float64) if x.is_floating_point() else x


def check_equal(distance: torch.Tensor, message: str) -> None:
    """Raise ``ValueError(message)``, with ``distance`` filled in, once it is known not to be 0."""
    apply(_Check(message), [distance])


@dataclass(frozen=True)
class _Check(WithoutDerivatives):
    message: str

    def run(self, tensors: Tensors) -> Tensors:
        torch.ops.torchpmap.debug_check(*tensors, self.message)
        return [torch.zeros(())]

    def vmap(
        self, info: Any, dims: Sequence[int | None], tensors: Tensors
    ) -> tuple[Tensors, Sequence[int | None]]:
        return apply(self, [tensors[0].amax(dims[0] or 0)]), [None]


def _check(distance: torch.Tensor, message: str) -> None:
    worst = float(distance)
    if worst != 0:
        raise ValueError(message.replace("{distance}", f"{worst:g}"))


# -- operators -------------------------------------------------------------------------------------

_library = torch.library.Library("torchpmap", "FRAGMENT")
for _schema, _run in (
    (
        "debug_print(str template, str[] specs, str[] names, int[] batch, str[] groups, "
        "Tensor[] tensors) -> ()",
        _print,
    ),
    ("debug_check(Tensor distance, str message) -> ()", _check),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, lambda *_: None, "Meta")
    keep_in_order(_library, f"torchpmap::{_name}")
