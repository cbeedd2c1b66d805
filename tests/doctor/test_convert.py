"""Covers: python -m torchpmap convert."""

import io
import json
import re
import zlib

import numpy as np
import pytest
import torch

from torchpmap.__main__ import main
from torchpmap.checkpoint import load
from torchpmap.checkpoint._table import _digest

WHOLE = torch.arange(24.0).reshape(4, 6)
VALUES = {"step": 7, "name": "x", "raw": b"ab", "none": None, "yes": True, "c": 1 + 2j}


class Code:
    def __reduce__(self):
        return (print, ("code of the file runs",))


class Old:
    """A checkpoint as torchpmap 0.1 wrote it: blocks by ``torch.save``, one behind the other."""

    def __init__(self, folder):
        self.folder, self.leaves = folder, {}
        folder.mkdir()
        self.data = bytearray()

    def add(self, key, blocks, kind="tensor", dtype="", shape=()):
        records = []
        for offsets, block in blocks:
            file = io.BytesIO()
            torch.save(block, file)
            data = file.getvalue()
            sizes = list(block.shape) if dtype else []
            place = {"file": "__0_0.distcp", "position": len(self.data), "length": len(data)}
            records.append({"offsets": offsets, "sizes": sizes, **place, "crc": zlib.crc32(data)})
            self.data += data
        row = {"kind": kind, "dtype": dtype, "shape": list(shape), "records": records}
        self.leaves[key] = row

    def write(self, tree, version=1):
        (self.folder / "__0_0.distcp").write_bytes(self.data)
        files = {"__0_0.distcp": len(self.data)}
        body = {"version": version, "tree": tree, "leaves": self.leaves, "files": files}
        stored = {"digest": _digest(body), "checkpoint": body}
        (self.folder / "torchpmap.json").write_text(json.dumps(stored))


@pytest.fixture
def old(tmp_path):
    return Old(tmp_path / "old")


def convert(old, *, new="new"):
    return main(["convert", str(old.folder), str(old.folder.with_name(new))])


def test_an_old_checkpoint_becomes_one_of_today(old, tmp_path):
    corners = [[k, n] for k in (0, 2) for n in (0, 3)]
    blocks = [(corner, WHOLE[corner[0] :, corner[1] :][:2, :3].clone()) for corner in corners]
    old.add("w", blocks, dtype="float32", shape=(4, 6))
    old.add("t", [([0, 0], WHOLE.t())], dtype="float32", shape=(6, 4))
    old.add("few.0", [([0], torch.ones(2).bfloat16())], dtype="bfloat16", shape=(2,))
    old.add("few.1.0", [([], torch.tensor(2.5).double())], "numpy scalar", "float64")
    old.add("5", [([0], torch.arange(3))], "ndarray", "int64", (3,))
    for key, value in VALUES.items():
        old.add(key, [([], value)], type(value).__name__)
    few = {"list": [[0, "few.0"], [1, {"tuple": [[0, "few.1.0"]]}]]}
    fields = {"fields": [[name, name] for name in VALUES]}
    parts = [["w", "w"], ["t", "t"], ["few", few], [5, "5"], ["values", fields]]
    old.write({"dict": parts})
    assert convert(old) == 0
    tree = load(tmp_path / "new")
    assert torch.equal(tree["w"], WHOLE)
    assert torch.equal(tree["t"], WHOLE.t())
    half, (scalar,) = tree["few"]
    assert torch.equal(half, torch.ones(2).bfloat16())
    assert (type(scalar), scalar) == (np.float64, 2.5)
    assert (type(tree[5]), tree[5].tolist()) == (np.ndarray, [0, 1, 2])
    assert tree["values"] == VALUES


def gap(old):
    old.leaves["w"]["shape"] = [3]


def outside(old):
    old.leaves["w"]["records"][0]["offsets"] = [1]


def twice(old):
    old.leaves["w"]["records"] *= 2


def other_dtype(old):
    old.leaves["w"]["dtype"] = "int32"


def no_kind(old):
    old.add("w", [([], [1])], "int")


def code(old):
    old.add("w", [([], Code())], "int")


def changed(old):
    old.data = old.data.replace(b"archive", b"brchive", 1)


def short(old):
    del old.data[-1:]


def nothing(old):
    """It is the tree or the version that is wrong."""


AGAIN = {"dict": [["w", "w"], ["w", "w"]]}


@pytest.mark.parametrize(
    ("harm", "tree", "version", "message"),
    [
        (gap, "w", 1, "a part is in no block"),
        (outside, "w", 1, "a block of .* is another"),
        (twice, "w", 1, "two blocks overlap"),
        (other_dtype, "w", 1, "a block of .* is another"),
        (no_kind, "w", 1, "TypeError: 'int' is a list"),
        (code, "w", 1, "UnpicklingError"),
        (changed, "w", 1, "bytes 0 to [0-9]+ of __0_0.distcp have changed"),
        (short, "w", 1, "bytes 0 to [0-9]+ of __0_0.distcp have changed"),
        (nothing, "no row", 1, "is not what torchpmap 0.1 has written .KeyError"),
        (nothing, {"bag": [["w", "w"]]}, 1, "is no part of a tree"),
        (nothing, AGAIN, 1, "is no part of a tree"),
        (nothing, "w", 3, "is not of torchpmap 0.1"),
    ],
)
def test_what_cannot_be_converted(harm, tree, version, message, old, tmp_path, capsys):
    old.add("w", [([0], torch.ones(2))], dtype="float32", shape=(2,))
    harm(old)
    old.write(tree, version)
    assert convert(old) == 1
    said = capsys.readouterr()
    assert not said.out
    assert re.search(message, said.err), said.err
    assert not (tmp_path / "new").exists()


def test_where_it_is_and_where_it_goes(old, tmp_path, capsys):
    old.add("step", [([], 7)], "int")
    old.write("step")
    old.folder = old.folder.rename(tmp_path / ".old.replaced")  # as a killed save leaves it
    old.folder = tmp_path / "old"
    assert convert(old) == 0
    assert load(tmp_path / "new") == 7
    assert convert(old) == 1
    assert "new exists. Give the name of a new folder." in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "other")]) == 1
    assert "there is no checkpoint at" in capsys.readouterr().err
