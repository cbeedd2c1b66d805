"""First steps: map a function over the devices, see where the result lives, let the devices talk.

Run it with ``python examples/hello_pmap.py``. No launcher and no ``if __name__ == "__main__"`` are
needed: torchpmap starts one worker process per device by itself. Here the devices are CPU cores.
"""

from __future__ import annotations

import math

import torch

import torchpmap as tp

tp.init(num_devices=4)


def check(title: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    """Print the result and stop the program unless it is what plain torch computes."""
    torch.testing.assert_close(torch.tensor(result.tolist()), expected)
    print(f"{title}: {result.tolist()}")


print("devices:", *tp.devices())
x = torch.arange(4.0)

# One row of x per device: the function sees a scalar, the four results are stacked again.
doubled = tp.pmap(lambda x: x * 2)(x)
check("doubled", doubled, x * 2)

# The result has not moved: row k is still in the memory of device k.
print("doubled lives on:", *sorted(str(device) for device in doubled.devices()))
assert len(doubled.devices()) == 4

# It can go straight into the next pmapped function, or be used like any tensor.
check("doubled again", tp.pmap(lambda x: x * 2)(doubled), x * 4)
check("plus one", doubled + 1, x * 2 + 1)


# A named axis lets the devices talk: psum is the sum over all of them.
@tp.pmap(axis_name="i")
def normalize(x: torch.Tensor) -> torch.Tensor:
    return x / tp.psum(x, "i")


check("normalized", normalize(x), x / x.sum())

# Every device knows its place on the axis, and can pass values to its neighbour.
place = tp.pmap(lambda x: x + 10 * tp.axis_index("i"), axis_name="i")
check("axis index", place(x), x + 10 * torch.arange(4))

ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
check("rotated", tp.pmap(lambda x: tp.ppermute(x, "i", ring), axis_name="i")(x), x.roll(1))

# An argument that every device gets whole has the axis None; a closure works as well.
weights = torch.tensor([1.0, 10.0, 100.0])
rows = torch.arange(12.0).reshape(4, 3)
dot = tp.pmap(lambda row, weights: row @ weights, in_axes=(0, None))
check("row by row", dot(rows, weights), rows @ weights)
check("by closure", tp.pmap(lambda row: row @ weights)(rows), rows @ weights)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Eight element-wise operations, which the compiler turns into one loop over memory."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# Functions are compiled by default. compile=False runs them operation by operation, for debugging.
grid = torch.linspace(-3, 3, 4000).reshape(4, 1000)
compiled = tp.pmap(gelu)(grid)
eager = tp.pmap(gelu, compile=False)(grid)
torch.testing.assert_close(torch.as_tensor(compiled.numpy()), torch.as_tensor(eager.numpy()))
torch.testing.assert_close(torch.as_tensor(compiled.numpy()), gelu(grid))
print("compiled, eager and plain torch agree on", grid.numel(), "values of gelu")

print("ok")
