"""ATen's operators that write to their arguments, with arguments that they accept."""

import contextlib
import itertools
import re
import warnings

import torch

aten = torch.ops.aten

_INTERNAL = re.compile(
    r"_(?!_i|foreach_|amp_|fused_(sgd|adam|adamw|adagrad)_|index_put_impl_|masked_softmax"
    r"|native_batch_norm_legit|batch_norm_with_update|fused_moving_avg|embedding_renorm)"
)
"""Operators that only torch itself calls; arguments at random may end the process."""

_ELSEWHERE = re.compile(
    r"cudnn|miopen|mkldnn|mps|quantized|sparse|set_|resize|rename|record_stream|requires_grad|retain"
    r"|special_.*polynomial|swap|squeeze_|transpose|t_$|swapaxes|as_strided_|detach_|unsqueeze_"
    r"|coalesce|crow|to_mkldnn|fbgemm|from_file|fft_.*\.out|empty|range|linspace|logspace|randint"
)
"""Of other back ends, or tested elsewhere, or without an operand that could be on the devices."""

_DIMS = {
    **dict.fromkeys(("batch1", "batch2"), (4, 4, 4)),
    "mask": (4, 4),
    **dict.fromkeys(("vec", "vec1", "vec2", "weight", "bias", "running_mean", "running_var"), (4,)),
    "values": (3,),
    **dict.fromkeys(("observer_on", "fake_quant_on", "running_min", "running_max"), (1,)),
    **dict.fromkeys(("scale", "zero_point"), (1,)),
    **dict.fromkeys(("found_inf", "inv_scale", "growth_tracker"), ()),
    **dict.fromkeys(("current_scale", "state_steps"), ()),
}
_DTYPES = {
    **dict.fromkeys(("index", "indices", "observer_on", "fake_quant_on"), torch.int64),
    "mask": torch.bool,
    **dict.fromkeys(("zero_point", "growth_tracker"), torch.int32),
}
_NUMBERS = {"int": 1, "SymInt": 1, "number": 2, "float": 0.5, "bool": True, "str": "linear"}
_BY_NAME = {
    **dict.fromkeys(("dim", "axis", "ch_axis", "start_dim", "from"), 0),
    "sorted": False,
    "min": 0.3,
    "max": 0.6,
    "rounding_mode": "floor",
}
"""Numbers and words by the argument's name; an optional one gets its, too."""

_REDUCTIONS = {"index_reduce": "amax", "scatter_reduce": "sum", "scatter": "add"}


def writing_operators():
    """All of them, as overloads."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        full = f"{name}.{schema.overload_name}"
        writes = any(
            a.alias_info and a.alias_info.is_write and "Tensor" in str(a.type)
            for a in schema.arguments
        )
        if not (writes or name == "native_batch_norm") or not schema.name.startswith("aten::"):
            continue
        if _INTERNAL.match(name) or _ELSEWHERE.search(full):
            continue
        with contextlib.suppress(AttributeError):
            found.append(getattr(getattr(aten, name), schema.overload_name or "default"))
    return sorted(set(found), key=str)


def _tensor(name, dtype, shape, salt):
    generator = torch.Generator().manual_seed(salt)
    shape = _DIMS.get(name, shape)
    dtype = _DTYPES.get(name, dtype)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype in (torch.int64, torch.int32):
        return torch.randint(
            1 if shape == () or name != "index" else 0, 4, shape, generator=generator, dtype=dtype
        )
    return (torch.rand(shape, generator=generator) * 0.8 + 0.1).to(dtype)


def _argument(func, argument, dtype, shape, salt):
    kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
    if argument.name == "reduce":
        return _REDUCTIONS[func._schema.name.removeprefix("aten::").rstrip("_")]
    if argument.name in _BY_NAME and "Tensor" not in kind:
        return _BY_NAME[argument.name]
    if (argument.name, shape) == ("self", (4, 4)) and "mv" in func._schema.name:
        return _tensor("vec", dtype, shape, salt)
    if (argument.name, shape) == ("self", (4, 4)) and "baddbmm" in func._schema.name:
        return _tensor("batch1", dtype, shape, salt)
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        return _tensor(argument.name, dtype, shape, salt)
    if kind == "List[Tensor]":
        return [_tensor(argument.name, dtype, shape, salt + k) for k in range(2)]
    if kind == "List[Optional[Tensor]]":
        return [torch.tensor([1, 3, 0])]
    if kind.startswith("List[number]") or kind == "List[float]":
        return [2.0, 3.0]
    if kind.startswith("List["):
        return [1]
    if kind in _NUMBERS:
        return _NUMBERS[kind]
    raise LookupError(kind)


def _arguments(func, dtype, shape):
    """Arguments by name, but those that are only written."""
    given = {}
    for salt, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and argument.kwarg_only:
            continue
        if argument.has_default_value() and not (
            written or argument.name in ("found_inf", "weight", "bias", "min", "rounding_mode")
        ):
            continue
        given[argument.name] = _argument(func, argument, dtype, shape, salt)
    return given


def _with_outs(func, given):
    """With the tensors that ``out=`` arguments need, full of another number."""
    outs = [
        a
        for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.kwarg_only
    ]
    if not outs:
        return given
    if str(outs[0].type) == "List[Tensor]":
        return given | {outs[0].name: [torch.ones_like(x) for x in given["self"]]}
    for dtypes in itertools.product(
        (torch.float32, torch.int64, torch.bool), repeat=min(len(outs), 2)
    ):
        empty = {a.name: torch.empty(0, dtype=dtypes[min(k, 1)]) for k, a in enumerate(outs)}
        try:
            run(func, given | empty)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            continue
        return given | {name: torch.full_like(x, 1) for name, x in empty.items()}
    raise LookupError


def run(func, given):
    """Call an operator with arguments by name, always on the same random numbers."""
    torch.manual_seed(0)
    positional = [a.name for a in func._schema.arguments if not a.kwarg_only]
    last = max((k for k, name in enumerate(positional) if name in given), default=-1)
    defaults = {a.name: a.default_value for a in func._schema.arguments}
    args = [given.get(name, defaults[name]) for name in positional[: last + 1]]
    return func(*args, **{k: v for k, v in given.items() if k not in positional})


def sample(func):
    """Arguments that an operator accepts; None if none are found."""
    for dtype, shape in itertools.product(
        (torch.float32, torch.int64, torch.bool), ((4, 4), (4,), (4, 4, 4), (4, 2, 4, 4), ())
    ):
        with (
            contextlib.suppress(
                LookupError, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError
            ),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            given = _with_outs(func, _arguments(func, dtype, shape))
            run(func, copied(given))
            return given
    return None


def copied(given):
    return mapped(lambda name, x: x.clone(), given)


def mapped(function, given):
    """Every tensor replaced by ``function(name, tensor)``."""

    def one(name, value):
        if isinstance(value, torch.Tensor):
            return function(name, value)
        if isinstance(value, list):
            return [one(name, item) for item in value]
        return value

    return {name: one(name, value) for name, value in given.items()}
