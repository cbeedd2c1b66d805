"""Pictures of which device holds what: a table of blocks, as text and as HTML for notebooks.

The HTML needs no script, style sheet or file.  Its colours are translucent, so that they suit light
and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchpmap._base.devices import Device
from torchpmap._base.errors import kind_of, size_text
from torchpmap._layout.layout import Layout

_MOST = 16
"""How many rows, columns and devices of a cell the HTML shows; of more, only the ends."""
_MOST_NUMBERS = 60
_ALL = "overflow-x:auto;font-family:ui-monospace,monospace"
_PART = "margin:4px 0;font:inherit"
"""Notebooks give ``pre`` and ``table`` fonts of their own, wrap lines and shade rows.  Browsers
make text smaller whose font is ``monospace`` alone.
"""
_ROW = '<tr style="background:none">'
_BOX = "border:1px solid;padding:4px 10px;text-align:center;color:inherit"
_LABEL = "border:0;padding:4px 8px;text-align:center;background:none;color:inherit;opacity:.7"


@dataclass(frozen=True)
class Picture:
    """The blocks of a value: a table over the cut dims.  If more than two dims are cut, it has one
    row per block.
    """

    layout: Layout
    cut: tuple[int, ...]
    """The dims that are cut."""
    rows: tuple[str, ...]
    """Labels; empty if there is nothing to tell apart."""
    columns: tuple[str, ...]
    cells: tuple[tuple[tuple[Device, ...], ...], ...]
    """The devices that hold each block."""

    @property
    def head(self) -> str:
        kind = kind_of(self.layout.shape, self.layout.dtype)
        if not self.cut:
            return f"{kind}, replicated"
        dims = ", ".join(map(str, self.cut))
        return f"{kind}, cut along dim{'s' * (len(self.cut) > 1)} {dims}"

    def __str__(self) -> str:
        texts = [[" ".join(map(str, devices)) for devices in row] for row in self.cells]
        if len(self.cut) > 2:
            lines = [f"  {label}  {text}" for label, (text,) in zip(self.rows, texts, strict=True)]
            return "\n".join([self.head, *lines])
        return f"{self.head}\n{_table(texts, self.rows, self.columns)}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.html()

    def html(self, numbers: torch.Tensor | None = None) -> str:
        """The picture, with the bytes of the value, and some of its numbers if they are given."""
        from html import escape  # it takes 5 ms to import, of which a script has no use

        itemsize = self.layout.dtype.itemsize
        whole, block = (
            size_text(math.prod(shape) * itemsize)
            for shape in (self.layout.shape, self.layout.block_shape)
        )
        head = f"{escape(self.head)}; {whole}, {block} per device"
        lines = [f'<div style="{_ALL}"><div>{head}</div>']
        if numbers is not None:
            lines.append(f'<pre style="{_PART};white-space:pre">{escape(_some(numbers))}</pre>')
        lines.append(f'<table style="{_PART};border-collapse:collapse">')
        columns = _ends(range(len(self.cells[0])))
        if self.columns:
            labels = [_box(_LABEL, "" if k is None else self.columns[k]) for k in columns]
            corner = _box(_LABEL, "") if self.rows else ""
            lines.append(f"{_ROW}{corner}{''.join(labels)}</tr>")
        for row in _ends(range(len(self.cells))):
            label = _box(_LABEL, "..." if row is None else self.rows[row]) if self.rows else ""
            boxes = [
                _box(_LABEL, "...") if None in (row, k) else _block(self.cells[row or 0][k or 0])
                for k in columns
            ]
            lines.append(f"{_ROW}{label}{''.join(boxes)}</tr>")
        return "".join([*lines, "</table></div>"])


def picture(layout: Layout) -> Picture:
    """The blocks of a value with this layout, and their devices."""
    holders: dict[tuple[tuple[int, int], ...], list[Device]] = {}
    for device, part in zip(layout.devices, layout.slices, strict=True):
        bounds = [index.indices(size)[:2] for index, size in zip(part, layout.shape, strict=True)]
        holders.setdefault(tuple(bounds), []).append(device)
    blocks = [(tuple(map(_range, part)), tuple(holders[part])) for part in sorted(holders)]
    cut = tuple(d for d, size in enumerate(layout.block_shape) if size != layout.shape[d])
    column = tuple((devices,) for _, devices in blocks)
    if not cut:
        return Picture(layout, cut, (), (), column)
    if len(cut) > 2:
        labels = tuple(f"[{', '.join(ranges)}]" for ranges, _ in blocks)
        return Picture(layout, cut, labels, (), column)
    if len(cut) == 1:
        names = tuple(ranges[cut[0]] for ranges, _ in blocks)
        if cut == (0,):
            return Picture(layout, cut, names, (), column)
        return Picture(layout, cut, (), names, (tuple(devices for _, devices in blocks),))
    rows, columns = (tuple(dict.fromkeys(ranges[dim] for ranges, _ in blocks)) for dim in cut)
    cells = tuple(
        tuple(devices for ranges, devices in blocks if ranges[cut[0]] == row) for row in rows
    )  # each row is in the order of the columns, because blocks are sorted
    return Picture(layout, cut, rows, columns, cells)


def _range(bounds: tuple[int, int]) -> str:
    start, stop = bounds
    return str(start) if stop == start + 1 else f"{start}:{stop}"


def _table(cells: Sequence[Sequence[str]], rows: Sequence[str], columns: Sequence[str]) -> str:
    left = max(map(len, rows), default=0)
    labelled = [*cells, columns] if columns else cells
    widths = [max(map(len, column)) for column in zip(*labelled, strict=True)]
    indent = " " * (left + 1) if left else ""
    rule = f"{indent}+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = []
    if columns:
        names = "   ".join(name.center(width) for name, width in zip(columns, widths, strict=True))
        lines.append(f"{indent}  {names}".rstrip())
    lines.append(rule)
    for number, row in enumerate(cells):
        name = f"{rows[number]:>{left}} " if rows else ""
        texts = " | ".join(text.center(width) for text, width in zip(row, widths, strict=True))
        lines += [f"{name}| {texts} |", rule]
    return "\n".join(lines)


# -- HTML ------------------------------------------------------------------------------------------


def _box(style: str, text: str) -> str:
    from html import escape

    return f'<td style="{style}">{escape(text)}</td>'


def _block(devices: Sequence[Device]) -> str:
    """The cell of a block, in the colour of the first device that holds it."""
    hue = devices[0].id * 137 % 360  # far apart for neighbours
    names = ["..." if k is None else str(devices[k]) for k in _ends(range(len(devices)))]
    return _box(f"{_BOX};background:hsl({hue} 65% 50% / .35)", " ".join(names))


def _ends(numbers: Iterable[int]) -> list[int | None]:
    """All of them, or the first and the last with None between."""
    every: list[int | None] = list(numbers)
    half = _MOST // 2
    return every if len(every) <= _MOST else [*every[:half], None, *every[-half:]]


def _some(numbers: torch.Tensor) -> str:
    plain = numbers.detach().resolve_conj().resolve_neg()
    try:
        array = plain.numpy()
    except TypeError:  # numpy lacks the dtype, as bfloat16
        array = plain.to(torch.complex64 if plain.is_complex() else torch.float32).numpy()
    return np.array2string(array, precision=4, threshold=_MOST_NUMBERS, separator=", ")
