"""The debugger of one rank, and numbers of threads and frames that are unique over all ranks.

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

REQUEST_TIMEOUT = 10.0  # seconds for a rank to answer a request

FIRST_ID = 2**52
"""The first number of a rank's thread, frame or variable.

Addresses of objects, which ipykernel also uses as such numbers, are lower, and JavaScript's
integers are exact up to 2**53."""

NUMBER_NAMES = ("threadId", "frameId", "variablesReference", "sourceReference", "srcFrameId")
"""Names of entries whose values are numbers that each rank chooses by itself."""


class SessionEnded(Exception):
    """Raised for a request to a rank whose debugger has ended; the text says why, or is ""."""


class RankSession:
    """The debugger of one rank, as a client of the Debug Adapter Protocol sees it."""

    def __init__(self, link: Link, rank: int, pid: int, number: int, title: str) -> None:
        self.link, self.rank, self.pid, self.number, self.title = link, rank, pid, number, title
        self.stopped: dict[int, Message] = {}  # the bodies of `stopped` events, by thread
        self.ended: SessionEnded | None = None
        self.has_ended = asyncio.Event()
        self._refused: dict[str, str] = {}  # why the rank cannot stop in a file, by its path
        self.attaching: asyncio.Task[None] | None = None  # while the rank gets the breakpoints
        self._unsent: deque[tuple[str, Message]] = deque()  # requests that wait for `send_unsent`
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
            response: Message = await asyncio.wait_for(answer, timeout)
        finally:
            self._pending.pop(number, None)
        if command == "setBreakpoints":
            self._record_refusal((arguments.get("source") or {}).get("path", ""), response)
        return response

    def _record_refusal(self, path: str, response: Message) -> None:
        if text := refusal(response):
            self._refused.setdefault(path, text)
        elif self._refused.get(path):  # the breakpoint was removed, or the file exists by now
            del self._refused[path]

    def pop_refused(self) -> list[str]:
        """Return lines on files with breakpoints in which the rank cannot stop, each file once."""
        new = {path: text for path, text in self._refused.items() if text}
        self._refused.update(dict.fromkeys(new, ""))
        return [f"cannot stop at breakpoints in {path}: {text}" for path, text in new.items()]

    def add_unsent(self, command: str, arguments: Message) -> None:
        """Add a request that `send_unsent` sends, while the rank is being attached."""
        self._unsent.append((command, arguments))

    async def send_unsent(self, timeout: float) -> None:
        """Send the requests of `add_unsent`, one after the other, and wait for each response.

        Requests that are added during the wait are sent too.  Raises the errors of `request`.
        """
        while self._unsent:
            await self.request(*self._unsent.popleft(), timeout)

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

    def has_stale(self, arguments: Message) -> bool:
        """Return True if a rank has had a number in these arguments, and has gone on or ended."""
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
            outer["stackFrames"] = [each for each in outer["stackFrames"] if not is_outer(each)]
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
