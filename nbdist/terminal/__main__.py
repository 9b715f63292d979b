"""The command `nbdist`: parses its arguments, and calls the file that does the work.

`python -m nbdist.terminal` does the same, also if the command is not on the path.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from nbdist import __version__
from nbdist.errors import UsageError
from nbdist.terminal.doctor import doctor

REMOVED = {
    "disable": "delete what nbdist has in ipython_config.json and ipython_config.py, in the folder "
    "that `ipython profile locate` prints.",
    "enable": 'add the line `c.InteractiveShellApp.extensions.append("nbdist")` to '
    "ipython_config.py, in the folder that `ipython profile create` makes and "
    "`ipython profile locate` prints.",
    "k8s": 'copy the Job of the section "Kubernetes" in docs/machines.md; '
    "its pods run `nbdist join`.",
}
"""Commands that earlier versions had, each with a text on what to do in its place."""

REFRESH = 2.0
"""Seconds after which `nbdist status --follow` prints the worlds again, by default."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; `words` are by default the command line's."""
    words = sys.argv[1:] if words is None else words
    if words and (instead := REMOVED.get(words[0])):
        sys.stderr.write(f"nbdist: `nbdist {words[0]}` was removed: {instead}\n")
        return 2
    parser = _parser()
    options, further = parser.parse_known_args(words)
    options.further = further
    if further and options.command != "tutorial":
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    if options.command is None:
        parser.print_help()
        return 0
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except UsageError as error:
        sys.stderr.write(f"nbdist: {error}\n")
        return 2
    except BrokenPipeError:  # the reader has closed the pipe, as in `nbdist status -f | head`
        # Python flushes stdout at exit, and the pipe would raise again: write to /dev/null instead.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _join(options: argparse.Namespace) -> int:
    # Imported here, because `nbdist doctor` must run even if ZeroMQ is missing, which the imported
    # module needs.
    from nbdist.cluster.ticket import join

    return join(options.place, options.key_file, options.index)


def _worlds(options: argparse.Namespace) -> int:
    # Imported here, because `nbdist doctor` must run even if packages are missing that the imported
    # module needs.
    from nbdist.terminal import worlds

    match options.command:
        case "kill":
            return worlds.kill_world(options.name)
        case "ps":
            return worlds.show_worlds()
        case "status":
            return worlds.show_status(options.follow)
    return worlds.show_status(options.follow or REFRESH)  # `nbdist top`


def _mcp(options: argparse.Namespace) -> int:
    from nbdist.terminal.mcp import serve

    return serve(allow_run=options.allow_run)


def _tutorial(options: argparse.Namespace) -> int:
    from nbdist.terminal.tutorial import tutorial

    return tutorial(options.further)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("nbdist", description="nbdist outside of notebooks.")
    parser.add_argument("--version", action="version", version=f"nbdist {__version__}")
    commands = parser.add_subparsers(dest="command")

    def add(
        name: str,
        run: Callable[[argparse.Namespace], int],
        what: str,
        aliases: Sequence[str] = (),
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=what, aliases=aliases)
        command.set_defaults(run=run)
        return command

    status_help = "what each worker does now, also while a cell runs; `top` is `status --follow`"
    status = add("status", _worlds, status_help, aliases=("top",))
    follow_help = f"refresh every SECONDS ({REFRESH:g}; at least 0.5), until Ctrl-C"
    names = ("-f", "-d", "--follow")  # `-d` is the option of top(1) for the seconds
    status.add_argument(
        *names, nargs="?", const=REFRESH, type=_seconds, metavar="SECONDS", help=follow_help
    )
    examine = add("doctor", lambda options: doctor(options.workers), "what will not work here")
    workers_help = "as in the notebook: a number, auto (as many as there are GPUs), gpu or cpu"
    examine.add_argument("-n", dest="workers", metavar="N", default="auto", help=workers_help)
    tutorial = add("tutorial", _tutorial, "copy the quickstart into this folder and open it")
    tutorial.usage = "nbdist tutorial [-h] [LAB_OPTION ...]"
    tutorial.description = "Copy the quickstart into this folder, and open the copy in JupyterLab."
    tutorial.epilog = "LAB_OPTION is an option of `jupyter lab`, such as --no-browser."
    add("ps", _worlds, "list all worlds, including detached ones")
    kill = add("kill", _worlds, "end a world and everything that belongs to it")
    kill.add_argument("name", help="its --name, pool or process, as shown by ps")
    mcp_help = "answer an assistant's questions on your worlds (Model Context Protocol, stdio)"
    mcp = add("mcp", _mcp, mcp_help)
    run_help = "it may also run cells, interrupt, restart ranks and save snapshots"
    mcp.add_argument("--allow-run", action="store_true", help=run_help)
    join = add("join", _join, "join a world that is waiting for machines")
    key_help = "the world's key, - for stdin; by default that in the user's state folder"
    join.add_argument("--key-file", metavar="FILE", help=key_help)
    # Not named `--node`: torchrun can start `nbdist join`, and its parser would take `--node` for
    # an abbreviation of its own options.
    index_help = "the machine's number, for the order of ranks"
    join.add_argument("--index", metavar="N", type=int, help=index_help)
    join.add_argument("place", metavar="HOST:PORT", help="as shown by the notebook")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.5 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("it is 0.5 to 3600 seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
