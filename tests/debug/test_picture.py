"""Covers: debug/_picture.py, through debug.visualize_sharding."""

from __future__ import annotations

import pytest
import torch

import torchpmap as tp
from torchpmap._base.devices import enumerate_devices
from torchpmap._layout.layout import general_layout
from torchpmap.debug._picture import picture

DEVICES = enumerate_devices(8, "cpu")
MESH = tp.make_mesh((2, 4), ("a", "b"), devices=DEVICES)
CUBE = tp.make_mesh((2, 2, 2), ("a", "b", "c"), devices=DEVICES)


def drawn(shape, mesh, *spec):
    return picture(general_layout(shape, torch.float32, tp.NamedSharding(mesh, tp.P(*spec))))


def test_two_dims():
    assert drawn((4, 4), MESH, "a", "b") == (
        "float32[4, 4], cut along dims 0, 1\n"
        "        0       1       2       3\n"
        "    +-------+-------+-------+-------+\n"
        "0:2 | cpu:0 | cpu:1 | cpu:2 | cpu:3 |\n"
        "    +-------+-------+-------+-------+\n"
        "2:4 | cpu:4 | cpu:5 | cpu:6 | cpu:7 |\n"
        "    +-------+-------+-------+-------+"
    )


def test_replicas_share_a_box():
    assert drawn((4, 3), MESH, "a") == (
        "float32[4, 3], cut along dim 0\n"
        "    +-------------------------+\n"
        "0:2 | cpu:0 cpu:1 cpu:2 cpu:3 |\n"
        "    +-------------------------+\n"
        "2:4 | cpu:4 cpu:5 cpu:6 cpu:7 |\n"
        "    +-------------------------+"
    )


def test_columns_are_in_the_order_of_their_index():
    head, names, rule, *_ = drawn((3, 16), MESH, None, ("b", "a")).splitlines()
    assert head == "float32[3, 16], cut along dim 1"
    assert names.split() == [f"{k}:{k + 2}" for k in range(0, 16, 2)]
    assert rule == "+-------" * 8 + "+"
    boxes = drawn((3, 16), MESH, None, ("b", "a")).splitlines()[3]
    assert boxes == "| " + " | ".join(f"cpu:{k}" for k in (0, 4, 1, 5, 2, 6, 3, 7)) + " |"


def test_replicated():
    boxed = "cpu:0 cpu:1 cpu:2 cpu:3 cpu:4 cpu:5 cpu:6 cpu:7"
    line = "+" + "-" * (len(boxed) + 2) + "+"
    assert drawn((2,), MESH) == f"float32[2], replicated\n{line}\n| {boxed} |\n{line}"


def test_three_dims_are_a_list():
    assert drawn((2, 4, 6), CUBE, "a", "b", "c").splitlines()[:3] == [
        "float32[2, 4, 6], cut along dims 0, 1, 2",
        "  [0, 0:2, 0:3]  cpu:0",
        "  [0, 0:2, 3:6]  cpu:1",
    ]


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_printed(pool, capsys):
    tp.debug.visualize_sharding(tp.pmap(lambda x: x, compile=False)(torch.arange(4)))
    tp.debug.visualize_sharding(torch.zeros(3))
    assert capsys.readouterr().out == (
        "int64[4], cut along dim 0\n"
        "    +-------+\n"
        "0:2 | cpu:0 |\n"
        "    +-------+\n"
        "2:4 | cpu:1 |\n"
        "    +-------+\n"
        "float32[3], in this process (cpu)\n"
    )
