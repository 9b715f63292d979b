"""How Sphinx builds the manual: `python -m sphinx -W docs site`."""

from importlib import metadata
from pathlib import Path

from ipython_pygments_lexers import IPython3Lexer
from sphinx.application import Sphinx

project, author = "nbdist", "the nbdist authors"
release = metadata.version("nbdist")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "pydata_sphinx_theme"
html_sidebars = {"**": []}
# With more, search is in a line of its own on a page of 1280 pixels.
html_theme_options = {"header_links_before_dropdown": 4}
html_title = f"nbdist {release}"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
default_role = "code"  # what single backticks in docstrings are


def setup(app: Sphinx) -> None:
    """Take blocks of Python for cells, which can have magics, and adapt a link of the README."""
    app.add_lexer("python", IPython3Lexer)
    app.connect("include-read", link_to_page)


def link_to_page(_app: Sphinx, _path: Path, _page: str, content: list[str]) -> None:
    """Let the README's link to the file for contributors go to the page that includes the file."""
    content[0] = content[0].replace("(.github/CONTRIBUTING.md)", "(docs/contributing.md)")
