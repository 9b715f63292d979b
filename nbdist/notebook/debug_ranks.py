"""Starts and ends the debuggers of all ranks, and handles the messages that they send.

Runs in the notebook's process, on the event loop of the kernel's control thread, except for
`_receive_soon`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from nbdist.notebook.debug_protocol import CLIENT, Message, is_library
from nbdist.notebook.debug_session import REQUEST_TIMEOUT, Numbers, RankSession, SessionEnded
from nbdist.notebook.debug_view import ShownRank
from nbdist.wire.messages import CloseDebuggers, FromDebugger, OpenDebugger

if TYPE_CHECKING:
    from nbdist.world.agent_link import Link

log = logging.getLogger("nbdist.notebook")

ATTACH_TIMEOUT = 30.0  # seconds for ranks to start their debuggers, before a cell runs without them

OUTER_MODULES = (
    "nbdist",
    "IPython",
    "ipykernel",
    "tornado",
    "asyncio",
    "traitlets",
    "zmq",
    "jupyter_client",
    "threading",
)
"""Modules around a rank's cell, in which the debugger shows no frames and does not stop."""

WorldLinks = Callable[[], "Iterable[tuple[Link, str, Mapping[int, int]]]"]
"""A function that yields the links of all running worlds.

Each link is in a tuple with a title for its ranks, such as "rank", and with the process ids of its
ranks, by rank."""


class DebuggedRanks:
    """The sessions of the debuggers of all ranks; a rank has at most one session."""

    def __init__(
        self, links: WorldLinks, publish_event: Callable[[Message], None], *, just_my_code: bool
    ) -> None:
        self._links, self._just_my_code = links, just_my_code
        self.breakpoints: dict[str, Message] = {}  # arguments of `setBreakpoints`, by path
        self.exceptions: Message | None = None  # arguments of `setExceptionBreakpoints`
        self.by_number: dict[int, RankSession] = {}
        self._next_number = itertools.count(1)
        self.numbers = Numbers()
        self.shown = ShownRank(self.by_number, self.numbers, publish_event)
        self._checks: set[asyncio.Task[None]] = set()  # running calls of `_check_step`

    def __repr__(self) -> str:
        return f"<DebuggedRanks {[*self.by_number.values()]}>"

    async def attach(self, link: Link, ranks: Collection[int]) -> list[tuple[int, str]]:
        """Attach to those of `ranks` that are not attached yet, and wait until that is done.

        `link` is the link of the ranks' world.  Attaching to a rank can fail.  Returns pairs of a
        rank and a text about breakpoints at which the rank cannot stop.
        """
        self.shown.last_rank = None
        attaching = self.start_attaching(link, ranks)
        if tasks := [each.attaching for each in attaching if each.attaching is not None]:
            # Use `wait`: if Stop cancels this coroutine, `gather` would also cancel the tasks.  The
            # next cell would then find ranks that seem attached but lack the breakpoints.
            await asyncio.wait(tasks)
        if self.exceptions is not None and self.exceptions.get("filters"):
            # Send the exception breakpoints again: a rank forgets them if its collectives are
            # aborted (`RankDebugger.record_abort`).
            await self._request_all("setExceptionBreakpoints", self.exceptions)
        problems = [
            (each.rank, f"cannot stop at breakpoints: {each.ended or 'the debugger has ended'}")
            for each in attaching
            if each.ended is not None and each.number in self.by_number
        ]
        for each in self.by_number.values():
            if each.link is link and each.rank in ranks:
                problems += [(each.rank, text) for text in each.pop_refused()]
        return problems

    def start_attaching_all(self) -> None:
        """Begin to attach to the ranks of all running worlds."""
        for link, _, pids in self._links():
            self.start_attaching(link, {*pids})

    def start_attaching(self, link: Link, ranks: Collection[int]) -> list[RankSession]:
        """Begin to attach to ranks of a world; return the sessions that are still attaching."""
        link.on_debugger = partial(self._receive_soon, asyncio.get_running_loop(), link)
        title, pids = next(((t, p) for each, t, p in self._links() if each is link), ("rank", {}))
        for session in [*self.by_number.values()]:
            is_current = session.link is not link or pids.get(session.rank) == session.pid
            if session.ended is not None or not is_current:
                self._drop(session, "")
        attached = {each.rank for each in self.by_number.values() if each.link is link}
        for rank in sorted({*ranks} - attached):
            number = next(self._next_number)
            session = RankSession(link, rank, pids.get(rank, 0), number, f"{title} {rank}")
            self.by_number[number] = session
            for arguments in self.breakpoints.values():
                session.add_unsent("setBreakpoints", arguments)
            if self.exceptions is not None:
                session.add_unsent("setExceptionBreakpoints", self.exceptions)
            session.attaching = asyncio.create_task(self._attach(session))
        sessions = (each for each in self.by_number.values() if each.attaching is not None)
        return [each for each in sessions if each.link is link and each.rank in ranks]

    async def _attach(self, session: RankSession) -> None:
        """Start the debugger of a session's rank, and send it the breakpoints."""
        session.link.send(OpenDebugger(session.rank, session.number))
        ask = partial(session.request, timeout=ATTACH_TIMEOUT)
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT):
                await ask("initialize", CLIENT)
                await ask("attach", self._attach_arguments())
                await session.send_unsent(ATTACH_TIMEOUT)
                await ask("configurationDone", {})
                # The front end may have set more breakpoints during the last request.
                await session.send_unsent(ATTACH_TIMEOUT)
        except TimeoutError:
            session.end(f"no answer within {ATTACH_TIMEOUT:.0f} s")
            session.link.send(CloseDebuggers((session.rank,)))
        except SessionEnded as ended:
            log.debug("%s is not debugged: %s", session.title, ended)
        finally:
            session.attaching = None

    def _attach_arguments(self) -> Message:
        return {
            "justMyCode": self._just_my_code,
            "debugOptions": [] if self._just_my_code else ["DebugStdLib"],
            "rules": [{"module": module, "include": False} for module in OUTER_MODULES],
            # nbdist's and torch's own threads go on while a rank stands at a breakpoint.
            "stopAllThreadsOnSuspend": False,
        }

    async def set_breakpoints(self, arguments: Message) -> None:
        """Set the breakpoints of one file on all ranks; ranks that attach later get them too.

        `arguments` are those of a `setBreakpoints` request.
        """
        path = (arguments.get("source") or {}).get("path", "")
        if arguments.get("breakpoints"):
            self.breakpoints[path] = arguments
        else:
            self.breakpoints.pop(path, None)
        await self._request_all("setBreakpoints", arguments)

    async def set_exceptions(self, arguments: Message) -> None:
        """Set the exceptions at which all ranks stop; ranks that attach later get them too.

        `arguments` are those of a `setExceptionBreakpoints` request.
        """
        self.exceptions = arguments
        await self._request_all("setExceptionBreakpoints", arguments)

    async def _request_all(self, command: str, arguments: Message) -> None:
        """Send a request to all attached ranks, and wait for their responses; ignore errors.

        A rank that is still attaching gets the request later, but before the next cell.
        """
        sessions = [*self.by_number.values()]
        for each in sessions:
            if each.attaching is not None:
                each.add_unsent(command, arguments)
        requests = [each.request(command, arguments) for each in sessions if each.attaching is None]
        await asyncio.gather(*requests, return_exceptions=True)

    async def move(self, session: RankSession, command: str, arguments: Message) -> Message:
        """Let all stopped ranks make a step or go on; after `%dist_debug --alone` only `session`.

        `command` is "next", "stepIn", "stepOut" or "continue", and `session` is the session of the
        rank that the front end's request is about.  Returns the response of the first rank that has
        answered; raises SessionEnded if no rank answers.
        """
        stopped = [each for each in self.by_number.values() if each.stopped]
        together = [] if self.shown.is_alone else stopped
        moved = [session] if session not in together else together
        requests = []
        for each in moved:
            threads = [arguments["threadId"]] if each is session else [*each.stopped][:1]
            if command == "continue":
                threads = [*each.stopped] or threads
            for thread in threads:
                # Do not wait for the rank's event `continued`: the front end's next request may
                # arrive before that event.
                each.stopped.pop(thread, None)
                requests.append(each.request(command, {**arguments, "threadId": thread}))
        responses = await asyncio.gather(*requests, return_exceptions=True)
        first = next((each for each in responses if isinstance(each, dict)), None)
        if first is None:
            raise SessionEnded
        return first

    async def detach_all(self) -> None:
        """End the debuggers of all ranks, and forget all breakpoints."""
        self.breakpoints, self.exceptions = {}, None
        self.shown.chosen_rank, self.shown.is_alone = None, False
        for each in self.by_number.values():
            if each.attaching is not None:
                each.attaching.cancel()
        for link in {each.link for each in self.by_number.values()}:
            ranks = tuple(each.rank for each in self.by_number.values() if each.link is link)
            if link.is_up:
                link.send(CloseDebuggers(ranks))
        ends = [each.has_ended.wait() for each in self.by_number.values() if each.link.is_up]
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*ends), REQUEST_TIMEOUT)
        finally:  # also if Stop cancels the wait
            for link in {each.link for each in self.by_number.values()}:
                link.on_debugger = None
            for session in [*self.by_number.values()]:
                self._drop(session, "the debugger was switched off")

    def _drop(self, session: RankSession, problem: str) -> None:
        session.end((session.ended and str(session.ended)) or problem)
        self.by_number.pop(session.number, None)
        self.shown.hide(session)
        self.numbers.forget(session, with_threads=True)

    # --- messages of ranks ---------------------------------------------------------------------

    def _receive_soon(
        self, loop: asyncio.AbstractEventLoop, link: Link, message: FromDebugger | None
    ) -> None:
        """Have the event loop handle a debugger's message; called on the link's thread.

        The message None says that the agent has ended.
        """
        with suppress(RuntimeError):  # the loop is closed: the kernel exits
            loop.call_soon_threadsafe(self._receive, link, message)

    def _receive(self, link: Link, message: FromDebugger | None) -> None:
        if message is None:  # the agent has ended
            for each in [*self.by_number.values()]:
                if each.link is link:
                    self._drop(each, "its workers have ended")
            return
        if (session := self.by_number.get(message.session)) is None:
            return
        if not message.text:
            session.end(message.problem)
            self.shown.hide(session)
            return
        content = json.loads(message.text)
        match content:
            case {"type": "response"}:
                session.resolve(content)
            case {"event": "stopped", "body": {"threadId": int(thread)} as body}:
                session.stopped[thread] = body
                if body.get("reason") == "step":
                    task = asyncio.create_task(self._check_step(session, thread))
                    self._checks.add(task)
                    task.add_done_callback(self._checks.discard)
                else:
                    self.shown.show_stopped(session)
            case {"event": "continued", "body": {"threadId": int(thread)}}:
                session.stopped.pop(thread, None)
                self.numbers.forget(session)
                self.shown.hide(session, thread)

    async def _check_step(self, session: RankSession, thread: int) -> None:
        """Show a rank that has stopped after a step; let it go on if the step has left the cell.

        After a step out of the last line of a cell, debugpy stops in the next function that IPython
        calls, such as one of `contextlib`.  The user does not want to see that function.
        """
        try:
            reply = await session.request("stackTrace", {"threadId": thread})
            frames = (reply.get("body") or {}).get("stackFrames", ())
            if all(map(is_library, frames)):
                await session.request("continue", {"threadId": thread})
                return
        except (SessionEnded, TimeoutError) as error:
            log.debug("%s: the place after a step is unknown: %r", session.title, error)
        if thread in session.stopped:
            self.shown.show_stopped(session)
