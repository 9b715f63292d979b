"""Texts about a task in progress: where its ranks are, and which of them wait for others.

Runs in the notebook's process.  The functions only read the task.
"""

from __future__ import annotations

from nbdist.wire.places import RankPosition, is_call_mismatch
from nbdist.words import name_ranks
from nbdist.world import hangs
from nbdist.world.task_run import TaskRun


def activity_text(running: TaskRun) -> str:
    """Say where the unfinished ranks of a task are; return "" if no place is known."""
    places, unfinished = running.reports.present_places, running.unfinished
    known_places = {rank: places[rank] for rank in unfinished if rank in places}
    return hangs.waits_text(known_places, running.task.source)


def waiting_text(running: TaskRun) -> str:
    """Say which machines do not respond, whether a network is stalled, and which ranks wait.

    Returns "" if there is nothing to say.
    """
    reports = running.reports
    stalled = hangs.stalled_text(reports.places, running.members.machines)
    texts = hangs.silent_text(reports.silent), stalled, _collectives_text(running)
    return " · ".join(filter(None, texts))


def _collectives_text(running: TaskRun) -> str:
    """Say which ranks wait in which collective, and where other ranks are.

    The text is "" if no rank waits in a collective, or if a rank waits for input.  If the task runs
    on all ranks, the text is also "" in the first `Patience.hang_timeout` seconds.
    """
    if running.prompts.ranks:  # the other ranks may wait for the rank that waits for input
        return ""
    unfinished, ran = running.unfinished, running.task.ranks
    present = running.reports.present_places
    places = {rank: present.get(rank, RankPosition()) for rank in unfinished}
    waiting = any(place.operation for place in places.values())
    others = set(range(running.members.size)) - set(ran)
    # In a cell for some ranks, a rank may wait for ranks that do not run the cell.
    if not waiting or (running.age < running.patience.hang_timeout and not others):
        return ""
    text = hangs.waits_text(places, running.task.source)
    if done := set(ran) - set(unfinished):
        text += f" · {name_ranks(done)} finished"
    if others:
        text += f" · not in this cell: {name_ranks(others)}"
    if is_call_mismatch(places):
        text += " · these calls do not match and would wait forever"
    return text
