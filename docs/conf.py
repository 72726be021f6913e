"""The site: `make docs` builds it with Sphinx and MyST from the Markdown beside this file, and fails on any warning."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from megatron_dynapipe import __version__

project = "megatron_dynapipe"
author = "the authors of megatron_dynapipe"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
exclude_patterns = ["results/*.md"]  # tables that docs/results.md shows
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

html_theme = "furo"
html_title = f"megatron_dynapipe {version}"
html_copy_source = False

# Docstrings are Markdown in the code's own habit: `names` in single backquotes, no cross-references.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_numpy_docstring = False
