"""The training and the sampler of score_sde in JAX, on small pictures; writes ``score_sde.json``.

The variance-preserving SDE with its constants, ``pmap(scan(step))`` over several steps a call,
with a carried key per device, dropout, warm-up, clipping, Adam and an average of the parameters;
then the predictor-corrector sampler: reverse diffusion after a step of Langevin dynamics whose size
depends on norms over all devices. The network is small, the average is quick (0.9 in place of
0.999), and the sampler takes 25 steps in place of 1000.
"""

import functools

import _jax
import inputs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

BETA_MIN, BETA_MAX, T = 0.1, 20.0, 1.0
NUM_SCALES = 25
TRAIN_EPS, SAMPLE_EPS = 1e-5, 1e-3
SNR, CORRECTOR_STEPS = 0.16, 1
RATE, WARMUP, CLIP, EMA_RATE, DROPOUT = 1e-2, 10, 1.0, 0.9, 0.1


def conv(x, kernel, bias):
    y = lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
    )
    return y + bias[:, None, None]


def group_norm(x, scale, shift):
    groups = x.reshape(x.shape[0], 4, -1)
    centred = groups - groups.mean(-1, keepdims=True)
    y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return y.reshape(x.shape) * scale[:, None, None] + shift[:, None, None]


def network(params, x, labels, key):
    """``key``: of dropout; None: no dropout."""
    frequencies = jnp.exp(-jnp.log(10000.0) * jnp.arange(8) / 7)
    angles = labels[:, None] * frequencies
    time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1)
    time = jax.nn.swish(time @ params["time1.kernel"] + params["time1.bias"])
    time = jax.nn.swish(time @ params["time2.kernel"] + params["time2.bias"])
    h = conv(x, params["first.kernel"], params["first.bias"])
    for k, block in enumerate(("block1", "block2")):
        p = {name.removeprefix(f"{block}."): v for name, v in params.items() if block in name}
        y = jax.nn.swish(group_norm(h, p["scale1"], p["shift1"]))
        y = conv(y, p["kernel1"], p["bias1"])
        y = y + (time @ p["time.kernel"] + p["time.bias"])[:, :, None, None]
        y = jax.nn.swish(group_norm(y, p["scale2"], p["shift2"]))
        if key is not None:
            keep = random.bernoulli(random.fold_in(key, k), 1 - DROPOUT, y.shape)
            y = jnp.where(keep, y / (1 - DROPOUT), 0)
        h = (h + conv(y, p["kernel2"], p["bias2"])) / np.sqrt(2.0)
    h = jax.nn.swish(group_norm(h, params["last.scale"], params["last.shift"]))
    return conv(h, params["last.kernel"], params["last.bias"])


def marginal(t):
    """The factor of the data, and the standard deviation, at time ``t`` of each row."""
    log_mean = -0.25 * t**2 * (BETA_MAX - BETA_MIN) - 0.5 * t * BETA_MIN
    per_row = (slice(None), None, None, None)
    return jnp.exp(log_mean)[per_row], jnp.sqrt(1 - jnp.exp(2 * log_mean))[per_row]


def score(params, x, t, key=None):
    return -network(params, x, t * 999, key) / marginal(t)[1]


def loss_fn(params, key, batch):
    key, step_key = random.split(key)
    t = random.uniform(step_key, (batch.shape[0],)) * (T - TRAIN_EPS) + TRAIN_EPS
    key, step_key = random.split(key)
    z = random.normal(step_key, batch.shape)
    factor, std = marginal(t)
    key, step_key = random.split(key)
    s = score(params, factor * batch + std * z, t, step_key)
    return ((s * std + z) ** 2).reshape(batch.shape[0], -1).mean(-1).mean()


def clipped(grads):
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * CLIP / jnp.maximum(norm, CLIP), grads)


def train_step(carry, batch):
    key, state = carry
    key, step_key = random.split(key)
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], step_key, batch)
    grads = lax.pmean(grads, "batch")
    rate = RATE * jnp.minimum(state["adam"]["count"] / WARMUP, 1.0)
    params, moments = _jax.adam(state["params"], clipped(grads), state["adam"], rate)
    ema = jax.tree.map(
        lambda average, p: average * EMA_RATE + p * (1 - EMA_RATE), state["ema"], params
    )
    new = {"params": params, "adam": moments, "ema": ema}
    return (key, new), lax.pmean(loss, "batch")


def sample(key, params, shape):
    betas = jnp.linspace(BETA_MIN / NUM_SCALES, BETA_MAX / NUM_SCALES, NUM_SCALES)

    def correct(key, x, t, k):
        def body(_, carry):
            key, x, _ = carry
            grad = score(params, x, t)
            key, step_key = random.split(key)
            noise = random.normal(step_key, x.shape)
            rows = [v.reshape(shape[0], -1) for v in (grad, noise)]
            norms = [jnp.linalg.norm(v, axis=-1).mean() for v in rows]
            grad_norm, noise_norm = lax.pmean(norms, "batch")
            size = (SNR * noise_norm / grad_norm) ** 2 * 2 * (1 - betas[k])
            x_mean = x + size * grad
            return key, x_mean + jnp.sqrt(size * 2) * noise, x_mean

        return lax.fori_loop(0, CORRECTOR_STEPS, body, (key, x, x))[1]

    def predict(key, x, t, k):
        drift = jnp.sqrt(1 - betas[k]) * x - x - betas[k] * score(params, x, t)
        x_mean = x - drift
        return x_mean + jnp.sqrt(betas[k]) * random.normal(key, x.shape), x_mean

    def body(i, carry):
        key, x, _ = carry
        t = timesteps[i]
        k = (t * (NUM_SCALES - 1) / T).astype(jnp.int32)
        rows = jnp.ones(shape[0]) * t
        key, step_key = random.split(key)
        x = correct(step_key, x, rows, k)
        key, step_key = random.split(key)
        return key, *predict(step_key, x, rows, k)

    timesteps = jnp.linspace(T, SAMPLE_EPS, NUM_SCALES)
    key, step_key = random.split(key)
    x = random.normal(step_key, shape)
    return lax.fori_loop(0, NUM_SCALES, body, (key, x, x))[2]


def run():
    params = inputs.score_params()
    adam = _jax.zero_state(params, np.int32(0))
    pstate = _jax.replicated({"params": params, "adam": adam, "ema": params})
    p_train_step = jax.pmap(
        functools.partial(lax.scan, train_step), axis_name="batch", donate_argnums=0
    )
    p_sample = jax.pmap(
        functools.partial(sample, shape=(2, 1, inputs.SCORE_SIZE, inputs.SCORE_SIZE)),
        axis_name="batch",
    )
    key = random.PRNGKey(42)
    losses = []
    for batch in inputs.blobs():
        key, *next_keys = random.split(key, inputs.NUM_DEVICES + 1)
        (_, pstate), loss = p_train_step((jnp.asarray(next_keys), pstate), batch)
        losses.append(np.asarray(loss[0]).tolist())
    key, *next_keys = random.split(key, inputs.NUM_DEVICES + 1)
    samples = p_sample(jnp.asarray(next_keys), pstate["ema"])
    return {
        "losses": losses,
        "norms": _jax.norms(pstate["params"]),
        "ema": _jax.norms(pstate["ema"]),
        "samples": np.asarray(samples).round(7).tolist(),
    }


if __name__ == "__main__":
    results = run()
    _jax.write("score_sde", results)
    print(results["losses"])
    print(np.mean(results["samples"]), np.std(results["samples"]))
