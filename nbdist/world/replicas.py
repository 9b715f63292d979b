"""Sentences about the damage that a stopped or failed task has left on its ranks.

Ranks of one training may have made different numbers of optimizer steps, and variables may hold a
part of the result of an aborted collective.  `nbdist.world.recovery` and
`nbdist.world.outcome_texts` call these functions in the notebook's process at the end of a task.
The functions do no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping

from nbdist.output.events import Done
from nbdist.output.wording import fold_ranks
from nbdist.wire.control import MAX_STEPS_APART
from nbdist.words import name_ranks

MAX_NAMES = 4  # the most modules, and the most optimizers, that a suggested command names

FIRST_STEPS = 2
"""Ranks without a step count as part of the training if no rank has made more steps than this."""


def find_training(done: Mapping[int, Done]) -> dict[int, Done]:
    """Return the ranks that train one model together, judged by their numbers of optimizer steps.

    Ranks without a step are left out if any rank has made more than FIRST_STEPS steps.  Returns no
    ranks if no rank has made a step, or if the remaining ranks' numbers differ by more than
    MAX_STEPS_APART.
    """
    max_steps = max((each.steps for each in done.values()), default=0)
    training = {rank: each for rank, each in done.items() if each.steps or max_steps <= FIRST_STEPS}
    is_one = (
        max_steps > 0
        and max_steps - min(each.steps for each in training.values()) <= MAX_STEPS_APART
    )
    return training if is_one else {}


def ends_differ(done: Mapping[int, Done], *, were_cut: bool) -> bool:
    """Return True if ranks ended at different optimizer steps, or were cut inside of a step.

    To end inside of a step is different from ending after the same step.  `were_cut` is as in
    `differing_text`.  Returns False for a single rank.  Also returns False if all ranks raised
    their own errors inside of the same step, probably at the same line.
    """
    last_steps = {(each.steps, each.is_in_step) for each in done.values()}
    is_inside = any(is_in_step for _, is_in_step in last_steps)
    return len(done) > 1 and (len(last_steps) > 1 or (were_cut and is_inside))


def differing_text(
    done: Mapping[int, Done],
    modules: Iterable[str] = (),
    optimizers: Iterable[str] = (),
    *,
    sharded: Container[str] = (),
    were_cut: bool = True,
) -> str:
    """Return which ranks ended at which step, and what helps; "" if replicas seem to be equal.

    Write `Replicas may differ: ranks 0-1,3 ended after optimizer step 42, rank 2 after step 41.`.
    Then suggest commands that compare a module of `modules` on all ranks, and that copy `modules`
    and `optimizers` from one rank to all.  If a module is in `sharded`, it cannot be copied like
    that, and another remedy is named.  `were_cut` is True if Stop, an abort of collectives or a
    death ended the task, and False if the ranks' own errors did.
    """
    done = find_training(done)
    if not ends_differ(done, were_cut=were_cut):
        return ""
    ranks_by_end = fold_ranks({rank: (each.is_in_step, each.steps) for rank, each in done.items()})
    ((is_inside, step), ranks), *others = ranks_by_end.items()
    where = f"{name_ranks(ranks)} ended {_place(is_inside)} optimizer step {step}"
    for (is_inside, step), ranks in others:
        where += f", {name_ranks(ranks)} {_place(is_inside)} step {step}"
    models = sorted(modules)[:MAX_NAMES] or ["model"]
    if parts := [f"`{name}`" for name in models if name in sharded]:
        return (
            f"Replicas may differ: {where}. Shards of {', '.join(parts)} cannot be copied from one "
            "rank: restore a snapshot or a checkpoint, or run again the cells that make them."
        )
    names = [*models, *(sorted(optimizers)[:MAX_NAMES] or ["optimizer"])]
    source = _source(done)
    return (
        f"Replicas may differ: {where}. `%dist_diff {models[0]}` shows the differences, "
        f"`%dist_sync {' '.join(names)} --from {source} -r all` copies from rank {source}."
    )


def incomplete_text(done: Mapping[int, Done]) -> str:
    """Return which variables aborted collectives may have written in part; "" for none.

    Write `` `x` on ranks 2-3 may hold a part of the result (all_reduce, line 3).``.
    """
    incomplete = {
        rank: each.incomplete for rank, each in done.items() if each.incomplete is not None
    }
    sentences = []
    for (operation, line, parts), ranks in fold_ranks(incomplete).items():
        names = ", ".join(_part_text(part, name) for part, name in parts)
        who = f"{names[0].upper()}{names[1:]} on {name_ranks(ranks)}"
        where = f"{operation}, line {line}" if line else operation
        sentences.append(f"{who} may hold a part of the result ({where}).")
    return " ".join(sentences)


def _part_text(part: str, name: str) -> str:
    return f"{part} of `{name}`" if part and name else part or f"`{name}`"


def _place(is_in_step: bool) -> str:  # noqa: FBT001
    return "inside" if is_in_step else "after"


def _source(done: Mapping[int, Done]) -> int:
    """Return the rank to copy from: of the ranks that ended outside of a step, the most advanced.

    If all ranks ended inside of a step, this is the rank with the most steps.
    """
    return min(done, key=lambda rank: (done[rank].is_in_step, -done[rank].steps, rank))


def occurring_names(source: str, names: Iterable[str]) -> list[str]:
    """Return the names that occur in the source code as words."""
    words = set(re.findall(r"\w+", source))
    return [name for name in names if name in words]


def occurring_or_all(source: str, names: Iterable[str]) -> list[str]:
    """Return the names that occur in the source code; all names if none does."""
    all_names = [*names]
    return occurring_names(source, all_names) or all_names
