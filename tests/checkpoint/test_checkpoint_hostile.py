"""Covers: checkpoint/_files.py, checkpoint/_table.py and checkpoint/_pickles.py, given folders that
another user has made: nothing of them runs, opens what is outside, waits, or is loaded as another
value.
"""

import io
import mmap
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from _values import TREE, Runs, leaf, loaded, record, replaced_block, same, sign, table_of

import torchpmap as tp
from torchpmap._base.data import packed
from torchpmap.checkpoint import latest, save
from torchpmap.checkpoint._pickles import metadata_of, value_of
from torchpmap.checkpoint._table import BlockRecord, Row, Table, _are_apart
from torchpmap.checkpoint._workers import WriterConnections, _called


@pytest.fixture
def ours(folders, tmp_path):
    return Path(shutil.copytree(folders["ours"], tmp_path / "step_1"))


@pytest.fixture
def by_dcp(folders, tmp_path):
    return Path(shutil.copytree(folders["dcp"], tmp_path / "step_1"))


def refused(folder: Path, match: str = "") -> None:
    with pytest.raises(tp.CheckpointError, match=match):
        loaded(folder)


def passed_over(folder: Path, match: str = "") -> None:
    """The checkpoint is neither loaded nor found."""
    refused(folder, match)
    with pytest.warns(UserWarning, match="passes over step_1"):
        assert latest(folder.parent) is None


# -- tables ----------------------------------------------------------------------------------------


def put(where, name: str, value: Any):
    return lambda body: where(body).__setitem__(name, value)


def drop(where, name: str):
    return lambda body: where(body).pop(name)


def twice(body: Any) -> None:
    leaf(body)["records"] *= 2


def too_large(body: Any) -> None:
    leaf(body)["shape"] = [10**9]
    record(body).update(sizes=[10**9], offsets=[0])


def in_one_place(body: Any) -> None:
    """Two leaves from the same bytes: as many as one likes would be made from a small file."""
    leaf(body)["records"], leaf(body)["shape"] = leaf(body, "many.0")["records"], [1]


def in_parts(extents: Any):
    def change(body: Any) -> None:
        old = record(body)
        leaf(body)["records"] = [{**old, "offsets": a, "sizes": b} for a, b in extents]

    return change


TOP = lambda body: body  # noqa: E731
TABLES = {
    "no leaves": (put(TOP, "leaves", 3), "'leaves' is 3, which is no object"),
    "no leaf": (put(lambda b: b["leaves"], "w", [1]), r"the leaf 'w' is \[1\], which is no object"),
    "no files": (drop(TOP, "files"), "'files'"),
    "no tree": (drop(TOP, "tree"), "it has no version, files or tree"),
    "odd version": (put(TOP, "version", "1"), "it has no version"),
    "no records": (drop(leaf, "records"), "the records of 'w' are None"),
    "no record": (put(leaf, "records", [None]), "a record of 'w' is None, which is no object"),
    "dtype of no dtype": (put(leaf, "dtype", "load"), "the dtype of 'w' is 'load', which blocks"),
    "quantized": (put(leaf, "dtype", "quint8"), "the dtype of 'w' is 'quint8', which blocks"),
    "bits": (put(leaf, "dtype", "uint4"), "the dtype of 'w' is 'uint4', which blocks do not have"),
    "dtype of no text": (put(leaf, "dtype", ["float32"]), r"the dtype of 'w' is \['float32'\]"),
    "another dtype": (put(leaf, "dtype", "int32"), r"are not int32\[2, 3\]"),
    "wide dtype": (put(leaf, "dtype", "complex128"), r"are not complex128\[2, 3\]"),
    "another kind": (put(leaf, "kind", "int"), "the leaf 'w' is of the kind 'int'"),
    "kind of no text": (put(leaf, "kind", {}), "the leaf 'w' is of the kind {}"),
    "value as tensor": (put(lambda b: leaf(b, "step"), "kind", "tensor"),
        "the leaf 'step' is of the kind 'tensor'"),
    "value of another type": (
        put(lambda b: leaf(b, "step"), "kind", "str"), "are of type int, not str"),
    "numpy has no bfloat16": (put(lambda b: leaf(b, "array"), "dtype", "bfloat16"),
        r"'array' is bfloat16\[3\], which numpy lacks"),
    "huge shape": (put(leaf, "shape", [10**13, 3]), "a part of 'w' is in none of its files"),
    "negative shape": (put(leaf, "shape", [-2, -3]), "'shape' is .* which is no list of sizes"),
    "shape of floats": (put(leaf, "shape", [2.0, 3.0]), "'shape' is .* which is no list of sizes"),
    "shape of bools": (put(leaf, "shape", [True, 6]), "'shape' is .* which is no list of sizes"),
    "astronomic shape": (put(leaf, "shape", [2**70]), "'shape' is .* which is no list of sizes"),
    "more dims": (put(leaf, "shape", [2, 3, 1]), "a block of 'w' is outside of it"),
    "block outside": (put(record, "offsets", [1, 0]), "a block of 'w' is outside of it"),
    "block too large": (too_large, "a block of 'w' is larger than its record"),
    "another file": (put(record, "file", "__0_0.distcp"), "is not in its list of files"),
    "file of no text": (put(record, "file", 5), "a file of 'w' is 5"),
    "position outside": (put(record, "position", 10**9), "ends before byte"),
    "negative position": (put(record, "position", -1), "'position' is -1, which is no size"),
    "no length": (put(record, "length", 0), "a record of 'w' has no bytes"),
    "long": (put(record, "length", 10**15), "two records of .* overlap|ends before byte"),
    "checksum of no number": (put(record, "crc", "1"), "a checksum of 'w' is '1'"),
    "twice the same block": (twice, "two blocks of 'w' overlap"),
    "overlap and gap": (
        in_parts([([0, 0], [1, 3]), ([0, 0], [1, 3])]), "two blocks of 'w' overlap"),
    "gap": (in_parts([([0, 0], [1, 3])]), "a part of 'w' is in none of its files"),
    "one place for two": (in_one_place, "two records of __host_0.distcp overlap"),
    "tree of no kind": (put(TOP, "tree", {"x": 1}), "the tree has {'x': 1}"),
    "tree of unknown leaves": (put(TOP, "tree", "os"), "the leaf 'os' is not there"),
    "tree without leaves": (put(TOP, "tree", {"dict": []}), "the leaves .* are not in the tree"),
    "tree with one twice": (put(TOP, "tree", {"list": [[0, "w"], [1, "w"]]}),
        "the leaf 'w' is not there, or twice in the tree"),
    "tree with one label": (put(lambda b: b["tree"]["dict"][1], 0, "w"),
        r"two parts of the tree are called \['w', 'w', "),
    "size of a file": (put(lambda b: b["files"], "__host_0.distcp", "1"), "but '1' were written"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables(ours, name):
    change, match = TABLES[name]
    body = table_of(ours)
    change(body)
    sign(ours, body)
    match = f"(?s){match}.*Load an earlier checkpoint"
    if name in ("another dtype", "wide dtype", "value of another type"):
        refused(ours, match)
        assert latest(ours.parent) == ours  # what is in a block is found when it is read
    else:
        passed_over(ours, match)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"digest": NaN, "checkpoint": {}}',
        b'{"digest": "", "digest": "", "checkpoint": {}}',
        b'{"digest": "", "checkpoint": {}}',
        b'{"digest": "", "checkpoint": ' + b"9" * 5000 + b"}",
        b'{"digest": 1, "checkpoint": [1]}',
    ],
)
def test_texts_that_are_no_table(ours, text):
    (ours / "torchpmap.json").write_bytes(text)
    passed_over(ours, "torchpmap.json (is not what was written|has changed since)")


def test_a_table_too_large_to_read(ours):
    os.truncate(ours / "torchpmap.json", 2**40)  # takes no room on the disk
    refused(ours, "torchpmap.json has more than 268435456 bytes")


# -- files -----------------------------------------------------------------------------------------

NAMES = ["../step_2/x", "/etc/passwd", "..", ".", "", "a\0b", "a\nb", "sub/x", "\udc80", "x" * 300]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_elsewhere(ours, name):
    body = table_of(ours)
    body["files"][name] = body["files"].pop("__host_0.distcp")
    for row in body["leaves"].values():
        for each in row["records"]:
            each["file"] = name
    sign(ours, body)
    passed_over(ours, "is not the name of a file in it|File name too long")


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
@pytest.mark.parametrize(
    ("saved_by", "file"),
    [
        ("ours", "torchpmap.json"),
        ("ours", "__host_0.distcp"),
        ("ours", ".metadata"),
        ("by_dcp", ".metadata"),
    ],
)
def test_what_is_no_regular_file(request, saved_by, file, replace):
    folder = request.getfixturevalue(saved_by)
    replace(folder / file)
    passed_over(folder, f"{file} (is no regular file|cannot be read: it is a symbolic link)")


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


# -- pickles ---------------------------------------------------------------------------------------


def test_metadata_runs_no_code(by_dcp, tmp_path):
    (by_dcp / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "made")))
    with pytest.warns(UserWarning, match=r"passes over step_1: .* it wants posix.mkdir, which is"):
        assert latest(by_dcp.parent) is None
    refused(by_dcp, "it wants posix.mkdir, which is no data")
    assert not (tmp_path / "made").exists()


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def with_records(block: bytes, changes: dict[str, bytes], **options: Any) -> bytes:
    """A zip file of torch.save with other records."""
    out = io.BytesIO()
    old = zipfile.ZipFile(io.BytesIO(block))
    with zipfile.ZipFile(out, "w", **options) as new:
        for info in old.infolist():
            name = info.filename.split("/", 1)[1]
            new.writestr(info.filename, changes.get(name, old.read(info)))
    return out.getvalue()


@pytest.mark.parametrize("key", ["w", "step"])
def test_blocks_run_no_code(ours, tmp_path, key):
    code = Runs(tmp_path / "made")
    for block in (
        saved(code),
        saved([code]),
        with_records(saved(1), {"data.pkl": pickle.dumps(code)}),
    ):
        replaced_block(ours, key, block)
        refused(ours, "it wants posix.mkdir, which is no data")
    for block in (pickle.dumps(code), saved(1)[:-40], b"PK\5\6" + bytes(18), bytes(100)):
        block = block.ljust(24, b"x")  # as much as the tensor has
        replaced_block(ours, key, block)
        refused(ours, "are no value that was saved")
    assert not (tmp_path / "made").exists()


def nested(depth: int) -> bytes:
    return b")" + b"\x85" * depth


PICKLES = {
    "import": b"cos\nsystem\n(S'true'\ntR.",
    "import by strings": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "import of ours": b"ctorchpmap._checkpoint_pickles\n_Machine\n.",
    "import of a dotted name": b"\x80\x04\x8c\x05torch\x8c\x0aserializat\x93.",
    "registered extension": b"\x82\x01.",
    "instance": b"(cos\nsystem\no.",
    "old instance": b"(ios\nsystem\n.",
    "call of a number": b"K\x01)R.",
    "call of a tensor's dtype": b"ctorch\nfloat32\n)R.",
    "changed class": b"ctorch\nSize\n}X\x01\x00\x00\x00aK\x01sb.",
    "changed dict": b"}}b.",
    "filled tensor": b"ctorch\nfloat32\nK\x00K\x01s.",
    "tuples as a key": b"}" + nested(300_000) + b"Ns.",
    "tuples in a set": b"\x80\x04\x8f(" + nested(300_000) + b"\x90.",
    "tuples in set()": b"c__builtin__\nset\n(](" + nested(300_000) + b"etR.",
    "huge memo": b"Nr\xff\xff\xff\x7f.",
    "huge string": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",
    "huge frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"x.",
    "negative long": b"\x8b\xff\xff\xff\xff.",
    "nothing": b"",
    "no end": b"]",
    "empty stack": b".",
    "unknown": b"\x00.",
}


@pytest.mark.parametrize("name", PICKLES)
def test_hostile_pickles(name):
    data = PICKLES[name]
    block = with_records(saved(1), {"data.pkl": data})
    memory = mmap.mmap(-1, len(block))
    memory[:] = block
    for read, source in ((metadata_of, data), (value_of, memory)):
        try:
            found = read(source)
        except Exception:
            continue
        assert (name, found) == ("huge memo", None)  # for which C would take gigabytes


def test_compressed_records_are_not_unpacked():
    block = with_records(
        saved(torch.zeros(1000)), {"data/0": bytes(4000)}, compression=zipfile.ZIP_DEFLATED
    )
    memory = mmap.mmap(-1, len(block))
    memory[:] = block
    with pytest.raises(ValueError, match="is compressed"):
        value_of(memory)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (b"K\x06tq", b"M\xff\xfftq", "65535 elements in 24 bytes"),
        (b"K\x02K\x03\x86", b"M\xff\xffK\x03\x86", "a tensor that is larger than its data"),
        (b"K\x02K\x03\x86", b"J\xfe\xff\xff\xffK\x03\x86", "a tensor without a valid shape"),
        (b"K\x02K\x03\x86", b"K\x01K\x03\x86", r"are not float32\[2, 3\]"),
        (b"FloatStorage", b"IntStorage", r"are not float32\[2, 3\]"),
        (b"FloatStorage", b"Size", "it refers to what is no tensor"),
    ],
)
def test_tensors_that_lie_about_themselves(ours, old, new, match):
    block = saved(TREE["w"])
    pickled = zipfile.ZipFile(io.BytesIO(block)).read("archive/data.pkl")
    assert old in pickled
    replaced_block(ours, "w", with_records(block, {"data.pkl": pickled.replace(old, new)}))
    refused(ours, match)


# -- the connections of workers --------------------------------------------------------------------

ANSWER = ([], None)


def test_strangers_on_the_line_are_not_heard(tmp_path, capfd):
    connections = WriterConnections(tmp_path, 2)
    strangers = [_called(connections.address) for _ in range(2)]
    strangers[0].send_bytes(pickle.dumps(print))
    strangers[1].send_bytes(bytes(16) + b"1")
    calls = [_called(connections.address), _called(connections.address)]
    silent = _called(connections.address)
    for rank, call in enumerate(calls):
        call.send_bytes(connections.address.token + str(rank).encode())
    connections.accept()
    assert not Path(connections.address.path).exists()
    calls[1].send_bytes(packed(ANSWER))
    calls[0].send_bytes(pickle.dumps(Runs(tmp_path / "made")))
    first, second = connections.answers()
    assert (first[0], second) == (None, ANSWER)
    assert "is not in torchpmap's format" in first[1]
    assert os.listdir(tmp_path) == []
    for end in (*strangers, *calls, silent):
        end.close()


def test_the_line_is_in_a_folder_of_the_user_alone(tmp_path):
    connections = WriterConnections(tmp_path, 1)
    try:
        folder = Path(connections.address.path).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.stat().st_uid == os.geteuid()
    finally:
        connections.close()


def test_a_writer_that_does_not_call_is_missed(tmp_path):
    tp.config.timeout = 0.05
    answers = []
    try:
        connections = WriterConnections(tmp_path, 1)
        with pytest.raises(tp.CallTimeout, match=r"only 0 connected within .* \(0.05 s\)"):
            connections.accept()
        connections.close()
        for part_of_an_answer in (b"", struct.pack("!i", 1000) + b"{"):  # it is stopped then
            connections = WriterConnections(tmp_path, 1)
            with _called(connections.address) as call:
                call.send_bytes(connections.address.token + b"3")
                connections.accept()
                os.write(call.fileno(), part_of_an_answer)
                answers += connections.answers()
    finally:
        tp.config.reset()
    late = (
        "the worker process that writes __3_0.distcp was not done within torchpmap.config.timeout "
        "(0.05 s)"
    )
    assert answers == [(None, late)] * 2


# Blocks and the whole -----------------------------------------------------------------------------


def row_of(shape, blocks):
    records = [BlockRecord(begin, size, "file", 0, 8, None) for begin, size in blocks]
    return Row("tensor", shape, torch.float32, tuple(records))


def columns(count, width):
    return [((0, k * width), (4, width)) for k in range(count)]


PINWHEEL = [
    ((0, 0), (2, 1)),
    ((0, 1), (1, 2)),
    ((1, 2), (2, 1)),
    ((2, 0), (1, 2)),
    ((1, 1), (1, 1)),
]


@pytest.mark.parametrize(
    ("shape", "blocks", "is_right"),
    [
        ((3, 3), PINWHEEL, True),
        ((3, 3), [*PINWHEEL[:4], ((0, 0), (1, 1))], False),
        ((3, 3), [*PINWHEEL[:3], ((1, 0), (1, 2)), PINWHEEL[4]], False),
        ((4,), [((0,), (2,)), ((2,), (2,))], True),
        ((4,), [((0,), (2,)), ((1,), (2,))], False),
        ((4, 2), [((0, 0), (4, 2))], True),
        ((), [((), ())], True),
        ((4, 2), [((0, 0), (0, 2)), ((0, 0), (4, 2))], True),
        ((4, 100_000), columns(50_000, 2), True),  # each compared with each would take minutes
        ((4, 100_000), [*columns(49_999, 2), ((0, 0), (4, 2))], False),
    ],
)
def test_blocks_that_cover_the_whole(shape, blocks, is_right):
    assert _are_apart(row_of(shape, blocks)) == is_right


def test_a_worker_reads_the_rows_that_it_needs(ours):
    table = Table.of(ours)
    again = Table.known(ours, table.digest, ["w"])
    assert again.rows == {"w": table.rows["w"]}
    with pytest.raises(tp.CheckpointError, match="it was replaced while it was loaded"):
        Table.known(ours, "0" * 32, ["w"])
