"""What every rank has to have after what a user does: the manual's rules, in plain numbers.

`tests.faults.actions` asks it after each of its actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kind:
    """A variable that `bind` makes of `{v}` and `change` counts up; `read` gives `size` numbers."""

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
    """List the variables; a model and its optimizer go together."""
    return [name for kind in kinds for name in KINDS[kind].names or (kind,)]


@dataclass
class Held:
    """What a rank has under a name: its own, or as it was `sent` by the notebook.

    It `is_old` once the notebook has bound the name again: the next cell to use it brings that.
    """

    value: list[int]
    sent: list[int] | None = None
    is_old: bool = False


Ranks = list[dict[str, Held]]


@dataclass
class Oracle:
    """What `ranks` have, what is `here` in the notebook, what was `saved`; all by kind.

    `pids` are the ranks' processes, 0 of new ones; `lost` has the variables that nbdist has to
    name, by rank.
    """

    ranks: Ranks
    pids: list[int]
    here: dict[str, list[int]] = field(default_factory=dict)
    saved: Ranks = field(default_factory=list)
    lost: dict[int, set[str]] = field(default_factory=dict)

    @property
    def everyone(self) -> range:
        """All ranks."""
        return range(len(self.ranks))

    @property
    def values(self) -> list[dict[str, list[int]]]:
        """What a look at all ranks has to find."""
        return [{kind: held.value for kind, held in has.items()} for has in self.ranks]

    @property
    def own(self) -> Ranks:
        """What a snapshot has: all that ranks have bound or changed themselves."""
        return [
            {kind: Held(held.value) for kind, held in has.items() if held.sent is None}
            for has in self.ranks
        ]

    def give(self, kind: str, values: Mapping[int, list[int]]) -> None:
        """Have these ranks have a variable of their own."""
        for rank, value in values.items():
            self.ranks[rank][kind] = Held(value)

    def send(self, kind: str, on: Iterable[int]) -> None:
        """Have these ranks have what the notebook has."""
        for rank in on:
            self.ranks[rank][kind] = Held(self.here[kind], self.here[kind])

    def use(self, kinds: Sequence[str], on: Sequence[int]) -> None:
        """Have a cell use these: they are sent where ranks lack what the notebook has.

        But where a rank has its own, or has changed in place what it was sent, it is theirs.
        """
        for kind in kinds:
            has = {rank: each[kind] for rank, each in enumerate(self.ranks) if kind in each}
            now = self.here.get(kind)
            is_theirs = any(held.sent is None and not held.is_old for held in has.values())
            lacking = [r for r in on if r not in has or has[r].is_old or has[r].sent != now]
            if now is None or is_theirs or not lacking:
                continue
            holders = {rank: held for rank, held in has.items() if not held.is_old}
            changed = [r for r, held in holders.items() if r in on and held.value != held.sent]
            if changed and KINDS[kind].changes_in_place:
                for held in holders.values():
                    held.sent = None
            else:
                self.send(kind, lacking)

    def change(self, kinds: Sequence[str], on: Sequence[int]) -> None:
        """Have a cell use these, and count up those that ranks have."""
        self.use(kinds, on)
        for kind, has in ((kind, self.ranks[rank]) for kind in kinds for rank in on):
            if kind in has:
                has[kind].value = [number + 1 for number in has[kind].value]
                if not KINDS[kind].changes_in_place:
                    has[kind] = Held(has[kind].value)

    def forget(self, kinds: Sequence[str], on: Sequence[int]) -> None:
        """Have a cell delete these."""
        self.use(kinds, on)
        for kind, rank in ((kind, rank) for kind in kinds for rank in on):
            self.ranks[rank].pop(kind, None)

    def bind_here(self, kind: str, value: list[int] | None, *, in_place: bool = False) -> None:
        """Have the notebook bind this, delete it, or change it in place."""
        if value is None:
            del self.here[kind]
        else:
            self.here[kind] = value
        for has in self.ranks:
            if kind in has and not in_place:
                has[kind].is_old = True

    def lose(self, ranks: Iterable[int], keep: Sequence[str] = ()) -> None:
        """Have these be new processes, with what is kept."""
        for rank in ranks:
            kept = {kind: Held(self.ranks[rank][kind].value) for kind in keep}
            self.lost[rank] = {*names_of(self.own[rank].keys() - kept.keys())}
            self.ranks[rank], self.pids[rank] = kept, 0

    def scale(self, size: int, stay: Sequence[int]) -> None:
        """Have so many ranks, of which these are the first."""
        new = size - len(stay)
        self.ranks = [self.ranks[rank] for rank in stay] + [{} for _ in range(new)]
        self.pids = [self.pids[rank] for rank in stay] + [0] * new

    def restore(self, source: int | None) -> None:
        """Have all ranks have what they had, or what one had."""
        for rank, has in enumerate(self.ranks):
            saved = self.saved[rank if source is None else source]
            has.update({kind: Held(held.value) for kind, held in saved.items()})

    def copy(self) -> Ranks:
        """Copy what ranks have, for an action that may do nothing after all."""
        return deepcopy(self.ranks)
