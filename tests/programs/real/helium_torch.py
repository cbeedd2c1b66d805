"""The port of ``helium_jax.py``."""

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

import torchpmap as tp
from real import inputs

Params = dict[str, torch.Tensor]

CHARGE = 2.0
CLIP = 5.0
MCMC_STEPS = 10
RATE, DELAY = 1e-2, 1000.0
ADAPT_EVERY = 3
NUM_STEPS, WALKERS = 8, 16

optimizer = tp.optim.functional(torch.optim.Adam, lr=RATE)


def log_psi(params: Params, x: torch.Tensor) -> torch.Tensor:
    """The logarithm of the wave function's size; ``x``: the places of two electrons, ``[6]``."""
    r = x.reshape(2, 3)
    length = r.norm(dim=-1, keepdim=True)
    pairs = r[:, None] - r[None]
    eye = torch.eye(2, dtype=x.dtype)
    apart = (pairs + eye[..., None]).norm(dim=-1) * (1 - eye)
    one = torch.cat([r, length], -1)
    two = torch.cat([pairs, apart[..., None]], -1)
    for layer in "12":
        others = [one[spin].expand_as(one) for spin in (0, 1)]
        f = torch.cat([one, *others, two[0], two[1]], -1)
        new_one = torch.tanh(f @ params[f"one{layer}.kernel"] + params[f"one{layer}.bias"])
        new_two = torch.tanh(two @ params[f"two{layer}.kernel"] + params[f"two{layer}.bias"])
        one = new_one + one if new_one.shape == one.shape else new_one
        two = new_two + two if new_two.shape == two.shape else new_two
    psi = 1.0
    for k, spin in enumerate(("up", "down")):
        orbitals = one[k] @ params[f"{spin}.kernel"] + params[f"{spin}.bias"]
        psi = psi * orbitals * torch.exp(-params[f"{spin}.decay"].abs() * length[k])
    return psi.sum().abs().log()


batch_log_psi = tp.vmap(log_psi, in_axes=(None, 0))


def local_energy(params: Params, x: torch.Tensor) -> torch.Tensor:
    def gradient_at(x: torch.Tensor) -> torch.Tensor:
        return tp.grad(log_psi, argnums=1)(params, x)

    def add_second_derivative(i: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        direction = (torch.arange(6) == i).to(x.dtype)
        _, row = torch.func.jvp(gradient_at, (x,), (direction,))
        return total + row @ direction

    laplacian = tp.fori_loop(0, 6, add_second_derivative, torch.zeros((), dtype=x.dtype))
    kinetic = -0.5 * (laplacian + gradient_at(x).square().sum())
    r = x.reshape(2, 3)
    return kinetic - CHARGE * (1 / r.norm(dim=-1)).sum() + 1 / (r[0] - r[1]).norm()


class TotalEnergy(torch.autograd.Function):
    """The mean of the local energies, their variance, and themselves.

    Its derivative by the parameters is twice the covariance of local energies and log psi; the
    factor of two is left to the rate.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(data: torch.Tensor, names: list[str], *values: torch.Tensor) -> Any:
        params = dict(zip(names, values, strict=True))
        energies = tp.vmap(local_energy, in_axes=(None, 0))(params, data)
        energy = tp.pmean(energies.mean(), "devices")
        variance = tp.pmean((energies - energy).square().mean(), "devices")
        return energy, variance, energies

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        data, ctx.names, *values = inputs
        energy, variance, energies = output
        ctx.mark_non_differentiable(variance, energies)
        ctx.save_for_backward(data, energy, energies, *values)
        ctx.save_for_forward(data, energy, energies, *values)

    @staticmethod
    def difference(energy: torch.Tensor, energies: torch.Tensor) -> torch.Tensor:
        """Clipped local energies minus their mean, divided by the number of walkers."""
        spread = tp.pmean((energies - energy).abs().mean(), "devices")
        clipped = energies.clamp(energy - CLIP * spread, energy + CLIP * spread)
        return (clipped - tp.pmean(clipped.mean(), "devices")) / len(energies)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        data, energy, energies, *values = ctx.saved_tensors

        def logarithms(*values: torch.Tensor) -> torch.Tensor:
            return batch_log_psi(dict(zip(ctx.names, values, strict=True)), data)

        _, pullback = torch.func.vjp(logarithms, *values)
        return None, None, *pullback(grad * TotalEnergy.difference(energy, energies))

    @staticmethod
    def jvp(ctx: Any, data_tangent: Any, _: Any, *tangents: torch.Tensor) -> Any:
        data, energy, energies, *values = ctx.saved_tensors

        def logarithms(*values: torch.Tensor) -> torch.Tensor:
            return batch_log_psi(dict(zip(ctx.names, values, strict=True)), data)

        _, tangent = torch.func.jvp(logarithms, tuple(values), tangents)
        return tangent @ TotalEnergy.difference(energy, energies), None, None


def total_energy(params: Params, data: torch.Tensor) -> Any:
    energy, variance, energies = TotalEnergy.apply(data, list(params), *params.values())
    return energy, (variance, energies)


def mcmc(params: Params, data: torch.Tensor, key: Any, width: torch.Tensor) -> Any:
    def step(_: Any, carry: Any) -> Any:
        x, key, log_p, accepted = carry
        key, subkey = tp.random.split(key)
        proposed = x + width * tp.random.normal(subkey, x.shape, dtype=x.dtype)
        proposed_log_p = 2.0 * batch_log_psi(params, proposed)
        key, subkey = tp.random.split(key)
        level = tp.random.uniform(subkey, log_p.shape, dtype=x.dtype).log()
        better = proposed_log_p - log_p > level
        x = torch.where(better[:, None], proposed, x)
        log_p = torch.where(better, proposed_log_p, log_p)
        return x, key, log_p, accepted + better.sum()

    start = data, key, 2.0 * batch_log_psi(params, data), 0
    data, _, _, accepted = tp.fori_loop(0, MCMC_STEPS, step, start)
    return data, tp.pmean(accepted.to(data.dtype) / (MCMC_STEPS * len(data)), "devices")


def train_step(params: Params, state: Any, data: torch.Tensor, key: Any, width: Any) -> Any:
    key, subkey = tp.random.split(key)
    data, accepted = mcmc(params, data, subkey, width)
    (energy, (variance, energies)), grads = tp.value_and_grad(total_energy, has_aux=True)(
        params, data
    )
    grads = tp.pmean(grads, "devices")
    rate = RATE / (1 + state["up.bias"]["step"] / DELAY)
    params, state = optimizer.update(grads, state, params, lr=rate)
    return params, state, data, key, (energy, variance, accepted), energies


def from_numpy(arrays: inputs.Arrays) -> Params:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def run(num_steps: int = NUM_STEPS, num_walkers: int = WALKERS, **options: Any) -> dict[str, Any]:
    """The numbers that ``helium_jax.py`` writes; ``options``: of ``tp.pmap``."""
    params = from_numpy(inputs.helium_params())
    state = optimizer.init(params)
    data = torch.from_numpy(inputs.walkers(num_walkers))
    keys = tp.random.split(tp.random.PRNGKey(0), inputs.NUM_DEVICES)
    p_train_step = tp.pmap(
        train_step,
        "devices",
        in_axes=(None, None, 0, 0, None),
        out_axes=(None, None, 0, 0, None, 0),
        donate_argnums=(0, 1, 2),
        **options,
    )
    width, moves = 0.8, []
    metrics: dict[str, list[float]] = {"energy": [], "variance": [], "accepted": [], "width": []}
    for step in range(num_steps):
        params, state, data, keys, scalars, energies = p_train_step(
            params, state, data, keys, torch.tensor(width, dtype=torch.float64)
        )
        for name, value in zip(metrics, scalars, strict=False):
            metrics[name].append(value.item())
        metrics["width"].append(width)
        moves.append(metrics["accepted"][-1])
        if (step + 1) % ADAPT_EVERY == 0:
            width *= 1.1 if np.mean(moves) > 0.55 else 1 / 1.1 if np.mean(moves) < 0.5 else 1
            moves = []
    return {
        **metrics,
        "norms": tree_map(lambda p: p.norm().item(), params),
        "walkers": data[:, :2].tolist(),
        "energies": energies[:, :4].tolist(),
    }
