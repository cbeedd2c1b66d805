"""FermiNet's variational Monte Carlo in JAX, for helium; writes ``helium.json``.

A small FermiNet for one electron of each spin: one layer of features per electron and per pair,
envelopes, a sum of determinants. Metropolis steps in a ``fori_loop``; the local energy by a
``fori_loop`` over the forward derivatives of a reverse-mode gradient; the energy averaged over all
devices, with its gradient in a ``custom_jvp`` and local energies clipped about the mean; Adam in
place of KFAC; the width of the proposals adapted to the rate of acceptance. All in float64.
"""

import _jax
import inputs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

jax.config.update("jax_enable_x64", True)

CHARGE = 2.0
CLIP = 5.0
MCMC_STEPS = 10
RATE, DELAY = 1e-2, 1000.0
ADAPT_EVERY = 3
NUM_STEPS, WALKERS = 8, 16
LONG_STEPS, LONG_WALKERS = 300, 256
"""Of a second run, whose energy is near the exact one."""


def log_psi(params, x):
    """The logarithm of the wave function's size; ``x``: the places of two electrons, ``[6]``."""
    r = x.reshape(2, 3)
    length = jnp.linalg.norm(r, axis=-1, keepdims=True)
    pairs = r[:, None] - r[None]
    apart = jnp.linalg.norm(pairs + jnp.eye(2)[..., None], axis=-1) * (1 - jnp.eye(2))
    one = jnp.concatenate([r, length], -1)
    two = jnp.concatenate([pairs, apart[..., None]], -1)
    for layer in "12":
        others = [jnp.broadcast_to(one[spin], one.shape) for spin in (0, 1)]
        f = jnp.concatenate([one, *others, two[0], two[1]], -1)
        new_one = jnp.tanh(f @ params[f"one{layer}.kernel"] + params[f"one{layer}.bias"])
        new_two = jnp.tanh(two @ params[f"two{layer}.kernel"] + params[f"two{layer}.bias"])
        one = new_one + one if new_one.shape == one.shape else new_one
        two = new_two + two if new_two.shape == two.shape else new_two
    psi = 1.0
    for k, spin in enumerate(("up", "down")):
        orbitals = one[k] @ params[f"{spin}.kernel"] + params[f"{spin}.bias"]
        psi *= orbitals * jnp.exp(-jnp.abs(params[f"{spin}.decay"]) * length[k])
    return jnp.log(jnp.abs(psi.sum()))


batch_log_psi = jax.vmap(log_psi, in_axes=(None, 0))


def local_energy(params, x):
    grad = jax.grad(log_psi, argnums=1)
    gradient, derivative = jax.linearize(lambda x: grad(params, x), x)
    eye = jnp.eye(6)
    laplacian = lax.fori_loop(0, 6, lambda i, total: total + derivative(eye[i])[i], 0.0)
    kinetic = -0.5 * (laplacian + (gradient**2).sum())
    r = x.reshape(2, 3)
    potential = -CHARGE * (1 / jnp.linalg.norm(r, axis=-1)).sum()
    return kinetic + potential + 1 / jnp.linalg.norm(r[0] - r[1])


@jax.custom_jvp
def total_energy(params, data):
    energies = jax.vmap(local_energy, in_axes=(None, 0))(params, data)
    energy = lax.pmean(energies.mean(), "devices")
    variance = lax.pmean(((energies - energy) ** 2).mean(), "devices")
    return energy, (variance, energies)


@total_energy.defjvp
def total_energy_jvp(primals, tangents):
    params, data = primals
    energy, (variance, energies) = total_energy(params, data)
    spread = lax.pmean(jnp.abs(energies - energy).mean(), "devices")
    clipped = jnp.clip(energies, energy - CLIP * spread, energy + CLIP * spread)
    difference = clipped - lax.pmean(clipped.mean(), "devices")
    _, tangent = jax.jvp(batch_log_psi, primals, tangents)
    aux = variance, energies
    return (energy, aux), (tangent @ difference / len(energies), jax.tree.map(jnp.zeros_like, aux))


def mcmc(params, data, key, width):
    def step(_, carry):
        x, key, log_p, accepted = carry
        key, subkey = random.split(key)
        proposed = x + width * random.normal(subkey, x.shape)
        proposed_log_p = 2.0 * batch_log_psi(params, proposed)
        key, subkey = random.split(key)
        better = proposed_log_p - log_p > jnp.log(random.uniform(subkey, log_p.shape))
        x = jnp.where(better[:, None], proposed, x)
        log_p = jnp.where(better, proposed_log_p, log_p)
        return x, key, log_p, accepted + better.sum()

    start = data, key, 2.0 * batch_log_psi(params, data), 0
    data, key, _, accepted = lax.fori_loop(0, MCMC_STEPS, step, start)
    return data, lax.pmean(accepted / (MCMC_STEPS * len(data)), "devices")


def train_step(params, state, data, key, width):
    key, subkey = random.split(key)
    data, accepted = mcmc(params, data, subkey, width)
    (energy, (variance, energies)), grads = jax.value_and_grad(total_energy, has_aux=True)(
        params, data
    )
    grads = lax.pmean(grads, "devices")
    params, state = _jax.adam(params, grads, state, RATE / (1 + state["count"] / DELAY))
    return params, state, data, key, (energy, variance, accepted, energies)


def run(num_steps, num_walkers):
    params = inputs.helium_params()
    params, state = _jax.replicated((params, _jax.zero_state(params, np.int64(0))))
    data = inputs.walkers(num_walkers)
    keys = random.split(random.PRNGKey(0), inputs.NUM_DEVICES)
    p_train_step = jax.pmap(
        train_step, axis_name="devices", in_axes=(0, 0, 0, 0, None), donate_argnums=(0, 1, 2)
    )
    width, moves = 0.8, []
    metrics = {"energy": [], "variance": [], "accepted": [], "width": []}
    for step in range(num_steps):
        params, state, data, keys, found = p_train_step(params, state, data, keys, width)
        *scalars, energies = found
        for name, value in zip(metrics, [x[0].item() for x in scalars], strict=False):
            metrics[name].append(value)
        metrics["width"].append(width)
        moves.append(metrics["accepted"][-1])
        if (step + 1) % ADAPT_EVERY == 0:
            width *= 1.1 if np.mean(moves) > 0.55 else 1 / 1.1 if np.mean(moves) < 0.5 else 1
            moves = []
    return {
        **metrics,
        "norms": _jax.norms(params),
        "walkers": np.asarray(data[:, :2]).tolist(),
        "energies": np.asarray(energies[:, :4]).tolist(),
    }


if __name__ == "__main__":
    results = run(NUM_STEPS, WALKERS)
    energies = run(LONG_STEPS, LONG_WALKERS)["energy"]
    results["long"] = np.reshape(energies, (-1, 20)).mean(1).tolist()  # the exact one: -2.9037
    _jax.write("helium", results)
    print(results["energy"], results["accepted"], results["width"], results["long"], sep="\n")
