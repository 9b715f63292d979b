"""The workers of a world: their start and end, and what comes up from them.

Records of the workers' `logging` go to the loggers of this process.  A record of local rank 0 on
node1 comes to the logger `nbdist.node1.0`, so that handlers and levels that the user has set
there, on `nbdist` or on the root logger, apply: but not those of the root logger that write where
what ranks write is shown.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from nbdist.config import Patience
from nbdist.errors import AgentLost, StartError
from nbdist.output.events import Died, Done, InputRequest, Moved, Record, Visible
from nbdist.wire.frames import pack
from nbdist.wire.messages import (
    Aborted,
    Attached,
    Came,
    Located,
    Received,
    Remember,
    Run,
    Silent,
    StartFailure,
    Starting,
    StartWorld,
    StopWorld,
    Used,
    WorldStarted,
)
from nbdist.wire.views import Place
from nbdist.wire.work import InputReply, Task
from nbdist.words import count
from nbdist.world.agents import module_of
from nbdist.world.link import CALL_TIMEOUT, Link
from nbdist.world.names import NameTable, Shipped
from nbdist.world.past import Past
from nbdist.world.running import RunningTask
from nbdist.world.sent import NOBODY
from nbdist.world.spec import wanted_elsewhere
from nbdist.world.states import Event, State
from nbdist.world.world_state import Standing

ROOT = "nbdist"


def wanted_level(*, is_shown: bool) -> int | None:
    """Say from which level on records are handled here; None where none would be.

    Without a handler logging itself would print them, which the worker's has done.
    """
    known = logging.Logger.manager.loggerDict
    loggers = [
        logger
        for name, logger in [*known.items()]
        if name.startswith(f"{ROOT}.") and isinstance(logger, logging.Logger)
    ]
    # A logger that has neither a level nor handlers is as the one above it.
    own = [logger for logger in loggers if logger.handlers or logger.level]
    listening = [each for each in (logging.getLogger(ROOT), *own) if any(_handlers(each, is_shown))]
    return min((each.getEffectiveLevel() for each in listening), default=None)


def hand_over(record: Record, *, is_shown: bool) -> None:
    """Have this process's handlers handle it, if there are any.

    Where what ranks write `is_shown`, handlers of the root logger that write to the same place,
    as that of `logging.basicConfig`, do not: they would say it twice, and without its rank.
    """
    logger = logging.getLogger(f"{ROOT}.{record.host}.{record.local_rank}")
    handlers = [*_handlers(logger, is_shown)]
    if not logger.isEnabledFor(record.level) or not handlers:
        return
    try:
        logged = as_logged(record)
        if logger.filter(logged):
            for handler in handlers:
                if logged.levelno >= handler.level:
                    handler.handle(logged)
    except Exception:  # noqa: BLE001 (a user's handler or filter can raise anything)
        # As logging does about a handler's error: it must not end a cell that it has no part in.
        if logging.raiseExceptions:
            traceback.print_exc(file=sys.stderr)


def _handlers(logger: logging.Logger, is_shown: bool) -> Iterator[logging.Handler]:  # noqa: FBT001
    """Yield those of a logger and of those above it, as logging finds them."""
    each: logging.Logger | None = logger
    while each is not None:
        is_root = each.parent is None
        for handler in each.handlers:
            if not (is_root and is_shown and _writes_here(handler)):
                yield handler
        each = each.parent if each.propagate else None


def _writes_here(handler: logging.Handler) -> bool:
    """Say whether it writes where this process does; rich's has a console."""
    stream = getattr(handler, "stream", getattr(getattr(handler, "console", None), "file", None))
    ours = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return stream is not None and any(stream is each for each in ours)


def as_logged(record: Record) -> logging.LogRecord:
    """Return it as logging has it, with the worker's `host`, `rank` and `local_rank`."""
    file = os.path.basename(record.pathname)
    return logging.makeLogRecord(
        {
            "name": record.name,
            "msg": record.message,
            "args": None,
            "levelno": record.level,
            "levelname": record.level_name,
            "pathname": record.pathname,
            "filename": file,
            "module": os.path.splitext(file)[0],
            "lineno": record.line,
            "funcName": record.function,
            "created": record.created,
            "msecs": record.created % 1 * 1000,
            "threadName": record.thread,
            "process": record.pid,
            "processName": f"rank{record.rank}",
            "exc_text": record.exception or None,
            "stack_info": record.stack or None,
            "host": record.host,
            "rank": record.rank,
            "local_rank": record.local_rank,
        }
    )


log = logging.getLogger("nbdist.world")

COMING_TIMEOUT = 86_400.0
"""Seconds for other machines to come, on whose queues it depends; their head waits less long."""

STOP_GRACE = 2.0
"""Seconds that idle workers have to run their exit handlers."""

RESTART_GRACE = 0.3

STOP_TIMEOUT = 20.0
"""Seconds for an agent to have ended them; one that hangs is ended with them."""

QUIET_SECONDS = 2.0
"""Of a start, before anything is said of it."""


class Workers(Standing):
    """The workers of a world; `following` and `recovery` act on them."""

    def send(
        self,
        task: Task,
        patience: Patience | None = None,
        shipped: Mapping[str, Shipped] | None = None,
    ) -> RunningTask:
        """Send a task to its ranks, which are ready; `shipped` is what its names are."""
        imports = self.names.take_lost_imports(task.ranks)
        around = self.surroundings.now()
        level = wanted_level(is_shown=self.config.show)
        task = replace(task, log_level=level, imports=imports, around=around)
        running = RunningTask(task, patience or self.config.patience, self.crew, shipped)
        link, packed = self.link, Run(task.id, task.ranks, pack(task), task.segments)
        self.remember(running.patience)
        self.advance(Event.TASK)
        self.running = running
        self.names.sent(running.shipped)
        with running.counting_stops():  # ranks may have begun when it comes
            link.run(packed)
        return running

    # --- start and end --------------------------------------------------------------------

    def starting(self) -> Iterator[Starting]:
        """Start them, unless they are there; says now and then how far they are."""
        if self.state not in (State.STOPPED, State.LOST):
            return
        self.advance(Event.START)
        self.lost, self.dead, self.replaced, self._renumbered = None, {}, {}, None
        self.have_come = {}
        self.names, self.past = NameTable(self.namespace), Past()
        try:
            if self._link is None or not self._link.is_up:
                module = module_of(self.config.launched_by)
                self._link = Link(module, fork_server=self.spec.use_fork_server)
                self._link.open()
            self._remembered = Remember({})
            self.remember()
            if self.code is not None:
                yield from self.code.bringing(self._link.calling, anew=True)
            request = StartWorld(self.spec, wanted_elsewhere(self.config, self.spec))
            timeout = CALL_TIMEOUT if request.wanted is None else COMING_TIMEOUT
            started = yield from self._link.calling(request, timeout)
        except BaseException:  # Stop too: whatever has been started is ended
            self._call_off_start()
            raise
        if isinstance(started, StartFailure):
            self._call_off_start()
            raise StartError(
                started.rank, started.host, started.command, started.reason, started.last_lines
            )
        assert isinstance(started, WorldStarted)
        self.pids, self.logs, self.lacks = started.pids, started.logs, started.lacks
        self._become(started.spec)
        self._place(started.hosts, self._link.agents[0].host)
        if self.code is not None and self.is_elsewhere:  # now that it is known who shares it
            yield from self.code.bringing(self._link.calling, anew=True)
        self.advance(Event.STARTED)

    def _call_off_start(self) -> None:
        self.advance(Event.START_FAILED)
        if left := self.close_link():
            log.warning("%s", left)

    def starting_texts(self) -> Iterator[str]:
        """Start them; `starting 4 workers: 2 ready` when it takes long, and when that changes.

        Comes round without a word now and then, with "".
        """
        said, begun = "", time.monotonic()
        for far in self.starting():
            ready = f"{far.up} ready" if far.up < self.size else "forming their group"
            text = f"starting {count(self.size, 'worker')}: {ready}"
            if far.text:  # how many there will be, machines that come decide
                text = f"starting: {far.text}" + (f" · {far.up} ready" if far.up else "")
            is_quiet = time.monotonic() - begun < QUIET_SECONDS and not far.text
            is_due = text != said and not is_quiet
            if is_due:
                said = text
            yield text if is_due else ""

    def start(self) -> None:
        """Start them, unless they are there; where it takes long a terminal's stderr says so."""
        show_on_terminal(self.starting_texts())

    def start_anew(self, *, agent_too: bool = False) -> None:
        """End them all, with their agent if so wanted, and start as many; no set-up tasks."""
        # Where Stop has cut their end short, it is asked for again.
        are_there = self.state.has_workers or self.state is State.STOPPING
        if self._link is not None and self._link.is_up and are_there:
            self.advance(Event.STOP)
            self._stop(RESTART_GRACE)
            self.advance(Event.STOPPED)
        self._forget_outputs()
        if agent_too:
            self.close_link()
        self.start()

    def shutdown(self) -> str:
        """End them all and their agent; return what of them is left elsewhere, "" for nothing."""
        self.setup.forget()
        self.advance(Event.STOP)
        left = ""
        if self._link is not None and self._link.is_up:
            left = self._stop(STOP_GRACE)
        left = left or self.close_link()
        self.advance(Event.STOPPED)
        return left

    def _stop(self, grace: float) -> str:
        """Have the agent end them, which ends with them where it cannot: then as `close_link`."""
        try:
            self.link.call(StopWorld(grace), STOP_TIMEOUT)
        except (AgentLost, StartError):
            return self.close_link()
        return ""

    def attach(self, link: Link, there: Attached, namespace: dict[str, Any]) -> None:
        """Take over the workers at the other end of this link, as they are."""
        self._link, self.namespace = link, namespace
        self.names = NameTable(namespace)
        self.names.found(there.bound, there.pids)
        self.pids, self.logs, self.lacks = there.pids, there.logs, there.lacks
        self.dead = dict(there.dead)
        self.have_come = dict.fromkeys(there.came)
        self.past.forgotten = there.forgotten
        self.setup.take_over(there.memory.setup)
        self._place(there.hosts, link.agents[0].host)
        self.advance(Event.START)
        self.advance(Event.STARTED)
        if there.run is not None:
            self.running = RunningTask.found(there, self.crew)
            self.advance(Event.TASK)
        if there.dead:
            self.advance(Event.RANK_DIED)
        if not there.is_whole:
            self.advance(Event.ABORTED)

    def adopt(self, link: Link) -> None:
        """Have the agent at the other end of this link start the workers."""
        self._link = link

    def detach_link(self) -> Link | None:
        """Return the link, for the caller to end; the world is none without it."""
        link, self._link = self._link, None
        return link

    def close_link(self) -> str:
        """End the agents, if there are any; return what is left elsewhere, "" for nothing."""
        self.names.let_go()
        link = self.detach_link()
        return link.close() if link is not None else ""

    def _forget_outputs(self) -> None:
        """Drop what the workers before had still to say."""
        self.running = None
        self.late.clear()
        while self._link is not None and self._link.arrived:
            item = self._link.arrived.popleft()
            if isinstance(item, Received) and self._link.is_up:
                self._link.received(item)

    # --- what comes up --------------------------------------------------------------------

    def receive(self, timeout: float) -> None:
        """Take in what ranks have shown; wait for the first of it, at most `timeout` seconds."""
        self.link.wait(timeout)
        self.receive_waiting()

    def wake(self) -> None:
        """Have `receive` wait no longer; may be called by a handler of signals."""
        if self._link is not None:
            self._link.wake()

    def receive_waiting(self) -> None:
        """Take in all that has arrived so far; not what comes meanwhile, which may have no end."""
        if (link := self._link) is None:
            return
        for _ in range(len(link.arrived)):
            match link.arrived[0]:
                case AgentLost() as lost:
                    self.take_loss(lost)
                case Received() as batch:
                    link.received(batch)
                case Located(places):
                    if self.running is not None:
                        self.running.take_places(places, time.monotonic())
                case Aborted(places):
                    self._take_aborted(places)
                case Came(host):
                    self.have_come[host] = None
                case Silent() as silent:
                    if self.running is not None:
                        self.running.silent = silent
                case Used(usage):
                    if self.running is not None:
                        self.running.usage = usage
                case (rank, task_id, output):
                    self._take(rank, task_id, output)
            link.arrived.popleft()
            if self._link is not link:
                return

    def take_late(self) -> list[tuple[int, Any]]:
        """Return what ranks have said outside of tasks since this was last asked."""
        late = [*self.late]
        self.late.clear()
        return late

    def take_loss(self, lost: AgentLost) -> None:
        """Note that the agent has ended, and its workers with it."""
        self.lost = lost
        if self.running is not None:
            self.running.take_loss(lost)
        self.advance(Event.AGENT_LOST)
        self.close_link()

    def _take_aborted(self, places: Mapping[int, Place]) -> None:
        if self.running is not None:
            self.advance(Event.ABORTED)
            self.running.take_aborted(places, time.monotonic())

    def _take(self, rank: int, task_id: str, output: Any) -> None:
        if isinstance(output, Record):
            host = self.machines.name(rank) or output.host
            hand_over(replace(output, host=host), is_shown=self.config.show)
            return
        if isinstance(output, Died):
            self.dead[rank] = output
            self.advance(Event.RANK_DIED)
        running = self.running
        if running is not None and not _is_of(running, rank, task_id, output):
            running = None
        if isinstance(output, Done):
            received = running.received(rank) if running and output.received else {}
            self.names.finished(rank, output, received)
        if isinstance(output, Moved):
            if running is not None:
                running.moved[rank] = output
            return
        if running is None and isinstance(output, InputRequest):
            self.link.enter(rank, InputReply(output.number, problem=NOBODY))
            return
        if running is None:
            self.late.append((rank, output))
            return
        if running.breaks_group(output):
            self.advance(Event.ABORTED)
        if running.is_of_another(rank, output):
            self.late.append((rank, output))
        running.receive(rank, output)
        if not running.unfinished and self.state is not State.BROKEN:
            self.advance(Event.TASK_DONE)


def _is_of(running: RunningTask, rank: int, task_id: str, output: Any) -> bool:
    """Say whether it is the task's; also where a rank says more while others still run it."""
    if task_id == running.task.id:
        return True
    return isinstance(output, Visible) and not task_id and running.waits_after(rank)


def show_on_terminal(texts: Iterable[str]) -> None:
    """Show the last of these in one line of stderr, which is gone at the end."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    shown = False
    try:
        for text in filter(None, texts):
            if is_terminal:
                shown = True
                sys.stderr.write(f"\r\x1b[K{text}")
                sys.stderr.flush()
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
