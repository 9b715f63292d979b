"""Talks to the debugger of one rank; makes numbers of threads and frames unique over all ranks.

Runs in the notebook's process, on the event loop of the kernel's control thread.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from typing import TYPE_CHECKING, Any

from nbdist.notebook.debug_protocol import Message, is_outer, refusal
from nbdist.wire.messages import ToDebugger

if TYPE_CHECKING:
    from nbdist.world.agent_link import Link

REQUEST_TIMEOUT = 10.0  # seconds for a rank to answer a request, by default

FIRST_ID = 2**52
"""The first number that a rank's thread, frame or variable gets.

The number is higher than the addresses of objects, by which ipykernel numbers frames and variables
of the notebook's process.  It is lower than 2**53, since JavaScript rounds larger integers."""

NUMBER_NAMES = ("threadId", "frameId", "variablesReference", "sourceReference", "srcFrameId")
"""The entries of messages whose values are numbers that each rank chooses by itself."""


class SessionEnded(Exception):
    """Raised for a request to a rank whose debugger has ended, or if no rank answers a step.

    The text says why the debugger has ended, if that is known.
    """


class RankSession:
    """A connection to the debugger of one rank: sends requests and waits for the responses.

    `number` identifies the session, and `title` names the rank for the user.
    """

    def __init__(self, link: Link, rank: int, pid: int, number: int, title: str) -> None:
        self.link, self.rank, self.pid, self.number, self.title = link, rank, pid, number, title
        self.stopped: dict[int, Message] = {}  # the bodies of `stopped` events, by thread
        self.ended: SessionEnded | None = None
        self.has_ended = asyncio.Event()
        self._refused: dict[str, str] = {}  # by file: why the rank cannot stop in it; "" once told
        self.attaching: asyncio.Task[None] | None = None  # while the rank's debugger starts
        self._unsent: deque[tuple[str, Message]] = deque()  # requests that wait for `send_unsent`
        self._count = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Message]] = {}

    def __repr__(self) -> str:
        state = "ended" if self.ended else "stopped" if self.stopped else "running"
        return f"<RankSession {self.title} {state}>"

    async def request(
        self, command: str, arguments: Message, timeout: float = REQUEST_TIMEOUT
    ) -> Message:
        """Send a request and return the rank's response; raise SessionEnded or TimeoutError."""
        if self.ended is not None:
            raise self.ended
        number = next(self._count)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        content = {"seq": number, "type": "request", "command": command, "arguments": arguments}
        self.link.send(ToDebugger(self.rank, self.number, json.dumps(content)))
        try:
            response: Message = await asyncio.wait_for(answer, timeout)
        finally:
            self._pending.pop(number, None)
        if command == "setBreakpoints":
            self._record_refusal((arguments.get("source") or {}).get("path", ""), response)
        return response

    def _record_refusal(self, path: str, response: Message) -> None:
        if text := refusal(response):
            self._refused.setdefault(path, text)
        elif path in self._refused:  # for example, because the file exists by now
            del self._refused[path]

    def pop_refused(self) -> list[str]:
        """Return a line for each file with breakpoints in which the rank cannot stop.

        A file that an earlier call has named is left out.
        """
        new = {path: text for path, text in self._refused.items() if text}
        self._refused.update(dict.fromkeys(new, ""))
        return [f"cannot stop at breakpoints in {path}: {text}" for path, text in new.items()]

    def add_unsent(self, command: str, arguments: Message) -> None:
        """Add a request for `send_unsent`, because the debugger of the rank is not ready yet."""
        self._unsent.append((command, arguments))

    async def send_unsent(self, timeout: float) -> None:
        """Send the requests of `add_unsent`, one after the other, and wait for each response.

        Requests that are added during the wait are sent too.  Raises the errors of `request`.
        """
        while self._unsent:
            await self.request(*self._unsent.popleft(), timeout)

    def resolve(self, response: Message) -> None:
        """Let the `request` that waits for this response return it."""
        answer = self._pending.get(response.get("request_seq", 0))
        if answer is not None and not answer.done():
            answer.set_result(response)

    def end(self, problem: str) -> None:
        """Fail all pending and later requests, because the debugger of the rank has ended.

        `problem` says why it has ended, "" if that is no problem.
        """
        self.ended = SessionEnded(problem)
        self.has_ended.set()
        self.stopped.clear()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self.ended)


class Numbers:
    """Gives the threads, frames and variables of ranks numbers that are unique over all ranks.

    An *inner* number is the one that a rank has chosen, an *outer* number the unique one that the
    front end gets in its place.
    """

    def __init__(self) -> None:
        self._next = itertools.count(FIRST_ID)
        self._inner: dict[int, tuple[RankSession, int]] = {}
        self._outer: dict[tuple[RankSession, str, int], int] = {}

    def outer(self, session: RankSession, kind: str, inner: int) -> int:
        """Return the outer number for an inner number of a rank; make one if there is none.

        `kind` is the name of the message's entry with the number, such as "threadId".
        """
        if (number := self._outer.get((session, kind, inner))) is None:
            number = self._outer[session, kind, inner] = next(self._next)
            self._inner[number] = session, inner
        return number

    def inner(self, number: object) -> tuple[RankSession, int] | None:
        """Return the rank's session and the rank's own number for an outer number.

        Returns None for a number of the notebook's process, and for one that was forgotten.
        """
        return self._inner.get(number) if isinstance(number, int) else None

    def has_stale(self, arguments: Message) -> bool:
        """Return True if a request's arguments have the number of something that no longer exists.

        This is an outer number, by which the front end knows a thread, frame or variable of a
        rank, and which was forgotten (`forget`).
        """
        return any(
            self.has_stale(value)
            if isinstance(value, dict)
            else name in NUMBER_NAMES
            and isinstance(value, int)
            and value >= FIRST_ID
            and value not in self._inner
            for name, value in arguments.items()
        )

    def forget(self, session: RankSession, *, with_threads: bool = False) -> None:
        """Forget the numbers of a rank's frames and variables, with `with_threads` also of threads.

        Frames and variables are no longer valid once the rank goes on.
        """
        for key in [key for key in self._outer if key[0] is session]:
            if with_threads or key[1] != "threadId":
                del self._inner[self._outer.pop(key)]

    def to_outer(self, session: RankSession, body: Any) -> Any:
        """Return the body of a rank's message with outer numbers in place of the rank's own.

        The names of frames get the rank's title.  Frames in which the rank's process began are left
        out.
        """
        if isinstance(body, list):
            return [self.to_outer(session, each) for each in body]
        if not isinstance(body, dict):
            return body
        outer = {name: self.to_outer(session, value) for name, value in body.items()}
        for name in NUMBER_NAMES:
            if isinstance(value := body.get(name), int) and value > 0:
                outer[name] = self.outer(session, name, value)
        if "stackFrames" in outer:
            outer["stackFrames"] = [each for each in outer["stackFrames"] if not is_outer(each)]
        for frame in outer.get("stackFrames", ()):
            frame["id"] = self.outer(session, "frameId", frame["id"])
            frame["name"] = f"{session.title} · {frame['name']}"
        return outer

    def to_inner(self, arguments: Message) -> tuple[RankSession | None, Message]:
        """Return the session of the rank that a request is about, and the arguments for this rank.

        The session is None if there is no number of a rank in the arguments.
        """
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
