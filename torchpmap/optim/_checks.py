"""What ``optim`` refuses: optimizers without a functional form, and unfit arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer, SparseAdam

from torchpmap._base.errors import kind_of
from torchpmap._base.inexact import is_inexact
from torchpmap._base.pytree import Node, Structure, flatten, open_node

Leaves = list[Any]
"""One thing per parameter of a tree."""


def params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def refuse(cls: type) -> None:
    if not issubclass(cls, Optimizer):
        raise TypeError(f"optim.functional needs a torch.optim.Optimizer, but got {cls.__name__}.")
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{cls.__name__}.step() calls the loss itself, so it is no function of gradients. Use "
            "an optimizer that takes gradients (Adam, SGD, ...), or call "
            f"{cls.__name__}.step(closure) outside, with a closure that calls a pmapped function."
        )
    if issubclass(cls, SparseAdam):
        raise TypeError(
            "SparseAdam takes sparse gradients only, and mapped functions work on dense tensors. "
            "Use torch.optim.Adam."
        )


def opened(
    params: Any, grads: Any, state: Any, own: Sequence[str] = ()
) -> tuple[Structure, Leaves, Leaves, Leaves]:
    """The structure of ``params``, and its leaves; per leaf its gradient, and its state, which has
    the names ``own``.  Raises unless they fit together.
    """
    leaves, structure = flatten(params)
    check_params(leaves, structure)
    given, states = subtrees(structure, grads, "grads"), subtrees(structure, state, "state")
    for leaf, grad, entries, path in zip(leaves, given, states, structure.paths(), strict=True):
        check_grad(grad, leaf, f"grads{path}")
        check_state(entries, leaf, f"state{path}", own)
    return structure, leaves, given, states


def subtrees(structure: Structure, tree: Any, name: str) -> list[Any]:
    """What ``tree`` has in the place of each leaf of ``structure``."""

    def walk(node: Node | None, tree: Any, path: str) -> Iterator[Any]:
        if node is None:
            yield tree
            return
        opened = open_node(tree)
        children = dict(zip(opened[1].labels, opened[0], strict=True)) if opened else {}
        if not opened or opened[1].kind is not node.kind or children.keys() != set(node.labels):
            got = f"{type(tree).__name__} with {list(children)}" if opened else kind(tree)
            raise ValueError(
                f"{path} is {got}, but params has a {node.kind.__name__} with {list(node.labels)} "
                f"there. {name} must have the structure of params."
            )
        for label, key, child in zip(node.labels, node.keys, node.children, strict=True):
            yield from walk(child, children[label], path + key)

    return structure.in_leaf_order(list(walk(structure.root, tree, name)))


def kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return kind_of(value.shape, value.dtype)
    return f"of type {type(value).__name__}"


def check_params(leaves: Sequence[Any], structure: Structure) -> None:
    for x, path in zip(leaves, structure.paths("params"), strict=True):
        if x is not None and not (isinstance(x, torch.Tensor) and is_inexact(x)):
            raise TypeError(
                f"{path} is {kind(x)}: only floating-point and complex tensors can be optimized. "
                "Keep it out of params, or put None in its place."
            )


def check_grad(grad: Any, leaf: Any, path: str) -> None:
    if grad is None:
        return
    if not isinstance(grad, torch.Tensor) or leaf is None:
        expected = "None, as in params" if leaf is None else "a tensor, or None to skip it"
        raise TypeError(f"{path} is {kind(grad)}, expected {expected}.")
    refuse_sparse(grad, path)
    if grad.shape != leaf.shape or grad.dtype != leaf.dtype:
        raise ValueError(f"{path} is {kind(grad)}, but the parameter is {kind(leaf)}.")


def check_grads(grads: Sequence[Any], paths: Sequence[str]) -> None:
    """Of a function that has no parameters to compare with."""
    for grad, path in zip(grads, paths, strict=True):
        if grad is None:
            continue
        if not (isinstance(grad, torch.Tensor) and is_inexact(grad)):
            raise TypeError(f"{path} is {kind(grad)}, expected a floating-point or complex tensor.")
        refuse_sparse(grad, path)


def refuse_sparse(grad: torch.Tensor, path: str) -> None:
    if grad.layout != torch.strided:
        raise TypeError(f"{path} is sparse, expected a dense tensor: {path}.to_dense().")


def check_state(entries: Any, leaf: Any, path: str, own: Sequence[str]) -> None:
    if not isinstance(entries, dict) and not (entries is None and leaf is None):
        raise TypeError(
            f"{path} is {kind(entries)}, expected the dict of one parameter's state. The order "
            "of arguments is update(grads, state, params), with a state from init or update."
        )
    if leaf is not None and not set(own) <= set(entries or ()):
        raise ValueError(
            f"{path} has no {own[0]!r}. Pass a state that came from init or update of this very "
            "optimizer."
        )


def refuse_new_state(optimizer: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise if the first step made state: of two states, the same program cannot return either."""
    if before.keys() != after.keys():
        made = sorted(after.keys() - before.keys())
        raise TypeError(
            f"{optimizer!r} makes {', '.join(made)} in its first step, so it cannot accumulate. "
            "Accumulate the gradients in the mapped function, and call update with their mean."
        )


def refuse_lost_derivatives(inputs: Sequence[Any]) -> None:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad and not x.is_leaf for x in tensors):
        raise RuntimeError(
            "update is differentiated, but without differentiable=True its results are constants. "
            "Pass differentiable=True to optim.functional to differentiate through the step, or "
            "detach() grads, state and params."
        )


def refuse_hidden_state(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Raise if ``step`` kept something outside the state of the parameters."""
    params = {id(p) for p in params_of(optimizer)}
    hidden = [f"state[{key!r}]" for key in optimizer.state if id(key) not in params]
    for number, (before, after) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        changed = [name for name in after if after[name] is not before.get(name, optimizer)]
        hidden += [f"param_groups[{number}][{name!r}]" for name in changed]
    if hidden:
        raise TypeError(
            f"{type(optimizer).__name__}.step() writes {', '.join(hidden)}, which belongs to no "
            "parameter and would be lost. Only what is in optimizer.state[p] is carried along."
        )
