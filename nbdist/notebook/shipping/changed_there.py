"""What is said of variables that ranks have changed in place since they were sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from nbdist.values.identity import OPTIMIZER, kind_of
from nbdist.words import name_ranks


def done_there(name: str, value: Any, ranks: Collection[int], all_ranks: Collection[int]) -> str:
    """Write `model was trained on the ranks since it was sent`."""
    verb = "trained" if kind_of(value) <= OPTIMIZER else "changed"
    where = "the ranks" if {*ranks} >= {*all_ranks} else name_ranks(ranks)
    return f"{name} was {verb} on {where} since it was sent"


def not_sent_text(done: str, names: Sequence[str]) -> str:
    """Say that the notebook's change was not sent; `names` are to be pushed together."""
    push, it = " ".join(names), "it" if len(names) == 1 else "them"
    return (
        f"{done}; the notebook's change was not sent: `%dist_push {push}` sends {it}, "
        f"`%dist_gather {names[0]}` brings theirs"
    )


def lacking_text(done: str, name: str, ranks: Collection[int], without: Collection[int]) -> str:
    """Say that other ranks lack it, and which two ways there are for them to get it."""
    verb = "does" if len(without) == 1 else "do"
    return (
        f"{done}; {name_ranks(without)} {verb} not have it: "
        f"`%dist_sync {name} --from {min(ranks)}` copies it, `%dist_push {name}` sends the "
        "notebook's"
    )


def sharing_text(done: str, name: str, names: Sequence[str]) -> str:
    """Say that another variable was not sent, as it shares objects with this one."""
    return (
        f"{done}; `{name}` shares objects with it and was not sent: "
        f"`%dist_push {' '.join(names)}` sends them"
    )
