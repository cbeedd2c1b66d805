"""Programs that a type checker must accept, with the types that they have; never run."""

from collections.abc import Callable
from typing import Any, NamedTuple, assert_type

import numpy as np
import torch
from torch import Tensor

import torchpmap as tp

Params = dict[str, Tensor]


class State(NamedTuple):
    params: Params
    step: int


def loss(params: Params, x: Tensor, *, scale: float = 1.0) -> Tensor:
    return (params["w"] * x).sum() * scale


def loss_and_aux(params: Params, x: Tensor) -> tuple[Tensor, State]:
    return loss(params, x), State(params, 0)


def step(state: State, x: Tensor) -> tuple[State, Tensor]:
    value, grads = tp.value_and_grad(loss)(state.params, x)
    assert_type(value, Tensor)
    assert_type(grads, Params)
    return State(tp.pmean(grads, "i"), state.step + 1), tp.psum(value, "i")


x, params = torch.ones(4), {"w": torch.ones(4)}
state = State(params, 0)

# pmap keeps parameters and results
mapped = tp.pmap(step, "i", in_axes=(None, 0), donate_argnums=0)
new, value = mapped(state, x)
assert_type(new, State)
assert_type(value, Tensor)
assert_type(mapped(state=state, x=x), tuple[State, Tensor])
cost = mapped.lower(state, x).cost()
assert_type(cost.flops, int)
original: Callable[[State, Tensor], tuple[State, Tensor]] = mapped.__wrapped__
as_function: Callable[[State, Tensor], tuple[State, Tensor]] = mapped
assert_type(tp.pmap(tp.pmap(loss, "j"), "i")(params, x, scale=2.0), Tensor)
anything = tp.pmap(lambda a, b: a + b)(x, x)
if isinstance(value, tp.ShardedTensor):
    assert_type(value.block_until_ready(), tp.ShardedTensor)
    assert_type(value.addressable_shards[0].data, Tensor)


@tp.pmap
def bare(x: Tensor) -> Tensor:
    return x


@tp.pmap(axis_name="i", in_axes=(0, None), static_broadcasted_argnums=(1,))
def decorated(x: Tensor, power: int = 2) -> Params:
    return {"y": tp.psum(x, "i") ** power}


assert_type(bare(x), Tensor)
assert_type(decorated(x, 3), Params)
assert_type(decorated(x, power=3), Params)


class Model:
    @tp.pmap(axis_name="i")
    def apply(self, x: Tensor) -> Tensor:
        return x

    def call(self, x: Tensor) -> Tensor:
        return self.apply(x)


assert_type(Model().apply(x), Tensor)
assert_type(Model().apply.lower(x).as_text(), str)

# derivatives: that of the first argument has its type
assert_type(tp.grad(loss)(params, x, scale=2.0), Params)
assert_type(tp.grad(loss_and_aux, has_aux=True)(params, x), tuple[Params, State])
assert_type(tp.value_and_grad(loss)(params, x), tuple[Tensor, Params])
assert_type(
    tp.value_and_grad(loss_and_aux, has_aux=True)(params, x), tuple[tuple[Tensor, State], Params]
)
of_second: Tensor = tp.grad(loss, argnums=1)(params, x)
of_both: tuple[Params, Tensor] = tp.grad(loss, argnums=(0, 1), mean_over="i")(params, x)
assert_type(tp.grad(tp.pmap(loss, "i"))(params, x), Params)
assert_type(tp.pmap(tp.grad(loss), "i", in_axes=(None, 0))(params, x), Params)

# vmap
assert_type(tp.vmap(loss, in_axes=(None, 0), axis_name="j")(params, x, scale=1.0), Tensor)

# collectives keep the tree
assert_type(tp.psum(params, "i"), Params)
assert_type(tp.psum(1, "i"), int)
assert_type(tp.pmean(state, ("i", "j")), State)
assert_type(tp.pmax(x, "i", axis_index_groups=[[0, 1]]), Tensor)
assert_type(tp.pmin_if_bound(x, "i"), Tensor)
assert_type(tp.all_gather(params, "i", tiled=True), Params)
assert_type(tp.psum_scatter(x, "i"), Tensor)
assert_type(tp.all_to_all(x, "i", 0, 0), Tensor)
assert_type(tp.ppermute(params, "i", [(0, 1), (1, 0)]), Params)
assert_type(tp.axis_index("i"), Tensor)
assert_type(tp.axis_size("i"), int)

# so does moving; numbers and arrays become tensors
assert_type(tp.replicate(state), State)
assert_type(tp.device_put(params, tp.devices()), Params)
assert_type(tp.device_put(np.ones(4)), Tensor)
assert_type(tp.replicate(2.0), Tensor)
assert_type(tp.device_put_sharded([x, x], tp.devices()), Tensor)
assert_type(tp.device_put_replicated(params, tp.devices()), Params)
assert_type(tp.unreplicate(params), Params)
assert_type(tp.block_until_ready(state), State)
host: Any = tp.device_get(params)
assert_type(tp.global_view(x), Tensor)
assert_type(tp.multihost.local_rows(params), Params)

# batches keep their type, with their masks or without
assert_type(next(iter(tp.prefetch([(x, params)]))), tuple[Tensor, Params])
assert_type(next(iter(tp.prefetch([params], stacked=True))), tuple[Params, Tensor])
assert_type(next(iter(tp.prefetch([params], put=loss_and_aux))), tuple[Tensor, State])

# gradients keep theirs
assert_type(tp.optim.clip_grad_norm(params, 1.0), tuple[Params, Tensor])
