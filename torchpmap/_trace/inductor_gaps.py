"""Where code that Inductor (torch 2.11 to 2.15) makes gives wrong numbers and no error.

*Writes.*  Inductor turns ``y.index_put(i, v)`` and ``y.slice_scatter(v)`` into writes to ``y`` when
nothing reads ``y`` later.  It does so too

* when ``y`` is expanded, so that several elements lie at one place, as in gradients of indexing
  under ``vmap`` (https://github.com/pytorch/pytorch/issues/183986);
* when ``v`` or ``i`` is a view of ``y``, as after ``y[1:] = y[:-1].clone()``
  (https://github.com/pytorch/pytorch/pull/185450);
* when ``y`` is ``cat([a, b])`` and ``a`` is read later: ``a`` is computed into the memory of ``y``.
  This concerns sums over devices too, which are of one ``cat`` for a tree of values.

Such a ``y`` is copied first.

*Reads.*  On a CPU, loops are given other ranges so that they can be one loop.  A loop that reads
what a scatter has written forgets by that (``recompute_size_and_body``) that it does, and may run
before the scatter, as in gradients of ``gather``.

*Comparisons.*  Of ``x`` in ``x == x.amax()``, as in the gradient of ``amax``, two loops compute
different last bits (https://github.com/pytorch/pytorch/issues/186799), or one has it in float32 and
the other as it was stored in bfloat16 (https://github.com/pytorch/pytorch/issues/195214).  Then
nothing is equal, and a gradient is 0 or NaN.  Such an ``x`` is stored, and what is compared in few
bits is rounded at each step as it is outside of compiled code.  So is a number beside it, which
Inductor rounds always (2.15) or never.

*Branches.*  A branch may return a part of a larger tensor, since Inductor takes out the copy that
was made of it.  The code around then adds the place of that part to its address once more.  And
what a branch reads is taken to lie in memory as it did in the trace, which it need not.

*Others* are written differently: see ``_RULES``.

Delete each rule when the oldest torch that is supported has it right.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from torchpmap._base.replaced import Replaced, Replacement
from torchpmap._trace import compiled_loops
from torchpmap._trace.graphs import (
    call,
    compute,
    inner_graphs,
    is_view,
    kind_of_node,
    output_of,
    results_of,
    views_to,
)

_aten = torch.ops.aten
_WRITES = {
    _aten.index_put.default,
    _aten._unsafe_index_put.default,
    _aten.slice_scatter.default,
    _aten.select_scatter.default,
    _aten.diagonal_scatter.default,
    _aten.as_strided_scatter.default,
    torch.ops._c10d_functional.all_reduce.default,
}


@functools.cache
def mending_passes() -> dict[str, Any]:
    """Settings of Inductor: one pass before its others, and one before it makes code."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Mend(CustomGraphPass):
        def __init__(self, *steps: Callable[[Graph], None]) -> None:
            self._steps = steps

        def __call__(self, graph: Graph) -> None:
            for step in self._steps:
                step(graph)

        def uuid(self) -> bytes:  # is part of the keys of Inductor's cache
            # the second file tells how the results of an operation lie that the code calls
            return get_hash_for_files((__file__, compiled_loops.__file__))

    first = keep_nan, keep_casts, return_whole_values
    last = cast_again, compare_equal_values, copy_bases, write_differently, lay_out
    return {
        "joint_custom_pre_pass": Mend(*first),
        "post_grad_custom_post_pass": Mend(*last, return_whole_values),
    }


def _renaming(own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own)
    def recompute_size_and_body(node: Any, *args: Any, **kwargs: Any) -> None:
        own(node, *args, **kwargs)
        # by its mutations, a value has another name after each
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    return recompute_size_and_body


def _rounding(own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own)
    def cache_dtype_convert(*args: Any) -> None:
        from torch._inductor import config

        if not config.emulate_precision_casts:  # of which C++ of torch 2.11 knows nothing
            own(*args)

    return cache_dtype_convert


@functools.cache
def right_code() -> Replaced:
    """A block in which loops that get other ranges still wait for what they read, and C++ rounds
    what is to be rounded.
    """
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.scheduler import SchedulerNode

    return Replaced(
        [
            Replacement(SchedulerNode, "recompute_size_and_body", _renaming),
            Replacement(CppKernel, "cache_dtype_convert", _rounding),
        ]
    )


def copy_bases(graph: Graph) -> None:
    """Copy each tensor that may not be written to in place."""
    for node in graph.nodes:
        if node.target in _WRITES and _needs_a_copy(node):
            base: Any = node.args[0]
            contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
            with graph.inserting_before(node):
                copy = graph.call_function(_aten.clone.default, (base,), contiguous)
            copy.meta["val"] = base.meta["val"].clone(**contiguous)
            node.update_arg(0, copy)


def _needs_a_copy(node: Node) -> bool:
    base: Any = node.args[0]
    *views, root = views_to(base)
    read: list[Node] = []
    torch.fx.map_arg(node.args[1:], read.append)
    return (
        any(map(_is_expanded, views))
        or any(views_to(each)[-1] is root for each in read)
        or _has_parts_of_others(root)
    )


def _has_parts_of_others(node: Node) -> bool:
    """Whether it is a ``cat`` of values that others use too."""
    operands: Any = node.args[0] if node.target is _aten.cat.default else ()
    chains = [views_to(each) for each in operands]
    return any(
        len(each.users) > 1
        for chain in chains
        if chain[-1].op != "placeholder"  # a caller's value stays where it is
        for each in chain
    )


def _is_expanded(node: Node) -> bool:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):  # the parts that a split gives
        return False
    each_dim = zip(value.shape, value.stride(), strict=True)
    return any(size > 1 and not stride for size, stride in each_dim)


def return_whole_values(graph: Graph) -> None:
    """Let the branches and bodies in a graph return no parts of larger tensors."""
    for inner in (each for node in graph.nodes for each in inner_graphs(node)):
        for value in results_of(inner):
            if isinstance(value, Node) and value.meta["val"].storage_offset():
                with inner.inserting_before(output_of(inner)):
                    output_of(inner).replace_input_with(
                        value, call(inner, _aten.clone.default, value)
                    )


def lay_out(graph: Graph) -> None:
    """Let what branches read lie in memory as it did in the trace."""
    for node in filter(kind_of_node, graph.nodes):
        for operand in node.args[-1]:
            for each in views_to(operand):
                each.meta[_STORED] = True


# -- comparisons -----------------------------------------------------------------------------------

_COMPARISONS = {
    getattr(getattr(_aten, name), kind)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for kind in ("Tensor", "Scalar")
}
_CAST = torch.ops.prims.convert_element_type.default
_ROUNDED = "low_precision_pointwise_barrier"
_STORED = "inductor_realize_to_strides"
"""Keys of a node's ``meta``, at which Inductor looks."""


def compare_equal_values(graph: Graph) -> None:
    """Let what is compared be the same number wherever it is used."""
    pairs = list[tuple[Node, Node]]()
    for node in graph.nodes:
        if _decides(node):
            _round(node)
        if node.target in _COMPARISONS:
            operands = [views_to(each)[-1] for each in node.all_input_nodes]
            pairs += itertools.permutations(operands, 2)
    if not pairs:
        return
    alike = _alike(graph)
    # the bits of those that a node is computed of: a set for each comparison would take a time that
    # grows with the square of the graph
    bits = {one: 1 << k for k, one in enumerate({alike[one]: None for one, _ in pairs})}
    above = dict[Node, int]()
    for node in graph.nodes:
        inputs = [above[each] | bits.get(alike[each], 0) for each in node.all_input_nodes]
        above[node] = functools.reduce(operator.or_, inputs, 0)
    for one, other in pairs:
        if above[other] & bits[alike[one]]:
            alike[one].meta[_STORED] = True
    for node, first in alike.items():
        if node is not first and _STORED in first.meta:
            # results stay apart
            node.replace_all_uses_with(first, delete_user_cb=lambda user: not _may_return(user))


def _alike(graph: Graph) -> dict[Node, Node]:
    """Each node -> the first one that computes the same."""
    found, known = dict[Node, Node](), dict[str, Node]()
    for node in graph.nodes:
        found[node] = node
        if node.target is operator.getitem or _is_pure(node.target):
            given = torch.fx.map_arg((node.args, node.kwargs), found.__getitem__)
            found[node] = known.setdefault(str((node.target, given)), node)
        elif node.op == "call_function":  # it may write
            known.clear()
    return found


def _is_pure(target: Any) -> bool:
    return (
        getattr(target, "namespace", "") in ("aten", "prims")
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def _may_return(node: Node) -> bool:
    """Whether a node returns what it is given, or a view of it."""
    return node.op == "output" or is_view(node)


def _decides(node: Node) -> bool:
    """Whether a last bit of numbers that have few can change the result by far, or is all that the
    result tells, as in ``x - x.bfloat16().float()``.
    """
    given = node.all_input_nodes
    casts = [x for x in given if x.target is _CAST]  # torch itself widens some operands
    has_few = any(_dtype(x) in _FEW_BITS for x in (*given, *(x.all_input_nodes[0] for x in casts)))
    dtype = _dtype(node)
    is_other = dtype is not None and not dtype.is_floating_point
    # a sign stays, as in the derivative of ReLU
    jumps = (is_other and node.args[1:] != (0,)) or node.target in _JUMPS
    is_lost = node.target is _CAST and bool(casts) and _dtype(casts[0]) in _FEW_BITS
    return (has_few and jumps) or is_lost


def _round(node: Node) -> None:
    """Round what a node is computed of, at each step."""
    from torch._inductor import config

    if node.all_input_nodes[0].meta["val"].device.type == "cpu":
        # else C++ takes a value as it was before it was cast; the setting has its old value when
        # the graph is compiled (_trace/compile)
        config.emulate_precision_casts = True
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if _ROUNDED not in each.meta and each.op == "call_function":
            each.meta[_ROUNDED] = True
            _keep_bits_of_numbers(each)
            waiting += each.all_input_nodes


def _keep_bits_of_numbers(node: Node) -> None:
    """Plain torch rounds no number that few bits are multiplied with or divided by, and none that
    is added to them on a GPU.
    """
    target: Any = node.target
    if target not in _BESIDE_NUMBERS or _dtype(node) not in _FEW_BITS or node.kwargs:
        return
    if any(map(_is_number, node.args)):
        kept = _BESIDE_NUMBERS[target]
        if kept is None:
            kept = () if node.meta["val"].device.type == "cpu" else (0, 1)
        with node.graph.inserting_before(node):
            wide = call(node.graph, target, *_operands(node.graph, node, kept))
        node.target, node.args = _CAST, (wide, _dtype(node))


_FEW_BITS = (torch.bfloat16, torch.float16)
_BESIDE_NUMBERS: dict[Any, tuple[int, ...] | None] = {
    _aten.mul.Tensor: (0, 1),
    _aten.div.Tensor: (1,),
    _aten.add.Tensor: None,
    _aten.sub.Tensor: None,
}
"""At which places numbers are not rounded; None: it depends on the device."""
_JUMPS = {
    *(_aten.max.dim, _aten.min.dim, _aten.floor.default, _aten.ceil.default, _aten.trunc.default),
    *(_aten.round.default, _aten.round.decimals, _aten.sign.default),
    *(_aten.remainder.Tensor, _aten.remainder.Scalar, _aten.remainder.Scalar_Tensor),
    *(_aten.fmod.Tensor, _aten.fmod.Scalar, _aten.div.Tensor_mode, _aten.div.Scalar_mode),
}


def _dtype(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


# -- others ----------------------------------------------------------------------------------------


def keep_nan(graph: Graph) -> None:
    """``x * 0`` is NaN where ``x`` is NaN or infinite, but Inductor would write 0 for it
    (https://github.com/pytorch/pytorch/pull/187580); ``x * 0.0`` it leaves alone.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.mul.Tensor):
        dtype = _dtype(node)
        if dtype is not None and (dtype.is_floating_point or dtype.is_complex):
            node.args = tuple(0.0 if isinstance(x, int) and x == 0 else x for x in node.args)


def keep_casts(graph: Graph) -> None:
    """``x.bfloat16().float()`` is not ``x``: of two casts, torch 2.11 leaves out the first."""
    for node in graph.find_nodes(op="call_function", target=_CAST):
        narrow: Any = node.args[0]
        if narrow.target is _CAST and _dtype(narrow) in _FEW_BITS:
            narrow.target, narrow.args = _aten._to_copy.default, narrow.args[:1]
            narrow.kwargs = {"dtype": _dtype(narrow)}


def cast_again(graph: Graph) -> None:
    """What ``keep_casts`` has hidden."""
    for node in graph.find_nodes(op="call_function", target=_aten._to_copy.default):
        if list(node.kwargs) == ["dtype"]:
            node.target, node.args, node.kwargs = _CAST, (node.args[0], node.kwargs["dtype"]), {}


def write_differently(graph: Graph) -> None:
    for node in list(graph.nodes):
        for rule in _RULES.get(node.target, ()):
            with graph.inserting_before(node):
                rule(graph, node)


def _flat_first(graph: Graph, node: Node) -> None:
    """Let ``argmax`` of several dims have one: it counts in the order in which a loop runs, which
    need not be that of the tensor (https://github.com/pytorch/pytorch/issues/197739).
    """
    given: Any = node.args[0]
    if given.meta["val"].ndim > 1 and (len(node.args) == 1 or node.args[1] is None):
        node.args = (call(graph, _aten.reshape.default, given, [-1]), 0)
        _put_after(graph, node, _aten.reshape.default, list(node.meta["val"].shape))


def _wide_first(graph: Graph, node: Node) -> None:
    """Let extremes be found among 32 bits: among bytes, the CPU finds 0, which it reads beyond the
    last (https://github.com/pytorch/pytorch/issues/191499); of others, the C++ does not compile.
    """
    given: Any = node.args[0]
    dtype = _dtype(given)
    narrow = (torch.int8, torch.uint8, torch.int16, torch.bool)
    if dtype in narrow and given.meta["val"].device.type == "cpu":
        node.update_arg(0, call(graph, _CAST, given, torch.int32))
        results = [x for x in node.users if x.target is operator.getitem and not x.args[1]]
        for each in [node] if isinstance(node.meta["val"], torch.Tensor) else results:
            if _dtype(each) == dtype:
                _put_after(graph, each, _CAST, dtype)


def _exact_remainder(graph: Graph, node: Node) -> None:
    """Of large quotients, and of divisors that are infinite
    (https://github.com/pytorch/pytorch/issues/198057).
    """
    value = node.meta["val"]
    if value.is_floating_point() and value.device.type == "cpu":
        _, b, rest, differ = _divided(graph, node)
        up = call(graph, _aten.add.Tensor, rest, b)
        _replace(graph, node, call(graph, _aten.where.self, differ, up, rest))


def _exact_floor(graph: Graph, node: Node) -> None:
    """1 // 0.1 is 9, as in Python; but 1 / 0.1 is rounded up to 10."""
    if node.kwargs.get("rounding_mode") != "floor" or not node.meta["val"].is_floating_point():
        return
    a, b, rest, differ = _divided(graph, node)
    whole = call(graph, _aten.div.Tensor, call(graph, _aten.sub.Tensor, a, rest), b)
    down = call(graph, _aten.sub.Tensor, whole, 1)
    near = call(graph, _aten.round.default, call(graph, _aten.where.self, differ, down, whole))
    plain = call(graph, _aten.div.Tensor, a, b)
    signed = call(graph, _aten.copysign.Tensor, near, plain)  # if it is 0
    by_zero = call(graph, _aten.eq.Scalar, b, 0)
    _replace(graph, node, call(graph, _aten.where.self, by_zero, plain, signed))


def _divided(graph: Graph, node: Node) -> tuple[Node, Node, Node, Node]:
    """Dividend, divisor, what C's ``fmod`` leaves, and whether that is on the other side of 0 than
    the divisor.
    """
    # plain torch does not round a divisor that is one number, but for a remainder
    a, b = _operands(graph, node, (1,) if "rounding_mode" in node.kwargs else ())
    if _dtype(node) in _FEW_BITS:
        for x in a, b:
            x.meta[_ROUNDED] = True
    rest = call(graph, _aten.fmod.Tensor, a, b)
    signs = [call(graph, _aten.lt.Scalar, x, 0) for x in (rest, b)]
    differ = call(graph, _aten.bitwise_xor.Tensor, *signs)
    is_some = call(graph, _aten.ne.Scalar, rest, 0)
    return a, b, rest, call(graph, _aten.bitwise_and.Tensor, differ, is_some)


def _operands(graph: Graph, node: Node, kept: Sequence[int]) -> list[Node]:
    """Both operands in the dtype of the result, and then with more bits if that has few; numbers at
    the places ``kept`` are not rounded before.
    """
    value, found = node.meta["val"], list[Node]()
    has_few_bits = value.dtype in _FEW_BITS
    for place, x in enumerate(node.args[:2]):
        is_exact = has_few_bits and place in kept and _is_number(x)
        dtype = torch.float32 if is_exact else value.dtype
        if isinstance(x, Node):
            found.append(x if _dtype(x) == dtype else call(graph, _CAST, x, dtype))
        else:
            kind = {"dtype": dtype, "device": value.device}
            number = torch.tensor(x, dtype=dtype).item()
            found.append(graph.call_function(_aten.full.default, ([], number), kind))
            found[-1].meta["val"] = value.new_full((), number, dtype=dtype)
    return [call(graph, _CAST, x, torch.float32) for x in found] if has_few_bits else found


def _is_number(x: Any) -> bool:
    if not isinstance(x, Node):
        return True
    return x.meta["val"].ndim == 0 and x.meta["val"].device.type == "cpu"


def _replace(graph: Graph, node: Node, found: Node) -> None:
    dtype = _dtype(node)
    node.replace_all_uses_with(
        found if _dtype(found) == dtype else call(graph, _CAST, found, dtype)
    )
    graph.erase_node(node)


def _put_after(graph: Graph, node: Node, target: Any, *args: Any) -> None:
    """Let what uses a node, whose inputs have changed, use ``target`` of it."""
    compute(node)
    with graph.inserting_after(node):
        found = call(graph, target, node, *args)
    node.replace_all_uses_with(found, delete_user_cb=lambda user: user is not found)


_RULES: dict[Any, Sequence[Callable[[Graph, Node], None]]] = {
    _aten.argmax.default: (_flat_first, _wide_first),
    _aten.argmin.default: (_flat_first, _wide_first),
    _aten.amax.default: (_wide_first,),
    _aten.amin.default: (_wide_first,),
    _aten.max.default: (_wide_first,),
    _aten.min.default: (_wide_first,),
    _aten.max.dim: (_wide_first,),
    _aten.min.dim: (_wide_first,),
    _aten.remainder.Tensor: (_exact_remainder,),
    _aten.remainder.Scalar: (_exact_remainder,),
    _aten.remainder.Scalar_Tensor: (_exact_remainder,),
    _aten.div.Tensor_mode: (_exact_floor,),
    _aten.div.Scalar_mode: (_exact_floor,),
}
