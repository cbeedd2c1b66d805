"""The pages of the reference: which names they have, and how each is shown.

A page in ``docs/api`` lists names in blocks; the build shows their docstrings in place of them::

    ```{api} torchpmap.random
    key
    split
    ```
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torchpmap as tp
from torchpmap._base.config import Config

API = Path(__file__).parents[1] / "api"
BLOCK = re.compile(r"^```\{api\} ([\w.]+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MODULES = {
    f"torchpmap.{name}": getattr(tp, name)
    for name in dir(tp)
    if inspect.ismodule(getattr(tp, name)) and hasattr(getattr(tp, name), "__all__")
}
AMBIGUOUS = {"devices", "init", "key", "print", "config", "breakpoint"}
"""Names that stand for something else in some docstrings; only ``tp.init`` is a link."""


def public_names() -> Iterator[tuple[str, Any]]:
    """Every public name with its module, and what it names."""
    for module, members in (("torchpmap", tp), *MODULES.items()):
        for name in members.__all__:
            yield f"{module}.{name}", getattr(members, name)


def listed_names() -> Iterator[str]:
    """The names on the pages, with their modules."""
    for page in sorted(API.glob("*.md")):
        for module, names in BLOCK.findall(page.read_text()):
            yield from (f"{module}.{name}" for name in names.split())


def find(full_name: str) -> Any:
    found: Any = tp
    for part in full_name.split(".")[1:]:
        found = getattr(found, part)
    return found


LISTED = {id(find(name)): name for name in listed_names()}
TARGETS = {
    name.replace("torchpmap", prefix, 1): LISTED[id(thing)]
    for name, thing in public_names()
    for prefix in ("tp", "torchpmap")
    if id(thing) in LISTED
}
"""What a page may write, such as ``tp.psum`` -> the name that the reference has."""


def links_for(full_name: str, thing: Any) -> dict[str, str]:
    """Literals in the docstring of one name -> what they link to: names, except its arguments."""
    own = {full_name.rpartition(".")[2], *AMBIGUOUS}
    if callable(thing):
        with contextlib.suppress(ValueError, TypeError):
            own |= set(inspect.signature(thing).parameters)
    module = full_name.rpartition(".")[0]
    bare = {
        name.rpartition(".")[2]: LISTED[id(thing)]
        for name, thing in public_names()
        if name.rpartition(".")[0] in ("torchpmap", module) and id(thing) in LISTED
    }
    return TARGETS | {name: target for name, target in bare.items() if name not in own}


def settings() -> list[str]:
    """What each setting is: the arguments of the class that checks them."""
    text = inspect.getdoc(Config) or ""
    return ["", "Settings:", *text.partition("Args:\n")[2].splitlines()]


def first_line(thing: Any) -> str:
    """The first sentence of a docstring."""
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.;])\s+(?=[A-Z])", text)[0].replace("``", "`").replace("|", "\\|")


def directive(full_name: str) -> str:
    thing = find(full_name)
    if inspect.isclass(thing):
        kind, options = "autoclass", ":members:\n:member-order: bysource"
        if issubclass(thing, BaseException):
            kind, options = "autoexception", ":no-members:"
    elif callable(thing):
        kind, options = "autofunction", ""
    else:
        kind, options = "autodata", ":no-value:"
    return f"```{{eval-rst}}\n.. {kind}:: {full_name}\n{_indent(options)}```"


def _indent(options: str) -> str:
    return "".join(f"   {line}\n" for line in options.splitlines())


def expanded(text: str) -> str:
    """Put a table of the names, and then their docstrings, in place of each block."""

    def block(found: re.Match[str]) -> str:
        names = [f"{found[1]}.{name}" for name in found[2].split()]
        rows = [
            f"| {{py:obj}}`{name.rpartition('.')[2]} <{name}>` | {first_line(find(name))} |"
            for name in names
        ]
        entries = [directive(name) for name in names]
        return "\n".join(["| name | |", "|---|---|", *rows, "", "\n\n".join(entries)])

    return BLOCK.sub(block, text)
