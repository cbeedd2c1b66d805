"""Settings of Sphinx, which ``make docs`` runs on the pages that ``pages.py`` has written."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import docstrings  # noqa: E402
import reference  # noqa: E402

import torchpmap  # noqa: E402

project = "torchpmap"
author = copyright = "the torchpmap authors"
version = release = torchpmap.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = project
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_show_sourcelink = html_copy_source = False
pygments_style, pygments_dark_style = "default", "github-dark"

myst_heading_anchors = 4  # those of a code host

autodoc_typehints = "none"  # the docstrings say types and shapes
autodoc_inherit_docstrings = False  # of torch.Tensor, for ShardedTensor
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
toc_object_entries = False
viewcode_line_numbers = True


def digest_of_package() -> str:
    """A digest of the code that the notebooks run: outputs of other code are never shown."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "torchpmap").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "docs" / "_build" / "notebooks" / digest_of_package())
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
nb_output_stderr = "remove"  # lines about what takes long here and now


class Links(SphinxPostTransform):
    """Make a link to the reference of every ``tp.psum`` that a page names in its text.

    The priority is just before Sphinx resolves references.
    """

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            name = literal.astext().removesuffix("()")
            target = reference.TARGETS.get(name)
            if target and not isinstance(literal.parent, (nodes.reference, addnodes.pending_xref)):
                shown = literal.deepcopy()
                link = addnodes.pending_xref(
                    "", shown, refdomain="py", reftype="obj", reftarget=target
                )
                literal.replace_self(link)


def convert_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    if obj is torchpmap.config:
        lines += reference.settings()
    lines[:] = docstrings.to_rst(lines, reference.links_for(name, obj))


def skip_torch(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out what a class takes over from torch unchanged."""
    return True if str(getattr(obj, "__module__", "")).startswith("torch.") else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", convert_docstring)
    app.connect("autodoc-skip-member", skip_torch)
    app.add_post_transform(Links)
