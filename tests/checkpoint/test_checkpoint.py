"""Covers: checkpoint.py and the modules _checkpoint_*: what is saved is what is loaded."""

import collections
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from _support import EAGER
from _values import HOST_LEAVES, WHOLE, leaf, mesh, put, rows, same, table_of

import torchpmap as tp
from torchpmap._runtime.task import Rank
from torchpmap.checkpoint import ShapeDtypeStruct, _blocks, load, save
from torchpmap.checkpoint._blocks import Files
from torchpmap.checkpoint._load import Restore
from torchpmap.checkpoint._table import Table

pytestmark = pytest.mark.usefixtures("four_devices")
Pair = collections.namedtuple("Pair", "left right")


# -- what goes in comes out ------------------------------------------------------------------------

VALUES = [None, True, 7, 2.5, 1 + 2j, "text", b"bytes", 2**100, float("inf")]


@pytest.mark.parametrize("filled", [False, True])
def test_host_leaves(tmp_path, filled):
    tree = {"arrays": HOST_LEAVES, "values": VALUES}
    save(tmp_path / "c", tree)
    found = load(tmp_path / "c", tree if filled else None)
    assert same(found, tree)


def test_structure_without_a_tree_to_fill(tmp_path):
    tree = {
        "list": [torch.zeros(1), (1, [2, {}])],
        3: collections.OrderedDict(b=1, a=2),
        "pair": Pair(left=torch.ones(1), right="r"),
        "none": None,
        "nothing": [],
    }
    save(tmp_path / "c", tree)
    found = load(tmp_path / "c")
    assert list(found) == list(tree)
    assert found["list"] == [torch.zeros(1), (1, [2, {}])]
    assert found[3] == {"b": 1, "a": 2}
    assert found["pair"] == {"left": torch.ones(1), "right": "r"}
    assert found["none"] is None
    assert found["nothing"] == []
    filled = load(tmp_path / "c", tree)
    assert filled["pair"] == Pair(torch.ones(1), "r")
    assert type(filled[3]) is collections.OrderedDict


ROOTS = [5, "x", (1, torch.ones(1)), [], {}, torch.arange(2.0), torch.tensor([1 + 2j]).conj()]


@pytest.mark.parametrize("tree", ROOTS, ids=repr)
def test_any_root(tmp_path, tree):
    save(str(tmp_path / "a" / "b"), tree)  # whose parents are made
    assert same(load(tmp_path / "a" / "b"), tree)
    like = torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else tree
    assert same(load(tmp_path / "a" / "b", like), tree)


def test_sharded_leaves_come_back_where_they_were(tmp_path):
    tree = {
        "rows": rows(WHOLE[:4]),
        "several": tp.pmap(lambda x: x, compile=EAGER)(WHOLE),
        "columns": tp.pmap(lambda x: x, in_axes=1, out_axes=1, compile=EAGER)(WHOLE),
        "copies": tp.replicate(WHOLE),
        "one": tp.device_put(WHOLE, tp.devices()[2]),
        "some": tp.device_put(WHOLE[:2], tp.devices()[1:3]),
        "tiles": put(WHOLE, "y", "x"),
        "partly": put(WHOLE, None, "y"),
        "count": tp.replicate(torch.tensor(3)),
    }
    whole = {name: value.to_host() for name, value in tree.items()}
    save(tmp_path / "c", tree)
    found = load(tmp_path / "c", tree)
    for name, value in tree.items():
        assert found[name].sharding == value.sharding, name
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].to_host(), whole[name]), name
    found = load(tmp_path / "c")
    assert all(torch.equal(found[name], whole[name]) for name in tree)
    total = tp.pmap(lambda x: tp.psum(x, "i"), axis_name="i", compile=EAGER)(
        load(tmp_path / "c", tree)["rows"]
    )
    assert torch.equal(total[0], WHOLE[:4].sum(0))


SPECS = [(), ("x",), (None, "x"), ("y", "x"), (("x", "y"),), (None, ("y", "x"))]


@pytest.mark.parametrize("saved", SPECS, ids=str)
def test_resharding(tmp_path, saved):
    save(tmp_path / "c", {"w": put(WHOLE, *saved)})
    for spec in SPECS:
        sharding = tp.NamedSharding(mesh(), tp.P(*spec))
        found = load(tmp_path / "c", {"w": ShapeDtypeStruct((8, 4), torch.float32, sharding)})["w"]
        assert found.sharding == sharding or found.is_fully_replicated
        for shard in found.addressable_shards:
            assert torch.equal(shard.data, WHOLE[shard.index]), spec


def test_another_number_of_devices(tmp_path):
    save(tmp_path / "c", {"w": rows(WHOLE[:4]), "copies": tp.replicate(WHOLE)})
    tp.init(2)
    like = {
        "w": tp.pmap(lambda x: x, compile=EAGER)(torch.zeros(4, 4)),
        "copies": tp.replicate(torch.zeros(8, 4)),
    }
    found = load(tmp_path / "c", like)
    halves = [shard.data.tolist() for shard in found["w"].addressable_shards]
    assert halves == [WHOLE[:2].tolist(), WHOLE[2:4].tolist()]
    assert torch.equal(found["copies"].addressable_data(1), WHOLE)


def test_placed_as_the_leaf_says(tmp_path):
    """A sharded value is loaded to the host, and the other way round; like keeps its values."""
    tree = {"a": rows(torch.ones(4)), "b": torch.ones(4), "c": np.ones(4), "d": WHOLE}
    save(tmp_path / "c", {**tree, "e": tp.replicate(torch.ones(2))})
    like = {
        "a": np.zeros(4, np.float32),
        "b": rows(torch.zeros(4)),
        "c": torch.zeros(4, dtype=torch.float64, device="meta"),
        "d": torch.nn.Parameter(torch.zeros(8, 4)),
        "e": tp.replicate(torch.zeros(2)).requires_grad_(),
    }
    found = load(tmp_path / "c", like)
    assert same(found["a"], np.ones(4, np.float32))
    assert type(found["b"]) is tp.ShardedTensor
    assert found["b"].sharding == like["b"].sharding
    assert same(found["c"], torch.ones(4, dtype=torch.float64))
    assert type(found["d"]) is torch.nn.Parameter
    assert torch.equal(found["d"], WHOLE)
    assert not like["d"].any()
    assert not like["b"].to_host().any()
    (found["e"].sum() * 3).backward()  # it requires gradients, as the leaf does
    assert found["e"].grad.tolist() == [3.0, 3.0]


def test_random_numbers_go_on(tmp_path):
    drop = tp.pmap(lambda x: x + torch.rand(2), compile=EAGER)
    torch.manual_seed(3)
    drop(torch.zeros(4, 1))
    save(tmp_path / "c", {"rng": torch.get_rng_state()})
    expected = drop(torch.zeros(4, 1)).tolist(), torch.rand(2).tolist()
    torch.set_rng_state(load(tmp_path / "c")["rng"])
    assert (drop(torch.zeros(4, 1)).tolist(), torch.rand(2).tolist()) == expected


def test_inline(tmp_path):
    with tp.debug.fake_pmap():
        save(tmp_path / "c", {"y": tp.pmap(lambda x: x * 2)(torch.ones(4))})
        assert torch.equal(load(tmp_path / "c")["y"], torch.full((4,), 2.0))


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_a_replicated_value_inline(tmp_path, kind):
    """As on devices, where it has no dim for them."""
    with tp.debug.fake_pmap():
        like = {"w": tp.replicate(kind(torch.ones(3)))}
        save(tmp_path / "c", like)
        assert tp.unreplicate(load(tmp_path / "c", like)["w"]).shape == (3,)


# -- who writes ------------------------------------------------------------------------------------


def writers(path: Path, key: str) -> list[str]:
    """The files of the blocks of a value, in the order of its rows."""
    return [file for file, _ in leaf(table_of(path), key)["blocks"]]


def test_every_device_writes_its_own_blocks(tmp_path):
    tree = {"rows": rows(WHOLE[:4]), "tiles": put(WHOLE, "x"), "host": torch.ones(1)}
    save(tmp_path / "c", tree)
    assert writers(tmp_path / "c", "rows") == [f"rank_{k}.safetensors" for k in range(4)]
    assert writers(tmp_path / "c", "host") == ["host.safetensors"]
    first, second = writers(tmp_path / "c", "tiles")
    assert first in ("rank_0.safetensors", "rank_1.safetensors")
    assert second in ("rank_2.safetensors", "rank_3.safetensors")


def test_copies_are_written_once_and_by_turns(tmp_path):
    save(tmp_path / "c", {f"w{k}": tp.replicate(torch.ones(10)) for k in range(8)})
    files = [file for k in range(8) for file in writers(tmp_path / "c", f"w{k}")]
    assert collections.Counter(files) == {f"rank_{k}.safetensors": 2 for k in range(4)}


# -- parts of blocks -------------------------------------------------------------------------------

PIECES = torch.arange(60_000).reshape(3, 4, 5000)


@pytest.mark.parametrize(
    ("offsets", "sizes", "is_near"),
    [
        ((0, 0, 0), (3, 4, 5000), True),
        ((1, 2, 30), (2, 1, 4800), True),  # from before the damage to behind it
        ((0, 0, 1), (3, 4, 4999), True),
        ((2, 1, 4999), (1, 1, 1), True),
        ((2, 3, 4999), (1, 1, 1), False),
        ((0, 0, 0), (2, 4, 5000), False),
        ((3, 0, 0), (0, 4, 5000), False),
    ],
)
def test_a_part_of_a_block_is_read_without_the_rest(tmp_path, monkeypatch, offsets, sizes, is_near):
    """Damage is found where it is read, and only there."""
    monkeypatch.setattr(_blocks, "PIECE_BYTES", 4096)
    with tp.debug.fake_pmap():
        save(tmp_path / "c", {"w": PIECES})
    index = tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))
    file, row = tmp_path / "c" / "host.safetensors", Table.of(tmp_path / "c").rows["w"]
    with Files(tmp_path / "c") as files:
        assert torch.equal(row.read(files, index), PIECES[index])
    data = bytearray(file.read_bytes())
    data[-40_000 * 2 - 1] ^= 1  # the last byte of PIECES[2, 1]
    file.write_bytes(data)
    damage = pytest.raises(tp.CheckpointError, match="have changed since they were written")
    with Files(tmp_path / "c") as files, damage if is_near else nullcontext():
        assert torch.equal(row.read(files, index), PIECES[index])


# -- mismatch and misuse ---------------------------------------------------------------------------

SAVED = {"params": {"w": torch.ones(2, 3)}, "step": 4}


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"params": {"w": torch.ones(3, 2)}, "step": 0},
         r"like\['params'\]\['w'\] is float32\[3, 2\], but 'params.w' in the checkpoint .* is "
         r"float32\[2, 3\]. Give a tree of the shapes"),
        ({"params": {"w": torch.ones(2, 3).bfloat16()}, "step": 0},
         r"like\['params'\]\['w'\] is bfloat16\[2, 3\], but 'params.w' .* is float32\[2, 3\]"),
        ({"params": {"w": 1.0}, "step": 0},
         r"like\['params'\]\['w'\] is a Python float, but 'params.w' .* is float32\[2, 3\]"),
        ({"params": {"w": torch.ones(2, 3)}, "step": torch.tensor(0)},
         r"like\['step'\] is int64\[\], but 'step' .* is a Python int"),
        ({"params": {"w": torch.ones(2, 3)}, "step": 0.0},
         r"like\['step'\] is a Python float, but 'step' .* is a Python int"),
        ({"params": {"w": torch.ones(2, 3), "b": torch.ones(3)}, "step": 0},
         r"another structure: the checkpoint lacks like\['params'\]\['b'\] \('params.b'\)\. "),
        ({"params": {"w": torch.ones(2, 3)}},
         r"has another structure: like has no place for 'step' of the checkpoint\. Give a tree"),
    ],
)  # fmt: skip
def test_mismatch(tmp_path, like, message):
    save(tmp_path / "c", SAVED)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "c", like)


def test_a_shape_that_does_not_divide(tmp_path):
    save(tmp_path / "c", {"w": torch.ones(3)})
    sharding = tp.NamedSharding(mesh(), tp.P("x"))
    with pytest.raises(ValueError, match="evenly divide the shape") as raised:
        load(tmp_path / "c", {"w": ShapeDtypeStruct((3,), torch.float32, sharding)})
    with pytest.raises(TypeError, match=r"like\['w'\] has the sharding PartitionSpec\('x',\), but"):
        load(tmp_path / "c", {"w": ShapeDtypeStruct((3,), torch.float32, sharding.spec)})
    assert raised.value.__notes__ == ["in like['w']"]


@pytest.mark.parametrize(
    ("tree", "kind", "message"),
    [
        ({"f": len}, TypeError, r"tree\['f'\] has type builtin_function_or_method, but what can"),
        (
            {"s": torch.ones(2).to_sparse()},
            TypeError,
            r"tree\['s'\] has type Tensor \(float32, torch.sparse_coo\), but .* dense tensors",
        ),
        ({"q": torch.empty(2, dtype=torch.uint4)}, TypeError, r"tree\['q'\] .* \(uint4, "),
        ({"m": torch.empty(2, device="meta")}, TypeError, r"tree\['m'\] is on the device 'meta'"),
        ({"__metadata__": torch.ones(1)}, ValueError, r"'__metadata__', a name that safetensors k"),
        ({"\ud800": torch.ones(1)}, ValueError, r"saved as '\\ud800', which is no Unicode text"),
        ({"o": np.array(["a"])}, TypeError, r"tree\['o'\] is an array of dtype <U1, which torch"),
        ({(1, 2): 3}, TypeError, r"the dict tree has the key \(1, 2\), but the keys must be"),
        ({"a": {"b": 1}, "a.b": 2}, ValueError, r"tree\['a'\]\['b'\] and tree\['a.b'\] would both"),
        ({"a": {1: 1, "1": 2}}, ValueError, r"would both be saved as 'a.1'. Rename one"),
    ],
)
def test_what_cannot_be_saved(tmp_path, tree, kind, message):
    with pytest.raises(kind, match=message):
        save(tmp_path / "c", tree)
    assert os.listdir(tmp_path) == []


def test_a_node_of_the_user_whose_parts_have_one_name(tmp_path):
    class Table(dict):
        pass

    pytree.register_pytree_node(
        Table,
        lambda table: ([*table.values()], [*table]),
        lambda values, keys: Table(zip(keys, values, strict=True)),
        flatten_with_keys_fn=lambda table: (
            [(pytree.MappingKey(key), value) for key, value in table.items()],
            [*table],
        ),
    )
    with pytest.raises(ValueError, match=r"two of tree\[1\], tree\['1'\] would be saved under one"):
        save(tmp_path / "c", Table({1: {"a": 1}, "1": {"b": 2}}))
    assert os.listdir(tmp_path) == []


def test_a_donated_value(tmp_path):
    value = rows(torch.ones(4))
    tp.pmap(lambda x: x, donate_argnums=0, compile=EAGER)(value)
    with pytest.raises(RuntimeError, match="has been deleted by pmap"):
        save(tmp_path / "c", {"w": value})
    assert os.listdir(tmp_path) == []


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "mine").write_text("x")
    for path in (tmp_path, tmp_path / "mine"):
        with pytest.raises(FileExistsError, match="exists and is no checkpoint, so it is not repl"):
            save(path, 1)
    assert (tmp_path / "mine").read_text() == "x"
    save(tmp_path / "c", 1)
    save(tmp_path / "c" / "inside", 2)
    (tmp_path / "c" / "log").write_text("x")
    with pytest.raises(FileExistsError, match=r"holds inside, log too, .* would be lost"):
        save(tmp_path / "c", 3)
    assert load(tmp_path / "c" / "inside") == 2
    assert load(tmp_path / "c") == 1


def test_the_current_folder_stays(tmp_path, monkeypatch):
    for name in ("here", "gone"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    for path in (".", tmp_path / "link" / "here"):
        with pytest.raises(FileExistsError, match=r"is the current folder.* Choose another name"):
            save(path, 1)
    assert os.path.samefile(tmp_path / "here", ".")
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    save(tmp_path / "c", 1)
    assert load(tmp_path / "c") == 1


def test_the_root_folder_cannot_be_a_checkpoint():
    for call in (lambda: save("/", 1), lambda: load("/")):
        with pytest.raises(ValueError, match=r"^torchpmap.checkpoint: / is the root folder, which"):
            call()


def test_inside_a_mapped_function(tmp_path, mode):
    with pytest.raises(RuntimeError, match=r"checkpoint.save was called inside a mapped function"):
        tp.pmap(lambda x: save(tmp_path / "c", x), compile=mode)(torch.ones(4))


class OnMeta:
    """The place of a rank whose device is not the host."""

    device = torch.device("meta")

    def __int__(self) -> int:
        return 0


def test_a_rank_reads_to_its_device(tmp_path: Path) -> None:
    save(tmp_path / "one", {"x": torch.arange(4.0)})
    row = Table.of(tmp_path / "one").rows["x"]
    work = Restore(tmp_path / "one", {0: [(row, (slice(1, 3),))]})
    _, (block,) = work.run(Rank((0,), "all", OnMeta(), None), None, [])
    assert (block.device.type, block.shape) == ("meta", (2,))
