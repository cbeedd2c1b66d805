"""Mistakes that a type checker must report, each with mypy's code for it; never run."""

import torch
from torch import Tensor

import torchpmap as tp


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (params["w"] * x).sum()


@tp.pmap(axis_name="i")
def step(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return tp.pmean(loss(params, x), "i")


class Model:
    @tp.pmap(axis_name="i")
    def apply(self, x: Tensor) -> Tensor:
        return x


x, params = torch.ones(4), {"w": torch.ones(4)}

tp.pmap(loss, "i")(params)  # error: call-arg
tp.pmap(loss, "i")(x, params)  # error: arg-type
tp.pmap(loss, "i")(params, x, lr=0.1)  # error: call-arg
tp.pmap(loss, "i").lower(params)  # error: call-arg
tp.pmap(loss, "i").lowered(params, x)  # error: attr-defined
tp.pmap(loss, axis="i")  # error: call-overload
tp.pmap(loss, in_axis=0)  # error: call-overload
tp.pmap(loss, randomness=1)  # error: call-overload
tp.pmap(axis_name="i", in_axis=0)  # error: call-overload
tp.pmap(3)  # error: call-overload
step(params)  # error: call-arg
step(x, x)  # error: arg-type
step(params, x).hello()  # error: attr-defined
number: int = step(params, x)  # error: assignment
Model().apply(x, x)  # error: call-arg
Model().apply("x")  # error: arg-type
tp.vmap(loss)(params)  # error: call-arg
tp.vmap(loss, in_dims=0)  # error: call-arg
tp.grad(loss)(params, "x")  # error: arg-type
tp.grad(loss)(params, x).sum()  # error: attr-defined
tp.grad(loss, has_aux=True)(params, x)  # error: call-overload
value, grads, aux = tp.value_and_grad(loss)(params, x)  # error: misc
tp.psum(x)  # error: call-arg
tp.psum(params, "i").sum()  # error: attr-defined
tp.psum(x, {"i": 1})  # error: arg-type
tp.ppermute(x, "i", [0, 1])  # error: list-item
tp.replicate(params, tp.devices()[0])  # error: call-overload
tp.device_put(x, "cpu:0")  # error: arg-type
tp.block_until_ready(params).sum()  # error: attr-defined
