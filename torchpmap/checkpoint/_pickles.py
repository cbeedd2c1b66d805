"""Pickles that are read as data: ``.metadata`` of DCP, and files of ``torch.save``.

A pickle is a program for a machine that imports and calls anything.  The machine here knows only
the instructions for containers, numbers and strings.  It finds names only in a vocabulary of
functions of this module, and calls nothing else.  It is built on Python's unpickler in Python: the
one in C would allocate as much memory as a pickle of a few bytes claims to need.

``torch.load(weights_only=True)`` is not used: it unpacks compressed records without a limit, and
accepts all names that any module has registered.
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from torchpmap._base.data import DTYPES


def place_in_file(name: str, position: int, length: int) -> Any:
    """Where DCP's metadata says that a value is."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, position, length)


class Object:
    """An object of a class of DCP: its arguments and its state, as they were written."""

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: Any = None


Name = tuple[str, str]
"""Module and name of an object that a pickle refers to."""

_OPCODES = """
PROTO FRAME STOP MARK POP MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET
NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT
BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT EMPTY_SET
GLOBAL STACK_GLOBAL BINPERSID
"""
_KEYS = (str, int, float, bool, type(None), bytes, Object)


def _unknown(machine: Any) -> None:
    raise pickle.UnpicklingError("it has an instruction that data does not need")


_Unpickler: Any = pickle._Unpickler  # its internals have no annotations


class _Machine(_Unpickler):  # type: ignore[misc]
    """Reads one pickle with the names of one vocabulary."""

    dispatch = dict.fromkeys(range(256), _unknown) | {
        getattr(pickle, name)[0]: _Unpickler.dispatch[getattr(pickle, name)[0]]
        for name in _OPCODES.split()
    }

    def __init__(
        self, data: bytes, vocabulary: Mapping[Name, Any], storage: Callable[[Any], Any]
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._vocabulary = vocabulary
        self._callable = set(map(id, vocabulary.values()))
        self.persistent_load = storage

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._vocabulary[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it wants {module}.{name}, which is no data") from None

    def _call(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if type(arguments) is not tuple or id(function) not in self._callable:
            raise pickle.UnpicklingError("it calls what is no class of data")
        self.stack[-1] = function(*arguments)

    def _build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is not Object:
            raise pickle.UnpicklingError("it changes what is no object of DCP")
        self.stack[-1].state = state

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key], [value])

    def _set_items(self) -> None:
        items = self.pop_mark()
        self._fill(items[::2], items[1::2])

    def _fill(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        if type(self.stack[-1]) not in (dict, OrderedDict):
            raise pickle.UnpicklingError("it fills what is no dict")
        self.stack[-1].update(zip(_hashable(keys), values, strict=True))

    def _add_items(self) -> None:
        items = _hashable(self.pop_mark())
        if type(self.stack[-1]) is not set:
            raise pickle.UnpicklingError("it fills what is no set")
        self.stack[-1].update(items)

    dispatch |= {
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.ADDITEMS[0]: _add_items,
    }


def _hashable(keys: Any) -> Any:
    """Allow only flat keys: the hash of deeply nested tuples would overflow the C stack."""
    for key in keys:
        if type(key) not in _KEYS:
            raise pickle.UnpicklingError(f"it has a {type(key).__name__} as a key")
    return keys


def _set(items: Any) -> set[Any]:
    return set(_hashable(list(items)))


def _size(sizes: Any) -> torch.Size:
    return torch.Size(sizes)


def _ordered_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _bytes(text: str = "", encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it has text in {encoding}")
    return text.encode("latin1")


def _complex(real: float, imaginary: float) -> complex:
    return complex(real, imaginary)


def _device(kind: str, index: int | None = None) -> torch.device:
    return torch.device(kind) if index is None else torch.device(kind, index)


# -- what torch.save writes ------------------------------------------------------------------------

_PLAIN: dict[Name, Any] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("_codecs", "encode"): _bytes,
    ("__builtin__", "bytes"): _bytes,
    ("__builtin__", "complex"): _complex,
    ("__builtin__", "set"): _set,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}
_BYTES = torch.uint8
_STORAGES = {
    ("torch.storage", "UntypedStorage"): _BYTES,
    **{
        ("torch", name): dtype
        for dtype, name in torch.storage._dtype_to_storage_type_map().items()
        if not name.startswith("Q")
    },
}


class _Archive:
    """The zip file in which ``torch.save`` puts one value."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        file: Any = data  # it has the methods of a file that ZipFile calls
        infos = zipfile.ZipFile(file).infolist()
        self._infos = {info.filename: info for info in infos}
        if len(infos) != len(self._infos):
            raise ValueError("two records have one name")
        roots = [
            name for name in self._infos if name.count("/") == 1 and name.endswith("/data.pkl")
        ]
        (root,) = roots
        self._root = root.removesuffix("data.pkl")
        order = self._root + "byteorder"
        if order in self._infos and self.record(order) != sys.byteorder.encode():
            raise ValueError(f"its bytes are in the order {self.record(order)!r:.20}")

    def record(self, name: str) -> bytes:
        start, size = self._extent(name)
        return self._data[start : start + size]

    def _extent(self, name: str) -> tuple[int, int]:
        """Where a record begins, and its length."""
        info = self._infos[name]
        # torch compresses nothing; a compressed record may unpack to any size
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError(f"the record {name!r:.50} is compressed")
        lengths = self._data[info.header_offset + 26 : info.header_offset + 30]
        start = info.header_offset + 30 + sum(struct.unpack("<HH", lengths))
        if info.header_offset < 0 or start + info.file_size > len(self._data):
            raise ValueError(f"the record {name!r:.50} is not in the file")
        return start, info.file_size

    def value(self) -> Any:
        pickled = self.record(self._root + "data.pkl")
        return _Machine(pickled, _PLAIN | _STORAGES | _TENSORS, self._storage).load()

    def _storage(self, pid: Any) -> torch.Tensor:
        """The elements that a tensor is made from, by the persistent id of ``torch.save``."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or not any(dtype is known for known in _STORAGES.values()):
            raise pickle.UnpicklingError("it refers to what is no tensor")
        start, size = self._extent(f"{self._root}data/{key}")
        if size != count * dtype.itemsize:
            raise ValueError(f"{count} elements in {size} bytes")
        if not size:
            return torch.empty(0, dtype=dtype, device="cpu")
        elements = torch.frombuffer(self._data, dtype=torch.uint8, offset=start, count=size)
        # torch.save aligns them, but other programs may not
        return (elements if start % 64 == 0 else elements.clone()).view(dtype)


def _tensor(
    elements: torch.Tensor,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    metadata: Any = None,
) -> torch.Tensor:
    numbers = (offset, *size, *stride)
    if type(elements) is not torch.Tensor or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("a tensor without a valid shape")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if prod(size) and last >= elements.numel():
        raise ValueError("a tensor that is larger than its data")
    tensor = elements.as_strided(size, stride, offset) if prod(size) else elements.new_empty(size)
    marks = metadata or {}
    if not marks.keys() <= {"conj", "neg"}:
        raise ValueError("a tensor with an unknown flag")
    tensor = tensor.conj() if marks.get("conj") else tensor
    return torch._neg_view(tensor) if marks.get("neg") else tensor


def _tensor_of(
    elements: torch.Tensor,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    dtype: torch.dtype,
    metadata: Any = None,
) -> torch.Tensor:
    return _tensor(elements.view(dtype), offset, size, stride, requires_grad, hooks, metadata)


def _parameter(data: torch.Tensor, requires_grad: bool, hooks: Any) -> torch.Tensor:
    return data


_TENSORS: dict[Name, Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}


def value_of(data: mmap.mmap) -> Any:
    """The value that ``torch.save`` wrote; tensors are views of ``data``.

    Raises:
        Exception: of any kind, if ``data`` is anything else.
    """
    return _Archive(data).value()


# -- .metadata -------------------------------------------------------------------------------------


def _kind(name: str) -> Callable[..., Object]:
    return lambda *arguments: Object(name, arguments)


_DCP = "torch.distributed.checkpoint."
_METADATA: dict[Name, Any] = {
    **_PLAIN,
    ("torch.serialization", "_get_layout"): _kind("layout"),
    **{
        (module, name): _kind("path")
        for module in ("pathlib", "pathlib._local")  # the second in files of Python 3.13
        for name in ("PosixPath", "WindowsPath")
    },
    (_DCP + "filesystem", "_StorageInfo"): _kind("_StorageInfo"),
    **{
        (_DCP + "metadata", name): _kind(name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
}


def metadata_of(data: bytes) -> Any:
    """The content of a file ``.metadata``.

    Raises:
        Exception: of any kind, if ``data`` is anything else.
    """
    return _Machine(data, _METADATA, _unknown).load()
