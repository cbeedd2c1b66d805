"""A recorded call on disk: one file in the format of safetensors, of which the block ``call`` is
JSON, the last one a digest of all bytes before it, and every other block a tensor.
"""

from __future__ import annotations

import glob
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import torch
from torch.fx import GraphModule

from torchpmap._base.data import json_of_file
from torchpmap._base.fingerprint import DIGEST_BYTES, digest
from torchpmap._trace.graphs import met, placeholders
from torchpmap.checkpoint._blocks import (
    PIECE_BYTES,
    Files,
    read_bytes,
    read_header,
    sizes_of,
    write,
)
from torchpmap.debug._graph_data import NotData, Tensors, decoded, decoded_graph, encoded

_FORMAT = 1
_CALL, _DIGEST = "call", "digest"

Blocks = list[dict[int, torch.Tensor]]
"""Of the inputs of a graph, by rank; some may be missing."""
Lost = dict[str, str]
"""Why blocks are missing: ``"input 2 on rank 1"`` -> the error."""


@dataclass
class Facts:
    """What is known of a call besides its graph and its values."""

    call: str
    """As messages name it."""
    number: int
    """Of the calls that were recorded on its devices, counted from 1."""
    ranks: list[int]
    """Of its devices, in axis order."""
    backend: str
    device: str
    """What kind of device: ``"cpu"``."""
    num_threads: int
    """That each device used for an operation."""
    versions: dict[str, str]
    groups: dict[str, list[list[int]]]
    """The process groups that it uses."""
    uses_index: bool
    """Whether the first input of the graph is the place among the ranks."""
    outputs: list[dict[str, Any]]
    """Of each output that the caller gets: its ``name`` and ``shape``, and which ``ranks`` have
    which ``slices`` of it.
    """
    settings: dict[str, Any] = field(default_factory=dict)
    """Of torch, with which it was traced."""
    error: str = ""
    """Of the exception for which the file was written."""
    attempt: str = ""
    """Of the job whose process wrote it."""


@dataclass
class Recorded:
    """A call as it is in a file, or in the files of several processes."""

    facts: Facts
    graph: GraphModule
    inputs: Blocks
    lost: Lost


def save(
    path: Path, facts: Facts, graph: Any, tensors: Tensors, inputs: Blocks, lost: Lost
) -> None:
    """Write a file; ``tensors``: the constants of the graph."""
    tensors = dict(tensors)
    places: list[dict[str, str]] = []
    for each in inputs:
        keys = {}
        for rank, block in each.items():  # those of a replicated value are equal
            keys[str(rank)] = key = f"block {digest(block).hex()}"
            tensors[key] = block
        places.append(keys)
    kinds = {key: [encoded(x.dtype), list(x.shape)] for key, x in tensors.items()}
    told = {"format": _FORMAT, "facts": asdict(facts), "graph": graph, "kinds": kinds}
    data = json.dumps(told | {"inputs": places, "lost": lost}).encode()
    blocks = tensors | {_CALL: torch.frombuffer(bytearray(data), dtype=torch.uint8)}
    blocks[_DIGEST] = torch.frombuffer(bytearray(DIGEST_BYTES), dtype=torch.uint8)
    path.unlink(missing_ok=True)  # of an earlier run of the script
    write(path, {key: (0,) * x.dim() for key, x in blocks.items()}, blocks)
    with path.open("r+b") as file:  # bytes come last, and of these the last key
        made = _digest_of(file)
        file.write(made)


def _digest_of(file: IO[bytes]) -> bytes:
    """The digest of all bytes before it; leaves the file at its place."""
    end = file.seek(0, os.SEEK_END) - DIGEST_BYTES
    file.seek(0)
    sizes = [min(PIECE_BYTES, end - start) for start in range(0, end, PIECE_BYTES)]
    return digest([digest(file.read(size)) for size in sizes])


def load(path: str | os.PathLike[str]) -> Recorded:
    """Read a call; the parts that other processes wrote must be beside it.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no such file, is damaged, or has an operation that is not known here.
    """
    path = Path(path)
    parts = _siblings(path)
    found = [_load_one(part) for part in parts]
    whole = found[0]
    for other in found[1:]:
        mine, theirs = whole.facts, other.facts
        if (mine.call, mine.ranks, mine.attempt) != (theirs.call, theirs.ranks, theirs.attempt):
            raise ValueError(
                f"replay: the parts of {path} are of different calls. Put the files of one run in "
                "a folder of their own."
            )
        for blocks, others in zip(whole.inputs, other.inputs, strict=True):
            blocks |= others
        whole.lost |= other.lost
    return whole


def part_name(stem: str, rank: int | None) -> str:
    """Of a file; ``rank``: of the process that wrote it, if it is one of several."""
    return f"{stem}.safetensors" if rank is None else f"{stem}.rank{rank}.safetensors"


def _siblings(path: Path) -> list[Path]:
    if not path.is_file():
        raise FileNotFoundError(f"replay: there is no file {path}")
    stem, dot, rank = path.stem.rpartition(".rank")
    if not (dot and rank.isdecimal()):
        return [path]
    return [path, *sorted({*path.parent.glob(f"{glob.escape(stem)}.rank*.safetensors")} - {path})]


def _load_one(path: Path) -> Recorded:
    try:
        with Files(path.parent) as files:
            file = files.open(path.name)
            if _digest_of(file) != file.read():
                raise NotData("it has changed, or another version wrote it (the digest differs)")
            file.seek(0)
            entries = read_header(files, path.name, path.stat().st_size, None)
            told = json_of_file(bytes(read_bytes(files, path.name, entries[_CALL]).tolist()))
            if told["format"] != _FORMAT:
                raise NotData(f"it has the format {told['format']!r:.30}")
            tensors = {}
            for key, (dtype, shape) in told["kinds"].items():
                data = read_bytes(files, path.name, entries[key])
                tensors[key] = data.view(decoded(dtype)).view(shape)
        graph = decoded_graph(told["graph"], tensors)
        inputs = [
            {int(rank): tensors[key] for rank, key in each.items()} for each in told["inputs"]
        ]
        found = Recorded(Facts(**told["facts"]), graph, inputs, told["lost"])
        _check(found)
        return found
    except FileNotFoundError:
        raise
    except Exception as error:  # a broken file may raise anything
        raise ValueError(
            f"replay: {path} is no file of torchpmap.debug.record, or it is damaged: {error}"
        ) from error


_TYPES = {"str": str, "int": int, "bool": bool, "list": list, "dict": dict}
_MAX_THREADS = 1024


def _check(found: Recorded) -> None:
    """Raise if the parts of a file are not those of one call."""
    facts = found.facts
    for each in fields(facts):
        value = getattr(facts, each.name)
        if type(value) is not _TYPES[str(each.type).partition("[")[0]]:
            raise NotData(f"{each.name} is {value!r:.100}")
    groups = [[rank for part in each for rank in part] for each in facts.groups.values()]
    ranks = [facts.ranks, *groups, *(each["ranks"] for each in facts.outputs)]
    fits = (
        facts.ranks
        and all(len({*each}) == len(each) and {*each} <= {*facts.ranks} for each in ranks)
        and 1 <= facts.num_threads <= _MAX_THREADS
        and all(type(each) is str for each in (facts.versions["torch"], *facts.versions.values()))
        and all(type(each["name"]) is str for each in facts.outputs)
        and all(sizes_of(each["shape"]) is not None for each in facts.outputs)
        and all(len(each["slices"]) == len(each["ranks"]) for each in facts.outputs)
        and len(placeholders(found.graph.graph)) == len(found.inputs) + facts.uses_index
        and {each.group for each in met(found.graph.graph)} <= facts.groups.keys()
        and type(found.lost) is dict
    )
    if not fits:
        raise NotData("its parts do not fit together")
