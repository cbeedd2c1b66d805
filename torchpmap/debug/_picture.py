"""A text picture of which device holds what."""

from __future__ import annotations

from collections.abc import Sequence

from torchpmap._base.errors import kind_of
from torchpmap._layout.layout import Layout


def picture(layout: Layout) -> str:
    """The blocks of a value: a table over the cut dims, or a list if more than two dims are cut."""
    holders: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for device, part in zip(layout.devices, layout.slices, strict=True):
        bounds = [index.indices(size)[:2] for index, size in zip(part, layout.shape, strict=True)]
        holders.setdefault(tuple(bounds), []).append(str(device))
    blocks = [(tuple(map(_range, part)), " ".join(holders[part])) for part in sorted(holders)]
    head = kind_of(layout.shape, layout.dtype)
    cut = [d for d, size in enumerate(layout.block_shape) if size != layout.shape[d]]
    if not cut:
        return f"{head}, replicated\n{_table([[blocks[0][1]]], [], [])}"
    head = f"{head}, cut along dim{'s' * (len(cut) > 1)} {', '.join(map(str, cut))}"
    if len(cut) > 2:
        lines = [f"  [{', '.join(ranges)}]  {devices}" for ranges, devices in blocks]
        return "\n".join([head, *lines])
    if len(cut) == 1:
        names = [ranges[cut[0]] for ranges, _ in blocks]
        if cut == [0]:
            return f"{head}\n{_table([[devices] for _, devices in blocks], names, [])}"
        return f"{head}\n{_table([[devices for _, devices in blocks]], [], names)}"
    rows, columns = (list(dict.fromkeys(ranges[dim] for ranges, _ in blocks)) for dim in cut)
    cells = [
        [devices for ranges, devices in blocks if ranges[cut[0]] == row] for row in rows
    ]  # each row is in the order of the columns, because blocks are sorted
    return f"{head}\n{_table(cells, rows, columns)}"


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
