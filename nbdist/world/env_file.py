"""The variables of a `.env` file, for `--env-file`; runs in the notebook.

The file is parsed, never sourced: nothing in it is run or expanded.
"""

from __future__ import annotations

import re
from pathlib import Path

from nbdist.errors import UsageError
from nbdist.words import one_line

_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")
_COMMENT = re.compile(r"\s+#.*|^#.*")
_SINGLE = re.compile(r"'([^']*)'(.*)")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"(.*)')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def read_env_file(path: str) -> dict[str, str]:
    """Read what a `.env` file sets; UsageError with file and line for what cannot be read."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"`--env-file {path}`: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"`--env-file {path}`: it is not a text in UTF-8.") from None
    found = {}
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            found.update(parse_line(line.strip()))
        except ValueError as why:
            shown = one_line(line, 40).partition("=")[0]  # what follows may be a secret
            raise UsageError(
                f"{path}, line {number} (`{shown}`): {why}. Lines are NAME=value, "
                "NAME='value', export NAME=value, or # comments."
            ) from None
    return found


def parse_line(line: str) -> dict[str, str]:
    """Read the variable that a line of a `.env` file sets, or none; ValueError with the reason."""
    if not line or line.startswith("#"):
        return {}
    found = _LINE.fullmatch(line)
    if not found:
        raise ValueError("that is no NAME=value")
    return {found[1]: _value(found[2])}


def _value(text: str) -> str:
    if not text.startswith(("'", '"')):
        return _COMMENT.sub("", text).rstrip()
    is_single = text[0] == "'"
    quoted = (_SINGLE if is_single else _DOUBLE).fullmatch(text)
    if not quoted:
        raise ValueError("a quote is not closed")
    if quoted[2].strip() and not _COMMENT.fullmatch(quoted[2]):
        raise ValueError("something follows the closing quote")
    if is_single:
        return quoted[1]
    return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), quoted[1])
