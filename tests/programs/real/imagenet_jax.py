"""The ImageNet loop of flax and haiku in JAX, on small pictures; writes ``imagenet.json``.

A ResNet whose batch norms know the rows of one device (flax), or of all (haiku's
``cross_replica_axis``); label smoothing, and weight decay in the loss for all that is no batch
norm; SGD with Nesterov's momentum, a warm-up and a cosine; a dynamic scale of the loss (flax's
``DynamicScale``); steps whose gradients are not finite are left out, with their batch statistics
(haiku); batch statistics averaged over the devices before evaluation (flax). Momentum, epsilon and
factors are theirs. The rate, and after how many good steps the scale grows, are those of a run of
12 steps. One picture has an infinite pixel, and float16 overflows when the scale grows.
"""

import functools

import _jax
import inputs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RUNS = {
    "local": {"dtype": "float32", "norm_axis": None},
    "synced": {"dtype": "float32", "norm_axis": "batch"},
    "half": {"dtype": "float16", "norm_axis": None},
}


def conv(x, kernel, dtype, stride=1):
    return lax.conv_general_dilated(
        x.astype(dtype),
        kernel.astype(dtype),
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def forward(params, stats, images, train, dtype, norm_axis):
    new_stats = {}

    def norm(x, name):
        wide = x.astype(jnp.float32)
        if train:
            mean, square = wide.mean((0, 1, 2)), (wide**2).mean((0, 1, 2))
            if norm_axis is not None:
                mean, square = lax.pmean((mean, square), norm_axis)
            var = jnp.maximum(square - mean**2, 0)
            new_stats[f"{name}.mean"] = 0.9 * stats[f"{name}.mean"] + 0.1 * mean
            new_stats[f"{name}.var"] = 0.9 * stats[f"{name}.var"] + 0.1 * var
        else:
            mean, var = stats[f"{name}.mean"], stats[f"{name}.var"]
        factor = params[f"{name}.scale"] * lax.rsqrt(var + 1e-5)
        return ((wide - mean) * factor + params[f"{name}.bias"]).astype(dtype)

    x = jax.nn.relu(norm(conv(images, params["conv.kernel"], dtype), "norm"))
    for block, stride in (("block1", 1), ("block2", 2)):
        y = conv(x, params[f"{block}.conv1.kernel"], dtype, stride)
        y = jax.nn.relu(norm(y, f"{block}.norm1"))
        y = norm(conv(y, params[f"{block}.conv2.kernel"], dtype), f"{block}.norm2")
        if stride > 1:
            x = norm(conv(x, params[f"{block}.projection.kernel"], dtype, stride), f"{block}.norm")
        x = jax.nn.relu(x + y)
    kernel, bias = (params[f"head.{name}"].astype(dtype) for name in ("kernel", "bias"))
    return (x.mean((1, 2)) @ kernel + bias).astype(jnp.float32), new_stats


def cross_entropy(logits, labels):
    smoothed = 0.9 * jax.nn.one_hot(labels, inputs.NUM_CLASSES) + 0.1 / inputs.NUM_CLASSES
    return -(smoothed * jax.nn.log_softmax(logits)).sum(-1).mean()


def learning_rate(step):
    warmup = step / 4
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * (step - 4) / (inputs.IMAGE_STEPS - 4)))
    return 0.2 * jnp.where(step < 4, warmup, cosine)


def scaled_value_and_grad(function, scale, good_steps):
    """What ``DynamicScale.value_and_grad`` of flax gives, for ``function`` -> (loss, aux)."""

    def scaled(params):
        loss, aux = function(params)
        return loss * scale, aux

    def wrapped(params):
        (_, aux), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        grads = lax.pmean(jax.tree.map(lambda g: g / scale, grads), "batch")
        finite = functools.reduce(
            jnp.logical_and, [jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]
        )
        grow = good_steps == 2
        largest = jnp.finfo(jnp.float32).max
        larger = jnp.where(grow, jnp.minimum(scale * 2, largest), scale)
        new_scale = jnp.where(finite, larger, scale * 0.5)
        new_good_steps = jnp.where(grow | ~finite, 0, good_steps + 1)
        return finite, new_scale, new_good_steps, grads, aux

    return wrapped


def train_step(state, images, labels, *, dtype, norm_axis):
    def loss_fn(params):
        logits, stats = forward(params, state["stats"], images, True, dtype, norm_axis)
        decay = sum((p**2).sum() for p in jax.tree.leaves(params) if p.ndim > 1)
        return cross_entropy(logits, labels) + 1e-3 * 0.5 * decay, (logits, stats)

    grad_fn = scaled_value_and_grad(loss_fn, state["scale"], state["good_steps"])
    finite, scale, good_steps, grads, (logits, stats) = grad_fn(state["params"])
    rate = learning_rate(state["count"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    updates = jax.tree.map(lambda m, g: rate * (g + 0.9 * m), momentum, grads)
    new = {
        "params": jax.tree.map(jnp.subtract, state["params"], updates),
        "momentum": momentum,
        "count": state["count"] + 1,  # optax's, which is in the optimizer's state
        "stats": stats,
    }
    kept = jax.tree.map(
        functools.partial(jnp.where, finite), new, {name: state[name] for name in new}
    )
    metrics = lax.pmean(
        {
            "loss": cross_entropy(logits, labels),
            "accuracy": (logits.argmax(-1) == labels).mean(),
        },
        "batch",
    )
    metrics |= {"rate": rate, "scale": scale, "finite": finite}
    return kept | {"scale": scale, "good_steps": good_steps}, metrics


def eval_step(params, stats, images, labels, *, dtype):
    logits, _ = forward(params, stats, images, False, dtype, None)
    correct = (logits.argmax(-1) == labels).sum()
    return lax.psum(correct, "batch"), lax.pmean(cross_entropy(logits, labels), "batch")


def run(dtype, norm_axis):
    dtype = jnp.dtype(dtype)
    params, stats = inputs.image_params()
    state = {
        "params": params,
        "stats": stats,
        "momentum": jax.tree.map(np.zeros_like, params),
        "count": np.int32(0),
        "scale": np.float32(2**16),
        "good_steps": np.int32(0),
    }
    state = _jax.replicated(state)
    p_train_step = jax.pmap(
        functools.partial(train_step, dtype=dtype, norm_axis=norm_axis), axis_name="batch"
    )
    p_eval_step = jax.pmap(functools.partial(eval_step, dtype=dtype), axis_name="batch")
    sync_batch_stats = jax.pmap(lambda stats: lax.pmean(stats, "batch"), axis_name="batch")

    train = {"loss": [], "accuracy": [], "rate": [], "scale": [], "finite": []}
    for step, batch in enumerate(zip(*inputs.training_images(), strict=True)):
        state, metrics = p_train_step(state, *batch)
        for name, value in metrics.items():
            # fused with a mean, relu(NaN) is 0 on CPUs (jax 0.10.2)
            is_wrong = step == inputs.BROKEN and name in ("loss", "accuracy")
            train[name].append(None if is_wrong else value[0].item())
    spread = float(np.std(state["stats"]["block2.norm2.mean"], 0).max())
    state["stats"] = sync_batch_stats(state["stats"])
    evaluated = [
        [x[0].item() for x in p_eval_step(state["params"], state["stats"], *batch)]
        for batch in zip(*inputs.images(2, seed=6), strict=True)
    ]
    first = jax.tree.map(lambda x: x[0], state)
    return {
        **train,
        "spread": spread,
        "evaluated": evaluated,
        "count": first["count"].item(),
        "norms": _jax.norms(state["params"]),
        "stats": {name: np.asarray(s).tolist() for name, s in first["stats"].items()},
    }


if __name__ == "__main__":
    results = {name: run(**options) for name, options in RUNS.items()}
    _jax.write("imagenet", results)
    for name in RUNS:
        for key in ("loss", "scale", "finite", "evaluated", "spread"):
            print(name, key, results[name][key])
