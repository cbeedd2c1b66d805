"""Draw ``docs/images/overview.png``: one function, traced once, run on every device.

Run it with ``python docs/draw_overview.py`` after changing it; the picture is kept in git.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, BLUE, ORANGE, GREEN = "#1f2933", "#dbeafe", "#ffedd5", "#dcfce7"
MONO = {"family": "monospace", "fontsize": 9.5, "color": INK, "va": "center"}
CODE = (
    '@tp.pmap(axis_name="i")\ndef normalize(x):\n    total = tp.psum(x, "i")\n    return x / total'
)
GRAPH = ("x", "all_reduce sum\nover axis i", "div", "result")
NUM_DEVICES = 4
LINE = "#7b8794"
"""For what is drawn on the page itself, which may be light or dark; INK is for what is in boxes."""


def box(axes: Axes, x: float, y: float, width: float, height: float, color: str) -> None:
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=color, ec=INK, lw=1))


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=LINE))


def title(axes: Axes, x: float, text: str, below: str) -> None:
    axes.text(x, 5.05, text, fontsize=12, weight="bold", color=LINE, ha="center")
    axes.text(x, 0.1, below, fontsize=9, color=LINE, ha="center", va="center")


def draw() -> Figure:
    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 14.2), ylim=(-0.3, 5.5))
    axes.axis("off")

    title(axes, 2.1, "your function", "in your script, REPL or notebook")
    box(axes, 0.05, 1.9, 4.1, 1.8, BLUE)
    axes.text(0.25, 2.8, CODE, linespacing=1.6, **MONO)
    arrow(axes, (4.2, 2.8), (5.1, 2.8))
    axes.text(4.65, 3.0, "trace\nonce", fontsize=9, ha="center", color=LINE)

    title(axes, 6.3, "one graph", "the same for every device, compiled once")
    for step, text in enumerate(GRAPH):
        y = 3.85 - step * 1.05
        box(axes, 5.15, y, 2.3, 0.75, ORANGE)
        axes.text(6.3, y + 0.37, text, ha="center", **MONO)
        if step:
            arrow(axes, (6.3, y + 1.05), (6.3, y + 0.75))

    title(axes, 11.0, "every device", "the rows of the result stay where they are")
    for k in range(NUM_DEVICES):
        y = 3.85 - k * 1.05
        arrow(axes, (7.5, 2.8), (8.55, y + 0.37))
        box(axes, 8.6, y, 4.8, 0.75, GREEN)
        axes.text(8.8, y + 0.37, f"device {k}   x = {k}.0  ->  {k / 6:.3f}", **MONO)
        if k:
            axes.annotate(
                "",
                (13.65, y + 0.37),
                (13.65, y + 1.42),
                arrowprops={"arrowstyle": "<->", "color": LINE},
            )
    axes.text(13.85, 2.65, "psum", rotation=270, va="center", fontsize=9, color=LINE)
    axes.text(8.02, 4.25, "run", fontsize=9, ha="center", color=LINE)
    return figure


def save(figure: Figure, name: str) -> None:
    """Write a picture to ``docs/images``, without a background: the page has one."""
    path = Path(__file__).parent / "images" / name
    # The same figure gives the same bytes.
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=100, transparent=True, metadata=metadata)


if __name__ == "__main__":
    save(draw(), "overview.png")
