"""How Sphinx builds the documentation: ``make docs``. Nothing is fetched, neither then nor by browsers."""

import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS / "_ext")]
PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]

project = "lockstep"
author = "The lockstep developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
extensions += ["list_files", "list_promises", "pages", "links"]  # in docs and docs/_ext
exclude_patterns = ["_ext", "_static", "pictures"]
nitpicky = True  # every name that a page refers to is there

html_theme = "furo"
html_title = "lockstep"
html_show_copyright = False  # LICENSE has it
html_static_path = ["_static"]
html_css_files = ["lockstep.css"]
html_theme_options = {
    "source_repository": PROJECT["urls"]["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# in docstrings of PyTorch's, in prose, and what Sphinx makes of an annotation
nitpick_ignore = [("py:class", "BatchNorm"), ("py:attr", "uses"), ("py:class", "dict[str")]

# what a button copies: of a console the commands, without prompts and outputs; it is of no use on a change
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
copybutton_copy_empty_lines = False
copybutton_selector = "div:not(.highlight-diff, .highlight-udiff) > div.highlight pre"

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Returns"]  # sentences: what is before a colon is no type
