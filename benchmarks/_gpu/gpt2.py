"""GPT-2 in plain torch, and its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Those of the smallest GPT-2: 124 million weights."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50304
    """50257, and what makes it a multiple of 64."""
    batch: int = 8


TOY = Sizes(layers=1, width=16, heads=2, context=8, vocabulary=32, batch=2)


class Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm and beside a residual connection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.before_attention = nn.LayerNorm(sizes.width)
        self.to_qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.from_heads = nn.Linear(sizes.width, sizes.width)
        self.before_mlp = nn.LayerNorm(sizes.width)
        self.widen = nn.Linear(sizes.width, 4 * sizes.width)
        self.narrow = nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(self.before_attention(x))
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in qkv.chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.from_heads(seen.transpose(-3, -2).flatten(-2))
        return x + self.narrow(F.gelu(self.widen(self.before_mlp(x)), approximate="tanh"))


class GPT2(nn.Module):
    """[batch, context] tokens -> [batch, context, vocabulary] logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.place = nn.Parameter(torch.empty(sizes.context, sizes.width))
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.last = nn.LayerNorm(sizes.width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x) + self.place
        for block in self.blocks:
            x = block(x)
        return F.linear(self.last(x), self.token.weight)


Loss = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]


def model_and_loss(sizes: Sizes, device_type: str) -> tuple[GPT2, Loss]:
    """The model with the same weights in every process, and its loss in bfloat16."""
    torch.manual_seed(0)
    model = GPT2(sizes)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device_type, torch.bfloat16):
            logits = torch.func.functional_call(model, params, (x,))
        return F.cross_entropy(logits.float().flatten(0, -2), y.flatten())

    return model, loss


def batches(sizes: Sizes, count: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Host batches; the tokens can be learnt, since each is the one before plus three."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(sizes.vocabulary, (count, sizes.batch, 1), generator=generator)
    tokens = (starts + 3 * torch.arange(sizes.context + 1)) % sizes.vocabulary
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in tokens]
