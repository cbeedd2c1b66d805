"""Where a value in the making is to lie: ``with_sharding_constraint``.

In a trace of whole values it is an operation, in whose place the graph of a device has a move.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchpmap._base.axis_spec import broadcast_axes
from torchpmap._base.boundary import boundary
from torchpmap._base.pytree import flatten
from torchpmap._base.torch_internals import num_modes
from torchpmap._layout.layout import Layout, general_layout
from torchpmap._layout.mesh import NamedSharding, PartitionSpec
from torchpmap._runtime.current import check_devices
from torchpmap._sharded.device_put import device_put, sharding_of

_shardings: list[NamedSharding] = []
_numbers: dict[NamedSharding, int] = {}


@boundary
def with_sharding_constraint(x: Any, sharding: Any) -> Any:
    """Return ``x``, laid out as ``sharding`` says.

    with_sharding_constraint: T[*s] -> T[*s]
    Backward: the cotangent is laid out in the same way.

    In a function of ``jit`` this says where a value in the making is to lie; what it is computed
    from follows.  Elsewhere the value moves, as with ``device_put``.

    Args:
        x: a tensor, or a pytree of tensors.
        sharding: a ``NamedSharding``, or a ``P(...)`` over the mesh of ``set_mesh``; for a pytree
            also a tree prefix of it with one of them for each part.  None, for a part: where it
            lies best.

    Raises:
        TypeError: ``sharding`` is something else.
        ValueError: the shape does not divide, or there is no mesh for a ``P(...)``.

    Example:
        >>> import torch, torchpmap as tp
        >>> mesh = tp.make_mesh((4,), ("x",))
        >>> @tp.jit
        ... def f(a):
        ...     return tp.with_sharding_constraint(a * 2, tp.NamedSharding(mesh, tp.P("x")))
        >>> f(torch.arange(4.0))
        ShardedTensor([0., 2., 4., 6.], rows of dim 0 on cpu:0 cpu:1 cpu:2 cpu:3)

    Source: ``jax.lax.with_sharding_constraint``.
    """
    if isinstance(x, torch.Tensor):
        return _constrained_or_moved(x, sharding)
    leaves, structure = flatten(x)
    parts = broadcast_axes(sharding, x, what="with_sharding_constraint sharding", root="")
    return structure.unflatten(
        [
            _constrained_or_moved(leaf, part) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, part in zip(leaves, parts, strict=True)
        ]
    )


def _constrained_or_moved(x: torch.Tensor, sharding: Any) -> torch.Tensor:
    if sharding is None:
        return x
    wanted = sharding_of(sharding, "with_sharding_constraint")
    if not num_modes():
        moved: torch.Tensor = device_put(x, wanted)
        return moved
    check_devices(wanted.mesh.devices.flat)
    general_layout(tuple(x.shape), x.dtype, wanted)  # whether the shape divides
    return constrained(x, wanted)


def constrained(x: torch.Tensor, sharding: NamedSharding) -> torch.Tensor:
    """``x`` with a wish, in a trace of whole values."""
    number = _numbers.get(sharding)
    if number is None:
        number = _numbers[sharding] = len(_shardings)
        _shardings.append(sharding)
    result: torch.Tensor = _Constrain.apply(x, number)
    return result


class _Constrain(torch.autograd.Function):
    """Its derivatives have the same wish, also of each value of a batch."""

    @staticmethod
    def forward(x: torch.Tensor, number: int) -> torch.Tensor:
        result: torch.Tensor = CONSTRAIN(x, number)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.sharding = _shardings[inputs[1]]

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return constrained(cotangent, ctx.sharding), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return constrained(tangent, ctx.sharding)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], x: torch.Tensor, number: int) -> Any:
        mesh, spec = _shardings[number].mesh, _shardings[number].spec
        rows = NamedSharding(mesh, PartitionSpec(None, *spec))
        return constrained(x.movedim(dims[0], 0), rows), 0


def wishes(module: GraphModule) -> dict[Node, Layout]:
    """Where the operations of a graph that say so want their values."""
    return {
        node: general_layout(
            tuple(node.meta["val"].shape), node.meta["val"].dtype, _shardings[node.args[1]]
        )
        for node in module.graph.nodes
        if node.target is CONSTRAIN
    }


_library = torch.library.Library("torchpmap", "FRAGMENT")
_library.define("constrain(Tensor x, int number) -> Tensor")
_library.impl("constrain", lambda x, number: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake(
    "torchpmap::constrain", lambda x, number: torch.empty_like(x), lib=_library
)
CONSTRAIN: Any = torch.ops.torchpmap.constrain.default
