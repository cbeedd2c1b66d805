"""The port of ``imagenet_jax.py``."""

import functools
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import torchpmap as tp
from real import inputs

RUNS: dict[str, dict[str, Any]] = {
    "local": {"dtype": torch.float32, "norm_axis": None},
    "synced": {"dtype": torch.float32, "norm_axis": "batch"},
    "half": {"dtype": torch.float16, "norm_axis": None},
}


class Conv(nn.Module):
    """JAX's padding "SAME", which is not torch's where the stride is 2."""

    def __init__(self, num_in: int, num_out: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(num_out, num_in, size, size))
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = max(self.kernel.shape[-1] - self.stride, 0)
        first, last = total // 2, total - total // 2
        x = F.pad(x, (first, last, first, last))
        return F.conv2d(x, self.kernel.to(x.dtype), stride=self.stride)


class BatchNorm(nn.Module):
    """flax's: the running variance is that of the rows, where torch's is an unbiased estimate."""

    def __init__(self, num_channels: int, axis_name: str | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))
        self.register_buffer("mean", torch.zeros(num_channels))
        self.register_buffer("var", torch.ones(num_channels))
        self.axis_name = axis_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        mean, var = self.mean, self.var
        if self.training:
            statistics = wide.mean((0, 2, 3)), wide.square().mean((0, 2, 3))
            if self.axis_name is not None:
                statistics = tp.pmean(statistics, self.axis_name)
            mean, var = statistics[0], (statistics[1] - statistics[0] ** 2).clamp(min=0)
            self.mean.mul_(0.9).add_(0.1 * mean.detach())
            self.var.mul_(0.9).add_(0.1 * var.detach())
        factor = self.scale * torch.rsqrt(var + 1e-5)
        shift = self.bias - mean * factor
        return (wide * factor[:, None, None] + shift[:, None, None]).to(x.dtype)


class Block(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int, axis_name: str | None) -> None:
        super().__init__()
        self.conv1 = Conv(num_in, num_out, 3, stride)
        self.norm1 = BatchNorm(num_out, axis_name)
        self.conv2 = Conv(num_out, num_out, 3)
        self.norm2 = BatchNorm(num_out, axis_name)
        if stride > 1:
            self.projection = Conv(num_in, num_out, 1, stride)
            self.norm = BatchNorm(num_out, axis_name)
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.stride > 1:
            x = self.norm(self.projection(x))
        return F.relu(x + y)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(inputs.NUM_CLASSES, 16))
        self.bias = nn.Parameter(torch.zeros(inputs.NUM_CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.mean((2, 3)), self.kernel.to(x.dtype), self.bias.to(x.dtype)).float()


class ResNet(nn.Module):
    def __init__(self, axis_name: str | None) -> None:
        super().__init__()
        self.conv = Conv(3, 8, 3)
        self.norm = BatchNorm(8, axis_name)
        self.block1 = Block(8, 8, 1, axis_name)
        self.block2 = Block(8, 16, 2, axis_name)
        self.head = Head()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(images)))
        return self.head(self.block2(self.block1(x)))


def from_jax(arrays: inputs.Arrays) -> dict[str, torch.Tensor]:
    """Kernels of convolutions from HWIO to OIHW, those of dense layers from IO to OI."""
    orders = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}
    return {
        name: torch.from_numpy(array).permute(orders[array.ndim]).contiguous()
        for name, array in arrays.items()
    }


cross_entropy = functools.partial(F.cross_entropy, label_smoothing=0.1)


def rate_factor(step: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * (step - 4) / (inputs.IMAGE_STEPS - 4)))
    return step / 4 if step < 4 else cosine


def scaled_value_and_grad(function: Any, scale: torch.Tensor, good_steps: torch.Tensor) -> Any:
    """What ``DynamicScale.value_and_grad`` of flax gives, for ``function`` -> (loss, aux)."""

    def scaled(params: Any) -> Any:
        loss, aux = function(params)
        return loss * scale, aux

    def wrapped(params: Any) -> Any:
        (_, aux), grads = tp.value_and_grad(scaled, has_aux=True)(params)
        grads = tp.pmean(tree_map(lambda g: g / scale, grads), "batch")
        finite = torch.stack([g.isfinite().all() for g in tree_leaves(grads)]).all()
        grow = good_steps == 2
        largest = torch.finfo(torch.float32).max
        larger = torch.where(grow, (scale * 2).clamp(max=largest), scale)
        new_scale = torch.where(finite, larger, scale * 0.5)
        new_good_steps = torch.where(grow | ~finite, 0, good_steps + 1)
        return finite, new_scale, new_good_steps, grads, aux

    return wrapped


def run(dtype: torch.dtype, norm_axis: str | None, **options: Any) -> dict[str, Any]:
    """The numbers that ``imagenet_jax.py`` writes; ``options``: of ``tp.pmap``."""
    model = ResNet(norm_axis)
    _, _, apply = tp.functional(model)
    optimizer = tp.optim.functional(torch.optim.SGD, lr=0.2, momentum=0.9, nesterov=True)
    rate = tp.optim.schedule(
        torch.optim.lr_scheduler.LambdaLR,
        lr=0.2,
        num_steps=inputs.IMAGE_STEPS,
        lr_lambda=rate_factor,
    )

    def train_step(state: Any, images: torch.Tensor, labels: torch.Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, stats = apply(params, state["stats"], images.to(dtype))
            decay = sum(p.square().sum() for p in params.values() if p.ndim > 1)
            return cross_entropy(logits, labels) + 1e-3 * 0.5 * decay, (logits, stats)

        grad_fn = scaled_value_and_grad(loss_fn, state["scale"], state["good_steps"])
        finite, scale, good_steps, grads, (logits, stats) = grad_fn(state["params"])
        lr = rate(state["count"])
        params, momentum = optimizer.update(grads, state["momentum"], state["params"], lr=lr)
        new = {"params": params, "momentum": momentum, "count": state["count"] + 1, "stats": stats}
        kept = tree_map(
            functools.partial(torch.where, finite), new, {name: state[name] for name in new}
        )
        metrics = tp.pmean(
            {
                "loss": cross_entropy(logits, labels),
                "accuracy": (logits.argmax(-1) == labels).float().mean(),
            },
            "batch",
        )
        metrics |= {"rate": lr, "scale": scale, "finite": finite}
        return kept | {"scale": scale, "good_steps": good_steps}, metrics

    def eval_step(params: Any, stats: Any, images: torch.Tensor, labels: torch.Tensor) -> Any:
        logits, _ = apply(params, stats, images.to(dtype))
        correct = (logits.argmax(-1) == labels).sum()
        return tp.psum(correct, "batch"), tp.pmean(cross_entropy(logits, labels), "batch")

    params, stats = map(from_jax, inputs.image_params())
    state = {
        "params": params,
        "stats": {name: x.expand(inputs.NUM_DEVICES, -1) for name, x in stats.items()},
        "momentum": optimizer.init(params),
        "count": torch.tensor(0),
        "scale": torch.tensor(2.0**16),
        "good_steps": torch.tensor(0),
    }
    axes = {name: 0 if name == "stats" else None for name in state}
    p_train_step = tp.pmap(
        train_step,
        "batch",
        in_axes=(axes, 0, 0),
        out_axes=(axes, None),
        donate_argnums=0,
        **options,
    )
    p_eval_step = tp.pmap(eval_step, "batch", in_axes=(None, None, 0, 0), out_axes=None, **options)
    sync_batch_stats = tp.pmap(
        lambda stats: tp.pmean(stats, "batch"), "batch", out_axes=None, **options
    )

    train: dict[str, list[Any]] = {
        "loss": [], "accuracy": [], "rate": [], "scale": [], "finite": [],
    }  # fmt: skip
    for batch in batches(inputs.training_images()):
        state, metrics = p_train_step(state, *batch)
        for name, value in metrics.items():
            train[name].append(value.item())
    spread = state["stats"]["block2.norm2.mean"].cpu().numpy().std(0).max()
    stats = sync_batch_stats(state["stats"])
    model.eval()
    evaluated = [
        [x.item() for x in p_eval_step(state["params"], stats, *batch)]
        for batch in batches(inputs.images(2, seed=6))
    ]
    return {
        **train,
        "spread": spread,
        "evaluated": evaluated,
        "count": state["count"].item(),
        "norms": {name: p.norm().item() for name, p in state["params"].items()},
        "stats": {name: x.tolist() for name, x in stats.items()},
    }


def batches(arrays: tuple[np.ndarray, np.ndarray]) -> Any:
    """``[device, row, channel, height, width]``, and labels."""
    for images, labels in zip(*map(torch.from_numpy, arrays), strict=True):
        yield images.movedim(-1, 2).contiguous(), labels.long()
