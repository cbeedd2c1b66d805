"""A transformer block cut over data, heads and sequence (20 s).

    python examples/tensor_parallel.py [--devices 4] [--quick] [--width 64] [--no-compile]
    torchrun --nproc-per-node=4 examples/tensor_parallel.py

Devices lie on a mesh with the axes ``data`` and ``model``. The batch is cut over ``data``. Over
``model`` the weights are cut: each device has some of the heads, and some of the hidden units of
the perceptron, so that it multiplies without talking.

With ``tp.jit`` that is all: the block for one device runs as it is, and where its weights lie says
how. The other way writes down what each device does: between the two parts the sequence is cut over
``model``, ``all_gather`` brings it together before the heads need all of it, and ``psum_scatter``
adds up what the devices found and cuts the sum again.

The loss and all gradients of both are compared with those of the same block on one device.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

import torchpmap as tp
from torchpmap import P

Weights = dict[str, Tensor]

HEADS = 8

SPECS = {
    "qkv": P(None, None, "model"),  # [width, 3, heads, size of a head]: some of the heads
    "out": P("model"),  # [heads, size of a head, width]
    "up": P(None, "model"),  # [width, hidden]: some of the hidden units
    "down": P("model"),  # [hidden, width]
}


def first_weights(width: int) -> Weights:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "qkv": (width, 3, HEADS, width // HEADS),
        "out": (HEADS, width // HEADS, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    return {
        name: torch.randn(shape, generator=generator) / width**0.5 for name, shape in shapes.items()
    }


def attention(weights: Weights, x: Tensor) -> Tensor:
    """float[batch, length, width] -> the same; of the heads that the weights have."""
    q, k, v = torch.einsum("blw,wahs->abhls", x, weights["qkv"])
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.einsum("bhls,hsw->blw", mixed, weights["out"])


def perceptron(weights: Weights, x: Tensor) -> Tensor:
    """float[batch, length, width] -> the same; of the hidden units that the weights have."""
    return gelu(x @ weights["up"]) @ weights["down"]


def normalized(x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:])


def loss_on_one_device(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    x = x + attention(weights, normalized(x))
    x = x + perceptron(weights, normalized(x))
    return (x - y).square().mean()


def loss_of_blocks(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    """The same of a device's part of the batch, the sequence and the weights."""

    def together(part: Tensor) -> Tensor:
        return tp.all_gather(part, "model", axis=1, tiled=True)

    def added(sums: Tensor) -> Tensor:
        return tp.psum_scatter(sums, "model", scatter_dimension=1, tiled=True)

    x = x + added(attention(weights, together(normalized(x))))
    x = x + added(perceptron(weights, together(normalized(x))))
    return tp.pmean((x - y).square().mean(), ("data", "model"))


def mapped_loss(mesh: tp.Mesh, compile: Any = True) -> Any:
    tokens = P("data", "model")  # [batch, length, width]
    return tp.shard_map(
        loss_of_blocks, mesh=mesh, in_specs=(SPECS, tokens, tokens), out_specs=P(), compile=compile
    )


def jitted_loss(mesh: tp.Mesh, weights: Weights, x: Tensor, y: Tensor, compile: Any = True) -> Any:
    """The loss and the gradients of the block for one device, with weights and rows that are cut;
    and what a device sends.
    """

    @tp.jit(compile=compile)
    def step(weights: Weights, x: Tensor, y: Tensor) -> Any:
        return tp.value_and_grad(loss_on_one_device)(weights, x, y)

    def put(value: Tensor, spec: P) -> Tensor:
        return tp.device_put(value, tp.NamedSharding(mesh, spec))

    given = (
        {name: put(w, SPECS[name]) for name, w in weights.items()},
        *(put(rows, P("data")) for rows in (x, y)),
    )
    return *step(*given), step.lower(*given).cost()


def check(value: Tensor, gradients: Weights, wanted: Tensor, wanted_gradients: Weights) -> None:
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5)
    assert abs(value.item() - wanted.item()) < 1e-4 * wanted.item(), (value, wanted)


def mesh_of(num_devices: int) -> tp.Mesh:
    """As many devices for the model as divide its heads, the others for the data."""
    for_model = max(n for n in (1, 2, 4) if num_devices % n == 0 and n * n <= 2 * num_devices)
    return tp.make_mesh((num_devices // for_model, for_model), ("data", "model"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Cut a transformer block over devices.")
    parser.add_argument("--devices", type=int, help="default: every GPU, or four CPU devices")
    parser.add_argument("--width", type=int, default=64, help=f"a multiple of {HEADS}")
    parser.add_argument("--quick", dest="width", action="store_const", const=16, help="width 16")
    parser.add_argument("--no-compile", action="store_true", help="run graphs uncompiled")
    args = parser.parse_args()

    if tp.process_count() == 1:
        tp.init(args.devices or (4 if tp.default_backend() == "cpu" else None))
    mesh = mesh_of(tp.device_count())
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, 32, args.width, generator=generator) for _ in range(2))
    weights = first_weights(args.width)

    compile = {"backend": "eager"} if args.no_compile else True
    wanted = tp.value_and_grad(loss_on_one_device)(weights, x, y)
    *found, sent = jitted_loss(mesh, weights, x, y, compile)
    check(*found, *wanted)
    value, gradients = tp.value_and_grad(mapped_loss(mesh, compile))(weights, x, y)
    check(value, gradients, *wanted)
    if tp.process_index() == 0:  # one process reports
        print(f"{mesh.size} devices, {', '.join(f'{n} for {a}' for a, n in mesh.shape.items())}")
        print(f"loss {value.item():.4f}, on one device {wanted[0].item():.4f}")
        print("the gradients of all weights are those of one device, with jit and by hand")
        print(f"with jit, a device computes and sends\n{sent}")
        print("ok")


if __name__ == "__main__":
    main()
