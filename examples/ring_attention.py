"""Ring attention: a sequence that no device has whole, in memory that does not grow (30 s).

    python examples/ring_attention.py [--devices 4] [--quick] [--block 256] [--no-compile]
    torchrun --nproc-per-node=4 examples/ring_attention.py

The sequence is cut over the devices. Every device keeps its block of queries, and the blocks of
keys and values go round in a ring: after as many steps as there are devices, each block of queries
has met all of them (Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers").
A softmax needs the sum over the whole row, so the sum is a running one: with a larger score all
that was added up before shrinks (Milakov and Gimelshein 2018).

The backward pass computes the scores again from the largest and the sum of each row, as
FlashAttention does. The gradients of the keys and values travel with them, and are home after one
round. So a device never holds more than one block of scores, however many devices there are.

Values and gradients are compared with plain attention on one device, in float64. A picture of who
meets whom when, and of the memory, is written to ``outputs/``.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import torchpmap as tp
from torchpmap import P

HEADS, SIZE = 4, 32
Tensors = tuple[Tensor, ...]


def pass_on(tensors: Tensors) -> Tensors:
    """Give them to the next device of the ring, and get those of the one before."""
    n = tp.axis_size("ring")
    return tp.ppermute(tensors, "ring", [(k, (k + 1) % n) for k in range(n)])


def scores_of(q: Tensor, k: Tensor, step: Tensor, causal: bool) -> Tensor:
    """float[heads, rows, size] twice -> float[heads, rows, rows], with the keys of this step."""
    scores = q @ k.mT / math.sqrt(SIZE)
    if not causal:
        return scores
    rows, me = torch.arange(q.shape[-2]), tp.axis_index("ring")
    owner = (me - step) % tp.axis_size("ring")  # of the keys that are here now
    is_later = owner * len(rows) + rows > (me * len(rows) + rows)[:, None]
    return scores.masked_fill(is_later, -math.inf)


class RingAttention(torch.autograd.Function):
    """float[heads, rows, size] three times -> the same; of a device's block of the sequence."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        def meet(carry: tuple[Tensors, Tensors], step: Tensor) -> tuple[Any, None]:
            (k, v), (largest, total, mixed) = carry
            scores = scores_of(q, k, step, causal)
            # The first keys to be met are a device's own, so a row never sees only -inf.
            new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
            shrink, weights = torch.exp(largest - new_largest), torch.exp(scores - new_largest)
            total = total * shrink + weights.sum(-1, keepdim=True)
            mixed = mixed * shrink + weights @ v
            return (pass_on((k, v)), (new_largest, total, mixed)), None

        nothing = torch.zeros_like(q[..., :1])
        start = (nothing - math.inf, nothing, torch.zeros_like(v))
        steps = torch.arange(tp.axis_size("ring"))
        (_, (largest, total, mixed)), _ = tp.scan(meet, ((k, v), start), steps)
        return mixed / total, largest + total.log()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *blocks, ctx.causal = inputs
        ctx.save_for_backward(*blocks, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, pulled: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        q, k, v, result, log_total = ctx.saved_tensors
        along = (pulled * result).sum(-1, keepdim=True)

        def meet(carry: tuple[Tensor, Tensors], step: Tensor) -> tuple[Any, None]:
            of_q, (k, v, of_k, of_v) = carry
            weights = torch.exp(scores_of(q, k, step, ctx.causal) - log_total)
            of_scores = weights * (pulled @ v.mT - along) / math.sqrt(SIZE)
            of_k = of_k + of_scores.mT @ q
            of_v = of_v + weights.mT @ pulled
            return (of_q + of_scores @ k, pass_on((k, v, of_k, of_v))), None

        travelling = (k, v, torch.zeros_like(k), torch.zeros_like(v))
        steps = torch.arange(tp.axis_size("ring"))
        (of_q, (_, _, of_k, of_v)), _ = tp.scan(meet, (torch.zeros_like(q), travelling), steps)
        return of_q, of_k, of_v, None


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = q @ k.mT / math.sqrt(SIZE)
    if causal:
        is_later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, -math.inf)
    return scores.softmax(-1) @ v


def ring(num_devices: int, causal: bool, compile: Any = True) -> Any:
    """(q, k, v, cotangent) -> (the result, the gradients of q, k and v), mapped over blocks."""

    def attend(q: Tensor, k: Tensor, v: Tensor, pulled: Tensor) -> Tensors:
        result, pull = torch.func.vjp(lambda *b: RingAttention.apply(*b, causal)[0], q, k, v)
        return result, *pull(pulled)

    mesh = tp.make_mesh((num_devices,), ("ring",))
    tokens = P(None, "ring")  # [heads, tokens, size]
    return tp.shard_map(attend, mesh=mesh, in_specs=tokens, out_specs=tokens, compile=compile)


def plain(q: Tensor, k: Tensor, v: Tensor, pulled: Tensor, causal: bool) -> Tensors:
    """The same of a whole sequence."""
    result, pull = torch.func.vjp(lambda *whole: plain_attention(*whole, causal), q, k, v)
    return result, *pull(pulled)


def held(block: int, num_devices: int) -> tuple[int, int]:
    """The most bytes that a device holds at once, alone and in the ring, counted from the graph."""
    shape = (HEADS, block * num_devices, SIZE)
    blocks = [torch.zeros(shape, dtype=torch.float64)] * 4
    one = tp.make_mesh((1,), ("one",))
    alone = tp.shard_map(lambda *b: plain(*b, True), mesh=one, in_specs=P(), out_specs=P())
    together = ring(num_devices, True)
    return tp.debug.cost(alone, *blocks).peak_bytes, tp.debug.cost(together, *blocks).peak_bytes


def draw(memory: dict[int, tuple[int, int]], path: Path) -> None:
    """Draw in which step blocks meet, and what a device holds."""
    n = max(memory)
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = (torch.arange(n)[:, None] - torch.arange(n)) % n
    left.imshow(steps, cmap="Blues", vmin=-0.5, vmax=1.5 * n)
    for row in range(n):
        for column in range(n):
            text = f"{int(steps[row, column])}{' x' if column > row else ''}"
            left.text(column, row, text, ha="center", va="center")
    names = [str(device) for device in tp.devices()]
    left.set_xticks(range(n), names)
    left.set_yticks(range(n), names)
    left.set(xlabel="keys and values of", ylabel="queries, on")
    left.set_title("In which step blocks meet (x: masked if causal)", fontsize=10)

    sizes = range(len(memory))
    for k, label in enumerate(("plain attention, one device", "each device of the ring")):
        megabytes = [pair[k] / 1e6 for pair in memory.values()]
        right.bar([x + 0.4 * k for x in sizes], megabytes, 0.4, label=label)
    right.set_xticks([x + 0.2 for x in sizes], [str(n) for n in memory])
    right.set(xlabel="devices, and blocks of the sequence", ylabel="MB")
    right.set_title("What a device holds as the sequence grows", fontsize=10)
    right.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention over a sequence that is cut.")
    parser.add_argument("--devices", type=int, help="default: every GPU, or four CPU devices")
    parser.add_argument("--block", type=int, default=256, help="tokens on each device")
    parser.add_argument("--quick", dest="block", action="store_const", const=32, help="32 tokens")
    parser.add_argument("--no-compile", action="store_true", help="run operation by operation")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for the PNG")
    args = parser.parse_args()

    if tp.process_count() == 1:
        tp.init(args.devices or (4 if tp.default_backend() == "cpu" else None))
    n = tp.device_count()
    generator = torch.Generator().manual_seed(0)
    shape = (HEADS, n * args.block, SIZE)
    blocks = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    lines = [f"{n} devices with {args.block} tokens each, a sequence of {n * args.block}"]
    for causal in (False, True):
        found = tp.multihost.all_gather(ring(n, causal, not args.no_compile)(*blocks), tiled=True)
        for value, wanted in zip(found, plain(*blocks, causal), strict=True):
            torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
        kind = "causal" if causal else "full"
        lines.append(f"{kind}: values and gradients are those of one device, to 1e-12")
    memory = {k: held(args.block, k) for k in range(1, n + 1) if n % k == 0}
    lines.append("at most a device holds, as the sequence grows with the devices:")
    for k, (alone, each) in memory.items():
        lines.append(f"  {k * args.block:5} tokens: alone {alone:11,} bytes, in a ring {each:9,}")
    # a ring of one device sends nothing; larger ones differ by the numbers of their steps
    rings = [each for k, (_, each) in memory.items() if k > 1]
    assert max(rings, default=0) - min(rings, default=0) < 1000, rings
    if tp.process_index() != 0:
        return  # one process reports
    args.output.mkdir(parents=True, exist_ok=True)
    draw(memory, args.output / "ring_attention.png")
    print(*lines, f"wrote {args.output}/ring_attention.png", "ok", sep="\n")


if __name__ == "__main__":
    main()
