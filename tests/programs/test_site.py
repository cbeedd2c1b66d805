"""Covers: docs/site: the pages that the site has, its reference and its index of messages.

``make docs`` builds the site itself; these tests need no Sphinx.
"""

import importlib
import re
import sys
from pathlib import Path

import pytest

import torchpmap as tp

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site():
    """Import a file of ``docs/site``, as its own scripts do."""
    sys.path.insert(0, str(DOCS / "site"))
    before = set(sys.modules)
    yield importlib.import_module
    sys.path.remove(str(DOCS / "site"))
    for name in set(sys.modules) - before:
        if name in ("docstrings", "messages", "pages", "reference"):
            del sys.modules[name]


def test_every_public_name_is_in_the_reference(site):
    reference = site("reference")
    listed = set(reference.listed_names())
    things = {id(reference.find(name)) for name in listed}
    missing = [name for name, thing in reference.public_names() if id(thing) not in things]
    assert not missing, f"add these names to a block on a page in docs/api: {missing}"
    public = {name for name, _ in reference.public_names()}
    assert listed <= public, f"these are not public: {listed - public}"


def test_every_module_with_public_names_is_covered(site):
    modules = set(site("reference").MODULES)
    folders = {path.parent.name for path in (ROOT / "torchpmap").glob("[a-z]*/__init__.py")}
    assert modules == {f"torchpmap.{name}" for name in folders}


def test_every_page_is_in_the_table_of_contents(site):
    pages = site("pages").pages()
    entries = {
        (Path(page).parent / entry).as_posix()
        for page, text in pages.items()
        if page.endswith("index.md")
        for entry in re.findall(r"^.+ <(\S+)>$", text, re.MULTILINE)
    }
    assert {name.removesuffix(".md") for name in pages} - entries == {"index", "license"}


def test_links_lead_to_where_the_site_has_the_files(site):
    with_links = site("pages").with_links
    text = "[a](../README.md#speed) [`b`](../examples/compose.py) [c](axes.md) `[d](../x.md)`"
    moved = "[a](readme.md#speed) [`b`](examples/compose.md) [c](axes.md) `[d](../x.md)`"
    assert with_links(text, "docs/state.md") == moved
    assert with_links("[e](docs/state.md#x)", "README.md") == "[e](state.md#x)"
    assert with_links("[f](../CONTRIBUTING.md)", "benchmarks/README.md") == "[f](contributing.md)"
    with pytest.raises(ValueError, match=r"docs/state\.md has a link to tests, which is not"):
        with_links("[g](../tests)", "docs/state.md")


def test_blocks_are_replaced(site):
    pages = site("pages").pages()
    left = [name for name, text in pages.items() if re.search(r"^```\{(api|messages)", text, re.M)]
    assert not left
    assert ".. autofunction:: torchpmap.psum" in pages["api/collectives.md"]


def test_a_docstring_becomes_restructured_text(site):
    lines = """\
Sum ``x`` over *all* **kw devices_.

psum: number[*s] per device -> number[*s]
Backward: ``pmean`` of it.

Args:
    x: a tensor, with
        note: more of it.
    *args: the rest.

Raises:
    What it raises.

Example:
    >>> f(1)
    1

Source: see docs/gradients.md.
""".splitlines()
    assert site("docstrings").to_rst(lines, {"pmean": "torchpmap.pmean"}) == [
        r"Sum ``x`` over *all* \*\*kw devices\_.",
        "",
        ".. code-block:: text",
        "   :class: typed",
        "",
        "   psum: number[*s] per device -> number[*s]",
        "",
        ":Backward: :py:obj:`pmean <torchpmap.pmean>` of it.",
        "",
        ":Args:",
        "    ``x``",
        "        a tensor, with",
        "        note: more of it.",
        "    ``*args``",
        "        the rest.",
        "",
        ":Raises: What it raises.",
        "",
        ".. rubric:: Example",
        "",
        ".. code-block:: pycon",
        "",
        "    >>> f(1)",
        "    1",
        "",
        ":Source: see :doc:`/gradients`.",
        "",
    ]


def test_every_setting_is_described(site):
    text = "\n".join(site("reference").settings())
    described = re.findall(r"^    (\w+): ", text, re.MULTILINE)
    assert sorted([*described, "reset", "snapshot"]) == sorted(dir(tp.config))


def test_messages_are_found_in_the_code_and_on_the_pages(site):
    messages = site("messages")
    found = list(messages.in_code())
    sizes = "the sizes of mesh axes must be at least 1, but got ...."
    assert ("ValueError", sizes, "axes.md") in found
    starts = {text.partition(" ...")[0] for _, text, _ in found}
    assert "the function writes in place to a captured" in starts  # a function builds it
    assert any(
        text.startswith("the pool of devices was shut down") for text in starts
    )  # a constant
    shown = list(messages.shown(DOCS / "errors.md"))
    assert ("WorkerError", "OutOfRange: 3 is above 2", "errors.md#workererror") in shown


def test_every_public_error_has_a_section_and_every_message_a_page(site):
    messages = site("messages")
    assert messages.public_errors() - set(messages.sections_of_errors()) == {"PmapError"}
    for message in [*messages.in_code(), *messages.shown(DOCS / "errors.md")]:
        page, _, anchor = message.page.partition("#")
        headings = messages.HEADING.findall((DOCS / page).read_text())
        assert not anchor or anchor in map(messages.anchor, headings), message
    assert set(messages.GUIDES) >= {
        path.relative_to(messages.PACKAGE).parts[0] for path in messages.PACKAGE.rglob("*.py")
    } - {"_api.py"}
