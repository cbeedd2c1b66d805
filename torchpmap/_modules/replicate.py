"""``replicate``: a tree of tensors, a module or the state of an optimizer on every device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from torchpmap._base.boundary import boundary
from torchpmap._base.devices import Device
from torchpmap._base.pytree import Tree
from torchpmap._runtime.current import devices as all_devices
from torchpmap._runtime.current import refuse_inside
from torchpmap._sharded.device_put import Number
from torchpmap._sharded.device_put import replicate as replicate_tree
from torchpmap._sharded.tensor import ShardedTensor


@overload
def replicate(x: Number, devices: Sequence[Device] | None = None) -> torch.Tensor: ...
@overload
def replicate(x: Tree, devices: Sequence[Device] | None = None) -> Tree: ...
@boundary
def replicate(x: Any, devices: Sequence[Device] | None = None) -> Any:
    """Return ``x`` with an equal copy on every device and no new dim.

    replicate: T[*s] -> T[*s] on every device

    An ``nn.Module`` is changed in place, as by ``module.to(device)``, and returned. Its parameters
    and buffers become replicated ShardedTensors, so that a training loop runs on all devices with
    batches of ``shard_batch``. Tied weights stay tied, also those of two modules; gradients, hooks
    and ``requires_grad`` stay, and state dicts of plain and replicated modules load into each
    other. Collect parameters for the optimizer afterwards; one that holds the old ones raises.

    A ``torch.optim`` optimizer is changed in place too: what its ``load_state_dict`` has put on the
    host goes to the devices of its parameters.

    Pass other values on to a mapped function with ``in_axes=None``.

    Args:
        x: an ``nn.Module``, an optimizer, a tensor, an array, a number or a pytree of the last
            three.
        devices: default: all; of an optimizer, those of its parameters.

    Raises:
        TypeError: a leaf is something else.
        ValueError: a module has parameters that an optimizer holds, or that have no shape yet
            (``nn.LazyLinear``); or processes of one job do not all give the same values.

    Example:
        >>> import torch, torchpmap as tp
        >>> w = tp.replicate(torch.tensor([1.0, 2.0]))
        >>> w
        ShardedTensor([1., 2.], replicated on cpu:0 cpu:1 cpu:2 cpu:3)
        >>> tp.pmap(lambda w, x: w.sum() * x, in_axes=(None, 0))(w, torch.arange(4.0)).tolist()
        [0.0, 3.0, 6.0, 9.0]
        >>> model = tp.replicate(torch.nn.Linear(2, 3))
        >>> model(tp.shard_batch(torch.ones(8, 2))).sharding.spec
        PartitionSpec('devices',)

    Source: ``flax.jax_utils.replicate``, which adds a leading dim instead: that is
        ``device_put_replicated``.
    """
    if isinstance(x, nn.Module):
        _replicate_module(x, devices)
        return x
    if isinstance(x, torch.optim.Optimizer):
        _replicate_state(x)
        return x
    return replicate_tree(x, devices)


def _replicate_module(module: nn.Module, devices: Sequence[Device] | None) -> None:
    refuse_inside("replicate")
    chosen = tuple(all_devices() if devices is None else devices)
    places = [
        (owner, name, f"{prefix}.{name}".lstrip("."), tensor)
        for prefix, owner in module.named_modules()
        for kind in (owner.named_parameters, owner.named_buffers)
        for name, tensor in kind(recurse=False, remove_duplicate=False)
        if not _is_there(tensor, chosen)
    ]
    shared = {id(tensor): (path, tensor) for _, _, path, tensor in reversed(places)}
    tensors = dict(reversed(shared.values()))
    unmade = [path for path, tensor in tensors.items() if nn.parameter.is_lazy(tensor)]
    if unmade:
        raise ValueError(
            f"replicate({type(module).__name__}): {unmade[0]} belongs to a lazy module and has no "
            "shape yet. Run the module once on a batch, then replicate it."
        )
    _refuse_optimizers(module, tensors.values())
    twins = {path: _twin(tensor, chosen) for path, tensor in tensors.items()}
    new = {path: tensor for path, tensor in tensors.items() if twins[path] is None}
    plain = {path: tensor.detach() for path, tensor in new.items()}
    grads = {f"{path}.grad": x.grad for path, x in new.items() if x.is_leaf}
    placed = replicate_tree(plain | grads, chosen, "module")
    for path, tensor in new.items():
        if isinstance(tensor, nn.Parameter):
            placed[path] = nn.Parameter(placed[path], tensor.requires_grad)
        placed[path].grad = placed.get(f"{path}.grad")
        _take_over(placed[path], tensor)
    for owner, name, _, tensor in places:
        path = shared[id(tensor)][0]
        setattr(owner, name, placed.get(path, twins[path]))


_twins = WeakIdKeyDictionary()
"""Tensor that ``replicate`` has replaced -> weak reference to what took its place, and devices."""


def _twin(tensor: torch.Tensor, devices: tuple[Device, ...]) -> torch.Tensor | None:
    """What took the place of a tensor in another module: weights that both share stay shared."""
    reference, places = _twins.get(tensor, (None, ()))
    twin = None if reference is None or places != devices else reference()
    return None if twin is None or twin._is_closed() else twin


def _take_over(placed: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give a tensor the hooks and the attributes of the one that it replaces."""
    placed.__dict__.update(tensor.__dict__)
    if tensor.is_leaf and tensor._backward_hooks:
        placed._backward_hooks = tensor._backward_hooks
    if tensor._post_accumulate_grad_hooks:
        placed._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    _twins[tensor] = weakref.ref(placed), placed._alive()[0].devices  # type: ignore[attr-defined]


def _refuse_replaced(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Such an optimizer would update parameters that no module has."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _twins and _twins[parameter][0]() is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds a parameter {list(parameter.shape)} that "
                    "replicate(module) has replaced, so a step would not change the module. "
                    "Collect the parameters after replicate."
                )


register_optimizer_step_pre_hook(_refuse_replaced)


def _is_there(tensor: torch.Tensor, devices: tuple[Device, ...]) -> bool:
    if type(tensor) is not ShardedTensor:
        return False
    layout = tensor._alive()[0]
    return layout.is_replicated and layout.devices == devices


def _refuse_optimizers(module: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Such an optimizer would go on to update the tensors that the module no longer has."""
    ours = frozenset(map(id, tensors))
    if _optimizer_of(ours):
        gc.collect()  # it may be of no use to anybody, and wait for this
    name = _optimizer_of(ours)
    if name:
        raise ValueError(
            f"replicate({type(module).__name__}) makes new parameters, but an optimizer, {name}, "
            "holds those that the module has now. Replicate the module first, then make the "
            "optimizer."
        )


def _optimizer_of(tensors: frozenset[int]) -> str | None:
    """The class of an optimizer that holds one of these; the error must not keep it alive."""
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer):
            groups = getattr(found, "param_groups", ())  # it may be half made
            if any(id(parameter) in tensors for group in groups for parameter in group["params"]):
                return type(found).__name__
    return None


def _replicate_state(optimizer: torch.optim.Optimizer) -> None:
    for parameter, values in optimizer.state.items():
        if type(parameter) is ShardedTensor:
            # others, such as the number of steps, are read by the optimizer in this process
            ours = {
                name: value
                for name, value in values.items()
                if isinstance(value, torch.Tensor)
                if value.shape == parameter.shape and name != "step"
            }
            values.update(replicate_tree(ours, parameter._alive()[0].devices, "state"))
