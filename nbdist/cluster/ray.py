"""`--launcher ray`: one agent on each node of a Ray cluster that is there, below an actor of Ray's.

The head exchanges pickled messages with the process that speaks with Ray, which Ray calls the
driver of the actors: `ray_driver`.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nbdist.cluster.launcher import KILL_TIMEOUT, AgentProcess, Launched, agent_command
from nbdist.cluster.ray_driver import TOKEN, TOKEN_WANTED, End, Order, actor_name, read_message
from nbdist.cluster.ticket import Ticket
from nbdist.config import WorldConfig
from nbdist.system.processes import MODULE, Child

PLACED_TIMEOUT = 60.0  # seconds for Ray to be imported, and to place all actors

LEAVE_TIMEOUT = 5.0  # seconds for the driver to take its leave of Ray

ARRIVE_TIMEOUT = 180.0
"""Seconds for the agents to come then: on each node Ray starts an interpreter before, which imports
Ray; beside four spinning processes on two cores that took more than 60.
"""


class RayLauncher:
    """`--launcher ray`."""

    def launch(self, wanted: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Let Ray place an actor on each node; raises OSError with what keeps it from that."""
        if importlib.util.find_spec("ray") is None:
            raise OSError(f"Ray is not installed here: {sys.executable} -m pip install nbdist[ray]")
        driver = Driver(folder / "ray.log")
        agents = driver.place(wanted, ticket)
        hosts = [agent.host for agent in agents]
        return Launched(agents, len(agents), hosts, "", ARRIVE_TIMEOUT, close=driver.leave)


class Driver(Child):
    """The process that speaks with Ray, and the thread that hears what it says."""

    def __init__(self, log: Path) -> None:
        command = [sys.executable, *MODULE, "nbdist.cluster.ray_driver"]
        super().__init__("", command, log, stdout=subprocess.PIPE)
        self._agents: Sequence[RayAgent] = ()
        self._listener = threading.Thread(target=self._listen, name="ray", daemon=True)

    def place(self, wanted: WorldConfig, ticket: Ticket) -> Sequence[RayAgent]:
        """Place all actors, and note from then on when they end; OSError, with nothing left."""
        too_long = threading.Timer(PLACED_TIMEOUT, self._process.kill)
        too_long.start()
        try:
            self.tell((wanted, ticket.to_line()))
            said = read_message(self._process.stdout)
        finally:
            too_long.cancel()
        if isinstance(said, list):
            self._agents = [RayAgent(self, at, host, wanted) for at, host in enumerate(said)]
            self._listener.start()
            return self._agents
        self.end(KILL_TIMEOUT)
        lines = self.last_lines()
        self.close()
        if isinstance(said, str):
            raise OSError(TOKEN_WANTED if any(map(TOKEN.search, [said, *lines])) else said)
        told = " ".join(lines[-1:])
        raise OSError(f"Ray did not place the agents within {PLACED_TIMEOUT:.0f} s: {told}")

    def tell(self, message: Order | End) -> None:
        """Send what it is to do."""
        # Where it has ended at once, its last lines say why.
        with suppress(OSError, ValueError):
            assert self._process.stdin is not None
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()

    def end(self, timeout: float) -> None:
        """End the process, and with it all actors; by force after `timeout` seconds."""
        self._end_stdin()
        if not self._ends_in(timeout):
            self._process.kill()
            self._ends_in(KILL_TIMEOUT)

    def leave(self) -> None:
        """End with all that is its own, once all agents have ended."""
        self.end(LEAVE_TIMEOUT)
        self._listener.join(KILL_TIMEOUT)
        self.close()

    def close(self) -> None:
        """Close all, after its end."""
        super().close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _listen(self) -> None:
        while (ended := read_message(self._process.stdout)) is not None:
            number, code, lines = ended
            self._agents[number].note_end(code, lines)
        code = self._process.wait()
        for agent in self._agents:
            agent.note_end(code, [])


class RayAgent(AgentProcess):
    """An agent that is the child of an actor; `host` is the node that Ray chose."""

    def __init__(self, driver: Driver, number: int, host: str, wanted: WorldConfig) -> None:
        self.host = host
        self._number = number
        command = " ".join([*wanted.wrapper, *agent_command(wanted.python, number)])
        self.command = f"ray actor {actor_name(wanted, number)}: {command}"
        self._driver = driver
        self._exit_code: int | None = None
        self._last_lines: list[str] = []
        self._is_over = threading.Event()
        # Its reading end turns readable when the other is closed.
        self._reader, self._writer = os.pipe()

    def fileno(self) -> int:
        return self._reader

    def exit_code(self) -> int | None:
        return self._exit_code

    def last_lines(self) -> list[str]:
        return self._last_lines

    def end(self, timeout: float) -> None:
        """End its stdin at once, its actor by force after `timeout` seconds."""
        self._driver.tell((self._number, False))
        if not self._is_over.wait(timeout):
            self._driver.tell((self._number, True))
            self._is_over.wait(KILL_TIMEOUT)

    def close(self) -> None:
        os.close(self._reader)

    def note_end(self, code: int, lines: list[str]) -> None:
        """Count it as ended; the first word holds."""
        if self._exit_code is None:
            self._exit_code, self._last_lines = code, lines
            self._is_over.set()
            os.close(self._writer)
