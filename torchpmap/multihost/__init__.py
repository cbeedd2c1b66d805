"""What the processes of one job do together besides mapped calls: wait, broadcast, gather, compare.

Under torchrun, srun or mpirun every process runs the same script (see docs/multihost.md), and all
must call these functions, in the same order.  Small data of unknown size (names, tree structures,
digests) goes through the job's store, which needs no size in advance and can say which process is
missing.  Tensors go through the process group of all processes, over Gloo as bytes, because the
store would hold them all in a single process.

Each function compares what the processes are about to do: if a process is elsewhere in its script,
an error says where each process is.  That costs about a millisecond per call; inside a training
step, use collectives in a mapped function.

With a single process the functions work too, and send nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any

import numpy as np
import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.errors import check_array
from torchpmap._base.fingerprint import as_bytes, fingerprint
from torchpmap._base.jax_names import missing_in as _missing_in
from torchpmap._base.pytree import Tree, flatten
from torchpmap._collectives.backend import c10d
from torchpmap._layout import axis_stack
from torchpmap._runtime.current import job_runtime, process_count, process_index
from torchpmap._runtime.torchrun.rendezvous import Rendezvous, texts_by_rank
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap.multihost._values import Parcel, Share, opened, padded

__all__ = ["all_gather", "assert_equal", "barrier", "broadcast", "local_rows"]

if not _TYPE_CHECKING:  # a type checker that saw it would accept every name
    __getattr__ = _missing_in(__name__)

_DATA = (torch.Tensor, np.ndarray)


@boundary
def barrier(name: str = "") -> None:
    """Return when every process has called it with the same ``name``.

    Args:
        name: what the processes meet for; shown in errors.

    Raises:
        CollectiveMismatch: a process is at another barrier, or elsewhere; the text says which.
        CallTimeout: a process did not come within ``torchpmap.config.timeout``.

    Example:
        >>> import torchpmap as tp
        >>> tp.multihost.barrier("data is on disk")

    Source: ``jax.experimental.multihost_utils.sync_global_devices``, which compares a checksum.
    """
    what = f"torchpmap.multihost.barrier({name!r})"
    _refuse_inside(what)
    if process_count() > 1:
        job_runtime().exchange(_everyone(), b"", what)


@boundary
def broadcast(tree: Any, source: int = 0) -> Any:
    """Return the ``tree`` of process ``source``, in every process.

    broadcast: tree of T[*s] on one process -> tree of T[*s] on every process

    Args:
        tree: tensors, arrays, numbers, strings, bytes, None, dtypes and sizes, in dicts, lists,
            tuples, sets and named tuples.  Only the tree of ``source`` counts: other processes may
            pass other shapes, another structure, or None.  Objects of other classes are refused:
            a process accepts only data from others (see docs/security.md).
        source: number of the process whose tree is sent.

    Returns:
        The same structure.  Tensors become new, detached CPU tensors, and arrays new arrays; a
        ShardedTensor is sent as its value on the host.

    Raises:
        IndexError: there is no process ``source``.
        ValueError: (on all processes) the tree of ``source`` cannot be sent: a part of it is of
            another class, or is a ShardedTensor with blocks in other processes; names the part.
        CollectiveMismatch: a process is elsewhere in its script.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.multihost.broadcast({"seed": 7, "w": torch.ones(2)})
        {'seed': 7, 'w': tensor([1., 1.])}

    Source: ``jax.experimental.multihost_utils.broadcast_one_to_all``, which needs equal shapes.
    """
    what = f"torchpmap.multihost.broadcast(source={source})"
    _refuse_inside(what)
    count = process_count()
    if not 0 <= source < count:
        raise IndexError(f"{what}: there is no such process; their numbers are 0 to {count - 1}.")
    mine = Parcel.of(tree) if process_index() == source else Parcel(b"", [])
    header = mine.header
    if count > 1:
        header = job_runtime().exchange(_everyone(), header, what)[source]
    found, places = opened(header, what)
    for place, tensor in zip(places, mine.tensors, strict=False):  # none in other processes
        place.copy_(tensor)
    if count > 1:
        job_runtime().together(lambda _: _fill_from(source, places))
    return found


@boundary
def all_gather(tree: Tree, tiled: bool = False) -> Tree:
    """Return the leaves of all processes, in process order, in every process.

    all_gather: T[*s] per process -> T[n, *s];  tiled: T[k, *s] per process -> T[n * k, *s]

    Args:
        tree: pytree of tensors, arrays and numbers, of one structure; leaves have the same dtype
            and shape in every process.  None stays None.
        tiled: concatenate along dim 0 instead of stacking on a new one; then the processes may have
            different numbers of rows.  Numbers and tensors of no dims are always stacked.

    Returns:
        The same structure, of detached CPU tensors.  A ShardedTensor with blocks in several
        processes gives its whole value, with any ``tiled``; a ShardedTensor that only this process
        holds is gathered as its value on the host.

    Raises:
        TypeError: a leaf is no tensor, array or number.
        CollectiveMismatch: structures, shapes or dtypes differ, or a process is elsewhere in its
            script; the text says which process has what.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.multihost.all_gather({"loss": 0.5, "x": torch.arange(2)})
        {'loss': tensor([0.5000]), 'x': tensor([[0, 1]])}
        >>> tp.multihost.all_gather(torch.arange(2), tiled=True)
        tensor([0, 1])

    Source: ``jax.experimental.multihost_utils.process_allgather``.
    """
    what = f"torchpmap.multihost.all_gather(tiled={tiled})"
    _refuse_inside(what)
    leaves, structure = flatten(tree)
    present = [
        (leaf, path)
        for leaf, path in zip(leaves, structure.paths("tree"), strict=True)
        if leaf is not None
    ]
    shares = [Share.of(leaf, path, tiled) for leaf, path in present]
    gathered = [[share.block] for share in shares]
    if process_count() > 1:
        kinds = [
            f"{path} is {share.kind}" for (_, path), share in zip(present, shares, strict=True)
        ]

        def work(rendezvous: Rendezvous) -> list[list[torch.Tensor]]:
            rendezvous.agree(_everyone(), "\n".join([what, *kinds]), what)
            return _from_all(shares)

        gathered = job_runtime().together(work)
    joined = map(Share.joined, shares, gathered)
    return structure.unflatten([None if leaf is None else next(joined) for leaf in leaves])


@boundary
def assert_equal(tree: Any, message: str = "") -> None:
    """Raise, in every process, unless all processes have an equal ``tree``.

    Tensors and arrays are equal if shape, dtype and every bit are (so NaN equals itself, and 0.0 is
    not -0.0), numbers if their type and every bit are; in dicts and sets the order does not count;
    objects are equal if their attributes are.  Only digests are sent.

    Args:
        tree: any pytree.  ShardedTensors are compared by their value on the host.  One with
            different blocks in several processes cannot be compared, because it is a single value.
        message: the start of the error's text.

    Raises:
        AssertionError: with the path of the first leaf that differs, and which process has what.
        TypeError: a leaf cannot be compared, such as a lambda.
        CollectiveMismatch: a process is elsewhere in its script.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.multihost.assert_equal({"w": torch.ones(2)}, "weights after the first step")

    Source: ``jax.experimental.multihost_utils.assert_equal``.
    """
    what = "torchpmap.multihost.assert_equal"
    _refuse_inside(what)
    leaves, structure = flatten(tree)
    lines = sorted(  # the order of dicts does not count
        f"{path} = {fingerprint(leaf)}"
        for path, leaf in zip(structure.paths("tree"), leaves, strict=True)
    )
    if process_count() == 1:
        return
    found = job_runtime().together(
        lambda rendezvous: rendezvous.differing(_everyone(), "\n".join(lines), what)
    )
    if found is None:
        return
    texts, _ = found
    rows = zip_longest(*(each.splitlines() for each in texts), fillvalue="(nothing)")
    differing = next(row for row in rows if len(set(row)) > 1)
    raise AssertionError(
        f"{message or what}: the processes do not have the same values:\n"
        f"{texts_by_rank(_everyone(), differing)}"
    )


@boundary
def local_rows(tree: Tree, dim: int = 0) -> Tree:
    """Return this process's rows of values that every process has whole.

    local_rows: T[n * k, *s] -> T[k, *s]: the part of ``process_index()`` of n equal ones

    Args:
        tree: pytree of tensors and arrays, equal in every process (which is not checked: see
            ``assert_equal``).
        dim: the dim to divide.

    Returns:
        The same structure, of views; with a single process the tree itself.

    Raises:
        ValueError: the rows do not divide over the processes.
        TypeError: a leaf has no rows, or is a ShardedTensor, which is divided already.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.multihost.local_rows(torch.arange(4))  # in process 1 of 2: tensor([2, 3])
        tensor([0, 1, 2, 3])

    Source: the loop over ``jax.process_index()`` in multi-process input pipelines.
    """
    count = process_count()
    leaves, structure = flatten(tree)
    for leaf, path in zip(leaves, structure.paths("tree"), strict=True):
        _check_rows(leaf, path, dim, count)
    if count == 1:
        return tree
    return structure.unflatten([_part(leaf, dim, count) for leaf in leaves])


def _check_rows(leaf: Any, path: str, dim: int, count: int) -> None:
    what = f"torchpmap.multihost.local_rows(dim={dim})"
    if leaf is None:
        return
    if isinstance(leaf, ShardedTensor):
        raise TypeError(
            f"{what}: {path} is a ShardedTensor, whose rows are on their devices already. Pass it "
            "to the mapped function as it is, or take the rows of its value on the host "
            "(torchpmap.multihost.all_gather)."
        )
    if not isinstance(leaf, _DATA):
        raise TypeError(
            f"{what}: {path} has type {type(leaf).__name__}, but only tensors and arrays have rows."
        )
    check_array(leaf, f"{what}: {path}")
    if not -leaf.ndim <= dim < leaf.ndim:
        raise ValueError(f"{what}: {path} has shape {list(leaf.shape)}, which has no such dim.")
    if leaf.shape[dim] % count:
        raise ValueError(
            f"{what}: {path} has {leaf.shape[dim]} rows (shape {list(leaf.shape)}), which do not "
            f"divide over {count} processes. Pad it or drop rows to a multiple of {count}."
        )


def _part(leaf: Any, dim: int, count: int) -> Any:
    if leaf is None:
        return None
    rows = leaf.shape[dim] // count
    where = [slice(None)] * leaf.ndim
    where[dim] = slice(process_index() * rows, (process_index() + 1) * rows)
    return leaf[tuple(where)]


# -- agreement -------------------------------------------------------------------------------------


def _refuse_inside(what: str) -> None:
    if axis_stack.bound():
        raise RuntimeError(
            f"{what} is for the script around mapped functions, and cannot be called inside one. "
            "Use a collective there (torchpmap.all_gather, psum, pbroadcast)."
        )


def _everyone() -> range:
    return range(process_count())


# -- tensors ---------------------------------------------------------------------------------------


def _from_all(shares: Sequence[Share]) -> list[list[torch.Tensor]]:
    """The blocks of all processes, per leaf."""
    tiled = [share for share in shares if share.is_tiled]
    if not tiled:
        return _gathered([share.block for share in shares])
    counts = torch.tensor([len(share.block) for share in tiled], device="cpu")
    numbers = zip(*(each.tolist() for each in _gathered([counts])[0]), strict=True)
    rows = [next(numbers) if share.is_tiled else () for share in shares]
    sent = [
        padded(share.block, max(counts)) if share.is_tiled else share.block
        for share, counts in zip(shares, rows, strict=True)
    ]
    return [
        [block[:count] for block, count in zip(blocks, counts, strict=True)] if counts else blocks
        for blocks, counts in zip(_gathered(sent), rows, strict=True)
    ]


def _gathered(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Per tensor, the tensors of all processes, which must have equal shapes."""
    count, group = process_count(), job_runtime().group_of_all()
    under_way = [c10d.all_gather_into_tensor(as_bytes(tensor), count, group) for tensor in tensors]
    gathered = [c10d.wait_tensor(data).reshape(count, -1) for data in under_way]
    return [
        [row.clone().view(tensor.dtype).reshape(tensor.shape) for row in data]
        for tensor, data in zip(tensors, gathered, strict=True)
    ]


def _fill_from(source: int, places: Sequence[torch.Tensor]) -> None:
    """Write to contiguous tensors what they hold in process ``source``."""
    group = job_runtime().group_of_all()
    for under_way in [c10d.broadcast_(as_bytes(place), source, group) for place in places]:
        c10d.wait_tensor(under_way)
