"""Makes the real tensors that a traced function closes over inputs of its graph.

``_trace/graph_mode`` asks for each tensor that reaches an operation and is none of its graph,
whichever Python object holds it.  A value baked into the graph would go stale when the caller
changes it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from torchpmap._base.ambient import Unchanged
from torchpmap._base.contents import Contents, ReadProperty
from torchpmap._base.errors import lost_write
from torchpmap._base.inexact import is_inexact
from torchpmap._base.pytree import map_tensors
from torchpmap._base.replaced import Replaced, Replacement
from torchpmap._base.sources import users_line
from torchpmap._base.torch_internals import (
    ENTRIES,
    EXITS,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    innermost,
    is_wrapped,
    new_fake,
    no_torch_dispatch,
    node_of,
    outside_modes,
    outside_transforms,
    subclass_function_off,
    tracing_mode,
    track,
    track_as,
)
from torchpmap._base.torch_versions import function_entry
from torchpmap._trace.escaped import note
from torchpmap._trace.graphs import Closure
from torchpmap._trace.kinds import absence, oddity
from torchpmap._trace.remat import Record
from torchpmap._trace.repetition import Executions
from torchpmap._trace.traced_views import TracedViews
from torchpmap.random._streams import refuse_draw


class SettingChanged(Exception):
    """The function changes a setting of torch that its graph cannot contain."""


class Capture(Closure):
    """Gives every real tensor that meets a traced operation a placeholder of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(self)
        self.record = Record()
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._settings = Unchanged()
        self.device = device
        self.pinned: list[Any] = []
        """Tensors whose value was read, and a ``ReadProperty`` for each other property."""
        self._questions: set[Any] = set()
        self._plain: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """(the tensor without its class, the tensor), by the id of either."""
        self.read: list[tuple[torch.Tensor, Contents, str]] = []
        """Tensors whose memory Python code could read and write, what they held before, and the
        name of the function that gave access.
        """
        self.stand_ins: dict[int, torch.Tensor] = {}
        self.grads_before: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        """(a leaf, the gradient with which the function begins), by the id of the leaf."""
        self.executions = Executions()
        self.views = TracedViews()
        self.replication: Any = None
        """``Replication`` of the trace, if it is asked which values are the same on all devices."""
        self.is_over = False
        """Whether what is traced now is no more the function's."""

    def end(self) -> None:
        self.is_over = True
        self.executions.end()

    def refuse_writes_by_python(self) -> None:
        """Raise if Python code wrote to the memory of a tensor from outside."""
        for real, held, name in self.read:
            if not held.same():
                held.restore()
                raise RuntimeError(lost_write(real, f" (.{name}())"))

    def node_of(self, value: torch.Tensor) -> torch.fx.Node | None:
        """The node of a value, without transforms around it; None if no node has to do with it."""
        with outside_transforms():  # transforms inside the function would trace a new input
            return node_of(self.tracer, self.substitute(value))

    def substitute(self, value: Any) -> Any:
        """The stand-in of a real tensor; anything else is left alone."""
        if not is_real(value):
            self._refuse(value)
            return value
        _, value = self._plain.get(id(value), (None, value))
        stand_in = self.stand_ins.get(id(value))
        return self._add(value) if stand_in is None else stand_in

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor without its class, if that is only a name (see ``_is_mere_name``)."""
        if not _is_mere_name(type(tensor)) or not is_real(tensor):
            return tensor
        if id(tensor) not in self._plain:
            with outside_transforms(), outside_modes():
                pair = tensor.as_subclass(torch.Tensor), tensor
            self._plain[id(tensor)] = self._plain[id(pair[0])] = pair
        return self._plain[id(tensor)][0]

    def from_enclosing_transform(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a tensor that a function transform around the call is tracing."""
        stand_in = self.stand_ins.get(id(tensor))
        if stand_in is None:
            with outside_transforms():  # transforms inside the function would trace it
                stand_in = self._stand_in(tensor)
                if is_inexact(stand_in):
                    stand_in.requires_grad_()
        return stand_in

    def on_enter_transform(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a tensor that a transform inside is about to wrap, and none around."""
        if not is_real(tensor) or is_wrapped(tensor) or tensor.requires_grad or tensor.is_meta:
            return tensor
        with outside_transforms():
            stand_in: torch.Tensor = self.substitute(tensor)
        return stand_in

    def note(self, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any, answer: Any) -> None:
        """Note a property of a tensor, such as its shape: the function's Python code used it."""
        if getattr(func, "__self__", None) is torch.Tensor.grad and (
            id(tensor) in self.grads_before or not (answer is None or is_real(answer))
        ):
            return  # the gradient is the traced function's own
        question = id(tensor), getattr(func, "__self__", func), repr((args, kwargs))
        if question not in self._questions:
            self._questions.add(question)
            self.pinned.append(
                ReadProperty(functools.partial(func, tensor, *args, **kwargs), answer)
            )

    def _add(self, real: torch.Tensor) -> torch.Tensor:
        stand_in = self._stand_in(real)
        if real.is_leaf and real.requires_grad:
            self.grads_before[id(real)] = real, real.grad
            real.grad = None  # .backward() in the traced function starts from no gradient
        return stand_in

    def _refuse(self, value: Any) -> None:
        """Raise for a tensor from outside that cannot be on devices."""
        if isinstance(value, torch.Tensor) and (
            is_real(value) or getattr(value, "fake_mode", None) is not self.fake_mode
        ):
            reason = oddity(value) or absence(value)
            if reason is not None:
                # after a TypeError, ``+`` would try the other operand
                raise ValueError(f"at {users_line()}: a tensor from outside the function {reason}")

    def _stand_in(self, real: torch.Tensor) -> torch.Tensor:
        self._refuse(real)
        kind = real.shape, real.dtype, self.device, self._strides(real)
        stand_in = new_fake(self.fake_mode, *kind)
        node = self.graph.placeholder(f"captured_{len(self.nodes)}")
        track(self.tracer, stand_in, node)
        self.nodes.append(node)
        self.tensors.append(real)  # also keeps id(real) from being reused
        self.stand_ins[id(real)] = stand_in
        return stand_in

    def _strides(self, real: torch.Tensor) -> Sequence[int] | None:
        """Those of its stand-in; None: contiguous, as blocks are."""
        return None

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Hear of an operation before it becomes a node, of the graph or of one inside it."""
        changed = self._settings.broken_by()
        if changed is not None:
            raise SettingChanged(changed)
        if isinstance(func, OpOverload):
            refuse_draw(func, args, kwargs)
        self.views.note(func, args, kwargs)


class Substitute(TorchFunctionMode):
    """Replaces tensors that the function closes over when they enter torch functions.

    Unlike ``Capture`` it works above functorch and autograd, so transforms around the function may
    trace the replacements.  Tensors that enter or leave a transform, or enter an autograd.Function,
    inside the function pass no torch function, so the functions of torch that take them are
    replaced meanwhile.  In other threads these do as torch's own.
    """

    def __init__(
        self,
        find: Callable[[torch.Tensor], torch.Tensor],
        at_transforms: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """``at_transforms``: instead of ``find``, for what enters or leaves a transform inside."""
        super().__init__()
        self.find = find
        self.at_transforms = at_transforms or find

    def __enter__(self) -> Self:
        _crossings.__enter__()
        here.entered.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        here.entered.remove(self)
        _crossings.__exit__()

    def wrapped(self, tensor: Any) -> None:
        """Hear of a tensor as a transform in the block hands it to its function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_tensors(self.find, (args, kwargs or {}))
        return func(*args, **kwargs)


class Exchange(Substitute):
    """Puts other tensors in the place of some."""

    def __init__(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        super().__init__(self._other)
        self._pairs = {id(x): (x, y) for x, y in zip(old, new, strict=True)}
        self.unmet = set(self._pairs)
        """Ids of those that nothing has asked for."""

    def _other(self, tensor: torch.Tensor) -> torch.Tensor:
        self.unmet.discard(id(tensor))
        return self._pairs.get(id(tensor), (tensor, tensor))[1]


class _Here(threading.local):
    def __init__(self) -> None:
        self.entered: list[Substitute] = []
        """Those of this thread, the innermost last."""


here = _Here()


def _found(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        for each in reversed(here.entered):
            value = each.at_transforms(value)
    return value


def _crossing(own: Callable[..., Any], enters: bool) -> Callable[..., Any]:
    def through(value: Any, *args: Any) -> Any:
        result = own(_found(value), *args)
        if enters:
            for each in here.entered:
                each.wrapped(result)
        return result

    return through


_module, _name, _entry = function_entry(_found)
_crossings = Replaced(
    [
        *(Replacement(*place, functools.partial(_crossing, enters=True)) for place in ENTRIES),
        *(Replacement(*place, functools.partial(_crossing, enters=False)) for place in EXITS),
        Replacement(_module, _name, lambda own: _entry),
    ]
)


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class TracedCalls(Substitute):
    """The function mode of a trace.

    It guards the data of the caller's tensors against accesses that a dispatch mode does not see:
    ``tensor.data = ...`` would replace the caller's data; ``.data`` would let the function write to
    it; and numbers read by ``.numpy()`` or ``.tolist()`` would go stale (in fake mode, be garbage).
    """

    def __init__(
        self,
        capture: Capture,
        find: Callable[[torch.Tensor], torch.Tensor],
        at_transforms: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__(find, at_transforms)
        self.capture = capture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.find is not as_it_is:
            args, kwargs = map_tensors(self.find, (args, kwargs))
        if torch.compiler.is_dynamo_compiling():  # it has its own tensors, and no sets of getters
            return func(*args, **kwargs)
        result = self._call(func, types, args, kwargs)
        note(result, self.capture.executions.place)
        return result

    def _call(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(map(_is_mere_name, types)):
            # torch would convert the result, a traced tensor, to that class too, and fail
            with subclass_function_off():
                if func not in DESCRIBING and func.__name__ not in ("__get__", "__set__"):
                    plain = self.capture.plain  # a backward pass would meet the class again
                    args, kwargs = map_tensors(plain, (args, kwargs))
                return self._keep(func, args, kwargs)
        return self._keep(func, args, kwargs)

    def _keep(self, func: Any, args: Any, kwargs: Any) -> Any:
        is_getter = func.__name__ == "__get__"
        if (func.__self__ if is_getter else func) in DESCRIBING and _is_users(args[0]):
            answer = func(*args, **kwargs)
            self.capture.note(func, args[0], args[1:], kwargs, answer)
            return answer
        accessor = func.__name__ in ("__get__", "__set__") and func.__self__ is torch.Tensor.data
        if accessor and func.__name__ == "__set__" and isinstance(innermost(args[0]), FakeTensor):
            return self._set_data(*args)
        if not (accessor or func in READERS) or not _is_users(args[0]):
            return func(*args, **kwargs)
        if not accessor:
            with outside_modes():
                self.capture.read.append((args[0], Contents(args[0]), func.__name__))
                return func(*args, **kwargs)
        if func.__name__ == "__set__":
            raise RuntimeError(lost_write(args[0], " (.data)"))
        return args[0].detach()

    def _set_data(self, tensor: Any, value: Any) -> None:
        """``tensor.data = value`` of a traced tensor: it is another value in the graph from now
        on.
        """
        mode = tracing_mode()
        value = value.detach()
        if mode is None or any(
            is_wrapped(x) or node_of(mode.tracer, x) is None for x in (tensor, value)
        ):
            raise NotImplementedError(
                f"at {users_line()}: `x.data = ...` of a tensor that comes from outside of a "
                "transform or a loop, or that one traces. Use x.data.copy_(...), or a new tensor."
            )
        tensor.data = value
        track_as(mode.tracer, tensor, value)


def without_finding(mode: TorchFunctionMode) -> TorchFunctionMode:
    """The mode for a part of a trace that runs later, under fewer transforms: there ``find`` would
    take a tensor of a transform that has ended for one from around the call.
    """
    return TracedCalls(mode.capture, as_it_is) if isinstance(mode, TracedCalls) else mode


READERS = (
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.apply_,
    torch.Tensor.map_,
    torch.Tensor.map2_,
)


DESCRIBING = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("shape", "ndim", "dtype", "requires_grad", "is_leaf", "grad", "nbytes", "itemsize"),
        *("size", "numel", "nelement", "dim", "ndimension", "__len__", "stride", "storage_offset"),
        *("is_contiguous", "is_floating_point", "is_complex", "element_size"),
    )
) | {torch.numel, torch.is_floating_point, torch.is_complex}


def _is_mere_name(kind: type) -> bool:
    """Whether it is a subclass of tensors that leaves all operations to torch."""
    return (
        kind not in (torch.Tensor, torch.nn.Parameter)
        and issubclass(kind, torch.Tensor)
        and getattr(kind.__torch_function__, "__func__", None) is _TORCHS_OWN
        and kind.__torch_dispatch__ is no_torch_dispatch
    )


_TORCHS_OWN = torch.Tensor.__dict__["__torch_function__"].__func__


def _is_users(tensor: Any) -> bool:
    """Whether it is a tensor with memory of its own that no trace and no transform has made."""
    kind = type(tensor)
    return (kind in (torch.Tensor, torch.nn.Parameter) or _is_mere_name(kind)) and (
        not is_wrapped(tensor)
    )


def is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def autograd_nodes(tensors: Iterable[torch.Tensor]) -> set[Any]:
    """The nodes of autograd that tensors were computed by."""
    waiting: list[Any] = [x.grad_fn for x in tensors]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [source for source, _ in node.next_functions]
    return seen


@contextlib.contextmanager
def clean_grads(capture: Capture) -> Iterator[list[torch.Tensor]]:
    """Restore ``.grad`` of captured parameters, which ``loss.backward()`` inside the program sets
    to traced tensors.

    Yields a list that afterwards holds every gradient that was left on a captured leaf.
    """
    leftover: list[torch.Tensor] = []
    try:
        yield leftover
    finally:
        for real, before in capture.grads_before.values():
            if real.grad is not None:
                leftover.append(real.grad)
            real.grad = before
