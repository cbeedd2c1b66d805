"""Rules of function transforms that torch 2.13 lacks or has wrong, for code in mapped functions
and under ``tp.vmap``.

*Operations made with* ``torch.library.custom_op``: torch puts the rules of ``register_autograd``
into an ``autograd.Function`` of the old kind, which ``torch.func.grad`` refuses, and forward mode
takes such an operation for a constant (https://github.com/pytorch/pytorch/issues/170834).  Under
transforms a function of the new kind, with the same rules, replaces it.

``torch.cond`` *under* ``vmap``: in nested vmaps, torch mistakes a batch dim of the outer one for
one of the inner (https://github.com/pytorch/pytorch/pull/195323).  Here both branches are computed,
and each row selects its own, as in JAX.

*Indexing with a traced number*: see ``_trace/indexing``.

``one_hot`` asks for the largest value under transforms, and ``torch.tensor([x, y])`` for the values
of ``x`` and ``y``.

*Recurrent layers under* ``vmap``: torch has no batching rules for them.  They are decomposed, as
torch does it elsewhere.  With dropout their layers are called one by one, because torch's layers
would draw from its generator.

Delete each rule when torch has it right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from torchpmap._base.pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torchpmap._base.replaced import Replaced, Replacement
from torchpmap._base.sources import users_line
from torchpmap._base.torch_internals import (
    OPDEFS,
    VF,
    VMAP,
    VMAPIFY,
    CustomOpDef,
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    at_depth,
    decompositions,
    depth,
    function_modes,
    has_transforms,
    is_batched,
    is_vmap,
    is_vmap_wrapper,
    is_wrapped,
    layers,
    size_and_randomness,
    transforms,
    without_onednn,
)
from torchpmap._collectives.varying import tensors_in
from torchpmap._trace.idioms import note_call
from torchpmap._trace.indexing import traced_indexing
from torchpmap._trace.remat import checkpoints_replaced
from torchpmap._trace.seeds import seeds_replaced
from torchpmap._trace.traced_views import kept_equal, traced_views
from torchpmap._trace.vmapped_functions import in_axes
from torchpmap.random._streams import are_active


class TransformRules(TorchFunctionMode):
    """While it is entered, the rules here are in force."""

    def __enter__(self) -> Self:
        for each in _REPLACED:
            each.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for each in reversed(_REPLACED):
            each.__exit__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" or torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        views = traced_views()
        try:
            if views is None or name in _VALUELESS:
                return self._call(func, args, kwargs)
            views.before_call((args, kwargs))
            result = self._call(func, args, kwargs)
            views.after_call()
        except Exception as error:
            note_call(error, func)
            raise
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        indexing = traced_indexing(func, args, kwargs)
        if indexing is not None:
            return indexing()
        if func is torch.nn.functional.one_hot:
            return _one_hot(*args, **kwargs)
        if func in _OF_VALUES and args and isinstance(args[0], list | tuple):
            joined = _joined(func, *args, **kwargs)
            if joined is not None:
                return joined
        decomposed = _recurrent(func, args)
        if decomposed is not None:
            with self:
                return decomposed(*args, **kwargs)
        if not has_transforms():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _REARRANGING and args and _is_batched(args[0]):
            with self:
                place = _place_of_rows(name, *args, **kwargs)
            if place is not None:
                return _moved(args[0], place)
            _refuse_batched(name, args[0])
        if func is torch.ops.higher_order.cond:
            return _cond(*args, **kwargs)
        definition = _definition(func)
        if definition is None or not _is_users(definition) or not _is_differentiated():
            return func(*args, **kwargs)
        with self:  # what the rules call, and the same operation under the other transforms
            return _apply(definition, args, kwargs)


_REARRANGING = {
    "resize_": "x.flatten()[:n].reshape(shape)",
    "resize_as_": "x.flatten()[:n].reshape(shape)",
    "as_strided_": "x.as_strided(...), or a view such as x[:n]",
    "set_": "the other tensor itself, or x.copy_(other)",
}
"""Names of functions that change where a tensor lies in memory, which vmap gets wrong, and what to
use instead.
"""


def _refuse_batched(name: str, tensor: Any) -> None:
    if _is_batched(tensor):
        raise NotImplementedError(
            f"at {users_line()}: {name} under vmap (or where several rows share a device) would "
            f"mix the rows. Use {_REARRANGING[name]}."
        )


def _place_of_rows(name: str, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The part of the memory of ``x`` that it is to be, as a view; None if a row would have to
    leave its own memory, or there are several transforms.
    """
    inner = list(layers(x))[1]
    is_simple = is_vmap(transforms()[-1]) and is_batched(x) and not is_wrapped(inner)
    if not is_simple or name == "set_" or not (x.is_contiguous() and inner.is_contiguous()):
        return None
    if inner.shape != (size_and_randomness(transforms()[-1])[0], *x.shape):
        return None
    if name == "as_strided_":
        return x.as_strided(*args, **kwargs)
    given = args[0] if isinstance(args[0], Sequence) else args
    shape = args[0].shape if name == "resize_as_" else torch.Size(given)
    if kwargs or shape.numel() > x.numel():
        return None
    return x.reshape(-1)[: shape.numel()].view(shape)


def _moved(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """``x``, which is now where ``place`` is."""
    inner, to = (list(layers(tensor))[1] for tensor in (x, place))
    with at_depth(depth() - 1):
        inner.as_strided_(to.shape, to.stride(), to.storage_offset())
    x.unsqueeze_(0).squeeze_(0)  # functorch notes a shape only in its own rules
    return x


def _checked(own: Any) -> Any:
    def set_(x: Any, *args: Any, **kwargs: Any) -> Any:
        if are_active():
            _refuse_batched("set_", x)
        return own(x, *args, **kwargs)

    return set_


def _are_in_force() -> bool:
    return any(isinstance(x, TransformRules) for x in function_modes())


def vmap(f: Callable[..., Any], in_dims: Any, randomness: str) -> Callable[..., Any]:
    """``torch.func.vmap`` with the rules in force, also outside of mapped functions."""
    over_rows = torch.func.vmap(f, in_dims, randomness=randomness)

    def mapped(*args: Any) -> Any:
        with nullcontext() if _are_in_force() else TransformRules():
            return over_rows(*args)

    return mapped


_REPLACED = (
    checkpoints_replaced,
    seeds_replaced,
    Replaced([Replacement(torch.Tensor, "set_", _checked)]),  # modes do not see it
    Replaced([Replacement(*VMAP, lambda own: kept_equal(own, _are_in_force))]),
    Replaced([Replacement(*VMAPIFY, in_axes)]),
)

_VALUELESS = frozenset(
    ("untyped_storage", "size", "stride", "dim", "numel", "storage_offset", "__len__")
)
"""Names of functions that read no values of their arguments."""


# -- one_hot ---------------------------------------------------------------------------------------


def _one_hot(input: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """As torch does it where values are not known, which it forgets to under transforms."""
    if not _is_unknown(input) or num_classes < 1 or input.dtype != torch.int64:
        return torch.nn.functional.one_hot(input, num_classes)  # which may raise
    classes = torch.arange(num_classes, device=input.device)
    return torch.eq(input.unsqueeze(-1), classes).to(torch.int64)


# -- torch.tensor ----------------------------------------------------------------------------------

_OF_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)


def _joined(func: Any, data: Any, dtype: Any = None, device: Any = None, **named: Any) -> Any:
    """``torch.tensor([x, 2 * x])`` of numbers that have no values; None if there are none."""
    leaves = tree_leaves(data)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if not any(map(_is_unknown, tensors)) or any(x.dim() for x in tensors):
        return None
    kinds = [x.dtype if isinstance(x, torch.Tensor) else torch.tensor(x).dtype for x in leaves]
    dtype = dtype or functools.reduce(torch.promote_types, kinds)
    if any(not torch.can_cast(kind, dtype) for kind in kinds):
        return None  # torch raises
    place = device or tensors[0].device

    def whole(part: Any) -> torch.Tensor:
        if isinstance(part, list | tuple):
            return torch.stack([whole(each) for each in part])
        return torch.as_tensor(part, dtype=dtype, device=place).detach()

    joined = whole(data)
    return joined.requires_grad_() if named.get("requires_grad") else joined


def _is_unknown(tensor: torch.Tensor) -> bool:
    return any(isinstance(x, FakeTensor) or is_wrapped(x) for x in layers(tensor))


# -- torch.cond ------------------------------------------------------------------------------------


def _cond(condition: Any, on_true: Any, on_false: Any, operands: Any) -> Any:
    num_vmaps = sum(map(is_vmap, transforms()))
    if num_vmaps == 0 or (num_vmaps == 1 and not _is_batched(condition)):
        return torch.ops.higher_order.cond(condition, on_true, on_false, operands)
    chosen, other = on_true(*operands), on_false(*operands)
    return tree_map(lambda yes, no: torch.where(condition, yes, no), chosen, other)


def _is_batched(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and any(map(is_vmap_wrapper, layers(tensor)))


# -- recurrent layers ------------------------------------------------------------------------------


def _recurrent(func: Any, args: Any) -> Callable[..., Any] | None:
    """The function to call instead of a layer that torch cannot vmap, that would draw from torch's
    generator, or that cuDNN would get in one piece: no graph can hold the buffer with all weights
    that torch (2.11 to 2.15) makes for it.  None for any other.
    """
    name = getattr(func, "__name__", "")
    if name not in _RECURRENT or func is not getattr(VF, name):
        return None
    is_batched = has_transforms() and any(map(_is_batched, tensors_in(args)))
    if name == "lstm_cell":
        return _lstm_cell if is_batched else None
    # (data, batch_sizes, hx, params, ...) or (input, hx, params, ...)
    is_packed = isinstance(args[3], list | tuple)
    num_layers, dropout, train = args[5:8] if is_packed else args[4:7]
    if train and dropout > 0 and num_layers > 1:
        return functools.partial(_layer_by_layer, func, 2 if is_packed else 1)
    unknown = filter(_is_unknown, tensors_in(args))
    if not is_batched and all(x.device.type in ("cpu", "meta") for x in unknown):
        return None

    def decomposed(*args: Any) -> Any:
        packed, plain = _RECURRENT[name]
        with without_onednn():  # its LSTM has no batching rule either
            return getattr(decompositions, packed if is_packed else plain)(*args)

    return decomposed


def _layer_by_layer(func: Callable[..., Any], num_inputs: int, *args: Any) -> tuple[Any, ...]:
    """A recurrent network with dropout between its layers; torch's own decomposition forgets it."""
    given, *sizes = args[:num_inputs]
    hx, params, has_biases, num_layers, dropout, train, *rest = args[num_inputs:]
    states = hx if isinstance(hx, list | tuple) else (hx,)
    last: list[Sequence[torch.Tensor]] = []
    for layer in range(num_layers):
        if layer > 0:
            given = torch.dropout(given, dropout, True)
        parts = [state.chunk(num_layers)[layer] for state in states]
        count = len(params) // num_layers
        weights = params[layer * count : (layer + 1) * count]
        start = parts if isinstance(hx, list | tuple) else parts[0]
        given, *ends = func(given, *sizes, start, weights, has_biases, 1, 0.0, train, *rest)
        last.append(ends)
    return given, *(torch.cat(ends) for ends in zip(*last, strict=True))


_RECURRENT = {
    "gru": ("gru_impl_data", "gru_impl"),
    "lstm": ("lstm_data_impl", "lstm_impl"),
    "rnn_tanh": ("rnn_tanh_data", "rnn_tanh_input"),
    "rnn_relu": ("rnn_relu_data", "rnn_relu_input"),
    "lstm_cell": ("", ""),
}
"""Name -> the functions of ``torch._decomp.decompositions`` for packed and plain sequences."""


def _lstm_cell(
    x: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, cell = state
    linear = torch.nn.functional.linear
    gates = (linear(x, w_ih, b_ih) + linear(hidden, w_hh, b_hh)).chunk(4, -1)
    kept, added = gates[1].sigmoid(), gates[0].sigmoid()
    cell = kept * cell + added * gates[2].tanh()
    return gates[3].sigmoid() * cell.tanh(), cell


# -- torch.library.custom_op -----------------------------------------------------------------------


def _is_differentiated() -> bool:
    return not all(map(is_vmap, transforms()))


def _is_users(definition: CustomOpDef) -> bool:
    """Whether the rules here apply: torch's operations have theirs, and writes have none."""
    package = str(definition._init_fn.__module__).partition(".")[0]
    return package != "torch" and not definition._opoverload._schema.is_mutable


def _definition(func: Any) -> CustomOpDef | None:
    if isinstance(func, OpOverload):
        return OPDEFS.get(func._name)
    if isinstance(func, OpOverloadPacket):
        return OPDEFS.get(func._qualified_op_name)
    return None


def _apply(definition: CustomOpDef, args: Any, kwargs: Any) -> Any:
    """Call through ``_Function``, which takes and returns no containers but tuples of leaves."""
    given = iter(args)
    positional, named = [], {}
    for argument in definition._opoverload._schema.arguments:
        name = argument.name
        if argument.kwarg_only:
            named[name] = kwargs.get(name, argument.default_value)
        elif name in kwargs:
            positional.append(kwargs[name])
        else:
            positional.append(next(given, argument.default_value))
    leaves, structure = tree_flatten((positional, named))
    call = _Call(definition, structure)
    results = _Function.apply(*leaves, call)
    return tree_unflatten(results, call.results)


class _Call:
    """One use of an operation."""

    def __init__(self, definition: CustomOpDef, structure: TreeSpec) -> None:
        self.definition = definition
        self.structure = structure
        """Of (positional arguments, keyword arguments)."""
        self.results = structure
        """Structure of the results; set when the operation has run."""

    def arguments(self, leaves: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, named = tree_unflatten(leaves, self.structure)
        return tuple(positional), named

    def run(self, leaves: Any) -> tuple[Any, ...]:
        args, kwargs = self.arguments(leaves)
        return self.flat(self.definition._opoverload(*args, **kwargs))

    def flat(self, results: Any) -> tuple[Any, ...]:
        leaves, self.results = tree_flatten(results)
        return tuple(leaves)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        *leaves, call = inputs
        return call.run(leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *leaves, call = inputs
        ctx.custom_call = call
        setup = call.definition._setup_context_fn
        if setup is None:
            return
        args, kwargs = call.arguments(leaves)
        result = tree_unflatten(output, call.results)
        if kwargs:
            setup(ctx=ctx, inputs=args, keyword_only_inputs=kwargs, output=result)
        else:
            setup(ctx=ctx, inputs=args, output=result)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        call = ctx.custom_call
        rule = call.definition._backward_fn
        if rule is None:
            raise RuntimeError(
                f"Trying to backward through {call.definition._qualname} but no autograd formula "
                "was registered. Please use register_autograd to add one."
            )
        needed = ctx.needs_input_grad
        try:  # as the rule knows it: one entry, or list of entries, per positional argument
            ctx.needs_input_grad = call.arguments(needed[:-1])[0]
            given = tree_unflatten(cotangents, call.results)
            with TransformRules():  # torch calls backward functions outside of all modes
                gradients = rule(ctx, *(given if isinstance(given, tuple) else (given,)))
        finally:
            ctx.needs_input_grad = needed
        if not isinstance(gradients, tuple):
            gradients = (gradients,)
        num_leaves = len(needed) - 1
        args, _ = call.arguments(range(num_leaves))
        flat: list[Any] = []
        for gradient, argument in zip(gradients, args, strict=True):
            flat += [gradient] if not isinstance(argument, list) else _spread(gradient, argument)
        return (*flat, *[None] * (num_leaves - len(flat) + 1))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        name = ctx.custom_call.definition._qualname
        raise NotImplementedError(
            f"forward-mode derivative of {name}: torch.library.custom_op has no rule for it. Use "
            "reverse mode, or a torch.autograd.Function with a jvp around it."
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        *leaves, call = inputs
        definition = call.definition
        args, kwargs = call.arguments(leaves)
        dims, _ = call.arguments(in_dims[:-1])
        if definition._vmap_fn is not None:
            results, out_dims = definition._vmap_fn(info, dims, *args, **kwargs)
            flat = call.flat(results)
            spread = tree_flatten(out_dims, is_leaf=lambda dim: dim is None)[0]
            return flat, tuple(spread) if len(spread) == len(flat) else tuple(spread * len(flat))
        rows = [
            [
                leaf if dim is None else leaf.select(dim, k)
                for leaf, dim in zip(leaves, in_dims[:-1], strict=True)
            ]
            for k in range(info.batch_size)
        ]
        results = map(call.run, rows)
        stacked = tuple(map(torch.stack, zip(*results, strict=True)))
        return stacked, (0,) * len(stacked)


def _spread(gradient: Any, places: list[Any]) -> list[Any]:
    return [None] * len(places) if gradient is None else list(gradient)
