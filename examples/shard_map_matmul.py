"""Three ways to multiply matrices that are cut over devices, and what each sends (10 s).

    python examples/shard_map_matmul.py [--devices 4] [--quick] [--size 512] [--no-compile]
    torchrun --nproc-per-node=4 examples/shard_map_matmul.py

* ``sums``: both matrices are cut along the dim that is summed. Every device multiplies its parts,
  and ``psum_scatter`` adds up the results.
* ``ring``: both are cut into blocks of rows. The blocks of the second matrix go round, and every
  device multiplies the one that it has with its columns of the first.
* ``grid``: both lie on a mesh of rows and columns. A device gathers its row of blocks of the first
  matrix and its column of blocks of the second, as the SUMMA algorithm does panel by panel.

Each product is compared with that of one device, and the bytes that a device sends are counted from
the graph.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import torchpmap as tp
from torchpmap import P


def sums(a: Tensor, b: Tensor) -> Tensor:
    """float[n, k / d], float[k / d, m] -> float[n / d, m]"""
    return tp.psum_scatter(a @ b, "d", tiled=True)


def ring(a: Tensor, b: Tensor) -> Tensor:
    """float[n / d, k], float[k / d, m] -> float[n / d, m]"""
    size, me = tp.axis_size("d"), tp.axis_index("d")
    columns = a.unflatten(1, (size, -1))  # those that meet the block of each device
    total = torch.zeros(a.shape[0], b.shape[1])
    for step in range(size):
        owner = (me - step) % size  # of the block that is here now
        total = total + columns.index_select(1, owner.reshape(1)).squeeze(1) @ b
        if step < size - 1:
            b = tp.ppermute(b, "d", [(k, (k + 1) % size) for k in range(size)])
    return total


def grid(a: Tensor, b: Tensor) -> Tensor:
    """float[n / r, k / c], float[k / r, m / c] -> float[n / r, m / c]"""
    row = tp.all_gather(a, "columns", axis=1, tiled=True)
    column = tp.all_gather(b, "rows", axis=0, tiled=True)
    return row @ column


def ways(num_devices: int, compile: Any = True) -> dict[str, Any]:
    """The three products, mapped over meshes of all devices."""
    line = tp.make_mesh((num_devices,), ("d",))
    num_rows = max(
        r for r in range(1, num_devices + 1) if num_devices % r == 0 and r * r <= num_devices
    )
    square = tp.make_mesh((num_rows, num_devices // num_rows), ("rows", "columns"))
    return {
        "sums": tp.shard_map(
            sums, mesh=line, in_specs=(P(None, "d"), P("d")), out_specs=P("d"), compile=compile
        ),
        "ring": tp.shard_map(ring, mesh=line, in_specs=P("d"), out_specs=P("d"), compile=compile),
        "grid": tp.shard_map(
            grid,
            mesh=square,
            in_specs=P("rows", "columns"),
            out_specs=P("rows", "columns"),
            compile=compile,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Multiply matrices that are cut over devices.")
    parser.add_argument("--devices", type=int, help="default: every GPU, or four CPU devices")
    parser.add_argument("--size", type=int, default=512, help="rows and columns of the matrices")
    parser.add_argument("--quick", dest="size", action="store_const", const=64, help="size 64")
    parser.add_argument("--no-compile", action="store_true", help="run operation by operation")
    args = parser.parse_args()

    if tp.process_count() == 1:
        tp.init(args.devices or (4 if tp.default_backend() == "cpu" else None))
    n = tp.device_count()
    if args.size % n:
        parser.error(f"--size {args.size} must be divisible by {n} devices")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(args.size, args.size, generator=generator) for _ in range(2))

    kept = args.size * args.size * a.element_size() // n
    lines = [f"{n} devices; a device keeps {kept:,} bytes of each matrix"]
    for name, multiply in ways(n, not args.no_compile).items():
        product = tp.multihost.all_gather(multiply(a, b), tiled=True)
        torch.testing.assert_close(product.cpu(), a @ b, rtol=1e-4, atol=1e-3)
        counted = ways(n, {"backend": "eager"})[name]
        cost = tp.debug.cost(counted, a, b)
        kinds = sorted({f"{each.name} over {each.axis}" for each in cost.collectives})
        sent = f"{cost.collective_bytes:,} bytes into {' and '.join(kinds)}"
        lines.append(f"{name}: as on one device; a device sends {sent if kinds else 'nothing'}")
    if tp.process_index() == 0:  # one process reports
        print(*lines, "ok", sep="\n")


if __name__ == "__main__":
    main()
