"""Covers: checkpoint/_folder.py, checkpoint/_table.py and checkpoint/_blocks.py, given folders with
any change: they are refused, or what is loaded is what was saved.
"""

import contextlib
import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

from _values import HOST, TREE, header_of, loaded, same, sign, table_of, with_header
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
    | st.sampled_from([1, 2, 3, 6, 7, 1.5, "w", "int", "tensor", "float32", "F32", HOST])
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
    """What is loaded, or None where the documented errors are raised; ``latest`` raises only for
    another version.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert latest(folder.parent) in (None, folder)
        except tp.CheckpointError as error:
            assert "Use the one that" in str(error) or "torchpmap 0.1" in str(error)  # noqa: PT017
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
@given(file=st.sampled_from(["torchpmap.json", HOST]), change=BYTES)
def test_any_change_of_bytes(given_folder, tmp_path, file, change):
    with a_copy(given_folder, tmp_path) as folder:
        (folder / file).write_bytes(changed((folder / file).read_bytes(), change))
        found = outcome(folder)
        assert found is None or same(found, TREE)


@ANY
@given(data=st.data(), is_table=st.booleans())
def test_any_change_of_what_is_said(given_folder, tmp_path, data, is_table):
    """With right checksums, what is whose, and called what, is as table and header say."""
    body = copy.deepcopy(table_of(given_folder) if is_table else header_of(given_folder / HOST))
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(spots(body)))
        if data.draw(st.booleans()):
            container[key] = data.draw(JSON)
        else:
            del container[key]
        if not spots(body):
            break
    with a_copy(given_folder, tmp_path) as folder:
        (sign if is_table else with_header)(folder, body)
        outcome(folder)
