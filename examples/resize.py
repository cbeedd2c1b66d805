"""Training goes on when a device is lost, with those that remain (5 s).

    python examples/resize.py [--devices 4] [--quick]

A worker process ends in the middle of a step, as if the system had killed it. ``tp.resize`` leaves
its device out. The weights and the momentum from before that step have copies on the other devices,
so the step is made again on these, and the run goes on to the numbers of one device.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor

import torchpmap as tp

parser = argparse.ArgumentParser(description="Lose a device, and go on.")
parser.add_argument("--devices", type=int, default=4, choices=(2, 3, 4), help="CPU cores")
parser.add_argument("--quick", action="store_true", help="10 steps instead of 40")
args = parser.parse_args()

STEPS = 10 if args.quick else 40
FAILS_AT = STEPS // 2
generator = torch.Generator().manual_seed(0)
X = torch.randn(48, 3, dtype=torch.float64, generator=generator)
Y = X @ torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64)


def loss_of(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (x @ w - y).square().mean()


def moved(w: Tensor, momentum: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    momentum = 0.8 * momentum + grad
    return w - 0.05 * momentum, momentum


def step(w: Tensor, momentum: Tensor, x: Tensor, y: Tensor, fails: bool) -> tuple[Tensor, Tensor]:
    """One device's part; what it returns is the same on all."""
    if fails and int(tp.axis_index("i")) == 1:
        os._exit(1)  # this process ends here
    return moved(w, momentum, tp.pmean(torch.func.grad(loss_of)(w, x, y), "i"))


mapped = tp.pmap(
    step,
    "i",
    in_axes=(None, None, 0, 0),
    out_axes=None,
    static_broadcasted_argnums=4,
    compile=False,  # a compiled step has no os._exit
)


def cut(rows: Tensor) -> Tensor:
    """One part for each of the devices that there are now."""
    return rows.unflatten(0, (tp.device_count(), -1))


tp.init(num_devices=args.devices, device_type="cpu")
w, momentum = tp.replicate((torch.zeros(3, dtype=torch.float64),) * 2)
done, has_failed = 0, False
while done < STEPS:
    try:
        fails = done == FAILS_AT and not has_failed
        w, momentum = tp.block_until_ready(mapped(w, momentum, cut(X), cut(Y), fails))
        done += 1
    except tp.WorkerDied as death:
        has_failed = True
        print(f"step {done}: device {death.rank} of {tp.device_count()} is lost")
        tp.resize([device for device in tp.devices() if device.id != death.rank])
        print(f"going on with {tp.device_count()}")

alone, its_momentum = torch.zeros(2, 3, dtype=torch.float64)
for _ in range(STEPS):
    alone, its_momentum = moved(alone, its_momentum, torch.func.grad(loss_of)(alone, X, Y))
torch.testing.assert_close(w.cpu(), alone, rtol=1e-12, atol=1e-12)
print(f"after {done} steps the weights are those of one device, to 1e-12")
print("ok")
