"""Tests of `nbdist.notebook.border.flags`: what a magic's options and arguments are."""

from __future__ import annotations

from nbdist.notebook.border.flags import Argument, arguments_of, flags_of
from nbdist.notebook.command import find_commands

COMMANDS = {each.name: each.run for each in find_commands()}


def test_the_options_of_a_magic() -> None:
    """By each of their flags, as the parser knows them."""
    flags = flags_of(COMMANDS["distributed"])
    assert flags["-r"] is flags["--ranks"]
    assert (flags["-r"].dest, flags["-j"].dest, flags["--no-free"].dest) == (
        "ranks",
        "layout",
        "free",
    )
    assert flags["--env"].takes_value
    assert not flags["--no-free"].takes_value
    assert not flags["--setup"].takes_value
    assert "%dist_status" in flags["--name"].help
    parser = COMMANDS["distributed"].parser  # type: ignore[attr-defined]
    read = vars(parser.parse_args([]))
    assert {each.dest for each in flags.values()} == set(read)


def test_arguments_without_a_flag() -> None:
    """In their order."""
    (variables,) = (each for each in arguments_of(COMMANDS["dist_snapshot"]) if not each.flags)
    (name,) = (each for each in arguments_of(COMMANDS["dist_export"]) if not each.flags)
    assert (name.dest, name.takes_many) == ("file", False)
    assert (variables.dest, variables.takes_many) == ("variables", True)
    assert arguments_of(lambda line: None) == ()
    assert isinstance(name, Argument)
