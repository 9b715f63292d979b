"""Starts, finds and queries the agents and heads that serve worlds, and attaches to them.

Runs in the notebook's process and in the `nbdist` command.  A `Link` uses an `AgentProcess` that
it has started, or an `AttachedAgent` that another process has started.  Both stand for this
machine's agent, or for the head of several machines.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from nbdist import __version__, plugins
from nbdist.config import DEFAULT_POOL, LOCAL
from nbdist.errors import AgentLost, UsageError
from nbdist.system import folders
from nbdist.system.limits import OomKills
from nbdist.system.processes import MODULE_OPTIONS, Child, children_of, last_lines_of, safe_environ
from nbdist.wire import queries
from nbdist.wire.frames import BadFrame
from nbdist.wire.queries import QUERY_SOCKET, WorldInfo
from nbdist.wire.spec import difference, versions_here
from nbdist.words import one_line

NEEDED = 20  # open files: a link keeps 16 open, and other files are open for short times


def require_open_files() -> None:
    """Raise UsageError if this process cannot open `NEEDED` more files."""
    with ExitStack() as opened:
        for number in range(NEEDED):
            try:
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            except OSError as error:
                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                raise UsageError(
                    "nbdist cannot be used here, neither its magics nor workers: this process can "
                    f"open {number} more files, and {NEEDED} are needed ({error.strerror}; "
                    f"`ulimit -n` is {limit}). Start the notebook after `ulimit -n 1024`."
                ) from None


AGENT_MODULE, HEAD_MODULE = "nbdist.agent", "nbdist.cluster"
"""The modules that a link starts: this machine's agent, or the head of several machines."""


def launcher_names() -> list[str]:
    """Return the values that `--launcher` accepts, sorted."""
    return sorted({LOCAL, *plugins.entry_points(plugins.LAUNCHERS_GROUP)})


def module_of(launcher: str) -> str:
    """Return the module to start for a launcher: the agent's for "local", the head's for others.

    Raises UsageError if there is no such launcher, or if the head's module is not installed.
    """
    names = launcher_names()
    if launcher not in names:
        raise UsageError(f"`--launcher {launcher}`: available: {', '.join(names)}.")
    if launcher == LOCAL:
        return AGENT_MODULE
    if find_spec(HEAD_MODULE) is None:
        raise UsageError(f"`--launcher {launcher}`: {HEAD_MODULE} is not installed here.")
    return HEAD_MODULE


QUERY_TIMEOUT = 15.0  # seconds; a world on a busy machine must not be missing from a list
ADMIT_TIMEOUT = 30.0  # seconds; must exceed the agent's own wait for workers that start or heal
MAX_LISTED_WORLDS = 6  # worlds that an error names before it only counts the others
REPLY_READ_SIZE = 1 << 18


@dataclass(frozen=True)
class RunningWorld:
    """A running world: its runtime folder, the process id of its agent, and its description."""

    folder: Path
    agent: int
    info: WorldInfo

    @property
    def name(self) -> str:
        """The world's name for messages, with its pool unless that is the default pool."""
        pool = "" if self.info.pool == DEFAULT_POOL else f" (pool {self.info.pool})"
        return f"`{self.info.name}`{pool}"

    @property
    def is_detached(self) -> bool:
        """Whether no notebook uses the world."""
        return not self.info.notebook

    def refusal(self, why: object) -> UsageError:
        """Return the error that says why this world cannot be attached to."""
        return UsageError(f"World {self.name} cannot be attached to: {why}.")

    def is_called(self, name: str) -> bool:
        """Return True if `name` is the world's name, its pool, or its agent's process id."""
        return name in (self.info.name, self.info.pool, str(self.agent))


class Asking:
    """A question to a world, which the constructor sends on a new connection to its query socket.

    `process` is the id of the process at the other end.  The constructor raises OSError if the
    question cannot be sent.
    """

    def __init__(
        self, folder: Path, question: queries.QueryMessage, timeout: float = QUERY_TIMEOUT
    ) -> None:
        self._socket = queries.connect_to(folder / QUERY_SOCKET, timeout)
        self.process = queries.peer_process(self._socket)
        try:
            self._socket.sendall(queries.to_line(question))
        except OSError:
            self.close()
            raise

    def answer(self, timeout: float) -> queries.QueryMessage:
        """Return the world's answer; raise BadFrame if the answer is invalid.

        Raises OSError if no answer comes in time, or if the world closes the connection.
        """
        deadline, line = time.monotonic() + timeout, bytearray()
        while not line.endswith(b"\n"):
            self._socket.settimeout(max(0.0, deadline - time.monotonic()))
            data = self._socket.recv(REPLY_READ_SIZE)
            if not data or len(line) > queries.MAX_REPLY_BYTES:
                raise ConnectionResetError("it has closed the connection")
            line += data
        return queries.from_line(bytes(line))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def ask_all(
    question: queries.Describe | queries.DescribeRanks, timeout: float
) -> list[RunningWorld]:
    """Ask all worlds of this user on this machine; return those that answer within `timeout`."""
    running_worlds = []
    with ExitStack() as opened:
        calls: dict[Path, Asking] = {}
        for folder in runtime_folders():
            with suppress(OSError):  # the world has ended
                calls[folder] = opened.enter_context(closing(Asking(folder, question, timeout)))
        deadline = time.monotonic() + timeout
        for folder, asking in calls.items():
            with suppress(OSError, BadFrame):  # no answer in time, or an invalid one
                info = asking.answer(deadline - time.monotonic())
                if isinstance(info, WorldInfo):
                    running_worlds.append(RunningWorld(folder, asking.process, info))
    return running_worlds


def worlds(timeout: float = QUERY_TIMEOUT) -> list[RunningWorld]:
    """Return this user's worlds on this machine, sorted by name.

    Worlds without workers, and worlds that do not answer in time, are left out.
    """
    answering = ask_all(queries.Describe(), timeout)
    with_workers = [each for each in answering if each.info.name and each.info.workers]
    return sorted(with_workers, key=lambda each: (each.info.name, each.agent))


def find_by_name(
    choices: Sequence[RunningWorld], name: str, command: str, *, detached_first: bool = False
) -> RunningWorld:
    """Return the only world in `choices` that is called `name`; UsageError if none or several are.

    With `detached_first`, worlds that a notebook uses are left out if a detached world has this
    name.  `command` is for the error message.
    """
    chosen = [each for each in choices if each.is_called(name)]
    if detached_first:
        chosen = [each for each in chosen if each.is_detached] or chosen
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        problem = f"{len(chosen)} worlds have this name, {names_text(chosen)}. "
        problem += f"Use the number of its process: `{command} {chosen[0].agent}`"
    else:
        available = (
            f"there {'is' if len(choices) == 1 else 'are'} {names_text(choices)}"
            if choices
            else "none"
        )
        problem = f"none of your worlds on this machine has this name ({available}). "
        problem += "`nbdist ps` in a terminal lists them"
    raise UsageError(f"`{command} {one_line(name, 60)}`: {problem}.")


def find_attachable(choices: Sequence[RunningWorld], name: str | None) -> RunningWorld:
    """Return the world that is called `name`; if `name` is None, the only detached world.

    Raises UsageError if there is no such world, if there are several, or if this process cannot
    take the world over.
    """
    free, command = [each for each in choices if each.is_detached], "%dist_attach"
    if name is not None:
        free, command = (
            [find_by_name(choices, name, command, detached_first=True)],
            f"{command} {name}",
        )
    if not free:
        problem = "none of your worlds on this machine is without a notebook"
    elif len(free) > 1:
        problem = f"there are {names_text(free)}. `%dist_attach NAME` takes one"
    else:
        problem = _attach_problem(free[0])
    if problem:
        raise UsageError(f"`{command}`: {problem}.")
    return free[0]


def _attach_problem(candidate: RunningWorld) -> str:
    """Return why this process cannot take the world over, and what helps; "" if it can."""
    info, world = candidate.info, f"world {candidate.name}"
    if info.version != __version__:
        kill = f"`nbdist kill {info.name}` in a terminal ends it"
        return f"{world} runs nbdist {info.version}, and this is {__version__}. {kill}"
    if differs := difference(info.versions, versions_here()):
        remote, local = f"{differs.what} {differs.there}", f"this notebook {differs.here}"
        remedy = "Attach from an environment like the world's"
        return f"{world} runs {remote}, and {local}: {differs.why}. {remedy}"
    if info.notebook == os.getpid():
        return f"{world} cannot be attached to: this notebook uses it. Its cells run there"
    if info.notebook:
        whose = f"the notebook of process {info.notebook} still uses it"
        remedy = "`%unload_ext nbdist` there releases it" if info.detach else "It ends with that"
        return f"{world} cannot be attached to: {whose}. {remedy}"
    return ""


def names_text(choices: Sequence[RunningWorld]) -> str:
    """Write `exp (process 9), run2 (process 11) and 3 more`: only the first worlds are named."""
    more = (
        f" and {len(choices) - MAX_LISTED_WORLDS} more" if len(choices) > MAX_LISTED_WORLDS else ""
    )
    return (
        ", ".join(f"{each.name} (process {each.agent})" for each in choices[:MAX_LISTED_WORLDS])
        + more
    )


def runtime_folders() -> list[Path]:
    """Return the runtime folders of this user's worlds, sorted.

    Folders that another user could have made are left out.
    """
    private_folders = set()
    for folder in _possible_folders():
        with suppress(OSError):
            folders.check_private(folder)
            if (folder / QUERY_SOCKET).is_socket():
                private_folders.add(folder)
    return sorted(private_folders)


def _possible_folders() -> Iterator[Path]:
    for place in (Path(f"/run/user/{os.geteuid()}"), *folders.places()):
        with suppress(OSError):
            yield from place.glob(f"{folders.RUNTIME_FOLDER_PREFIX}*")
    # A notebook that was started with another TMPDIR has runtime folders in that folder.  The
    # command lines of its agents name these runtime folders.
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.stat().st_uid == os.geteuid():
                words = (process / "cmdline").read_bytes().split(b"\0")
                for agent in {AGENT_MODULE.encode(), HEAD_MODULE.encode()} & {*words[:-2]}:
                    yield Path(os.fsdecode(words[words.index(agent) + 1]))


class AttachedAgent:
    """An agent or head that another process has started, and that serves this process now."""

    def __init__(self, world: RunningWorld, socket: str) -> None:
        """Ask the world to connect to this process's `socket`; raise UsageError if it refuses."""
        self.host, self.command = world.info.host, f"the agent of world {world.name}"
        try:
            with ExitStack() as opened:
                asking = Asking(world.folder, queries.Attach(__version__, os.getpid(), socket))
                opened.callback(asking.close)
                answer = asking.answer(ADMIT_TIMEOUT)
                if not isinstance(answer, queries.Accepted):
                    raise world.refusal(getattr(answer, "why", "its agent says something else"))
                log = world.folder / "agent.log"  # opened now: it is removed when the world ends
                self._log = opened.enter_context(open(log if log.exists() else os.devnull, "rb"))
                self._guard = os.pidfd_open(answer.guard)  # the guard exits after the agent
                opened.callback(os.close, self._guard)
                self._agent = os.pidfd_open(answer.agent)
                opened.callback(os.close, self._agent)
                self._opened = opened.pop_all()
        except (OSError, BadFrame) as error:
            raise world.refusal(error) from None
        self.pid = answer.agent

    def __repr__(self) -> str:
        return f"<AttachedAgent {self.pid}>"

    def fileno(self) -> int:
        return self._guard

    def exit_code(self) -> int | None:
        return None  # only a parent process can read the exit code

    def last_lines(self) -> list[str]:
        return last_lines_of(self._log)

    def end(self, timeout: float) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL, 0):
            if select.select([self._guard], [], [], timeout)[0]:
                return
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._agent, number)

    def close(self) -> None:
        self._opened.close()


class AgentProcess(Child):
    """The process of an agent or head that this process starts.

    The agent or head connects to the socket in the folder `runtime`, and notices by its closed
    stdin that this process has ended.
    """

    def __init__(
        self, runtime: Path, module: str = AGENT_MODULE, *, fork_server: bool = True
    ) -> None:
        command = [sys.executable, *MODULE_OPTIONS, module, str(runtime), str(os.getpid())]
        if not fork_server:
            command.append("--no-fork")
        folder = folders.current_folder()  # torch cannot be imported in a folder that was removed
        environ = safe_environ(os.environ, folder)
        log = runtime / "agent.log"
        super().__init__(socket.gethostname(), command, log, environ, folder=folder)
        self._oom_kills = OomKills(self.pid)

    def last_lines(self) -> list[str]:
        """Return the log's last lines, and a line if Linux killed the agent to free memory."""
        return [*super().last_lines(), *self._oom_kills.text(self.exit_code() or 0).splitlines()]

    def end(self, timeout: float) -> None:
        """Close stdin, so that the agent exits; after `timeout` seconds kill the agent.

        If the guard does not exit after that, kill the guard.  The descriptor that `fileno` returns
        stays open.
        """
        self._close_stdin()
        if self._exits_within(timeout):
            return
        # `self.pid` is the guard, whose child is the agent.  The guard ends all processes that a
        # killed agent leaves.
        for agent in children_of(self.pid):
            with suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
        if not self._exits_within(timeout):
            self._process.kill()
            self._exits_within(timeout)


AgentHandle = AgentProcess | AttachedAgent
"""The process that serves a world: this machine's agent, or the head of several machines."""


def agent_loss(agent: AgentHandle) -> AgentLost:
    """Return the error about an agent that has ended or does not answer, with its last line."""
    return AgentLost(agent.host, agent.exit_code(), "".join(agent.last_lines()[-1:]))
