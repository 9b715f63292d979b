"""The loop over a running task, the healing of the process group, and the lines about both.

Runs in the notebook's process, on the thread that made the world.  `Session` calls the functions,
which act on its `Workers`.  The agent supervises the task meanwhile (`nbdist.agent.supervisor`).
"""

from __future__ import annotations

import re
import sys
import time
import uuid
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from nbdist import errors
from nbdist.errors import AgentLost, Blame, NbdistError, StartError, WorkerDied, WorldBroken
from nbdist.output import events
from nbdist.output.events import Died, Failure, RankError
from nbdist.values.payload import MODULE, OPTIMIZER, SHARDED
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
from nbdist.words import name_ranks, one_line
from nbdist.world import inbox, lifecycle
from nbdist.world.code_sync import missing_text
from nbdist.world.hangs import differing
from nbdist.world.name_table import list_names
from nbdist.world.replicas import differing_text, incomplete_text, occurring_names, occurring_or_all
from nbdist.world.states import Event, WorldState, size_text
from nbdist.world.stop import SPARE_TIMEOUT, StopAction, StopEvent
from nbdist.world.task_run import RankOutputs, TaskRun
from nbdist.world.workers import Workers

CELL_TICK = 0.25  # seconds between two yields without output; short, as a panel shows a clock
EAGER_SECONDS, EAGER_TICK = 0.2, 0.05  # a shorter tick at first, so that the panel appears in time
LEAVE_SECONDS = 0.3  # seconds after a SIGINT; a kernel that restarts announces its end by then
LEFTOVERS_GRACE = 1.5  # seconds for GPUs to complete collectives, and for nccl2 to notice that
SLOW_GRACE = 5.0  # seconds for a finished rank to answer: its machine may be busy, or its GIL held
HEAL_TIMEOUT = 900.0  # seconds; must exceed a head's time for all tries; Stop ends the wait
HEAL_AFTER_STOP = 8.0  # seconds; then control is returned, and the next cell tries again
SCALE_TIMEOUT = 3000.0  # must exceed a head's time to try a new size and to restore the old one

Following: TypeAlias = Generator[RankOutputs, float | None, None]
"""The generator that `follow` returns; a sent number is the longest wait in seconds."""

NOT_RETRIED_ERRORS = {events.NAME_PROBLEM, events.LEFT_DEBUGGER, "KeyboardInterrupt", "SyntaxError"}
NOT_RETRIED_ERRORS |= {"IndentationError", "TabError"}
"""Names of failures after which a task is not restarted: it would fail again, or was stopped."""

# --- one task, to its end ---------------------------------------------------------------------


def follow(workers: Workers, running: TaskRun, *, answers: bool = False) -> Following:
    """Yield new output of `running` until every rank has finished: `Session.follow`.

        for outputs in session.follow(running):
            with running.stop.counting_presses():
                draw(outputs)

    After the first Stop (KeyboardInterrupt) the ranks are interrupted and the loop goes on.  After
    the second, or after `Patience.control_timeout`, the loop ends while ranks are unfinished; if
    that timeout is None, each Stop interrupts the ranks again: `nbdist.world.stop` has the table.
    In the loop Stop does not raise, but is counted in `running.stop.presses`.  When all ranks have
    finished, a broken group is healed as the policy says, unless other ranks run another task:
    healing then waits for that task's end.  If this process is about to end and the workers outlive
    it, the loop ends.

    With `answers` the caller has to `reply` to prompts; without, ranks get an error.  Send the
    generator the longest time in seconds to wait for messages, at most `CELL_TICK`; 0.0 polls.
    """
    stop = running.stop
    longest: float | None = None
    stop.handle(StopEvent.WAIT, time.monotonic())
    while running.unfinished:
        with stop.counting_presses():
            # Handle Stop first: Stop may have come while the task was sent, or in the consumer.
            if workers.outlives_kernel(LEAVE_SECONDS if stop.will_interrupt else 0.0):
                return
            if _carry_out(workers, running, stop.poll(time.monotonic())):
                return
            tick = CELL_TICK if running.age > EAGER_SECONDS else EAGER_TICK
            tick = tick if longest is None else min(longest, tick)
            remaining = max(0.0, stop.deadline - time.monotonic())
            _receive_beside_others(workers, running, min(tick, remaining))
        longest = yield running.pop_outputs()
        if not answers:
            workers.refuse_prompts(running)
    if _carry_out(workers, running, stop.handle(StopEvent.FINISHED, time.monotonic())):
        return
    while _waits_to_restart(workers, running):
        with stop.counting_presses():
            tick = CELL_TICK if longest is None else min(longest, CELL_TICK)
            _receive_beside_others(workers, running, tick)
        longest = yield running.pop_outputs()
    while not running.is_over:
        if _carry_out(workers, running, stop.poll(time.monotonic())):
            return
        with stop.counting_presses(raises=True):
            _complete(workers, running)
        yield running.pop_outputs()


def _receive_beside_others(workers: Workers, running: TaskRun, timeout: float) -> None:
    """Wait for messages, and show the output of jobs on other ranks while a cell runs."""
    inbox.receive(workers, timeout)
    if not running.is_job:  # jobs are followed in short steps
        workers.step_others()


def _waits_to_restart(workers: Workers, running: TaskRun) -> bool:
    """Return True if a failed task can only be restarted once other ranks have finished their task.

    So it is if attempts are left, but the group is broken: healing the group needs all ranks.
    """
    has_attempts = running.task.attempt.number < running.task.attempt.most
    is_waiting = has_attempts and bool(running.transcript.errors) and not running.stop.was_pressed
    return is_waiting and workers.is_broken and not workers.is_idle


def interrupt(workers: Workers, running: TaskRun) -> None:
    """Interrupt the ranks that still run a task, although Stop was not pressed for it.

    If the task holds Stop (`Patience.holds_stop`), the first interrupt is only recorded.
    """
    if running.unfinished:
        actions = running.stop.handle(StopEvent.INTERRUPT, time.monotonic())
        _carry_out(workers, running, actions)


def _carry_out(workers: Workers, running: TaskRun, actions: Iterable[StopAction]) -> bool:
    """Carry out what Stop does to a task; return True if `follow` must return control."""
    for action in actions:
        match action:
            case StopAction.INTERRUPT | StopAction.RECORD:
                running.record_interrupt(time.monotonic())
                if action is StopAction.INTERRUPT:
                    workers.link.send(Interrupt(running.unfinished, running.stop.interrupts))
            case StopAction.SPARE:
                if running.stop.may_spare:
                    _spare_ranks(workers, running)
                if running.unfinished:
                    more = running.stop.handle(StopEvent.SPARED, time.monotonic())
                    return _carry_out(workers, running, more)
            case StopAction.RETURN:
                return True
    return False


def _spare_ranks(workers: Workers, running: TaskRun) -> None:
    """Ask the agent not to kill the ranks that still run the task, unless Stop is pressed again.

    `running.stop.spared` becomes the ranks that the agent does not kill then.
    """
    answer = workers.link.ask(SpareRanks(running.unfinished))
    with suppress(TimeoutError, AgentLost):
        running.stop.spared = frozenset(answer.result(SPARE_TIMEOUT))
    inbox.receive_waiting(workers)


def _locate(workers: Workers, running: TaskRun) -> dict[int, RankPosition]:
    running.places, running.requested_at = {}, time.monotonic()
    workers.link.send(RequestLocations(workers.everyone, running.requested_at))
    deadline = running.requested_at + LOCATED_TIMEOUT
    while not (running.places or running.lost) and (remaining := deadline - time.monotonic()) > 0:
        inbox.receive(workers, remaining)
    return running.places


def _complete(workers: Workers, running: TaskRun) -> None:
    """Do the work after all ranks have finished a task: heal the group, and explain the result.

    The explaining sentences become attributes of `running`.  Unless the task is restarted, it is
    added to the `TaskHistory`.
    """
    # Write the first sentences now, because a Stop can break off the steps below.
    running.replicas_text = _replicas_text(workers, running)
    running.incomplete_text = incomplete_text(running.done())
    if text := _outside_text(running):
        running.transcript.warn(text)
    _abort_leftovers(workers, running)
    if running.members.heals and running.explain_death({}):
        # Locate the survivors before healing: after it they no longer know their last collectives.
        places = {**running.unwoken, **_locate(workers, running)}
        running.why_died = running.explain_death(places)
    # In a stalled network the ranks could not form a group now; the next cell heals instead.
    # Healing needs all ranks: if some run another task, a later cell heals, too.
    # Healing may restart further ranks, which is why `again` is added to the deaths.
    again = () if running.stop.was_stalled else heal(workers)
    if lost := sorted({*running.deaths, *again}):
        running.recovery_text = healing_text(workers, lost)
        running.recovered_ranks = tuple(lost) if workers.last_policy == "heal" else workers.everyone
    if workers.running is None:  # the policy has restarted all workers
        workers.running = running
    running.restart_text = _restart_text(workers, running)
    running.lacking_text = _lacking_text(workers, running)
    is_again = workers.setup.is_replaying and workers.past.has_cell(running.task)
    if not (running.restart_text or is_again):
        workers.past.add(running)
    running.is_over = True


def _abort_leftovers(workers: Workers, running: TaskRun) -> None:
    """Abort collectives that a failed task has left incomplete.

    Otherwise a collective of the next task would be matched with an incomplete one.  Ranks that run
    another task are left out.
    """
    if not (running.transcript.errors and workers.is_whole and running.rules.has_group):
        return
    now = time.monotonic()
    enough, until = now + (LEFTOVERS_GRACE if running.rules.runs_ahead else 0.0), now + SLOW_GRACE
    looks = 0
    last_places: dict[int, RankPosition] = {}  # of the ranks that have answered
    while looks < 2 or time.monotonic() < enough:
        places = _locate(workers, running)
        free = {*workers.everyone} - {*workers.unfinished}  # collectives of other tasks go on
        answers = {
            rank: place for rank, place in places.items() if rank in free and not place.holds_gil
        }
        last_places.update(answers)
        running.differing = differing(last_places)
        # A rank whose collectives have ended begins no more: only other ranks must answer again.
        ended = {rank for rank, place in last_places.items() if not place.unfinished}
        if not free <= {*answers, *ended} and time.monotonic() < until:
            continue
        if not any(place.unfinished for place in last_places.values()):
            return
        looks += 1
        if running.rules.runs_ahead:
            inbox.receive(workers, EAGER_TICK)
    workers.advance(Event.ABORTED)
    workers.link.send(AbortRanks((*sorted(free),)))


def _outside_text(running: TaskRun) -> str:
    """Say that ranks called collectives of a group which has ranks outside of their task; or ""."""
    outside = {rank: done.outside for rank, done in running.done().items() if done.outside}
    others = set[int]().union(*outside.values())
    if not others:
        return ""
    # The collective has ended, so the other ranks have taken part in it from another task.
    return (
        f"{name_ranks(outside)} called a collective of a group with {name_ranks(others)}, which "
        "ran another cell at the same time: the cells may have exchanged values"
    )


def _lacking_text(workers: Workers, running: TaskRun) -> str:
    """Say which ranks have the name that a rank lacks, or where a missing module is; or ""."""
    rank, failure = running.transcript.root_cause() or (0, None)
    if not isinstance(failure, Failure):
        return ""
    if name := undefined_name(failure):
        ranks = workers.names.ranks_with(name)
        if not ranks or rank in ranks:
            return ""
        verb = "has" if len(ranks) == 1 else "have"
        return f"{name_ranks(ranks)} {verb} `{name}`: `%dist_sync {name} --from {ranks[0]}`."
    if not workers.is_elsewhere:
        return ""
    host = workers.machines.name(rank)
    return missing_text(failure.message, host, Path(workers.spec.cwd), sys.path, workers.code)


def _replicas_text(workers: Workers, running: TaskRun) -> str:
    """Say which ranks of a stopped or failed training ended at another step than others; or ""."""
    if not (running.stop.is_stopping or running.transcript.errors):
        return ""
    source, names = running.task.source, workers.names
    sharded, modules = names.names_of_kind(SHARDED), names.names_of_kind(MODULE)
    modules = occurring_or_all(source, [*sharded, *modules])
    optimizers = occurring_or_all(source, names.names_of_kind(OPTIMIZER))
    trained = [*map(names.ranks_with, occurring_names(source, [*modules, *optimizers]))]
    were_cut = running.stop.is_stopping or bool(running.aborted or running.deaths)
    # A rank without steps, and without models and optimizers of the cell, holds no replica.
    done = {
        rank: each
        for rank, each in running.done().items()
        if each.steps or not trained or any(rank in ranks for ranks in trained)
    }
    return differing_text(done, modules, optimizers, sharded={*sharded}, were_cut=were_cut)


def undefined_name(error: RankError) -> str:
    """Return the name that an error says is not defined; "" if the error does not say that."""
    if not isinstance(error, Failure) or error.name != "NameError":
        return ""
    match = re.match(r"name '(\w+)' is not defined", error.message)
    return match[1] if match else ""


# --- healing and scaling of the group ---------------------------------------------------------

# The state is BROKEN once a rank has died or connections of the group were closed.  The remedy is
# the request `Heal`: the agent starts workers in place of the dead, and all ranks form a group
# again.  `Scale` and `Grow` change the size too.  `regroup` sends the request, updates the tables
# and the state from the reply, and runs the set-up cells in the new workers.


def heal(workers: Workers) -> tuple[int, ...]:
    """Repair a broken group as the `on_failure` policy says; return the ranks that were replaced.

    Does nothing while a rank runs a task, because all ranks have to take part.
    With the policy "heal", or without a death, the surviving ranks keep their variables, modules,
    meshes and subgroups.  If that is impossible, the state stays BROKEN, and `problem` says why.
    After a death the other policies end or restart all workers, and no ranks are returned.  A rank
    that was killed for its restart (`Died.by_restart`) does not count as a death.
    """
    if workers.state is WorldState.HEALING:  # Stop came before `regroup` could record the result
        workers.advance(Event.HEAL_FAILED)
    if not (workers.is_broken and workers.is_idle):
        return ()
    has_death = any(not died.by_restart for died in workers.dead.values())
    if not has_death or workers.on_failure == "heal":
        return regroup(workers, Heal())[0]
    workers.last_policy = workers.on_failure
    if workers.on_failure == "stop":
        lifecycle.shutdown(workers)
        return ()
    # Policy "restart-all": restart all workers, as torchrun does.
    dead = workers.dead
    try:
        lifecycle.start_anew(workers)
        workers.problem = ""
    except (AgentLost, StartError) as error:
        workers.problem = str(error)
        return ()
    workers.replaced = dead
    replay(workers, workers.everyone)
    return ()


def regroup(workers: Workers, request: Heal | Scale | Grow) -> tuple[tuple[int, ...], str]:
    """Let the agent form the group again, and run the set-up cells in its new ranks.

    Returns the ranks that were replaced, and why the group could not get the wanted size, or "".
    If the ranks share no group afterwards, the state is BROKEN and `problem` says why.
    """
    running, replaced, why = workers.running, tuple[int, ...](), ""
    workers.last_policy = "heal"
    deaths = (died for run in workers.failed_runs for died in run.deaths.values())
    workers.told_deaths |= {died.pid for died in deaths if died.pid}
    event, timeout = Event.SCALE, SCALE_TIMEOUT
    if isinstance(request, Heal):
        event, timeout = Event.HEAL, HEAL_TIMEOUT
    made, brought = set[str](), dict[int, set[str]]()
    for run in workers.failed_runs:
        made |= run.made
        for rank, parcel in run.shipped.items():
            brought.setdefault(rank, set()).update(parcel.names)
    workers.advance(event)
    outcome, workers.problem = Event.HEAL_FAILED, "it was interrupted"
    try:
        patience = HEAL_AFTER_STOP if running and running.stop.must_hurry else timeout
        healed = workers.link.call(request, timeout, patience)
        assert isinstance(healed, Healed)
        # Deaths during the request arrive before the reply: these ranks were replaced, too.
        inbox.receive_waiting(workers)
        workers.apply_healed(healed)
        if again := {r for r, died in workers.dead.items() if died.pid == healed.pids[r]}:
            workers.problem = f"{name_ranks(again)} died again"
        why = healed.not_scaled
        if not workers.problem:
            outcome, replaced = Event.HEALED, workers.replace_dead(made, brought)
    except AgentLost as lost:
        outcome, workers.problem = Event.AGENT_LOST, ""
        inbox.handle_agent_loss(workers, lost)
    finally:
        workers.advance(outcome)
    if isinstance(request, Scale):
        # Ranks that were being added and died are new to the user: no line about their restart.
        workers.mark_reported(workers.renumbering.new)
    new = {*replaced, *workers.renumbering.new}
    if new:
        try:
            record_changes(workers, [rank for rank in workers.everyone if rank not in new])
        finally:
            workers.names.record_lost(new)
    replay(workers, new)
    return replaced, why


def record_changes(workers: Workers, ranks: Collection[int]) -> None:
    """Ask ranks which objects of the notebook they have changed, and record their answers.

    Does nothing if the ranks have no such object, or cannot run a task now.  Raises
    KeyboardInterrupt after Stop.
    """
    objects = workers.names.objects
    keys = set[int]().union(*map(objects.of, ranks))
    names = workers.names.assigned_again()
    can_ask = workers.is_whole and {*workers.unfinished}.isdisjoint(ranks)
    if not ((keys or names) and ranks and can_ask):
        return
    work = OpCall("values.inspect", {"objects": dict.fromkeys(keys), "names": names})
    with _keeping_last_task(workers):
        running = workers.send(Task(uuid.uuid4().hex, tuple(ranks), work))
        for _ in follow(workers, running):
            pass
        if running.stop.was_pressed:
            raise KeyboardInterrupt
        if running.error() is None:
            for rank, inspected in running.result().by_rank.items():
                objects.record_changed(inspected.changed)
                for name, replaced in inspected.names.items():
                    if replaced.is_changed:
                        workers.names.record_changed_value(name, rank)
            objects.have_run = False


@contextmanager
def _keeping_last_task(workers: Workers) -> Iterator[None]:
    """Let `workers.running` be the user's last task again after tasks of nbdist in this block.

    But if Stop has returned control while ranks are in a task of the block, that task stays: the
    next cell waits for these ranks.
    """
    last_task = workers.running
    try:
        yield
    finally:
        if workers.running is None or not workers.running.unfinished:
            workers.running = last_task


# --- set-up cells -----------------------------------------------------------------------------


def replay(workers: Workers, ranks: Collection[int]) -> NbdistError | None:
    """Run the set-up cells on new workers, `ranks`: each cell on the ranks that it is for.

    Ends at the first cell that fails, and returns its error; raises KeyboardInterrupt after Stop.
    If a set-up cell kills its worker, the worker's replacement does not run the cells again.
    """
    setup = workers.setup
    if setup.is_replaying or not workers.is_whole:
        return None
    setup.is_replaying, setup.problem = True, ""
    try:
        with _keeping_last_task(workers):
            for key, kept in [*setup.tasks.items()]:
                if not (on := tuple(rank for rank in kept.ranks if rank in ranks)):
                    continue
                task, parcels = setup.task_for(key, on)
                running = workers.send(task, shipped=parcels)
                for _ in follow(workers, running):
                    pass
                if running.stop.was_pressed:
                    raise KeyboardInterrupt
                if error := running.error():
                    setup.problem = f" A `--setup` cell failed there: {one_line(str(error))}"
                    return error
    finally:
        setup.is_replaying = False
    return None


# --- texts about deaths and new sizes ----------------------------------------------------------


def death_error(workers: Workers, dead: Mapping[int, Died]) -> WorkerDied:
    """Return the error about ranks that died while no task ran; it says what was done."""
    rank, died = next(iter(dead.items()))
    host, pid = workers.machines.name(rank), died.pid or workers.pids.get(rank, 0)
    error = WorkerDied(Blame(rank, host, pid, {**dead}), None, died.exit_code, died.end)
    error.add(healing_text(workers, dead))
    return error


def broken_error(workers: Workers) -> WorldBroken:
    """Return the error that the ranks share no group.

    Its text names the variables of `--keep` that are bound again once the group is formed.
    """
    return WorldBroken(workers.problem, list_names(workers.kept.names))


def _restart_text(workers: Workers, running: TaskRun) -> str:
    """Write `rank 2 was killed by SIGKILL: restart 1 of 3`; "" if the task is not restarted."""
    done, max_restarts = running.task.attempt.number, running.task.attempt.most
    cause = running.transcript.root_cause()
    if done >= max_restarts or cause is None or running.stop.was_pressed or not workers.is_whole:
        return ""
    error = running.error()
    if not isinstance(error, errors.WorkerError) or isinstance(error, errors.RanksReleased):
        return ""
    rank, first = cause
    if isinstance(first, Died):
        did = first.end
    elif first.name in NOT_RETRIED_ERRORS:
        return ""
    else:
        did = "failed" if first.name == events.SCRIPT_FAILED else f"raised {first.name}"
        did += f": {one_line(first.message)}" if first.message.strip() else ""
    return f"rank {rank} {did}: restart {done + 1} of {max_restarts}"


def healing_text(workers: Workers, dead: Iterable[int]) -> str:
    """Return a text that says what was done about dead ranks, and which variables are lost.

    If the group is still broken, the text says how to repair the group.
    """
    if workers.is_broken:
        if busy := workers.unfinished:
            return _deferred_text(workers, dead, busy)
        if not workers.problem:
            return "`%dist_restart` restarts all workers; their variables are lost."
        text = str(broken_error(workers))
        return text[0].upper() + text[1:]
    if workers.last_policy == "stop":
        return "All workers were ended (`--on-failure stop`); the next cell starts new ones."
    if workers.last_policy == "restart-all":
        if workers.problem:
            return f"All workers were ended, and could not be restarted: {workers.problem}"
        done = "All workers were restarted (`--on-failure restart-all`)"
        return f"{done}; their variables are lost.{workers.setup.problem}"
    ranks, renumbering = tuple(dead), workers.renumbering
    if renumbering.after < renumbering.before:
        size = size_text(renumbering.after, renumbering.moved)
        text = f"No other machine can take {name_ranks(ranks)}: {size}"
        back = f" {workers.rejoin_hint}" if workers.rejoin_hint else ""
        return f"{text}; the other ranks keep their variables.{back}{workers.setup.problem}"
    did = "was restarted and its" if len(ranks) == 1 else "were restarted and their"
    lacking = f" ({lost})" if (lost := workers.names.lacking_text(ranks)) else ""
    text = f"{name_ranks(ranks)} {did} variables{lacking} are gone"
    return f"{text}{_others_text(workers, ranks)}.{workers.setup.problem}"


def _deferred_text(workers: Workers, dead: Iterable[int], busy: Collection[int]) -> str:
    """Say what is done about dead ranks once other ranks, `busy`, have ended another task."""
    dead, have = {*dead}, "has" if len(busy) == 1 else "have"
    then = f"once {name_ranks(busy)} {have} ended another cell"
    are_all = any(not died.by_restart for died in workers.dead.values())
    if are_all and workers.on_failure == "stop":
        return f"All workers are ended (`--on-failure stop`) {then}."
    if are_all and workers.on_failure == "restart-all":
        policy = "`--on-failure restart-all`"
        return f"All workers are restarted ({policy}), and their variables are lost, {then}."
    verb, theirs = ("is", "its") if len(dead) == 1 else ("are", "their")
    return (
        f"{name_ranks(dead)} {verb} replaced, and {theirs} variables are gone, {then}; "
        "other ranks are unaffected."
    )


def stop_text(workers: Workers, killed: Iterable[int]) -> str:
    """Write `ranks 0-3 ignored Stop and were restarted; variables lost: model, x`."""
    ranks = tuple(killed)
    text = f"{name_ranks(ranks)} ignored Stop"
    if workers.is_broken or workers.last_policy != "heal":
        healing = healing_text(workers, ranks)
        return f"{text}. {healing[0].upper()}{healing[1:]}"
    text += " and was restarted" if len(ranks) == 1 else " and were restarted"
    if lost := workers.names.lacking_text(ranks):
        text += f"; variables lost: {lost}"
    return f"{text}{_others_text(workers, ranks)}.{workers.setup.problem}"


def late_stop_text(running: TaskRun) -> str:
    """Write `Stop came too late: ranks 0-1 have bound x`; call this only after a Stop.

    Returns "" if the task does not hold Stop, or has not succeeded on all ranks.
    """
    if not running.patience.holds_stop or running.unfinished or running.transcript.errors:
        return ""
    ranks, names = running.task.ranks, {*running.shipped_names(), *running.made}
    verb = "has" if len(ranks) == 1 else "have"
    return f"Stop came too late: {name_ranks(ranks)} {verb} bound {list_names(names)}"


def scaled_text(workers: Workers) -> str:
    """Write `now 4 workers`, the ranks that have new numbers, and the variables new ranks lack."""
    renumbering = workers.renumbering
    new, text = renumbering.new, size_text(renumbering.after, renumbering.moved)
    if not new:
        return text
    verb = "does" if len(new) == 1 else "do"
    if lacking := workers.names.lacking_text(new):
        text += f" · new {name_ranks(new)} {verb} not have {lacking}"
        sources = workers.names.sources_of_lacking(new)
        lines = [f"`%dist_sync {' '.join(names)} --from {rank}`" for rank, names in sources.items()]
        copies = "copies" if len(lines) == 1 else "copy"
        them = "it" if sum(map(len, sources.values())) == 1 else "them"
        text += f": {' and '.join(lines)} {copies} {them} there" if lines else ""
    problem = f" ·{workers.setup.problem.rstrip('.')}" if workers.setup.problem else ""
    return text + problem


def _others_text(workers: Workers, ranks: Collection[int]) -> str:
    return "; other ranks are unaffected" if len(set(ranks)) < workers.size else ""
