"""The 2-D wave equation, the rows of the grid cut into one block per device (20 s).

    python examples/wave_equation.py [--devices 2] [--quick] [--size 120] [--no-compile]
    torchrun --nproc-per-node=2 examples/wave_equation.py

A step needs the cells next to each cell, so a block needs one row of the block above it and one of
the block below. ``ppermute`` sends them. The first block receives nothing from above, the last
nothing from below, and ``ppermute`` gives zeros instead: the wall that reflects the wave.

The result is compared with the same scheme on the whole grid, and the energy must not change. A
picture of the blocks is written to ``outputs/``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import trange

import torchpmap as tp
from torchpmap.multihost import all_gather, local_rows

COURANT = 0.5  # (speed of the wave * time step / grid spacing) ** 2; stable up to 0.5
STEPS_PER_CALL = 10


class Wave(NamedTuple):
    """Heights now and one step ago, float64[blocks, rows, columns] or float64[rows, columns]."""

    now: Tensor
    before: Tensor


def pad_with_zeros(block: Tensor) -> Tensor:
    return torch.nn.functional.pad(block, (1, 1, 1, 1))


def pad_with_neighbours(block: Tensor) -> Tensor:
    """Put the neighbours' rows above and below, and walls to the left and to the right."""
    n = tp.axis_size("blocks")
    above = tp.ppermute(block[-1:], "blocks", [(k, k + 1) for k in range(n - 1)])
    below = tp.ppermute(block[:1], "blocks", [(k + 1, k) for k in range(n - 1)])
    return torch.nn.functional.pad(torch.cat([above, block, below]), (1, 1))


def laplacian(padded: Tensor) -> Tensor:
    vertical = padded[:-2, 1:-1] + padded[2:, 1:-1]
    horizontal = padded[1:-1, :-2] + padded[1:-1, 2:]
    return vertical + horizontal - 4 * padded[1:-1, 1:-1]


def advance(wave: Wave, num_steps: int, pad: Callable[[Tensor], Tensor]) -> Wave:
    """Run the leapfrog scheme on a block or on the whole grid: only ``pad`` differs."""
    for _ in range(num_steps):
        after = 2 * wave.now - wave.before + COURANT * laplacian(pad(wave.now))
        wave = Wave(after, wave.now)
    return wave


def energy(wave: Wave) -> Tensor:
    """The energy that leapfrog conserves: of the motion, plus that of the stretched surface."""
    motion = (wave.now - wave.before).square().sum()
    stretch = -COURANT * (wave.now * laplacian(pad_with_neighbours(wave.before))).sum()
    return tp.psum((motion + stretch) / 2, "blocks")


def first_wave(size: int) -> Wave:
    """Two drops on still water, the larger one away from the middle."""
    x = torch.linspace(-1, 1, size, dtype=torch.float64)
    y = x[:, None]
    drop = torch.exp(-60 * ((x - 0.3) ** 2 + (y + 0.4) ** 2))
    drop = drop + 0.6 * torch.exp(-60 * ((x + 0.5) ** 2 + (y - 0.5) ** 2))
    return Wave(drop, drop)


def simulate(
    num_devices: int, size: int, num_steps: int, compile: Any = True
) -> tuple[list[Tensor], list[float]]:
    """Return the whole grid and the energy after every call of the mapped function."""
    if size % num_devices or num_steps % STEPS_PER_CALL:
        raise ValueError(
            f"size={size} must be divisible by {num_devices} devices, and steps={num_steps} by "
            f"{STEPS_PER_CALL}"
        )

    def several_steps(wave: Wave) -> Wave:
        return advance(wave, STEPS_PER_CALL, pad_with_neighbours)

    devices = tp.devices()[:num_devices]
    step = tp.pmap(several_steps, axis_name="blocks", devices=devices, compile=compile)
    measure = tp.pmap(energy, axis_name="blocks", devices=devices, out_axes=None, compile=compile)
    now, before = first_wave(size)
    blocks = (num_devices, size // num_devices, size)
    wave = local_rows(Wave(now.reshape(blocks), before.reshape(blocks)))
    grids, energies = [now], [measure(wave).item()]
    hidden = tp.process_index() != 0 or None  # None: shown on a terminal only
    for _ in trange(num_steps // STEPS_PER_CALL, unit="call", disable=hidden, leave=False):
        wave = step(wave)  # stays on the devices; the next line copies it for the picture
        grids.append(all_gather(wave.now, tiled=True).reshape(size, size))
        energies.append(measure(wave).item())
    return grids, energies


def draw(grids: list[Tensor], devices: list[tp.Device], path: Path) -> None:
    """Draw the wave at four times, with a line where the block of one device ends."""
    rows = len(grids[0]) / len(devices)
    middles = [(k + 0.5) * rows - 0.5 for k in range(len(devices))]
    figure = Figure(figsize=(11, 3), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True)
    for axes, k in zip(panels, range(4), strict=True):
        call = k * (len(grids) - 1) // 3
        image = axes.imshow(grids[call], cmap="RdBu", vmin=-0.5, vmax=0.5)
        for border in range(1, len(devices)):
            axes.axhline(border * rows - 0.5, color="black", linewidth=1)
        axes.set(title=f"step {call * STEPS_PER_CALL}", xticks=[], yticks=middles)
        axes.tick_params(length=0)
    panels[0].set_yticklabels([str(device) for device in devices])
    figure.colorbar(image, ax=panels, label="height", extend="both")
    figure.suptitle(f"A wave on a grid of {len(devices)} blocks, one per device")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate a wave on every device.")
    parser.add_argument("--devices", type=int, help="default: every GPU, or two cores")
    parser.add_argument("--size", type=int, default=120, help="rows and columns of the grid")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--quick", dest="steps", action="store_const", const=60, help="60 steps")
    parser.add_argument("--no-compile", action="store_true", help="run operation by operation")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for the PNG")
    args = parser.parse_args()

    if tp.process_count() == 1:
        tp.init(args.devices or (2 if tp.default_backend() == "cpu" else None))
    n = tp.device_count()
    grids, energies = simulate(n, args.size, args.steps, not args.no_compile)
    if tp.process_index() != 0:
        return  # one process reports

    whole = advance(first_wave(args.size), args.steps, pad_with_zeros).now
    torch.testing.assert_close(grids[-1], whole, rtol=0, atol=1e-12)
    print(f"{n} blocks and the whole grid agree after {args.steps} steps")
    change = max(abs(value / energies[0] - 1) for value in energies)
    assert change < 1e-10, change
    print(f"energy {energies[0]:.4f}, changed by less than 1e-10 of it")

    args.output.mkdir(parents=True, exist_ok=True)
    draw(grids, tp.devices(), args.output / "wave_equation.png")
    print(f"wrote {args.output}/wave_equation.png")
    print("ok")


if __name__ == "__main__":
    main()
