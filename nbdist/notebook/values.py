"""What the last line of a cell gave on each rank; big values come when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from functools import partial
from typing import TYPE_CHECKING, Any

from nbdist.errors import ValueLost
from nbdist.output.wording import fold_ranks
from nbdist.values.payload import open_payload
from nbdist.values.pickling import unpickle
from nbdist.wire.work import Call, Task
from nbdist.words import one_line, size_text

if TYPE_CHECKING:
    from IPython.lib.pretty import RepresentationPrinter

    from nbdist.wire.ops import Brought
    from nbdist.world.running import RunningTask
    from nbdist.world.session import Session

Bring = Callable[[tuple[int, ...]], Mapping[int, Any]]
"""Brings the values of these ranks."""


class LastValues(Mapping[int, Any]):
    """By rank; each is brought once, and all that are missing together where all are wanted."""

    def __init__(self, here: Mapping[int, Any], elsewhere: Mapping[int, str], bring: Bring) -> None:
        """`elsewhere` has for each value that is not here what is shown in its place."""
        self._ranks = tuple(sorted({*here, *elsewhere}))
        self._bring = bring
        self._here = {**here}
        self._elsewhere = {rank: _Elsewhere(text) for rank, text in elsewhere.items()}

    def __repr__(self) -> str:
        return repr(self._shown())

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:  # noqa: FBT001
        """Show them; called by IPython, also for a result that has them."""
        printer.text("{...}") if cycle else printer.pretty(self._shown())

    def _shown(self) -> dict[int, Any]:
        """Have in place of values that are not here what there is to see of them."""
        return {rank: self._here.get(rank, self._elsewhere.get(rank)) for rank in self._ranks}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)

    def __getitem__(self, rank: int) -> Any:
        if rank not in self._ranks:
            raise KeyError(rank)
        self._want(rank)
        return self._here[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def values(self) -> ValuesView[Any]:
        """Bring them all."""
        self._want(*self._ranks)
        return super().values()

    def items(self) -> ItemsView[int, Any]:
        """Bring them all."""
        self._want(*self._ranks)
        return super().items()

    def _want(self, *ranks: int) -> None:
        if missing := tuple(rank for rank in ranks if rank not in self._here):
            self._here.update(self._bring(missing))


class _Elsewhere(str):
    """Shown as it is, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:  # noqa: FBT001
        printer.text(str(self))


def last_values(
    session: Session, running: RunningTask, bring: Callable[[Task], Mapping[int, Brought]]
) -> LastValues:
    """Read those that came along with the end of a cell; `bring` runs a task for the others."""
    here: dict[int, Any] = {}
    elsewhere: dict[int, str] = {}
    unread: dict[int, str] = {}
    for track in running.transcript:
        if (done := track.done) is None or done.status != "ok":
            continue
        if done.kept is not None:
            size = f"{size_text(done.kept)}, " if done.kept else ""
            elsewhere[track.rank] = f"<{size}still on the rank>"
            continue
        try:
            here[track.rank] = running.value(done)
        except Exception as error:  # noqa: BLE001 (a class can raise anything while it is rebuilt)
            said = one_line(f"{type(error).__name__}: {error}")
            unread[track.rank] = f"cannot be read in the notebook: {said}"
            elsewhere[track.rank] = f"<{unread[track.rank]}>"
    return LastValues(here, elsewhere, partial(_brought, session, running, bring, unread))


def _brought(
    session: Session,
    running: RunningTask,
    bring: Callable[[Task], Mapping[int, Brought]],
    unread: Mapping[int, str],
    ranks: tuple[int, ...],
) -> dict[int, Any]:
    """Bring what these ranks have kept; ValueLost where one has not."""
    if problem := next((unread[rank] for rank in ranks if rank in unread), ""):
        raise ValueLost((rank for rank in ranks if unread.get(rank) == problem), problem)
    pids = session.pids
    if new := [rank for rank in ranks if pids.get(rank) != running.crew.pids.get(rank)]:
        raise ValueLost(new, "is gone with its worker")
    task = session.task(Call("values.last_value", {"of": running.task.id}), ranks=ranks)
    found = bring(task)
    packed = {rank: each.packed for rank, each in found.items() if each.packed is not None}
    try:
        lacking = {rank: each.problem for rank, each in found.items() if each.problem}
        if lacking:
            problem, lack = next(iter(fold_ranks(lacking).items()))
            raise ValueLost(lack, problem)
        return {
            rank: unpickle(open_payload(each), session.namespace) for rank, each in packed.items()
        }
    finally:
        session.let_go_of(task, packed)
        session.let_go_of(running.task, packed)
