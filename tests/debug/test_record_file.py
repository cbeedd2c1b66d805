"""Covers: files of debug.record that come from elsewhere; debug/_graph_data.py, _record_file.py,
_lockstep.py."""

import json
from collections import namedtuple
from dataclasses import replace

import pytest
import torch

import torchpmap as tp
from torchpmap.__main__ import main
from torchpmap._base.errors import kind_of
from torchpmap._layout.axis_stack import group_name
from torchpmap.debug._graph_data import NotData, decoded_graph, encoded_graph
from torchpmap.debug._lockstep import Lockstep
from torchpmap.debug._record_file import load, save

pytestmark = pytest.mark.usefixtures("pool")

EAGER = {"backend": "eager"}
DAMAGED = r"is no file of torchpmap\.debug\.record, or it is dam"


def of_nodes(*nodes, **more):
    start = ["placeholder", "x", None, [], {}, None]
    end = ["output", "output", None, [{"aside": ["node", "y"]}], {}, None]
    return {"nodes": [start, *nodes, end], "graphs": {}, "constants": {}} | more


X = {"aside": ["node", "x"]}


@pytest.mark.parametrize(
    "node",
    [
        ["call_function", "y", "os::system", [X], {}, None],
        ["call_function", "y", "aten::from_file", ["/etc/passwd"], {}, None],
        ["call_function", "y", "aten::save", [X, "file"], {}, None],
        ["call_function", "y", "aten::_reshape_alias", [X, [4000], [1]], {}, None],
        ["call_function", "y", "aten::manual_seed", [0], {}, None],
        ["call_function", "x", "aten::neg", [X], {}, None],
        ["output", "y", None, [X], {}, None],
        ["call_function", "y", "builtins.eval", ["1"], {}, None],
        ["call_function", "y", "aten::mul.__class__", [X], {}, None],
        ["call_function", "y", "aten::__class__", [X], {}, None],
        ["call_function", "y; import os", "aten::neg", [X], {}, None],
        ["call_function", "y", "aten::neg", [X], {"a=1, b": 2}, None],
        ["call_module", "y", "os", [X], {}, None],
        ["get_attr", "y", "__class__", [], {}, None],
        ["call_function", "y", "aten::neg", [{"dtype": "load"}], {}, None],
        ["call_function", "y", "aten::neg", [{"dtype": "os.system"}], {}, None],
        ["call_function", "y", "aten::neg", [{"aside": ["layout", "load"]}], {}, None],
        ["call_function", "y", "aten::neg", [{"aside": ["os", "system"]}], {}, None],
        ["call_function", "y", ["aten::neg"], [X], {}, None],
    ],
)
def test_other_names_are_refused(node):
    with pytest.raises(NotData):
        decoded_graph(of_nodes(node), {})


def test_damaged_files(recording, tmp_path):
    tp.pmap(lambda x: x + 1, compile=EAGER)(torch.ones(4))
    (path,) = tp.debug.dump()
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert {"call", "__metadata__"} < header.keys()  # any reader of safetensors can open it
    for broken in (
        data[:-1],
        data[:100],
        b"",
        b"\x00" * 64,
        data.replace(b'"format"', b'"formal"'),
    ):
        other = tmp_path / "broken.safetensors"
        other.write_bytes(broken)
        with pytest.raises(ValueError, match=DAMAGED):
            tp.debug.replay(other)


def test_every_byte_is_checked(recording):
    tp.pmap(lambda x: x + torch.tensor([1.5]), compile=EAGER)(torch.full((4, 1), 2.5))
    (path,) = tp.debug.dump()
    data = path.read_bytes()
    for place in (*range(0, len(data), 97), *range(len(data) - 20, len(data))):
        broken = bytearray(data)
        broken[place] ^= 1
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=DAMAGED):
            tp.debug.replay(path)
    path.write_bytes(data)
    assert tp.debug.replay(path).results["result"].tolist() == [[4.0]] * 4


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": []},
        {"ranks": [0, 0, 1, 2]},
        {"ranks": [0, 1]},
        {"num_threads": 10**9},
        {"groups": {}},
        {"groups": 5},
        {"uses_index": True},
        {"versions": {}},
        {"call": ["x"]},
        {"outputs": [{}]},
        {"outputs": [{"name": "y", "shape": [4], "ranks": [0]}]},
        {"outputs": [{"name": "y", "shape": [-1], "ranks": [0], "slices": []}]},
        {"outputs": [{"name": "y", "shape": [10**9], "ranks": [0], "slices": [[[0, 1]]]}]},
        {"outputs": [{"name": "y", "shape": [4], "ranks": [9], "slices": [[[0, 1]]]}]},
        {"settings": {"default dtype": "x"}},
        {"settings": {"default dtype": {"aside": ["os", "system"]}}},
        {"settings": {"oneDNN": {"tuple": []}}},
    ],
)
def test_facts_that_do_not_fit(recording, change):
    tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)(torch.ones(4))
    (path,) = tp.debug.dump()
    found, tensors = load(path), {}
    graph = encoded_graph(found.graph, tensors)
    save(path, replace(found.facts, **change), graph, tensors, found.inputs, {})
    with pytest.raises(ValueError, match=r"^replay: "):
        tp.debug.replay(path)


class WithCode(namedtuple("WithCode", "x")):
    ran = False

    def __iter__(self):
        WithCode.ran = True
        return super().__iter__()


def test_no_code_of_a_named_tuple_runs(recording):
    tp.pmap(lambda x: x + 1, compile=EAGER)(torch.ones(4))
    (path,) = tp.debug.dump()
    found = load(path)
    code = {"namedtuple": [WithCode.__module__, "WithCode", [1]]}
    graph = of_nodes(["call_function", "y", "aten::neg", [code], {}, None])
    save(path, found.facts, graph, {}, found.inputs, {})
    with pytest.raises(ValueError, match="a file has no named tuples"):
        load(path)
    assert not WithCode.ran


def test_parts_of_different_calls(recording, tmp_path):
    f = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)
    f(torch.ones(4))
    tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER, devices=tp.devices()[:2])(torch.ones(2))
    paths = tp.debug.dump()
    assert len(set(paths)) == 2  # both are the first call on their devices
    for rank, path in enumerate(paths):
        path.rename(tmp_path / f"part.rank{rank}.safetensors")
    with pytest.raises(ValueError, match="are of different calls"):
        tp.debug.replay(tmp_path / "part.rank0.safetensors")


def test_parts_of_different_runs(recording, tmp_path):
    tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)(torch.ones(4))
    found, tensors = load(*tp.debug.dump()), {}
    graph = encoded_graph(found.graph, tensors)
    for rank, attempt in enumerate(["first", "second"]):
        facts = replace(found.facts, attempt=attempt)
        path = tmp_path / f"part.rank{rank}.safetensors"
        save(path, facts, graph, tensors, found.inputs, {})
    with pytest.raises(ValueError, match="are of different calls"):
        tp.debug.replay(path)


def test_the_command_line_says_what_is_wrong(tmp_path, capsys):
    assert main(["replay", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == f"replay: there is no file {tmp_path / 'none'}\n"


def test_a_rank_that_does_not_come_to_a_collective():
    name = group_name((0, 1))
    op, wait = "_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"
    inner = {
        "nodes": [
            ["placeholder", "x", None, [], {}, None],
            ["call_function", "s", op, [X, "sum", name], {}, None],
            ["call_function", "y", wait, [{"aside": ["node", "s"]}], {}, None],
            ["output", "output", None, [[{"aside": ["node", "y"]}]], {}, None],
        ],
        "graphs": {},
        "constants": {},
    }
    other = of_nodes(["call_function", "y", "aten::neg", [X], {}, None])
    nodes = (
        ["get_attr", "a", "a", [], {}, None],
        ["get_attr", "b", "b", [], {}, None],
        ["call_function", "p", "aten::gt.Scalar", [X, 0], {}, None],
        [
            "call_function",
            "c",
            "cond",
            [{"aside": ["node", "p"]}, {"aside": ["node", "a"]}, {"aside": ["node", "b"]}, [X]],
            {},
            None,
        ],
        ["call_function", "y", "getitem", [{"aside": ["node", "c"]}, 0], {}, None],
    )
    graph = decoded_graph(of_nodes(*nodes, graphs={"a": inner, "b": other}), {})
    values = {0: torch.tensor(1.0), 1: torch.tensor(-1.0)}
    run = Lockstep({name: ((0, 1),)}).run(graph, [values], (0, 1))
    with pytest.raises(RuntimeError, match=r"the ranks \[1\] do not come to it"):
        list(run)
    values[1] = torch.tensor(3.0)
    assert [step.values for step in Lockstep({name: ((0, 1),)}).run(graph, [values], (0, 1))][
        -1
    ] == {
        0: 4.0,
        1: 4.0,
    }
    assert kind_of((), torch.float32) == "float32[]"
