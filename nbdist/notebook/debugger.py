"""JupyterLab's debugger over all ranks: each rank is a thread beside the notebook's own.

A front end sends debug requests on the control channel.  Without nbdist, ipykernel's `Debugger`
answers them for the notebook's process.  `CellDebugger` gets the requests first: it passes requests
about ranks on to these ranks, and all others to ipykernel's `Debugger`.  Runs in the notebook's
process, on the event loop of the kernel's control thread, except for the methods that say
otherwise.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import os
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from nbdist.errors import Interrupted
from nbdist.notebook.debug_protocol import Message, copying, failure, reply_to
from nbdist.notebook.debug_ranks import ATTACH_TIMEOUT, DebuggedRanks, WorldLinks
from nbdist.notebook.debug_session import REQUEST_TIMEOUT, RankSession, SessionEnded
from nbdist.words import name_ranks

if TYPE_CHECKING:
    from nbdist.world.agent_link import Link

T = TypeVar("T")

PACKAGE = os.path.dirname(os.path.dirname(__file__))
OWN_ERRORS = frozenset({"WorkerError", "WorkerDied", "CellTimeout", "Interrupted"})
"""The names of nbdist's classes of errors that report how a cell has ended on the ranks."""

GONE = "the rank has gone on since, or its process has ended"
"""The answer to a request about a rank's thread, frame or variable that does not exist any more."""

CHOOSE = re.compile(r"\s*%dist_debug\b(?P<options>.*?-r\s*(?P<rank>\d+).*)")


class CellDebugger:
    """Answers the debugger's requests for the notebook's process and the ranks together.

    `kernel` is the notebook's kernel object, of ipykernel.  `links` yields the links of all running
    worlds (`WorldLinks`).
    """

    def __init__(self, kernel: Any, links: WorldLinks) -> None:
        self._kernel = kernel
        # The loop of ipykernel's control thread, on which debug requests are answered.
        loop = getattr(getattr(kernel, "control_thread", None), "io_loop", None)
        self._loop: asyncio.AbstractEventLoop | None = getattr(loop, "asyncio_loop", None)
        self.is_on = bool(kernel.debugger.is_started)
        # ipykernel's client of debugpy takes any response for the response to its last request, so
        # requests must not overlap.
        self._one_request = asyncio.Lock()
        self._original: Callable[[Message], Any] = kernel.do_debug_request
        self._publish_event: Callable[[Message], None] = kernel.debugger.event_callback
        just_my_code = bool(getattr(kernel, "debug_just_my_code", False))
        self._ranks = DebuggedRanks(links, self._publish_event, just_my_code=just_my_code)
        # A front end may have set breakpoints before nbdist was loaded.
        self._ranks.breakpoints = {
            path: {"source": {"path": path}, "breakpoints": points, "sourceModified": False}
            for path, points in kernel.debugger.breakpoint_list.items()
            if points
        }
        self._request_count = itertools.count(1)

    def __repr__(self) -> str:
        return f"<CellDebugger {'on' if self.is_on else 'off'} {self._ranks}>"

    # --- from other threads ---------------------------------------------------------------

    def prepare(self, link: Link, ranks: Iterable[int]) -> str:
        """Wait until these ranks of a world have the breakpoints, or until that takes too long.

        Returns a line about breakpoints at which ranks cannot stop, or "".  Called on the main
        thread before a task is sent.  Does nothing while the debugger is off.  Raises Interrupted
        if Stop is pressed meanwhile.
        """
        if not self.is_on:
            return ""
        by_text: dict[str, list[int]] = {}
        for rank, text in self._run(self._ranks.attach(link, {*ranks}), []):
            by_text.setdefault(text, []).append(rank)
        return "; ".join(f"{name_ranks(on)} {text}" for text, on in by_text.items())

    def choose(self, link: Link, rank: int, *, is_alone: bool) -> str:
        """Let the front end's debugger show this rank of a world; called on the main thread.

        With `is_alone`, only this rank makes steps.  Returns a line for the user, or "" if no rank
        of the world is stopped.
        """
        return self._run(self._choose(link, rank, is_alone=is_alone), "")

    def open(self) -> Callable[[], None]:
        """Change the debugger of the notebook's own process; return a function that restores it.

        From now on that debugger does not stop at nbdist's errors about ranks and, with ipykernel
        7.2 or newer, does not stop in nbdist's files.  The returned function also ends the
        debuggers of all ranks.  Called on the main thread when nbdist is loaded.
        """
        debugger, rule = self._kernel.debugger, f"{PACKAGE}/**"
        before, debugger.event_callback = debugger.event_callback, self._forward
        # ipykernel before 7.2 has no such rules; then this rule has no effect.
        rules: list[str] = getattr(debugger, "kernel_modules", [])
        rules.append(rule)

        def close() -> None:
            try:
                self._run(self._switch_off(), None)
            finally:
                debugger.event_callback = before
                rules.remove(rule)

        return close

    def _forward(self, event: Message) -> None:
        """Pass an event of the notebook's own debugger to the front end.

        If that debugger has stopped at an error of `OWN_ERRORS`, let it go on instead.  Such an
        error only reports what has happened on the ranks.
        """
        body = event.get("body") or {}
        name = str(body.get("text") or "").partition(" ")[0]
        is_stop = event.get("event") == "stopped" and body.get("reason") == "exception"
        if is_stop and name in OWN_ERRORS:
            asyncio.get_running_loop().create_task(self._continue(body.get("threadId")))
        else:
            self._publish_event(event)

    async def _continue(self, thread: object) -> None:
        request = {"seq": next(self._request_count), "type": "request", "command": "continue"}
        await self._ask_notebook({**request, "arguments": {"threadId": thread}})

    async def _ask_notebook(self, msg: Message) -> Any:
        """Return the answer of ipykernel's debugger, which debugs the notebook's own process."""
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
        """Answer a front end's request in place of the kernel's `do_debug_request` (`original`)."""
        self._loop, self._original = asyncio.get_running_loop(), original
        command, arguments = msg.get("command", ""), msg.get("arguments") or {}
        shown = self._ranks.shown
        match command:
            case "disconnect":
                await self._switch_off()
                return await self._ask_notebook(msg)
            case "attach":
                reply = await self._ask_notebook(msg)
                self.is_on = bool(reply and reply.get("success"))
                if self.is_on:
                    self._ranks.start_attaching_all()
                return reply
            case "setBreakpoints":
                reply = await self._ask_notebook(msg)
                await self._ranks.set_breakpoints(arguments)
                return reply
            case "setExceptionBreakpoints":
                await self._ranks.set_exceptions(arguments)
                return await self._ask_notebook(msg)
            case "debugInfo":
                return self._with_stopped_thread(await self._ask_notebook(msg))
            case "evaluate" if shown.entry is not None and (choice := _choice(arguments)):
                rank, is_alone = choice
                text = shown.choose(shown.entry[0].link, rank, is_alone=is_alone)
                return reply_to(msg, {"result": text, "variablesReference": 0})
        session, inner = self._ranks.numbers.to_inner(arguments)
        if session is None and self._is_for_shown_thread(arguments) and shown.entry is not None:
            # JupyterLab before 4.4.5 asks for thread 1, whichever thread has stopped.
            session, thread = shown.entry
            inner = {**inner, "threadId": thread}
        if session is None and self._ranks.numbers.has_stale(arguments):
            # ipykernel's debugger might raise a KeyError, and the page would get no answer.
            return failure(msg, GONE)
        if session is None:
            return await self._ask_notebook(msg)
        try:
            return await self._ask_rank(session, msg, inner)
        except TimeoutError:
            return failure(msg, f"{session.title} did not answer within {REQUEST_TIMEOUT:.0f} s")
        except SessionEnded as ended:
            return failure(msg, f"{session.title} is debugged no more {ended}".rstrip())

    def _is_for_shown_thread(self, arguments: Message) -> bool:
        is_stopped_here = bool(self._kernel.debugger.stopped_threads)
        is_for_rank = self._ranks.numbers.has_stale(arguments)
        return "threadId" in arguments and not is_stopped_here and not is_for_rank

    async def _ask_rank(self, session: RankSession, msg: Message, inner: Message) -> Message:
        command = msg["command"]
        match command:
            case "continue" | "next" | "stepIn" | "stepOut":
                response = await self._ranks.move(session, command, inner)
                return reply_to(msg, response.get("body"), response)
            case "richInspectVariables":
                return await self._inspect_richly(session, msg, inner)
            case "copyToGlobals":
                command, inner = "setExpression", copying(inner)
        response = await session.request(command, inner)
        body = self._ranks.numbers.to_outer(session, response.get("body"))
        if command == "variables" and body:
            accepts = self._kernel.debugger.accept_variable
            body["variables"] = [each for each in body["variables"] if accepts(each["name"])]
        return reply_to(msg, body, response)

    async def _inspect_richly(self, session: RankSession, msg: Message, inner: Message) -> Message:
        """Answer JupyterLab's request to show a rank's variable, for example as an HTML table.

        The response has the value in all formats in which the rank's IPython can show it.  It has
        no formats if the name is not that of a variable.
        """
        name = inner.get("variableName", "")
        empty: Message = {"data": {}, "metadata": {}}
        if not str(name).isidentifier():
            return reply_to(msg, empty)
        expression = f"get_ipython().display_formatter.format({name})"
        arguments = {"expression": expression, "context": "clipboard"}
        if "frameId" in inner:
            arguments["frameId"] = inner["frameId"]
        response = await session.request("evaluate", arguments)
        if not response.get("success"):
            return reply_to(msg, empty, response)
        data, metadata = ast.literal_eval(response["body"]["result"])
        return reply_to(msg, {"data": data, "metadata": metadata})

    async def _choose(self, link: Link, rank: int, *, is_alone: bool) -> str:
        return self._ranks.shown.choose(link, rank, is_alone=is_alone)

    async def _switch_off(self) -> None:
        self.is_on = False
        await self._ranks.detach_all()

    def _with_stopped_thread(self, reply: Any) -> Any:
        """Add the thread that the page shows as stopped to the reply to `debugInfo`.

        A page that was opened after the thread had stopped has not got the event `stopped`.
        """
        if reply and (entry := self._ranks.shown.entry) is not None:
            thread = self._ranks.numbers.outer(entry[0], "threadId", entry[1])
            body = reply["body"]
            reply = {**reply, "body": {**body, "stoppedThreads": [thread, *body["stoppedThreads"]]}}
        return reply


def _choice(arguments: Message) -> tuple[int, bool] | None:
    """Return the rank of `%dist_debug -r 2`, typed in the debugger, and whether it has `--alone`.

    Returns None for other expressions.  `arguments` are those of the request `evaluate`, which
    sends a typed expression.
    """
    found = CHOOSE.fullmatch(str(arguments.get("expression", "")))
    return None if found is None else (int(found["rank"]), "--alone" in found["options"])


def world_links(pools: Iterable[Any]) -> Iterator[tuple[Link, str, Mapping[int, int]]]:
    """Yield the link of each pool with workers, a title for its ranks, and process ids by rank."""
    for pool in pools:
        if pool.has_workers:
            title = f"pool {pool.own_name} · rank" if pool.own_name else "rank"
            yield pool.world.engine.connection.link, title, pool.world.pids
