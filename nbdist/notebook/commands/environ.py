"""What the ranks have in their environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument

from nbdist.config import SECRET
from nbdist.errors import UsageError
from nbdist.notebook.command import Line, command
from nbdist.notebook.options import ranks_option
from nbdist.notebook.tables import Shown, table
from nbdist.output.wording import fold_ranks
from nbdist.wire.worker_environ import NBDIST_SETS
from nbdist.words import format_ranks
from nbdist.world.spec import given_environ

if TYPE_CHECKING:
    from nbdist.config import WorldConfig

_LAST_NUMBER = re.compile(r"(.*?)(\d*)(\D*)", re.DOTALL)
HIDDEN = "(not shown)"
HEADINGS = ("variable", "ranks", "value")


@command(
    argument("patterns", nargs="*", metavar="PATTERN", help="which variables, such as HF_* or *;"
             " without one those that nbdist, --env and --env-file set"),
    ranks_option,
)  # fmt: skip
def dist_env(line: Line) -> Shown:
    """Show the environment variables that the ranks have, equal values once.

    `{rank}` is shown where each has its own number.  Values that look like a secret by
    their name are not shown.
    """
    environs = line.call("environ")
    names = chosen_names(environs, line.options.patterns, set_by_nbdist(line.world.session.config))
    rows = [HEADINGS, *(row for name in names for row in rows_of(name, environs))]
    return table(line.pool.headline, rows)


def set_by_nbdist(config: WorldConfig) -> frozenset[str]:
    """Name the variables that are shown where no pattern is given."""
    names = NBDIST_SETS
    with suppress(UsageError):  # the file has changed since; what ranks lack is not shown
        names |= given_environ(config).keys()
    return names


def chosen_names(
    environs: Mapping[int, Mapping[str, str]], patterns: Sequence[str], usual: frozenset[str]
) -> list[str]:
    """Sort out the names to show; UsageError where a pattern has none."""
    there = sorted({name for environ in environs.values() for name in environ})
    wanted = [part for text in patterns for part in text.split(",") if part]
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in there):
            raise UsageError(
                f"`%dist_env {pattern}`: the ranks have no such variable. `%dist_env *` shows all, "
                "`%dist_restart --env NAME=value` sets one."
            )
    if not wanted:
        return [name for name in there if name in usual]
    return [name for name in there if any(fnmatchcase(name, pattern) for pattern in wanted)]


def rows_of(name: str, environs: Mapping[int, Mapping[str, str]]) -> list[tuple[str, str, str]]:
    """Lay out a row for each value; one where ranks differ by their own numbers alone."""
    values = {rank: environ.get(name) for rank, environ in environs.items()}
    if len(set(values.values())) > 1:
        general = {_without_number(value, rank) for rank, value in values.items()}
        if len(general) == 1:
            values = dict.fromkeys(values, general.pop())
    return [
        ("" if number else name, format_ranks(ranks), _shown(name, value))
        for number, (value, ranks) in enumerate(fold_ranks(values).items())
    ]


def _without_number(value: str | None, rank: int) -> str | None:
    """Put `{rank}` for the rank's own number where it stands last: before, it may be another's."""
    if value is None:
        return None
    before, number, after = _LAST_NUMBER.fullmatch(value).groups()  # type: ignore[union-attr]
    return f"{before}{{rank}}{after}" if number == str(rank) else value


def _shown(name: str, value: str | None) -> str:
    if value is None:
        return "(not set)"
    if value and SECRET.search(name):
        return HIDDEN
    return value.replace("\n", "\\n")
