"""The loop over a running task, the healing of the process group, and the set-up of new workers.

Runs in the notebook's process, on the thread that made the world.  The agent supervises the task
meanwhile (`nbdist.agent.supervisor`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeAlias

from nbdist.errors import AgentLost, NbdistError, StartError
from nbdist.wire.messages import (
    AbortRanks,
    Grow,
    Heal,
    Healed,
    Interrupt,
    RequestLocations,
    Scale,
    SpareRanks,
)
from nbdist.wire.places import LOCATED_TIMEOUT, RankPosition
from nbdist.wire.work import OpCall, Task
from nbdist.wire.world_facts import died_again_text
from nbdist.words import one_line
from nbdist.world import hangs, inbox, lifecycle
from nbdist.world.engine import Engine
from nbdist.world.outcome_texts import (
    healing_text,
    lacking_text,
    outside_text,
    replicas_text,
    restart_text,
)
from nbdist.world.replicas import incomplete_text
from nbdist.world.states import Event, WorldState
from nbdist.world.stop import SPARE_TIMEOUT, StopAction, StopEvent
from nbdist.world.task_error import error_of
from nbdist.world.task_run import RankOutputs, TaskRun

CELL_TICK = 0.25  # seconds between two yields without output; short, since panels show a clock
EAGER_SECONDS, EAGER_TICK = 0.2, 0.05  # a shorter tick at first, so that the panel appears in time
LEAVE_SECONDS = 0.3  # seconds after a SIGINT for a kernel that is about to end to say so
LEFTOVERS_GRACE = 1.5  # seconds for GPUs to complete collectives, and for torch to notice that
SLOW_GRACE = 5.0  # seconds for a finished rank to answer: its machine may be busy, or its GIL held
HEAL_TIMEOUT = 900.0  # seconds; must exceed a head's time for all tries; Stop ends the wait
HEAL_AFTER_STOP = 8.0  # seconds that healing may take after Stop; then the next cell tries again
SCALE_TIMEOUT = 3000.0  # seconds; must exceed a head's time to try a size and restore the old one

Following: TypeAlias = Generator[RankOutputs, float | None, None]
"""The type of `follow`'s generator: yields new outputs; send it the longest wait in seconds."""

# --- one task, to its end ---------------------------------------------------------------------


def follow(engine: Engine, running: TaskRun, *, answers: bool = False) -> Following:
    """Yield new output of a task until all its ranks have finished; then heal a broken group.

        for outputs in follow(engine, running):
            with running.stop.counting_presses():
                draw(outputs)

    While this generator waits, and in the `with` block, Stop raises no KeyboardInterrupt, but is
    counted in `running.stop.presses`.  The first Stop interrupts the ranks (unless
    `Patience.holds_stop` is True), and the loop goes on.  The second Stop ends the loop, even if
    ranks are unfinished, and so does `Patience.control_timeout` after the first.  For a job, whose
    `control_timeout` is None, each Stop only interrupts the ranks.  `nbdist.world.stop` has the
    whole table.

    The group is healed as the option `--on-failure` says.  If other ranks still run another task,
    the group is healed after that task.  The loop ends early if this process is about to end and
    the workers outlive it.

    With `answers` the caller has to answer prompts (`AgentConnection.reply`); without it, prompts
    raise an error on the ranks.  The caller may send the generator the longest time in seconds to
    wait for messages; more than `CELL_TICK` counts as `CELL_TICK`, and 0.0 does not wait.
    """
    stop = running.stop
    longest: float | None = None
    stop.handle(StopEvent.WAIT, time.monotonic())
    while running.unfinished:
        with stop.counting_presses():
            # Handle Stop first: it may have come while the task was sent, or in the caller's loop.
            if engine.outlives_kernel(LEAVE_SECONDS if stop.will_interrupt else 0.0):
                return
            if _carry_out(engine, running, stop.poll(time.monotonic())):
                return
            tick = CELL_TICK if running.age > EAGER_SECONDS else EAGER_TICK
            tick = tick if longest is None else min(longest, tick)
            remaining = max(0.0, stop.deadline - time.monotonic())
            _receive_beside_others(engine, running, min(tick, remaining))
        longest = yield running.pop_outputs()
        if not answers:
            engine.connection.refuse_prompts(running)
    if _carry_out(engine, running, stop.handle(StopEvent.FINISHED, time.monotonic())):
        return
    while _waits_to_restart(engine, running):
        with stop.counting_presses():
            tick = CELL_TICK if longest is None else min(longest, CELL_TICK)
            _receive_beside_others(engine, running, tick)
        longest = yield running.pop_outputs()
    while not running.is_over:
        if _carry_out(engine, running, stop.poll(time.monotonic())):
            return
        with stop.counting_presses(raises=True):
            _complete(engine, running)
        yield running.pop_outputs()


def _receive_beside_others(engine: Engine, running: TaskRun, timeout: float) -> None:
    """Wait at most `timeout` seconds for messages, and handle them.

    Unless the task `running` is itself a job, also show the new output of jobs.
    """
    inbox.receive(engine, timeout)
    if not running.stop.is_of_job:  # a job must not show the output of other jobs
        engine.hooks.step_others()


def _waits_to_restart(engine: Engine, running: TaskRun) -> bool:
    """Return True if a failed task is to run again, but other ranks must finish their task before.

    The group is broken in this case, and healing it needs all ranks.
    """
    has_attempts = running.task.attempt.number < running.task.attempt.most
    is_waiting = has_attempts and bool(running.transcript.errors) and not running.stop.was_pressed
    return is_waiting and engine.is_broken and not engine.task_table.is_idle


def interrupt(engine: Engine, running: TaskRun) -> None:
    """Interrupt the ranks that still run a task, without a Stop of the user.

    If the task has `Patience.holds_stop`, the first interrupt is only recorded.
    """
    if running.unfinished:
        actions = running.stop.handle(StopEvent.INTERRUPT, time.monotonic())
        _carry_out(engine, running, actions)


def interrupt_all(engine: Engine) -> None:
    """Interrupt all ranks that run a task, as `interrupt` does."""
    for run in engine.task_table.runs:
        interrupt(engine, run)


def _carry_out(engine: Engine, running: TaskRun, actions: Iterable[StopAction]) -> bool:
    """Carry out the actions of `running.stop`; return True if `follow` must return control."""
    for action in actions:
        match action:
            case StopAction.INTERRUPT | StopAction.RECORD:
                running.record_interrupt(time.monotonic())
                if action is StopAction.INTERRUPT:
                    interrupts = Interrupt(running.unfinished, running.stop.interrupts)
                    engine.connection.link.send(interrupts)
            case StopAction.SPARE:
                if running.stop.may_spare:
                    _spare_ranks(engine, running)
                if running.unfinished:
                    more = running.stop.handle(StopEvent.SPARED, time.monotonic())
                    return _carry_out(engine, running, more)
            case StopAction.RETURN:
                return True
    return False


def _spare_ranks(engine: Engine, running: TaskRun) -> None:
    """Ask the agent not to kill the ranks that still run the task, until Stop is pressed again.

    Sets `running.stop.spared` to the ranks for which the agent agrees.
    """
    answer = engine.connection.link.ask(SpareRanks(running.unfinished))
    with suppress(TimeoutError, AgentLost):
        running.stop.spared = frozenset(answer.result(SPARE_TIMEOUT))
    inbox.receive_waiting(engine)


def _locate(engine: Engine, running: TaskRun) -> Mapping[int, RankPosition]:
    reports, now = running.reports, time.monotonic()
    reports.record_request(now)
    engine.connection.link.send(RequestLocations(engine.rank_table.everyone, now))
    while not (reports.places or running.ending.lost):
        if (remaining := now + LOCATED_TIMEOUT - time.monotonic()) <= 0:
            break
        inbox.receive(engine, remaining)
    return reports.places


def _complete(engine: Engine, running: TaskRun) -> None:
    """Do the work after all ranks have finished a task: heal the group, and explain the result.

    Writes the facts and sentences of `running.ending`.  Adds the task to the `TaskHistory`, unless
    the task is run again.
    """
    # Write the first sentences now, because a Stop can break off the steps below.
    running.ending = replace(
        running.ending,
        replicas_text=replicas_text(engine, running),
        incomplete_text=incomplete_text(running.transcript.done),
    )
    if text := outside_text(running):
        running.transcript.warn(text)
    _abort_leftovers(engine, running)
    if running.members.heals and hangs.why_died(running.transcript.deaths, {}):
        # Locate the survivors before healing, which makes them forget their last collectives.
        places = {**running.reports.unwoken, **_locate(engine, running)}
        why_died = hangs.why_died(running.transcript.deaths, places)
        running.ending = replace(running.ending, why_died=why_died)
    # In a stalled network the ranks could not form a group now, so the next cell heals the group.
    # `heal` does nothing if other ranks run another task; then, too, a later cell heals the group.
    # Healing can also replace ranks that did not die in this task; these count as lost too.
    again = () if running.stop.was_stalled else heal(engine)
    if lost := sorted({*running.transcript.deaths, *again}):
        is_healed = engine.rank_table.last_policy == "heal"
        running.ending = replace(
            running.ending,
            recovery_text=healing_text(engine, lost),
            recovered_ranks=tuple(lost) if is_healed else engine.rank_table.everyone,
        )
    if engine.task_table.last is None:  # `heal` has emptied the table to restart all workers
        engine.task_table.last = running
    running.ending = replace(
        running.ending,
        restart_text=restart_text(engine, running),
        lacking_text=lacking_text(engine, running),
    )
    is_again = engine.setup.is_replaying and engine.past.has_cell(running.task)
    if not (running.ending.restart_text or is_again):
        engine.past.add(running)
    running.is_over = True


def _abort_leftovers(engine: Engine, running: TaskRun) -> None:
    """Abort collectives that a failed task has left incomplete on its ranks.

    Without this, a collective of the next task would be matched with an incomplete one.  Ranks that
    run another task are left out.
    """
    if not (running.transcript.errors and engine.is_whole and running.rules.has_group):
        return
    now = time.monotonic()
    enough, until = now + (LEFTOVERS_GRACE if running.rules.runs_ahead else 0.0), now + SLOW_GRACE
    looks = 0
    last_places: dict[int, RankPosition] = {}  # of the ranks that have answered
    while looks < 2 or time.monotonic() < enough:
        places = _locate(engine, running)
        # Leave out ranks that run other tasks, whose collectives must go on.
        free = {*engine.rank_table.everyone} - {*engine.task_table.unfinished}
        answers = {
            rank: place for rank, place in places.items() if rank in free and not place.holds_gil
        }
        last_places.update(answers)
        running.releases.differing = hangs.differing(last_places)
        # A rank whose collectives have ended begins no further ones, so it need not answer again.
        ended = {rank for rank, place in last_places.items() if not place.unfinished}
        if not free <= {*answers, *ended} and time.monotonic() < until:
            continue
        if not any(place.unfinished for place in last_places.values()):
            return
        looks += 1
        if running.rules.runs_ahead:
            inbox.receive(engine, EAGER_TICK)
    engine.advance(Event.ABORTED)
    engine.connection.link.send(AbortRanks((*sorted(free),)))


# --- healing and scaling of the group ---------------------------------------------------------

# The state is BROKEN once a rank has died or connections of the group were closed.  The remedy is
# the request `Heal`: the agent starts workers in place of dead ones, and all ranks form a group
# again.  The requests `Scale` and `Grow` also change the number of ranks.  `regroup` sends the
# request, updates the tables and the state from the reply, and runs the set-up cells in the new
# workers.


def heal(engine: Engine) -> tuple[int, ...]:
    """Repair a broken group as the `on_failure` policy says; return the ranks that were replaced.

    Does nothing while a rank runs a task, because all ranks have to take part.  With the policy
    "heal", or if no rank has died, the surviving ranks keep their variables, modules, meshes and
    subgroups.  If the group cannot be formed, the state stays BROKEN, and `RankTable.problem` says
    why.  If a rank has died, the policies "stop" and "restart-all" end or restart all workers, and
    no ranks are returned.  A rank that was killed for its restart (`Died.by_restart`) does not
    count as dead here.
    """
    if engine.state is WorldState.HEALING:  # Stop came before `regroup` could record the result
        engine.advance(Event.HEAL_FAILED)
    if not (engine.is_broken and engine.task_table.is_idle):
        return ()
    table, policy = engine.rank_table, engine.config.on_failure
    has_death = any(not died.by_restart for died in table.dead.values())
    if not has_death or policy == "heal":
        return regroup(engine, Heal())[0]
    table.last_policy = policy
    if policy == "stop":
        lifecycle.shutdown(engine)
        return ()
    # Policy "restart-all": restart all workers, as torchrun does.
    dead = table.dead
    try:
        lifecycle.start_anew(engine)
        table.problem = ""
    except (AgentLost, StartError) as error:
        table.problem = str(error)
        return ()
    table.replaced = dead
    replay(engine, table.everyone)
    return ()


def regroup(engine: Engine, request: Heal | Scale | Grow) -> tuple[tuple[int, ...], str]:
    """Let the agent form the group again, and run the set-up cells in new workers.

    Returns the ranks that were replaced, and why the group did not get the requested size, or "".
    If the ranks share no group afterwards, the state is BROKEN, and `RankTable.problem` says why.
    If the agent has ended, the state is LOST.
    """
    table, running = engine.rank_table, engine.task_table.last
    replaced, new, why = tuple[int, ...](), set[int](), ""
    table.last_policy = "heal"
    deaths = (
        died for run in engine.task_table.failed_runs for died in run.transcript.deaths.values()
    )
    table.told_deaths |= {died.pid for died in deaths if died.pid}
    event, timeout = Event.SCALE, SCALE_TIMEOUT
    if isinstance(request, Heal):
        event, timeout = Event.HEAL, HEAL_TIMEOUT
    made, brought = set[str](), dict[int, set[str]]()
    for run in engine.task_table.failed_runs:
        made |= run.made
        for rank, parcel in run.shipped.items():
            brought.setdefault(rank, set()).update(parcel.names)
    engine.advance(event)
    outcome, table.problem = Event.HEAL_FAILED, "it was interrupted"
    try:
        patience = HEAL_AFTER_STOP if running and running.stop.must_hurry else timeout
        healed = engine.connection.link.call(request, timeout, patience)
        assert isinstance(healed, Healed)
        inbox.receive_waiting(engine)  # calls `Engine.apply_healed`
        if table.dead and not table.problem:
            table.problem = died_again_text(table.dead)
        why = healed.not_scaled
        if not table.problem:
            outcome, replaced = Event.HEALED, engine.settle_changes(made, brought)
            new = {*replaced, *table.renumbering.new}
            if isinstance(request, Scale):
                # The user does not know that a rank which was being added has died, so show no line
                # about its death.
                table.mark_reported(table.renumbering.new)
    except AgentLost as lost:
        outcome, table.problem = Event.AGENT_LOST, ""
        inbox.handle_agent_loss(engine, lost)
    finally:
        engine.advance(outcome)
    if new:
        try:
            record_changes(engine, [rank for rank in table.everyone if rank not in new])
        finally:
            engine.names.record_lost(new)
    replay(engine, new)
    return replaced, why


def record_changes(engine: Engine, ranks: Collection[int]) -> None:
    """Ask ranks which objects of the notebook they have changed, and record their answers.

    Does nothing if the ranks have no such object, or cannot run a task now.  Raises
    KeyboardInterrupt after Stop.
    """
    objects = engine.names.objects
    keys = set[int]().union(*map(objects.of, ranks))
    names = engine.names.assigned_again()
    can_ask = engine.is_whole and {*engine.task_table.unfinished}.isdisjoint(ranks)
    if not ((keys or names) and ranks and can_ask):
        return
    work = OpCall("values.inspect", {"objects": dict.fromkeys(keys), "names": names})
    with _keeping_last_task(engine):
        running = engine.send(Task(uuid.uuid4().hex, tuple(ranks), work))
        for _ in follow(engine, running):
            pass
        if running.stop.was_pressed:
            raise KeyboardInterrupt
        if error_of(running) is None:
            for rank, inspected in running.result().by_rank.items():
                objects.record_changed(inspected.changed)
                for name, replaced in inspected.names.items():
                    if replaced.is_changed:
                        engine.names.record_changed_value(name, rank)
            objects.have_run = False


@contextmanager
def _keeping_last_task(engine: Engine) -> Iterator[None]:
    """Restore `TaskTable.last` after this block, in which nbdist runs tasks of its own.

    `last` stays a task of the block if Stop has returned control while ranks still run that task.
    The next cell then waits for these ranks.
    """
    tasks = engine.task_table
    last_task = tasks.last
    try:
        yield
    finally:
        if tasks.last is None or not tasks.last.unfinished:
            tasks.last = last_task


# --- set-up cells -----------------------------------------------------------------------------


def replay(engine: Engine, ranks: Collection[int]) -> NbdistError | None:
    """Run the set-up cells on new workers; `ranks` are the new ranks.

    Each cell runs on those of its own ranks that are new.  Returns None, or the error of the first
    cell that fails; later cells do not run then.  Raises KeyboardInterrupt after Stop.  If a set-up
    cell kills its worker, the worker's replacement does not run the cells again.
    """
    setup = engine.setup
    if setup.is_replaying or not engine.is_whole:
        return None
    setup.is_replaying, setup.problem = True, ""
    try:
        with _keeping_last_task(engine):
            for key, kept in [*setup.tasks.items()]:
                if not (on := tuple(rank for rank in kept.ranks if rank in ranks)):
                    continue
                task, parcels = setup.task_for(key, on)
                running = engine.send(task, shipped=parcels)
                for _ in follow(engine, running):
                    pass
                if running.stop.was_pressed:
                    raise KeyboardInterrupt
                if error := error_of(running):
                    setup.problem = f" A `--setup` cell failed there: {one_line(str(error))}"
                    return error
    finally:
        setup.is_replaying = False
    return None
