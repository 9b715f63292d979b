"""The command `nbdist`, for terminals."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence

from nbdist import __version__
from nbdist.errors import UsageError
from nbdist.terminal.looking import Worlds
from nbdist.terminal.picture import CpuMeter, as_lines
from nbdist.terminal.top import show_top

BETWEEN_LOOKS = 0.5
"""Seconds in which `nbdist status` counts processor time; longer than an answer is kept."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(words)
    if options.command == "top":
        show_top(options.seconds, options.times)
        return 0
    if options.command in ("enable", "disable"):
        return _configure(options)
    return show_status()


def _configure(options: argparse.Namespace) -> int:
    """Do `nbdist enable` or `nbdist disable`."""
    # IPython and all magics are imported for these alone.
    from nbdist.terminal.enabling import disable, enable

    try:
        if options.command == "enable":
            return enable(options.profile, is_sure=options.yes)
        return disable(options.profile)
    except UsageError as error:
        sys.stderr.write(f"nbdist: {error}\n")
        return 2


def show_status() -> int:
    """Print all worlds once; 1 where there is none."""
    worlds, meter = Worlds(), CpuMeter()
    try:
        for seen in worlds.seen():
            meter.read(seen)
        time.sleep(BETWEEN_LOOKS)
        found = [(seen, meter.read(seen)) for seen in worlds.seen()]
    finally:
        worlds.close()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    sys.stdout.write("".join(f"{line}\n" for line in as_lines(found, width)))
    return 0 if found else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("nbdist", description="nbdist outside of notebooks.")
    parser.add_argument("--version", action="version", version=f"nbdist {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="what each worker does now, also while a cell runs")
    top = commands.add_parser("top", help="the same again and again, until Ctrl-C")
    top.add_argument(
        "-d", "--seconds", type=_seconds, default=2.0, help="between two looks (2; at least 0.5)"
    )
    top.add_argument("-n", "--times", type=int, default=0, help="look so many times, then end")
    for name, what in (
        ("enable", "have notebooks find the magics without %%load_ext nbdist"),
        ("disable", "take that back"),
    ):
        configuring = commands.add_parser(name, help=what)
        configuring.add_argument("--profile", default="default", help="of IPython (default)")
        if name == "enable":
            configuring.add_argument("-y", "--yes", action="store_true", help="do not ask")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.5 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("it is 0.5 to 3600 seconds")
    return seconds
