"""Values of the workers' names, brought to the notebook: what is asked, and what has come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nbdist.errors import UsageError
from nbdist.output.wording import fold_ranks
from nbdist.values.payload import open_payload
from nbdist.values.pickling import unpickle
from nbdist.wire.ops import Brought
from nbdist.wire.task import Call, Task
from nbdist.words import did_you_mean, format_ranks, name_ranks, one_line
from nbdist.world.names import WORKERS_OWN
from nbdist.world.parts import Joining, join
from nbdist.world.session import Session


def check_expressions(expressions: Sequence[str]) -> None:
    """Raise UsageError where one is no expression; before the workers are asked."""
    for text in expressions:
        try:
            compile(text, "<gather>", "eval")
        except SyntaxError as error:
            raise UsageError(f"`{text}` is no expression: {error.msg}.") from None


def gather_task(session: Session, expressions: Sequence[str], ranks: Sequence[int] | None) -> Task:
    """Ask these ranks, by default all, for values of names or expressions."""
    check_expressions(expressions)
    return session.task(Call("values.gather", {"expressions": tuple(expressions)}), ranks=ranks)


def joining_task(session: Session, task: Task, found: Mapping[int, Brought]) -> Task | None:
    """Have ranks put together what is spread over them; None where nothing is.

    All that something is spread over have to do that, in the same order: UsageError where they
    are not asked, or have different things.
    """
    spread = {rank: each.spread for rank, each in found.items() if each.spread}
    if not spread:
        return None
    work = task.work
    assert isinstance(work, Call)
    for rank, parts in spread.items():
        for number, part in enumerate(parts):
            others = {other: spread.get(other, ())[number : number + 1] for other in part.ranks}
            if lacking := [other for other, each in others.items() if each != (part,)]:
                raise UsageError(_spread_text(found[rank].of, part.ranks, lacking, task.ranks))
    return session.task(
        replace(work, arguments={**work.arguments, "joins": True}), ranks=task.ranks
    )


def _spread_text(
    of: str, ranks: Sequence[int], lacking: Sequence[int], asked: Sequence[int]
) -> str:
    over = f"`{of}` is spread over {name_ranks(ranks)} (DTensor, FSDP2)"
    if set(lacking) <= {*asked}:
        do_not = "does not" if len(lacking) == 1 else "do not"
        return f"{over}, and {name_ranks(lacking)} {do_not} have the same of it there."
    return (
        f"{over}: gather it from all of them, without `-r`. Or run in a cell of all of "
        "them `whole = x.full_tensor()`, for a model `whole = get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True))`."
    )


def read(session: Session, task: Task, found: Mapping[int, Brought]) -> list[dict[int, Any]]:
    """Open what the ranks have brought: for each expression its values by rank.

    Raises UsageError where a rank has none, with the ranks that have one.
    """
    try:
        if error := refusal(session, found):
            raise error
        opened = {
            rank: unpickle(open_payload(brought.packed), session.namespace)
            for rank, brought in found.items()
            if brought.packed is not None
        }
    finally:
        lent = (rank for rank, each in found.items() if each.packed and each.packed.segment)
        session.let_go_of(task, lent)
    number = len(next(iter(opened.values()), ()))
    return [{rank: values[index] for rank, values in opened.items()} for index in range(number)]


def made_of(
    name: str, values: Mapping[int, Any], rank: int | None, how: Joining | None, dim: int
) -> Any:
    """Make of an expression's values what was asked for: a list, one of them, or one of all."""
    if rank is not None:
        return values[rank]
    return [*values.values()] if how is None else join(how, name, values, dim)


def refusal(session: Session, found: Mapping[int, Brought]) -> UsageError | None:
    """Say who lacks what, and who has it; None where all ranks have values."""
    lacking = {rank: each for rank, each in found.items() if each.packed is None}
    if not lacking:
        return None
    missing = next((each.missing for each in lacking.values() if each.missing), "")
    if missing:
        return UsageError(_missing_text(session, missing, found))
    problems = fold_ranks({rank: (each.of, each.problem) for rank, each in lacking.items()})
    (of, problem), ranks = next(iter(problems.items()))
    more = f" (and {len(problems) - 1} other problems)" if len(problems) > 1 else ""
    return UsageError(f"`{of}` on {name_ranks(ranks)}: {one_line(problem).rstrip('.')}{more}.")


def _missing_text(session: Session, name: str, found: Mapping[int, Brought]) -> str:
    lack = [rank for rank, each in found.items() if each.missing == name]
    had = session.names.ranks_that_own(name) | session.names.ranks_that_have(name)
    have = {rank for rank, each in found.items() if each.packed is not None}
    have |= {rank for rank in had if rank not in found}
    if have:
        options = f"`-r {format_ranks(have)}`"
        verb = "has" if len(have) == 1 else "have"
        return (
            f"{name_ranks(lack)} {_has_no(lack)} `{name}`; {name_ranks(have)} {verb} it: {options}."
        )
    everyone = len(lack) == session.size
    who = "no rank has" if everyone else f"{name_ranks(lack)} {_has_no(lack)}"
    here = ""
    if name in session.namespace and name not in WORKERS_OWN:
        here = f"; the notebook has it: `%dist_push {name}`"
    known = [each for rank in found for each in session.names.bound(rank)]
    return f"{who} `{name}`{here}.{'' if here else did_you_mean(name, known)}"


def _has_no(ranks: Iterable[int]) -> str:
    return "has no" if len([*ranks]) == 1 else "have no"
