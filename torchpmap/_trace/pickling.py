"""Pickles for the workers: graphs (every plan) and Python functions (``compile=False`` only).

Graphs travel as lists of nodes.  ``torch.fx``'s own pickle is generated code that is traced again
when it is loaded.  That trace *executes* an operation on constants alone, and a collective would
then wait for peers that never come.

Functions go through cloudpickle, which takes lambdas, closures and everything defined in
``__main__``, but not two kinds of objects.  ``torch.ops`` objects go by name (the user's own with
their source: see ``_trace/custom_ops``), and functions wrapped by ``torch.compile`` go as the
function inside.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import importlib
import io
import operator
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, cast

import cloudpickle
import torch
from torch.fx.node import map_arg

from torchpmap._base.errors import TensorEscaped
from torchpmap._base.pytree import register_again, registration
from torchpmap._base.torch_internals import (
    OPDEFS,
    CustomOpDef,
    HigherOrderOperator,
    LazyGraphModule,
    OpNamespace,
    OpOverload,
    OpOverloadPacket,
)
from torchpmap._trace.custom_ops import HiddenOperation, mentioned, reduced, source

_NO_LOCKS = (
    "Locks, open files, sockets and generators do not travel: create them inside the function"
)


class Made:
    """Travels to the workers as what it is made of, although other pickles take its name: the
    module that it is found in may hold other values there.
    """

    __slots__ = ()

    def made_of(self) -> tuple[Any, ...]:
        """What makes it again: a function and its arguments."""
        raise NotImplementedError

    def __reduce__(self) -> Any:
        """As functions are pickled: by its name, if a decorator has made it; but other processes
        have another ``__main__``.
        """
        with contextlib.suppress(AttributeError):  # another callable may have no name
            module, name = sys.modules.get(self.__module__), cast(Any, self).__qualname__
            if operator.attrgetter(name)(module) is self and self.__module__ != "__main__":
                return name
        return self.made_of()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self,
        file: io.BytesIO,
        tensors: list[torch.Tensor],
        here: bool = False,
        with_grads: bool = False,
    ) -> None:
        super().__init__(file)
        self._with_grads = with_grads
        self._tensors = tensors
        self._source = _nothing if here else source
        self._here = here
        self.names: set[str] = set()
        """Attributes and globals that the pickled functions mention."""
        self.mentions_ops = False
        self.definitions: list[str] = []
        """The user's operations whose functions are in the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self._tensors.append(obj)
        if isinstance(obj, types.CodeType):
            self.names.update(obj.co_names)
            self.mentions_ops |= "ops" in obj.co_names
            if obj.co_filename and _forgets_files():  # messages name them
                named = operator.methodcaller("replace", co_filename=obj.co_filename)
                return named, (obj.replace(co_filename=""),)
        if isinstance(obj, Made):
            return obj.made_of()
        if isinstance(obj, torch.fx.GraphModule):
            return _decoded, _encoded(obj)
        if isinstance(obj, torch.memory_format | torch.layout):
            # their own pickle looks for a module that has a "torch" and may find the user's script
            return getattr, (torch, str(obj).removeprefix("torch."))
        if isinstance(obj, OpOverload):
            return _overload, (obj._schema.name, obj._overloadname, self._source(obj.name()))
        if isinstance(obj, OpOverloadPacket):
            overload = getattr(obj, obj.overloads()[0])
            return _packet, (obj._qualified_op_name, self._source(overload.name()))
        if isinstance(obj, CustomOpDef):
            if self._here:
                return _defined_here, (obj._qualname,)
            self.definitions.append(obj._qualname)
            return reduced(obj)
        if isinstance(obj, HigherOrderOperator):
            return operator.attrgetter(f"ops.higher_order.{obj._name}"), (torch,)
        if isinstance(obj, OpNamespace):
            self.names.add(obj.name)
            self.mentions_ops = True
            return getattr, (torch.ops, obj.name)
        if isinstance(obj, type(torch.ops)):
            return operator.attrgetter("ops"), (torch,)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            # torch.backends.cuda and others, which cloudpickle would send by value
            return importlib.import_module, (obj.__name__,)
        if type(obj) is functools.cached_property:  # it has a lock (Python 3.11)
            return _cached, (obj.func, obj.attrname)
        if isinstance(obj, memoryview):
            return _viewed, _memory(obj)
        if isinstance(obj, torch.UntypedStorage):  # of uint16 and others, which its own cannot do
            return _filled, _bytes(obj)
        if self._with_grads and isinstance(obj, torch.Tensor) and obj.is_leaf:
            return _with_grad, (*obj.__reduce_ex__(2)[:2], obj.grad)
        inner = _inside(obj) if callable(obj) else None
        if inner is not None:
            return _same, (inner,)
        found = super().reducer_override(obj)
        if isinstance(obj, type) and type(found) is tuple and len(found) == 6:
            return _as_it_is(obj, found)
        return found

    def reads_grads(self, tensors: list[torch.Tensor]) -> bool:
        """Whether the functions may read ``.grad`` of a tensor from outside.  Functions that call
        ``.backward()`` start without gradients, as when they are traced, and read their own.
        """
        return (
            "grad" in self.names
            and "backward" not in self.names
            and any(tensor.is_leaf and tensor.grad is not None for tensor in tensors)
        )


@functools.cache
def _forgets_files() -> bool:
    """Whether cloudpickle leaves the file out of what it makes of code, as 3.1.3 does."""
    code = number_of.__code__
    return code.co_filename.encode() not in cloudpickle.dumps(code)


def number_of(data: bytes) -> int:
    """A number of 56 bits that stands for ``data``, the same in all processes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


def pickled(value: Any) -> bytes:
    """Bytes that ``pickle.loads`` on a worker turns into ``value``."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, [])
    try:
        pickler.dump(value)
    except Exception as error:
        if not pickler.definitions:
            raise
        raise TypeError(
            f"the workers need the Python functions of {', '.join(pickler.definitions)}, but they "
            f"cannot be pickled: {error}. {_NO_LOCKS}, or define the operation in a module that "
            "can be imported."
        ) from error
    return buffer.getvalue()


def pickled_function(
    make: Callable[[Any, list[torch.Tensor]], Any], function: Any, what: str, *, here: bool = False
) -> bytes:
    """The pickle of ``make(function, tensors)``, with the tensors that a user's function closes
    over; ``TypeError`` naming ``what`` if there is none.  ``here``: for this process, which knows
    the user's operations.
    """
    operations: list[Any] = []
    with_grads = False
    try:
        while True:
            buffer = io.BytesIO()
            tensors: list[torch.Tensor] = []  # filled while the function, before it, is pickled
            pickler = _Pickler(buffer, tensors, here, with_grads)
            pickler.dump(_Supplied(operations, make(function, tensors)))
            found = mentioned(pickler.names) if pickler.mentions_ops and not here else []
            lacks_grads = not with_grads and pickler.reads_grads(tensors)
            if len(found) == len(operations) and not lacks_grads:
                return buffer.getvalue()
            operations = found  # whose own functions may mention more
            with_grads |= lacks_grads
    except TensorEscaped:
        raise
    except HiddenOperation as hidden:
        raise TypeError(f"compile=False runs {what} on the workers, but {hidden}") from None
    except _NO_PICKLE as error:  # other errors are the caller's: a timeout, raised by a signal
        reason = str(error) or type(error).__name__
        raise TypeError(
            f"compile=False runs {what} on the workers and must send it there, but it cannot be "
            f"pickled: {reason}. {_NO_LOCKS}, or use compile=True, which sends a graph instead."
        ) from error


_NO_PICKLE = (
    *(pickle.PicklingError, TypeError, AttributeError, KeyError),
    *(ValueError, RuntimeError),  # of ctypes, and of torch
)


class _Supplied:
    """A value that a worker unpickles after it has learned some operations."""

    def __init__(self, operations: list[tuple[str, Any]], value: Any) -> None:
        self._operations = operations
        self._value = value

    def __reduce__(self) -> Any:
        return _supplied, (self._operations, self._value)


def _supplied(operations: list[tuple[str, Any]], value: Any) -> Any:
    for name, kind in operations:
        _supply(name, kind)
    return value


def _defined_here(operation: str) -> CustomOpDef:
    return OPDEFS[operation]


def _nothing(operation: str) -> None:
    return None


def _supply(name: str, kind: Any) -> None:
    if kind is not None and not isinstance(kind, CustomOpDef):
        kind.supply(name)


def _overload(name: str, overload: str, kind: Any) -> Any:
    return getattr(_packet(name, kind), overload)


def _packet(name: str, kind: Any) -> Any:
    _supply(name, kind)
    namespace, _, short = name.partition("::")
    try:
        return getattr(getattr(torch.ops, namespace), short)
    except AttributeError:
        raise RuntimeError(
            f"the operation {name} is not known on the devices. If it is in a shared library, load "
            "that with torch.ops.load_library, which the devices then do too."
        ) from None


def _inside(compiled: Any) -> Any:
    """The function that ``torch.compile`` was given."""
    try:
        return getattr(compiled, "_torchdynamo_orig_callable", None)
    except Exception:  # a __getattr__ of the user's that knows no such name
        return None


def _as_it_is(kind: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """What cloudpickle makes of a class that it sends by value, and what it leaves out: bases and
    metaclass of a class that the worker has from before, attributes that are gone, and whether the
    class is a node of pytrees.  The functions of the node may mention the class, so they are set
    afterwards.
    """
    *made, state, _, _, set_state = reduced
    described = type(kind), kind.__bases__, tuple(vars(kind))
    return *made, (set_state, state, described, registration(kind)), None, None, _set_class


def _set_class(kind: type, state: tuple[Any, Any, Any, Any]) -> None:
    set_state, own, (metaclass, bases, names), known = state
    if type(kind) is not metaclass:
        kind.__class__ = metaclass
    if kind.__bases__ != bases:
        kind.__bases__ = bases
    for name in vars(kind).keys() - names - _MADE_WITH_A_CLASS:
        delattr(kind, name)
    set_state(kind, own)
    if known is not None:
        register_again(kind, known)


_MADE_WITH_A_CLASS = frozenset(vars(abc.ABC)) | vars(type("Any", (), {})).keys()


def _with_grad(make: Callable[..., torch.Tensor], args: Any, grad: Any) -> torch.Tensor:
    tensor = make(*args)
    tensor.grad = grad
    return tensor


def _cached(fun: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    found = functools.cached_property(fun)
    if name is not None:
        found.__set_name__(object, name)
    return found


def _memory(view: memoryview) -> tuple[Any, ...]:
    """The arguments of ``_viewed``; pickle itself would turn a memoryview into bytes."""
    data = view.tobytes()
    made = (data if view.readonly else bytearray(data), view.format, view.shape)
    try:
        _viewed(*made)
    except (ValueError, TypeError, NotImplementedError):
        raise TypeError(
            f"a memoryview of format {view.format!r} does not travel; use a tensor or a numpy array"
        ) from None
    return made


def _viewed(data: bytes | bytearray, format: Any, shape: Any) -> memoryview:
    view = memoryview(data)
    return view if not shape or 0 in shape else view.cast(format, shape)


def _bytes(storage: torch.UntypedStorage) -> tuple[bytes, str]:
    """The arguments of ``_filled``."""
    place = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return place.set_(storage).cpu().numpy().tobytes(), str(storage.device)


def _filled(data: bytes, device: str) -> torch.TypedStorage:
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    storage = values.to(device).untyped_storage()
    # torch's function that makes the tensor expects one of this class
    return torch.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)


def _same(value: Any) -> Any:
    return value


# -- graphs ----------------------------------------------------------------------------------------


class _Ref:
    """Stands for a node in the arguments of another."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return _Ref, (self.name,)


def _ref(node: torch.fx.Node) -> _Ref:
    return _Ref(node.name)


def _encoded(module: torch.fx.GraphModule) -> tuple[list[Any], dict[str, Any]]:
    """(nodes, attributes): attributes are constants and the graphs of branches and loop bodies."""
    nodes = []
    attributes = {}
    for node in module.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), _ref)  # type: ignore[arg-type]
        nodes.append((node.op, node.target, args, kwargs, node.name))
        if node.op == "get_attr":
            attributes[node.target] = operator.attrgetter(node.target)(module)
    return nodes, attributes


def _decoded(nodes: list[Any], attributes: dict[str, Any]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    made: dict[str, torch.fx.Node] = {}

    def resolve(value: Any) -> Any:
        if isinstance(value, _Ref):
            return made[value.name]
        if isinstance(value, tuple):
            return tuple([resolve(item) for item in value])
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if isinstance(value, dict):
            return {key: resolve(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(resolve(value.start), resolve(value.stop), resolve(value.step))
        return value

    for op, target, args, kwargs, name in nodes:
        made[name] = graph.create_node(op, target, resolve(args), resolve(kwargs), name)
    return LazyGraphModule(attributes, graph)
