"""The connection of a world to its agent.

The connection also sends the agent the data with which another notebook can take the world over.
Runs in the notebook's process, on the thread that made the world.  Any thread may call `request`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace

from nbdist.config import Patience, WorldConfig
from nbdist.errors import AgentLost, WorldNotStarted
from nbdist.values.payload import Payload
from nbdist.wire.messages import (
    HandoverState,
    ReleaseRankValues,
    Reply,
    RequestBody,
    SendInput,
)
from nbdist.wire.work import InputReply, Task
from nbdist.world.agent_link import Link
from nbdist.world.states import NO_INPUT
from nbdist.world.task_run import TaskRun


def handover_state(
    config: WorldConfig, patience: Patience, setup: Mapping[str, Task]
) -> HandoverState:
    """Return the data with which another notebook can take a world over.

    `setup` has the set-up cells by their keys.  The returned config names the launcher, because the
    other notebook may have another default.
    """
    config = replace(config, launcher=config.launcher_name)
    return HandoverState(config, patience, (*setup.items(),))


class AgentConnection:
    """The link to a world's agent, from the agent's start to its end.

    `lost` is the error about an agent that has ended by itself, else None.  Any thread may set
    `kernel_exiting` when this process is about to end.
    """

    def __init__(self) -> None:
        self.link_or_none: Link | None = None  # see `link`, which raises errors instead
        self.lost: AgentLost | None = None
        self.kernel_exiting = threading.Event()
        self._handed_over = HandoverState()

    def __repr__(self) -> str:
        return f"<AgentConnection {self.link_or_none or 'without a link'}>"

    @property
    def link(self) -> Link:
        """The link to the agent; raises WorldNotStarted without a link, ForkedProcess in a fork."""
        if self.link_or_none is None:
            raise WorldNotStarted("This")
        self.link_or_none.check_process()
        return self.link_or_none

    @property
    def is_up(self) -> bool:
        """Whether there is a link to an agent that is neither lost nor closed."""
        return self.link_or_none is not None and self.link_or_none.is_up

    def adopt(self, link: Link) -> None:
        """Use this link from now on; as long as the link is up, new workers start on its agent."""
        self.link_or_none = link

    def detach(self) -> Link | None:
        """Remove and return the link, which stays open; return None if there is no link."""
        link, self.link_or_none = self.link_or_none, None
        return link

    def close(self) -> str:
        """Close the link and end the agent, if there is one.

        Returns a sentence about processes that are left on other machines, "" for none.
        """
        link = self.detach()
        return link.close() if link is not None else ""

    def forget_loss(self) -> None:
        """Set `lost` to None before new workers start; let the next `hand_over` send all data."""
        self.lost, self._handed_over = None, HandoverState()

    def hand_over(self, config: WorldConfig, patience: Patience, setup: Mapping[str, Task]) -> None:
        """Send the agent the data with which another notebook can take the world over.

        `setup` has the set-up cells by their keys.  Does nothing without a link, if the world
        cannot be detached, or if the agent has got the same data before.
        """
        may_be = config.detach or self._handed_over.config.detach
        if self.link_or_none is None or not self.is_up or not may_be:
            return
        state = handover_state(config, patience, setup)
        if state != self._handed_over:
            self._handed_over = state
            self.link_or_none.send(state)

    def request(self, request: RequestBody) -> Future[Reply] | None:
        """Send the agent a request, from any thread; return its reply as a future.

        Returns None without a link, or if the agent has ended.
        """
        link = self.link_or_none
        return link.ask(request) if link is not None and link.is_up else None

    # --- messages about a task --------------------------------------------------------------

    def reply(self, running: TaskRun, answers: Mapping[int, str | None]) -> None:
        """Send each rank its answer to its prompt; None means the end of input (EOF)."""
        for rank, text in answers.items():
            self.link.send(SendInput(rank, InputReply(running.prompts[rank].number, text)))
            running.prompts.answered(rank, time.monotonic())

    def refuse_prompts(self, running: TaskRun) -> None:
        """Answer all open prompts of a task: `input` raises on the ranks, as nobody can type."""
        for rank in running.prompts.ranks:
            number = running.prompts[rank].number
            self.link.send(SendInput(rank, InputReply(number, problem=NO_INPUT)))
            running.prompts.drop(rank, time.monotonic())

    def release_values(self, running: TaskRun) -> None:
        """Let ranks release the shared memory of a task's values, which this process has read."""
        values = ((rank, done.values) for rank, done in running.transcript.done.items())
        lent = (rank for rank, each in values if isinstance(each, Payload) and each.segment)
        self.release_lent_values(running.task, lent)

    def release_lent_values(self, task: Task, ranks: Iterable[int]) -> None:
        """Let ranks release memory that they hold for a task until this message.

        The memory holds values that the ranks have sent to this process.  It can also hold values
        that the ranks have received, if the second task, which binds the values, is not sent
        (`value_transfer.bind_steps`).
        """
        if lent := tuple(ranks):
            self.link.send(ReleaseRankValues(task.id, lent))
