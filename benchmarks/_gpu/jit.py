"""Ordinary training steps in ``tp.jit``, compared with the same step of plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchpmap as tp
from _gpu.bench import Bench, near
from _gpu.gpt2 import GPT2, TOY

STEPS = 4
Make = Callable[[], tuple[nn.Module, Tensor, Tensor]]


def perceptron() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    return model, torch.randn(8, 16), torch.randint(4, (8,))


def convolutions() -> tuple[nn.Module, Tensor, Tensor]:
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
    norms = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
    layers = (first, norms[0], nn.ReLU(), nn.MaxPool2d(2), second, norms[1], nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(32, 5)), torch.randn(8, 3, 8, 8), torch.arange(8) % 5


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    tokens = torch.randint(TOY.vocabulary, (8, TOY.context))
    return GPT2(TOY), tokens, tokens.roll(-1, 1)


MODELS: dict[str, Make] = {
    "perceptron": perceptron,
    "convolutions": convolutions,
    "transformer": transformer,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
}


def objective(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def trained(make: Make, optimizer: str, **jit: Any) -> tuple[Any, Any]:
    """Losses of some steps and the last state: of ``jit``, and of plain torch on the CPU."""
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        model, x, y = make()
        if ours:
            tp.replicate(model)
            x, y = tp.shard_batch((x, y))
        stepping = OPTIMIZERS[optimizer](model.parameters())

        def step(x: Tensor, y: Tensor, model: Any = model, stepping: Any = stepping) -> Tensor:
            loss = objective(model, x, y)
            loss.backward()
            stepping.step()
            stepping.zero_grad()
            return loss.detach()

        if ours:
            step = tp.jit(step, fullgraph=True, **jit)
        losses = [step(x, y).item() for _ in range(STEPS)]
        state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
        found.append((torch.tensor(losses), state))
    return found[0], found[1]


def outside(bench: Bench) -> tuple[Any, Any]:
    """``backward()`` outside of the function."""
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        model, x, y = perceptron()
        forward: Any = model
        if ours:
            tp.replicate(model)
            x, y = tp.shard_batch((x, y))
            forward = tp.jit(lambda x, model=model: model(x), compile=bench.compile)
        F.cross_entropy(forward(x), y).backward()
        found.append([parameter.grad.cpu() for parameter in model.parameters()])
    return found[0], found[1]


def dropped(bench: Bench) -> None:
    x = tp.shard_batch(torch.ones(10_000))
    y = tp.jit(lambda x: F.dropout(x, 0.5), compile=bench.compile)(x).cpu()
    kept = (y != 0).float().mean().item()
    bench.check("dropout", abs(kept - 0.5) < 0.03 and bool((y[y != 0] == 2).all()), kept)


def run(bench: Bench, devices: int = 1) -> None:
    tp.init(devices)
    torch.backends.cudnn.allow_tf32 = False  # reaches the workers
    for name, make in MODELS.items():
        for optimizer in OPTIMIZERS:
            for compiled in (bench.compile, {"backend": "eager"}):
                how = "compiled" if compiled is bench.compile else "operation by operation"
                with bench.part(f"{name}, {optimizer}, {how}"):
                    got, expected = trained(make, optimizer, compile=compiled)
                    # Adam takes a whole step in the direction of a gradient that is rounding only
                    passed = near(got[0], expected[0], 1e-3) and near(got[1], expected[1], 1e-2)
                    bench.check(f"{name}, {optimizer}, {how}", passed, (got[0], expected[0]))
    with bench.part("backward() outside"):
        got, expected = outside(bench)
        bench.check("backward() outside", near(got, expected, 1e-4), got)
    with bench.part("dropout"):
        dropped(bench)


def shared(bench: Bench) -> None:
    run(bench, 2)
