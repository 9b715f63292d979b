"""How Sphinx builds the manual: `python -m sphinx -W docs site`."""

from importlib import metadata

project, author = "nbdist", "the nbdist authors"
release = metadata.version("nbdist")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "pydata_sphinx_theme"
html_sidebars = {"**": []}
html_title = f"nbdist {release}"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
