"""In which order cells stand in a script, and what they are called there; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nbdist.notebook.shipping.free_names import names_bound, names_used
from nbdist.world.past import PastTask

_MAGICS = {
    "values.bind_scattered": "%dist_scatter",
    "values.bind_synced": "%dist_sync",
    "values.give_back": "%dist_restart --keep",
    **{"snapshot": "%dist_restore", "call": "World.run"},
}
"""What people have typed, by op, or the op's module."""

_TITLES = {"script": "`%dist_run {}`", "push": "`%dist_push`"}


def in_order(tasks: Iterable[PastTask], codes: Mapping[int, str]) -> list[PastTask]:
    """Order cells as they ran; `codes` has their Python by `first`.

    A cell that was run again stands where it ran last, unless one that ran since it first did
    uses what it binds: then where it ran first, as in a notebook that is read from the top.
    """
    tasks = [*tasks]
    places = {task.first: task.last for task in tasks}
    used = {first: names_used(code) for first, code in codes.items()}
    for task in tasks:
        if task.runs == 1:
            continue
        bound = names_bound(codes[task.first])
        since = (each for each in tasks if task.first < places[each.first] < task.last)
        if any(used[each.first] & bound for each in since):
            places[task.first] = task.first
    return sorted(tasks, key=lambda task: places[task.first])


def title_of(task: PastTask, *, shown: bool = False) -> str:
    """Name a task: `cell 5` for code, `In [5]` as people see it."""
    if task.kind == "call":
        op, module = task.text, task.text.partition(".")[0]
        return f"`{_MAGICS.get(op) or _MAGICS.get(module, op)}`"
    if task.kind != "cell":
        return _TITLES[task.kind].format(task.text)
    if shown and task.number is not None:
        return f"In [{task.number}]"
    return f"cell {task.first if task.number is None else task.number}"
