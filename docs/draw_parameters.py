"""Draw ``docs/images/parameters.svg``: what each device keeps of a batch and of two weights.

Run it with ``python docs/draw_parameters.py`` after changing it; the picture is kept in git.
"""

from __future__ import annotations

import torch
from draw_mapping import DEVICES, canvas, note
from draw_overview import INK, LINE, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import torchpmap as tp
from torchpmap import P

SIZE, SIDE = 4, 0.45
"""Rows and columns of a weight, and the side of one number."""
BATCH = P("data")
WAYS = {
    "replicated": (P(), P()),
    "fully sharded": (P("data"), P("data")),
    "tensor-parallel": (P("model"), P(None, "model")),
    "both": (P("model", "data"), P("data", "model")),
}
"""Where the weights of two layers lie."""


def kept(spec: P, shape: tuple[int, ...], mesh: tp.Mesh) -> list[torch.Tensor]:
    """For each device, which numbers of a value it keeps."""
    value = tp.device_put(torch.zeros(shape), tp.NamedSharding(mesh, spec))
    found = []
    for shard in value.addressable_shards:
        found.append(torch.zeros(shape, dtype=torch.bool))
        found[-1][shard.index] = True
    return found


def numbers(axes: Axes, x: float, y: float, mask: torch.Tensor, color: str) -> None:
    """A matrix whose upper left corner is at (x, y), with the numbers that are kept in colour."""
    rows, columns = mask.shape
    frame = (x, y - SIDE * rows), SIDE * columns, SIDE * rows
    axes.add_patch(Rectangle(*frame, fc="none", ec=LINE, lw=0.6))
    for row, column in mask.nonzero().tolist():
        place = x + SIDE * column, y - SIDE * (row + 1)
        axes.add_patch(Rectangle(place, SIDE, SIDE, fc=color, ec=INK, lw=0.8))


def draw() -> Figure:
    mesh = tp.make_mesh((2, 2), ("data", "model"))
    figure, axes = canvas(29.5, 14.4)
    for k, device in enumerate(mesh.devices.flat):
        note(axes, 8.4 + 5.8 * k, 13.9, str(device), mono=True)
        for name, x in (("x", 0.4), ("first", 2.0), ("second", 4.2)):
            note(axes, 5.9 + 5.8 * k + x, 13.1, name)
    for line, (way, specs) in enumerate(WAYS.items()):
        y = 12.6 - 3.1 * line
        note(axes, 0.3, y - 0.4, way, ha="left")
        for place, spec in enumerate(specs):
            text = str(spec).replace("PartitionSpec", "P").replace(",)", ")")
            note(axes, 0.3, y - 1.0 - 0.5 * place, text, mono=True, ha="left")
        parts = [kept(BATCH, (SIZE, 1), mesh), *(kept(spec, (SIZE, SIZE), mesh) for spec in specs)]
        for k, masks in enumerate(zip(*parts, strict=True)):
            for x, mask in zip((0.2, 1.1, 3.3), masks, strict=True):
                numbers(axes, 5.9 + 5.8 * k + x, y, mask, DEVICES[k])
    return figure


if __name__ == "__main__":
    tp.init(4)
    save(draw(), "parameters.svg")
