"""Decides which environment variables are secrets, by the words in their names.

`nbdist mcp` hides the values of secrets in the texts that an assistant gets.  Error messages that
repeat the option `--env` hide such values, too.
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
"""Matches a part of the name of an environment variable whose value is a secret.

`KEY` and `PASS` count only as whole words, and so not in `KEYBOARD`; `PWD` counts only after `_`.
"""

MIN_CHARACTERS = 6
"""The least length of a value that is hidden.

A shorter value, such as `1` or `true`, often occurs in other texts, which hiding would spoil."""


def secret_values(environ: Mapping[str, str]) -> set[str]:
    """Return the values of secret variables that have `MIN_CHARACTERS` characters or more."""
    return {
        value
        for name, value in environ.items()
        if len(value) >= MIN_CHARACTERS and SECRET.search(name)
    }
