"""Shares an agent and its fork server among the worlds that a process has one after the other.

To import torch and all that a first training step needs takes seconds of a processor; a test
that is not about starting need not wait for that.  Each world has its own workers.
`each_new_worker` acts on the workers that a world's agent starts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from nbdist.errors import AgentLost, StartError
from nbdist.notebook import extension
from nbdist.wire.messages import GetStatus, StopWorld
from nbdist.world import lifecycle
from nbdist.world.agent_link import Link
from nbdist.world.agents import AGENT_MODULE
from nbdist.world.world import World
from tests.waiting import SOON

NewWorld = Callable[..., World]
"""A function with the arguments of `World`; without `log_dir` the world has no log files."""

IDLE_IMPORTS = "NBDIST_IDLE_IMPORTS"


class SharedLink(Link):
    """A link that stays open for the next world when a world closes it."""

    is_taken = False

    def open(self) -> None:
        """Start the agent, at the first call only."""
        if not self._opened:
            super().open()

    def close(self) -> None:
        """End the workers that are left, and make the link available again."""
        if not self.is_taken or os.getpid() != self.pid:
            return
        self.is_taken = self.socket._is_detachable = self.events.signals_all = False
        try:
            self.call(StopWorld(0.0), SOON)
        except (AgentLost, StartError):
            print("the shared agent's last lines:", *self.agent.last_lines(), sep="\n")  # noqa: T201
            super().close()
        self.drop_events()

    def detach(self) -> None:
        """Refuse to detach, because the next test uses the agent."""
        raise AssertionError("a test that detaches a world is to be marked `own_agent`")

    def end(self) -> None:
        """End the agent and close the link."""
        super().close()


class SharedAgent:
    """The agent of this process, which every `World` and `%load_ext` uses while it is free."""

    def __init__(self) -> None:
        self._link: SharedLink | None = None
        self.is_offered = True

    def start(self) -> None:
        """Start the agent if none is up; with idle imports, because many tests use them."""
        if self._link is not None and self._link.is_up:
            return
        self.end()
        before = os.environ.pop(IDLE_IMPORTS, None)
        try:
            self._link = SharedLink()
            self._link.open()
            self._link.call(GetStatus())  # waits, so that no test opens a descriptor for the agent
        finally:
            if before is not None:
                os.environ[IDLE_IMPORTS] = before

    def end(self) -> None:
        """End the agent; `start` can start another."""
        if self._link is not None:
            self._link.end()
            self._link = None

    @property
    def is_free(self) -> bool:
        """Whether the agent is up and no world uses it."""
        return self._link is not None and self._link.is_up and not self._link.is_taken

    @property
    def has_ended(self) -> bool:
        """Whether the agent was started and has ended."""
        return self._link is not None and not self._link.is_up

    def link(self, module: str = AGENT_MODULE, **options: Any) -> Link:
        """Return the shared link, or make a new `Link` if the shared one is not available."""
        if module != AGENT_MODULE or not self.is_offered or not self.is_free:
            return Link(module, **options)
        assert self._link is not None
        self._link.is_taken = True
        return self._link


def share_agent() -> SharedAgent:
    """Make all worlds of this process use one agent."""
    shared = SharedAgent()
    for module in (lifecycle, extension):
        module.Link = shared.link  # type: ignore[attr-defined]
    return shared


def new_world(n: int | str, *, log_dir: str = "", **options: Any) -> World:
    """Make a world without starting it."""
    return World(n, log_dir=log_dir, **options)


@contextmanager
def each_new_worker(world: World, do: Callable[[psutil.Process], object]) -> Iterator[None]:
    """Do something to every worker process that the world's agent starts in the block."""
    with each_new_child(psutil.Process(world.pids[0]).ppid(), do):
        yield


@contextmanager
def each_new_child(agent: int, do: Callable[[psutil.Process], object]) -> Iterator[None]:
    """Do something to every child that the process `agent` gets in the block."""
    # On a busy machine a look at all processes would take longer than a worker's start.
    children = Path(f"/proc/{agent}/task/{agent}/children")
    known, over = {*children.read_text().split()}, threading.Event()

    def watch() -> None:
        with suppress(PermissionError):  # else the thread may look too late
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -15)
        while not over.wait(0.002):
            for child in {*children.read_text().split()} - known:
                known.add(child)
                do(psutil.Process(int(child)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
