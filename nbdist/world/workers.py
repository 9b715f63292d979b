"""The workers of a world: their state, their start and end, and the messages that come from them.

Runs in the notebook's process, on the thread that made the world.  `Session` extends `Workers`, and
`nbdist.world.recovery` has the loop that waits for a task.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from nbdist import topology
from nbdist.config import LOCAL, OnFailure, Patience, WorldConfig
from nbdist.errors import AgentLost, StartError, WorldNotStarted
from nbdist.output.curves import Curves
from nbdist.output.events import (
    Comm,
    Died,
    Done,
    Failure,
    InputRequest,
    Moved,
    Record,
    Tracked,
    Visible,
    Warned,
)
from nbdist.system.folders import removed_folder
from nbdist.wire import messages
from nbdist.wire.frames import pack
from nbdist.wire.messages import Attached, Healed, Received, Remember, SendInput, Starting
from nbdist.wire.node_messages import processes
from nbdist.wire.spec import WorldSpec
from nbdist.wire.work import Call, InputReply, Task
from nbdist.words import count
from nbdist.world.agents import module_of
from nbdist.world.code_sync import CodeSync
from nbdist.world.link import CALL_TIMEOUT, Link
from nbdist.world.names import NameTable
from nbdist.world.past import Past, Setup
from nbdist.world.result import hand_over, wanted_level
from nbdist.world.running import Members, TaskRun
from nbdist.world.sent_objects import NOTHING_SENT, Parcel
from nbdist.world.spec import NotebookSurroundings, make_spec
from nbdist.world.states import NO_INPUT, Event, Machines, Renumbering, State, compare, next_state

if TYPE_CHECKING:
    from nbdist.output.events import Output
    from nbdist.world.widgets import Widgets

log = logging.getLogger("nbdist.world")

COMING_TIMEOUT = 86_400.0  # seconds to wait for queued machines; must exceed their head's timeout
STOP_GRACE, RESTART_GRACE = 2.0, 0.3  # seconds that idle workers have to run their exit handlers
STOP_TIMEOUT = 20.0  # seconds for an agent to end the workers; then it is ended, with them
QUIET_SECONDS = 2.0  # a start that takes less time shows no line
FOLDER_REMOVED = "the notebook's folder {} was removed: the workers start in {}"
LATE_KEPT = 1000  # outputs outside of tasks, such as of threads; the log files have all text


class Workers:
    """The workers of a world, and the connection to their agent.

    `Session` is the subclass that runs tasks.  `state` changes in `advance` alone.  Any thread may
    set `kernel_exiting` when this process is about to end.
    """

    def __init__(self, config: WorldConfig, there: Attached | None = None) -> None:
        """Make the spec of a new world and start nothing; or use the spec of an attached world."""
        self.state = State.STOPPED
        self.namespace: dict[str, Any] = sys.modules["__main__"].__dict__
        self.pids: Mapping[int, int] = {}
        self.logs: Mapping[int, str] = {}
        self.missing: tuple[str, ...] = ()  # sentences about features that their libraries lack
        # Why the ranks share no group, how lost machines come back, a warning about the options.
        self.problem = self.rejoin_hint = self.warning = ""
        self.folder_note = ""  # where workers start if the notebook's folder was removed
        self.machines = Machines()
        self.is_elsewhere = False  # True if a head manages the workers, on one machine or several
        self.late: deque[tuple[int, Any]] = deque(maxlen=LATE_KEPT)  # rank, output outside of tasks
        self.curves = Curves()  # of all tasks, also of tasks before a restart
        self.names = NameTable(self.namespace)
        self.dead: dict[int, Died] = {}
        self.replaced: dict[int, Died] = {}  # deaths of restarted ranks, until the user is told
        self.setup, self.past = Setup(), Past()
        self.renumbering = Renumbering(0, 0, {})  # of the last time that the group was formed
        self._renumbered: Renumbering | None = None  # all changes since `take_moved`
        self.joined: dict[str, None] = {}  # machines that have come, and could have ranks
        self.widgets: Widgets | None = None  # made for the first widget that a page can show
        self.shows_widgets = False
        self.lost: AgentLost | None = None
        self.running: TaskRun | None = None
        self.kernel_exiting = threading.Event()
        self._link: Link | None = None
        self._remembered = Remember()
        self.config = config
        self.configure(config, there.spec if there else None)

    @property
    def size(self) -> int:
        """The number of workers; before the start, how many there will be."""
        return self.spec.world_size

    @property
    def backend(self) -> str:
        """The backend of the process group; "none" for workers without a group."""
        return self.spec.backend or "none"

    @property
    def layout(self) -> str:
        """The layout: `1x4`, or `2x4` for two simulated nodes with four workers each."""
        slot = self.spec.slot(0)
        return f"{slot.nodes}x{slot.local_world_size}"

    @property
    def members(self) -> Members:
        """The workers as they are now."""
        heals = self.on_failure == "heal"
        return Members(self.size, self.backend, self.machines, self.pids, self.namespace, heals)

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.size))

    def resolve(self, n: int | str) -> int:
        """Return the number of workers that `n`, such as "auto", means for this world."""
        workers = topology.parse_workers(str(n))
        if self.config.launched_by != LOCAL and not isinstance(workers, int):
            return self.size  # which the other machines have already determined
        return topology.resolve(workers, len(self.spec.gpus), topology.usable_cores())

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks that have not finished the last task."""
        return () if self.running is None else self.running.unfinished

    @property
    def is_idle(self) -> bool:
        """Whether all ranks have finished the last task."""
        return not self.unfinished

    @property
    def link(self) -> Link:
        """The connection to the agent; raises WorldNotStarted, and ForkedProcess in a fork."""
        if self._link is None:
            raise WorldNotStarted("This")
        self._link.check_process()
        return self._link

    @property
    def on_failure(self) -> OnFailure:
        """The policy for the death of a worker: "heal", "stop" or "restart-all"."""
        return self.config.on_failure

    @on_failure.setter
    def on_failure(self, policy: OnFailure) -> None:
        self.config = self.config.but(on_failure=policy)

    def outlives_kernel(self, seconds: float = 0.0) -> bool:
        """Return True if this process is about to end and the workers stay.

        Waits at most `seconds` for the end to be announced.
        """
        return self.config.detach and self.kernel_exiting.wait(seconds)

    # --- what changes ---------------------------------------------------------------------

    def advance(self, event: Event) -> None:
        """Change the state according to an event.  No other function changes it."""
        self.state = next_state(self.state, event)

    def configure(self, config: WorldConfig, spec: WorldSpec | None = None, name: str = "") -> None:
        """Use this config and this spec for the next start.

        Without `spec`, one is made from the config, with this name.  Raises UsageError if the
        config is not valid here.
        """
        if spec is None:
            spec, self.warning = make_spec(config, name)
            gone = removed_folder()
            self.folder_note = FOLDER_REMOVED.format(gone, spec.cwd) if gone else ""
        self.config, self.spec = config, spec
        self.code = CodeSync(Path(spec.cwd)) if config.sync_code else None
        self.surroundings = NotebookSurroundings(spec)

    def remember(self, patience: Patience | None = None) -> None:
        """Send the agent the data that another notebook needs to take the world over.

        Does nothing if the world cannot be detached, or if the agent has the data already.
        """
        may_be = self.config.detach or self._remembered.config.detach
        if self._link is None or not self._link.is_up or not may_be:
            return
        memory = self.memory(patience or self.config.patience)
        if memory != self._remembered:
            self._remembered = memory
            self._link.send(memory)

    def memory(self, patience: Patience) -> Remember:
        """Return the data that another notebook needs to take the world over.

        The config names the launcher: the other notebook may have another default.
        """
        config = replace(self.config, launcher=self.config.launched_by)
        return Remember(config, patience, (*self.setup.tasks.items(),))

    def take_healed(self, healed: Healed) -> None:
        """Update processes, spec and all tables by rank after the group was formed again.

        There may be more or fewer workers than before, and ranks may have other numbers.
        """
        now = processes(healed.pids, healed.spec.slots)
        found = compare(processes(self.pids, self.spec.slots), now)
        self.problem, self.rejoin_hint, after = healed.problem, healed.rejoin_hint, found.after
        if found.before != after and not self.is_elsewhere:
            self.config = self.config.of_size(after)
        self.spec = healed.spec
        self._take_there(healed, self.machines.name(0))
        if found.before != after or found.moved:
            self.names.renumbered(found.was, after)
            if self.widgets is not None:
                self.widgets.renumber(found.became)
            self.setup.renumber(found)
            self.past.renumber(found)
        # Forget deaths of ranks beyond the new size, such as of a rank that could not be added; and
        # if numbers have changed, deaths whose number belongs to another process now.
        self.dead = {
            rank: died
            for rank, died in self.dead.items()
            if rank < after and (died.pid == self.pids[rank] or not found.moved)
        }
        self.renumbering = found
        self._renumbered = self._renumbered.then(found) if self._renumbered else found

    def _take_there(self, there: messages.WorldStarted | Healed | Attached, host: str) -> None:
        """Store the processes, log folders and machines of all ranks.

        All ranks are on `host` unless the message names their machines.
        """
        self.pids, self.logs, self.is_elsewhere = there.pids, there.logs, bool(there.hosts)
        one = Machines.one(host, self.size)
        self.machines = Machines.of(there.hosts, self.spec) if there.hosts else one

    def replace_dead(self, made: Collection[str]) -> tuple[int, ...]:
        """Record that dead ranks were replaced by new processes, and return these ranks.

        They lack the variables that they had, and those that the cell in which they died `made`.
        """
        ranks = tuple(self.dead)
        self.names.replaced(ranks, made)
        self.replaced |= self.dead
        self.dead = {}
        return ranks

    def take_replaced(self) -> dict[int, Died]:
        """Return the deaths of the ranks that were replaced since the last call, and clear them."""
        replaced, self.replaced = self.replaced, {}
        return replaced

    def told(self, ranks: Iterable[int]) -> None:
        """Record that an error has told the user that these ranks were replaced."""
        for rank in ranks:
            self.replaced.pop(rank, None)

    def take_moved(self) -> Mapping[int, int]:
        """Return the new numbers of ranks by their old number at the last call, and clear them."""
        found, self._renumbered = self._renumbered, None
        return found.moved if found else {}

    # --- a task ---------------------------------------------------------------------------

    def send(
        self,
        task: Task,
        patience: Patience | None = None,
        shipped: Mapping[int, Parcel] | None = None,
    ) -> TaskRun:
        """Send a task to its ranks; the state has to be READY.

        `shipped` has by rank the names and objects that the task brings to the rank.
        """
        imports = self.names.take_lost_imports(task.ranks)
        around = self.surroundings.now()
        level = wanted_level(is_shown=self.config.show)
        # `values.inspect` may ask about objects that the notebook has dropped: the ranks must not
        # forget them before they answer.
        is_question = isinstance(task.work, Call) and task.work.op == "values.inspect"
        forget = {} if is_question else self.names.objects.take_forgotten(task.ranks)
        deleted = self.names.take_deleted(task.ranks)
        task = replace(
            task,
            log_level=level,
            imports=imports,
            around=around,
            forget=forget,
            deleted=deleted,
        )
        running = TaskRun(task, patience or self.config.patience, self.members, shipped)
        link, packed = self.link, messages.Run(task.id, task.ranks, pack(task), task.segments)
        self.remember(running.patience)
        self.advance(Event.TASK)
        self.running = running
        running.sent_at = self.names.sent(running.shipped_names())
        with running.counting_stops():  # Stop may come when ranks have begun already
            link.send(packed)
        return running

    # --- start and end --------------------------------------------------------------------

    def starting(self) -> Iterator[Starting]:
        """Start the workers unless they are running; yield the progress of the start.

        Raises StartError; then everything that was started has been ended.
        """
        if self.state not in (State.STOPPED, State.LOST):
            return
        self.advance(Event.START)
        self.lost, self.dead, self.replaced, self._renumbered = None, {}, {}, None
        if self.widgets is not None:
            self.widgets.end()
        self.joined = {}
        # Objects keep their keys, which variables that a restart has kept refer to.
        before = self.names.objects
        self.names, self.past = NameTable(self.namespace), Past()
        self.names.objects.follow(before)
        try:
            if self._link is None or not self._link.is_up:
                module = module_of(self.config.launched_by)
                self._link = Link(module, fork_server=self.spec.config.fork)
                self._link.open()
                if self.code is not None:
                    self.code.forget()
            self._remembered = Remember()
            self.remember()
            if self.code is not None:
                yield from self.code.bringing(self._link.calling, to_new=True)
            timeout = CALL_TIMEOUT if self.config.launched_by == LOCAL else COMING_TIMEOUT
            request = messages.StartWorld(self.spec)
            match started := (yield from self._link.calling(request, timeout)):
                case messages.StartFailure(rank, host, command, reason, last_lines):
                    raise StartError(rank, host, command, reason, last_lines)
        except BaseException:  # Stop too: everything that has been started is ended
            self.advance(Event.START_FAILED)
            if left := self.close_link():
                log.warning("%s", left)
            raise
        assert isinstance(started, messages.WorldStarted)
        self.spec, self.missing = (
            started.spec or self.spec,
            started.missing,
        )  # a head returns the spec, since its machines determine the size
        self._take_there(started, self._link.agent.host)
        if self.code is not None and self.is_elsewhere:  # for machines that do not share the folder
            yield from self.code.bringing(self._link.calling, to_new=True)
        self.advance(Event.STARTED)

    def starting_texts(self) -> Iterator[str]:
        """Start the workers; yield `starting 4 workers: 2 ready`, or "" if the line is unchanged.

        A start that takes less than `QUIET_SECONDS` yields no line.
        """
        said, begun = "", time.monotonic()
        for far in self.starting():
            ready = f"{far.up} ready" if far.up < self.size else "forming their group"
            text = f"starting {count(self.size, 'worker')}: {ready}"
            if far.text:  # of other machines, which determine the number of workers
                text = f"starting: {far.text}" + (f" · {far.up} ready" if far.up else "")
            elif time.monotonic() - begun < QUIET_SECONDS:
                text = ""
            yield text if text != said else ""
            said = text or said

    def start(self) -> None:
        """Start the workers unless they are running; in a terminal, stderr shows a slow start."""
        line, said = MovingLine(sys.stderr), ""
        try:
            for text in self.starting_texts():
                line.show(said := text or said, time.monotonic())
        finally:
            line.clear()

    def start_anew(self, *, agent_too: bool = False) -> None:
        """End all workers, with `agent_too` also their agent, and start as many new workers.

        The set-up cells are not run here.
        """
        # STOPPING: Stop has interrupted the wait for their end, so it is requested again.
        are_there = self.state.has_workers or self.state is State.STOPPING
        if self._link is not None and self._link.is_up and are_there:
            self.advance(Event.STOP)
            self._stop(RESTART_GRACE)
            self.advance(Event.STOPPED)
        self.running = None  # drop all messages of the old workers
        self.late.clear()
        while self._link is not None and self._link.arrived:
            item = self._link.arrived.popleft()
            if isinstance(item, Received) and self._link.is_up:
                self._link.received(item)
        if agent_too:
            self.close_link()
        self.start()

    def shutdown(self) -> str:
        """End all workers and their agent, and forget the set-up cells.

        Returns a sentence about processes that are left on other machines, "" for none.
        """
        self.setup.forget()
        self.advance(Event.STOP)
        left = self._stop(STOP_GRACE) if self._link is not None and self._link.is_up else ""
        left = left or self.close_link()
        self.advance(Event.STOPPED)
        return left

    def _stop(self, grace: float) -> str:
        """Let the agent end the workers; if it does not, end the agent too.

        Returns a sentence about processes that are left on other machines, "" for none.
        """
        try:
            self.link.call(messages.StopWorld(grace), STOP_TIMEOUT)
        except (AgentLost, StartError):
            return self.close_link()
        return ""

    def attach(self, link: Link, there: Attached, namespace: dict[str, Any]) -> None:
        """Take over the running workers of an agent that another notebook has started.

        `there` is the agent's description of their state; `namespace` has the notebook's variables.
        """
        self._link, self.namespace = link, namespace
        self.names = NameTable(namespace)
        self.names.found(there.bound, there.pids)
        self.missing, self.dead = there.missing, dict(there.dead)
        self.joined = dict.fromkeys(there.came)
        self.past.forgotten = there.forgotten
        self.setup.tasks |= dict(there.memory.setup)  # the agent holds the memory with their names
        self._take_there(there, link.agent.host)
        self.advance(Event.START)
        self.advance(Event.STARTED)
        if there.run is not None:
            self.running = TaskRun.found(there, self.members)
            self.advance(Event.TASK)
        if there.dead:
            self.advance(Event.RANK_DIED)
        if not there.is_whole:
            self.advance(Event.ABORTED)

    def adopt(self, link: Link) -> None:
        """Use the agent of this link for the next start, instead of a new agent."""
        self._link = link

    def detach_link(self) -> Link | None:
        """Remove and return the link, which the caller has to close; None if there is none."""
        link, self._link = self._link, None
        return link

    def close_link(self) -> str:
        """Close the link and end the agent, if there is one.

        Returns a sentence about processes that are left on other machines, "" for none.
        """
        link = self.detach_link()
        return link.close() if link is not None else ""

    def refuse(self, running: TaskRun) -> None:
        """Answer all open prompts with an error: this front end cannot ask for input."""
        for rank in running.prompts.ranks:
            self.link.send(
                SendInput(rank, InputReply(running.prompts[rank].number, problem=NO_INPUT))
            )
            running.prompts.drop(rank, time.monotonic())

    # --- messages from the agent ----------------------------------------------------------

    def receive(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for a message, then handle all that have arrived."""
        self.link.wait(timeout)
        self.receive_waiting()

    def receive_waiting(self) -> None:
        """Handle the messages that have arrived; not messages that arrive meanwhile.

        Ranks that print without end would otherwise keep this function busy for ever.
        """
        if (link := self._link) is None:
            return
        for _ in range(len(link.arrived)):
            match link.arrived[0]:
                case AgentLost() as lost:
                    self.take_loss(lost)
                case Received() as batch:
                    link.received(batch)
                case messages.NodeJoined(host):
                    self.joined[host] = None
                case (rank, task_id, output):
                    self._take(rank, task_id, output)
                case news if self.running is not None:
                    if isinstance(news, messages.Aborted):
                        self.advance(Event.ABORTED)
                    self.running.take(news, time.monotonic())
            link.arrived.popleft()
            if self._link is not link:
                return

    def take_late(self) -> list[tuple[int, Any]]:
        """Return the outputs outside of tasks since the last call, with their ranks."""
        late, self.late = [*self.late], deque(maxlen=LATE_KEPT)
        return late

    def take_loss(self, lost: AgentLost) -> None:
        """Record that the agent has ended, and its workers with it; close the link."""
        self.lost = lost
        if self.widgets is not None:
            self.widgets.end()
        if self.running is not None:
            self.running.take_loss(lost)
        self.advance(Event.AGENT_LOST)
        self.close_link()

    def _take(self, rank: int, task_id: str, output: Any) -> None:
        if isinstance(output, Record):
            host = self.machines.name(rank) or output.host
            hand_over(output._replace(host=host), is_shown=self.config.show)
            return
        if self.widgets is not None or isinstance(output, Comm):
            output = self._take_of_widgets(rank, output)
            if output is None:
                return
        if isinstance(output, Died):
            self.dead[rank] = output
            self.advance(Event.RANK_DIED)
        running = self.running
        if isinstance(output, Tracked):
            output = self.curves.placed(task_id, output)
            self.curves.take(rank, task_id, output, self.size)
            if running is not None and task_id == running.task.id:
                running.transcript.curves.take(rank, task_id, output, self.size)
            return
        if isinstance(output, Warned):
            if running is not None and task_id == running.task.id:
                running.transcript.warn(output.text)
            return
        if running is not None and task_id != running.task.id:
            # Output outside of tasks counts as output of the cell that other ranks still run.
            is_more = isinstance(output, Visible) and not task_id and running.waits_after(rank)
            running = running if is_more else None
        if isinstance(output, Done):
            is_received = running is not None and output.received
            received = running.received(rank) if running and is_received else NOTHING_SENT
            self.names.finished(rank, output, received, running.sent_at if running else None)
        if running is None:
            if isinstance(output, InputRequest):
                self.link.send(SendInput(rank, InputReply(output.number, problem=NO_INPUT)))
            elif not isinstance(output, Moved):
                self.late.append((rank, output))
        elif isinstance(output, Moved):
            running.moved[rank] = output
        else:
            # The group is broken: connections were closed by an abort, a death or gloo itself.
            if isinstance(output, Failure) and output.connections and running.members.has_group:
                self.advance(Event.ABORTED)
            if running.is_of_another(rank, output):
                self.late.append((rank, output))
            running.receive(rank, output)
            if not running.unfinished and self.state is not State.BROKEN:
                self.advance(Event.TASK_DONE)

    def _take_of_widgets(self, rank: int, output: Output) -> Output | None:
        """Pass an output to the table of widgets; return what the cell shows of it, or None.

        The first message of a widget makes the table, if a page can show widgets.
        """
        if self.widgets is None:
            if not self.shows_widgets:
                return None
            # Imported here since most worlds have no widgets.
            from nbdist.world.widgets import Widgets

            self.widgets = Widgets()
        return self.widgets.take(rank, output)


REDRAW_SECONDS = 0.25


class MovingLine:
    """A line in a terminal that is drawn again and again; nothing is drawn if it is no terminal.

    Call `clear` before other lines are written.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # An object that a user puts in the place of stdout may lack `isatty`.
        self._is_terminal = bool(getattr(stream, "isatty", bool)())
        self._shown = ""
        self._draw_at = 0.0

    def is_due(self, now: float) -> bool:
        """Return True if the line may be drawn now: four times a second, and after `clear`."""
        return self._is_terminal and now >= self._draw_at

    def show(self, text: str, now: float) -> None:
        """Draw this text in place of the last one if it `is_due`; `now` is monotonic seconds."""
        if not self.is_due(now):
            return
        self._draw_at = now + REDRAW_SECONDS
        # A character in the last column can move some terminals' cursor to the next line.
        text = text[: max(1, shutil.get_terminal_size().columns - 1)]
        if text or self._shown:
            self._draw(text)

    def clear(self) -> None:
        """Erase the line, so that the next output begins at the start of the line."""
        if self._shown:
            self._draw("")
            self._draw_at = 0.0

    def _draw(self, text: str) -> None:
        # Overwrite with spaces, since not every terminal supports an escape sequence to erase.
        self._stream.write(f"\r{text.ljust(len(self._shown))}" + ("" if text else "\r"))
        self._stream.flush()
        self._shown = text
