"""What the programs in JAX share: devices, Adam, and copies for ``jax.pmap``. Import it first."""

import json
import os
from pathlib import Path

import inputs
import numpy as np

# Read by jax when it is first used.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={inputs.NUM_DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp


def adam(params, grads, state, rate):
    """New parameters, and new moments and count."""
    count = state["count"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, state["square"], grads)

    def updated(p, m, v):
        return p - rate * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)

    params = jax.tree.map(updated, params, mean, square)
    return params, {"mean": mean, "square": square, "count": count}


def zero_state(params, count):
    zeros = jax.tree.map(np.zeros_like, params)
    return {"mean": zeros, "square": zeros, "count": count}


def replicated(tree):
    return jax.tree.map(lambda x: np.stack([x] * inputs.NUM_DEVICES), tree)


def norms(params):
    """Of the copies of the first device."""
    return {name: float(jnp.linalg.norm(p[0])) for name, p in params.items()}


def write(name, results):
    path = Path(__file__).with_name(f"{name}.json")
    path.write_text(json.dumps({"jax": jax.__version__, **results}) + "\n")
