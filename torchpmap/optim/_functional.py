"""Any ``torch.optim`` optimizer as two pure functions, for use inside mapped functions.

``update`` builds the torch optimizer anew on copies of the parameters, fills its ``state``, sets
``.grad``, calls ``step()`` and takes parameters and state out again: all numbers are torch's own.
Where values are unknown (traced, or batched by vmap), or on an accelerator, ``step()`` needs help:
``_step_with_tensor_counters``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from torchpmap._base.boundary import boundary, outside_graphs
from torchpmap._base.optimizers import TensorNumbers, state_maker
from torchpmap._base.pytree import Structure, flatten, tree_leaves, tree_map_only
from torchpmap._base.torch_internals import (
    as_if_compiling,
    has_transforms,
    is_transformed,
    num_modes,
)
from torchpmap.optim import _checks as checks
from torchpmap.optim._checks import Leaves

_SWITCHES = {"params", "foreach", "fused", "capturable", "differentiable"}
_step_lock = threading.RLock()  # the flag behind is_compiling() is one per process


@boundary
def functional(optimizer: Callable[..., Optimizer], **hyperparameters: Any) -> FunctionalOptimizer:
    """Return the pure functions ``init`` and ``update`` of a ``torch.optim`` optimizer.

    They work on plain tensors, in ``pmap`` and in ``vmap`` (an ensemble in one call); under
    ``torch.compile`` they cause a graph break. The numbers are torch.optim's.

    Args:
        optimizer: a class (``torch.optim.Adam``), or a function that takes the tree of parameters
            and returns an optimizer: this is how parameters get groups of their own. Parameters
            that it leaves out do not change.
        hyperparameters: passed on to ``optimizer``.

    Returns:
        A ``FunctionalOptimizer``.

    Raises:
        TypeError: LBFGS, which calls the loss itself, or SparseAdam.

    Example:
        >>> import torch, torchpmap as tp
        >>> optimizer = tp.optim.functional(torch.optim.SGD, lr=0.5, momentum=0.9)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> optimizer.update({"w": torch.ones(2)}, optimizer.init(params), params)
        ({'w': tensor([0.5000, 1.5000])}, {'w': {'momentum_buffer': tensor([1., 1.])}})
        >>> groups = tp.optim.functional(
        ...     lambda params: torch.optim.AdamW(
        ...         [{"params": [params["w"]]}, {"params": [params["b"]], "weight_decay": 0.0}]
        ...     )
        ... )
        >>> sorted(groups.init({"w": torch.ones(2), "b": torch.ones(2)})["b"])
        ['exp_avg', 'exp_avg_sq', 'step']

    Source: optax's split into init and update; checked against torch.optim in
        tests/optim/test_optim.py.
    """
    if isinstance(optimizer, type):
        checks.refuse(optimizer)
    elif not callable(optimizer):
        raise TypeError(
            "optim.functional takes an optimizer class and its hyperparameters "
            "(torch.optim.Adam, lr=1e-3), or a function from the tree of parameters to an "
            f"optimizer, but got an object {checks.kind(optimizer)}."
        )
    return FunctionalOptimizer(optimizer, hyperparameters)


class FunctionalOptimizer:
    """``init`` and ``update`` of an optimizer; made by ``torchpmap.optim.functional``."""

    def __init__(self, make: Callable[..., Optimizer], hyperparameters: dict[str, Any]) -> None:
        self.__wrapped__ = make  # pmap follows it, and sees when what it closes over changed
        self._hyperparameters = dict(hyperparameters)

    def __repr__(self) -> str:
        given = [getattr(self.__wrapped__, "__qualname__", repr(self.__wrapped__))]
        given += [f"{name}={value!r}" for name, value in self._hyperparameters.items()]
        return f"optim.functional({', '.join(given)})"

    @outside_graphs
    def init(self, params: Any) -> Any:
        """Return the state before the first step.

        init: (params) -> the tree of ``params`` with a dict of tensors in place of every leaf

        Args:
            params: pytree of floating-point or complex tensors; None leaves pass through.

        Returns:
            A tree whose leaves are what torch keeps in ``optimizer.state[p]``, on the device of
            ``p``: ``state["w"]["exp_avg"]``. Entries that the first gradient decides on (SGD with
            dampening, optimizers that are not torch's) appear with the first update.

        Raises:
            TypeError: a leaf is not a floating-point or complex tensor.
        """
        leaves, structure = flatten(params)
        checks.check_params(leaves, structure)
        copies = [None if leaf is None else leaf.detach() for leaf in leaves]
        optimizer = self._build(copies, structure)
        for p in checks.params_of(optimizer):
            p.grad = torch.zeros_like(p)
        _fill_state(optimizer)
        return structure.unflatten([None if p is None else _state_of(optimizer, p) for p in copies])

    @outside_graphs
    def update(
        self, grads: Any, state: Any, params: Any, **hyperparameters: Any
    ) -> tuple[Any, Any]:
        """Return the parameters and the state after one step; the arguments are left as they are.

        update: (grads, state, params) -> (params, state)
        Backward: torch's, if ``functional`` was given ``differentiable=True``; else an error.

        Args:
            grads: tree like ``params``; None for a parameter that is not to change.
            state: from ``init`` or ``update``.
            params: pytree of floating-point or complex tensors; None leaves pass through.
            hyperparameters: values for this step, such as ``lr``; for all parameter groups, or a
                list with one value per group. An ``lr`` that is an argument of the pmapped function
                can change without a new trace.

        Returns:
            The pair (params, state), plain tensors.

        Raises:
            TypeError: a leaf is not a floating-point tensor, or there is no such hyperparameter.
            ValueError: structures, shapes or dtypes differ from those of ``params``.
            RuntimeError: derivatives would be lost, or the optimizer reads values under vmap.
        """
        structure, leaves, given, states = checks.opened(params, grads, state)
        leaves, states = self._updated(structure, leaves, given, states, hyperparameters)
        return structure.unflatten(leaves), structure.unflatten(states)

    def _updated(
        self,
        structure: Structure,
        leaves: Leaves,
        grads: Leaves,
        states: Leaves,
        hyperparameters: dict[str, Any],
    ) -> tuple[Leaves, Leaves]:
        """``update`` of what ``checks.opened`` gives."""
        inputs = (leaves, grads, states, hyperparameters)
        differentiable = self._hyperparameters.get("differentiable", False)
        if not differentiable:
            checks.refuse_lost_derivatives(tree_leaves(inputs))

        def step(*inputs: Any) -> Any:
            copy = torch.clone if differentiable else _constant
            copies, grads, states, hyperparameters = tree_map_only(torch.Tensor, copy, inputs)
            optimizer = self._build(copies, structure)
            optimizer.state = defaultdict(dict)
            for p, grad, entries in zip(copies, grads, states, strict=True):
                if p is not None:
                    p.grad = grad
                if entries:
                    optimizer.state[p] = entries
            for name, value in hyperparameters.items():
                _set(optimizer, name, value)
            _step(optimizer)
            return copies, [None if p is None else _state_of(optimizer, p) for p in copies]

        if has_transforms():
            # vmap has in-place rules for few operations, and none that add a dim to their target.
            step = torch.func.functionalize(step)
        found: tuple[Leaves, Leaves] = step(*inputs)
        return found

    def _build(self, params: list[Any], structure: Structure) -> Optimizer:
        """The torch optimizer of these very tensors."""
        make, given = self.__wrapped__, [p for p in params if p is not None]
        tree = given if isinstance(make, type) else structure.unflatten(params)
        optimizer = make(tree, **self._hyperparameters)
        checks.refuse(type(optimizer))
        if not {id(p) for p in checks.params_of(optimizer)} <= {id(p) for p in given}:
            raise ValueError(
                f"{type(optimizer).__name__} was given a parameter that is not in the tree passed "
                "to init or update. Use the tensors of the tree that the function receives."
            )
        return optimizer


def _constant(x: torch.Tensor) -> torch.Tensor:
    return (x.detach() if x.requires_grad or is_transformed() else x).clone()


def _state_of(optimizer: Optimizer, p: torch.Tensor) -> dict[str, Any]:
    # torch keeps counters on the CPU, where compiled code on another device cannot use them.
    return {
        name: value.to(p.device) if isinstance(value, torch.Tensor) else value
        for name, value in optimizer.state.get(p, {}).items()
    }


def _fill_state(optimizer: Optimizer) -> None:
    """Let torch make the state that ``step`` would make first."""
    make = state_maker(optimizer)
    if make is None:  # the first update fills the empty state
        return
    for group in optimizer.param_groups:
        make(group, group["params"])


def _set(optimizer: Optimizer, name: str, value: Any) -> None:
    groups, name_of = optimizer.param_groups, type(optimizer).__name__
    values = value if isinstance(value, list) else [value] * len(groups)
    if len(values) != len(groups):
        raise ValueError(
            f"update got {len(values)} values of {name}, but {name_of} has {len(groups)} parameter "
            "groups: pass one value, or a list with one per group."
        )
    for group, one in zip(groups, values, strict=True):
        if name not in group or name in _SWITCHES:
            raise TypeError(
                f"update got an unexpected hyperparameter {name!r}: {name_of} has "
                f"{', '.join(sorted(set(group) - _SWITCHES))}."
            )
        group[name] = one


def _step(optimizer: Optimizer) -> None:
    known = (
        num_modes() == 0  # neither fake nor traced
        and not has_transforms()
        and not torch.compiler.is_compiling()
    )
    for group in optimizer.param_groups:
        on_cpu = any(p.device.type == "cpu" for p in group["params"])
        if "capturable" in group and not (known and on_cpu):
            group["capturable"] = True  # counters are not read with .item()
        if not known:
            group.update({name: False for name in ("foreach", "fused") if name in group})
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        if known and not any(group.get("capturable") for group in groups):
            optimizer.step()
        else:
            _step_with_tensor_counters(optimizer)
    except KeyError as missing:
        raise ValueError(
            f"{type(optimizer).__name__}.step() found no {missing} in the state. Pass a state that "
            "came from init or update of this very optimizer."
        ) from missing
    checks.refuse_hidden_state(optimizer, groups)


def _step_with_tensor_counters(optimizer: Optimizer) -> None:
    # In float32, the dtype of tensor counters, 1 - 0.999**step has only 4 digits.
    counters = {}
    for p, entries in optimizer.state.items():
        step = entries.get("step")
        if isinstance(step, torch.Tensor) and step.is_floating_point():
            counters[p] = step.dtype
            entries["step"] = step.double()
    # torch 2.13 refuses capturable=True on CPU unless it is compiling ("If capturable=True, params
    # and state_steps must be on supported devices"). Delete this context when it does not.
    with _step_lock, as_if_compiling(), TensorNumbers():
        optimizer.step()
    for p, dtype in counters.items():
        optimizer.state[p]["step"] = optimizer.state[p]["step"].to(dtype)
