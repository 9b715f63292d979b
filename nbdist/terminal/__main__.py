"""The command `nbdist`: parses its arguments, and calls the file that does the work.

Also started as `python -m nbdist.terminal`, if the command is not on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbdist import __version__
from nbdist.errors import UsageError
from nbdist.system.folders import whole_file
from nbdist.terminal.doctor import doctor

REMOVED = {
    "k8s": 'copy the Job of the section "Kubernetes" in docs/machines.md; '
    "its pods run `nbdist join`.",
}
"""Commands of earlier versions, and what users do in their place."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command with these words, by default the command line's; return the exit code."""
    words = sys.argv[1:] if words is None else words
    if words and (instead := REMOVED.get(words[0])):
        sys.stderr.write(f"nbdist: `nbdist {words[0]}` was removed: {instead}\n")
        return 2
    options = _parser().parse_args(words)
    try:
        code: int = options.do(options)
        sys.stdout.flush()
    except UsageError as error:
        sys.stderr.write(f"nbdist: {error}\n")
        return 2
    except BrokenPipeError:  # the reader has closed the pipe, as in `nbdist top | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return 0
    return code


def _join(options: argparse.Namespace) -> int:
    # Imported here, because it imports ZeroMQ.
    from nbdist.cluster.ticket import join

    return join(options.place, options.key_file, options.index)


def _worlds(options: argparse.Namespace) -> int:
    # Imported here: packages that it imports may be missing, which `nbdist doctor` would report.
    from nbdist.terminal import worlds

    match options.command:
        case "kill":
            return worlds.kill_world(options.name)
        case "ps":
            return worlds.show_worlds()
        case "status":
            return worlds.show_status()
    return worlds.show_top(options.seconds, options.times)


def _mcp(options: argparse.Namespace) -> int:
    from nbdist.terminal.mcp import serve

    return serve(allow_run=options.allow_run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("nbdist", description="nbdist outside of notebooks.")
    parser.add_argument("--version", action="version", version=f"nbdist {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(
        name: str, do: Callable[[argparse.Namespace], int], what: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=what)
        command.set_defaults(do=do)
        return command

    add("status", _worlds, "what each worker does now, also while a cell runs")
    again = "like status, refreshed until q or Ctrl-C"
    top = add("top", _worlds, again)
    pause = "seconds between refreshes (2; at least 0.5)"
    top.add_argument("-d", "--seconds", type=_seconds, default=2.0, help=pause)
    top.add_argument("-n", "--times", type=int, default=0, help="stop after N refreshes")
    examined = add("doctor", lambda asked: doctor(asked.workers), "what will not work here")
    workers = "as in the notebook: a number, auto (as many as there are GPUs), gpu or cpu"
    examined.add_argument("-n", dest="workers", metavar="N", default="auto", help=workers)
    add("ps", _worlds, "list all worlds, including detached ones")
    kill = add("kill", _worlds, "end a world and everything that belongs to it")
    kill.add_argument("name", help="its --name, pool or process, as shown by ps")
    assistant = "answer an assistant's questions on your worlds (Model Context Protocol, stdio)"
    serving = add("mcp", _mcp, assistant)
    also = "it may also run cells, interrupt, restart ranks and save snapshots"
    serving.add_argument("--allow-run", action="store_true", help=also)
    what = "make the magics available without %%load_ext nbdist"
    enabling = add("enable", lambda asked: enable(asked.profile, is_sure=asked.yes), what)
    enabling.add_argument("-y", "--yes", action="store_true", help="do not ask")
    disabling = add("disable", lambda asked: disable(asked.profile), "undo `enable`")
    for each in (enabling, disabling):
        each.add_argument("--profile", default="default", help="of IPython (default)")
    joining = add("join", _join, "join a world that is waiting for machines")
    found = "the world's key, - for stdin; by default that in the user's state folder"
    joining.add_argument("--key-file", metavar="FILE", help=found)
    # No `--node`: torchrun takes that for an abbreviation of its own options.
    index = "the machine's number, for the order of ranks"
    joining.add_argument("--index", metavar="N", type=int, help=index)
    joining.add_argument("place", metavar="HOST:PORT", help="as shown by the notebook")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.5 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("it is 0.5 to 3600 seconds")
    return seconds


# --- `nbdist enable` --------------------------------------------------------------------------

EXTENSION = "nbdist"
SECTION, TRAIT = "MagicsManager", "lazy_magics"
"""Class and trait of IPython's configuration that name extensions by magic."""

_SET_IN_PYTHON = re.compile(rf"^[^#\n]*\b{TRAIT}\b", re.MULTILINE)


def enable(profile: str, *, is_sure: bool) -> int:
    """Write nbdist's magics into a profile's configuration, after asking; return the exit code."""
    # Imported here, because it imports all magics; `config_file` imports IPython.
    from nbdist.notebook.command import find_commands

    file = config_file(profile)
    config = read(file)
    # Below other lines IPython takes `%%distributed` for a line magic called `%distributed`. It is
    # named too, so that nbdist is loaded and says what is wrong.
    found = [*find_commands()]
    below = {f"%{each.name}" for each in found if each.kind == "cell"}
    names = sorted(below | {each.name for each in found})
    in_python = file.with_suffix(".py")
    if in_python.exists() and _SET_IN_PYTHON.search(in_python.read_text(encoding="utf-8")):
        raise UsageError(
            f"{in_python} sets {SECTION}.{TRAIT} itself; add to it "
            f'`c.{SECTION}.{TRAIT}["distributed"] = "{EXTENSION}"`, and so on for other magics.'
        )
    if not is_sure:
        others = len(names) - len(below) - 1
        sys.stdout.write(
            f"`%%distributed` and {others} other magics will load nbdist when one is first used.\n"
            f"Write this into {file}? [y/N] "
        )
        sys.stdout.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            sys.stdout.write("nothing was written\n")
            return 1
    write(file, config, dict.fromkeys(names, EXTENSION))
    sys.stdout.write(
        f"written to {file}: in new kernels `%%distributed -n 4` works at once; "
        "`nbdist disable` undoes it\n"
    )
    return 0


def disable(profile: str) -> int:
    """Remove what `enable` has written from a profile; return the exit code."""
    file = config_file(profile)
    config = read(file)
    magics: dict[str, str] = config.get(SECTION, {}).get(TRAIT, {})
    ours = [name for name, extension in magics.items() if extension == EXTENSION]
    if not ours:
        sys.stdout.write(f"there is nothing of nbdist in {file}\n")
        return 1
    write(file, config, dict.fromkeys(ours))
    sys.stdout.write(f"removed from {file}: `%load_ext nbdist` loads nbdist\n")
    return 0


def config_file(profile: str) -> Path:
    """Return a profile's configuration file for programs; users write the one that ends in .py."""
    from IPython.paths import get_ipython_dir

    if not re.fullmatch(r"\w[\w.-]*", profile):
        raise UsageError(f"`--profile {profile}`: an IPython profile, such as `default`.")
    return Path(get_ipython_dir()) / f"profile_{profile}" / "ipython_config.json"


def read(file: Path) -> dict[str, Any]:
    """Return the configuration in a file; UsageError if IPython could not read the file."""
    if not file.exists():
        return {}
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read ({error}); nothing was changed.") from None
    is_good = isinstance(config, dict) and isinstance(config.get(SECTION, {}), dict)
    if not is_good or not isinstance(config.get(SECTION, {}).get(TRAIT, {}), dict):
        raise UsageError(f"{file} is not an IPython configuration; nothing was changed.")
    return dict(config)


def write(file: Path, config: dict[str, Any], magics: Mapping[str, str | None]) -> None:
    """Add magics to a configuration, or remove those that are None, and write the file whole.

    If nothing is left, the file is removed.
    """
    from traitlets.config.manager import recursive_update

    recursive_update(config, {SECTION: {TRAIT: magics}})
    try:
        if not config:
            file.unlink(missing_ok=True)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as new:
            new.write(json.dumps(config, indent=2).encode() + b"\n")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}.") from None


if __name__ == "__main__":
    sys.exit(main())
