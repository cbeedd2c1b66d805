"""Covers: checkpoint/_folder.py, checkpoint/_table.py and checkpoint/_blocks.py, given folders that
another user has made: nothing outside of them is opened, nothing waits, no memory is allocated that
the files do not have, and no other value is loaded.
"""

import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from _values import HOST, TREE, header_of, leaf, loaded, same, sign, table_of, with_header

import torchpmap as tp
from torchpmap._base.data import packed
from torchpmap.checkpoint import latest, save
from torchpmap.checkpoint._peers import Pipes


@pytest.fixture
def ours(given_folder, tmp_path):
    return Path(shutil.copytree(given_folder, tmp_path / "step_1"))


def refused(folder: Path, match: str = "") -> None:
    with pytest.raises(tp.CheckpointError, match=match):
        loaded(folder)


def passed_over(folder: Path, match: str = "") -> None:
    """The checkpoint is neither loaded nor found."""
    refused(folder, match)
    with pytest.warns(UserWarning, match="passes over step_1"):
        assert latest(folder.parent) is None


# -- tables ----------------------------------------------------------------------------------------


def put(where, name: Any, value: Any):
    return lambda body: where(body).__setitem__(name, value)


def drop(where, name: str):
    return lambda body: where(body).pop(name)


def cut(shape: Any, cuts: Any, *files: str):
    """Another layout of ``w``, in the files."""

    def change(body: Any) -> None:
        _, checksums = leaf(body)["blocks"][0]
        leaf(body).update(shape=shape, cuts=cuts, blocks=[[file, checksums] for file in files])

    return change


TOP = lambda body: body  # noqa: E731
PARTS = lambda body: body["tree"]["dict"]  # noqa: E731


def step(value: Any):
    return lambda body: next(part for part in PARTS(body) if part[0] == "step").__setitem__(
        1, value
    )


class WithCode(namedtuple("WithCode", "x")):
    """A class of the program, as platform.uname_result, which starts a process."""

    def __iter__(self):
        raise AssertionError("code that a file has named was run")

    def __hash__(self):
        return next(iter(self))


CODE = {"namedtuple": [WithCode.__module__, "WithCode", [1]]}
TABLES = {
    "no tree": (drop(TOP, "tree"), "'tree'"),
    "no leaf": (lambda b: PARTS(b)[0].__setitem__(1, {"aside": [1]}), "TypeError"),
    "no files": (drop(TOP, "files"), "'files'"),
    "unknown dtype": (put(leaf, "dtype", "load"), "KeyError: 'load'"),
    "quantized": (put(leaf, "dtype", "quint8"), "KeyError: 'quint8'"),
    "another dtype": (put(leaf, "dtype", "int32"), r"as \('F32', .* but \('I32', .* is expected"),
    "wide dtype": (put(leaf, "dtype", "complex128"), r"\('U8', \(2, 3, 16\)\) .* is expected"),
    "another kind": (put(leaf, "kind", "int"), "'int' is no kind of arrays"),
    "value of no kind": (step({"os": "system"}), "KeyError: 'os'"),
    "value of a foreign kind": (step({"dtype": "float32"}), "torch.float32 is no value"),
    "named tuple": (step(CODE), "a file has no named tuples"),
    "set of named tuples": (step({"set": [CODE]}), "a file has no named tuples"),
    "numpy has no bfloat16": (put(lambda b: leaf(b, "half"), "kind", "ndarray"), "ScalarType BFl"),
    "scalar of numpy": (put(leaf, "kind", "numpy scalar"), r"a scalar of shape \(2, 3\)"),
    "huge shape": (put(leaf, "shape", [10**13, 3]), r"\(10000000000000, 3\)\) .* is expected"),
    "negative shape": (put(leaf, "shape", [-2, -3]), "is no list of sizes"),
    "shape of floats": (put(leaf, "shape", [2.0, 3.0]), "is no list of sizes"),
    "shape of bools": (put(leaf, "shape", [True, 6]), "is no list of sizes"),
    "astronomic shape": (put(leaf, "shape", [2**70]), "no tensor has the sizes"),
    "empty but astronomic": (put(leaf, "shape", [0, 2**40, 2**40]), "no tensor has the sizes"),
    "too many dims": (put(leaf, "shape", [1] * 65), "no tensor has the sizes"),
    "other shape": (put(leaf, "shape", [3, 2]), r"\(3, 2\)\) .* is expected"),
    "more dims": (put(leaf, "shape", [2, 3, 1]), "argument 2 is shorter"),
    "cuts of zero": (put(leaf, "cuts", [0, 1]), "is cut into"),
    "no blocks": (cut([2, 3], [0, 1]), r"is cut into \(0, 1\), but is in the files \[\]"),
    "cuts without files": (put(leaf, "cuts", [2, 1]), r"is cut into \(2, 1\), but is in the files"),
    "the same block twice": (cut([4, 3], [2, 1], HOST, HOST), "but is in the files"),
    "cuts that do not divide": (cut([3, 3], [2, 1], HOST, "x"), r"shape \(3, 3\) is cut into"),
    "unknown file": (cut([2, 3], [1, 1], "rank_0.safetensors"), "KeyError: 'rank_0.safetensors'"),
    "file of no text": (cut([2, 3], [1, 1], []), "unhashable"),
    "block of another leaf": (
        lambda b: PARTS(b).append(["x", {"aside": leaf(b)}]), "KeyError: 'x'"),
    "no checksum": (put(lambda b: leaf(b)["blocks"][0], 1, []), "with 1 checksums is expected"),
    "checksums of no list": (put(lambda b: leaf(b)["blocks"][0], 1, {"0": 0}), "is expected"),
    "tree of no kind": (put(TOP, "tree", {"x": []}), "KeyError: 'x'"),
    "tree with a key of no name": (lambda b: PARTS(b).append([None, 1]), "has the key None"),
    "tree with one name twice": (
        lambda b: PARTS(b).append(["many.0", 1]), "would both be saved as 'many.0'"),
    "tree with one label": (put(lambda b: PARTS(b)[1], 0, "w"), "a dict has something twice"),
    "size of a file": (put(lambda b: b["files"][HOST], "bytes", "1"), "but '1' were written"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables(ours, name):
    change, match = TABLES[name]
    body = table_of(ours)
    change(body)
    sign(ours, body)
    passed_over(ours, f"(?s){match}.*Load an earlier checkpoint")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"digest": "", "checkpoint": {}}',
        b'{"digest": "", "checkpoint": ' + b"9" * 5000 + b"}",
        b'{"digest": 1, "checkpoint": [1]}',
    ],
)
def test_texts_that_are_no_table(ours, text):
    (ours / "torchpmap.json").write_bytes(text)
    passed_over(ours, "torchpmap.json'? (is not what was written|has changed since)")


def test_a_table_too_large_to_read(ours):
    os.truncate(ours / "torchpmap.json", 2**40)  # takes no room on the disk
    refused(ours, "torchpmap.json has more than 268435456 bytes")


# -- files -----------------------------------------------------------------------------------------

NAMES = ["../step_2/x", "/etc/passwd", "..", ".", "", "a\0b", "a\nb", "sub/x", "\udc80", "x" * 300]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_elsewhere(ours, name):
    (ours / "sub").mkdir()
    (ours / "sub" / "x").write_bytes((ours / HOST).read_bytes())
    body = table_of(ours)
    body["files"] = {name: body["files"][HOST]}
    sign(ours, body)
    passed_over(ours, r"the file '.*'? is missing|is no regular file|cannot be read")


def instead(make: Any) -> Any:
    """What is made in the place of a file."""
    return lambda file: (file.unlink(), make(file))


OTHER_FILES = {
    "link": lambda file: file.symlink_to(file.rename(file.parent.parent / "elsewhere")),
    "pipe": instead(os.mkfifo),
    "directory": instead(Path.mkdir),
    "device": instead(lambda file: file.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("replace", OTHER_FILES.values(), ids=OTHER_FILES)
@pytest.mark.parametrize("file", ["torchpmap.json", HOST])
def test_what_is_no_regular_file(ours, file, replace):
    replace(ours / file)
    passed_over(ours, f"{file} (is no regular file|cannot be read: it is a symbolic link)")


def test_only_the_user_can_read_it(ours, tmp_path):
    before = os.umask(0)
    try:
        with tp.debug.fake_pmap():
            save(tmp_path / "c", TREE)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "c").iterdir()}
    assert set(modes.values()) == {0o600}, modes
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700


def test_a_link_to_a_checkpoint_is_replaced_and_not_followed(ours, tmp_path):
    (tmp_path / "last").symlink_to(ours)
    with tp.debug.fake_pmap():
        save(tmp_path / "last", {"step": 8})
    assert loaded(tmp_path / "last") == {"step": 8}
    assert same(loaded(ours), TREE)


def test_a_link_to_nothing_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "last").symlink_to("nowhere")
    with tp.debug.fake_pmap(), pytest.raises(FileExistsError, match="exists and is no checkpoint"):
        save(tmp_path / "last", {"step": 8})
    assert os.listdir(tmp_path) == ["last"]


# -- files of blocks -------------------------------------------------------------------------------


W = lambda header: header["w"]  # noqa: E731
OFFSETS = lambda header: header["w"]["data_offsets"]  # noqa: E731
HEADERS = {
    "outside of the file": (put(OFFSETS, 1, 10**9), "'w' is .*, but lies from"),
    "before the file": (put(OFFSETS, 0, -100), "'w' is .*, but lies from"),
    "backwards": (lambda header: OFFSETS(header).reverse(), "'w' is .*, but lies from"),
    "one place for two": (
        lambda header: header["w"].update(data_offsets=header["many.0"]["data_offsets"]),
        "is .*, but lies from"),
    "a gap": (lambda header: header.pop("w"), "is .*, but lies from|its blocks end at byte"),
    "wrong size": (put(W, "shape", [2, 4]), "'w' is .*, but lies from"),
    "wide elements": (put(W, "dtype", "F64"), "'w' is .*, but lies from"),
    "unknown dtype": (put(W, "dtype", "F4"), "KeyError: 'F4'"),
    "shape of floats": (put(W, "shape", [2.0, 3]), "is no list of sizes"),
    "offsets of floats": (
        lambda header: OFFSETS(header).__setitem__(0, OFFSETS(header)[0] + 0.5), "but lies from"),
    "offsets of no numbers": (put(W, "data_offsets", "0"), "TypeError"),
    "another name": (lambda header: header.update(v=header.pop("w")), "KeyError: 'w'"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_headers(ours, name):
    change, match = HEADERS[name]
    header = header_of(ours / HOST)
    change(header)
    with_header(ours, header)
    passed_over(ours, f"(?s)({match}).*Load an earlier checkpoint")


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b"{" * 9])
def test_headers_that_are_none(ours, text):
    with_header(ours, text)
    passed_over(ours, "'host.safetensors' is not what was written")


@pytest.mark.parametrize("length", [2**64 - 1, 10**8 + 1, 10**5])
def test_huge_headers(ours, length):
    with_header(ours, header_of(ours / HOST), length)
    passed_over(ours, f"host.safetensors has a header of {length} bytes")


def test_a_file_without_room_for_a_header(ours):
    (ours / HOST).write_bytes(b"\0" * 4)
    body = table_of(ours)
    body["files"][HOST]["bytes"] = 4
    sign(ours, body)
    passed_over(ours, "host.safetensors has a header of 0 bytes")


def test_wrong_checksums(ours):
    body = table_of(ours)
    leaf(body)["blocks"][0][1] = ["1"]
    sign(ours, body)
    refused(ours, "of host.safetensors have changed since they were written")
    assert latest(ours.parent) == ours  # what is in a block is found when it is read


# -- the pipes of workers --------------------------------------------------------------------------


@pytest.fixture
def pipes():
    with Pipes() as opened:
        opened.open([3])
        yield opened


def test_pipes_are_in_a_folder_of_the_user_alone(pipes):
    path = Path(f"{pipes.path}3")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.stat().st_uid == os.geteuid()
    pipes.close()
    assert not path.exists()


@pytest.mark.parametrize("sent", [b"", b'{"dict":', b"\x80\x04cos\nsystem\n.", packed({3: 4})[:-1]])
def test_a_writer_that_ends_before_it_has_answered(pipes, sent):
    with open(f"{pipes.path}3", "wb") as end:
        end.write(sent)
    assert pipes.answers() == {3: "the worker that writes rank_3.safetensors has ended"}


def test_a_writer_that_is_stopped(pipes):
    tp.config.timeout = 0.05
    try:
        with open(f"{pipes.path}3", "wb", buffering=0) as end:
            end.write(b"{")
            (what,) = pipes.answers().values()
    finally:
        tp.config.reset()
    assert what == (
        "the worker that writes rank_3.safetensors was not done within torchpmap.config.timeout "
        "(0.05 s)"
    )
