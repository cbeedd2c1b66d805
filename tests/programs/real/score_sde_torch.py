"""The port of ``score_sde_jax.py``."""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

import torchpmap as tp
from real import inputs

Params = dict[str, torch.Tensor]

BETA_MIN, BETA_MAX, T = 0.1, 20.0, 1.0
NUM_SCALES = 25
TRAIN_EPS, SAMPLE_EPS = 1e-5, 1e-3
SNR, CORRECTOR_STEPS = 0.16, 1
RATE, WARMUP, CLIP, EMA_RATE, DROPOUT = 1e-2, 10, 1.0, 0.9, 0.1

optimizer = tp.optim.functional(torch.optim.Adam, lr=RATE)


def network(
    params: Params, x: torch.Tensor, labels: torch.Tensor, key: torch.Tensor | None
) -> torch.Tensor:
    """``key``: of dropout; None: no dropout."""
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(8) / 7)
    angles = labels[:, None] * frequencies
    time = torch.cat([angles.sin(), angles.cos()], 1)
    time = F.silu(time @ params["time1.kernel"] + params["time1.bias"])
    time = F.silu(time @ params["time2.kernel"] + params["time2.bias"])
    h = F.conv2d(x, params["first.kernel"], params["first.bias"], padding=1)
    for k, block in enumerate(("block1", "block2")):
        p = {name.removeprefix(f"{block}."): v for name, v in params.items() if block in name}
        y = F.silu(F.group_norm(h, 4, p["scale1"], p["shift1"], eps=1e-6))
        y = F.conv2d(y, p["kernel1"], p["bias1"], padding=1)
        y = y + (time @ p["time.kernel"] + p["time.bias"])[:, :, None, None]
        y = F.silu(F.group_norm(y, 4, p["scale2"], p["shift2"], eps=1e-6))
        if key is not None:
            keep = tp.random.bernoulli(tp.random.fold_in(key, k), 1 - DROPOUT, y.shape)
            y = torch.where(keep, y / (1 - DROPOUT), 0)
        h = (h + F.conv2d(y, p["kernel2"], p["bias2"], padding=1)) / math.sqrt(2)
    h = F.silu(F.group_norm(h, 4, params["last.scale"], params["last.shift"], eps=1e-6))
    return F.conv2d(h, params["last.kernel"], params["last.bias"], padding=1)


def marginal(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of the data, and the standard deviation, at time ``t`` of each row."""
    log_mean = -0.25 * t**2 * (BETA_MAX - BETA_MIN) - 0.5 * t * BETA_MIN
    log_mean = log_mean[:, None, None, None]
    return log_mean.exp(), (1 - (2 * log_mean).exp()).sqrt()


def score(
    params: Params, x: torch.Tensor, t: torch.Tensor, key: torch.Tensor | None = None
) -> torch.Tensor:
    return -network(params, x, t * 999, key) / marginal(t)[1]


def loss_fn(params: Params, key: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    key, step_key = tp.random.split(key)
    t = tp.random.uniform(step_key, (batch.shape[0],)) * (T - TRAIN_EPS) + TRAIN_EPS
    key, step_key = tp.random.split(key)
    z = tp.random.normal(step_key, batch.shape)
    factor, std = marginal(t)
    key, step_key = tp.random.split(key)
    s = score(params, factor * batch + std * z, t, step_key)
    return ((s * std + z) ** 2).mean()


def train_step(carry: Any, batch: torch.Tensor) -> Any:
    key, state = carry
    key, step_key = tp.random.split(key)
    loss, grads = tp.value_and_grad(loss_fn)(state["params"], step_key, batch)
    grads, _ = tp.optim.clip_grad_norm(tp.pmean(grads, "batch"), CLIP)
    rate = RATE * (state["step"] / WARMUP).clamp(max=1)
    params, moments = optimizer.update(grads, state["moments"], state["params"], lr=rate)
    ema = tree_map(lambda average, p: average * EMA_RATE + p * (1 - EMA_RATE), state["ema"], params)
    new = {"params": params, "moments": moments, "step": state["step"] + 1, "ema": ema}
    return (key, new), tp.pmean(loss, "batch")


def sample(key: torch.Tensor, params: Params, shape: tuple[int, ...]) -> torch.Tensor:
    betas = torch.linspace(BETA_MIN / NUM_SCALES, BETA_MAX / NUM_SCALES, NUM_SCALES)

    def correct(key: Any, x: torch.Tensor, t: torch.Tensor, k: torch.Tensor) -> Any:
        def body(_: Any, carry: Any) -> Any:
            key, x, _ = carry
            grad = score(params, x, t)
            key, step_key = tp.random.split(key)
            noise = tp.random.normal(step_key, x.shape)
            norms = [v.flatten(1).norm(dim=-1).mean() for v in (grad, noise)]
            grad_norm, noise_norm = tp.pmean(norms, "batch")
            size = (SNR * noise_norm / grad_norm) ** 2 * 2 * (1 - betas[k])
            x_mean = x + size * grad
            return key, x_mean + (size * 2).sqrt() * noise, x_mean

        return tp.fori_loop(0, CORRECTOR_STEPS, body, (key, x, x))[1]

    def predict(key: Any, x: torch.Tensor, t: torch.Tensor, k: torch.Tensor) -> Any:
        drift = (1 - betas[k]).sqrt() * x - x - betas[k] * score(params, x, t)
        x_mean = x - drift
        return x_mean + betas[k].sqrt() * tp.random.normal(key, x.shape), x_mean

    def body(i: Any, carry: Any) -> Any:
        key, x, _ = carry
        t = timesteps[i]
        k = (t * (NUM_SCALES - 1) / T).int()
        rows = torch.ones(shape[0]) * t
        key, step_key = tp.random.split(key)
        x = correct(step_key, x, rows, k)
        key, step_key = tp.random.split(key)
        return key, *predict(step_key, x, rows, k)

    timesteps = torch.linspace(T, SAMPLE_EPS, NUM_SCALES)
    key, step_key = tp.random.split(key)
    x = tp.random.normal(step_key, shape)
    return tp.fori_loop(0, NUM_SCALES, body, (key, x, x))[2]


def run(**options: Any) -> dict[str, Any]:
    """The numbers that ``score_sde_jax.py`` writes; ``options``: of ``tp.pmap``."""
    params = {name: torch.from_numpy(array) for name, array in inputs.score_params().items()}
    state = {
        "params": params,
        "moments": optimizer.init(params),
        "step": torch.tensor(0),
        "ema": tree_map(torch.clone, params),
    }
    p_train_step = tp.pmap(
        functools.partial(tp.scan, train_step),
        "batch",
        in_axes=((0, None), 0),
        out_axes=((0, None), None),
        donate_argnums=0,
        **options,
    )
    p_sample = tp.pmap(
        functools.partial(sample, shape=(2, 1, inputs.SCORE_SIZE, inputs.SCORE_SIZE)),
        "batch",
        in_axes=(0, None),
        **options,
    )
    key = tp.random.PRNGKey(42)
    losses = []
    for batch in torch.from_numpy(inputs.blobs()):
        key, *next_keys = tp.random.split(key, inputs.NUM_DEVICES + 1)
        (_, state), loss = p_train_step((torch.stack(next_keys), state), batch)
        losses.append(loss.tolist())
    key, *next_keys = tp.random.split(key, inputs.NUM_DEVICES + 1)
    samples = p_sample(torch.stack(next_keys), state["ema"])
    return {
        "losses": losses,
        "norms": {name: p.norm().item() for name, p in state["params"].items()},
        "ema": {name: p.norm().item() for name, p in state["ema"].items()},
        "samples": samples.tolist(),
    }
