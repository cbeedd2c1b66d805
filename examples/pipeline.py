"""A pipeline: each device has some layers, and microbatches go from device to device (30 s).

    python examples/pipeline.py [--devices 4] [--quick] [--microbatches 8] [--no-compile]
    torchrun --nproc-per-node=4 examples/pipeline.py

The layers of a network are cut over the axis ``stage``, and the batch into microbatches. In each
tick every stage takes what has arrived, computes its layers, and sends the result to the next
stage: a ``scan`` over the ticks, with a ``ppermute`` in it. S stages need M + S - 1 ticks for M
microbatches. A stage idles in S - 1 of them, which is called the bubble (Huang et al. 2019,
"GPipe").

Nothing is written for the backward pass. The derivative of ``ppermute`` sends the other way, and
that of ``scan`` goes from the last tick to the first. It keeps what arrived in each tick and
computes the layers again, as GPipe does.

Loss and gradients are compared with those of one device, in float64. Every microbatch carries its
number along, so the schedule that is printed is the one that has happened.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, mse_loss

import torchpmap as tp
from torchpmap import P

Weights = dict[str, Tensor]

LAYERS, WIDTH = 8, 32


def layer(x: Tensor, weights: Weights) -> tuple[Tensor, None]:
    """A residual block of a perceptron, float[rows, width] -> the same; as ``scan`` calls it."""
    hidden = gelu(layer_norm(x, (WIDTH,)) @ weights["up"])
    return x + hidden @ weights["down"], None


def layers(x: Tensor, weights: Weights) -> Tensor:
    """As many layers as the weights have, one after the other."""
    return tp.scan(layer, x, weights)[0]


def loss_on_one_device(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(layers(x.flatten(0, 1), weights), y.flatten(0, 1))


def loss_of_stage(weights: Weights, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(the loss of all microbatches, the numbers of those that were here, tick by tick)

    Args:
        weights: of the layers of this stage.
        x, y: float[microbatches, rows, width]; the first stage reads x, and the last one y.
    """
    stage, num_stages = tp.axis_index("stage"), tp.axis_size("stage")
    ahead = [(k, k + 1) for k in range(num_stages - 1)]
    is_first, is_last = stage == 0, stage == num_stages - 1

    def tick(arrived: Any, fed: Any) -> tuple[Any, Any]:
        before, number = (torch.where(is_first, a, b) for a, b in zip(fed, arrived, strict=True))
        after = layers(before, weights)
        return tp.ppermute((after, number), "stage", ahead), (after, number)

    # Behind the last microbatch the first stage is fed nothing, until the pipeline is empty.
    nothing = x.new_zeros(num_stages - 1, *x.shape[1:])
    numbers = torch.arange(1, len(x) + 1)  # 0 is no microbatch
    fed = torch.cat([x, nothing]), torch.cat([numbers, numbers.new_zeros(num_stages - 1)])
    start = torch.zeros_like(x[0]), torch.zeros_like(numbers[0])
    _, (found, schedule) = tp.scan(tick, start, fed)
    # The first microbatch leaves the last stage in tick S - 1. Other stages have no results.
    loss = torch.where(is_last, mse_loss(found[num_stages - 1 :], y), 0.0)
    return tp.psum(loss, "stage"), schedule[None]


def pipeline(num_stages: int, compile: Any = True) -> Any:
    return tp.shard_map(
        loss_of_stage,
        mesh=tp.make_mesh((num_stages,), ("stage",)),
        in_specs=(P("stage"), P(), P()),
        out_specs=(P(), P("stage")),
        compile=compile,
    )


def first_weights() -> Weights:
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }


def picture(schedule: Tensor) -> list[str]:
    """A line for each stage: the microbatches forward, and backward in the mirror image."""
    cells = [[f"{k:2}" if k else " ." for k in row] for row in schedule.tolist()]
    return [
        f"  stage {stage} |{' '.join(row)} |{' '.join(reversed(row))} |"
        for stage, row in enumerate(cells)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Cut the layers of a network over devices.")
    parser.add_argument("--devices", type=int, choices=(1, 2, 4, 8))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--quick", dest="microbatches", action="store_const", const=4, help="4 microbatches"
    )
    parser.add_argument("--no-compile", action="store_true", help="run operation by operation")
    args = parser.parse_args()

    if tp.process_count() == 1:
        tp.init(args.devices or (4 if tp.default_backend() == "cpu" else None))
    stages, microbatches = tp.device_count(), args.microbatches
    if LAYERS % stages:
        parser.error(f"{LAYERS} layers must be divisible by {stages} devices")
    weights = first_weights()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, microbatches, 16, WIDTH, generator=generator, dtype=torch.float64)

    loss = tp.value_and_grad(pipeline(stages, not args.no_compile), has_aux=True)
    (value, schedule), gradients = loss(weights, x, y)
    schedule = tp.multihost.all_gather(schedule, tiled=True)  # of all processes
    wanted, wanted_gradients = tp.value_and_grad(loss_on_one_device)(weights, x, y)
    torch.testing.assert_close(value.cpu(), wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=0, atol=1e-12)

    ticks = microbatches + stages - 1
    bubble = (schedule == 0).double().mean().item()
    assert schedule.shape == (stages, ticks), schedule.shape
    assert abs(bubble - (stages - 1) / ticks) < 1e-12, bubble
    if tp.process_index() != 0:
        return  # one process reports
    print(f"{LAYERS} layers on {stages} stages, {microbatches} microbatches, {ticks} ticks")
    print(*["forward, and backward (microbatch by tick, . is idle):", *picture(schedule)], sep="\n")
    print(f"bubble: {stages - 1} of {ticks} ticks, {bubble:.1%}")
    print(f"loss {value.item():.6f}, on one device {wanted.item():.6f}")
    print("the gradients of all layers are those of one device, to 1e-12")
    print("ok")


if __name__ == "__main__":
    main()
