"""pmap together with grad and vmap: a regression, an image filter, a coupled loss (20 s).

    python examples/compose.py [--devices 2] [--quick]
    torchrun --nproc-per-node=2 examples/compose.py

Each part is checked against plain torch. The data have four rows, two on each of two devices.
"""

from __future__ import annotations

import argparse
import functools

import torch

import torchpmap as tp
from torchpmap.multihost import all_gather, local_rows

parser = argparse.ArgumentParser(description="pmap together with grad and vmap.")
parser.add_argument("--devices", type=int, default=2, choices=(1, 2, 4), help="CPU cores")
parser.add_argument("--quick", action="store_true", help="compile nothing, and train 50 steps")
args = parser.parse_args()

if tp.process_count() == 1:
    tp.init(num_devices=args.devices, device_type="cpu")
pmap = functools.partial(tp.pmap, compile=not args.quick)

Params = dict[str, torch.Tensor]


def say(*words: object) -> None:
    """Print once, not in every process."""
    if tp.process_index() == 0:
        print(*words)


def squared_error(params: Params, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((x @ params["w"] + params["b"] - y) ** 2).mean()


# Part 1, linear regression: each of the four parts of the data has its own loss, and pmean averages
# over the parts. in_axes: every device gets the whole parameters (None), and its rows of the data
# (0). out_axes: after pmean the loss and the gradients are equal everywhere, so None returns one
# copy of each instead of four.
def loss_and_grads(params: Params, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Params]:
    return tp.pmean(tp.value_and_grad(squared_error)(params, x, y), "devices")


parallel = pmap(loss_and_grads, axis_name="devices", in_axes=(None, 0, 0), out_axes=(None, None))

torch.manual_seed(0)
true_w = torch.tensor([2.0, -3.0, 0.5])
x = torch.randn(4, 25, 3)  # [part, row, feature]
y = x @ true_w + 1.0 + 0.01 * torch.randn(4, 25)
params = {"w": torch.zeros(3), "b": torch.zeros(())}

x_here, y_here = local_rows((x, y))  # of this process; with one process these are all rows
loss, grads = parallel(params, x_here, y_here)
expected_grads, expected_loss = torch.func.grad_and_value(squared_error)(
    params, x.reshape(100, 3), y.reshape(100)
)
torch.testing.assert_close(loss.cpu(), expected_loss)
torch.testing.assert_close(grads["w"].cpu(), expected_grads["w"])
say(f"loss before training: {loss.item():.4f} (the same as on one device)")

for _ in range(50 if args.quick else 200):
    loss, grads = parallel(params, x_here, y_here)
    params = {name: params[name] - 0.1 * grads[name] for name in params}

say(f"loss after training:  {loss.item():.6f}")
say(f"w = {[round(v, 2) for v in params['w'].tolist()]}, b = {params['b'].item():.2f}")
torch.testing.assert_close(params["w"].cpu(), true_w, atol=0.01, rtol=0)
torch.testing.assert_close(params["b"].cpu(), torch.tensor(1.0), atol=0.01, rtol=0)


# Part 2, vmap inside pmap: a filter written for one patch of an image. vmap runs it over the
# patches of a device, pmap over the devices. Both axes have names, so a patch can be scaled by the
# darkest and brightest values of the whole image.
def sharpen(patch: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    out = torch.nn.functional.conv2d(patch[None, None], kernel[None, None], padding=1)[0, 0]
    low, high = tp.pmin(out.min(), ("rows", "columns")), tp.pmax(out.max(), ("rows", "columns"))
    return (out - low) / (high - low)


filter_image = pmap(
    tp.vmap(sharpen, in_axes=(0, None), axis_name="columns"), axis_name="rows", in_axes=(0, None)
)

image = torch.rand(32, 32)
patches = image.reshape(4, 8, 4, 8).transpose(1, 2).contiguous()  # [row, column, 8, 8]
kernel = torch.tensor([[0.0, -1.0, 0.0], [-1.0, 5.0, -1.0], [0.0, -1.0, 0.0]])
sharp = all_gather(filter_image(local_rows(patches), kernel), tiled=True)

plain = torch.nn.functional.conv2d(
    patches.reshape(16, 1, 8, 8), kernel[None, None], padding=1
).reshape(4, 4, 8, 8)
plain = (plain - plain.min()) / (plain.max() - plain.min())
torch.testing.assert_close(sharp, plain)
low, high = sharp.min().item(), sharp.max().item()
say(f"16 patches on {tp.device_count()} devices: values from {low:.1f} to {high:.1f}")


# Part 3, gradients of a collective: each row is one number, and the loss couples all rows.
def coupled(x: torch.Tensor) -> torch.Tensor:
    return tp.psum(x, "i") ** 2


v = torch.tensor([1.0, 2.0, 3.0, 4.0])
gradient = pmap(tp.grad(coupled), axis_name="i")(local_rows(v))
gradient = all_gather(gradient, tiled=True)
say("gradient of psum(x) ** 2, summed over the four rows:", gradient.tolist())
torch.testing.assert_close(gradient, torch.full((4,), 4 * 2 * v.sum().item()))

# Only the row with the largest value can change the maximum.
gradient = pmap(tp.grad(lambda x: tp.pmax(x, "i")), axis_name="i")(local_rows(v))
gradient = all_gather(gradient, tiled=True)
say("gradient of pmax(x), summed over the four rows:", gradient.tolist())
torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, 0.0, 4.0]))

say("ok")
