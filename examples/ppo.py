"""Reinforcement learning on every device: PPO learns to balance a pole (1 min).

    python examples/ppo.py [--devices 4] [--quick] [--updates 40] [--no-compile]
    torchrun --nproc-per-node=4 examples/ppo.py

Proximal policy optimization (Schulman et al. 2017), as programs for JAX's ``pmap`` write it: the
environments are tensors too. So a whole update is one function, which is one call: it plays all
environments for some steps (``scan``), finds the advantages from the last step to the first
(``scan`` with ``reverse``), and trains for some epochs of minibatches (``scan`` in ``scan``). Every
device plays its own part of the environments (``vmap``); ``pmean`` averages the gradients, so all
devices have the same networks. Random numbers come from keys, which are data.

The environment is the cart with a pole of Barto, Sutton and Anderson (1983), with the constants of
OpenAI's Gym. An episode ends when the pole falls or the cart leaves the track, and after 200 steps.

The first update is compared with that of one device that plays all environments, and the episodes
must become longer. The learning curve is written to ``outputs/``.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils._pytree import tree_map
from tqdm import trange

import torchpmap as tp
from torchpmap.multihost import all_gather, local_rows

ENVIRONMENTS, STEPS, EPOCHS, MINIBATCHES = 64, 64, 4, 4
DISCOUNT, LAMBDA, CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.99, 0.95, 0.2, 0.5, 0.01
GRAVITY, CART, POLE, HALF_LENGTH, FORCE, TICK = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02  # SI units
LONGEST = 200
OPTIMIZER = tp.optim.functional(torch.optim.Adam, lr=2e-3, eps=1e-5)

Params = dict[str, Tensor]


class Step(NamedTuple):
    """What is remembered of a step, [steps, environments, ...]."""

    cart: Tensor
    action: Tensor
    log_prob: Tensor
    value: Tensor
    ended: Tensor


def reset(key: Tensor) -> Tensor:
    """float64[5]: place and speed of the cart, angle and turning rate of the pole, steps so far"""
    start = tp.random.uniform(key, (4,), torch.float64, minval=-0.05, maxval=0.05)
    return torch.cat([start, start.new_zeros(1)])


def play(cart: Tensor, action: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """(the cart after a step, whether the episode has ended: then it is the start of the next)"""
    place, speed, angle, rate, age = cart.unbind()
    sin, cos, mass = torch.sin(angle), torch.cos(angle), CART + POLE
    push = (FORCE * (2 * action - 1) + POLE * HALF_LENGTH * rate**2 * sin) / mass
    turning = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4 / 3 - POLE * cos**2 / mass))
    pull = push - POLE * HALF_LENGTH * turning * cos / mass
    place, angle = place + TICK * speed, angle + TICK * rate
    after = torch.stack([place, speed + TICK * pull, angle, rate + TICK * turning, age + 1])
    ended = (place.abs() > 2.4) | (angle.abs() > math.radians(12)) | (after[4] == LONGEST)
    return torch.where(ended, reset(key), after), ended


def first_params(key: Tensor) -> Params:
    shapes = {
        f"{name}{k}": shape
        for name, last in (("actor", 2), ("critic", 1))
        for k, shape in enumerate([(4, 32), (32, 32), (32, last)])
    }
    keys = tp.random.split(key, len(shapes))
    return {
        name: tp.random.normal(key, shape, torch.float64) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def act(params: Params, cart: Tensor) -> tuple[Tensor, Tensor]:
    """(the logarithms of the probabilities of both actions, the value)"""

    def network(name: str) -> Tensor:
        hidden = torch.tanh(cart[..., :4] @ params[f"{name}0"])
        return torch.tanh(hidden @ params[f"{name}1"]) @ params[f"{name}2"]

    return torch.log_softmax(network("actor"), -1), network("critic").squeeze(-1)


def picked(table: Tensor, action: Tensor) -> Tensor:
    return table.gather(-1, action[..., None]).squeeze(-1)


def rollout(params: Params, carts: Tensor, key: Tensor) -> tuple[Tensor, Step]:
    def step(carts: Tensor, key: Tensor) -> tuple[Tensor, Step]:
        for_action, for_resets = tp.random.split(key)
        table, value = act(params, carts)
        action = tp.random.categorical(for_action, table)
        after, ended = tp.vmap(play)(carts, action, tp.random.split(for_resets, len(carts)))
        return after, Step(carts, action, picked(table, action), value, ended)

    return tp.scan(step, carts, tp.random.split(key, STEPS))


def advantages(steps: Step, last_value: Tensor) -> Tensor:
    """Generalized advantage estimation (Schulman et al. 2016); each step has a reward of 1."""

    def back(later: tuple[Tensor, Tensor], now: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
        advantage, next_value = later
        value, goes_on = now
        error = 1 + DISCOUNT * next_value * goes_on - value
        advantage = error + DISCOUNT * LAMBDA * goes_on * advantage
        return (advantage, value), advantage

    start = torch.zeros_like(last_value), last_value
    return tp.scan(back, start, (steps.value, (~steps.ended).double()), reverse=True)[1]


def loss(params: Params, steps: Step, advantage: Tensor) -> Tensor:
    """Of a minibatch: the clipped objective, the error of the values, and the entropy."""
    table, value = act(params, steps.cart)
    ratio = torch.exp(picked(table, steps.action) - steps.log_prob)
    scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = torch.minimum(ratio * scaled, ratio.clamp(1 - CLIP, 1 + CLIP) * scaled).mean()
    error = (value - steps.value - advantage).square().mean()
    entropy = -(table.exp() * table).sum(-1).mean()
    return VALUE_WEIGHT * error - gain - ENTROPY_WEIGHT * entropy


def update(state: Any, carts: Tensor, key: Tensor) -> tuple[Any, Tensor, Tensor]:
    """(networks and Adam's state, carts, the mean length of the episodes that have ended)"""
    for_rollout, for_epochs = tp.random.split(key)
    carts, steps = rollout(state[0], carts, for_rollout)
    batch = steps, advantages(steps, act(state[0], carts)[1])
    batch = tree_map(lambda x: x.flatten(0, 1), batch)

    def minibatch(state: Any, part: Any) -> tuple[Any, None]:
        params, moments = state
        gradients = tp.pmean(tp.grad(loss)(params, *part), "devices")
        gradients, _ = tp.optim.clip_grad_norm(gradients, 0.5)
        return OPTIMIZER.update(gradients, moments, params), None

    def epoch(state: Any, key: Tensor) -> tuple[Any, None]:
        order = tp.random.permutation(key, len(batch[1]))
        parts = tree_map(lambda x: x[order].unflatten(0, (MINIBATCHES, -1)), batch)
        return tp.scan(minibatch, state, parts)

    state, _ = tp.scan(epoch, state, tp.random.split(for_epochs, EPOCHS))
    lengths = ((steps.cart[..., 4] + 1) * steps.ended).sum()
    total, count = tp.psum((lengths, steps.ended.sum()), "devices")
    return state, carts, total / count.clamp(min=1)


def draw(curve: list[float], path: Path) -> None:
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.plot([(k + 1) * ENVIRONMENTS * STEPS / 1000 for k in range(len(curve))], curve, ".-")
    axes.axhline(LONGEST, color="grey", linewidth=1, linestyle="--")
    axes.set(xlabel="steps played, in thousands", ylabel="mean length of an episode", ylim=(0, 210))
    axes.set_title(f"PPO on {tp.device_count()} devices: how long the pole stays up")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to balance a pole on every device.")
    parser.add_argument("--devices", type=int, choices=(1, 2, 4, 8, 16))
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument(
        "--quick", dest="updates", action="store_const", const=10, help="10 updates"
    )
    parser.add_argument("--no-compile", action="store_true", help="run operation by operation")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for the PNG")
    args = parser.parse_args()

    if tp.process_count() == 1:
        tp.init(args.devices or (4 if tp.default_backend() == "cpu" else None))
    n = tp.device_count()
    for_params, for_carts, for_updates = tp.random.split(tp.random.key(0), 3)
    params = first_params(for_params)
    state = params, OPTIMIZER.init(params)
    starts = tp.random.split(for_carts, ENVIRONMENTS)
    carts = tp.vmap(reset)(starts).unflatten(0, (n, -1))
    keys = [tp.random.split(key, n) for key in tp.random.split(for_updates, args.updates)]

    axes = {"axis_name": "devices", "in_axes": (None, 0, 0), "out_axes": (None, 0, None)}
    step = tp.pmap(update, **axes, donate_argnums=(0, 1), compile=not args.no_compile)
    start, carts, lengths = (state, carts), local_rows(carts), []
    hidden = tp.process_index() != 0 or None  # None: shown on a terminal only
    for k in trange(args.updates, unit="update", disable=hidden, leave=False):
        state, carts, length = step(state, carts, local_rows(keys[k]))
        lengths.append(length)
        if k == 0:
            first = tree_map(lambda x: x.cpu(), state), all_gather(carts, tiled=True), length.cpu()
    curve = [length.item() for length in lengths]
    if tp.process_index() != 0:
        return  # one process reports

    print(f"{ENVIRONMENTS} environments on {n} devices, {args.updates} updates")
    on_one_device = tp.vmap(update, **axes)(*start, keys[0])
    torch.testing.assert_close(first, on_one_device, rtol=0, atol=1e-9)
    print("the first update is that of one device with all environments, to 1e-9")
    before, after = curve[0], sum(curve[-3:]) / 3
    print(f"mean length of an episode: {before:.1f} at first, {after:.1f} in the last 3 updates")
    assert after > 4 * before, curve
    args.output.mkdir(parents=True, exist_ok=True)
    draw(curve, args.output / "ppo.png")
    print(f"wrote {args.output}/ppo.png")
    print("ok")


if __name__ == "__main__":
    main()
