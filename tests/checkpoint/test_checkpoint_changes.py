"""Covers: checkpoint/_files.py, checkpoint/_table.py and checkpoint/_pickles.py, given folders with
any change: they are refused, or what is loaded is what was saved.
"""

import contextlib
import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from _values import DCP_TREE, TREE, loaded, record, replaced_block, same, sign, table_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchpmap as tp
from torchpmap.checkpoint import latest

BYTES = st.one_of(
    st.tuples(st.just("set"), st.floats(0, 1), st.integers(0, 255)),
    st.tuples(st.just("cut"), st.floats(0, 1), st.integers(1, 64)),
    st.tuples(st.just("grow"), st.floats(0, 1), st.integers(1, 64)),
    st.tuples(st.just("end"), st.floats(0, 1), st.just(0)),
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.sampled_from([1, 2, 3, 6, 7, 1.5, "w", "int", "tensor", "float32", "__host_0.distcp"])
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


def changed(data: bytes, change: tuple[str, float, int]) -> bytes:
    kind, at, number = change
    place = min(int(at * len(data)), len(data) - 1)
    match kind:
        case "set":
            return data[:place] + bytes([number]) + data[place + 1 :]
        case "cut":
            return data[:place] + data[place + number :]
        case "grow":
            return data[:place] + data[place : place + number] + data[place:]
    return data[:place]


def spots(body: Any) -> list[tuple[Any, Any]]:
    """Every place in a table that can be changed: a container, and a key or index of it."""
    found = []
    keys = body if isinstance(body, dict) else range(len(body)) if isinstance(body, list) else ()
    for key in keys:
        found += [(body, key), *spots(body[key])]
    return found


@contextlib.contextmanager
def a_copy(folder: Path, root: Path):
    target = Path(shutil.copytree(folder, root / "step_1"))
    try:
        yield target
    finally:
        shutil.rmtree(target)


def outcome(folder: Path) -> Any:
    """What is loaded, or None where the documented errors are raised; ``latest`` raises nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert latest(folder.parent) in (None, folder)
    try:
        return loaded(folder)
    except (tp.CheckpointError, FileNotFoundError):
        return None


ANY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@ANY
@given(file=st.sampled_from(["torchpmap.json", "__host_0.distcp", ".metadata"]), change=BYTES)
def test_any_change_of_bytes(folders, tmp_path, file, change):
    with a_copy(folders["ours"], tmp_path) as folder:
        (folder / file).write_bytes(changed((folder / file).read_bytes(), change))
        found = outcome(folder)
        assert found is None or same(found, TREE)


@ANY
@given(data=st.data())
def test_any_change_of_the_table(folders, tmp_path, data):
    body = copy.deepcopy(table_of(folders["ours"]))
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(spots(body)))
        if data.draw(st.booleans()):
            container[key] = data.draw(JSON)
        else:
            del container[key]
        if not spots(body):
            break
    with a_copy(folders["ours"], tmp_path) as folder:
        sign(folder, body)
        outcome(folder)  # what is whose, and called what, is as the table says


@ANY
@given(key=st.sampled_from(["w", "many.2.0", "array", "step", "many.2.1"]), change=BYTES)
def test_any_change_of_a_block_with_its_checksum(folders, tmp_path, key, change):
    whole = (folders["ours"] / "__host_0.distcp").read_bytes()
    place = record(table_of(folders["ours"]), key)
    block = whole[place["position"] : place["position"] + place["length"]]
    with a_copy(folders["ours"], tmp_path) as folder:
        replaced_block(folder, key, changed(block, change) or b"x")
        found = outcome(folder)
        assert found is None or same_kinds(found, TREE)


def same_kinds(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_kinds(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_kinds, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape
    return type(a) is type(b)


@ANY
@given(file=st.sampled_from([".metadata", "__0_0.distcp"]), change=BYTES)
def test_any_change_of_what_dcp_saved(folders, tmp_path, file, change):
    """DCP keeps no checksums: another value may come out, but nothing else happens."""
    with a_copy(folders["dcp"], tmp_path) as folder:
        (folder / file).write_bytes(changed((folder / file).read_bytes(), change))
        outcome(folder)


def test_what_dcp_saved_is_loaded(folders):
    found = loaded(folders["dcp"])
    assert same(found, {**DCP_TREE, "c": torch.tensor([1 - 2j])})
