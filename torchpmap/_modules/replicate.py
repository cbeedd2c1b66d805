"""``replicate`` and ``shard_module``: modules, trees and states of optimizers on the devices."""

from __future__ import annotations

import functools
import gc
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from torchpmap._base.boundary import boundary
from torchpmap._base.devices import Device
from torchpmap._base.pytree import Tree, flatten
from torchpmap._layout.current_mesh import current_mesh
from torchpmap._layout.layout import Layout, general_layout, replicated_layout
from torchpmap._layout.mesh import Mesh, NamedSharding, PartitionSpec
from torchpmap._runtime.current import check_devices, refuse_inside
from torchpmap._runtime.current import devices as all_devices
from torchpmap._sharded.device_put import Number, put_as
from torchpmap._sharded.device_put import replicate as replicate_tree
from torchpmap._sharded.tensor import ShardedTensor

Module = TypeVar("Module", bound=nn.Module)


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
        chosen = tuple(all_devices() if devices is None else devices)
        name = f"replicate({type(x).__name__})"
        _place_module(x, name, lambda _, x: replicated_layout(tuple(x.shape), x.dtype, chosen))
        return x
    if isinstance(x, torch.optim.Optimizer):
        _replicate_state(x)
        return x
    return replicate_tree(x, devices)


@boundary
def shard_module(
    module: Module, specs: Mapping[str, PartitionSpec], mesh: Mesh | None = None
) -> Module:
    """Return ``module``, with each parameter and buffer on the devices of a mesh as its name says.

    The module is changed in place, as by ``replicate``. Where its parameters lie is how a step of
    ``jit`` trains it: cut over the axis of the batch they are fully sharded, cut over another axis
    they are tensor-parallel.

    Args:
        module: an ``nn.Module``.
        specs: regular expression -> ``P(...)``. The first one that is found in the name of a
            parameter or buffer (``re.search`` in ``"blocks.0.up.weight"``) counts; what none is
            found in is replicated.
        mesh: default: that of ``set_mesh``.

    Raises:
        TypeError: ``module`` is no module, or a value of ``specs`` no ``P(...)``.
        ValueError: a shape does not divide, a pattern is wrong or found in no name, there is no
            mesh, or an optimizer holds the parameters already.

    Example:
        >>> import torch, torchpmap as tp
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
        >>> mesh = tp.make_mesh((4,), ("x",))
        >>> model = tp.shard_module(model, {"weight": tp.P("x")}, mesh)
        >>> [(name, p.sharding.spec) for name, p in model[0].named_parameters()]
        [('weight', PartitionSpec('x',)), ('bias', PartitionSpec())]

    Source: the rules of JAX's libraries, such as ``match_partition_rules`` of EasyLM.
    """
    chosen = current_mesh() if mesh is None else mesh
    name = f"shard_module({type(module).__name__})"
    if chosen is None:
        raise ValueError(
            f"{name} needs a mesh: pass mesh=, or choose one with torchpmap.set_mesh(mesh)."
        )
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{name}: module must be an nn.Module.")
    _check_specs(name, module, specs)

    def layout(path: str, x: torch.Tensor) -> Layout:
        found = (spec for pattern, spec in specs.items() if re.search(pattern, path))
        try:
            sharding = NamedSharding(chosen, next(found, PartitionSpec()))
            return general_layout(tuple(x.shape), x.dtype, sharding)
        except ValueError as error:
            raise ValueError(f"{name}: {path}: {error}") from None

    _place_module(module, name, layout)
    return module


def _check_specs(what: str, module: nn.Module, specs: Mapping[str, Any]) -> None:
    names = [path for path, _ in (*module.named_parameters(), *module.named_buffers())]
    for pattern, spec in specs.items():
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"{what}: {pattern!r} must be a P(...), but is {spec!r}.")
        try:
            is_found = any(re.search(pattern, path) for path in names)
        except (re.error, TypeError) as error:
            raise ValueError(f"{what}: {pattern!r} is no regular expression: {error}.") from None
        if not is_found:
            shown = ", ".join(names[:8])
            raise ValueError(f"{what}: {pattern!r} is found in no name; there are {shown}.")


def _place_module(
    module: nn.Module, what: str, layout_of: Callable[[str, torch.Tensor], Layout]
) -> None:
    """Put each parameter and buffer where ``layout_of`` says, by its name."""
    refuse_inside(what)
    are_held = _are_held_elsewhere(module)  # before this function holds them
    named = [
        (owner, name, f"{prefix}.{name}".lstrip("."), tensor)
        for prefix, owner in module.named_modules()
        for kind in (owner.named_parameters, owner.named_buffers)
        for name, tensor in kind(recurse=False, remove_duplicate=False)
    ]
    lazy = [path for _, _, path, tensor in named if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"{what}: {lazy[0]} belongs to a lazy module and has no shape yet. Run the module once "
            "on a batch, then place it."
        )
    first: dict[int, str] = {}
    for _, _, path, tensor in named:
        first.setdefault(id(tensor), path)
    layouts = {first[id(x)]: layout_of(first[id(x)], x) for _, _, _, x in named}
    check_devices({device for layout in layouts.values() for device in layout.devices})
    places = [each for each in named if not _is_there(each[3], layouts[first[id(each[3])]])]
    tensors = {first[id(tensor)]: tensor for _, _, _, tensor in places}
    if are_held:
        _refuse_optimizers(what, tensors.values())
    twins = {path: _twin(tensor, layouts[path]) for path, tensor in tensors.items()}
    new = {path: tensor for path, tensor in tensors.items() if twins[path] is None}
    plain = {path: tensor.detach() for path, tensor in new.items()}
    grads = {f"{path}.grad": x.grad for path, x in new.items() if x.is_leaf}
    placed = _put(plain | grads, layouts)
    for path, tensor in new.items():
        if isinstance(tensor, nn.Parameter):
            placed[path] = nn.Parameter(placed[path], tensor.requires_grad)
        placed[path].grad = placed.get(f"{path}.grad")
        _take_over(placed[path], tensor, layouts[path])
    for owner, name, _, tensor in places:
        path = first[id(tensor)]
        setattr(owner, name, placed.get(path, twins[path]))


def _put(values: dict[str, torch.Tensor | None], layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """Tensors by name, and their gradients, on the devices."""
    wanted, structure = flatten({path: layouts[path.removesuffix(".grad")] for path in values})
    places = dict(zip(structure.paths("module"), wanted, strict=True))
    placed: dict[str, Any] = put_as(values, lambda shape, dtype, path: places[path], "module")
    return placed


_twins = WeakIdKeyDictionary()
"""Tensor that was replaced -> weak reference to what took its place, and the layout of that."""


def _twin(tensor: torch.Tensor, layout: Layout) -> torch.Tensor | None:
    """What took the place of a tensor in another module: weights that both share stay shared."""
    reference, known = _twins.get(tensor, (None, None))
    twin = None if reference is None or not known.same_place(layout) else reference()
    return None if twin is None or twin._is_closed() else twin


def _take_over(placed: torch.Tensor, tensor: torch.Tensor, layout: Layout) -> None:
    """Give a tensor the hooks and the attributes of the one that it replaces."""
    placed.__dict__.update(tensor.__dict__)
    if tensor.is_leaf and tensor._backward_hooks:
        placed._backward_hooks = tensor._backward_hooks
    if tensor._post_accumulate_grad_hooks:
        placed._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    _twins[tensor] = weakref.ref(placed), layout
    _watch.begin(tensor)


class _Watch:
    """A hook on the steps of all optimizers, while a replaced tensor is alive somewhere."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the end of a tensor may interrupt its holder
        self._num_tensors = 0
        self._hook: Any = None

    def begin(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._num_tensors += 1
            if self._hook is None:
                self._hook = register_optimizer_step_pre_hook(_refuse_replaced)
        weakref.finalize(tensor, self._end).atexit = False

    def _end(self) -> None:
        with self._lock:
            self._num_tensors -= 1
            if not self._num_tensors and self._hook is not None:
                self._hook.remove()
                self._hook = None


_watch = _Watch()


def _refuse_replaced(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Such an optimizer would update parameters that no module has."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _twins and _twins[parameter][0]() is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds a parameter {list(parameter.shape)} that "
                    "replicate or shard_module has replaced, so a step would not change the "
                    "module. Collect the parameters afterwards."
                )


def _is_there(tensor: torch.Tensor, layout: Layout) -> bool:
    return type(tensor) is ShardedTensor and tensor._alive()[0].same_place(layout)


def _refuse_optimizers(what: str, tensors: Iterable[torch.Tensor]) -> None:
    """Such an optimizer would go on to update the tensors that the module no longer has."""
    ours = frozenset(map(id, tensors))
    if _optimizer_of(ours):
        gc.collect()  # it may be of no use to anybody, and wait for this
    name = _optimizer_of(ours)
    if name:
        raise ValueError(
            f"{what} makes new parameters, but an optimizer, {name}, "
            "holds those that the module has now. Place the module first, then make the "
            "optimizer."
        )


def _are_held_elsewhere(module: nn.Module) -> bool:
    """Whether something besides the modules refers to a parameter: looking for an optimizer among
    all objects of the process takes long.
    """
    places = [place for owner in module.modules() for place in (owner._parameters, owner._buffers)]
    counts = Counter(id(x) for place in places for x in place.values())
    return any(
        count > counts[id(x)] + _OWN
        for place in places
        for x, count in zip(place.values(), _references(place), strict=True)
        if x is not None
    )


def _references(place: Mapping[str, Any]) -> list[int]:
    return [sys.getrefcount(x) for x in place.values()]


_OWN = _references({"": object()})[0] - 1
"""How many of these references are those of the count itself."""


def _optimizer_of(tensors: frozenset[int]) -> str | None:
    """The class of an optimizer that holds one of these; the error must not keep it alive."""
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer):
            groups = getattr(found, "param_groups", ())  # it may be half made
            if any(id(parameter) in tensors for group in groups for parameter in group["params"]):
                return type(found).__name__
    return None


_NUMBERS = frozenset(["eta", "mu", "mu_product", "step"])
"""What torch's optimizers read in this process, whatever the parameter is."""


def _replicate_state(optimizer: torch.optim.Optimizer) -> None:
    """Put on the devices what the optimizer makes there: all that has dims, such as Adafactor's
    factors and the history of LBFGS, and what has the shape of a parameter that is a number.
    """
    for parameter, values in optimizer.state.items():
        if type(parameter) is not ShardedTensor:
            continue
        beside = functools.partial(_beside, parameter._alive()[0])
        for name, value in values.items():
            leaves, structure = flatten(value)
            for place, leaf in enumerate(leaves):
                is_state = parameter.dim() == 0 and name not in _NUMBERS
                if isinstance(leaf, torch.Tensor) and (leaf.dim() or is_state):
                    leaves[place] = put_as(leaf, beside, "state")
            values[name] = structure.unflatten(leaves)


def _beside(parameter: Layout, shape: tuple[int, ...], dtype: torch.dtype, _: str) -> Layout:
    """Where the state of a parameter lies: as that does, if it has the same shape."""
    if shape == parameter.shape:
        return general_layout(shape, dtype, parameter.sharding)
    return replicated_layout(shape, dtype, parameter.devices)
