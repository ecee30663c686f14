"""Configuration of the documentation site: ``sphinx-build -W -n docs build/docs``.

Sphinx reads the reference from the docstrings, MyST lets every page be Markdown, and Furo works without a network, on
narrow screens and in the dark; nothing else is needed to build or to read the site.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE / "_ext"), str(_HERE.parent)]

import mpicoll  # noqa: E402

project = "mpicoll"
author = "The mpicoll developers"
copyright = author
version = release = mpicoll.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "mpicoll_docs",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_ext", "README.md"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say shapes and dtypes, which annotations cannot
autodoc_default_options = {"members": True}
napoleon_google_docstring = False
napoleon_numpy_docstring = True
napoleon_use_param = False  # "float32 of shape (count,)" is prose, not the name of a class to link to
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]

copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = False

html_theme = "furo"
html_title = f"mpicoll {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
