"""The index of errors by message, read from the pages and from the code when the site is built.

Its first part is the messages that the pages show: tests run these pages, so each is real. The
second part is every message in the code: the text of each exception, with ``...`` for a value.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchpmap"
SHOWN = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
EXCEPT = re.compile(r"^except (?:tp\.)?(\w+) as error:\n    print\(error\)", re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

GUIDES = {
    **dict.fromkeys(["__init__.py", "__main__.py", "_api.py"], "errors.md"),
    "_base": "errors.md",
    "_collectives": "axes.md",
    "_loops": "loops.md",
    "_doctor": "debugging.md",
    "_layout": "axes.md",
    "_modules": "training.md",
    "_plan": "errors.md",
    "_runtime": "errors.md",
    "_sharded": "sharded_tensors.md",
    "_trace": "errors.md",
    "_transforms": "errors.md",
    "checkpoint": "checkpoint.md",
    "debug": "debugging.md",
    "multihost": "multihost.md",
    "optim": "state.md",
    "profiler": "looking.md",
    "random": "random.md",
}
"""Folder of the package -> the page that explains what its messages are about."""


class Message(NamedTuple):
    kind: str
    text: str
    page: str
    """The page with its anchor."""


def anchor(heading: str) -> str:
    """The anchor of a heading, as a code host and MyST make it."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return kept.strip().replace(" ", "-")


@functools.cache
def sections_of_errors() -> dict[str, str]:
    """Name of an exception -> its section in ``docs/errors.md``."""
    headings = HEADING.findall((ROOT / "docs" / "errors.md").read_text())
    return {
        name: f"errors.md#{anchor(heading)}"
        for heading in headings
        for name in re.findall(r"\b[A-Z]\w+\b", heading)
        if name in dir(builtins) or name in public_errors()
    }


@functools.cache
def public_errors() -> set[str]:
    tree = ast.parse((PACKAGE / "_base" / "errors.py").read_text())
    found = {"PmapError"}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and getattr(node.bases[0], "id", "") in found:
            found.add(node.name)
    return found


def shown(page: Path) -> Iterator[Message]:
    """The messages that a page shows below the code that causes them."""
    text = page.read_text()
    outside = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M)
    for block in SHOWN.finditer(text):
        caught = EXCEPT.search(block[1])
        if block[2] and caught and "print(" not in block[1][: caught.start()]:
            line = text.count("\n", 0, block.start())
            above = HEADING.findall("\n".join(outside.splitlines()[:line]))[-1]
            only = block[1].count("print(") == 1
            first = block[2].split("\n  ")[0] if only else block[2].split("\n")[0]
            yield Message(caught[1], " ".join(first.split()), f"{page.name}#{anchor(above)}")


def in_code() -> Iterator[Message]:
    """The message of every built-in or public exception that the package makes."""
    known = public_errors() | {name for name in dir(builtins) if name.endswith("Error")}
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                kind = node.func.id
                for text in texts(node.args[0]) if kind in known else ():
                    yield Message(kind, text, page_of(kind, file.parts[0]))


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {
        path.relative_to(PACKAGE): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@functools.cache
def sources() -> dict[str, list[ast.expr]]:
    """Name of a function that returns a text, or of a constant -> what it can return, or is."""
    found: dict[str, list[ast.expr]] = {}
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef) and getattr(node.returns, "id", "") == "str":
            returned = (part for part in ast.walk(node) if isinstance(part, ast.Return))
            found.setdefault(node.name, []).extend(part.value for part in returned if part.value)
        elif isinstance(node, ast.Assign):
            name = getattr(node.targets[0], "id", "")
            if name.isupper():
                found.setdefault(name, []).append(node.value)
    return found


def page_of(kind: str, folder: str) -> str:
    """An exception of torchpmap has its own section; the folder says what others are about."""
    guide = GUIDES[folder]
    own = kind in public_errors() or guide == "errors.md"
    return sections_of_errors().get(kind, guide) if own else guide


def texts(node: ast.expr, depth: int = 0) -> list[str]:
    """The texts that an expression can have, with ``...`` for values; without words: none."""
    if isinstance(node, ast.IfExp):
        return texts(node.body, depth) + texts(node.orelse, depth)
    made_by = node.func if isinstance(node, ast.Call) else node
    name = getattr(made_by, "id", getattr(made_by, "attr", None))
    if name in sources() and depth < 3:
        return [text for source in sources()[name] for text in texts(source, depth + 1)]
    text = re.sub(r"(\.\.\. ?){2,}", "... ", " ".join(template(node).split())).strip()
    return [text] if re.search(r"\w{3}.*\w{3}", text) else []


def template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return "..."


def table(messages: list[Message]) -> list[str]:
    """The lines of a table, with each message as Python prints it."""
    rows = []
    for kind, text, page in messages:
        title = page.partition(".md")[0].replace("_", " ")
        escaped = text.replace("|", "\\|").replace("`", "'")
        rows.append(f"| `{kind}: {escaped}` | [{title}]({page}) |")
    return ["| message | page |", "|---|---|", *rows]


def written() -> str:
    """The two tables, as Markdown."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    examples = sorted({message for page in pages for message in shown(page)})
    lines = ["## Explained on these pages", "", *table(examples), "", "## All", ""]
    everything = sorted(set(in_code()))
    for kind in sorted({message.kind for message in everything}):
        lines += [f"### {kind}", ""]
        lines += table([message for message in everything if message.kind == kind])
        lines += [""]
    return "\n".join(lines)
