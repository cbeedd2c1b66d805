"""Training goes on when a device is lost, with those that remain (10 s).

    python examples/resize.py [--devices 4] [--quick] [--no-compile]

A worker process ends in the middle of training, as if the system had killed it. ``tp.resize``
leaves its device out, and the run goes on. Its losses are those of a run that had one device fewer
from the beginning: once with a mapped function, once with ``tp.jit``, a module and an optimizer.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
from torch import Tensor

import torchpmap as tp

parser = argparse.ArgumentParser(description="Lose a device, and go on.")
parser.add_argument("--devices", type=int, default=4, choices=(2, 3, 4), help="CPU cores")
parser.add_argument("--quick", action="store_true", help="10 steps instead of 40")
parser.add_argument("--no-compile", action="store_true", help="run graphs uncompiled")
args = parser.parse_args()

STEPS = 10 if args.quick else 40
FAILS_AT = STEPS // 2
generator = torch.Generator().manual_seed(0)
X = torch.randn(48, 3, dtype=torch.float64, generator=generator)
Y = X @ torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64)


def go_on_without(lost: int) -> None:
    print(f"step {FAILS_AT}: device {lost} of {tp.device_count()} is lost")
    tp.resize([device for device in tp.devices() if device.id != lost])


def loss_of(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (x @ w - y).square().mean()


def step(w: Tensor, m: Tensor, x: Tensor, y: Tensor, fails: bool) -> tuple[Tensor, ...]:
    """One device's part; what it returns is the same on all."""
    if fails and int(tp.axis_index("i")) == 1:
        os._exit(1)  # this process ends here
    grad, loss = tp.pmean(torch.func.grad_and_value(loss_of)(w, x, y), "i")
    m = 0.8 * m + grad
    return w - 0.05 * m, m, loss


mapped = tp.pmap(
    step,
    "i",
    in_axes=(None, None, 0, 0, None),
    out_axes=None,
    static_broadcasted_argnums=4,
    compile=False,  # a compiled step has no os._exit
)


def with_pmap(fails: bool) -> list[float]:
    """A step that failed is made again: the weights from before it are on the other devices."""
    w, m = tp.replicate((torch.zeros(3, dtype=torch.float64),) * 2)
    losses: list[float] = []
    while len(losses) < STEPS:
        x, y = (rows.unflatten(0, (tp.device_count(), -1)) for rows in (X, Y))
        try:
            w, m, loss = mapped(w, m, x, y, fails and len(losses) == FAILS_AT)
            losses.append(loss.item())
        except tp.WorkerDied as death:
            go_on_without(death.rank)
            fails = False
    return losses


pid_of = tp.pmap(lambda x: torch.tensor(os.getpid()), compile=False)


def with_jit(fails: bool) -> list[float]:
    """The device is lost between two steps: this one updates parameters in place."""
    torch.manual_seed(0)
    model = tp.replicate(torch.nn.Linear(3, 1, dtype=torch.float64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    @tp.jit(compile=not args.no_compile)
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    losses: list[float] = []
    while len(losses) < STEPS:
        if fails and len(losses) == FAILS_AT:
            pids = pid_of(torch.zeros(tp.device_count()))
            os.kill(int(pids[1]), signal.SIGKILL)
            go_on_without(1)
        losses.append(step(tp.shard_batch(X), tp.shard_batch(Y)).item())
    return losses


for train in (with_pmap, with_jit):
    tp.init(num_devices=args.devices, device_type="cpu")
    found = train(fails=True)
    tp.init(num_devices=args.devices - 1, device_type="cpu")
    torch.testing.assert_close(found, train(fails=False), rtol=1e-9, atol=1e-12)
    name = train.__name__.replace("_", " ")
    print(f"{name}: the losses are those of {args.devices - 1} devices, {found[-1]:.4f} at the end")
print("ok")
