"""The variables that every rank must have after a user's actions: the manual's rules, in numbers.

`tests.faults.actions` compares all ranks with the oracle after each of its actions.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Kind:
    """The source code with which cells bind, change and read a variable of a kind.

    `bind` gives the variable the number `{v}` in each of `size` places, `change` adds 1 to each of
    them, and `read` is an expression for the list of these numbers.
    """

    size: int
    bind: str
    change: str
    read: str
    changes_in_place: bool = True
    names: tuple[str, ...] = ()


KINDS = {
    "number": Kind(1, "number = {v}", "number += 1", "[number]", changes_in_place=False),
    "items": Kind(2, "items = [{v}, {v}]", "items[:] = [each + 1 for each in items]", "items"),
    "tensor": Kind(3, "tensor = torch.full((3,), {v})", "tensor.add_(1)", "tensor.tolist()"),
    "give": Kind(
        1,
        "give = lambda by={v}: by",
        "give = (lambda now: lambda by=now: by)(give() + 1)",
        "[give()]",
        changes_in_place=False,
    ),
    "model": Kind(
        3,
        "model = torch.nn.Linear(2, 1, bias=False); torch.nn.init.constant_(model.weight, {v}); "
        "opt = torch.optim.SGD(model.parameters(), lr=1); "
        "opt.state[model.weight]['steps'] = torch.tensor({v})",
        "model.weight.grad = -torch.ones(1, 2); opt.step(); opt.state[model.weight]['steps'] += 1",
        "[*model.weight.tolist()[0], opt.state[model.weight]['steps'].item()]",
        names=("model", "opt"),
    ),
}


def names_of(kinds: Iterable[str]) -> list[str]:
    """List the variables of some kinds; a model and its optimizer belong together."""
    return [name for kind in kinds for name in KINDS[kind].names or (kind,)]


def kind_with(name: str) -> str:
    """Return the kind that a variable belongs to."""
    return next(kind for kind in KINDS if name in names_of([kind]))


class Here(NamedTuple):
    """A variable of the notebook; `number` tells its object from all others."""

    value: list[int]
    number: int


@dataclass
class Held:
    """A variable of a rank.

    `is_own` is True if a task has bound the variable there. `counterpart_of` is the number of the
    notebook's object whose counterpart the variable is, 0 for none; `received` is the value that
    came, and `known` the value that the notebook has sent, None if the notebook knows none.
    `is_old` is True once the notebook has bound the name again, so that a cell which uses the name
    brings the notebook's new object.
    """

    value: list[int]
    is_own: bool = True
    counterpart_of: int = 0
    received: list[int] | None = None
    known: list[int] | None = None
    is_old: bool = False

    @property
    def is_changed(self) -> bool:
        """Whether the rank has changed the received value."""
        return self.value != self.received


Ranks = list[dict[str, Held]]


@dataclass
class Oracle:
    """The variables of all `ranks`, those `here` in the notebook, and those `saved`; all by kind.

    `pids` are the ranks' processes, 0 for a new one. Three fields have what nbdist must report:
    `lost` has by rank the names that are gone, `replaced` the kinds for which the notebook's
    variable has replaced a rank's, and `kept` the kinds that both sides have changed.

    The keys of `theirs` are the numbers of those objects of the notebook of which ranks keep their
    own version; its values are the notebook's values about which nbdist has shown a line, None
    before the first line. `changed` has the numbers of the objects that ranks are known to have
    changed. `missing` has by rank the kinds that are not sent to the rank because its process is
    new.
    """

    ranks: Ranks
    pids: list[int]
    here: dict[str, Here] = field(default_factory=dict)
    saved: Ranks = field(default_factory=list)
    lost: dict[int, set[str]] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    theirs: dict[int, list[int] | None] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    missing: dict[int, set[str]] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def everyone(self) -> range:
        """The numbers of all ranks."""
        return range(len(self.ranks))

    @property
    def values(self) -> list[dict[str, list[int]]]:
        """The values that a look at all ranks must find."""
        return [{kind: held.value for kind, held in has.items()} for has in self.ranks]

    def own(self, rank: int) -> dict[str, Held]:
        """Return the variables that the rank has bound, and those that ranks have changed."""
        return {
            kind: held
            for kind, held in self.ranks[rank].items()
            if held.is_own or held.counterpart_of in self.changed
        }

    def note_changes(self, on: Iterable[int]) -> None:
        """Let nbdist ask some ranks which of the notebook's objects they have changed."""
        for held in (held for rank in on for held in self.ranks[rank].values()):
            if held.counterpart_of and held.known is not None and held.is_changed:
                self.changed.add(held.counterpart_of)

    def give(self, kind: str, values: Mapping[int, list[int]]) -> None:
        """Let some ranks bind a variable of their own."""
        for rank, value in values.items():
            self._put(rank, kind, Held(value))

    def _put(self, rank: int, kind: str, held: Held) -> None:
        self.ranks[rank][kind] = held
        self.missing.get(rank, set()).discard(kind)

    def _send(self, kind: str, rank: int) -> None:
        now = self.here[kind]
        self._put(
            rank,
            kind,
            Held(
                now.value,
                is_own=False,
                counterpart_of=now.number,
                received=now.value,
                known=now.value,
            ),
        )

    def push(self, kind: str, on: Iterable[int]) -> None:
        """Give the ranks `on` the notebook's variable, even if they have changed theirs."""
        for rank in on:
            self._send(kind, rank)
        self.theirs.pop(self.here[kind].number, None)
        self.changed.discard(self.here[kind].number)

    def begin(self, on: Collection[int]) -> None:
        """Let a cell be sent, which brings the notebook's changes and deletions.

        A variable that both sides have changed stays the ranks', and nbdist says so.
        """
        for kind, now in self.here.items():
            there = [self.ranks[rank][kind] for rank in on if kind in self.ranks[rank]]
            have = [each for each in there if each.counterpart_of == now.number]
            older = [each for each in have if each.known not in (None, now.value)]
            if any(each.is_changed for each in older):
                self.changed.add(now.number)
                self.theirs.setdefault(now.number, None)
            if now.number not in self.theirs:
                for each in older:
                    each.value = each.received = each.known = now.value
            elif older and self.theirs[now.number] != now.value:
                self.theirs[now.number] = now.value
                self.kept.add(kind)
        for rank in on:
            for kind, held in [*self.ranks[rank].items()]:
                if kind in self.here or held.is_own:
                    continue
                if held.is_changed:
                    self.ranks[rank][kind] = Held(held.value)
                else:
                    del self.ranks[rank][kind]

    def use(self, kinds: Sequence[str], on: Sequence[int]) -> None:
        """Let a cell use some kinds: ranks that lack the notebook's object get it.

        A variable that any rank has bound stays the ranks', until the notebook binds the name.
        """
        self.begin(on)
        for kind in kinds:
            has = {rank: each[kind] for rank, each in enumerate(self.ranks) if kind in each}
            is_theirs = any(held.is_own and not held.is_old for held in has.values())
            if kind not in self.here or is_theirs:
                continue
            number = self.here[kind].number
            have = {r for r, each in has.items() if each.counterpart_of == number}
            have = {rank for rank in have if not has[rank].is_own}
            lack = {*on} - have
            if lack and any(has[rank].is_changed for rank in have):
                self.changed.add(number)
                lack = {rank for rank in lack if kind not in self.missing.get(rank, ())}
            for rank in lack:
                if rank in has and (has[rank].is_own or has[rank].is_changed):
                    self.replaced.add(kind)
                self._send(kind, rank)

    def change(self, kinds: Sequence[str], on: Sequence[int]) -> None:
        """Let a cell use some kinds, and count up the variables that ranks have."""
        self.use(kinds, on)
        self.count_up(kinds, on)

    def count_up(self, kinds: Sequence[str], on: Sequence[int]) -> None:
        """Let a cell that was sent before add 1 to the variables that ranks have."""
        for kind, rank in ((kind, rank) for kind in kinds for rank in on):
            if (held := self.ranks[rank].get(kind)) is None:
                continue
            held.value = [number + 1 for number in held.value]
            if not KINDS[kind].changes_in_place:
                self.give(kind, {rank: held.value})

    def forget(self, kinds: Sequence[str], on: Sequence[int]) -> None:
        """Let a cell delete the variables of some kinds."""
        self.use(kinds, on)
        for kind, rank in ((kind, rank) for kind in kinds for rank in on):
            self.ranks[rank].pop(kind, None)

    def bind_here(self, kind: str, value: list[int] | None, *, in_place: bool = False) -> None:
        """Let the notebook bind a variable, delete it, or change it in place."""
        before = self.here.pop(kind, None)
        if in_place:
            assert value is not None
            assert before is not None
            self.here[kind] = before._replace(value=value)
            return
        if value is not None:
            self.here[kind] = Here(value, next(self.numbers))
        for has in self.ranks:
            if kind in has:
                has[kind].is_old = True

    def read_here(self, kind: str) -> None:
        """Let a plain cell read a variable: nbdist asks all ranks for changes if any got it."""
        if any(kind in has and not has[kind].is_own for has in self.ranks):
            self.note_changes(self.everyone)

    def sync(self, kind: str, source: int, wants: Collection[int]) -> None:
        """Copy a variable from rank `source` to the ranks `wants`; all of them own it then."""
        there = self.ranks[source][kind]
        for rank in wants:
            held, before = replace(there, is_own=True, is_old=False), self.ranks[rank].get(kind)
            if before is not None and not there.counterpart_of:
                held = replace(before, value=there.value, is_own=True, is_old=False)
            self._put(rank, kind, held)
        self.ranks[source][kind] = replace(there, is_own=True, is_old=False)

    def lose(
        self, ranks: Collection[int], keep: Sequence[str] = (), *, at_rest: bool = False
    ) -> None:
        """Give some ranks new processes, which have only the variables `keep`.

        With `at_rest` nbdist asks all ranks for their changes before; otherwise only the ranks that
        stay.
        """
        left = [rank for rank in self.everyone if rank not in ranks]
        self.note_changes(self.everyone if at_rest else left)
        changed = self._changed_kinds(left)
        for rank in ranks:
            had, has = self.own(rank), self.ranks[rank]
            self.lost[rank] = {*names_of(had.keys() - {*keep})}
            own = {kind for kind, held in had.items() if held.is_own}
            # A variable that the rank never had is sent to the new process as to any rank.
            lacks = self.missing.get(rank, set()) | own | (changed & has.keys())
            self.missing[rank] = lacks - {*keep}
            self.ranks[rank] = {
                kind: replace(has[kind], is_own=True, is_old=False) for kind in keep
            }
            self.pids[rank] = 0

    def _changed_kinds(self, on: Iterable[int]) -> set[str]:
        """Return the kinds sent by the notebook to any of these ranks, and changed by ranks."""
        return {
            kind
            for rank in on
            for kind, held in self.ranks[rank].items()
            if not held.is_own and held.counterpart_of in self.changed
        }

    def start_anew(self, keep: Sequence[str]) -> None:
        """Make all ranks new processes with only `keep`; nothing else is known of the past."""
        self.ranks = [
            {kind: replace(has[kind], is_own=True, is_old=False) for kind in keep}
            for has in self.ranks
        ]
        self.pids = [0 for _ in self.ranks]
        self.theirs, self.changed, self.missing = {}, set(), {}

    def scale(self, size: int, stay: Sequence[int]) -> None:
        """Change the number of ranks to `size`; the ranks `stay` become the first."""
        had = [
            *self.missing.values(),
            *({*filter(lambda k: has[k].is_own, has)} for has in self.ranks),
        ]
        before = self.missing
        self.missing = {new: before.get(old, set()) for new, old in enumerate(stay)}
        self.ranks = [self.ranks[rank] for rank in stay]
        self.pids = [self.pids[rank] for rank in stay]
        if new := range(len(stay), size):
            self.note_changes(self.everyone)
            lacks = set[str]().union(*had, self._changed_kinds(self.everyone))
            self.missing |= {rank: {*lacks} for rank in new}
            self.ranks += [{} for _ in new]
            self.pids += [0 for _ in new]

    def snapshot(self) -> bool:
        """Save the ranks' own variables; return False if no rank has any."""
        self.note_changes(self.everyone)
        own = [self.own(rank) for rank in self.everyone]
        if any(own):
            self.saved = deepcopy(own)
        return any(own)

    def restore(self, source: int | None) -> None:
        """Give all ranks their saved variables, or all of them those saved by rank `source`."""
        for rank, has in enumerate(self.ranks):
            for kind, saved in self.saved[rank if source is None else source].items():
                held, before = replace(saved, is_own=True, is_old=False, known=None), has.get(kind)
                if before is not None and before.counterpart_of == saved.counterpart_of:
                    held.known = before.known
                elif before is not None and not saved.counterpart_of:
                    held = replace(before, value=saved.value, is_own=True, is_old=False)
                self._put(rank, kind, held)

    def copy(self) -> Oracle:
        """Copy the oracle, for an action that may do nothing after all."""
        return deepcopy(self)
