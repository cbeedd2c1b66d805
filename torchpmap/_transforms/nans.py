"""Finds the operation that makes a NaN: what ``debug.find_nan`` and ``config.debug_nans`` share.

A call runs in this process, mapped functions row by row (``_transforms/rows``), and a mode looks at
what each operation returns.  Every thread needs a mode of its own, so rows ask for one (``look``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torchpmap._base.axis_spec import argument_names
from torchpmap._base.config import config
from torchpmap._base.context import assigned
from torchpmap._base.errors import kind_of
from torchpmap._base.inexact import is_inexact
from torchpmap._base.pytree import flatten, flatten_call, map_tensors, tree_leaves
from torchpmap._base.sources import is_users, line, users_frames
from torchpmap._base.torch_internals import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    autograd_node,
    gives_views,
    innermost,
    is_traced,
    is_transformed,
    is_zeros,
    next_node_number,
    num_modes,
    with_memory,
    written_values,
)
from torchpmap._collectives.backend import NAMESPACES
from torchpmap._layout import axis_stack
from torchpmap._loops.surroundings import steps
from torchpmap._runtime import inline_mode
from torchpmap._runtime.current import job_runtime, process_count, process_index
from torchpmap._sharded.tensor import ShardedTensor, spans_processes
from torchpmap._trace.effects import wide
from torchpmap._trace.environment import named_tensors

UNSET = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
"""What memory holds before it is written says nothing."""
_COPIES = {"clone", "copy_", "_to_copy", "cat", "stack", "lift_fresh", "lift_fresh_copy"}
"""What moves numbers, also those of the package's own."""
_UNKNOWN = (
    "{what} came from no operation that was looked at: from numbers of Python or NumPy, memory "
    "that nothing has set, or a tensor that the function finds elsewhere"
)
_NOT_WITHIN = (
    "those that it got hold none. Call torchpmap.debug.find_nan on a function that has the "
    "backward pass inside: it names the operation."
)


@dataclass
class _Search:
    """One run in which every operation is looked at."""

    sought: tuple[str, ...]
    fun: Callable[..., Any]
    given: list[str]
    """Which arguments hold what is sought."""
    runs_once: bool = False
    """Whether it is the call itself, and mapped functions in it run on the devices."""
    inherited: str | None = None
    """The first operation that got what is sought from outside."""

    def from_outside(self) -> FloatingPointError:
        """What there is to say if no operation has made it."""
        found = [
            f"a tensor that the function closes over ({name}) holds {_count(x, self.sought)} "
            "before the call"
            for name, x in named_tensors(self.fun)
            if not spans_processes(x) and holds(x, self.sought)
        ]
        found = self.given or found or [_UNKNOWN.format(what=" or ".join(self.sought))]
        return FloatingPointError("\n".join([*found, *filter(None, [self.inherited])]))


_Place = tuple[tuple[str, int] | None, tuple[int, ...]]
"""File and line of the user's code, and the steps of the loops around it."""

_search: ContextVar[_Search | None] = ContextVar("torchpmap_nan_search", default=None)
_is_checked: ContextVar[bool] = ContextVar("torchpmap_nan_checked", default=False)


def look() -> AbstractContextManager[Any]:
    """What a thread enters, if there is a search."""
    search = _search.get()
    return nullcontext() if search is None else _Look(search)


class _Look(TorchDispatchMode):
    """Raises at the first operation whose result holds what is sought, and none of its inputs."""

    supports_higher_order_operators = True

    def __init__(self, search: _Search) -> None:
        super().__init__()
        self._search = search
        self._forward: dict[int, _Place] = {}
        """Number of a node of autograd -> where its forward operation is."""
        self._next = next_node_number()
        self._made = WeakTensorKeyDictionary()
        """The tensors of the run itself."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.cond and friends run Dynamo on their branches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or is_traced():
            return func(*args, **kwargs)
        if self._next < next_node_number():  # nodes, one of each transform, are made just before
            nodes = range(self._next, next_node_number())
            self._forward |= dict.fromkeys(nodes, self._forward_of(autograd_node()))
            self._next = nodes.stop
        inputs = _tensors((args, kwargs))
        written = _tensors(written_values(func, args, kwargs))
        targets = set(map(id, written))
        inputs = [x.clone() if id(x) in targets else x for x in inputs]
        sought = self._search.sought
        is_collective = func.namespace in NAMESPACES
        if is_collective and any(holds(x, sought) for x in inputs):
            self._inherit(func)  # before another row gets it
        is_kept = any(x not in self._made and not holds(x, sought) for x in written)
        if is_kept and any(holds(x, sought) for x in inputs):
            self._inherit(func)  # it would be in a weight or a statistic, for good
            raise self._search.from_outside()
        result = with_memory(func)(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        is_view = gives_views(func)
        if not is_view or all(x in self._made for x in inputs):
            self._made.update(dict.fromkeys(_tensors(result), True))
        if is_view or name in UNSET:
            return result
        bad = [x for x in (*_tensors(result), *written) if holds(x, sought)]
        if bad:
            is_from_row = is_collective and self._search.inherited is not None
            if not is_from_row and not any(holds(x, sought) for x in inputs):
                numbers = (x for x in tree_leaves((args, kwargs)) if type(x) in (float, complex))
                given = any(holds(torch.tensor(x), sought) for x in numbers)
                why = "which it was given as a number" if given else "and its inputs hold none"
                text = f"{func} gave {_count(bad[0], sought)}, {why}"
                raise FloatingPointError("\n".join([text, *self._where(), *_listed(inputs)]))
            if name not in _COPIES:
                self._inherit(func)
        return result

    def _inherit(self, func: Any) -> None:
        if self._search.inherited is None:
            self._search.inherited = "\n".join([f"first used by {func}", *self._where()])

    def _forward_of(self, node: Any) -> _Place:
        """Where an operation is, or that of which a backward pass runs the node."""
        return _here() if node is None else self._forward.get(node._sequence_nr(), (None, steps()))

    def _where(self) -> list[str]:
        node, (own, _) = autograd_node(), _here()
        place, numbers = self._forward_of(node)
        found = []
        if node is not None:
            of = "" if place is None else f", of the operation at {line(*place)}"
            found.append(f"in the backward pass: {node.name()}{of}")
        if own is not None:  # some passes start in a thread of a row's own
            found.append(f"{'at' if node is None else 'asked for at'} {line(*own)}")
        for level, number in enumerate(numbers):
            found.append(f"in step {number} of a loop{' in it' * bool(level)}, counted from 0")
        return [f"  {each}" for each in found]


def _here() -> _Place:
    frame = next(filter(is_users, users_frames()), None)
    line_of = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    return line_of, steps()


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Those in a tree whose numbers are known, and that torch can look at."""
    found = (innermost(x) for x in tree_leaves(tree) if isinstance(x, torch.Tensor))
    dense = (x for x in found if x.layout == torch.strided and not x.is_nested)
    return [x for x in dense if not (isinstance(x, FakeTensor) or x.is_meta or is_zeros(x))]


def _is_sought(x: torch.Tensor, sought: Sequence[str]) -> torch.Tensor:
    x = x.detach()
    x = x.float() if x.is_floating_point() and x.itemsize == 1 else x  # float8 has no isnan
    if len(sought) == 2:
        return ~x.isfinite()
    return x.isnan() if sought[0] == "NaN" else x.isinf()


def holds(x: torch.Tensor, sought: Sequence[str]) -> bool:
    """Whether it holds what is sought: ``"NaN"``, ``"infinity"`` or both."""
    # nothing is sought if another thread has just switched it off
    return bool(sought) and is_inexact(x) and bool(_is_sought(x, sought).any())


def _count(x: torch.Tensor, sought: Sequence[str]) -> str:
    """``"NaN in 1 of 3 numbers of float32[3]"``"""
    count = int(_is_sought(x, sought).sum())
    kind = kind_of(x.shape, x.dtype)
    names = [name for name in sought if holds(x, (name,))]
    return f"{' and '.join(names)} in {count} of {x.numel()} numbers of {kind}"


def _listed(inputs: Sequence[torch.Tensor]) -> list[str]:
    return [f"  input {k}: {described(x)}" for k, x in enumerate(inputs)]


def described(*blocks: torch.Tensor, between: str = ", ") -> str:
    """Kind and range of a tensor, which may be in blocks."""
    first = blocks[0]
    kind = kind_of(first.shape, first.dtype)
    if not any(x.numel() for x in blocks) or first.dtype == torch.bool:
        return kind
    given = [x.detach().abs() if x.is_complex() else x.detach() for x in blocks]
    sizes = torch.cat([wide(x).flatten() for x in given])
    finite, infinite = sizes.isfinite(), sizes.isinf()
    low = float(torch.where(finite, sizes, torch.inf).min())
    high = float(torch.where(finite, sizes, -torch.inf).max())
    form = "g" if is_inexact(first) else ".0f"
    parts = [f"{'sizes ' * first.is_complex()}from {low:{form}} to {high:{form}}"] * (low <= high)
    for name, each in ("NaN", sizes.isnan()), ("infinity", infinite):
        count = int(each.sum())
        parts += [f"{count} {name}"] * bool(count)
    return f"{kind}{between}{', '.join(parts)}"


# -- runs ------------------------------------------------------------------------------------------


def find(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sought: tuple[str, ...]
) -> None:
    """Run a call in this process, and raise ``FloatingPointError`` if what is sought turns up."""
    search = _Search(sought, fun, _bad_arguments(fun, args, kwargs, sought))
    state = torch.default_generator.get_state()
    try:
        with inline_mode.chosen(True, serial=True):
            result = _searched(search, fun, args, kwargs)
    except NotImplementedError:  # what is differentiated from outside has no rows
        torch.default_generator.set_state(state)
        with inline_mode.chosen(True):
            result = _searched(search, fun, args, kwargs)
    if search.given or search.inherited is not None or _bad_leaves(result, "", sought):
        raise search.from_outside()


def _searched(
    search: _Search, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        # single-threaded: modes are those of a thread
        with assigned(_search, search), torch.autograd.set_multithreading_enabled(False), look():
            return fun(*args, **kwargs)
    except FloatingPointError as error:
        text = "\n".join([str(error), *(f"  {x}" for x in getattr(error, "__notes__", ()))])
        raise FloatingPointError(text).with_traceback(error.__traceback__) from None


def _bad_arguments(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sought: tuple[str, ...]
) -> list[str]:
    leaves, structure = flatten_call(args, kwargs)
    paths = structure.call_paths(argument_names(fun, len(args)))
    return [
        f"argument {path} holds {_count(x, sought)} before the call"
        for path, x in zip(paths, leaves, strict=True)
        if isinstance(x, torch.Tensor) and holds(x, sought)
    ]


def _bad_leaves(tree: Any, name: str, sought: tuple[str, ...]) -> list[tuple[str, torch.Tensor]]:
    leaves, structure = flatten(tree)
    pairs = zip(structure.paths(name), leaves, strict=True)
    return [(path, x) for path, x in pairs if isinstance(x, torch.Tensor) and holds(x, sought)]


# -- the settings ----------------------------------------------------------------------------------


def is_due() -> bool:
    """Whether a call made now is one that the settings look at: none inside another, or that a
    transform of ``torch.func`` follows.
    """
    search = _search.get()
    is_inside = _is_checked.get() or axis_stack.bound() or not (search is None or search.runs_once)
    return not (is_inside or is_transformed() or (num_modes() and is_traced()))


def checked(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    *,
    again: Callable[[], AbstractContextManager[Any]] = nullcontext,
    among: Callable[[], Sequence[int]] = tuple,
    gathered: Callable[..., tuple[Any, Any]] | None = None,
) -> Any:
    """Call a function; if its result holds what the settings seek, raise what ``find`` finds.

    Args:
        again: what is around the second run.
        among: the processes that have made the call and may have rows of their own: all raise if
            one does.
        gathered: what makes of arguments those with the rows of all processes.
    """
    sought = config.sought
    kept_args, kept_kwargs = map_tensors(_kept, (args, kwargs))
    state = torch.default_generator.get_state()
    with assigned(_is_checked, True):
        result = fun(*args, **kwargs)
    bad, processes = _bad_leaves(result, f"the result of {name}", sought), among()
    if not any(_from_all(processes, b"bad" * bool(bad), name)):
        _look_at_gradients(result, (args, kwargs), name, sought, processes)
        return result
    after = torch.default_generator.get_state()
    torch.default_generator.set_state(state)  # the second run draws the numbers of the first
    because = "the same call in one process, uncompiled, makes none (torchpmap.debug.find_nan)."
    error = None
    try:
        if gathered is not None and len(processes) == process_count() > 1:
            kept_args, kept_kwargs = gathered(kept_args, kept_kwargs)
        with again():
            find(fun, kept_args, kept_kwargs, sought)
    except FloatingPointError as found:
        error, because = found, ""
    except Exception as other:
        because = f"the same call cannot run in one process: {type(other).__name__}: {other}"
    finally:
        torch.default_generator.set_state(after)
    if because and bad:
        error = _in_result(bad, sought, because)
    raise _most_telling(error, bool(because), processes, name)


def _look_at_gradients(
    result: Any, given: Any, name: str, sought: tuple[str, ...], processes: Sequence[int]
) -> None:
    """Have a backward pass raise if it makes what is sought of the gradients of a call's results:
    which operation does is known only if it runs in ``find`` too.
    """

    def look_at(found: Any, cotangents: Any) -> None:
        bad, error = _bad_leaves(found, "", sought), None
        if bad and not _bad_leaves(cotangents, "", sought):
            bad = [(f"a gradient that {name} returns in backward()", bad[0][1])]
            error = _in_result(bad, sought, _NOT_WITHIN)
        if any(_from_all(processes, b"bad" * bool(error), name)):
            raise _most_telling(error, True, processes, name)

    nodes = [
        {x.grad_fn for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}
        for tree in (result, given)
    ]
    for node in filter(None, nodes[0] - nodes[1]):
        node.register_hook(look_at)


def _from_all(processes: Sequence[int], mine: bytes, name: str) -> list[bytes]:
    if len(processes) < 2:
        return [mine]
    return job_runtime().exchange(processes, mine, f"looking for NaN in what {name} returns")


def _most_telling(
    error: FloatingPointError | None, is_vague: bool, processes: Sequence[int], name: str
) -> FloatingPointError:
    """The same of their errors in all processes: the first that names an operation, if one does."""
    told = _from_all(processes, f"{is_vague:d}{error}".encode() if error else b"", name)
    if error is not None and len(set(told)) == 1:
        return error
    text, process = min(
        ((text, process) for text, process in zip(told, processes, strict=True) if text),
        key=lambda each: each[0][:1],
    )
    found = FloatingPointError(f"{text[1:].decode()}\n  in process {process}")
    is_mine = process == process_index()
    return found.with_traceback(error.__traceback__) if error and is_mine else found


def whole(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """The value with the rows of all processes, along ``dim`` if it has only those of this one."""
    from torchpmap.multihost import all_gather  # which most programs never need

    if dim is not None:
        found = all_gather(x.movedim(dim, 0), tiled=True).movedim(0, dim)
    else:
        found = all_gather(x) if spans_processes(x) else x
    return found.detach().requires_grad_(x.requires_grad)


def _kept(x: torch.Tensor) -> torch.Tensor:
    """Another name of its value, which stays if the call takes the tensor that is donated to it."""
    return x.detach().requires_grad_(x.requires_grad) if type(x) is ShardedTensor else x


def stepped(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that may write: only once, so every operation is looked at as it runs."""
    sought = config.sought
    search = _Search(sought, fun, _bad_arguments(fun, args, kwargs, sought), runs_once=True)
    with assigned(_is_checked, False):  # mapped functions in it are
        result = _searched(search, fun, args, kwargs)
    bad = _bad_leaves(result, "the result", sought)
    if bad and (search.given or search.inherited is not None):
        raise search.from_outside()
    if bad:
        raise _in_result(bad, sought, "no operation that was looked at made it.")
    return result


def _in_result(
    bad: list[tuple[str, torch.Tensor]], sought: tuple[str, ...], because: str
) -> FloatingPointError:
    path, x = bad[0]
    return FloatingPointError(f"{path} holds {_count(x, sought)}; {because}")
