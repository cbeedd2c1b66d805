"""Write the pages of the site, for Sphinx: ``python docs/site/pages.py docs/_build/pages``.

The pages in ``docs/`` are written to be read where the code is. The site has them as they are, and

* the files outside of ``docs/`` that they link to: README.md and others, and the examples;
* links to these files, changed to where the site has them;
* tables of contents: a page ``index.md`` has those pages that its tables list, by heading;
* docstrings and messages in place of the blocks ``{api}`` and ``{messages}``.

A file that did not change is not written again, so that Sphinx does not read it again.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path, PurePosixPath

import messages
import reference

ROOT = Path(__file__).parents[2]
TEXTS = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "tests/README.md": "tests.md",
    "benchmarks/README.md": "measuring.md",
}
CODE = {"LICENSE": "license.md"} | {
    f"examples/{path.name}": f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.py")
}
LINK = re.compile(
    r"^```.*?^```|``?[^`\n]+``?|\]\(([^)\s#:]+)(#[^)\s]*)?\)", re.DOTALL | re.MULTILINE
)
EXAMPLES = (
    "Each program checks its own numbers. All take `--quick`, for a short run, and `--devices N` "
    "(but for `train_plain.py`); all run by `torchrun --nproc-per-node=2` too, and print the same. "
    "The first line says how long it usually takes on two cores; a first run, which compiles, may "
    "take twice as long. Pictures are written to `outputs/`."
)
MESSAGES = "```{messages}\n```"
HEADING = re.compile(r"^## (.*)$", re.MULTILINE)
ROW = re.compile(r"^\| \[([^|]*)\]\(([^)#:]+)\.md\) \|", re.MULTILINE)


def places() -> dict[str, str]:
    """File in the repository -> page or picture of the site."""
    docs = ROOT / "docs"
    kinds = [*docs.glob("*.md"), *docs.glob("api/*.md"), *docs.glob("notebooks/*.md")]
    found = {f"docs/{path.relative_to(docs)}": str(path.relative_to(docs)) for path in kinds}
    pictures = {f"docs/images/{path.name}": f"images/{path.name}" for path in docs.glob("images/*")}
    return found | pictures | TEXTS | CODE | {"examples": "examples/index.md"}


def with_links(text: str, source: str) -> str:
    """Change the links of a file in the repository to where the site has their targets."""
    known = places()
    page = PurePosixPath(known[source])

    def link(found: re.Match[str]) -> str:
        if found[1] is None:  # code
            return found[0]
        target = os.path.normpath(PurePosixPath(source).parent / found[1])
        if target not in known:
            raise ValueError(f"{source} has a link to {target}, which is not on the site.")
        return f"]({os.path.relpath(known[target], page.parent)}{found[2] or ''})"

    return LINK.sub(link, text)


def with_contents(text: str) -> str:
    """Add the tables of contents of a page ``index.md``: the pages of each heading's table."""
    parts = HEADING.split(text)
    for title, part in zip(["", *parts[1::2]], parts[::2], strict=True):
        if rows := ROW.findall(part):
            caption = [f":caption: {title}"] if title else []
            entries = [f"{name} <{page}>" for name, page in rows]
            text += "\n".join(["", "```{toctree}", ":hidden:", *caption, "", *entries, "```", ""])
    return text


def page_of_code(source: str) -> str:
    text = (ROOT / source).read_text()
    if not source.endswith(".py"):
        return f"---\norphan: true\n---\n\n# {source.title()}\n\n```text\n{text}```\n"
    return f"# {PurePosixPath(source).name}\n\n{_summary(text)}\n\n```python\n{text}```\n"


def _summary(code: str) -> str:
    return (ast.get_docstring(ast.parse(code)) or "").split("\n\n")[0].replace("\n", " ")


def list_of_examples() -> str:
    rows = [
        f"| [{PurePosixPath(source).name}]({PurePosixPath(page).name}) "
        f"| {_summary((ROOT / source).read_text())} |"
        for source, page in sorted(CODE.items())
        if page.startswith("examples/")
    ]
    return "\n".join(["# Examples", "", EXAMPLES, "", "| program | |", "|---|---|", *rows, ""])


def pages() -> dict[str, str]:
    """Page of the site -> its text."""
    found = {"examples/index.md": with_contents(list_of_examples())}
    for source, page in places().items():
        if source in CODE:
            found[page] = page_of_code(source)
        elif source.endswith(".md"):
            text = with_links((ROOT / source).read_text(), source)
            if MESSAGES in text:
                text = text.replace(MESSAGES, messages.written())
            text = reference.expanded(text)
            found[page] = with_contents(text) if page.endswith("index.md") else text
    return found


def write(folder: Path) -> None:
    contents = {name: text.encode() for name, text in pages().items()}
    pictures = (ROOT / "docs" / "images").glob("*")
    contents |= {f"images/{path.name}": path.read_bytes() for path in pictures}
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if str(path.relative_to(folder)) not in contents:
            path.unlink()
    for name, data in contents.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
