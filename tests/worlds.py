"""Worlds whose workers are forked by one agent and fork server for all tests of a process.

To import torch and all that a first training step needs takes seconds of a processor; a test
that is not about starting need not wait for that.  The workers are its own.
"""

from __future__ import annotations

from collections.abc import Callable

from nbdist.wire.messages import Received
from nbdist.world.link import Link
from nbdist.world.world import World

NewWorld = Callable[..., World]
"""Takes what `World` takes; without log files where nothing else is said."""


class LastingLink(Link):
    """A link that worlds which are shut down leave open for the next one."""

    is_taken = False

    def close(self) -> None:
        """Give it back; the world that had it has ended its workers."""
        self.is_taken = False

    def end(self) -> None:
        """End the agent too."""
        super().close()

    def new_world(self, n: int | str, *, log_dir: str = "", **arguments: object) -> World:
        """A world like any other, not started yet."""
        assert not self.is_taken, "there is a world that has not been shut down"
        assert self.is_up, "a test has ended the agent that others share: it has to have its own"
        while self.arrived:  # of the world before
            if isinstance(self.arrived.popleft(), Received):
                self.received()
        world = World(n, log_dir=log_dir, **arguments)
        world.session.adopt(self)
        self.is_taken = True
        return world


def start_lasting_link() -> LastingLink:
    """An agent that any number of worlds can have one after the other."""
    link = LastingLink()
    link.open()
    return link
