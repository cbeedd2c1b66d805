"""The stored programs of tests/programs/parity in every rank of a job of 4 (see
test_torchrun_parity.py).

    torchrun --standalone --nproc-per-node=4 _torchrun_parity.py FOLDER MODE:ID...

Programs whose pmap is called on plain values run host-locally: each rank passes the part of the
rows that is its own, and the parts of the results are put together.  Where a transform is around
the call, the inputs are values that span the ranks instead.  Programs that map nothing run whole in
a mapped function, for a row on each rank.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from _launched import Raised, run_cases
from parity import cases, values

import torchpmap as tp
from torchpmap._base.axis_spec import broadcast_axes
from torchpmap._base.pytree import flatten
from torchpmap._layout import axis_stack
from torchpmap._runtime.current import runtime

NUM_RANKS = 4
GRAPH = cases.COMPILE["graph"]


class Unfit(Exception):
    """The rows of a program do not divide over the ranks."""


def local_pmap(fun: Callable[..., Any], axis_name: Any = None, **options: Any) -> Any:
    """``jax.pmap`` of values that all ranks have whole: each rank maps its own rows."""
    mapped = tp.pmap(fun, axis_name, **{"compile": GRAPH, **options})
    static = options.get("static_broadcasted_argnums", ())
    static = {static} if isinstance(static, int) else set(static)

    def call(*args: Any, **kwargs: Any) -> Any:
        if axis_stack.bound():  # a pmap in a mapped function
            return mapped(*args, **kwargs)
        if (options.get("axis_size") or 0) % NUM_RANKS:
            raise Unfit(f"{options['axis_size']} rows")
        moving = tuple(None if k in static else arg for k, arg in enumerate(args))
        try:
            mine = _divided(options.get("in_axes", 0), moving)
            named = _divided(0, (kwargs,))[0]
        except (ValueError, TypeError, IndexError, AttributeError):
            return mapped(*args, **kwargs)  # it says what is wrong
        chosen = [args[k] if k in static else mine[k] for k in range(len(args))]
        return _joined(options.get("out_axes", 0), mapped(*chosen, **named))

    return call


def _divided(in_axes: Any, args: tuple[Any, ...]) -> Any:
    leaves, structure = flatten(args)
    prefix = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    axes = broadcast_axes(prefix, args, what="in_axes")
    parts = []
    for leaf, axis in zip(leaves, axes, strict=True):
        if leaf is None or axis is None:
            parts.append(leaf)
        elif leaf.shape[axis] % NUM_RANKS:
            raise Unfit(f"{leaf.shape[axis]} rows")
        else:
            parts.append(tp.multihost.local_rows(leaf, axis))
    return structure.unflatten(parts)


def _joined(out_axes: Any, result: Any) -> Any:
    leaves, structure = flatten(result)
    axes = broadcast_axes(out_axes, result, what="out_axes")
    joined = []
    for leaf, axis in zip(leaves, axes, strict=True):
        if leaf is None or axis is None:
            joined.append(None if leaf is None else leaf.detach().cpu())
        else:
            rows = leaf.detach().cpu().movedim(axis, 0)
            joined.append(tp.multihost.all_gather(rows, tiled=True).movedim(0, axis))
    return structure.unflatten(joined)


def spanning(leaf: Any) -> Any:
    """A value with its rows on the devices of all ranks, or held by all where they do not fit."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    spec = tp.P("d") if leaf.dim() and leaf.shape[0] % NUM_RANKS == 0 else tp.P()
    return tp.device_put(leaf, tp.NamedSharding(tp.Mesh(tp.devices(), ("d",)), spec))


def run(case: values.Case, mode: str) -> Any:
    inputs = {name: values.decode(value) for name, value in case["inputs"].items()}
    pmap: Callable[..., Any] = local_pmap
    try:
        if case.get("outside") or case["family"] == "pmap_vmap":
            inputs = torch.utils._pytree.tree_map(spanning, inputs)
            pmap = tp.pmap
        return cases.run(case, mode, inputs, pmap, axis_size=NUM_RANKS, fetch=gathered)
    except Unfit as unfit:
        return Raised("Unfit", str(unfit))
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return Raised(" ".join(kinds), str(error))
    finally:
        if runtime().closed:  # the rank failed in a call, and so did all others
            tp.shutdown()


def gathered(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: gathered(item) for name, item in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map(gathered, tree))
    if isinstance(tree, tp.ShardedTensor) and not tree.is_fully_addressable:
        return tp.multihost.all_gather(tree)
    return values.fetch(tree)


if __name__ == "__main__":
    known = {case["id"]: case for case in (*cases.PMAPS, *cases.LOOPS)}
    wanted = {name: name.split(":") for name in sys.argv[2:]}
    run_cases(
        {
            name: functools.partial(run, known[case_id], mode)
            for name, (mode, case_id) in wanted.items()
        },
        sys.argv[1],
    )
