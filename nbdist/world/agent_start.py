"""Starts the agent or head that a link connects to, and waits for the agent's first messages.

Runs in the notebook's process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from nbdist import __version__
from nbdist.errors import AgentLost, StartError
from nbdist.wire.messages import Attached, Hello
from nbdist.world.agents import AgentHandle, AgentProcess, AttachedAgent, agent_loss

HELLO_TIMEOUT = 30.0


class AgentStart:
    """The start of a link's agent or head, from its process to its first messages.

    The link's thread calls `launch`, `record_message` and `fail`.  The threads that need the agent
    wait by the other methods.
    """

    def __init__(self, folder: Path, module: str, *, fork_server: bool) -> None:
        """Prepare the start of `module`, whose process will find the link's socket in `folder`."""
        self.agent: AgentHandle | None = None  # set by `launch`
        self._module = module
        self._start_process: Callable[[], AgentHandle] = partial(
            AgentProcess, folder, module, fork_server=fork_server
        )
        self._is_launched = threading.Event()
        self._hello: Future[Hello] = Future()
        self._attached: Future[Attached] = Future()

    def __repr__(self) -> str:
        return f"<AgentStart of {self.agent or self._module}>"

    def use_running(self, agent: AttachedAgent) -> None:
        """Let `launch` use an agent that is running, and start no process."""
        self._start_process = lambda: agent

    def launch(self) -> AgentHandle | None:
        """Start the agent's process; return None if that failed: `wait_for_hello` says why."""
        try:
            self.agent = self._start_process()
        except OSError as error:
            self._hello.set_exception(error)
        finally:
            self._is_launched.set()
        return self.agent

    def record_message(self, message: Hello | Attached) -> None:
        """Record one of the agent's first messages, for which other threads may wait."""
        if isinstance(message, Hello):
            self._hello.set_result(message)
        else:
            self._attached.set_result(message)

    def fail(self, lost: AgentLost) -> None:
        """Raise `lost` in threads that wait for the agent's first messages, as it has ended."""
        for each in (self._hello, self._attached):
            if not each.done():
                each.set_exception(lost)

    @property
    def has_hello(self) -> bool:
        """Whether the agent has sent its first message, so that it can receive messages."""
        return self._hello.done()

    def wait_until_launched(self, timeout: float) -> None:
        """Wait until `launch` has returned, at most `timeout` seconds."""
        self._is_launched.wait(timeout)

    def wait_for_hello(self, tick: float) -> Iterator[None]:
        """Yield every `tick` seconds until the agent has sent its first message.

        Raises StartError if the agent did not start or has another version of nbdist.
        """
        try:
            yield from ticks_until_done(self._hello, HELLO_TIMEOUT, tick)
            hello = self._hello.result()
        except TimeoutError:
            raise self._error(f"did not answer within {HELLO_TIMEOUT:.0f} s") from None
        except AgentLost as lost:
            raise self._error("ended at once") from lost
        except OSError as error:
            raise self._error(str(error)) from None
        if hello.version != __version__:
            raise self._error(f"is nbdist {hello.version}, the notebook {__version__}")

    def wait_for_world(self) -> Attached:
        """Return the description of the world that a running agent sends after its first message.

        Raises AgentLost if the agent has ended or does not send the description in time.
        """
        try:
            return self._attached.result(HELLO_TIMEOUT)
        except TimeoutError:
            assert self.agent is not None
            raise agent_loss(self.agent) from None

    def _error(self, why: str) -> StartError:
        if (agent := self.agent) is None:
            return StartError(None, os.uname().nodename, self._module, why)
        return StartError(None, agent.host, agent.command, why, agent.last_lines())


def ticks_until_done(future: Future[Any], timeout: float, tick: float) -> Iterator[None]:
    """Yield every `tick` seconds until the future is done.

    Raises TimeoutError after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while wait([future], min(tick, deadline - time.monotonic())).not_done:
        if time.monotonic() >= deadline:
            raise TimeoutError
        yield
