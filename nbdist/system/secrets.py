"""Which environment variables are secrets, by the words in their names; pure.

`nbdist mcp` hides their values in all texts that it returns to an assistant, and errors that repeat
the option `--env` hide them too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

WORDS = (
    *("TOKEN(?!IZ)", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "AUTH(?!OR)"),
    *("API_?KEY", "ACCESS_?KEY", "PRIVATE_?KEY", "(?<![A-Za-z0-9])(?:KEYS?|PASS)(?![A-Za-z])"),
    "(?<=_)PWD(?![A-Za-z])",
)
SECRET = re.compile("|".join(WORDS), re.IGNORECASE)
"""Matches a part of the name of an environment variable whose value stays hidden.

`KEY`, `PASS` and `PWD` are whole words of such a name: `KEYBOARD` and `PWD` hide nothing.
"""

MIN_CHARACTERS = 6
"""The length from which a value is hidden: `1` or `true` are also parts of other words."""


def secret_values(environ: Mapping[str, str]) -> set[str]:
    """Return the values of all variables that are secrets by their names, but no short values."""
    return {
        value
        for name, value in environ.items()
        if len(value) >= MIN_CHARACTERS and SECRET.search(name)
    }
