"""Draw ``docs/images/mapping.svg`` and ``rows.svg``: what ``in_axes`` cuts, and where rows go.

Run it with ``python docs/draw_mapping.py`` after changing it; the pictures are kept in git.
"""

from __future__ import annotations

from draw_overview import INK, LINE, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

DEVICES = ("#bfdbfe", "#fed7aa", "#bbf7d0", "#e9d5ff")
"""Light colours, with dark text on them: for light and dark pages."""
SHARED = "#e5e7eb"
ARROW = {"arrowstyle": "-|>", "color": LINE, "shrinkA": 0, "shrinkB": 0}


def cell(axes: Axes, x: float, y: float, color: str, text: object = "", width: float = 1.0) -> None:
    """A square (or wider) cell whose upper left corner is at (x, y)."""
    axes.add_patch(Rectangle((x, y - 1), width, 1, fc=color, ec=INK, lw=0.8))
    style = {"ha": "center", "va": "center", "fontsize": 9, "color": INK, "family": "monospace"}
    axes.text(x + width / 2, y - 0.52, str(text), **style)


def note(axes: Axes, x: float, y: float, text: str, mono: bool = False, ha: str = "center") -> None:
    family = "monospace" if mono else "sans-serif"
    axes.text(x, y, text, fontsize=9, color=LINE, ha=ha, va="center", family=family)


def canvas(width: float, height: float, scale: float = 0.3) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width * scale, height * scale))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def draw_mapping() -> Figure:
    """One argument cut along dim 0, one along dim 1, one shared; results stacked both ways."""
    figure, axes = canvas(29.5, 9.4)
    columns = (
        (0.6, "in_axes=0\nrow k to device k", lambda row, column: DEVICES[row]),
        (7.1, "in_axes=1\ncolumn k to device k", lambda row, column: DEVICES[column]),
        (13.6, "in_axes=None\nthe same for all", lambda row, column: SHARED),
    )
    for x, text, color in columns:
        for row in range(4):
            for column in range(4):
                cell(axes, x + column, 8.6 - row, color(row, column))
        note(axes, x + 2, 3.7, text, mono=False)
    note(axes, 19.0, 6.6, "f", mono=True)
    axes.annotate("", (20.0, 6.0), (18.0, 6.0), arrowprops=ARROW)
    for row in range(4):
        for column in range(2):
            cell(axes, 20.6 + column, 8.6 - row, DEVICES[row])
            cell(axes, 25.2 + row, 7.6 - column, DEVICES[row])
    note(axes, 21.6, 3.7, "out_axes=0\na row per device")
    note(axes, 27.2, 3.7, "out_axes=1\na column per device")
    for k in range(4):
        cell(axes, 0.6 + 7.2 * k, 1.7, DEVICES[k], f"device {k}", width=6.6)
    return figure


def draw_rows() -> Figure:
    """Eight rows on four devices."""
    figure, axes = canvas(29.5, 6.3)
    for row in range(8):
        cell(axes, 4.6 + 2.6 * row, 5.8, DEVICES[row // 2], f"row {row}", width=2.4)
    note(axes, 0.5, 5.3, "8 rows", ha="left")
    for k in range(4):
        x = 4.6 + 5.2 * k
        axes.annotate("", (x + 2.5, 3.5), (x + 2.5, 4.6), arrowprops=ARROW)
        cell(axes, x, 3.3, DEVICES[k], f"device {k}", width=5.0)
        cell(axes, x, 2.3, DEVICES[k], "vmap of 2 rows", width=5.0)
    note(axes, 0.5, 2.3, "4 devices", ha="left")
    note(
        axes,
        14.9,
        0.6,
        "a collective over the axis reaches all 8 rows; "
        "the axis has size 8, and the index of a row is 0 to 7",
    )
    return figure


if __name__ == "__main__":
    save(draw_mapping(), "mapping.svg")
    save(draw_rows(), "rows.svg")
