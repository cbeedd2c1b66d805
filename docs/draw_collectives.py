"""Draw ``docs/images/collectives.svg``: what four devices have before and after each collective.

The numbers are those of the functions themselves, run in this process. Run it with ``python
docs/draw_collectives.py`` after changing it; the picture is kept in git.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from draw_mapping import ARROW, DEVICES, canvas, cell, note
from draw_overview import save
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import torchpmap as tp

ONE = torch.tensor([1, 2, 3, 4])
FOUR = torch.arange(16).reshape(4, 4)
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
PAIRS = [[0, 1], [2, 3]]

Function = Callable[[torch.Tensor], torch.Tensor]
COLLECTIVES: list[tuple[str, torch.Tensor, Function]] = [
    ('psum(x, "i")', ONE, lambda x: tp.psum(x, "i")),
    ('pmean(x, "i")', ONE, lambda x: tp.pmean(x, "i")),
    ('pmax(x, "i")', ONE, lambda x: tp.pmax(x, "i")),
    ('pmin(x, "i")', ONE, lambda x: tp.pmin(x, "i")),
    (
        'psum(x, "i", axis_index_groups=pairs)',
        ONE,
        lambda x: tp.psum(x, "i", axis_index_groups=PAIRS),
    ),
    ('pbroadcast(x, "i", 2)', ONE, lambda x: tp.pbroadcast(x, "i", 2)),
    ('ppermute(x, "i", ring)', ONE, lambda x: tp.ppermute(x, "i", RING)),
    ('pshuffle(x, "i", [3,2,1,0])', ONE, lambda x: tp.pshuffle(x, "i", [3, 2, 1, 0])),
    ('all_gather(x, "i")', ONE, lambda x: tp.all_gather(x, "i")),
    ('psum_scatter(x, "i")', FOUR, lambda x: tp.psum_scatter(x, "i")),
    ('all_to_all(x, "i", 0, 0)', FOUR, lambda x: tp.all_to_all(x, "i", 0, 0)),
    ('pswapaxes(x, "i", 0)', FOUR, lambda x: tp.pswapaxes(x, "i", 0)),
]


def block(axes: Axes, x: float, y: float, values: torch.Tensor, colors: torch.Tensor) -> None:
    """One line per device."""
    for device in range(4):
        for column, value in enumerate(values[device].reshape(-1).tolist()):
            color = int(colors[device].reshape(-1)[column])
            cell(axes, x + column, y - device, DEVICES[color] if color >= 0 else "#f3f4f6", value)


def colors_of(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The device that each number comes from; -1 for a number that is new, such as a sum."""
    owner = {value: device for device in range(4) for value in before[device].reshape(-1).tolist()}
    kept = set(after.reshape(-1).tolist()) <= set(owner)
    found = [owner[value] if kept else -1 for value in after.reshape(-1).tolist()]
    return torch.tensor(found).reshape(after.shape)


def draw() -> Figure:
    figure, axes = canvas(29.5, 36.8)
    for number, (title, before, fun) in enumerate(COLLECTIVES):
        x, y = 0.4 + 15.2 * (number % 2), 36.1 - 6.2 * (number // 2)
        with tp.debug.fake_pmap():
            after = tp.pmap(fun, axis_name="i")(before)
        note(axes, x, y, title, mono=True, ha="left")
        for device in range(4):
            cell(axes, x, y - 0.8 - device, DEVICES[device], f"dev {device}", width=2.6)
        block(axes, x + 3.1, y - 0.8, before, colors_of(before, before))
        start, end = x + 7.5, x + 8.7
        axes.annotate("", (end, y - 2.8), (start, y - 2.8), arrowprops=ARROW)
        block(axes, x + 9.1, y - 0.8, after, colors_of(before, after))
    return figure


if __name__ == "__main__":
    save(draw(), "collectives.svg")
