"""Train 64 small networks at once: pmap over the devices, vmap over those of a device (1 min).

    python examples/ensembles.py [--devices 2] [--quick] [--steps 300] [--no-compile]
    torchrun --nproc-per-node=2 examples/ensembles.py

Each member has its own first weights, its own learning rate and its own weighting of the data (the
Bayesian bootstrap). One call trains all of them by one step of Adam. The parameters and Adam's
state are donated: they never leave the devices, and each step reuses their memory.

Near the data the mean of the members must be better than the average member. Far from the data the
spread of the members must be larger. A picture of both, and of all members on their devices, is
written to ``outputs/``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import trange

import torchpmap as tp
from torchpmap.multihost import all_gather, local_rows

MEMBERS, HIDDEN = 64, 16
BOTH = ("devices", "members")

Params = dict[str, Tensor]
optimizer = tp.optim.functional(torch.optim.Adam)


def truth(x: Tensor) -> Tensor:
    return torch.sin(3 * x) + 0.5 * x


def make_data() -> tuple[Tensor, Tensor]:
    """Return 60 noisy values of the function, none of them between 0 and 1."""
    random = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-2, 0, 40), torch.linspace(1, 2, 20)])
    return x, truth(x) + 0.2 * torch.randn(len(x), generator=random)


def initialize(key: Tensor) -> tuple[Params, dict[str, Any], Tensor]:
    """Return one member's parameters, state of Adam, and weights of the 60 data points."""
    first, shift, middle, last, points = tp.random.split(key, 5)
    params = {
        "w1": tp.random.normal(first, (1, HIDDEN)) * 2,
        "b1": tp.random.uniform(shift, (HIDDEN,), minval=-2, maxval=2),
        "w2": tp.random.normal(middle, (HIDDEN, HIDDEN)) / HIDDEN**0.5,
        "b2": torch.zeros(HIDDEN),
        "w3": tp.random.normal(last, (HIDDEN, 1)) / HIDDEN**0.5,
    }
    return params, optimizer.init(params), tp.random.exponential(points, (60,))


def predict(params: Params, x: Tensor) -> Tensor:
    hidden = torch.tanh(x[:, None] @ params["w1"] + params["b1"])
    hidden = torch.tanh(hidden @ params["w2"] + params["b2"])
    return (hidden @ params["w3"])[:, 0]


class Prediction(NamedTuple):
    """Mean and spread of the ensemble at the points x, and the average member's squared error."""

    mean: Tensor
    spread: Tensor
    members_error: Tensor


def train(num_devices: int, num_steps: int, compile: Any = True) -> tuple[Params, Any]:
    """Return the parameters, [device, member, ...], and ``ask(params, x) -> Prediction``."""
    x_data, y_data = make_data()

    def loss(params: Params, weights: Tensor) -> Tensor:
        return (weights * (predict(params, x_data) - y_data) ** 2).mean()

    def step(params: Params, state: Any, weights: Tensor, lr: Tensor) -> tuple[Params, Any]:
        grads = tp.grad(loss)(params, weights)
        return optimizer.update(grads, state, params, lr=lr)

    def summarize(params: Params, x: Tensor) -> Prediction:
        y = predict(params, x)
        mean = tp.pmean(y, BOTH)
        spread = tp.pmean((y - mean) ** 2, BOTH).sqrt()
        return Prediction(mean, spread, tp.pmean(((y - truth(x)) ** 2).mean(), BOTH))

    mapped = {"axis_name": "devices", "devices": tp.devices()[:num_devices], "compile": compile}
    train_all = tp.pmap(tp.vmap(step, axis_name="members"), donate_argnums=(0, 1), **mapped)
    summarize_all = tp.vmap(summarize, axis_name="members", in_axes=(0, None), out_axes=None)
    ask = tp.pmap(summarize_all, in_axes=(0, None), out_axes=None, **mapped)

    grid = (num_devices, MEMBERS // num_devices)
    keys = tp.random.split(tp.random.key(0), MEMBERS).reshape(*grid, 2)
    rates = torch.logspace(-2.5, -1.5, MEMBERS).reshape(grid)
    start = tp.pmap(tp.vmap(initialize), **{**mapped, "compile": False})  # runs only once
    params, state, weights = start(local_rows(keys))
    rates = tp.device_put(local_rows(rates), tp.local_devices()[:num_devices])
    hidden = tp.process_index() != 0 or None  # None: shown on a terminal only
    for _ in trange(num_steps, unit="step", disable=hidden, leave=False):
        params, state = train_all(params, state, weights, rates)
    return params, ask


def draw(
    x: Tensor, prediction: Prediction, members: Tensor, devices: list[tp.Device], path: Path
) -> None:
    """Draw the ensemble, and each member: one row, between the borders of its device."""
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True)
    mean, spread = prediction.mean, prediction.spread
    axes.fill_between(x, mean - 2 * spread, mean + 2 * spread, alpha=0.25, label="2 x spread")
    axes.plot(x, mean, label="mean of 64 networks")
    axes.plot(x, truth(x), "k--", linewidth=1, label="truth")
    axes.plot(*make_data(), "k.", markersize=4, label="data")
    axes.set(ylabel="y", title="The ensemble is unsure where there are no data")
    axes.legend()

    edges = (float(x[0]), float(x[-1]), MEMBERS, 0)
    style = {"cmap": "RdBu", "vmin": -1, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}
    image = below.imshow(members - mean, extent=edges, **style)
    per_device = MEMBERS / len(devices)
    for border in range(1, len(devices)):
        below.axhline(border * per_device, color="black", linewidth=1)
    middles = [(k + 0.5) * per_device for k in range(len(devices))]
    below.set_yticks(middles, [str(device) for device in devices])
    below.tick_params(axis="y", length=0)
    below.set(xlabel="x", title=f"{MEMBERS} networks on {len(devices)} devices, a row for each")
    figure.colorbar(image, ax=below, label="network - mean", extend="both")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an ensemble on every device.")
    parser.add_argument("--devices", type=int, choices=(1, 2, 4, 8, 16, 32, 64))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", dest="steps", action="store_const", const=150, help="150 steps")
    parser.add_argument("--no-compile", action="store_true", help="run operation by operation")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for the PNG")
    args = parser.parse_args()

    if tp.process_count() == 1:
        tp.init(args.devices or (2 if tp.default_backend() == "cpu" else None))
    n = tp.device_count()  # under torchrun: its processes
    params, ask = train(n, args.steps, not args.no_compile)
    seen = torch.cat([torch.linspace(-2, 0, 81), torch.linspace(1, 2, 41)])
    unseen, x = torch.linspace(0.3, 0.7, 21), torch.linspace(-2.2, 2.2, 200)
    answers = [tp.unreplicate(ask(params, at)) for at in (seen, unseen, x)]  # in all processes
    each = tp.pmap(tp.vmap(predict, in_axes=(0, None)), in_axes=(0, None), compile=False)
    members = all_gather(each(params, x), tiled=True).cpu().flatten(0, 1)
    if tp.process_index() != 0:
        return  # one process reports

    print(f"{MEMBERS} networks on {n} devices")
    (mean, spread, members_error), far, picture = answers
    error = ((mean - truth(seen)) ** 2).mean()
    print(f"squared error: average member {members_error:.4f}, ensemble {error:.4f}")
    assert error < 0.8 * members_error
    # The average member is worse than the ensemble by exactly the variance between the members.
    torch.testing.assert_close(members_error, error + (spread**2).mean())

    gap = far.spread.mean().item()
    print(f"spread of the members: {spread.mean():.3f} near data, {gap:.3f} far from it")
    assert gap > 2 * spread.mean().item()

    args.output.mkdir(parents=True, exist_ok=True)
    draw(x, picture, members, tp.devices(), args.output / "ensembles.png")
    print(f"wrote {args.output}/ensembles.png")
    print("ok")


if __name__ == "__main__":
    main()
