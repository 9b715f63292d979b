"""An agent like any other, but that its ranks meet in a store of its own, as on many machines.

Run as `nbdist.agent` is; the ranks go through the socket and the store that several machines have.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from nbdist.agent.agent import Agent
from nbdist.agent.notebook_link import run
from nbdist.agent.processes import Children, Forker
from nbdist.agent.rendezvous import Rendezvous
from nbdist.agent.startup import go_below_guard, start_fork_server
from nbdist.wire.store import Answer, HostedStore, Operation

DELAY = float(os.environ.get("NBDIST_TEST_STORE_DELAY", "0"))
"""Seconds that a question takes there, and an answer back."""


class World(HostedStore):
    """The store of one world after the other; counts what it is asked."""

    asked = 0

    async def ask(self, operation: Operation) -> Answer:
        self.asked += 1
        await asyncio.sleep(DELAY)
        try:
            return await super().ask(operation)
        finally:
            await asyncio.sleep(DELAY)


async def serve(runtime: Path, notebook_pid: int, children: Children, forker: Forker) -> None:
    store = World()
    begin_world = Rendezvous.begin_world

    def begin_both(self: Rendezvous, *what: Any) -> None:
        store.begin_world()
        sys.stderr.write(f"{store.asked} operations\n")
        begin_world(self, *what)

    Rendezvous.begin_world = begin_both  # type: ignore[method-assign]
    await Agent(runtime, notebook_pid, children, forker, store.ask).serve()


def main() -> None:
    runtime, notebook_pid = Path(sys.argv[1]), int(sys.argv[2])
    go_below_guard(runtime, notebook_pid)
    started = start_fork_server(runtime)
    children = Children()
    forker = Forker(runtime, children, started)
    run(runtime, lambda: serve(runtime, notebook_pid, children, forker))


main()
