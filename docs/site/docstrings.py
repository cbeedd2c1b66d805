"""From a docstring in the style of this project to reStructuredText.

The style: one line that says the result, then lines with types and shapes (``psum: number[*s] per
device -> ...``) and what the derivative is, then the sections Args, Returns, Raises, Example and
Source.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping

SECTION = re.compile(r"^((?:Args|Attributes|Returns|Raises|Source|Settings)[\w, ]*):(?: (.*))?$")
EXAMPLE = "Example:"
BACKWARD = "Backward: "
ENTRY = re.compile(r"^([*\w.][*\w., ]*): (.*)$")
MARKED = re.compile(r"``.+?``|(?<!\w)\*\w[^*]*\w\*(?!\w)|[*|\\]|(?<=\w)_(?!\w)", re.DOTALL)
PAGE = re.compile(r"\bdocs/(\w+)\.md\b")


def to_rst(lines: list[str], links: Mapping[str, str]) -> list[str]:
    """Convert the lines of a docstring.

    Args:
        lines: without indentation, as ``inspect.getdoc`` gives them.
        links: text of a literal -> the name that it links to.
    """

    def inline(text: str) -> str:
        return PAGE.sub(r":doc:`/\1`", MARKED.sub(lambda found: _inline(found[0], links), text))

    written: list[str] = []
    paragraphs = _paragraphs(lines)
    for number, paragraph in enumerate(paragraphs):
        if number == 1 and " -> " in f" {paragraph[0]}":
            written += _typed(paragraph, inline)
        elif paragraph[0] == EXAMPLE:
            body = textwrap.dedent("\n".join(paragraph[1:])).splitlines()
            written += [".. rubric:: Example", "", ".. code-block:: pycon", "", *_indented(body)]
        elif section := SECTION.match(paragraph[0]):
            written += _section(section[1], section[2] or "", paragraph[1:], inline)
        elif written and paragraph[0].startswith(" "):  # code after "::"
            written += paragraph
        else:
            written += inline("\n".join(paragraph)).splitlines()
        written.append("")
    return written


def _paragraphs(lines: list[str]) -> list[list[str]]:
    """Cut at blank lines, except those inside of a section."""
    found: list[list[str]] = []
    begins = True
    for line in lines:
        if not line.strip():
            begins = True
            continue
        in_section = found and (found[-1][0] == EXAMPLE or SECTION.match(found[-1][0]))
        if begins and in_section and line.startswith(" "):
            found[-1] += ["", line]
        elif begins:
            found.append([line])
        else:
            found[-1].append(line)
        begins = False
    return found


def _inline(text: str, links: Mapping[str, str]) -> str:
    if text.startswith("``"):
        target = links.get(text[2:-2])
        return f":py:obj:`{text[2:-2]} <{target}>`" if target else text
    return text if len(text) > 1 else f"\\{text}"


def _indented(lines: list[str], by: int = 4) -> list[str]:
    return [" " * by + line if line else line for line in lines]


def _typed(paragraph: list[str], inline: Callable[[str], str]) -> list[str]:
    """The lines with types and shapes as they are, and the derivative as a field."""
    joined = "\n".join(paragraph)
    types, _, derivative = joined.partition(BACKWARD)
    lines = [".. code-block:: text", "   :class: typed", "", *_indented(types.splitlines(), 3), ""]
    if derivative:
        lines += _section("Backward", derivative.replace("\n", " "), [], inline)
    return lines


def _section(title: str, text: str, body: list[str], inline: Callable[[str], str]) -> list[str]:
    """A field; entries (``x: tensor or pytree``) become a list of definitions."""
    body = textwrap.dedent("\n".join(body)).splitlines()
    if not text and body and ENTRY.match(body[0]) and title != "Returns":
        lines = [f":{title}:"]
        for line in body:
            entry = ENTRY.match(line)
            if entry:
                names = ", ".join(f"``{name.strip()}``" for name in entry[1].split(","))
                lines += [f"    {names}", f"        {inline(entry[2])}"]
            else:
                lines.append(f"        {inline(line.strip())}")
        return lines
    whole = " ".join([text, *(line.strip() for line in body)]).strip()
    return [f":{title}: {inline(whole)}"]
