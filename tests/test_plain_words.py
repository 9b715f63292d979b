"""Tests that messages, help, the README, the manual and the notebooks are in plain English.

proselint checks pages by its own rules and our list of words, and messages by that list only.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token
from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, CheckFlags, Padding
from proselint.registry.checks.engine import Fancy, RegexOptions
from proselint.registry.checks.types import PreferredForms
from proselint.tools import LintFile

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
"""Words that readers stumble over, and better words or advice."""

OURS = Check(
    PreferredForms({rf"(?<![\w`]){bad}(?!\w)": said for bad, said in BETTER.items()}, Padding.RAW),
    engine=Fancy(RegexOptions(case_insensitive=False)),
    path="ours",
    message="`{1}`: {0}",
    flags=CheckFlags(allow_quotes=True),
)
OF_MESSAGES = {OURS.path: True}
# Typography is not checked: quotes, dots and `x` are as in code.
OF_PAGES = OF_MESSAGES | {k: v for k, v in DEFAULT["checks"].items() if "typography" not in k}

CheckRegistry().register_many((*__register__, OURS))
MARKDOWN = MarkdownIt().enable("table")


def found_in(name: str, text: str, checks: dict[str, bool]) -> list[str]:
    """Return the findings of proselint, with their lines."""
    lines = text.splitlines()
    return [
        f"{name}: {each.check_result.message} in {lines[each.pos[0] - 1]!r}"
        for each in LintFile(name, text or " ").lint({**DEFAULT, "checks": checks})
    ]


def prose_of(markdown: str) -> str:
    """Return the sentences of a page, without code, addresses and comments."""
    found = (token.children for token in MARKDOWN.parse(markdown) if token.type == "inline")
    return "\n\n\u00b7\n\n".join("".join(map(_text, children or ())) for children in found)


def _text(token: Token) -> str:
    return {"softbreak": "\n", "code_inline": "`x`", "text": token.content}.get(token.type, "")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield strings of several words, without docstrings except those of magics, which are help."""
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
    """Messages and help have no word of the list; a finding names its line and better words."""
    found = [
        finding
        for file, source in sources().items()
        for line, text in texts(source)
        for finding in found_in(f"{file}:{line}", text, OF_MESSAGES)
    ]
    assert found == []


def test_pages_and_notebooks_are_plain() -> None:
    """proselint finds nothing in the Markdown of the README, the manual and the notebooks."""
    root = PACKAGE.parent
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob(".github/*.md")]
    texts = [(page.name, page.read_text()) for page in pages]
    for notebook in root.glob("notebooks/*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        texts += [(notebook.name, "".join(c["source"])) for c in cells if c["cell_type"] != "code"]
    found = [each for name, text in texts for each in found_in(name, prose_of(text), OF_PAGES)]
    assert found == []


def test_words_of_the_list_are_found_in_sentences() -> None:
    """Words of the list, and doubled words, are found in sentences; code is left alone."""
    for said in ("they were freed", "starts all anew", "Who waited", "`x` lives on rank 1"):
        assert found_in("page", prose_of(said), OF_PAGES)
    assert found_in("page", prose_of("the the cell"), OF_PAGES)
    text = "also show who owns each variable, `anew`\n\n```\nanew\n```"
    assert found_in("page", prose_of(text), OF_PAGES) == []
