"""What people read is in plain English: no message, page or notebook has a word from this list."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

from tests.sources import PACKAGE, nodes_of, sources

BETTER = {
    r"[Ww]hoever": "name the subject",
    r"Who(?! owns)": "name the subject: `Ranks that wait ...`",
    r"anew": "again, restart, rebuild, recreate",
    r"at hand": "available",
    r"to be had": "available",
    r"(?:goes|go|went|come|came|comes) along": "sent with it",
    r"travels?": "is sent",
    r"shipp?(?:ed|ing|s)": "sent",
    r"(?:was|were|is|are) freed": "released",
    r"lives on": "is on, is still running",
    r"lets? go of": "releases",
    r"of yours": "your",
    r"of one's own": "own",
    r"never meet": "do not match",
    r"take turns": "are slower",
    r"(?:was|were) replaced": "was restarted",
    r"did not listen": "ignored",
    r"there shall be": "number of",
    r"stands? (?:there|before|still)": "is",
    r"sent with --no-wait\)": "in the background",
    r"all variables are kept": "no variables were lost",
    r"GLHF": "say what to do",
}
"""Words that readers stumble over, and what to say."""

FORBIDDEN = re.compile("|".join(rf"(?<![\w`]){each}(?!\w)" for each in BETTER))


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Strings of several words that are no docstrings, and those of magics, which are help."""
    alone = {id(each.value) for each in nodes_of(source) if isinstance(each, ast.Expr)}
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef) and any(map(_is_command, node.decorator_list)):
            yield node.lineno, ast.get_docstring(node) or ""
        match node:
            case ast.Constant(str(text)) if id(node) not in alone and " " in text.strip():
                yield node.lineno, text


def _is_command(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "command"


def test_messages_and_help_are_plain() -> None:
    """Each finding names its line and the words to use instead."""
    found = [
        f"{file}:{line}: `{word[0]}` in {text!r}"
        for file, source in sources().items()
        for line, text in texts(source)
        for word in FORBIDDEN.finditer(text)
    ]
    assert found == []


def test_pages_and_notebooks_are_plain() -> None:
    """So is what the README, the manual and the notebooks say in Markdown."""
    root = PACKAGE.parent
    pages = [root / "README.md", *root.glob("docs/*.md"), *root.glob(".github/*.md")]
    texts = [(page.name, page.read_text()) for page in pages]
    for notebook in root.glob("notebooks/*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        texts += [(notebook.name, "".join(c["source"])) for c in cells if c["cell_type"] != "code"]
    found = [f"{name}: `{word[0]}`" for name, text in texts for word in FORBIDDEN.finditer(text)]
    assert found == []


def test_the_list_is_looked_for() -> None:
    """Each entry of the list finds itself in a sentence."""
    for said in ("they were freed", "starts all anew", "Who waited", "`x` lives on rank 1"):
        assert FORBIDDEN.search(said)
    assert not FORBIDDEN.search("also show who owns each variable")
