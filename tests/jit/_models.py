"""Models, batches and layouts for tests of ``jit``; in float64, where 1e-12 is a difference."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torchpmap as tp
from torchpmap import P

LINE, SQUARE = ((4,), ("x",)), ((2, 2), ("x", "y"))
ROWS = P("x")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            f(y).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Two blocks, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.places = nn.Parameter(torch.randn(4, 16) / 4)
        self.blocks = nn.Sequential(Block(16, 4), Block(16, 4), nn.LayerNorm(16))
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x) + self.places))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def convolutional() -> nn.Module:
    body = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 4))


MODELS = {"network": network, "convolutional": convolutional, "transformer": Transformer}


def made(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[kind]().double()


def batches(kind: str, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shape = {"network": (16, 8), "convolutional": (16, 1, 8, 8)}.get(kind)
    for _ in range(count):
        if shape is None:
            x, y = torch.randint(0, 16, (2, 8, 4), generator=generator)
        else:
            x = torch.randn(shape, dtype=torch.float64, generator=generator)
            y = torch.randint(0, 4, shape[:1], generator=generator)
        yield x, y


def replicated(name: str, shape: torch.Size) -> P:
    return P()


def fully_sharded(name: str, shape: torch.Size) -> P:
    return P("x") if shape and shape[0] % 4 == 0 else P()


def tensor_parallel(name: str, shape: torch.Size) -> P:
    """Megatron's cuts: columns of a first product, rows of the second."""
    layer = name.split(".")[-2] if "." in name else ""
    if layer in ("q", "k", "v", "up", "0"):
        return P("y")
    return P(None, "y") if layer in ("out", "down", "2") and len(shape) == 2 else P()


LAYOUTS = {
    "replicated": (LINE, replicated),
    "fully sharded": (LINE, fully_sharded),
    "tensor-parallel": (SQUARE, tensor_parallel),
}


def placed(model: nn.Module, layout: str) -> nn.Module:
    """The model with parameters that lie as the layout says, and replicated buffers."""
    axes, spec_of = LAYOUTS[layout]
    mesh = tp.make_mesh(*axes)
    new: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        sharding = tp.NamedSharding(mesh, spec_of(name, parameter.shape))
        new[id(parameter)] = nn.Parameter(tp.device_put(parameter.detach(), sharding))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, name, new[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, tp.device_put(buffer, tp.NamedSharding(mesh, P())))
    return model


def cut(values: Any, layout: str) -> Any:
    """A batch in rows."""
    return tp.device_put(values, tp.NamedSharding(tp.make_mesh(*LAYOUTS[layout][0]), ROWS))
