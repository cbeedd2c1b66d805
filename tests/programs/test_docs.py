"""Covers: README.md, docs/*.md, docs/notebooks and the examples in public docstrings. All are run.

Every ```python block runs in a fresh namespace that holds ``torch`` and ``tp``, on four CPU
devices. A ```text block right after it is what it must print; ``...`` in it stands for anything.
The blocks of a page that says so (``ONE_PROGRAM``) run one after the other, in one namespace, and
so do the cells of a notebook (its assertions say what must hold).

``TORCHPMAP_TEST_ALL=1`` compiles them as their readers do, with Inductor. Otherwise only the blocks
of README.md are: there ``compile=True`` means the traced graph as it is.
"""

import codeop
import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest
import torch
from _support import TEST_ALL

import torchpmap as tp

pytestmark = pytest.mark.cpu_only("pages name the CPU devices that they run on")

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.md"))
LINKED = [*PAGES, *NOTEBOOKS, *sorted((ROOT / "docs" / "api").glob("*.md"))]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
BLOCK = re.compile(
    r"^```(?:python|\{code-cell\} python)\n(?::.*\n)?(.*?)^```\n(?:\s*^```text\n(.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)
ONE_PROGRAM = re.compile("The blocks of this page are one program.|^file_format: mystnb$", re.M)
LONG = ("core.md", "training.md")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.fixture(autouse=True)
def four_devices():
    tp.init(num_devices=4)


def programs():
    """Lists of blocks that share a namespace: line of the page, code, what it must print."""
    for page in PAGES + NOTEBOOKS:
        text = page.read_text()
        blocks = [
            (text.count("\n", 0, match.start()) + 2, match[1], match[2])
            for match in BLOCK.finditer(text)
        ]
        for program in [blocks] if ONE_PROGRAM.search(text) else [[block] for block in blocks]:
            name = str(page.relative_to(ROOT))
            compiled = page.name == "README.md" or TEST_ALL
            marks = [pytest.mark.inductor, pytest.mark.always] if compiled else []
            marks += [pytest.mark.long] if page.name in LONG else []
            yield pytest.param(name, program, id=f"{name}:{program[0][0]}", marks=marks)


@pytest.mark.parametrize(("page", "program"), list(programs()))
def test_blocks_run_and_print_what_the_page_says(page, program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__", "torch": torch, "tp": tp}
    for line, code, expected in program:
        if "import matplotlib" in code:
            pytest.importorskip("matplotlib", reason="a picture")
        name = f"{page}:{line}"
        printed = io.StringIO()
        # Blank lines in front make tracebacks point at the line of the page.
        block = compile("\n" * (line - 1) + code, name, "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(block, namespace)
        if expected is not None:
            matches = doctest.OutputChecker().check_output(expected, printed.getvalue(), OPTIONS)
            assert matches, f"{name} printed\n{printed.getvalue()}\nbut the page says\n{expected}"


@pytest.mark.parametrize("page", ["README.md", "docs/all_of_torchpmap.md"])
def test_blocks_can_be_pasted_into_a_repl(page):
    """That of Python 3.11 ends a function at an empty line, and a loop nowhere else."""
    for match in BLOCK.finditer((ROOT / page).read_text()):
        lines: list[str] = []
        for line in match[1].splitlines():
            lines.append(line)
            if codeop.compile_command("\n".join(lines)) is not None:
                lines.clear()
        assert not "".join(lines).strip()


def docstrings():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in (tp, tp.checkpoint, tp.debug, tp.multihost, tp.random, tp.optim):
        for name in module.__all__:
            for test in finder.find(getattr(module, name), f"{module.__name__}.{name}"):
                if test.examples:
                    marks = [pytest.mark.inductor] if TEST_ALL else []
                    yield pytest.param(test, id=test.name, marks=marks)


@pytest.mark.parametrize("test", list(docstrings()))
def test_docstring_example(test):
    test.globs.update(torch=torch, tp=tp, print=print)  # not the print of torchpmap.debug
    report = io.StringIO()
    failures = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=report.write)
    assert failures.failed == 0, report.getvalue()


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_exist(page):
    targets = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in targets if not (page.parent / link).exists()]
    assert not missing
