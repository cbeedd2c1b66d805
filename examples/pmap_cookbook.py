"""JAX's Pmap Cookbook: maps, random matrices, psum, nested axes, Rule 30, gradients (1 min).

    python examples/pmap_cookbook.py [--devices 2] [--quick] [--no-compile]
    torchrun --nproc-per-node=2 examples/pmap_cookbook.py

Every number is checked against plain torch or NumPy. Eight rows run on any number of devices: on
four, each device holds two of them. Today's JAX can no longer run two parts of the notebook: the
nested pmaps at the end, and their gradient.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import torchpmap as tp
from torchpmap.multihost import all_gather, local_rows

ROWS = 8
CELLS, GENERATIONS = 40, 20
Pmap = Callable[..., Any]


def say(*words: object) -> None:
    """Print once, not in every process of torchrun."""
    if tp.process_index() == 0:
        tqdm.write(" ".join(map(str, words)))  # above the bar


def check(title: str, result: Tensor, expected: Tensor) -> None:
    """Print the result and stop the program unless it is what plain torch computes."""
    result = all_gather(result, tiled=True)
    torch.testing.assert_close(result, expected, check_dtype=False)
    say(f"{title}: {[round(value, 4) for value in result.flatten().tolist()]}")


def pure_maps(pmap: Pmap) -> None:
    x = torch.arange(ROWS)
    squares = pmap(lambda x: x**2)(local_rows(x))
    check("squares", squares, x**2)
    check("sums", pmap(torch.add)(*local_rows((x, x / 2))), x + x / 2)

    # A result is used like any other tensor, by torch and by NumPy.
    check("halves", squares / 2, x**2 / 2)
    here = local_rows(x).numpy()
    np.testing.assert_allclose(np.sin(squares.numpy()), np.sin(here**2), rtol=1e-6)
    numbers = torch.tensor(sorted(device.id for device in squares.devices()))
    check("eight rows are on devices", numbers, torch.arange(tp.device_count()))


def random_matrices(pmap: Pmap) -> None:
    # Each matrix is made where it is used; only one number per row comes back to the host. Drawing
    # is a long chain of integer operations, not worth compiling for one call.
    keys = tp.random.split(tp.random.key(0), ROWS)
    matrices = pmap(lambda key: tp.random.normal(key, (200, 300)), compile=False)(local_rows(keys))
    products = pmap(lambda x: x @ x.T)(matrices)
    means = pmap(torch.mean)(products)
    say("each matrix:", list(matrices.shape[1:]), "each product:", list(products.shape[1:]))

    expected = torch.stack([tp.random.normal(key, (200, 300)) for key in keys])
    check("means", means, (expected @ expected.mT).mean((1, 2)))


def collectives(pmap: Pmap) -> None:
    x = torch.arange(4.0)
    check(
        "normalized", pmap(lambda x: x / tp.psum(x, "i"), axis_name="i")(local_rows(x)), x / x.sum()
    )

    @pmap(axis_name="i")
    def normalize(x: Tensor) -> Tensor:
        return x / tp.psum(x, "i")

    check("by decorator", normalize(local_rows(x)), x / x.sum())

    @pmap(axis_name="rows")
    @pmap(axis_name="columns")
    def norms(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both = tp.psum(x, ("rows", "columns"))
        return x / tp.psum(x, "rows"), x / tp.psum(x, "columns"), x / both

    x = torch.arange(8.0).reshape(4, 2)
    by_row, by_column, by_both = norms(local_rows(x))
    check("over the rows", by_row, x / x.sum(0))
    check("over the columns", by_column, x / x.sum(1, keepdim=True))
    check("over both", by_both, x / x.sum())


def rule_30(pmap: Pmap) -> None:
    """A line of cells in eight pieces; in a step a piece needs one cell of each neighbour."""
    send_right = [(k, (k + 1) % ROWS) for k in range(ROWS)]
    send_left = [(target, source) for source, target in send_right]

    @pmap(axis_name="i")
    def step(cells: Tensor) -> Tensor:
        from_left = tp.ppermute(cells[-1:], "i", send_right)
        from_right = tp.ppermute(cells[:1], "i", send_left)
        wider = torch.cat([from_left, cells, from_right])
        return wider[:-2] ^ (wider[1:-1] | wider[2:])

    line = np.zeros(CELLS, dtype=bool)
    line[CELLS // 2] = True
    pieces = local_rows(torch.from_numpy(line.reshape(ROWS, -1)))
    for generation in range(GENERATIONS + 1):
        whole = all_gather(pieces, tiled=True).flatten()
        picture = "".join("*" if cell else " " for cell in whole.tolist())
        assert picture == "".join(np.where(line, "*", " ")), f"generation {generation} differs"
        say(picture)
        pieces = step(pieces)
        line = np.roll(line, 1) ^ (line | np.roll(line, -1))


def gradients(pmap: Pmap) -> None:
    @pmap
    def outer(x: Tensor) -> Tensor:
        y = torch.sin(x)

        @pmap
        def inner(z: Tensor) -> Tensor:
            return torch.cos(z) * torch.tan(y.sum()) * torch.tanh(x).sum()

        return tp.grad(lambda w: inner(w).sum())(x)

    def plain(x: Tensor) -> Tensor:
        """The same for the whole array, with the derivative of cos written out."""
        scale = torch.tan(torch.sin(x).sum(1, keepdim=True)) * torch.tanh(x).sum(1, keepdim=True)
        return -torch.sin(x) * scale

    x = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
    check("pmap in grad in pmap", outer(local_rows(x)), plain(x))
    gradient = tp.grad(lambda x: outer(x).sum())(local_rows(x))
    check("its gradient", gradient, torch.func.grad(lambda x: plain(x).sum())(x))


def main() -> None:
    parser = argparse.ArgumentParser(description="JAX's Pmap Cookbook on torch.")
    parser.add_argument("--devices", type=int, help="default: every GPU, or two cores")
    parser.add_argument("--no-compile", action="store_true", help="run operation by operation")
    parser.add_argument("--quick", dest="no_compile", action="store_true", help="the same")
    args = parser.parse_args()

    if tp.process_count() == 1:
        tp.init(args.devices or (2 if tp.default_backend() == "cpu" else None))
    pmap = functools.partial(tp.pmap, compile=not args.no_compile)
    parts = (pure_maps, random_matrices, collectives, rule_30, gradients)
    hidden = tp.process_index() != 0 or None  # None: shown on a terminal only
    for part in tqdm(parts, unit="part", disable=hidden, leave=False):
        part(pmap)
    say("ok")


if __name__ == "__main__":
    main()
