"""Values that the notebook asks for, as one payload that stays here until it has been read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbdist.errors import NotEnoughMemory
from nbdist.values.unpicklable import fails_in
from nbdist.wire.ops import Brought
from nbdist.worker.homeward import Homeward

if TYPE_CHECKING:
    from nbdist.worker.op import Context


def gather(context: Context, expressions: Sequence[str], *, joins: bool = False) -> Brought:
    """Pack the values of names, or expressions, together: what they share they go on sharing.

    What is spread over ranks they put together where all of them are asked again, with `joins`.
    What keeps a value from being had is no error of the task's: the notebook puts together
    what all ranks say.
    """
    values = []
    for expression in expressions:
        try:
            values.append(eval(expression, context.names))
        except NameError as error:
            return Brought(expression, missing=error.name or "")
        except Exception as error:  # noqa: BLE001 (the expression is the user's)
            return Brought(expression, problem=f"{type(error).__name__}: {error}")
    home = Homeward(notes=not joins, joins=joins)
    try:
        packed = context.lend(values, home)
    except NotEnoughMemory as error:
        return Brought(expressions[0], problem=f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 (a user's __reduce__ can raise anything)
        number, of = _first_to_blame(context, values)
        path, kind, why = context.namespace.blame(expressions[number], of, error)
        part = "it" if path == expressions[number] else f"`{path}`"
        problem = f"{part} ({kind}) cannot be sent to the notebook: {why}"
        return Brought(expressions[number], problem=problem)
    if home.spread:
        context.namespace.let_go(context.task_id)
        return Brought(" ".join(expressions), spread=tuple(home.spread))
    return Brought(packed=packed)


def last_value(context: Context, of: str) -> Brought:
    """Lend the last value of a cell, which was kept under the id of its task."""
    return context.namespace.lend_kept(of, context.task_id)


def _first_to_blame(context: Context, values: Sequence[object]) -> tuple[int, object]:
    fails = fails_in(context.names)
    return next((each for each in enumerate(values) if fails(each[1])), (0, values[0]))
