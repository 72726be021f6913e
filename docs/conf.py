"""The site: `make docs` builds it with Sphinx and MyST from `PAGES`, and fails on any warning.

The whole repository is Sphinx's source folder, so that a link between two pages leads to the page in both forms.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.resolve()
sys.path.insert(0, str(ROOT))

from megatron_dynapipe import __version__  # noqa: E402

project = "megatron_dynapipe"
author = "the authors of megatron_dynapipe"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 3
root_doc = "docs/index"
PAGES = ["docs/*.md", "benchmarks/*.md", "benchmarks/**/*.md", "patches/README.md", "tests/README.md"]
TABLES = ("benchmarks/data/", "benchmarks/paper/results/", "benchmarks/results/")
"""Pages that others lead to, without a line of their own at the side."""
include_patterns = PAGES
exclude_patterns = [".*", "build", "dist", "benchmarks/paper/introduction.md"]  # folders are not even looked through
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

html_theme = "furo"
html_title = "megatron_dynapipe"  # a version after it would not fit the sidebar
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

# Docstrings are Markdown in the code's own habit: `names` in single backquotes, no cross-references.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_numpy_docstring = False

LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)\)")
HOME = """<!doctype html>
<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={page}"><title>{title}</title>
<a href="{page}">{title}</a>
"""


def name_files(app: object, page: str, source: list[str]) -> None:
    """A link to a file of the repository that is no page becomes the file's name; one to nothing stays, and fails."""
    folder = (ROOT / page).parent

    def named(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        is_page = app.env.path2doc(str(target)) in app.project.docnames  # type: ignore[attr-defined]
        if is_page or ROOT not in target.parents or not target.exists() or link.string[link.start() - 1] == "!":
            return link[0]
        return f"{link[1]} (`{target.relative_to(ROOT)}`)"

    source[0] = ("---\norphan: true\n---\n" if page.startswith(TABLES) else "") + LINK.sub(named, source[0])


def write_home(app: object, _error: object) -> None:
    """The site's folder opens with its first page."""
    home = HOME.format(page=f"{root_doc}.html", title=html_title)
    Path(app.outdir, "index.html").write_text(home, encoding="utf-8")  # type: ignore[attr-defined]


def setup(app: object) -> None:
    """Sphinx calls this once."""
    app.connect("source-read", name_files)  # type: ignore[attr-defined]
    app.connect("build-finished", write_home)  # type: ignore[attr-defined]
