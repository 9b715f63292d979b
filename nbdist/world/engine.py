"""The engine of a world: its state, its tables, and the sending of a task to ranks.

Runs in the notebook's process, on the thread that made the world.  Any thread may call
`Engine.ask_from_thread`, which waits for the agent's answer, and `Engine.consult`.  No other method
waits for the agent or the workers.

Functions that wait are in other modules and take the engine as their first argument.
`nbdist.world.inbox` handles the messages of the agent, `nbdist.world.lifecycle` starts and ends the
workers, `nbdist.world.recovery` follows a task to its end and heals the group,
`nbdist.world.dispatch` sends a task once its ranks are ready, and `nbdist.world.restarts` restarts
and scales.  Each of these modules uses only those that are named before it.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from nbdist import topology
from nbdist.config import LOCAL, Patience, WorldConfig
from nbdist.errors import AgentLost, BadRanks
from nbdist.system.folders import removed_folder
from nbdist.topology import RankSelection
from nbdist.values.payload import Payload, Segment
from nbdist.wire import messages
from nbdist.wire.control import TypingQuestion
from nbdist.wire.frames import pack
from nbdist.wire.messages import Attached, Consult, Healed, Reply, RequestBody
from nbdist.wire.spec import WorldSpec
from nbdist.wire.work import CellCode, OpCall, Task, Work
from nbdist.words import format_ranks
from nbdist.world.code_sync import CodeSync
from nbdist.world.connection import AgentConnection
from nbdist.world.name_table import NameTable
from nbdist.world.rank_table import RankTable
from nbdist.world.result import wanted_level
from nbdist.world.sent_objects import Parcel
from nbdist.world.spec import NotebookSurroundings, make_spec
from nbdist.world.states import Event, WorldState, next_state
from nbdist.world.task_history import ANY, Setup, TaskHistory
from nbdist.world.task_run import Members, TaskRun
from nbdist.world.task_table import TaskTable
from nbdist.world.world_outputs import WorldOutputs

FOLDER_REMOVED = "the notebook's folder {} was removed: the workers start in {}"
RANK_STATUS_TIMEOUT = 10.0  # seconds for an answer about ranks; longer than a head takes


class KeptVariables(NamedTuple):
    """Variables that a restart keeps: their names, and by rank the frames of their pickle."""

    names: tuple[str, ...] = ()
    frames: Mapping[int, list[bytes]] = {}


@dataclass
class StartNotes:
    """Texts about the next or the last start, for the user; a field is empty if it says nothing.

    `warning` is about the options, and `folder_note` says where workers start if the notebook's
    folder was removed.  `missing` are sentences about features that the workers' libraries lack.
    """

    warning: str = ""
    folder_note: str = ""
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotebookHooks:
    """Functions of the notebook that the loops of a world call; by default they do nothing.

    `wait_until_free(ranks)` is called before a task is sent, and waits until no job runs on these
    ranks.  `step_others()` shows the new output of jobs.  It is called in each round of the loop
    that waits for a task, unless this task is a job itself.
    """

    wait_until_free: Callable[[Collection[int]], None] = lambda ranks: None
    step_others: Callable[[], None] = lambda: None


def new_spec(config: WorldConfig, name: str = "") -> tuple[WorldSpec, StartNotes]:
    """Return the spec of a world that this process will start, and texts about the start.

    `name` is used if the config has no name.  Raises UsageError if the config is not valid here.
    """
    spec, warning = make_spec(config, name)
    removed = removed_folder()
    return spec, StartNotes(warning, FOLDER_REMOVED.format(removed, spec.cwd) if removed else "")


class Engine:
    """A world in the notebook's process: its state, and the tables about ranks, tasks and names.

    `rank_table` has facts about the workers, `task_table` the tasks in progress, `connection` the
    link to the agent, and `names` which rank has which variable.  `setup` has the cells that new
    workers run, and `past` the tasks that have ended.  `kept` has the variables that a failed
    restart was to keep, for the next try.  `code` copies the notebook's folder to other machines;
    it is None without `--sync-code`.
    """

    def __init__(self, config: WorldConfig, attached: Attached | None = None) -> None:
        """Make the spec of a new world and start nothing; or use the spec of an attached world."""
        spec, self.start_notes = (
            (attached.facts.spec, StartNotes()) if attached else new_spec(config)
        )
        self._state = WorldState.STOPPED
        self.rank_table, self.task_table = RankTable(spec), TaskTable()
        self.connection = AgentConnection()
        self.names = NameTable(sys.modules["__main__"].__dict__)
        self.setup, self.past = Setup(), TaskHistory()
        self.outputs = WorldOutputs()
        self.kept = KeptVariables()
        self.hooks = NotebookHooks()
        self._set_config(config)

    def __repr__(self) -> str:
        running = "".join(f" {run}" for run in self.task_table.unfinished_runs)
        return f"<Engine {self.size} ranks, {self.state.value}{running}>"

    @property
    def size(self) -> int:
        """The number of workers; before the start, how many there will be."""
        return self.rank_table.size

    @property
    def state(self) -> WorldState:
        """The state that users read; in a READY world it depends on the tasks that ranks run."""
        busy = self.task_table.unfinished_runs
        if self._state is not WorldState.READY or not busy:
            return self._state
        if any(run.stop.is_left for run in busy):
            return WorldState.STUCK
        are_stopping = any(run.stop.is_stopping for run in busy)
        return WorldState.INTERRUPTING if are_stopping else WorldState.RUNNING

    @property
    def is_whole(self) -> bool:
        """Whether a free rank can run a task now: the ranks share a group, or need none."""
        return self._state is WorldState.READY

    @property
    def is_broken(self) -> bool:
        """Whether the group must be formed again, which requires that no rank runs a task."""
        return self._state is WorldState.BROKEN

    def is_running(self, run: TaskRun) -> bool:
        """Return True if a rank still runs this task; False also if the workers have ended."""
        return run in self.task_table.runs and bool(run.unfinished) and self.state.has_workers

    @property
    def members(self) -> Members:
        """Facts about the present workers, which a new `TaskRun` stores."""
        table, heals = self.rank_table, self.config.on_failure == "heal"
        namespace = self.names.namespace
        return Members(table.size, table.backend, table.machines, table.pids, namespace, heals)

    def outlives_kernel(self, seconds: float = 0.0) -> bool:
        """Return True if this process is about to end, and its workers will keep running.

        Waits at most `seconds` for the kernel to announce its end.
        """
        return self.config.detach and self.connection.kernel_exiting.wait(seconds)

    # --- options, start and numbers of ranks ------------------------------------------------

    def resolve(self, n: int | str) -> int:
        """Return the number of workers that `n`, such as 4 or "auto", means for this world."""
        workers = topology.parse_workers(str(n))
        if self.config.launcher_name != LOCAL and not isinstance(workers, int):
            return self.size  # the other machines have already determined the size
        return topology.resolve(workers, len(self.rank_table.spec.gpus), topology.usable_cores())

    def configure(self, config: WorldConfig, name: str = "") -> None:
        """Use this config for the next start; `name` is used if the config has no name.

        Raises UsageError if the config is not valid here; nothing has changed then.
        """
        self.rank_table.spec, self.start_notes = new_spec(config, name)
        self._set_config(config)

    def _set_config(self, config: WorldConfig) -> None:
        self.config, spec = config, self.rank_table.spec
        self.code = CodeSync(Path(spec.cwd)) if config.sync_code else None
        self.surroundings = NotebookSurroundings(spec)

    def advance(self, event: Event) -> None:
        """Change the state after an event.  No other method changes the state."""
        self._state = next_state(self._state, event)

    def reset(self) -> None:
        """Clear the tables about earlier workers before a start; keep set-up cells and curves."""
        self.rank_table.forget_deaths()
        self.task_table.runs, self.task_table.failed_runs = [], []
        self.outputs.end_widgets()
        self.connection.forget_loss()
        # Objects keep their keys, because the pickles of variables that a restart keeps refer to
        # objects by their keys.
        before = self.names.objects
        self.names, self.past = NameTable(self.names.namespace), TaskHistory()
        self.names.objects.follow(before)

    def apply_healed(self, healed: Healed) -> None:
        """Update processes, spec and tables by rank after the agent has tried to form the group.

        There may be more or fewer workers than before, and ranks may have other numbers.  Each
        answer of the agent must be applied, even if Stop has ended the wait for the answer.
        """
        was_elsewhere, change = self.rank_table.is_elsewhere, healed.change
        if not self.rank_table.apply_healed(healed):
            return
        if change.before != change.after and not was_elsewhere:
            self.config = self.config.with_size(change.after)
        if change.before != change.after or change.moved:
            self.names.renumber(change.was, change.after)
            self.outputs.renumber(change)
            self.setup.renumber(change)
            self.past.renumber(change)

    def settle_changes(
        self, made: Collection[str], brought: Mapping[int, Collection[str]]
    ) -> tuple[int, ...]:
        """Record that the group is whole again; return the ranks that were replaced for that.

        The arguments are about the tasks in which ranks died: `made` are names that these tasks
        have bound, and `brought` has by rank names that were sent with the tasks.  New workers lack
        such names (`NameTable.record_replaced`).
        """
        ranks = self.rank_table.settle_changes()
        self.names.record_replaced(ranks, made, brought)
        self.task_table.failed_runs = []
        return ranks

    def remember(self, patience: Patience | None = None) -> None:
        """Send the agent the data with which another notebook can take the world over.

        `patience` is by default the world's.  See `AgentConnection.hand_over`.
        """
        patience = patience or self.config.patience
        self.connection.hand_over(self.config, patience, self.setup.tasks)

    # --- a task -------------------------------------------------------------------------------

    def select_ranks(
        self, ranks: RankSelection | None = None, rank: int | None = None
    ) -> tuple[int, ...]:
        """Return the ranks that the arguments select, by default all (`topology.select_ranks`)."""
        if ranks is None and rank is None:
            return self.rank_table.everyone
        # Before the start, other machines may still change the world's size.  So a list of numbers
        # is compared with the size only after the start.
        is_final = self.state.has_workers or isinstance(ranks, str)
        return topology.select_ranks(ranks, rank, self.size if is_final else sys.maxsize)

    def task(
        self,
        work: Work | str = "",
        *,
        ranks: RankSelection | None = None,
        rank: int | None = None,
        **fields: Any,
    ) -> Task:
        """Return a new task with these `fields`, by default on all ranks.

        If `work` is a text, the text is a cell's source.  Raises the errors of `select_ranks`.
        """
        work = CellCode(work) if isinstance(work, str) else work
        return Task(uuid.uuid4().hex, self.select_ranks(ranks, rank), work, **fields)

    def with_current_ranks(self, task: Task, before: Sequence[int]) -> Task:
        """Return the task with ranks that exist in the world's present size.

        Healing may have changed the size.  `before` are all ranks of the earlier size: a task on
        all of them becomes a task on all present ranks.  Any other task stays as it is, or raises
        BadRanks if one of its ranks does not exist.
        """
        if task.ranks == before:
            return replace(task, ranks=self.rank_table.everyone)
        if missing := [rank for rank in task.ranks if rank >= self.size]:
            raise BadRanks(format_ranks(task.ranks), self.size, f"there is no rank {missing[0]}")
        return task

    def send(
        self,
        task: Task,
        patience: Patience | None = None,
        shipped: Mapping[int, Parcel] | None = None,
    ) -> TaskRun:
        """Send a task at once to its ranks, which must be free; `is_whole` has to be True.

        `shipped` has by rank the names and objects that the task brings to the rank.  If the ranks
        may not be free, use `nbdist.world.dispatch.submit`.
        """
        imports = self.names.pop_lost_imports(task.ranks)
        around = self.surroundings.now()
        level = wanted_level(is_shown=self.config.show)
        # The op `values.inspect` may ask about objects that the notebook has dropped.  The ranks
        # must not forget these objects before they answer.
        is_question = isinstance(task.work, OpCall) and task.work.op == "values.inspect"
        forget = {} if is_question else self.names.pop_forgotten(task.ranks)
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
        link = self.connection.link
        self.remember(running.patience)
        self.task_table.add(running)
        running.sent_at = self.names.record_sent(running.shipped_names())
        with running.stop.counting_presses():  # raises nothing at a Stop: ranks may run the task
            link.send(run)
        return running

    def count_stop(self, task: Task) -> bool:
        """Count a press of Stop for a task, and return True; False if Stop has to raise instead.

        The handler of SIGINT calls this method.  If the result is True, `recovery.follow` wakes and
        acts on the press.  If the result is False, the handler raises KeyboardInterrupt.  The
        result is False before the task is sent, after the task has ended and a later task was sent,
        and while `StopState.is_interruptible` is True.
        """
        running = self.task_table.find_run(task.id)
        if running is None or running.stop.is_interruptible:
            return False
        running.stop.presses += 1
        if self.connection.link_or_none is not None:
            self.connection.link_or_none.events.wake()
        return True

    def keep_setup(
        self,
        key: str,
        task: Task,
        segment: Segment | None,
        packed: Payload | None = None,
        parcel: Parcel | None = None,
    ) -> None:
        """Keep a set-up cell, which every new worker on one of its ranks will run.

        `key` identifies the cell.  `packed` has the names and objects that each new worker gets,
        and `parcel` records them.  `segment`, the shared memory of their values, is closed once the
        cell is dropped.
        """
        task = replace(task, forget={}, deleted={}, names={} if packed is None else {ANY: packed})
        self.setup.keep(key, task, segment, parcel)
        self.remember()

    # --- questions to the agent, from any thread ------------------------------------------------

    def ask_from_thread(self, request: RequestBody) -> Any:
        """Send the agent a request about ranks, and return the reply; any thread may call this.

        Returns an empty tuple if there are no workers, if the agent has ended, or if no reply comes
        within `RANK_STATUS_TIMEOUT`.  Other messages of the agent are not handled.
        """
        future = self.connection.request(request) if self.state.has_workers else None
        try:
            answer = () if future is None else future.result(RANK_STATUS_TIMEOUT)
        except (AgentLost, TimeoutError):
            return ()
        return self.rank_table.with_host_names(answer)

    def consult(self, question: TypingQuestion, ranks: Iterable[int]) -> Future[Reply] | None:
        """Ask an idle rank of `ranks` about code that the user types; any thread may call this.

        Returns a future, or None if there are no workers or the agent has ended.  Wait for the
        future with a timeout.  Its result is None if no rank is idle, or if none answers in time.
        """
        if not self.state.has_workers:
            return None
        return self.connection.request(Consult(tuple(ranks), question))
