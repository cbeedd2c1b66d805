"""Covers: pictures of layouts as text and as HTML, debug.visualize_sharding."""

import re
from html.parser import HTMLParser

import pytest
import torch

import torchpmap as tp
from torchpmap._base.devices import enumerate_devices
from torchpmap._base.errors import size_text
from torchpmap._layout.layout import general_layout
from torchpmap._layout.picture import _box, picture

DEVICES = enumerate_devices(8, "cpu")
MESH = tp.make_mesh((2, 4), ("a", "b"), devices=DEVICES)
CUBE = tp.make_mesh((2, 2, 2), ("a", "b", "c"), devices=DEVICES)


def pictured(shape, mesh, *spec):
    return picture(general_layout(shape, torch.float32, tp.NamedSharding(mesh, tp.P(*spec))))


def drawn(shape, mesh, *spec):
    return str(pictured(shape, mesh, *spec))


def test_columns_are_in_the_order_of_their_index():
    head, names, rule, boxes, _ = drawn((3, 16), MESH, None, ("b", "a")).splitlines()
    assert head == "float32[3, 16], cut along dim 1"
    assert names.split() == [f"{k}:{k + 2}" for k in range(0, 16, 2)]
    assert rule == "+-------" * 8 + "+"
    assert boxes == "| " + " | ".join(f"cpu:{k}" for k in (0, 4, 1, 5, 2, 6, 3, 7)) + " |"


def test_a_tensor_of_this_process(capsys):
    """Of ShardedTensors: the examples of ``visualize_sharding`` and of docs/debugging.md."""
    tp.debug.visualize_sharding(torch.zeros(3))
    assert capsys.readouterr().out == "float32[3], in this process (cpu)\n"


def test_three_dims_are_a_list():
    assert drawn((2, 4, 6), CUBE, "a", "b", "c").splitlines()[:3] == [
        "float32[2, 4, 6], cut along dims 0, 1, 2",
        "  [0, 0:2, 0:3]  cpu:0",
        "  [0, 0:2, 3:6]  cpu:1",
    ]


# HTML --------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The cells of tables, their styles, and whether every tag is closed in order."""

    def __init__(self, html):
        super().__init__()
        self.rows, self.styles, self.texts, self.open = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag in ("div", "code", "pre", "table", "tr", "td")
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
            self.styles.append(dict(attrs)["style"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open:
            self.rows[-1][-1] += data
        else:
            self.texts.append(data)


def test_html_is_the_same_table():
    page = Page(pictured((4, 4), MESH, "a", "b").html())
    assert page.texts == ["float32[4, 4], cut along dims 0, 1; 64 B, 8 B per device"]
    assert page.rows == [
        ["", "0", "1", "2", "3"],
        ["0:2", "cpu:0", "cpu:1", "cpu:2", "cpu:3"],
        ["2:4", "cpu:4", "cpu:5", "cpu:6", "cpu:7"],
    ]
    colours = {re.search(r"hsl\([^)]*\)", style)[0] for style in page.styles if "hsl" in style}
    assert len(colours) == 8
    assert all(colour.endswith("/ .35)") for colour in colours)  # seen through in light and dark
    assert all("color:inherit" in style for style in page.styles)


def test_html_does_not_depend_on_the_styles_of_a_notebook():
    """Some have fonts of their own for ``pre``, wrap its lines, and shade every second row."""
    html = pictured((4, 4), MESH, "a", "b").html(torch.zeros(4, 4))
    found = re.findall(r'<(div|pre|table|tr) style="([^"]*)"', html)
    styles = {tag: set(style.split(";")) for tag, style in found}
    assert {"overflow-x:auto", "font-family:ui-monospace,monospace"} <= styles["div"]
    assert {"font:inherit", "white-space:pre"} <= styles["pre"]
    assert "font:inherit" in styles["table"]
    assert dict(found)["tr"] == "background:none"
    assert "<tr>" not in html


def test_html_of_other_cuts():
    assert Page(pictured((2,), MESH).html()).rows == [[" ".join(map(str, DEVICES))]]
    ranges, names = Page(pictured((3, 16), MESH, None, "b").html()).rows
    assert ranges == ["0:4", "4:8", "8:12", "12:16"]
    assert names == [f"cpu:{k} cpu:{k + 4}" for k in range(4)]
    listed = Page(pictured((2, 4, 6), CUBE, "a", "b", "c").html()).rows
    assert (len(listed), listed[1]) == (8, ["[0, 0:2, 3:6]", "cpu:1"])


def test_html_of_many_devices_is_small():
    many = enumerate_devices(1024, "cpu")
    mesh = tp.make_mesh((1024,), ("a",), devices=many)
    for shape, spec in (((1024,), ("a",)), ((1, 1024), (None, "a")), ((2,), (None,))):
        html = pictured(shape, mesh, *spec).html()
        assert len(html) < 10_000
        shown = " ".join(text for row in Page(html).rows for text in row).split()
        assert {"cpu:0", "cpu:1023", "..."} <= set(shown)


NUMBERS = [
    (torch.arange(3.0), "[0., 1., 2.]"),
    (torch.tensor(2.5, dtype=torch.bfloat16), "2.5"),
    (torch.tensor([1 + 2j]).conj(), "[1.-2.j]"),
    (torch.tensor([True]), "[ True]"),
    (torch.zeros(0), "[]"),
    (torch.arange(1000), "[  0,   1,   2, ..., 997, 998, 999]"),
]


@pytest.mark.parametrize(("numbers", "text"), NUMBERS)
def test_html_with_numbers(numbers, text):
    page = Page(pictured((2,), MESH).html(numbers))
    assert page.texts[1] == text


def test_sizes():
    sizes = [0, 999, 1000, 1500, 999_499, 999_500, 25_000_000, 3 * 10**9, 7 * 10**15]
    texts = ["0 B", "999 B", "1 kB", "1.5 kB", "999 kB", "1 MB", "25 MB", "3 GB", "7e+03 TB"]
    assert [size_text(size) for size in sizes] == texts


def test_text_is_escaped():
    assert _box("", '<b> & "c"') == '<td style="">&lt;b&gt; &amp; &quot;c&quot;</td>'
