"""How Sphinx builds the manual: `python -m sphinx -W docs site`."""

import html
import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from docutils import nodes
from ipython_pygments_lexers import IPython3Lexer
from pygments.lexer import bygroups, using
from pygments.token import Keyword, Operator, Text
from sphinx import addnodes
from sphinx.application import Sphinx

project, author = "nbdist", "the nbdist authors"
release = metadata.version("nbdist")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "pydata_sphinx_theme"
html_sidebars = {"**": []}
html_static_path = html_css_files = ["site.css"]
# With more, search is in a line of its own on a page of 1280 pixels.
html_theme_options = {"header_links_before_dropdown": 4}
html_title = f"nbdist {release}"
smartquotes = False  # `--` begins an option, and is no dash
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# Of a longer signature each argument has a line.  Modules count, although they are not shown.
python_maximum_signature_line_length = 130
default_role = "code"  # what single backticks in docstrings are
html_show_sourcelink = False  # the source of the first page is one line that includes another file
html_domain_indices = False  # there is one module to list

SHORTEST_DIVIDED = 20  # characters of a name that can be divided

# Files outside of this folder to which included ones link, by the page that includes them.
PAGE_OF = {".github/CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changes"}

_PYPROJECT = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())
SOURCE = _PYPROJECT["project"]["urls"]["Source"]


class CellLexer(IPython3Lexer):
    """Highlights the code below `%%distributed`, which is Python, as well as that of other cells.

    For a magic that IPython does not have itself, its lexer takes the rest of the cell as text.
    """

    tokens = {  # noqa: RUF012 (as in the base class)
        **IPython3Lexer.tokens,
        "root": [
            (
                r"(?s)(\s*)(%%)(distributed|rank|local)([^\n]*\n)(.*)",
                bygroups(Text, Operator, Keyword, Text, using(IPython3Lexer)),
            ),
            *IPython3Lexer.tokens["root"],
        ],
    }


def setup(app: Sphinx) -> None:
    """Take blocks of Python for cells, which can have magics, and adapt docstrings and pages."""
    app.add_lexer("python", CellLexer)
    app.connect("include-read", link_to_page)
    # Before napoleon, whose priority is 500 and which changes the indentation.
    app.connect("autodoc-process-docstring", mark_examples, priority=400)
    app.connect("doctree-resolved", divide_by_colons)
    app.connect("doctree-resolved", shorten_types)
    app.connect("html-page-context", mark_breaks)


def mark_breaks(
    _app: Sphinx, _page: str, _template: str, context: dict[str, str], _: object
) -> None:
    """Let the browser divide long names in the text after a dot, slash, hyphen or comma."""
    if "body" in context:
        names = r'(?<=<span class="pre">)[^<>]+'
        context["body"] = re.sub(names, lambda name: with_breaks(name[0]), context["body"])


def with_breaks(name: str) -> str:
    """Return the name, which is HTML, with `<wbr>` between its parts; short names have one part.

    An underscore divides only a part that is too long itself.
    """
    if len(html.unescape(name)) < SHORTEST_DIVIDED:
        return name
    parts = re.split(r"(?<=\w[-./,])(?=\w)", name)
    return "<wbr>".join(
        part if len(part) < SHORTEST_DIVIDED else part.replace("_", "_<wbr>") for part in parts
    )


def shorten_types(_app: Sphinx, page: nodes.document, _name: str) -> None:
    """Write `P` for `~typing.~P`: Sphinx does not read signatures with such a ParamSpec itself."""
    for parameter in page.findall(addnodes.desc_parameter):
        for text in [*parameter.findall(nodes.Text)]:
            if "~" in text:
                short = re.sub(r"~(?:\w+\.)*~?(?=\w)", "", text)
                text.parent.replace(text, nodes.Text(short))


def divide_by_colons(_app: Sphinx, page: nodes.document, _name: str) -> None:
    """Write a colon after each argument, where Sphinx writes `--`."""
    for text in [*page.findall(nodes.Text)]:
        if text == " -- " and text.parent is not None:
            text.parent.replace(text, nodes.Text(": "))


def mark_examples(_app: Sphinx, *about: object) -> None:
    """Mark the examples in a docstring as Python; unmarked, they would be quotations."""
    lines = about[-1]
    assert isinstance(lines, list)
    lines[:] = with_marks(lines)


def with_marks(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines, with a directive before each indented block that follows an empty line."""
    text, is_example = 0, False  # the indentation of the last line of text, and what follows it
    for before, line in zip(["", *lines], lines, strict=False):
        indentation = len(line) - len(line.lstrip())
        if line and indentation <= text:
            is_example = False
        elif line and not before and not is_example:
            yield from (f"{' ' * text}.. code-block:: python", "")
            is_example = True
        if line and not is_example:
            text = indentation
        yield line


def link_to_page(_app: Sphinx, _path: Path, _page: str, content: list[str]) -> None:
    """Let links of included files lead to pages, or to the repository if the file is no page."""
    for file, page in PAGE_OF.items():
        content[0] = content[0].replace(f"({file})", f"(docs/{page}.md)")
    others = r"\]\(((?:notebooks/|LICENSE)[^)]*)\)"
    content[0] = re.sub(others, rf"]({SOURCE}/blob/main/\1)", content[0])
