"""Fully sharded training: no device keeps a whole layer (20 s).

    python examples/fsdp.py [--devices 4] [--quick] [--steps 30] [--no-compile]
    torchrun --nproc-per-node=4 examples/fsdp.py

The weights and the optimizer's moments are cut over the devices, and so is the batch. With
``tp.jit`` the step is an ordinary one: where the weights lie says that a layer is gathered when it
is needed, and that its gradient arrives cut as it is, in one message with the others.

The other way writes down what each device does. A layer is gathered by ``all_gather``; under
``torch.utils.checkpoint`` it is gathered again for the backward pass, so that it need not be kept.
The derivative of ``all_gather`` is ``psum_scatter``: gradients arrive summed, and cut as the
weights are. So the optimizer updates a device's part of the weights with its part of the moments.

The losses of both are compared with those of the same training on one device, and the bytes that a
device keeps with those of the whole state.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import torchpmap as tp
from torchpmap import P

State = tuple[list[Tensor], Any]
"""Weights and the state of the optimizer."""

LAYERS, ROWS = 4, 32
OPTIMIZER = tp.optim.functional(torch.optim.AdamW, lr=3e-3)


# -- an ordinary step ------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + torch.tanh(x @ weight)
        return x


def train_jitted(
    num_devices: int, width: int, num_steps: int, compile: Any = True
) -> tuple[list[float], int]:
    """The loss of every step, and the bytes of weights and moments that a device keeps."""
    mesh = tp.make_mesh((num_devices,), ("d",))
    model = tp.shard_module(Layers(first_weights(width)), {"weights": P("d")}, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = tp.NamedSharding(mesh, P("d"))

    @tp.jit(compile=compile)
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(*tp.device_put((x, y), rows)) for x, y in batches(width, num_steps)]
    states = optimizer.state.values()
    state = [*model.parameters(), *(x for each in states for x in each.values())]
    return [loss.item() for loss in losses], bytes_of_one(state)


def bytes_of_one(tensors: list[Tensor]) -> int:
    """What a device keeps of tensors; counters of this process count as its own."""
    shards = [
        x.addressable_shards[0].data if isinstance(x, tp.ShardedTensor) else x for x in tensors
    ]
    return sum(shard.nbytes for shard in shards)


# -- the same by hand ------------------------------------------------------------------------------


def whole(weight: Tensor) -> Tensor:
    """float[width / d, width] -> float[width, width]"""
    return tp.all_gather(weight, "d", tiled=True)


def layer(x: Tensor, weight: Tensor) -> Tensor:
    return x + torch.tanh(x @ weight)


def gathered_layer(x: Tensor, weight: Tensor) -> Tensor:
    return layer(x, whole(weight))


def step_of_blocks(state: State, x: Tensor, y: Tensor) -> tuple[State, Tensor]:
    """A step on a device's part of the weights and of the batch."""
    weights, moments = state

    def part_of_loss(weights: list[Tensor]) -> Tensor:
        found = x
        for weight in weights:
            found = checkpoint(gathered_layer, found, weight, use_reentrant=False)
        return (found - y).square().mean() / tp.axis_size("d")

    value, gradients = tp.value_and_grad(part_of_loss)(weights)
    return OPTIMIZER.update(gradients, moments, weights), tp.psum(value, "d")


def step_on_one_device(state: State, x: Tensor, y: Tensor) -> tuple[State, Tensor]:
    weights, moments = state

    def loss(weights: list[Tensor]) -> Tensor:
        return (functools.reduce(layer, weights, x) - y).square().mean()

    value, gradients = tp.value_and_grad(loss)(weights)
    return OPTIMIZER.update(gradients, moments, weights), value


def first_weights(width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(width, width, generator=generator) / width for _ in range(LAYERS)]


def first_state(width: int) -> State:
    weights = first_weights(width)
    return weights, OPTIMIZER.init(weights)


def specs_of(state: State) -> Any:
    """Rows of what has rows; all devices count the steps."""
    return tree_map(lambda leaf: P("d") if leaf.dim() else P(), state)


def batches(width: int, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    for _ in range(num_steps):
        x = torch.randn(ROWS, width, generator=generator)
        yield x, x @ turn


def train(
    num_devices: int, width: int, num_steps: int, compile: Any = True
) -> tuple[list[float], int]:
    """The loss of every step, and the bytes of the state that a device keeps."""
    mesh = tp.make_mesh((num_devices,), ("d",))
    state = first_state(width)
    specs = specs_of(state)
    step = tp.shard_map(
        step_of_blocks,
        mesh=mesh,
        in_specs=(specs, P("d"), P("d")),
        out_specs=(specs, P()),
        donate_argnums=0,
        compile=compile,
    )
    losses = []
    for x, y in batches(width, num_steps):
        state, loss = step(state, x, y)
        losses.append(loss)
    return [loss.item() for loss in losses], bytes_of_one(tree_leaves(state))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with weights that are cut over devices.")
    parser.add_argument("--devices", type=int, help="default: every GPU, or four CPU devices")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--quick", dest="steps", action="store_const", const=4, help="4 steps")
    parser.add_argument("--no-compile", action="store_true", help="run graphs uncompiled")
    args = parser.parse_args()

    if tp.process_count() == 1:
        tp.init(args.devices or (4 if tp.default_backend() == "cpu" else None))
    n, width = tp.device_count(), 64
    compile = {"backend": "eager"} if args.no_compile else True
    losses, kept = train_jitted(n, width, args.steps, compile)
    by_hand, kept_by_hand = train(n, width, args.steps, compile)
    if tp.process_index() != 0:
        return  # one process reports

    state = first_state(width)
    num_bytes = sum(leaf.nbytes for leaf in tree_leaves(state))
    for k, (x, y) in enumerate(batches(width, args.steps)):
        state, wanted = step_on_one_device(state, x, y)
        for loss in (losses[k], by_hand[k]):
            assert abs(loss - wanted.item()) < 1e-3 * wanted.item(), (loss, wanted)
    print(f"loss {losses[0]:.3f}, after {args.steps} steps {losses[-1]:.3f}, as on one device")
    print(f"of {num_bytes:,} bytes of weights and moments, a device of {n} keeps {kept:,}")
    assert kept_by_hand == kept
    print("the same by hand")
    print("ok")


if __name__ == "__main__":
    main()
