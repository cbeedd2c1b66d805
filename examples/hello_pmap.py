"""First steps: map a function over the devices, see where the result lives, let them talk (20 s).

    python examples/hello_pmap.py [--devices 2] [--quick]
    torchrun --nproc-per-node=2 examples/hello_pmap.py

No launcher and no ``if __name__ == "__main__"`` are needed: torchpmap starts one worker process per
device by itself. Here the devices are CPU cores. Under torchrun every process runs this file
and is one device: ``local_rows`` takes its rows of a value that all processes have, and
``all_gather`` puts the results together again. With one process both change nothing.
"""

from __future__ import annotations

import argparse
import functools
import math

import torch

import torchpmap as tp
from torchpmap.multihost import all_gather, local_rows

parser = argparse.ArgumentParser(description="First steps with pmap.")
parser.add_argument("--devices", type=int, default=2, choices=(1, 2, 4), help="CPU cores")
parser.add_argument("--quick", action="store_true", help="compile one function only")
args = parser.parse_args()

if tp.process_count() == 1:
    tp.init(num_devices=args.devices, device_type="cpu")
pmap = functools.partial(tp.pmap, compile=not args.quick)


def say(*words: object) -> None:
    """Print once, not in every process."""
    if tp.process_index() == 0:
        print(*words)


def check(title: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    """Print the result and stop the program unless it is what plain torch computes."""
    result = all_gather(result, tiled=True)
    torch.testing.assert_close(result, expected)
    say(f"{title}: {result.tolist()}")


say("devices:", *tp.devices())
x = torch.arange(4.0)

# The function sees a scalar, one row of x. Each of two devices has two consecutive rows, and the
# four results are stacked again.
double = pmap(lambda x: x * 2)
doubled = double(local_rows(x))
check("doubled", doubled, x * 2)

# The result has not moved: its rows are still in the memory of the devices.
numbers = torch.tensor(sorted(device.id for device in doubled.devices()))
check("doubled lives on devices", numbers, torch.arange(tp.device_count()))

# You can pass it to the next mapped function, or use it like any tensor.
check("doubled again", double(doubled), x * 4)
check("plus one", doubled + 1, x * 2 + 1)


# A named axis lets the rows talk: psum is the sum over all of them, wherever they are.
@pmap(axis_name="i")
def normalize(x: torch.Tensor) -> torch.Tensor:
    return x / tp.psum(x, "i")


check("normalized", normalize(local_rows(x)), x / x.sum())

# Every row knows its place on the axis, and can be passed to a neighbour.
place = pmap(lambda x: x + 10 * tp.axis_index("i"), axis_name="i")
check("axis index", place(local_rows(x)), x + 10 * torch.arange(4))

ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
rotate = pmap(lambda x: tp.ppermute(x, "i", ring), axis_name="i")
check("rotated", rotate(local_rows(x)), x.roll(1))

# An argument that every device gets whole has in_axes None; a closure works as well.
weights = torch.tensor([1.0, 10.0, 100.0])
rows = torch.arange(12.0).reshape(4, 3)
dot = pmap(lambda row, weights: row @ weights, in_axes=(0, None))
check("row by row", dot(local_rows(rows), weights), rows @ weights)
check("by closure", pmap(lambda row: row @ weights)(local_rows(rows)), rows @ weights)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Eight element-wise operations, which the compiler turns into one loop over memory."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# Functions are compiled by default. compile=False runs them operation by operation, for debugging.
grid = local_rows(torch.linspace(-3, 3, 4000).reshape(4, 1000))
compiled = tp.pmap(gelu)(grid)
eager = tp.pmap(gelu, compile=False)(grid)
torch.testing.assert_close(torch.as_tensor(compiled.numpy()), torch.as_tensor(eager.numpy()))
# On a busy machine plain torch's first result was seen to be off in the fifth digit (2.13, CPU).
torch.testing.assert_close(torch.as_tensor(compiled.numpy()), gelu(grid), rtol=1e-4, atol=1e-4)
say("compiled, eager and plain torch agree on 4000 values of gelu")

say("ok")
