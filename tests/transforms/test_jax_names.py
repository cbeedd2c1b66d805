"""Covers: _jax_names.py: missing names of JAX answer with their row of docs/from_jax.md."""

import re
from pathlib import Path

import pytest

import torchpmap as tp
from torchpmap import _jax_names

PAGE = (Path(tp.__file__).parent.parent / "docs" / "from_jax.md").read_text()


def names_in(cell):
    """The last parts of the names in a cell; not attributes, keywords and settings."""
    found = []
    for code in re.findall(r"`([^`]+)`", cell):
        name = re.match(r"([A-Za-z_][\w.]*)(?=$|\()", code)
        is_attribute = name and "." in name[1] and name[1][0].isupper()
        if name and not is_attribute and not name[1].startswith("jax_"):
            found.append(name[1].rpartition(".")[2])
    return found


def plain(cell):
    without_asides = re.sub(r" \(\[more\]\([^)]+\)\)", "", cell)
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", without_asides).replace("`", "").strip()


def rows_of_the_page():
    tables = PAGE.split("## Names\n")[1].split("\n## ")[0]
    found = {}
    for line in re.findall(r"^\| (`.*) \|$", tables, re.MULTILINE):
        there, here = line.split(" | ")
        for name in names_in(there):
            if name not in tp.__dir__():
                found.setdefault(name, plain(here))
    return found


def test_the_table_is_that_of_the_page():
    table = {
        name: instead
        for names, instead in _jax_names._ROWS
        for name in names.split()
        if name not in tp.__dir__()
    }
    assert table == rows_of_the_page()


@pytest.mark.parametrize("name", rows_of_the_page())
def test_a_missing_name_says_what_to_write(name):
    with pytest.raises(AttributeError) as caught:
        getattr(tp, name)
    assert not hasattr(tp, name)
    assert str(caught.value).startswith(
        f"module 'torchpmap' has no attribute '{name}'. Instead of JAX's {name}: "
    )


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("jit", "inside a mapped function: nothing, it is compiled; elsewhere torch.compile"),
        ("jvp", "torch.func.jvp"),
        ("normal", "tp.random.normal, with the same bits"),
        ("stop_gradient", "x.detach()"),
    ],
)
def test_the_advice_names_the_function(name, instead):
    with pytest.raises(AttributeError, match=re.escape(f"JAX's {name}: {instead} (docs/from_jax")):
        getattr(tp, name)


def test_other_names_have_no_advice_but_what_python_guesses():
    with pytest.raises(AttributeError) as caught:
        tp.psumm  # noqa: B018
    assert str(caught.value) == "module 'torchpmap' has no attribute 'psumm'"
    assert (caught.value.name, caught.value.obj) == ("psumm", tp)  # for "Did you mean: 'psum'?"
