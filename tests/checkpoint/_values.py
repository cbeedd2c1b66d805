"""What the tests of checkpoints save, how they look at what is on disk, and how they change it."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchpmap as tp
from torchpmap.checkpoint import load
from torchpmap.checkpoint._table import _digest

HOST = "host.safetensors"
WHOLE = torch.arange(32.0).reshape(8, 4)
TREE = {
    "w": torch.arange(6.0).reshape(2, 3),
    "many": [torch.ones(1), torch.zeros(0, 2), (torch.tensor(True), "text", 2.5, None)],
    "half": torch.ones(3, dtype=torch.bfloat16),
    "array": torch.arange(3).numpy(),
    "step": 7,
}
HOST_LEAVES = {
    "float": torch.tensor([1.5, -2.0]),
    "bfloat16": torch.arange(3, dtype=torch.bfloat16),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "complex64": torch.tensor([1 + 2j]),
    "complex128": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128),
    "bool": torch.tensor([True, False]),
    "int": torch.tensor([2**62]),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 3),
    "strided": torch.arange(12.0).reshape(3, 4).t()[1:, ::2],
    "numpy": np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1],
    "numpy_scalar": np.float32(2.5),
}


def mesh() -> tp.Mesh:
    return tp.make_mesh((2, 2), ("x", "y"), devices=tp.devices())


def put(value: torch.Tensor, *spec) -> tp.ShardedTensor:
    return tp.device_put(value, tp.NamedSharding(mesh(), tp.P(*spec)))


def rows(value: torch.Tensor) -> tp.ShardedTensor:
    return tp.device_put(value, tp.devices())


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal, in types and dtypes too."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        wide = (x.float() if x.dtype == torch.float8_e4m3fn else x for x in (a, b))
        return a.dtype == b.dtype and torch.equal(*wide)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)


def table_of(folder: Path) -> Any:
    return json.loads((folder / "torchpmap.json").read_text())["checkpoint"]


def sign(folder: Path, body: Any) -> None:
    """Write a table as if torchpmap had written it."""
    text = json.dumps({"digest": _digest(body), "checkpoint": body})
    (folder / "torchpmap.json").write_text(text)


def loaded(folder: Path) -> Any:
    with tp.debug.fake_pmap():
        return load(folder)


def leaf(body: Any, key: str = "w") -> Any:
    """What a table says of an array at the top of its tree."""
    return dict(body["tree"]["dict"])[key]["aside"]


def header_of(file: Path) -> Any:
    data = file.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_header(folder: Path, header: Any, length: int | None = None) -> None:
    """Give the file another header, with its checksum."""
    file, body = folder / HOST, table_of(folder)
    data = file.read_bytes()
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    blocks = data[8 + int.from_bytes(data[:8], "little") :]
    length = len(text) if length is None else length
    file.write_bytes(length.to_bytes(8, "little") + text + blocks)
    body["files"][HOST] = {"bytes": file.stat().st_size, "header": zlib.crc32(text)}
    sign(folder, body)
