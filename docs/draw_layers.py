"""Draw ``docs/images/layers.png``: the folders of the package, and which of them import which.

The layers are read from the table in ``CONTRIBUTING.md``, the arrows from the imports in the code.
Run it with ``python docs/draw_layers.py`` after changing either; the picture is kept in git.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from draw_overview import BLUE, INK, LINE, ORANGE, arrow, box, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchpmap"
ROW = re.compile(r"^\| (\d+) \| `(\w+)` \| (.+) \| `\w+` \|$", re.MULTILINE)
IMPORT = re.compile(r"^ *from torchpmap(?:\.(\w+)[.\w]*)? import (\w+)", re.MULTILINE)

COLUMNS = {
    **{"profiler": 1, "random": 1, "_doctor": 2, "checkpoint": 3},
    **{"multihost": 4, "_modules": 5, "optim": 6},
}
"""All other folders are in column 0. No arrow may go through a box."""
LEFT = (0.5, 3.7, 5.3, 6.75, 8.2, 9.8, 11.35)
RIGHT = (3.55, 5.15, 6.6, 8.05, 9.65, 11.2, 12.7)
"""Edges of the columns."""
PITCH, HEIGHT = 1.26, 0.98

LEGEND = "Blue: public. An arrow is an import; those that follow from others are left out."


def read_layers() -> dict[str, tuple[int, str]]:
    """Folder -> its layer and its job."""
    table = (ROOT / "CONTRIBUTING.md").read_text()
    return {folder: (int(layer), job.replace("`", "")) for layer, folder, job in ROW.findall(table)}


def read_imports(folder: str) -> set[str]:
    """The other folders that the files of a folder import."""
    files = PACKAGE.glob("*.py") if folder == "__init__" else (PACKAGE / folder).rglob("*.py")
    found = {
        first or second for file in files for first, second in IMPORT.findall(file.read_text())
    }
    return found - {folder}


def reduced(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leave out imports that follow from others: of A -> B -> C, the import A -> C."""

    def below(folder: str) -> set[str]:
        return imports[folder].union(*map(below, imports[folder]))

    return {folder: others - set().union(*map(below, others)) for folder, others in imports.items()}


def spans(imports: dict[str, set[str]]) -> dict[str, tuple[int, int]]:
    """First and last column of each box, so wide that all arrows are vertical."""
    found = {folder: (COLUMNS.get(folder, 0),) * 2 for folder in imports}
    for folder, others in imports.items():
        for other in others:
            first, second = sorted((folder, other), key=lambda name: COLUMNS.get(name, 0))
            found[first] = found[first][0], max(found[first][1], COLUMNS.get(second, 0))
    return found


def label(axes: Axes, x: float, y: float, width: float, name: str, job: str) -> None:
    """Write the name and, below it, the job in as many lines as it takes."""
    style = {"color": INK, "ha": "center", "va": "center"}
    lines = textwrap.wrap(job, int(11.5 * width))
    top = y + 0.02 + 0.105 * len(lines)
    axes.text(x, top, name, family="monospace", fontsize=10, weight="bold", **style)
    for number, line in enumerate(lines):
        axes.text(x, top - 0.25 - 0.205 * number, line, fontsize=8.2, **style)


def draw() -> Figure:
    layers = read_layers()
    imports = reduced({folder: read_imports(folder) for folder in layers})
    columns = spans(imports)
    bottoms = {folder: PITCH * layer for folder, (layer, _) in layers.items()}

    figure = Figure(figsize=(10.4, 9.3), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 12.75), ylim=(0.7, PITCH * 10 + HEIGHT + 0.05))
    axes.axis("off")
    for folder, (layer, job) in layers.items():
        first, last = columns[folder]
        left, width = LEFT[first], RIGHT[last] - LEFT[first]
        bottom, middle = bottoms[folder], bottoms[folder] + HEIGHT / 2
        name = "torchpmap" if folder == "__init__" else folder
        box(axes, left, bottom, width, HEIGHT, ORANGE if name.startswith("_") else BLUE)
        label(axes, left + width / 2, middle, width, name, job)
        if first == 0:
            axes.text(0.2, middle, layer, ha="center", va="center", color=LINE, fontsize=11)
        for other in sorted(imports[folder]):
            column = max(first, columns[other][0])
            x = (LEFT[column] + RIGHT[column]) / 2
            arrow(axes, (x, bottom), (x, bottoms[other] + HEIGHT))
    axes.text(0.5, 0.9, LEGEND, fontsize=9, color=LINE, va="center")
    return figure


if __name__ == "__main__":
    save(draw(), "layers.png")
