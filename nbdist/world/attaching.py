"""A world that another notebook has started, taken over: its workers, and what runs on them.

On the notebook's thread, or that of a script.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from nbdist import __version__
from nbdist.config import WorldConfig
from nbdist.errors import UsageError
from nbdist.wire.at_door import Admitted, Attach, Refused
from nbdist.wire.frames import BadFrame
from nbdist.wire.runtime_folder import JoinedFolder
from nbdist.world.agents import Asking, AttachedAgent, Found, to_attach, worlds
from nbdist.world.link import Link
from nbdist.world.session import Session
from nbdist.world.world import World

ADMIT_TIMEOUT = 30.0
"""Seconds; longer than an agent has a notebook wait while its workers start or heal."""


def attach(name: str | None = None) -> World:
    """Take over a world that was started with `detach=True` and whose process has gone.

    By its name, its pool's, or the number of its agent's process; without, the only one that
    nobody has.  What it runs goes on: `world.catch_up()` shows what was missed, and waits.

    Raises:
        UsageError: there is no such world, or somebody has it.
    """
    return take_over(to_attach(worlds(), name), sys.modules["__main__"].__dict__)


def take_over(found: Found, namespace: dict[str, Any]) -> World:
    """Take this one over, with its names in this namespace; raises UsageError as `attach` does."""
    link, agent = _link_to(found)
    try:
        there = link.take_over(agent)
        session = Session(WorldConfig(**there.memory.options), there)
        session.attach(link, there, namespace)
    except BaseException:
        link.detach()
        raise
    return World.of(session)


def _link_to(found: Found) -> tuple[Link, AttachedAgent]:
    """Ask at the door for the world, with a socket bound that its agent can connect to."""
    try:
        folder = JoinedFolder(found.folder)
        link = Link(folder=folder)
        try:
            return link, _admitted(found, folder.socket)
        except BaseException:
            link.detach()
            raise
    except (OSError, BadFrame) as error:
        raise UsageError(f"World {found.name} cannot be attached to: {error}.") from None


def _admitted(found: Found, socket: str) -> AttachedAgent:
    asking = Asking(found.folder, ADMIT_TIMEOUT)
    try:
        answer = asking.ask(Attach(__version__, os.getpid(), socket))
        if not isinstance(answer, Admitted):
            why = answer.why if isinstance(answer, Refused) else "its agent says something else"
            raise UsageError(f"World {found.name} cannot be attached to: {why}.")
        return AttachedAgent(found, asking, answer)
    except BaseException:
        asking.close()
        raise
