"""The workers of a world: their state, tables about them, and the sending of a task.

Runs in the notebook's process, on the thread that made the world.  Functions that use and change
the tables are in `nbdist.world.lifecycle` for the start and the end of the workers, in
`nbdist.world.inbox` for the messages of their agent, and in `nbdist.world.recovery` for the loop
that waits for a task.  The subclass `Session` has such functions as methods.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nbdist import topology
from nbdist.config import LOCAL, OnFailure, Patience, WorldConfig
from nbdist.errors import AgentLost, WorldNotStarted
from nbdist.output.curves import Curves
from nbdist.output.events import Died
from nbdist.system.folders import removed_folder
from nbdist.wire import messages
from nbdist.wire.frames import pack
from nbdist.wire.messages import Attached, HandoverState, Healed, SendInput
from nbdist.wire.node_messages import processes
from nbdist.wire.spec import WorldSpec
from nbdist.wire.work import InputReply, OpCall, Task
from nbdist.world.agent_link import Link
from nbdist.world.code_sync import CodeSync
from nbdist.world.name_table import NameTable
from nbdist.world.result import wanted_level
from nbdist.world.sent_objects import Parcel
from nbdist.world.spec import NotebookSurroundings, make_spec
from nbdist.world.states import (
    NO_INPUT,
    Event,
    Machines,
    Renumbering,
    WorldState,
    compare,
    next_state,
)
from nbdist.world.task_history import Setup, TaskHistory
from nbdist.world.task_run import Members, TaskRun

if TYPE_CHECKING:
    from nbdist.world.widgets import Widgets


FOLDER_REMOVED = "the notebook's folder {} was removed: the workers start in {}"
LATE_KEPT = 1000  # the most outputs outside of tasks that are kept, such as output of threads


class KeptVariables(NamedTuple):
    """Variables that a restart keeps: their names, and by rank their pickle, as frames."""

    names: tuple[str, ...] = ()
    frames: Mapping[int, list[bytes]] = {}


class Workers:
    """The workers of a world, and the connection to their agent.

    `Session` is the subclass that runs tasks.  Several tasks can run side by side on different
    ranks: `running` is the task that was sent last, and `runs` has this task and the tasks that
    ranks still ran when it was sent.  Any thread may set `kernel_exiting` when this process is
    about to end.
    """

    def __init__(self, config: WorldConfig, attached: Attached | None = None) -> None:
        """Make the spec of a new world and start nothing; or use the spec of an attached world."""
        self._state = WorldState.STOPPED
        self.namespace: dict[str, Any] = sys.modules["__main__"].__dict__
        self.pids: Mapping[int, int] = {}
        self.logs: Mapping[int, str] = {}
        self.missing: tuple[str, ...] = ()  # sentences about features that libraries lack
        # Texts for the user: why the ranks share no group, how lost machines can join again, and a
        # warning about the options.
        self.problem = self.rejoin_hint = self.warning = ""
        self.folder_note = ""  # where workers start if the notebook's folder was removed
        self.machines = Machines()
        self.is_elsewhere = False  # True if a head manages the workers, on one or several machines
        self.late: deque[tuple[int, Any]] = deque(maxlen=LATE_KEPT)  # see `pop_late_outputs`
        self.curves = Curves()  # the curves of all tasks, also of tasks before a restart
        self.names = NameTable(self.namespace)
        self.dead: dict[int, Died] = {}
        self.replaced: dict[int, Died] = {}  # deaths of restarted ranks, until the user is told
        # Process ids of dead ranks whose death a cell has reported before they could be replaced.
        self.told_deaths: set[int] = set()
        self.setup, self.past = Setup(), TaskHistory()
        self.kept = KeptVariables()  # the variables of a failed restart, for the next try
        # The policy that was carried out last: a requested restart always heals.
        self.last_policy: OnFailure = "heal"
        self.renumbering = Renumbering(0, 0, {})  # the change when the group was last formed again
        self._renumbered: Renumbering | None = None  # all changes since `pop_renumbering`
        self.joined: dict[str, None] = {}  # machines that have joined, and that could have ranks
        self.widgets: Widgets | None = None  # made for the first widget that a page can show
        self.shows_widgets = False
        self.lost: AgentLost | None = None
        self.running: TaskRun | None = None
        self.runs: list[TaskRun] = []
        self.failed_runs: list[TaskRun] = []  # tasks in which ranks died that were not replaced yet
        # Called before a task is sent: waits until no rank of the task runs another task.
        self.wait_until_free: Callable[[Collection[int]], None] = lambda ranks: None
        # Called in each round of the loop that waits for a task: shows other tasks' output.
        self.step_others: Callable[[], None] = lambda: None
        self.is_reading_items = False  # True while the user's iterable gives items of `World.map`
        self.kernel_exiting = threading.Event()
        self.link_or_none: Link | None = None  # see `link`, which raises errors instead
        self._remembered = HandoverState()
        self.config = config
        self.configure(config, attached.spec if attached else None)

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
        """The layout of the world, such as `2x4`: the nodes, and the workers on rank 0's node."""
        slot = self.spec.slot(0)
        return f"{slot.nodes}x{slot.local_world_size}"

    @property
    def members(self) -> Members:
        """The present workers, as a new `TaskRun` records them."""
        heals = self.on_failure == "heal"
        return Members(self.size, self.backend, self.machines, self.pids, self.namespace, heals)

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks of the world."""
        return tuple(range(self.size))

    def resolve(self, n: int | str) -> int:
        """Return the number of workers that `n`, such as "auto", means for this world."""
        workers = topology.parse_workers(str(n))
        if self.config.launcher_name != LOCAL and not isinstance(workers, int):
            return self.size  # the other machines have already determined the size
        return topology.resolve(workers, len(self.spec.gpus), topology.usable_cores())

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks that run a task."""
        return tuple(sorted(rank for run in self.runs for rank in run.unfinished))

    @property
    def is_idle(self) -> bool:
        """Whether no rank runs a task."""
        return not self.unfinished

    @property
    def state(self) -> WorldState:
        """The state that users read; the tasks of ranks decide it while the group is READY."""
        busy = [run for run in self.runs if run.unfinished]
        if self._state is not WorldState.READY or not busy:
            return self._state
        if any(run.stop.is_left for run in busy):
            return WorldState.STUCK
        are_stopping = any(run.stop.is_stopping for run in busy)
        return WorldState.INTERRUPTING if are_stopping else WorldState.RUNNING

    @property
    def is_whole(self) -> bool:
        """Whether free ranks can run a task now, because all ranks share a group or need none."""
        return self._state is WorldState.READY

    @property
    def is_broken(self) -> bool:
        """Whether the group must be formed again, which requires that no rank runs a task."""
        return self._state is WorldState.BROKEN

    @property
    def known_runs(self) -> list[TaskRun]:
        """The tasks that messages can be about: tasks in progress, and the task sent last."""
        last = self.running
        return self.runs if last is None or last in self.runs else [*self.runs, last]

    def find_run(self, task_id: str) -> TaskRun | None:
        """Return the task with this id, if a rank has not finished it or it was sent last."""
        return next((run for run in self.known_runs if run.task.id == task_id), None)

    def is_running(self, run: TaskRun) -> bool:
        """Whether this task of the present workers still runs on a rank."""
        return run in self.runs and bool(run.unfinished) and self.state.has_workers

    @property
    def link(self) -> Link:
        """The link to the agent; raises WorldNotStarted without a link, ForkedProcess in a fork."""
        if self.link_or_none is None:
            raise WorldNotStarted("This")
        self.link_or_none.check_process()
        return self.link_or_none

    @property
    def is_connected(self) -> bool:
        """Whether the world has a link to an agent that is neither lost nor closed."""
        return self.link_or_none is not None and self.link_or_none.is_up

    @property
    def on_failure(self) -> OnFailure:
        """The policy for the death of a worker: "heal", "stop" or "restart-all"."""
        return self.config.on_failure

    @on_failure.setter
    def on_failure(self, policy: OnFailure) -> None:
        self.config = self.config.with_changes(on_failure=policy)

    def outlives_kernel(self, seconds: float = 0.0) -> bool:
        """Return True if this process is about to end and the workers stay.

        Waits at most `seconds` until `kernel_exiting` is set.
        """
        return self.config.detach and self.kernel_exiting.wait(seconds)

    # --- what changes ---------------------------------------------------------------------

    def advance(self, event: Event) -> None:
        """Change the state according to an event.  No other function changes it."""
        self._state = next_state(self._state, event)

    def configure(self, config: WorldConfig, spec: WorldSpec | None = None, name: str = "") -> None:
        """Use this config and this spec for the next start.

        Without `spec`, a spec is made from the config; `name` is for a config without a name.
        Raises UsageError if the config is not valid here.
        """
        if spec is None:
            spec, self.warning = make_spec(config, name)
            removed = removed_folder()
            self.folder_note = FOLDER_REMOVED.format(removed, spec.cwd) if removed else ""
        self.config, self.spec = config, spec
        self.code = CodeSync(Path(spec.cwd)) if config.sync_code else None
        self.surroundings = NotebookSurroundings(spec)

    def remember(self, patience: Patience | None = None) -> None:
        """Send the agent the data that another notebook needs to take the world over.

        Does nothing without a link, if the world cannot be detached, or if the agent has the data.
        """
        may_be = self.config.detach or self._remembered.config.detach
        if (link := self.link_or_none) is None or not link.is_up or not may_be:
            return
        memory = self.memory(patience or self.config.patience)
        if memory != self._remembered:
            self._remembered = memory
            link.send(memory)

    def memory(self, patience: Patience) -> HandoverState:
        """Return the data that another notebook needs to take the world over.

        The config names the launcher, because the other notebook may have another default.
        """
        config = replace(self.config, launcher=self.config.launcher_name)
        return HandoverState(config, patience, (*self.setup.tasks.items(),))

    def reset(self) -> None:
        """Clear the tables about earlier workers before a start; keep set-up cells and curves."""
        self.lost, self.dead, self.replaced, self._renumbered = None, {}, {}, None
        self.runs, self.failed_runs, self.told_deaths = [], [], set()
        if self.widgets is not None:
            self.widgets.end()
        self.joined, self._remembered = {}, HandoverState()
        # Objects keep their keys, because the pickles of variables that a restart keeps refer to
        # objects by their keys.
        before = self.names.objects
        self.names, self.past = NameTable(self.namespace), TaskHistory()
        self.names.objects.follow(before)

    def apply_healed(self, healed: Healed) -> None:
        """Update processes, spec and tables by rank after the agent has tried to form the group.

        There may be more or fewer workers than before, and ranks may have other numbers.
        """
        now = processes(healed.pids, healed.spec.slots)
        change = compare(processes(self.pids, self.spec.slots), now)
        self.problem, self.rejoin_hint, after = healed.problem, healed.rejoin_hint, change.after
        if change.before != after and not self.is_elsewhere:
            self.config = self.config.with_size(after)
        self.spec = healed.spec
        self.record_processes(healed, self.machines.name(0))
        if change.before != after or change.moved:
            self.names.renumber(change.was, after)
            if self.widgets is not None:
                self.widgets.renumber(change.became)
            self.setup.renumber(change)
            self.past.renumber(change)
        # Forget deaths of ranks beyond the new size, such as of a rank that could not be added; and
        # if numbers have changed, deaths whose number belongs to another process now.
        self.dead = {
            rank: died
            for rank, died in self.dead.items()
            if rank < after and (died.pid == self.pids[rank] or not change.moved)
        }
        self.renumbering = change
        self._renumbered = self._renumbered.then(change) if self._renumbered else change

    def record_processes(self, reply: messages.WorldStarted | Healed | Attached, host: str) -> None:
        """Store the processes, log folders and machines of all ranks.

        All ranks are on `host` unless the message names their machines.
        """
        self.pids, self.logs, self.is_elsewhere = reply.pids, reply.logs, bool(reply.hosts)
        one = Machines.one(host, self.size)
        self.machines = Machines.of(reply.hosts, self.spec) if reply.hosts else one

    def replace_dead(
        self, made: Collection[str], brought: Mapping[int, Collection[str]]
    ) -> tuple[int, ...]:
        """Record that dead ranks were replaced by new processes, and return these ranks.

        `made` are names that the tasks in which the ranks died have bound, and `brought` has by
        rank the names that were sent with these tasks: see `NameTable.record_replaced`.
        """
        ranks = tuple(self.dead)
        self.names.record_replaced(ranks, made, brought)
        self.replaced |= self.dead
        self.dead, self.failed_runs = {}, []
        return ranks

    def pop_replaced(self) -> dict[int, Died]:
        """Return the deaths of the ranks that were replaced since the last call, and clear them."""
        replaced, self.replaced = self.replaced, {}
        return replaced

    def mark_reported(self, ranks: Iterable[int]) -> None:
        """Record that the user was told, or need not be told, that these ranks were replaced."""
        for rank in ranks:
            self.replaced.pop(rank, None)

    def pop_renumbering(self) -> Mapping[int, int]:
        """Return by old number the new number of each rank that has moved since the last call."""
        renumbering, self._renumbered = self._renumbered, None
        return renumbering.moved if renumbering else {}

    def pop_late_outputs(self) -> list[tuple[int, Any]]:
        """Return pairs of rank and output, for outputs outside of tasks since the last call."""
        outputs, self.late = [*self.late], deque(maxlen=LATE_KEPT)
        return outputs

    # --- a task ---------------------------------------------------------------------------

    def send(
        self,
        task: Task,
        patience: Patience | None = None,
        shipped: Mapping[int, Parcel] | None = None,
    ) -> TaskRun:
        """Send a task to its ranks, which must be free; `is_whole` has to be True.

        `shipped` has by rank the names and objects that the task brings to the rank.
        """
        imports = self.names.pop_lost_imports(task.ranks)
        around = self.surroundings.now()
        level = wanted_level(is_shown=self.config.show)
        # `values.inspect` may ask about objects that the notebook has dropped: the ranks must not
        # forget them before they answer.
        is_question = isinstance(task.work, OpCall) and task.work.op == "values.inspect"
        forget = {} if is_question else self.names.objects.pop_forgotten(task.ranks)
        deleted = self.names.pop_deleted(task.ranks)
        task = replace(
            task,
            log_level=level,
            imports=imports,
            around=around,
            forget=forget,
            deleted=deleted,
        )
        running = TaskRun(task, patience or self.config.patience, self.members, shipped)
        run = messages.RunTask(task.id, task.ranks, pack(task), task.segments, running.rules)
        link = self.link
        self.remember(running.patience)
        self.runs = [run for run in self.runs if run.unfinished]
        self.runs.append(running)
        self.running = running
        running.sent_at = self.names.record_sent(running.shipped_names())
        with running.stop.counting_presses():  # Stop must not raise: ranks may have begun
            link.send(run)
        return running

    def refuse_prompts(self, running: TaskRun) -> None:
        """Answer all open prompts with the error that this front end cannot ask for input."""
        for rank in running.prompts.ranks:
            self.link.send(
                SendInput(rank, InputReply(running.prompts[rank].number, problem=NO_INPUT))
            )
            running.prompts.drop(rank, time.monotonic())

    # --- the connection to the agent --------------------------------------------------------

    def adopt(self, link: Link) -> None:
        """Use the agent of this link for the next start, instead of a new agent."""
        self.link_or_none = link

    def detach_link(self) -> Link | None:
        """Remove and return the link, for the caller to close; None without a link."""
        link, self.link_or_none = self.link_or_none, None
        return link

    def close_link(self) -> str:
        """Close the link and end the agent, if there is one.

        Returns a sentence about processes that are left on other machines, "" for none.
        """
        link = self.detach_link()
        return link.close() if link is not None else ""
