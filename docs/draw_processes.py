"""Draw ``docs/images/processes.svg``: the processes of ``python`` and of ``torchrun``.

Run it with ``python docs/draw_processes.py`` after changing it; the picture is kept in git.
"""

from __future__ import annotations

from draw_mapping import ARROW, DEVICES, SHARED, canvas, cell, note
from draw_overview import save
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BOTH = ARROW | {"arrowstyle": "<|-|>"}


def neighbours(axes: Axes, left: float, y: float) -> None:
    for k in range(3):
        x = left + 3.4 * k + 2.9
        axes.annotate("", (x + 0.5, y), (x, y), arrowprops=BOTH)


def draw() -> Figure:
    figure, axes = canvas(29.5, 9.6)
    note(axes, 7.0, 9.0, "python train.py", mono=True)
    cell(axes, 3.9, 8.3, SHARED, "controller: train.py", width=6.2)
    for k in range(4):
        x = 0.5 + 3.4 * k
        axes.annotate("", (x + 1.45, 5.0), (7.0, 7.3), arrowprops=ARROW)
        cell(axes, x, 5.0, DEVICES[k], f"worker {k}", width=2.9)
        cell(axes, x, 4.0, DEVICES[k], f"cpu:{k}", width=2.9)
    neighbours(axes, 0.5, 4.0)
    note(axes, 7.0, 2.1, "one process runs your script;\nworkers run the mapped functions")
    note(axes, 7.0, 0.7, "an argument has the rows of all devices")

    note(axes, 22.5, 9.0, "torchrun --nproc-per-node=4 train.py", mono=True)
    for k in range(4):
        x = 16.0 + 3.4 * k
        cell(axes, x, 6.0, DEVICES[k], "train.py", width=2.9)
        cell(axes, x, 5.0, DEVICES[k], f"rank {k}", width=2.9)
        cell(axes, x, 4.0, DEVICES[k], f"cpu:{k}", width=2.9)
    neighbours(axes, 16.0, 4.5)
    note(
        axes, 22.5, 2.1, "every process runs your script,\nand its own part of the mapped functions"
    )
    note(axes, 22.5, 0.7, "an argument has the rows of this process")
    return figure


if __name__ == "__main__":
    save(draw(), "processes.svg")
