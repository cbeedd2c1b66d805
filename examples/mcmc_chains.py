"""Sixteen Markov chains over the devices: Hamiltonian Monte Carlo on a known density (1 min).

    python examples/mcmc_chains.py [--devices 2] [--quick] [--samples 500] [--no-compile]
    torchrun --nproc-per-node=2 examples/mcmc_chains.py

Each row of the mapped axis is one chain, with a random key of its own. The chains do not
communicate until the last call, which compares them (R-hat, Gelman and Rubin 1992) with ``pmean``.
Because of its key a chain is the same on one device, two or four.

The target: a ~ N(0, 1), and given a, b ~ N(sin(2 a), 0.5 ** 2). The mean and variance of the
samples are compared with those of the formula.
"""

from __future__ import annotations

import argparse
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import trange

import torchpmap as tp
from torchpmap.multihost import all_gather, local_rows

CHAINS, WARM_UP, SAMPLES_PER_CALL = 16, 50, 5
STEP_SIZE, LEAPFROG_STEPS = 0.25, 5
TRUE_MEAN = torch.tensor([0.0, 0.0], dtype=torch.float64)
# The variance of b is that of sin(2 a), (1 - exp(-8)) / 2, plus 0.25.
TRUE_VARIANCE = torch.tensor([1.0, 0.75 - math.exp(-8) / 2], dtype=torch.float64)


class Summary(NamedTuple):
    """Statistics of all chains together, one value per coordinate."""

    mean: Tensor
    variance: Tensor
    r_hat: Tensor


def potential(position: Tensor) -> Tensor:
    """Minus the logarithm of the density of (a, b), without its constant."""
    a, b = position[0], position[1]
    return 0.5 * a**2 + 2 * (b - torch.sin(2 * a)) ** 2


def leapfrog(position: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
    force = tp.grad(potential)
    momentum = momentum - STEP_SIZE / 2 * force(position)
    for _ in range(LEAPFROG_STEPS - 1):
        position = position + STEP_SIZE * momentum
        momentum = momentum - STEP_SIZE * force(position)
    position = position + STEP_SIZE * momentum
    return position, momentum - STEP_SIZE / 2 * force(position)


def first_position(key: Tensor) -> Tensor:
    """Start the chains far apart: otherwise R-hat could not tell whether they have met."""
    return 3 * tp.random.normal(key, (2,), torch.float64)


def draw(key: Tensor, call: Tensor) -> tuple[Tensor, Tensor]:
    """Return all random numbers of one chain and one call of ``advance``."""
    for_momenta, for_tests = tp.random.split(tp.random.fold_in(key, call))
    momenta = tp.random.normal(for_momenta, (SAMPLES_PER_CALL, 2), torch.float64)
    return momenta, tp.random.uniform(for_tests, (SAMPLES_PER_CALL,), torch.float64)


def advance(position: Tensor, momenta: Tensor, tests: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last position of a chain, all of them, and the share of accepted proposals."""
    samples, accepted = [], []
    for momentum, test in zip(momenta, tests, strict=True):
        proposal, last = leapfrog(position, momentum)
        gain = potential(position) - potential(proposal)
        gain = gain + (momentum.square().sum() - last.square().sum()) / 2
        accept = test < torch.exp(gain)
        position = torch.where(accept, proposal, position)
        samples.append(position)
        accepted.append(accept)
    return position, torch.stack(samples), torch.stack(accepted).double().mean()


def summarize(parts: list[Tensor]) -> Summary:
    """Compare this chain with the others; ``parts`` are its samples, call by call."""
    samples = torch.cat(parts)
    num_samples, chain_mean, chain_variance = len(samples), samples.mean(0), samples.var(0)
    mean, within = tp.pmean((chain_mean, chain_variance), "chains")
    between = tp.psum((chain_mean - mean) ** 2, "chains") / (tp.axis_size("chains") - 1)
    r_hat = ((num_samples - 1) / num_samples + between / within).sqrt()
    variance = tp.pmean(((samples - mean) ** 2).mean(0), "chains")
    return Summary(mean, variance, r_hat)


def run(num_samples: int, compile: Any = True) -> tuple[list[Tensor], Tensor, Summary]:
    """Return samples [chain, sample, coordinate] call by call, accepted shares, and summary.

    Under torchrun the samples and shares are of this process's chains, the summary is of all.
    """
    # compile={"backend": "eager"}: traced, but too little work to be worth compiling.
    traced: Any = {"backend": "eager"} if compile else False
    draw_all = tp.pmap(draw, in_axes=(0, None), compile=traced)
    advance_all = tp.pmap(advance, donate_argnums=0, compile=compile)
    starts, keys = local_rows(tp.random.split(tp.random.key(0), 2 * CHAINS).chunk(2))
    position = tp.pmap(first_position, compile=traced)(starts)
    samples = []
    num_calls = (WARM_UP + num_samples) // SAMPLES_PER_CALL
    hidden = tp.process_index() != 0 or None  # None: shown on a terminal only
    for call in trange(num_calls, unit="call", disable=hidden, leave=False):
        position, part, accepted = advance_all(position, *draw_all(keys, torch.tensor(call)))
        samples.append(part)
    samples = samples[WARM_UP // SAMPLES_PER_CALL :]
    compare = tp.pmap(summarize, axis_name="chains", out_axes=None, compile=traced)
    return samples, accepted, compare(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run sixteen Markov chains over the devices.")
    parser.add_argument("--devices", type=int, help="default: every GPU, or two cores")
    parser.add_argument("--samples", type=int, default=500, help="of each chain")
    parser.add_argument(
        "--quick", dest="samples", action="store_const", const=250, help="250 samples"
    )
    parser.add_argument("--no-compile", action="store_true", help="run operation by operation")
    args = parser.parse_args()

    if tp.process_count() == 1:
        tp.init(args.devices or (2 if tp.default_backend() == "cpu" else None))
    samples, accepted, summary = run(args.samples, not args.no_compile)
    samples, accepted = all_gather((samples, accepted), tiled=True)
    if tp.process_index() != 0:
        return  # one process reports

    print(f"{CHAINS} chains on {tp.device_count()} devices")
    for name, value in zip(Summary._fields, summary, strict=True):
        print(f"{name}: {[round(number, 3) for number in value.tolist()]}")
    print(f"accepted in the last call: {accepted.mean().item():.0%}")

    torch.testing.assert_close(summary.mean.cpu(), TRUE_MEAN, rtol=0, atol=0.1)
    torch.testing.assert_close(summary.variance.cpu(), TRUE_VARIANCE, rtol=0, atol=0.15)
    assert (summary.r_hat.cpu() < 1.05).all()

    # NumPy computes the same from all samples in one place.
    whole = np.concatenate([part.numpy() for part in samples], axis=1)
    np.testing.assert_allclose(summary.mean.numpy(), whole.mean((0, 1)), atol=1e-12)
    within, between = whole.var(1, ddof=1).mean(0), whole.mean(1).var(0, ddof=1)
    r_hat = np.sqrt((whole.shape[1] - 1) / whole.shape[1] + between / within)
    np.testing.assert_allclose(summary.r_hat.numpy(), r_hat, rtol=1e-12)
    print("ok")


if __name__ == "__main__":
    main()
