"""JupyterLab's debugger over all ranks: each rank is a thread beside the notebook's own.

A front end sends debug requests on the control channel, which ipykernel's `Debugger` answers for
the notebook's process.  `CellDebugger` stands in front of ipykernel's: it passes requests on to the
ranks that they concern, and makes the ranks' numbers of threads, frames and variables unique.  Runs
in the notebook's process, on the event loop of the kernel's control thread, except for the methods
that say otherwise.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from nbdist.errors import Interrupted
from nbdist.wire.messages import CloseDebuggers, FromDebugger, OpenDebugger, ToDebugger
from nbdist.wire.places import PACKAGES
from nbdist.words import name_ranks

if TYPE_CHECKING:
    from nbdist.world.agent_link import Link

T = TypeVar("T")

log = logging.getLogger("nbdist.notebook")

Message = dict[str, Any]
"""A request, a response or an event of the Debug Adapter Protocol."""

REQUEST_TIMEOUT = 10.0  # seconds for a rank to answer a request
ATTACH_TIMEOUT = 30.0  # seconds for ranks to start their debuggers, before a cell runs without them
SETTLE_TIME = 0.3
"""Seconds to wait for the other ranks after a rank has stopped, before a stopped rank is shown.

The ranks reach a line one after another, and those that have stopped make their steps together."""

FIRST_ID = 2**52
"""The first number of a rank's thread, frame or variable.

Addresses of objects, which ipykernel also uses as such numbers, are lower, and JavaScript's
integers are exact up to 2**53."""

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

PACKAGE = os.path.dirname(os.path.dirname(__file__))
OWN_ERRORS = frozenset({"WorkerError", "WorkerDied", "CellTimeout", "Interrupted"})
"""Classes of nbdist's errors that report the end of a cell on the ranks."""

BEGINNINGS = ("/nbdist/agent/fork_server.py", "/nbdist/worker/__main__.py", "/runpy.py")
"""Ends of the paths of files in which a worker's process begins, as the module `__main__`."""

NUMBER_NAMES = ("threadId", "frameId", "variablesReference", "sourceReference", "srcFrameId")
"""Names of entries whose values are numbers that each rank chooses by itself."""

MOVES = ("continue", "next", "stepIn", "stepOut")
"""Requests that let a stopped thread go on."""

CHOOSE = re.compile(r"\s*%dist_debug\b(?P<options>.*?-r\s*(?P<rank>\d+).*)")


class SessionEnded(Exception):
    """Raised for a request to a rank whose debugger has ended; the text says why, or is ""."""


class RankSession:
    """The debugger of one rank, as a client of the Debug Adapter Protocol sees it."""

    def __init__(self, link: Link, rank: int, pid: int, number: int, title: str) -> None:
        self.link, self.rank, self.pid, self.number, self.title = link, rank, pid, number, title
        self.stopped: dict[int, Message] = {}  # the bodies of `stopped` events, by thread
        self.ended: SessionEnded | None = None
        self.has_ended = asyncio.Event()
        self._count = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Message]] = {}

    def __repr__(self) -> str:
        state = "ended" if self.ended else "stopped" if self.stopped else "running"
        return f"<RankSession {self.title} {state}>"

    async def request(
        self, command: str, arguments: Message, timeout: float = REQUEST_TIMEOUT
    ) -> Message:
        """Send a request; return the response.  Raises SessionEnded, or TimeoutError."""
        if self.ended is not None:
            raise self.ended
        number = next(self._count)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        content = {"seq": number, "type": "request", "command": command, "arguments": arguments}
        self.link.send(ToDebugger(self.rank, self.number, json.dumps(content)))
        try:
            return await asyncio.wait_for(answer, timeout)
        finally:
            self._pending.pop(number, None)

    def resolve(self, response: Message) -> None:
        """Give the response to the request that it answers."""
        answer = self._pending.get(response.get("request_seq", 0))
        if answer is not None and not answer.done():
            answer.set_result(response)

    def end(self, problem: str) -> None:
        """Fail all pending and later requests: the debugger of the rank has ended."""
        self.ended = SessionEnded(problem)
        self.has_ended.set()
        self.stopped.clear()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self.ended)


class Numbers:
    """Numbers that are unique over all ranks, in place of those that each rank has chosen."""

    def __init__(self) -> None:
        self._next = itertools.count(FIRST_ID)
        self._inner: dict[int, tuple[RankSession, int]] = {}
        self._outer: dict[tuple[RankSession, str, int], int] = {}

    def outer(self, session: RankSession, kind: str, inner: int) -> int:
        """Return the unique number for a rank's number of a thread, frame or variable."""
        if (number := self._outer.get((session, kind, inner))) is None:
            number = self._outer[session, kind, inner] = next(self._next)
            self._inner[number] = session, inner
        return number

    def inner(self, number: object) -> tuple[RankSession, int] | None:
        """Return the rank and its own number; None for a number of the notebook's process."""
        return self._inner.get(number) if isinstance(number, int) else None

    def forget(self, session: RankSession, *, with_threads: bool = False) -> None:
        """Forget a rank's frames and variables, which are no longer valid once the rank goes on."""
        for key in [key for key in self._outer if key[0] is session]:
            if with_threads or key[1] != "threadId":
                del self._inner[self._outer.pop(key)]

    def to_outer(self, session: RankSession, body: Any) -> Any:
        """Return a rank's message with unique numbers, and with the rank in the names of frames."""
        if isinstance(body, list):
            return [self.to_outer(session, each) for each in body]
        if not isinstance(body, dict):
            return body
        outer = {name: self.to_outer(session, value) for name, value in body.items()}
        for name in NUMBER_NAMES:
            if isinstance(value := body.get(name), int) and value > 0:
                outer[name] = self.outer(session, name, value)
        if "stackFrames" in outer:
            outer["stackFrames"] = [each for each in outer["stackFrames"] if not _is_outer(each)]
        for frame in outer.get("stackFrames", ()):
            frame["id"] = self.outer(session, "frameId", frame["id"])
            frame["name"] = f"{session.title} · {frame['name']}"
        return outer

    def to_inner(self, arguments: Message) -> tuple[RankSession | None, Message]:
        """Return the rank that arguments of a request are about, and the rank's own arguments."""
        session: RankSession | None = None
        inner: Message = {}
        for name, value in arguments.items():
            if isinstance(value, dict):
                found, inner[name] = self.to_inner(value)
                session = session or found
            elif name in NUMBER_NAMES and (entry := self.inner(value)) is not None:
                session, inner[name] = entry
            else:
                inner[name] = value
        return session, inner


class CellDebugger:
    """Answers the debugger's requests for the notebook's process and the ranks together.

    `kernel` is the notebook's ipykernel.  `links` yields the links of all running worlds, each with
    a title for a rank and with the process ids of its ranks.
    """

    def __init__(
        self, kernel: Any, links: Callable[[], Iterable[tuple[Link, str, Mapping[int, int]]]]
    ) -> None:
        self._kernel = kernel
        self._links = links
        # ipykernel's control thread has the loop on which front ends' requests are answered.
        loop = getattr(getattr(kernel, "control_thread", None), "io_loop", None)
        self._loop: asyncio.AbstractEventLoop | None = getattr(loop, "asyncio_loop", None)
        self.is_on = bool(kernel.debugger.is_started)
        # Arguments of `setBreakpoints`, by path; a front end may have set some before.
        self._breakpoints: dict[str, Message] = {
            path: {"source": {"path": path}, "breakpoints": points, "sourceModified": False}
            for path, points in kernel.debugger.breakpoint_list.items()
            if points
        }
        # ipykernel's client of debugpy takes the next response for that to its last request.
        self._one_request = asyncio.Lock()
        self._original: Callable[[Message], Any] = kernel.do_debug_request
        self._exceptions: Message | None = None  # arguments of `setExceptionBreakpoints`
        self._sessions: dict[int, RankSession] = {}
        self._attaching: dict[int, asyncio.Task[None]] = {}
        self._session_numbers = itertools.count(1)
        self._numbers = Numbers()
        self._shown: tuple[RankSession, int] | None = None  # the rank and thread on the page
        self._last_shown_rank: int | None = None
        self._chosen_rank: int | None = None
        self._is_alone = False  # whether only the rank that is shown makes steps
        self._publish_event: Callable[[Message], None] = kernel.debugger.event_callback
        self._timer: asyncio.TimerHandle | None = None
        self._checks: set[asyncio.Task[None]] = set()  # of `_check_step`
        self._event_count = itertools.count(1)

    def __repr__(self) -> str:
        return f"<CellDebugger {'on' if self.is_on else 'off'} {[*self._sessions.values()]}>"

    # --- from other threads ---------------------------------------------------------------

    def prepare(self, link: Link, ranks: Iterable[int]) -> str:
        """Wait until these ranks have the breakpoints; return a line on ranks that lack them.

        Called on the main thread before a task is sent.  Does nothing while the debugger is off.
        Raises Interrupted if Stop is pressed meanwhile.
        """
        if not self.is_on:
            return ""
        problems = self._run(self._attach_ranks(link, {*ranks}), {})
        by_text: dict[str, list[int]] = {}
        for rank, text in problems.items():
            by_text.setdefault(text, []).append(rank)
        lines = (f"{name_ranks(on)} cannot stop at breakpoints: {t}" for t, on in by_text.items())
        return "; ".join(lines)

    def choose(self, link: Link, rank: int, *, is_alone: bool) -> str:
        """Show this rank of a world; return a line on that, or "" if none of its ranks is stopped.

        Called on the main thread.
        """
        return self._run(self._choose(link, rank, is_alone=is_alone), "")

    def open(self) -> Callable[[], None]:
        """Keep the notebook's own debugger out of nbdist's files; return a function that ends all.

        Called on the main thread while nbdist is loaded.  The function ends the debuggers of all
        ranks, and restores the notebook's own.
        """
        debugger, rule = self._kernel.debugger, f"{PACKAGE}/**"
        before, debugger.event_callback = debugger.event_callback, self._forward
        self._publish_event = before
        # ipykernel before 6.19 has no such rules.
        rules: list[str] = getattr(debugger, "kernel_modules", [])
        rules.append(rule)

        def close() -> None:
            self._run(self._detach_all(), None)
            debugger.event_callback = before
            rules.remove(rule)

        return close

    def _forward(self, event: Message) -> None:
        """Pass an event of the notebook's own debugger on, unless it stopped at nbdist's error.

        The ranks have stopped at their exceptions before; nbdist's error only reports them.
        """
        body = event.get("body") or {}
        name = str(body.get("text") or "").partition(" ")[0]
        is_stop = event.get("event") == "stopped" and body.get("reason") == "exception"
        if is_stop and name in OWN_ERRORS:
            asyncio.get_running_loop().create_task(self._continue(body.get("threadId")))
        else:
            self._publish_event(event)

    async def _continue(self, thread: object) -> None:
        request = {"seq": next(self._event_count), "type": "request", "command": "continue"}
        await self._ask_notebook({**request, "arguments": {"threadId": thread}})

    async def _ask_notebook(self, msg: Message) -> Any:
        """Return the answer of ipykernel's debugger, for the notebook's own process."""
        async with self._one_request:
            return await self._original(msg)

    def _run(self, work: Coroutine[Any, Any, T], otherwise: T) -> T:
        if self._loop is None or self._loop.is_closed():
            work.close()
            return otherwise
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(ATTACH_TIMEOUT + REQUEST_TIMEOUT)
        except TimeoutError:
            future.cancel()
            return otherwise
        except KeyboardInterrupt:
            future.cancel()
            raise Interrupted(()) from None

    # --- requests of the front end ----------------------------------------------------------

    async def answer(self, original: Callable[[Message], Any], msg: Message) -> Any:
        """Answer a request; wraps the kernel's `do_debug_request`, the `original`."""
        self._loop, self._original = asyncio.get_running_loop(), original
        command, arguments = msg.get("command", ""), msg.get("arguments") or {}
        match command:
            case "disconnect":
                await self._detach_all()
                return await self._ask_notebook(msg)
            case "attach":
                reply = await self._ask_notebook(msg)
                self.is_on = bool(reply and reply.get("success"))
                for link, _, pids in self._links() if self.is_on else ():
                    self._start_attaching(link, {*pids})
                return reply
            case "setBreakpoints":
                return await self._set_breakpoints(msg, arguments)
            case "setExceptionBreakpoints":
                self._exceptions = arguments
                await self._request_all(command, arguments)
                return await self._ask_notebook(msg)
            case "debugInfo":
                return self._with_stopped_thread(await self._ask_notebook(msg))
            case "evaluate" if self._shown is not None and (choice := _choice(arguments)):
                rank, is_alone = choice
                text = await self._choose(self._shown[0].link, rank, is_alone=is_alone)
                return _response(msg, {"result": text, "variablesReference": 0})
        session, inner = self._numbers.to_inner(arguments)
        if session is None and self._is_for_shown_thread(arguments) and self._shown is not None:
            # JupyterLab before 4.4.5 asks for thread 1, whichever thread has stopped.
            session, thread = self._shown
            inner = {**inner, "threadId": thread}
        if session is None:
            return await self._ask_notebook(msg)
        try:
            return await self._ask_rank(session, msg, inner)
        except TimeoutError:
            return _failure(msg, f"{session.title} did not answer within {REQUEST_TIMEOUT:.0f} s")
        except SessionEnded as ended:
            return _failure(msg, f"{session.title} is debugged no more {ended}".rstrip())

    def _is_for_shown_thread(self, arguments: Message) -> bool:
        is_stopped_here = bool(self._kernel.debugger.stopped_threads)
        return "threadId" in arguments and not is_stopped_here

    async def _ask_rank(self, session: RankSession, msg: Message, inner: Message) -> Message:
        command = msg["command"]
        match command:
            case "continue" | "next" | "stepIn" | "stepOut":
                return await self._move(session, msg, inner)
            case "richInspectVariables":
                return await self._inspect_richly(session, msg, inner)
            case "copyToGlobals":
                command, inner = "setExpression", _copying(inner)
        response = await session.request(command, inner)
        body = self._numbers.to_outer(session, response.get("body"))
        if command == "variables" and body:
            accepts = self._kernel.debugger.accept_variable
            body["variables"] = [each for each in body["variables"] if accepts(each["name"])]
        return _response(msg, body, response)

    async def _move(self, session: RankSession, msg: Message, inner: Message) -> Message:
        """Let all stopped ranks go on by the same step, or only the rank that is shown."""
        together = [] if self._is_alone else [s for s in self._sessions.values() if s.stopped]
        moved = [session] if session not in together else together
        requests = []
        for each in moved:
            threads = [inner["threadId"]] if each is session else [*each.stopped][:1]
            if msg["command"] == "continue":
                threads = [*each.stopped] or threads
            for thread in threads:
                requests.append(each.request(msg["command"], {**inner, "threadId": thread}))
        responses = await asyncio.gather(*requests, return_exceptions=True)
        first = next((each for each in responses if isinstance(each, dict)), None)
        if first is None:
            raise SessionEnded
        return _response(msg, first.get("body"), first)

    async def _inspect_richly(self, session: RankSession, msg: Message, inner: Message) -> Message:
        """Return a variable's value in the formats that IPython shows, as ipykernel does."""
        name = inner.get("variableName", "")
        empty: Message = {"data": {}, "metadata": {}}
        if not str(name).isidentifier():
            return _response(msg, empty)
        expression = f"get_ipython().display_formatter.format({name})"
        arguments = {"expression": expression, "context": "clipboard"}
        if "frameId" in inner:
            arguments["frameId"] = inner["frameId"]
        response = await session.request("evaluate", arguments)
        if not response.get("success"):
            return _response(msg, empty, response)
        data, metadata = ast.literal_eval(response["body"]["result"])
        return _response(msg, {"data": data, "metadata": metadata})

    async def _set_breakpoints(self, msg: Message, arguments: Message) -> Any:
        path = (arguments.get("source") or {}).get("path", "")
        if arguments.get("breakpoints"):
            self._breakpoints[path] = arguments
        else:
            self._breakpoints.pop(path, None)
        reply = await self._ask_notebook(msg)
        await self._request_all("setBreakpoints", arguments)
        return reply

    async def _request_all(self, command: str, arguments: Message) -> None:
        """Send a request to all ranks, and wait for the responses."""
        sessions = [each for each in self._sessions.values() if each.number not in self._attaching]
        requests = (each.request(command, arguments) for each in sessions)
        await asyncio.gather(*requests, return_exceptions=True)

    def _with_stopped_thread(self, reply: Any) -> Any:
        """Add the thread that is shown to the reply to `debugInfo`: the page may be a new one."""
        if reply and self._shown is not None:
            thread = self._numbers.outer(self._shown[0], "threadId", self._shown[1])
            body = reply["body"]
            reply = {**reply, "body": {**body, "stoppedThreads": [thread, *body["stoppedThreads"]]}}
        return reply

    # --- the debuggers of ranks -------------------------------------------------------------

    async def _attach_ranks(self, link: Link, ranks: Collection[int]) -> dict[int, str]:
        """Attach to ranks of a world that are not attached; return problems by rank."""
        self._last_shown_rank = None
        tasks = self._start_attaching(link, ranks)
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        if self._exceptions is not None and self._exceptions.get("filters"):
            # A rank forgets them if its collectives are aborted (`RankDebugger.record_abort`).
            await self._request_all("setExceptionBreakpoints", self._exceptions)
        attached = (self._sessions[number] for number in tasks if number in self._sessions)
        return {
            session.rank: str(session.ended) or "the debugger has ended"
            for session in attached
            if session.ended is not None
        }

    def _start_attaching(self, link: Link, ranks: Collection[int]) -> dict[int, asyncio.Task[None]]:
        """Start to attach to ranks; return the tasks in progress, by the number of the session."""
        link.on_debugger = partial(self._receive_soon, link)
        title, pids = next(((t, p) for each, t, p in self._links() if each is link), ("rank", {}))
        for session in [*self._sessions.values()]:
            is_current = session.link is not link or pids.get(session.rank) == session.pid
            if session.ended is not None or not is_current:
                self._drop(session, "")
        attached = {each.rank for each in self._sessions.values() if each.link is link}
        for rank in sorted({*ranks} - attached):
            number = next(self._session_numbers)
            session = RankSession(link, rank, pids.get(rank, 0), number, f"{title} {rank}")
            self._sessions[number] = session
            task = asyncio.create_task(self._attach(session))
            self._attaching[number] = task
        return {
            number: task
            for number, task in self._attaching.items()
            if self._sessions[number].link is link and self._sessions[number].rank in ranks
        }

    async def _attach(self, session: RankSession) -> None:
        """Start the debugger of a rank, and send it the breakpoints."""
        session.link.send(OpenDebugger(session.rank, session.number))
        ask = partial(session.request, timeout=ATTACH_TIMEOUT)
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT):
                await ask("initialize", CLIENT)
                await ask("attach", self._attach_arguments())
                for arguments in [*self._breakpoints.values()]:
                    await ask("setBreakpoints", arguments)
                if self._exceptions is not None:
                    await ask("setExceptionBreakpoints", self._exceptions)
                await ask("configurationDone", {})
        except TimeoutError:
            session.end(f"no answer within {ATTACH_TIMEOUT:.0f} s")
            session.link.send(CloseDebuggers((session.rank,)))
        except SessionEnded as ended:
            log.debug("%s is not debugged: %s", session.title, ended)
        finally:
            self._attaching.pop(session.number, None)

    def _attach_arguments(self) -> Message:
        just_my_code = bool(getattr(self._kernel, "debug_just_my_code", False))
        return {
            "justMyCode": just_my_code,
            "debugOptions": [] if just_my_code else ["DebugStdLib"],
            "rules": [{"module": module, "include": False} for module in OUTER_MODULES],
            # nbdist's and torch's own threads go on while a rank stands at a breakpoint.
            "stopAllThreadsOnSuspend": False,
        }

    async def _detach_all(self) -> None:
        self.is_on = False
        self._breakpoints, self._exceptions = {}, None
        self._chosen_rank, self._is_alone = None, False
        for task in [*self._attaching.values()]:
            task.cancel()
        self._attaching.clear()
        for link in {each.link for each in self._sessions.values()}:
            ranks = tuple(each.rank for each in self._sessions.values() if each.link is link)
            if link.is_up:
                link.send(CloseDebuggers(ranks))
        ends = [each.has_ended.wait() for each in self._sessions.values() if each.link.is_up]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*ends), REQUEST_TIMEOUT)
        for link in {each.link for each in self._sessions.values()}:
            link.on_debugger = None
        for session in [*self._sessions.values()]:
            self._drop(session, "the debugger was switched off")

    def _drop(self, session: RankSession, problem: str) -> None:
        session.end((session.ended and str(session.ended)) or problem)
        self._sessions.pop(session.number, None)
        self._hide(session)
        self._numbers.forget(session, with_threads=True)

    # --- messages of ranks ------------------------------------------------------------------

    def _receive_soon(self, link: Link, message: FromDebugger | None) -> None:
        """Have the loop handle a message; called on the link's thread."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the kernel exits
                loop.call_soon_threadsafe(self._receive, link, message)

    def _receive(self, link: Link, message: FromDebugger | None) -> None:
        if message is None:  # the agent has ended
            for each in [*self._sessions.values()]:
                if each.link is link:
                    self._drop(each, "its workers have ended")
            return
        if (session := self._sessions.get(message.session)) is None:
            return
        if not message.text:
            session.end(message.problem)
            self._hide(session)
            return
        content = json.loads(message.text)
        match content:
            case {"type": "response"}:
                session.resolve(content)
            case {"event": "stopped", "body": {"threadId": int(thread)} as body}:
                session.stopped[thread] = body
                if body.get("reason") == "step" and self._loop is not None:
                    task = self._loop.create_task(self._check_step(session, thread))
                    self._checks.add(task)
                    task.add_done_callback(self._checks.discard)
                else:
                    self._show_stopped(session)
            case {"event": "continued", "body": {"threadId": int(thread)}}:
                session.stopped.pop(thread, None)
                self._numbers.forget(session)
                self._hide(session, thread)

    async def _check_step(self, session: RankSession, thread: int) -> None:
        """Show a rank that has made a step, or let it go on if the step has left the cell.

        After a step out of the last line of a cell, debugpy stops in the next function that IPython
        calls, such as one of `contextlib`.
        """
        try:
            reply = await session.request("stackTrace", {"threadId": thread})
            frames = (reply.get("body") or {}).get("stackFrames", ())
            if all(map(_is_library, frames)):
                await session.request("continue", {"threadId": thread})
                return
        except (SessionEnded, TimeoutError) as error:
            log.debug("%s: the place after a step is unknown: %r", session.title, error)
        if thread in session.stopped:
            self._show_stopped(session)

    # --- the rank that is shown ---------------------------------------------------------------

    def _hide(self, session: RankSession, thread: int | None = None) -> None:
        """Tell the front end that a rank goes on, if it shows the rank; then show another one."""
        if self._shown is None or self._shown[0] is not session:
            return
        if thread is not None and self._shown[1] != thread:
            return
        shown_thread = self._shown[1]
        self._shown = None
        number = self._numbers.outer(session, "threadId", shown_thread)
        self._publish("continued", {"threadId": number, "allThreadsContinued": True})
        self._show_after_settling()

    def _show_stopped(self, session: RankSession) -> None:
        """Show a rank that has just stopped: at once if the user waits for this rank."""
        is_chosen = self._chosen_rank is not None and session.rank == self._chosen_rank
        if is_chosen and self._shown is not None and self._shown[0].rank != session.rank:
            self._show(session)
        elif self._shown is None:
            if all(each.stopped for each in self._sessions.values()):
                self._show_first()
            else:
                self._show_after_settling()

    @property
    def _wanted_rank(self) -> int | None:
        return self._last_shown_rank if self._chosen_rank is None else self._chosen_rank

    def _show_after_settling(self) -> None:
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(SETTLE_TIME, self._show_first)

    def _show_first(self) -> None:
        """Show the rank that the user wants, or else the first one that is stopped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        stopped = [each for each in self._sessions.values() if each.stopped]
        if self._shown is None and stopped:
            self._show(min(stopped, key=lambda each: (each.rank != self._wanted_rank, each.rank)))

    def _show(self, session: RankSession) -> None:
        thread, body = next(iter(session.stopped.items()))
        self._shown, self._last_shown_rank = (session, thread), session.rank
        number = self._numbers.outer(session, "threadId", thread)
        self._publish("stopped", {**body, "threadId": number, "allThreadsStopped": True})

    def _publish(self, event: str, body: Message) -> None:
        content = {"seq": next(self._event_count), "type": "event", "event": event, "body": body}
        self._publish_event(content)

    async def _choose(self, link: Link, rank: int, *, is_alone: bool) -> str:
        sessions = [each for each in self._sessions.values() if each.link is link]
        stopped = {each.rank: each for each in sessions if each.stopped}
        if not stopped:
            return ""
        self._chosen_rank, self._is_alone = rank, is_alone
        steps = "it steps alone" if is_alone else "all stopped ranks step together"
        if rank not in stopped:
            return f"rank {rank} is shown once it stops; stopped: {name_ranks(stopped)}"
        self._show(stopped[rank])
        return f"the debugger shows rank {rank}; {steps}"


CLIENT: Message = {
    "clientID": "nbdist",
    "adapterID": "nbdist",
    "pathFormat": "path",
    "linesStartAt1": True,
    "columnsStartAt1": True,
    "supportsVariableType": True,
    "supportsVariablePaging": True,
}
"""The arguments of `initialize`, as JupyterLab sends them."""


def _is_library(frame: Message) -> bool:
    """Return True for a frame in a function of an installed package or of the standard library."""
    path = str((frame.get("source") or {}).get("path", ""))
    is_installed = PACKAGES.match(path) is not None and frame.get("name") != "<module>"
    return is_installed or _is_outer(frame)


def _is_outer(frame: Message) -> bool:
    """Return True for the frame in which a worker's process began."""
    path = str((frame.get("source") or {}).get("path", ""))
    return path.endswith(BEGINNINGS)


def _choice(arguments: Message) -> tuple[int, bool] | None:
    """Return the rank in an expression `%dist_debug -r 2 --alone`, and whether it is alone."""
    found = CHOOSE.fullmatch(str(arguments.get("expression", "")))
    return None if found is None else (int(found["rank"]), "--alone" in found["options"])


def _copying(inner: Message) -> Message:
    """Return the arguments of `setExpression` that copy a local variable to the globals."""
    name = json.dumps(inner.get("dstVariableName", ""))
    return {
        "expression": f"globals()[{name}]",
        "value": inner.get("srcVariableName", ""),
        "frameId": inner.get("srcFrameId"),
    }


def _response(msg: Message, body: Any, like: Message | None = None) -> Message:
    """Return a response to a request, which has succeeded as the rank's response `like` has."""
    response: Message = {
        "type": "response",
        "seq": msg.get("seq", 0),
        "request_seq": msg.get("seq", 0),
        "command": msg.get("command", ""),
        "success": like is None or bool(like.get("success")),
    }
    if body is not None:
        response["body"] = body
    if like is not None and "message" in like:
        response["message"] = like["message"]
    return response


def _failure(msg: Message, text: str) -> Message:
    return _response(msg, {}, {"success": False, "message": text})


def world_links(pools: Iterable[Any]) -> Iterator[tuple[Link, str, Mapping[int, int]]]:
    """Yield the link of each pool that has workers, its title of a rank, and its process ids."""
    for pool in pools:
        if pool.has_workers:
            title = f"pool {pool.own_name} · rank" if pool.own_name else "rank"
            yield pool.world.session.link, title, pool.world.pids
