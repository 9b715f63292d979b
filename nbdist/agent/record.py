"""What a notebook has to know that takes a world over: read off the messages of the one before.

No I/O: `Tether` feeds it with all messages, both ways.  So it serves whoever serves a notebook.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nbdist.agent.outbox import Backlog
from nbdist.output.events import Died, Done, Failure, Output, size_of
from nbdist.topology import Seats
from nbdist.values.payload import Payload
from nbdist.wire.messages import (
    Aborted,
    Answer,
    Ask,
    Attached,
    Came,
    Down,
    Enter,
    Grow,
    Heal,
    Healed,
    LetGo,
    Outputs,
    Remember,
    Reply,
    Request,
    Run,
    Scale,
    StartFailure,
    StartWorld,
    StopWorld,
    Up,
    WorldStarted,
)
from nbdist.wire.node_messages import processes
from nbdist.wire.spec import WorldSpec

TEXT_OF_ALL = 256 << 20
"""Characters of all ranks' text that are kept; of one rank's at most `TEXT_OF_ONE`."""
TEXT_OF_ONE, TEXT_AT_LEAST = 4 << 20, 1 << 16

BATCH = 8 << 20
"""Characters of what is sent again at a time."""

Changing = StartWorld | StopWorld | Heal | Scale | Grow
"""What makes the workers others."""


class Record:
    """A world as the agent has it, and what its last task has shown until it was seen to its end.

    `memory` is what the notebook has said of it.
    """

    def __init__(self) -> None:
        self.memory = Remember({})
        self.spec: WorldSpec | None = None
        self.pids: Mapping[int, int] = {}
        self.run: Run | None = None
        self.began = time.time()
        self.unfinished: set[int] = set()
        self.is_whole = True
        self._logs: Mapping[int, str] = {}
        self._hosts: Mapping[int, str] = {}
        self._came: dict[str, None] = {}
        self._lacks: tuple[str, ...] = ()
        self._dead: dict[int, Died] = {}
        self._bound: dict[int, dict[str, str | None]] = {}
        self._changing: dict[int, Changing] = {}
        self._next_call = 1
        self._tasks = 0
        self._backlog = Backlog()
        self._started, self._started_ns = 0.0, 0
        self._ended: dict[int, float] = {}
        self._lent: dict[str, set[int]] = {}

    def __repr__(self) -> str:
        return f"<Record of {sorted(self.pids)}, {self._backlog}>"

    @property
    def detach(self) -> bool:
        """Whether the world is to outlive its notebook."""
        return bool(self.memory.options.get("detach"))

    @property
    def has_world(self) -> bool:
        """Whether there are workers, or will be."""
        starts = any(isinstance(each, StartWorld) for each in self._changing.values())
        return bool(self.pids) or starts

    @property
    def changes(self) -> bool:
        """Whether the workers are becoming others just now."""
        return bool(self._changing)

    @property
    def state(self) -> str:
        """What the world is doing, in words."""
        if self._changing:
            return "changing"
        if not self.pids:
            return "no workers"
        if self.unfinished:
            return "busy"
        return "ready" if self.is_whole and not self._dead else "broken"

    # --- what goes down and comes up ------------------------------------------------------

    def take_down(self, message: Down) -> None:
        """Take in what the notebook has sent."""
        match message:
            case Remember():
                self.memory = message
            case Ask(number, request):
                self._next_call = max(self._next_call, number + 1)
                if isinstance(request, Changing):
                    self._changing[number] = request
            case Run():
                self._begin(message)
            case Enter(rank, reply):
                self._backlog.answered(rank, reply.number)
            case LetGo(task_id, ranks):
                self._lent.get(task_id, set()).difference_update(ranks)

    def take_up(self, message: Up) -> None:
        """Take in what the notebook gets, or would get if there was one."""
        match message:
            case Answer(number, reply) if number in self._changing:
                self._take_change(self._changing.pop(number), reply)
            case Outputs(items):
                for item in items:
                    self._take(*item)
            case Aborted():
                self.is_whole = False
            case Came(host):
                self._came[host] = None

    def seen(self) -> None:
        """Note that the notebook has seen all that has come up so far."""
        if self.detach and not self.unfinished:
            self._forget()

    def _begin(self, run: Run) -> None:
        self._forget()
        self.run, self.unfinished = run, {*run.ranks} - self._dead.keys()
        self._tasks += 1
        text = min(TEXT_OF_ONE, max(TEXT_AT_LEAST, TEXT_OF_ALL // max(1, len(self.pids))))
        self._backlog = Backlog(text, is_long=True)
        self._started, self._started_ns = time.monotonic(), time.time_ns()
        self.began = time.time()

    def _forget(self) -> None:
        self.run, self._ended = None, {}
        self._backlog = Backlog()

    def _take(self, rank: int, task_id: str, output: Output) -> None:
        match output:
            case Done():
                self._end(rank, task_id)
                self._take_done(rank, task_id, output)
            case Died():
                self._end(rank, self.run.id if self.run else "")
                self._dead[rank] = output
            case Failure() if output.connections:
                self.is_whole = False
        if self.detach:
            self._backlog.add(rank, task_id, output)

    def _end(self, rank: int, task_id: str) -> None:
        if self.run is not None and task_id == self.run.id and rank in self.unfinished:
            self.unfinished.discard(rank)
            self._ended[rank] = time.monotonic()

    def _take_done(self, rank: int, task_id: str, done: Done) -> None:
        bound = self._bound.setdefault(rank, {})
        for name in done.gone:
            bound.pop(name, None)
        bound.update((name, done.imported.get(name)) for name in done.bound)
        if isinstance(done.values, Payload) and done.values.segment is not None:
            self._lent.setdefault(task_id, set()).add(rank)
        # A note of what nobody has asked for again is of no more use.
        self._lent = {task: ranks for task, ranks in self._lent.items() if ranks}

    def _take_change(self, request: Request, reply: Reply) -> None:
        match request, reply:
            case StartWorld(spec), WorldStarted():
                self._end_world()
                self.spec = reply.spec or spec
                self.pids, self._logs, self._lacks = reply.pids, reply.logs, reply.lacks
                self._hosts = reply.hosts
                self.began = time.time()
            case _, StartFailure():
                self._end_world()
            case StopWorld(), _:
                self._end_world()
            case Scale(spec), Healed(pids):
                scaled = spec if len(pids) == spec.world_size else self.spec
                self._take_healed(scaled, reply)
            case Heal() | Grow(), Healed():
                if isinstance(request, Grow):
                    self._came = {}
                self._take_healed(self.spec, reply)

    def _take_healed(self, spec: WorldSpec | None, healed: Healed) -> None:
        spec = healed.spec or spec
        earlier = processes(self.pids, _seats(self.spec))
        before = {process: rank for rank, process in earlier.items()}
        if spec is not None and not healed.spec:
            spec = replace(spec, seats=healed.seats)
        now = processes(healed.pids, _seats(spec))
        was = {rank: before[process] for rank, process in now.items() if process in before}
        self.spec, self.pids, self._logs = spec, healed.pids, healed.logs
        self._hosts, self.is_whole = healed.hosts, not healed.problem
        self._bound = {rank: self._bound.get(old, {}) for rank, old in was.items()}
        # Those that have died again meanwhile are dead.
        self._dead = {r: died for r, died in self._dead.items() if died.pid == healed.pids.get(r)}

    def _end_world(self) -> None:
        self._forget()
        self.pids, self._logs, self._dead, self._bound = {}, {}, {}, {}
        self.unfinished, self.is_whole = set(), True
        self._tasks, self._came = 0, {}

    # --- for the next notebook --------------------------------------------------------------

    def attached(self, since: float) -> Attached:
        """Make the message that says it all, but for what was shown: `again` has that."""
        return Attached(
            memory=self.memory,
            spec=self.spec,
            pids=self.pids,
            logs=self._logs,
            hosts=self._hosts,
            came=tuple(self._came),
            lacks=self._lacks,
            is_whole=self.is_whole,
            dead=self._dead,
            bound=self._bound,
            run=self.run,
            started=self._started,
            started_ns=self._started_ns,
            ended=self._ended,
            next_call=self._next_call,
            forgotten=max(0, self._tasks - (self.run is not None)),
            since=since,
        )

    def again(self) -> list[Outputs]:
        """Return what has been shown and not been seen, in batches."""
        batches: list[list[Any]] = [[]]
        size = 0
        for item in self._backlog.items:
            if size > BATCH:
                batches.append([])
                size = 0
            batches[-1].append(item)
            size += size_of(item[2])
        return [Outputs(tuple(batch)) for batch in batches if batch]

    def unread(self) -> list[LetGo]:
        """Return what has workers release values that went to a notebook which is gone."""
        running = self.run.id if self.run else ""
        found = [LetGo(task, tuple(on)) for task, on in self._lent.items() if task != running]
        for each in found:
            del self._lent[each.task_id]
        return found


def _seats(spec: WorldSpec | None) -> Seats:
    return spec.seats if spec is not None else ()
