"""One machine of a world as the head sees it: who is there, what was asked, and when it is lost."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nbdist.wire.messages import Ask, Request, StartFailure, WorldStarted
from nbdist.wire.node_messages import (
    AnyReply,
    CallOff,
    EndRanks,
    Form,
    Formed,
    GetClock,
    GetHeld,
    Held,
    NodeAsk,
    NodeDown,
    NodeHello,
    PartRequest,
    Plan,
    Prepare,
    Renumber,
    StartPart,
)
from nbdist.wire.spec import WorldSpec

START_TIMEOUT = 190.0
"""Seconds; longer than an agent takes for its part of a start."""

HELD_TIMEOUT = 35.0
PREPARE_TIMEOUT = 120.0
FORM_TIMEOUT = 60.0
CLOCK_TIMEOUT = 5.0
CALL_OFF_TIMEOUT = 5.0
END_TIMEOUT = 20.0
"""Seconds for ranks to have ended, beyond the grace they have for it."""

CLOCK_TRIES = 3
"""Times that a clock is read; the answer that came quickest says most."""


class NodeLost(Exception):
    """The node is not there any more; the message says how that was noticed."""


class Node:
    """The link to one agent: as a part of the world, and for all else that is asked of it.

    `number` is its place among the nodes, `name` what the user calls it, `offset_ns` how far
    its clock is ahead of this machine's.
    """

    def __init__(
        self, number: int, name: str, hello: NodeHello, send: Callable[[NodeDown], None]
    ) -> None:
        self.number = number
        self.name = name
        self.pid = hello.pid
        self.facts = hello.facts
        self.offset_ns = 0
        self.lost = ""
        self.ranks: tuple[int, ...] = ()
        self._send = send
        self._numbers = itertools.count(1)
        self._answers: dict[tuple[bool, int], asyncio.Future[Any]] = {}

    def __repr__(self) -> str:
        state = f"lost: {self.lost}" if self.lost else f"ranks {[*self.ranks]}"
        return f"<Node {self.number} {self.name} {state}>"

    # --- asking ---------------------------------------------------------------------------

    def send(self, message: NodeDown) -> None:
        """Send a message; one to a node that is lost goes nowhere."""
        if not self.lost:
            self._send(message)

    async def ask(self, request: Request, timeout: float) -> Any:
        """Return the reply to what a notebook can ask; raises NodeLost."""
        number = next(self._numbers)
        return await self._answer((False, number), Ask(number, request), timeout)

    async def ask_part(self, request: PartRequest, timeout: float) -> Any:
        """Return the reply to what only a head can ask; raises NodeLost."""
        number = next(self._numbers)
        return await self._answer((True, number), NodeAsk(number, request), timeout)

    async def _answer(self, key: tuple[bool, int], message: NodeDown, timeout: float) -> Any:
        if self.lost:
            raise NodeLost(self.lost)
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise NodeLost(f"{self.name} did not answer within {timeout:.0f} s") from None
        finally:
            del self._answers[key]

    def answered(self, number: int, reply: AnyReply, *, of_part: bool) -> None:
        """Take in a reply."""
        answer = self._answers.get((of_part, number))
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def lose(self, why: str) -> None:
        """Note that it is not there any more; all that wait for its answers learn of it."""
        self.lost = self.lost or why
        for answer in [*self._answers.values()]:
            if not answer.done():
                answer.set_exception(NodeLost(self.lost))

    async def set_clock(self) -> None:
        """Find out how far its clock is ahead."""
        best = float("inf")
        for _ in range(CLOCK_TRIES):
            before, began = time.time_ns(), time.monotonic_ns()
            there = await self.ask_part(GetClock(), CLOCK_TIMEOUT)
            took = time.monotonic_ns() - began
            if took < best:
                best, self.offset_ns = took, there - before - took // 2

    # --- as a part of the world -------------------------------------------------------------

    def _here(self, spec: WorldSpec) -> WorldSpec:
        return replace(spec, node=self.number)

    async def start_part(
        self, spec: WorldSpec, ranks: Sequence[int], attempt: int
    ) -> WorldStarted | StartFailure:
        """Start these ranks; when one fails, or it is called off, end the others of them."""
        self.ranks = tuple(ranks)
        request = StartPart(self._here(spec), self.ranks, attempt)
        try:
            started: WorldStarted | StartFailure = await self.ask_part(request, START_TIMEOUT)
        except NodeLost as lost:
            return StartFailure(ranks[0], self.name, "the agent", str(lost), ())
        return replace(started, host=self.name) if isinstance(started, StartFailure) else started

    async def held(self) -> Held:
        """Say which of its ranks live, and what groups they hold."""
        try:
            held: Held = await self.ask_part(GetHeld(), HELD_TIMEOUT)
        except NodeLost:
            return Held({})
        return held

    async def prepare(self, spec: WorldSpec, ranks: Sequence[int]) -> str:
        """Have what can start these ranks; what keeps it from that, else ""."""
        try:
            problem: str = await self.ask_part(
                Prepare(self._here(spec), tuple(ranks)), PREPARE_TIMEOUT
            )
        except NodeLost as lost:
            return str(lost)
        return problem

    async def form(self, plan: Plan, ranks: Sequence[int]) -> Formed:
        """Start those of its ranks that are missing, and have the others meet them."""
        self.ranks = tuple(ranks)
        request = Form(replace(plan, spec=self._here(plan.spec)), self.ranks)
        try:
            formed: Formed = await self.ask_part(request, FORM_TIMEOUT)
        except NodeLost as lost:
            return Formed({}, {}, (), str(lost))
        return formed

    async def call_off(self, generation: int) -> None:
        """Have its ranks wait no longer for this generation: not all ranks will come."""
        await self._try(CallOff(generation), CALL_OFF_TIMEOUT)

    async def end(self, ranks: Sequence[int], grace: float) -> None:
        """End these ranks: politely for `grace` seconds, then by force."""
        self.ranks = tuple(rank for rank in self.ranks if rank not in {*ranks})
        await self._try(EndRanks(tuple(ranks), grace), grace + END_TIMEOUT)

    async def renumber(self, became: Mapping[int, int]) -> None:
        """Call each rank by another number; itself it learns of that with the next plan."""
        self.ranks = tuple(became.get(rank, rank) for rank in self.ranks)
        await self._try(Renumber(became), CALL_OFF_TIMEOUT)

    async def _try(self, request: PartRequest, timeout: float) -> None:
        """Ask what a lost node need not be asked."""
        with suppress(NodeLost):
            await self.ask_part(request, timeout)
