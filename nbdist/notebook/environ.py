"""The table of `%dist_env`: what the ranks have in their environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from nbdist.errors import UsageError, WorldNotStarted, format_ranks
from nbdist.notebook.desk import ranks_of
from nbdist.notebook.status import headline, status_html, status_text
from nbdist.wire.environ import NBDIST_SETS
from nbdist.world.environ import SECRET
from nbdist.world.spec import given_environ

if TYPE_CHECKING:
    from nbdist.notebook.desk import Desk
    from nbdist.world.spec import Asked

_LAST_NUMBER = re.compile(r"(.*?)(\d*)(\D*)", re.DOTALL)
HIDDEN = "(not shown)"
HEADINGS = ("variable", "ranks", "value")

_EXPRESSION = "{**__import__('os').environ}"


def show_environ(desk: Desk, patterns: Sequence[str], ranks: str | None) -> None:
    """Ask the ranks, and show the table."""
    world = desk.world
    if world is None:
        raise WorldNotStarted("`%dist_env`")
    on = ranks_of(ranks, world)
    environs = dict(zip(on, desk.values(world, _EXPRESSION, on), strict=True))
    names = chosen_names(environs, patterns, set_by_nbdist(world.asked))
    table = [HEADINGS, *(row for name in names for row in rows_of(name, environs))]
    head = headline(world)
    desk.display().show_table(status_html(head, table), status_text(head, table))


def set_by_nbdist(asked: Asked) -> frozenset[str]:
    """The names that are shown when none are asked for."""
    names = NBDIST_SETS
    with suppress(UsageError):  # the file has changed since; what ranks lack is not shown
        names |= given_environ(asked).keys()
    return names


def chosen_names(
    environs: Mapping[int, Mapping[str, str]], patterns: Sequence[str], usual: frozenset[str]
) -> list[str]:
    """The names to show, sorted; UsageError where a pattern has none."""
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
    """A row for each value that ranks have; one where they differ by the rank's number alone."""
    values = {rank: environ.get(name) for rank, environ in environs.items()}
    if len(set(values.values())) > 1:
        general = {_without_number(value, rank) for rank, value in values.items()}
        if len(general) == 1:
            values = dict.fromkeys(values, general.pop())
    groups: dict[str | None, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return [
        ("" if number else name, format_ranks(ranks), _shown(name, value))
        for number, (value, ranks) in enumerate(groups.items())
    ]


def _without_number(value: str | None, rank: int) -> str | None:
    """With the rank's own number, where it stands last: before, it may be another's."""
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
