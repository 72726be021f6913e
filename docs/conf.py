"""The site: `make docs` builds it with Sphinx and MyST from the Markdown beside this file, and fails on any warning."""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent.resolve()
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from megatron_dynapipe import __version__  # noqa: E402

project = "megatron_dynapipe"
author = "the authors of megatron_dynapipe"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 3
exclude_patterns = ["results/*.md"]  # a table that README shows as a chart
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

html_theme = "furo"
html_title = "megatron_dynapipe"  # a version beside it would not fit the sidebar
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

# Docstrings are Markdown in the code's own habit: `names` in single backquotes, no cross-references.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_numpy_docstring = False

LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]+)\)")


def name_files_outside(_app: object, page: str, source: list[str]) -> None:
    """A link to a file of the repository that is no page becomes the file's name; one to nothing stays, and fails."""

    def named(link: re.Match[str]) -> str:
        target = ((DOCS / page).parent / link[2]).resolve()
        if DOCS in target.parents or ROOT not in target.parents or not target.exists():
            return link[0]
        return f"{link[1]} (`{target.relative_to(ROOT)}`)"

    source[0] = LINK.sub(named, source[0])


def setup(app: object) -> None:
    """Sphinx calls this once."""
    app.connect("source-read", name_files_outside)  # type: ignore[attr-defined]
